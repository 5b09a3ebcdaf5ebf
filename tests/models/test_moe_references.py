"""Logits and gradients equal those of Hugging Face's mixtures of experts, in float32."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from dtron.models.config import DecoderConfig
from dtron.models.decoder import Decoder
from dtron.models.router import routers
from tests.models.build import initialized, small_config, tokens, varied

transformers = pytest.importorskip("transformers", minversion="5.0")

PLAIN: dict[str, Any] = {"balance": "none", "balance_coefficient": 0.0}
ROOT = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.wkv_b.weight": "self_attn.kv_b_proj.weight",
    "attn.sinks.weight": "self_attn.sinks",
    **{
        f"attn.w{w}.{kind}": f"self_attn.{w}_proj.{kind}"
        for w in "qkvo"
        for kind in ("weight", "bias")
    },
    **{f"ffn.{w}.weight": f"mlp.{w}_proj.weight" for w in ("gate", "up", "down")},
    **{
        f"ffn.shared.{w}.weight": f"mlp.shared_experts.{w}_proj.weight"
        for w in ("gate", "up", "down")
    },
    "ffn.router.weight": "mlp.gate.weight",
    "ffn.router.bias": "mlp.gate.bias",
    "ffn.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "ffn.experts.down": "mlp.experts.down_proj",
    "ffn.experts.down_bias": "mlp.experts.down_proj_bias",
}


def interleaved(rows: Tensor) -> Tensor:
    """Rows that rotate halves against each other -> those that rotate even against odd ones."""
    return rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)


def unrotated(config: DecoderConfig, name: str, value: Tensor) -> Tensor:
    """Rows of latent attention in the order of the releases."""
    if name.endswith(("attn.wq.weight", "attn.wq_b.weight")) and config.kv_lora_rank:
        heads = value.unflatten(0, (config.n_heads, -1))
        plain, rotated = heads.split([config.nope_head_dim, config.rope_head_dim], dim=1)
        return torch.cat([plain, interleaved(rotated)], dim=1).flatten(0, 1)
    if name.endswith("attn.wkv_a.weight"):
        plain, rotated = value.split([config.kv_lora_rank, config.rope_head_dim])
        return torch.cat([plain, interleaved(rotated)])
    return value


def translated(config: DecoderConfig, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or their gradients, under Hugging Face's names and in its shapes."""
    out = {}
    for fqn, value in values.items():
        path, kind = fqn.rsplit(".", 1)
        if path in ROOT:
            out[f"{ROOT[path]}.{kind}"] = value
            continue
        _, layer, name = fqn.split(".", 2)
        if name in NAMES:
            out[f"model.layers.{layer}.{NAMES[name]}"] = unrotated(config, name, value)
        else:  # gate and up are one matrix; the other half is looked up
            assert name.startswith(("ffn.experts.gate", "ffn.experts.up")), name
            gate, up = (
                values[
                    fqn.replace("experts.gate", f"experts.{w}").replace(
                        "experts.up", f"experts.{w}"
                    )
                ]
                for w in ("gate", "up")
            )
            suffix = "_bias" if name.endswith("_bias") else ""
            out[f"model.layers.{layer}.mlp.experts.gate_up_proj{suffix}"] = torch.cat([gate, up], 1)
    return out


