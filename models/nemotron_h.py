"""Nemotron-H and Nemotron 3: Mamba-2, some attention, and feed-forward layers or experts.

    size       Mamba-2    attention    others             released model
    8b         24         4            24 feed-forward    Nemotron-H-8B
    9b         27         4            25 feed-forward    NVIDIA-Nemotron-Nano-9B-v2
    30b-a3b    23         6            23 with experts    NVIDIA-Nemotron-3-Nano-30B-A3B

Each layer is one of these alone, with one norm: x += layer(norm(x)). Attention has no positions.
The activation is squared ReLU, of experts too. The router is that of DeepSeek-V3.

Sources: the configuration class of transformers, the released configurations; Nemotron-H,
arXiv:2504.03624. transformers bounds time steps from below (`mamba_dt_min`); so does this model.
"""

from collections.abc import Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import (
    BIAS_SPEED,
    CONTEXT,
    KV_HEADS,
    HuggingFace,
    KeyConverter,
    RowOrder,
    WeightName,
    expert_groups,
)
from dtron.models.spec import ModelSpec

_ALL: dict[str, Any] = {
    "activation": "relu2",
    "positions": "none",
    "norm_eps": 1e-5,
    "mamba_groups": 8,
    "mamba_dt_min": 0.001,
}
_ROUTED: dict[str, Any] = {
    "n_shared_experts": 2,
    "router": "sigmoid",
    "renormalize": True,
    "routed_scaling": 2.5,
    "bias_speed": BIAS_SPEED,
    "balance": "micro_batch",
    "balance_coefficient": 0.0001,
}


def _nemotron(dim: int, pattern: str, **sizes: Any) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=131072,
        dim=dim,
        n_layers=len(pattern),
        layer_pattern=pattern,
        head_dim=128,
        mamba_state_dim=128,
        **sizes,
        **_ALL,
    )


SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=8,
        n_heads=8,
        n_kv_heads=4,
        head_dim=16,
        ffn_dim=256,
        layer_pattern="ME*-MEM-",
        mamba_heads=16,
        mamba_head_dim=16,
        mamba_state_dim=16,
        n_experts=16,
        experts_per_token=4,
        expert_dim=48,
        **_ALL,
        **_ROUTED,
    ),
    "8b": _nemotron(
        4096,
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=21504,
        mamba_heads=128,
        mamba_head_dim=64,
    ),
    "9b": _nemotron(
        4480,
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        n_heads=40,
        n_kv_heads=8,
        ffn_dim=15680,
        mamba_heads=128,
        mamba_head_dim=80,
    ),
    "30b-a3b": _nemotron(
        2688,
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        n_heads=32,
        n_kv_heads=2,
        mamba_heads=64,
        mamba_head_dim=64,
        n_experts=128,
        experts_per_token=6,
        expert_dim=1856,
        **_ROUTED,
    ),
}

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_CHARACTERS = {kind: each for each, kind in _KINDS.items()} | {"mamba": "M", "attention": "*"}
"""{kind of a layer, today or in earlier versions of transformers: its character}."""
_PATTERN_KEYS = ("layers_block_type", "layer_types")


