"""DeepSeek-V3 and its family: latent attention, many small experts, shared experts.

    size    model                     router                           load balancing
    671b    DeepSeek-V3               sigmoid, 4 of 8 groups           bias, and a sequence loss
    16b     DeepSeek-V2-Lite          softmax, not renormalised        sequence loss
    236b    DeepSeek-V2               softmax, 3 of 8 groups           sequence loss
    16b-a3b Moonlight                 sigmoid                          bias, and a sequence loss

671b has one MTP block (`mtp`) of 11.61 B parameters, in addition to the 671.03 B of the main model.
DeepSeek-V2's device-level and communication balance losses are not implemented.

Sources: DeepSeek-V3, arXiv:2412.19437; DeepSeek-V2, arXiv:2405.04434; Moonlight, arXiv:2502.16982;
the released configurations.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import (
    BIAS_SPEED,
    CONTEXT,
    EXPERT_NAMES,
    KV_HEADS,
    LLAMA_BASE,
    LLAMA_DEFAULTS,
    LLAMA_IGNORED_TENSORS,
    LLAMA_NAMES,
    MOE_FIELDS,
    MOE_IGNORED_KEYS,
    HuggingFace,
    KeyConverter,
    WeightName,
    expert_groups,
    optional_key,
    read_rope,
    rope_converter,
)
from dtron.models.spec import ModelSpec

_HEADS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "nope_head_dim": 128,
    "rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_eps": 1e-6,
}
_EXTENDED: dict[str, Any] = {
    "rope_scaling": "yarn",
    "rope_scaling_factor": 40.0,
    "rope_original_context": 4096,
}
_LOSS_FREE: dict[str, Any] = {
    "router": "sigmoid",
    "renormalize": True,
    "bias_speed": 0.001,
    "balance": "sequence",
    "balance_coefficient": 0.0001,
}
_BY_LOSS: dict[str, Any] = {"balance": "sequence", "balance_coefficient": 0.003}

SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=4,
        ffn_dim=256,
        kv_lora_rank=32,
        q_lora_rank=48,
        nope_head_dim=32,
        rope_head_dim=16,
        v_head_dim=32,
        norm_eps=1e-6,
        n_experts=16,
        experts_per_token=4,
        expert_dim=48,
        first_dense_layers=1,
        n_shared_experts=1,
        n_groups=4,
        top_groups=2,
        routed_scaling=2.5,
        **_LOSS_FREE,
    ),
    "16b": DecoderConfig(
        vocab_size=102400,
        dim=2048,
        n_layers=27,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=10944,
        n_experts=64,
        experts_per_token=6,
        expert_dim=1408,
        first_dense_layers=1,
        n_shared_experts=2,
        rope_mscale=0.707,
        rope_mscale_all_dim=0.707,
        **_HEADS,
        **_EXTENDED,
        **{**_BY_LOSS, "balance_coefficient": 0.001},
    ),
    "16b-a3b": DecoderConfig(
        vocab_size=163840,
        dim=2048,
        n_layers=27,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=11264,
        n_experts=64,
        experts_per_token=6,
        expert_dim=1408,
        first_dense_layers=1,
        n_shared_experts=2,
        routed_scaling=2.446,
        rope_theta=50000.0,
        **{**_HEADS, "norm_eps": 1e-5},
        **_LOSS_FREE,
    ),
    "236b": DecoderConfig(
        vocab_size=102400,
        dim=5120,
        n_layers=60,
        n_heads=128,
        n_kv_heads=128,
        ffn_dim=12288,
        q_lora_rank=1536,
        n_experts=160,
        experts_per_token=6,
        expert_dim=1536,
        first_dense_layers=1,
        n_shared_experts=2,
        n_groups=8,
        top_groups=3,
        routed_scaling=16.0,
        rope_mscale=0.707,
        rope_mscale_all_dim=0.707,
        **_HEADS,
        **_EXTENDED,
        **_BY_LOSS,
    ),
    "671b": DecoderConfig(
        vocab_size=129280,
        dim=7168,
        n_layers=61,
        n_heads=128,
        n_kv_heads=128,
        ffn_dim=18432,
        q_lora_rank=1536,
        n_experts=256,
        experts_per_token=8,
        expert_dim=2048,
        first_dense_layers=3,
        n_shared_experts=1,
        n_groups=8,
        top_groups=4,
        routed_scaling=2.5,
        mtp=1,
        rope_mscale=1.0,
        rope_mscale_all_dim=1.0,
        **_HEADS,
        **_EXTENDED,
        **_LOSS_FREE,
    ),
}


def _halves(start: int, width: int) -> Iterator[int]:
    """Map rows for rotation by halves (GPT-NeoX style) to rows for interleaved rotation."""
    for i in range(width):
        yield start + 2 * i if i < width // 2 else start + 2 * i - width + 1


def _query_rows(config: DecoderConfig, n_rows: int) -> list[int]:
    """Return the rows of each head: first the rows without rotation, then the rotated rows."""
    rows: list[int] = []
    for start in range(0, n_rows, config.head_size):
        rotated = start + config.nope_head_dim
        rows += [*range(start, rotated), *_halves(rotated, config.rope_head_dim)]
    return rows


def _latent_rows(config: DecoderConfig, n_rows: int) -> list[int]:
    """Return the rows of the latent vector, then the rows of the rotated key."""
    latent = config.kv_lora_rank
    return [*range(latent), *_halves(latent, config.rope_head_dim)]


def _read_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Call `read_rope`; refuse an mscale_all_dim that `read_rope` ignores, but this model uses."""
    rope = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    explicit = rope.get("attention_factor") is not None
    if (whole := rope.get("mscale_all_dim")) and (explicit or not rope.get("mscale")):
        other = "with attention_factor" if explicit else "without mscale"
        raise CheckpointError(f"mscale_all_dim = {whole} {other} is not supported")
    return read_rope(given)


