"""Logits equal those of Hugging Face's models with the same weights, in float32."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dtron.models.decoder import Decoder
from tests.models.build import initialized, small_config, tokens, varied

transformers = pytest.importorskip("transformers", minversion="5.0")

LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn.wq": "self_attn.q_proj",
    "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
LLAMA_ROOT = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
GPT_NAMES = {
    "attn_norm": "ln_1",
    "attn.wo": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
GPT_ROOT = {
    "embed": "transformer.wte",
    "position_embed": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


def llama_weights(model: Decoder) -> dict[str, Tensor]:
    weights = {}
    for fqn, weight in model.state_dict().items():
        path, kind = fqn.rsplit(".", 1)
        if path in LLAMA_ROOT:
            weights[f"{LLAMA_ROOT[path]}.{kind}"] = weight
        else:
            _, layer, module = path.split(".", 2)
            weights[f"model.layers.{layer}.{LLAMA_NAMES[module]}.{kind}"] = weight
    return weights


def transposed(weight: Tensor) -> Tensor:
    return weight.T if weight.ndim == 2 else weight


def gpt_weights(model: Decoder) -> dict[str, Tensor]:
    """GPT-2 stores linear weights transposed and q, k, v as one."""
    state, weights = model.state_dict(), {}
    for fqn, weight in state.items():
        path, kind = fqn.rsplit(".", 1)
        if path in GPT_ROOT:
            weights[f"{GPT_ROOT[path]}.{kind}"] = weight
            continue
        _, layer, module = path.split(".", 2)
        if module in GPT_NAMES:
            weights[f"transformer.h.{layer}.{GPT_NAMES[module]}.{kind}"] = transposed(weight)
    for layer in range(model.config.n_layers):
        for kind in ("weight", "bias"):
            parts = [state[f"blocks.{layer}.attn.{w}.{kind}"] for w in ("wq", "wk", "wv")]
            weights[f"transformer.h.{layer}.attn.c_attn.{kind}"] = transposed(torch.cat(parts))
    return weights


def assert_same_logits(model: Decoder, reference: Any, weights: dict[str, Tensor]) -> None:
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("rotary" in name or name.endswith("attn.bias") for name in missing)
    x = tokens(length=48)
    expected = reference.eval()(x).logits
    error = (model(x) - expected).norm() / expected.norm()
    assert error < 1e-5


def llama_like(config: Any, **more: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling_factor > 1:
        rope = {
            "rope_type": "llama3",
            "rope_theta": config.rope_theta,
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_context,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "rope_parameters": rope,
        "attn_implementation": "eager",
        **more,
    }


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scaling", [1.0, 8.0])
def test_llama(kv_heads, scaling):
    config = small_config(
        "llama",
        n_kv_heads=kv_heads,
        rope_theta=1000.0,
        rope_scaling_factor=scaling,
        rope_original_context=32,
        tied=kv_heads == 1,
    )
    model = varied(initialized("llama", config))
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_like(config)))
    assert_same_logits(model, reference, llama_weights(model))


def test_qwen3():
    config = small_config("qwen3", n_kv_heads=2, tied=False)
    model = varied(initialized("qwen3", config))
    reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**llama_like(config)))
    assert_same_logits(model, reference, llama_weights(model))


def test_gpt2():
    config = small_config("gpt", ffn_dim=256)
    model = varied(initialized("gpt", config))
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_seq_len,
            n_embd=config.dim,
            n_layer=config.n_layers,
            n_head=config.n_heads,
            activation_function="gelu_new",
            layer_norm_epsilon=config.norm_eps,
            attn_implementation="eager",
        )
    )
    assert_same_logits(model, reference, gpt_weights(model))