def _read_layers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the pattern of the layers, from their kinds or from a string."""
    kinds = next((given[key] for key in _PATTERN_KEYS if given.get(key)), None)
    pattern = given.get("hybrid_override_pattern")
    if kinds:
        if unknown := [kind for kind in kinds if kind not in _CHARACTERS]:
            raise CheckpointError(f"layers_block_type has {unknown[0]!r}; dtron has {_CHARACTERS}")
        pattern = "".join(_CHARACTERS[kind] for kind in kinds)
    if not pattern:
        raise CheckpointError("layers_block_type is missing; it has the kind of each layer")
    return {"layer_pattern": pattern, "n_layers": len(pattern)}


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    pattern = config.layer_pattern
    layers = [pattern[layer % len(pattern)] for layer in range(config.n_layers)]
    return {
        "layers_block_type": [_KINDS[each] for each in layers],
        "hybrid_override_pattern": "".join(layers),
        "num_hidden_layers": config.n_layers,
    }


def _read_sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of feed-forward layers and experts, each if there are such layers."""
    pattern = _read_layers(given)["layer_pattern"]
    fields: dict[str, Any] = {}
    if "-" in pattern:
        fields["ffn_dim"] = given.get("intermediate_size", 21504)
    if "M" in pattern:
        fields |= {name: given.get(key, usual) for key, (name, usual) in _MAMBA_KEYS.items()}
    if "E" in pattern:
        fields |= {name: given.get(key, usual) for key, (name, usual) in _EXPERT_KEYS.items()}
        fields |= expert_groups(1, 1).read(given)
        width = given.get("moe_shared_expert_intermediate_size", 7688)
        if width % fields["expert_dim"]:
            raise CheckpointError(
                f"moe_shared_expert_intermediate_size = {width} is not a multiple of "
                f"moe_intermediate_size = {fields['expert_dim']}, as dtron's model needs"
            )
        shared = width // fields["expert_dim"]
        fields |= {"n_shared_experts": shared, "router": "sigmoid", "bias_speed": BIAS_SPEED}
    return fields


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    written: dict[str, Any] = {"intermediate_size": config.ffn_dim or config.dim}
    layers = _write_layers(config)["hybrid_override_pattern"]
    if "M" in layers:
        written |= {key: getattr(config, name) for key, (name, _) in _MAMBA_KEYS.items()}
    if "E" in layers:
        written |= {key: getattr(config, name) for key, (name, _) in _EXPERT_KEYS.items()}
        written |= expert_groups(1, 1).write(config)
        width = config.n_shared_experts * config.expert_dim
        written["moe_shared_expert_intermediate_size"] = width
    return written


_MAMBA_KEYS = {
    "mamba_num_heads": ("mamba_heads", 128),
    "mamba_head_dim": ("mamba_head_dim", 64),
    "n_groups": ("mamba_groups", 8),
    "ssm_state_size": ("mamba_state_dim", 128),
    "conv_kernel": ("mamba_conv", 4),
    "time_step_min": ("mamba_dt_min", 0.001),
}
"""{key of config.json: (field, default in transformers)}."""
_EXPERT_KEYS = {
    "n_routed_experts": ("n_experts", 8),
    "num_experts_per_tok": ("experts_per_token", 2),
    "moe_intermediate_size": ("expert_dim", 7688),
    "norm_topk_prob": ("renormalize", True),
    "routed_scaling_factor": ("routed_scaling", 1.0),
}
"""As `_MAMBA_KEYS`, of layers with experts."""


def _projected(part: str) -> RowOrder:
    """Return a RowOrder: the rows of w_z, w_xbc or w_dt in in_proj, which stacks them."""

    def rows(config: DecoderConfig, n_rows: int) -> list[int]:
        inner = config.mamba_heads * config.mamba_head_dim
        if part == "w_xbc":
            return [inner + row for row in _by_group(config, n_rows)]
        first = 0 if part == "w_z" else inner + config.mamba_channels
        return list(range(first, first + n_rows))

    return rows


def _by_group(config: DecoderConfig, n_rows: int) -> list[int]:
    """Return the rows of x, b and c by group, in [all x, all b, all c]."""
    groups, state = config.mamba_groups, config.mamba_state_dim
    inner = config.mamba_heads * config.mamba_head_dim
    own, rows = inner // groups, []
    for group in range(groups):
        rows += range(group * own, (group + 1) * own)
        for first in (inner, inner + groups * state):
            rows += range(first + group * state, first + (group + 1) * state)
    return rows


_LAYER = "backbone.layers.*"
_MIXER = f"{_LAYER}.mixer"