def _read_dense(given: Mapping[str, Any]) -> dict[str, Any]:
    first, width = given.get("first_k_dense_replace", 3), given.get("intermediate_size", 18432)
    return {"first_dense_layers": first, "ffn_dim": width if first else 0}


def _write_dense(config: DecoderConfig) -> dict[str, Any]:
    width = config.ffn_dim or config.expert_dim * config.experts_per_token  # used by no layer
    return {"first_k_dense_replace": config.first_dense_layers, "intermediate_size": width}


_MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


def _read_mtp(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"mtp": max(given.get(key) or 0 for key in _MTP_KEYS)}


def _write_mtp(config: DecoderConfig) -> dict[str, Any]:
    return {_MTP_KEYS[0]: config.mtp}


def _copies(config: DecoderConfig) -> dict[str, str]:
    """Return the copies of the embedding and the head that MTP layers store."""
    layers = [f"model.layers.{config.n_layers + i}" for i in range(config.mtp)]
    return {
        **{f"{layer}.embed_tokens.weight": "embed.weight" for layer in layers},
        **{f"{layer}.shared_head.head.weight": "head.weight" for layer in layers},
    }


HF = HuggingFace(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names=(
        WeightName("blocks.*.attn.wq", "model.layers.*.self_attn.q_proj", rows=_query_rows),
        WeightName("blocks.*.attn.wq_a", "model.layers.*.self_attn.q_a_proj"),
        WeightName("blocks.*.attn.q_a_norm", "model.layers.*.self_attn.q_a_layernorm"),
        WeightName("blocks.*.attn.wq_b", "model.layers.*.self_attn.q_b_proj", rows=_query_rows),
        WeightName(
            "blocks.*.attn.wkv_a",
            "model.layers.*.self_attn.kv_a_proj_with_mqa",
            rows=_latent_rows,
        ),
        WeightName("blocks.*.attn.kv_a_norm", "model.layers.*.self_attn.kv_a_layernorm"),
        WeightName("blocks.*.attn.wkv_b", "model.layers.*.self_attn.kv_b_proj"),
        WeightName("blocks.*.token_norm", "model.layers.*.enorm"),
        WeightName("blocks.*.hidden_norm", "model.layers.*.hnorm"),
        WeightName("blocks.*.merge", "model.layers.*.eh_proj"),
        WeightName("blocks.*.norm", "model.layers.*.shared_head.norm"),
        *LLAMA_NAMES,
        WeightName(
            "blocks.*.ffn.router.expert_bias",
            "model.layers.*.mlp.gate.e_score_correction_bias",
        ),
        WeightName("blocks.*.ffn.router", "model.layers.*.mlp.gate"),
        *EXPERT_NAMES,
        *(
            WeightName(f"blocks.*.ffn.shared.{w}", f"model.layers.*.mlp.shared_experts.{w}_proj")
            for w in ("gate", "up", "down")
        ),
    ),
    fields={
        **MOE_FIELDS,
        "moe_intermediate_size": "expert_dim",
        "n_routed_experts": "n_experts",
        "n_shared_experts": "n_shared_experts",
        "norm_topk_prob": "renormalize",
        "routed_scaling_factor": "routed_scaling",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "nope_head_dim",
        "qk_rope_head_dim": "rope_head_dim",
        "v_head_dim": "v_head_dim",
    },
    base={**LLAMA_BASE, "router": "sigmoid", "bias_speed": BIAS_SPEED},
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
    },
    defaults={**LLAMA_DEFAULTS, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    converters=(
        rope_converter(_read_rope),
        CONTEXT,
        KV_HEADS,
        KeyConverter(
            frozenset({"first_k_dense_replace", "intermediate_size"}), _read_dense, _write_dense
        ),
        expert_groups(8, 4),
        optional_key("q_lora_rank", "q_lora_rank", default=1536),
        KeyConverter(frozenset(_MTP_KEYS), _read_mtp, _write_mtp),
    ),
    # derived widths, and settings of training
    ignored_keys=MOE_IGNORED_KEYS
    | {"head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"},
    ignored_tensors=LLAMA_IGNORED_TENSORS,
    copies=_copies,
)

DEEPSEEK_V3 = ModelSpec("deepseek_v3", SIZES, hf=HF)