def as_gpt_oss(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss stores experts transposed, gate and up in turn, and names its router otherwise."""
    out = {}
    for name, value in weights.items():
        if "gate_up" in name:
            value = torch.stack(value.chunk(2, 1), 2).flatten(1, 2)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            value = value.transpose(1, 2)
        out[name.replace("mlp.gate.", "mlp.router.")] = value
    return out


def common(config: DecoderConfig, **more: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling == "yarn":
        rope = {
            "rope_type": "yarn",
            "rope_theta": config.rope_theta,
            "factor": config.rope_scaling_factor,
            "original_max_position_embeddings": config.rope_original_context,
            "truncate": config.rope_truncate,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "num_experts_per_tok": config.experts_per_token,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "attn_implementation": "eager",
        **more,
    }


def mixtral() -> tuple[Decoder, Any]:
    config = small_config("mixtral", **PLAIN)
    sizes = common(config, head_dim=16, intermediate_size=32, num_local_experts=8)
    reference = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    return varied(initialized("mixtral", config)), reference


def qwen3_moe() -> tuple[Decoder, Any]:
    config = small_config("qwen3_moe", **PLAIN, n_kv_heads=2)
    sizes = common(
        config, head_dim=16, moe_intermediate_size=32, num_experts=8, norm_topk_prob=True
    )
    reference = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    return varied(initialized("qwen3_moe", config)), reference


def deepseek_v3(**override: Any) -> tuple[Decoder, Any]:
    config = small_config("deepseek_v3", **PLAIN, n_layers=3, **override)
    sizes = common(
        config,
        intermediate_size=config.ffn_dim,
        moe_intermediate_size=config.expert_dim,
        n_routed_experts=config.n_experts,
        n_shared_experts=config.n_shared_experts,
        first_k_dense_replace=config.first_dense_layers,
        n_group=config.n_groups,
        topk_group=config.top_groups,
        norm_topk_prob=config.renormalize,
        routed_scaling_factor=config.routed_scaling,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank or None,
        qk_nope_head_dim=config.nope_head_dim,
        qk_rope_head_dim=config.rope_head_dim,
        v_head_dim=config.v_head_dim,
    )
    if config.rope_scaling == "yarn":
        mscales = {k: getattr(config, f"rope_{k}") for k in ("mscale", "mscale_all_dim")}
        sizes["rope_parameters"] |= mscales
    reference = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))
    model = varied(initialized("deepseek_v3", config))
    for router in routers([model]):
        router.expert_bias = 0.2 * torch.randn(8, generator=torch.Generator().manual_seed(2))
    return model, reference


def gpt_oss() -> tuple[Decoder, Any]:
    config = small_config("gpt_oss", **PLAIN, rope_original_context=32)
    sizes = common(
        config,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=8,
        sliding_window=config.window,
        max_position_embeddings=1024,
    )
    reference = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    return varied(initialized("gpt_oss", config)), reference


EXTENDED = {
    "rope_scaling": "yarn",
    "rope_scaling_factor": 40.0,
    "rope_original_context": 32,
    "rope_mscale": 1.0,
    "rope_mscale_all_dim": 0.7,
}
CASES = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "deepseek_v3 as Moonlight": lambda: deepseek_v3(q_lora_rank=0, n_groups=1, top_groups=1),
    "deepseek_v3 with YaRN": lambda: deepseek_v3(**EXTENDED),
    "gpt_oss": gpt_oss,
}


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients(name: str) -> None:
    model, reference = CASES[name]()
    convert = as_gpt_oss if name == "gpt_oss" else dict
    config, state = model.config, model.state_dict()
    missing, unexpected = reference.load_state_dict(
        convert(translated(config, state)), strict=False
    )
    assert not unexpected
    assert not [name for name in missing if "rotary" not in name]
    x = tokens(length=48)
    logits, wanted = model(x), reference.eval()(x).logits
    assert error(logits, wanted) < 1e-5
    target = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    (logits * target).sum().backward()
    (wanted * target).sum().backward()
    gradients = {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    found = convert(translated(config, gradients))
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert set(found) == set(expected)
    norm = torch.stack([g.norm() for g in expected.values()]).norm() / len(expected) ** 0.5
    for fqn, gradient in expected.items():
        assert (found[fqn] - gradient).norm() < 2e-5 * max(gradient.norm(), 1e-2 * norm), fqn


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        ("deepseek_v3", "671b", "DeepseekV3"),
        ("gpt_oss", "120b", "GptOss"),
        ("mixtral", "8x7b", "Mixtral"),
        ("qwen3_5_moe", "35b-a3b", "Qwen3_5Moe"),
    ],
)
def test_sizes_are_those_of_the_released_configurations(name: str, size: str, kind: str) -> None:
    """Which are the defaults of Hugging Face's."""
    from dtron.models import model_config
    from dtron.models.flops import n_parameters

    with torch.device("meta"):
        suffix = "TextConfig" if kind == "Qwen3_5Moe" else "Config"
        config = getattr(transformers, kind + suffix)()
        reference = getattr(transformers, f"{kind}ForCausalLM")(config)
    ours = model_config(name, size).model_copy(update={"mtp": 0})  # which transformers leaves out
    assert n_parameters(ours) == sum(p.numel() for p in reference.parameters())