NAMES = (
    WeightName("embed", "backbone.embeddings"),
    WeightName("norm", "backbone.norm_f"),
    WeightName("head", "lm_head"),
    WeightName("blocks.*.attn_norm", f"{_LAYER}.norm"),
    WeightName("blocks.*.ffn_norm", f"{_LAYER}.norm"),
    *(
        WeightName(f"blocks.*.mamba.{w}", f"{_MIXER}.in_proj", rows=_projected(w))
        for w in ("w_z", "w_xbc", "w_dt")
    ),
    WeightName("blocks.*.mamba.core.conv", f"{_MIXER}.conv1d.weight", rows=_by_group),
    WeightName("blocks.*.mamba.core.conv_bias", f"{_MIXER}.conv1d.bias", rows=_by_group),
    WeightName("blocks.*.mamba.core.a_log", f"{_MIXER}.A_log"),
    WeightName("blocks.*.mamba.core.dt_bias", f"{_MIXER}.dt_bias"),
    WeightName("blocks.*.mamba.core.d", f"{_MIXER}.D"),
    WeightName("blocks.*.mamba.gated_norm.gamma", f"{_MIXER}.norm.weight"),
    WeightName("blocks.*.mamba.wo", f"{_MIXER}.out_proj"),
    *(WeightName(f"blocks.*.attn.w{w}", f"{_MIXER}.{w}_proj") for w in "qkvo"),
    WeightName("blocks.*.ffn.router.expert_bias", f"{_MIXER}.gate.e_score_correction_bias"),
    WeightName("blocks.*.ffn.router", f"{_MIXER}.gate"),
    *(
        name
        for w in ("up", "down")
        for name in (
            WeightName(f"blocks.*.ffn.{w}", f"{_MIXER}.{w}_proj"),
            WeightName(f"blocks.*.ffn.experts.{w}", f"{_MIXER}.experts.{{expert}}.{w}_proj.weight"),
            WeightName(f"blocks.*.ffn.shared.{w}", f"{_MIXER}.shared_experts.{w}_proj"),
        )
    ),
)

HF = HuggingFace(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    names=NAMES,
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "layer_norm_epsilon": "norm_eps",
        "attention_dropout": "attention_dropout",
    },
    base={"activation": "relu2", "norm": "rmsnorm", "positions": "none"},
    fixed={
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "tie_word_embeddings": (False,),
        "moe_latent_size": (None,),
        "num_nextn_predict_layers": (0,),
        "sliding_window": (None,),
    },
    defaults={"layer_norm_epsilon": 1e-5, "attention_dropout": 0.0},
    converters=(
        CONTEXT,
        KeyConverter(
            frozenset({"head_dim"}),
            lambda given: {"head_dim": given.get("head_dim", 128)},
            lambda config: {"head_dim": config.head_size},
        ),
        KV_HEADS,
        KeyConverter(
            frozenset({*_PATTERN_KEYS, "hybrid_override_pattern", "num_hidden_layers"}),
            _read_layers,
            _write_layers,
        ),
        KeyConverter(
            frozenset({*_MAMBA_KEYS, *_EXPERT_KEYS, "n_group", "topk_group"})
            | {"intermediate_size", "moe_shared_expert_intermediate_size"},
            _read_sizes,
            _write_sizes,
        ),
    ),
    # of initialisation, caches and kernels, and keys that transformers does not read
    ignored_keys=frozenset(
        """
        chunk_size expand time_step_max time_step_floor time_step_limit rescale_prenorm_residual
        residual_in_fp32 hidden_dropout mamba_proj_bias mamba_ssm_cache_dtype use_mamba_kernels
        num_logits_to_keep n_shared_experts moe_shared_expert_overlap output_router_logits
        mtp_layers_block_type mtp_hybrid_override_pattern norm_eps rms_norm_eps rope_theta
        partial_rotary_factor attention_head_dim
        """.split()  # noqa: SIM905 -- a table
    ),
    aliases={"model.": "backbone."},
)

NEMOTRON_H = ModelSpec("nemotron_h", SIZES, hf=HF)
