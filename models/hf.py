"""Hugging Face's format as data: tables that translate configs and weight names, both ways.

A folder in that format has config.json and safetensors files. Each model family has two tables:

    fields, converters   keys of config.json <-> fields of DecoderConfig
    names                FQNs of dtron <-> tensor names of transformers, and their layout
                         (transposed, several parameters fused into one tensor, one stacked
                         parameter as several tensors)

In names, "ours" means dtron and "theirs" means transformers. Nothing is silently ignored: an
unknown key of config.json, or a value that dtron's model does not implement, is an error.

Sources: transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype),
configuration_utils.py and modeling_rope_utils.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtron.errors import CheckpointError, nearest
from dtron.models.config import DecoderConfig
from dtron.models.rope import rope_magnitude

RowOrder = Callable[[DecoderConfig, int], Sequence[int]]
"""(config, number of rows of the dtron parameter) -> index of each row in the tensor of
transformers."""
ReadKeys = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class WeightName:
    """Name and layout of a parameter in dtron and in transformers.

    `*` is the layer's index. A pattern that names a module matches its `weight` and `bias`.
    """

    ours: str
    theirs: str
    """Name in transformers. With `{expert}`: one tensor per expert, which dtron's parameter stacks
    along dim 0."""
    transposed: bool = False
    """Whether transformers swaps the last two dims, as in GPT-2's weights (input, output)."""
    rows: RowOrder | None = None
    """Index of dtron's rows in the tensor of transformers (after the swap); None: the same rows."""
    dim: int = 0
    """The dim that `rows` indexes; the dim of `{expert}` does not count."""
    layers: Callable[[DecoderConfig], range] | None = None
    """Config -> layers of dtron that have this name, which transformers counts from 0; None: all
    layers."""


@dataclass(frozen=True)
class KeyConverter:
    """Two functions that translate keys of config.json that `HuggingFace.fields` cannot express."""

    keys: frozenset[str]
    read: ReadKeys
    """config.json -> fields. Raises CheckpointError for values that dtron does not support."""
    write: Callable[[DecoderConfig], dict[str, Any]]
    """Config -> keys of config.json."""


@dataclass(frozen=True)
class Multimodal:
    """An architecture of transformers that contains a language model, which alone is read."""

    model_type: str
    prefix: str
    """Prefix of the language model's tensors, in place of `model.`."""
    others: tuple[str, ...]
    """Prefixes of tensors that are not read."""


@dataclass(frozen=True)
class HuggingFace:
    """Translation between an architecture of transformers and a model family of dtron."""

    model_type: str
    architecture: str
    names: Sequence[WeightName]
    """Of several names of a parameter, files are written with the first, and read with the first
    that they have."""
    fields: Mapping[str, str]
    """Key of config.json -> field of DecoderConfig."""
    base: Mapping[str, Any]
    """Fields of DecoderConfig that the architecture implies."""
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Key -> supported values; export writes the first."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key of `fields` -> its default in transformers."""
    converters: Sequence[KeyConverter] = ()
    ignored_keys: frozenset[str] = frozenset()
    """Keys that do not affect what this architecture computes."""
    zero_centered: bool = False
    """Whether transformers stores the weights of norms as gamma - 1."""
    inside: Multimodal | None = None
    """A multimodal architecture whose language model this is; its config is `text_config`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Prefix of a tensor name that other versions of transformers write -> its prefix in `names`.
    Applied in order, each to the result of those before it."""
    mtp_prefix: str = ""
    """Prefix of the tensors of MTP layers, in place of `model.`, with layers counted from 0; empty:
    they follow the other layers."""
    prefix: str = ""
    """Prefix of all tensor names except the head's; files of a model without head omit it."""
    older_names: Mapping[str, str] = field(default_factory=dict)
    """End of a tensor's name in old files -> its end today."""
    ignored_tensors: Sequence[str] = ()
    """Patterns of tensors in old files that are not weights, such as masks."""
    copies: Callable[[DecoderConfig], Mapping[str, str]] = lambda config: {}
    """Config -> {tensor of transformers that duplicates a parameter: FQN of this parameter}."""

    def read(self, given: Mapping[str, Any], where: str) -> DecoderConfig:
        """Convert the content of a config.json.

        Args:
            given: the file's content.
            where: path of the file, for errors.
        Raises:
            CheckpointError: a key is unknown, missing, or has an unsupported value.
        """
        try:
            self._refuse_unknown(given)
            fields = {**self.base}
            for key, name in self.fields.items():
                if (value := given.get(key, self.defaults.get(key))) is None:
                    raise CheckpointError(f"{key} is missing")
                fields[name] = value
            for converter in self.converters:
                fields |= converter.read(given)
            return DecoderConfig.model_validate(fields, strict=False)
        except ValueError as error:  # includes DtronErrors
            raise CheckpointError(f"{where}: {error}") from None

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the content of config.json, without the dtype of the files.

        Raises:
            CheckpointError: the architecture does not support a value; the message names its field.
        """
        written: dict[str, Any] = {"architectures": [self.architecture]}
        written["model_type"] = self.model_type
        written |= {key: getattr(config, name) for key, name in self.fields.items()}
        written |= {key: values[0] for key, values in self.fixed.items()}
        for converter in self.converters:
            written |= converter.write(config)
        there = self.read(written, "config.json")
        if lost := differences(config, there):
            shown = ", ".join(f"{name} = {ours!r} (it has {its!r})" for name, ours, its in lost)
            raise CheckpointError(
                f"{self.architecture} of transformers cannot express model.override.{shown}"
            )
        return written

    def _refuse_unknown(self, given: Mapping[str, Any]) -> None:
        if quantised := given.get("quantization_config"):
            how = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise CheckpointError(
                f"quantization_config: weights quantised by {how!r} are not supported; dequantise "
                "them to bfloat16 with transformers, as docs/hugging-face.md shows"
            )
        for key, values in self.fixed.items():
            if key in given and given[key] not in values:
                raise CheckpointError(
                    f"{key} = {given[key]!r} is not supported by dtron's model; it needs "
                    f"{' or '.join(repr(value) for value in values)}"
                )
        known = {*self.fields, *self.fixed, *self.ignored_keys, *IGNORED_KEYS, "model_type"}
        known = known.union(*(converter.keys for converter in self.converters))
        for key, value in given.items():
            if key not in known:
                raise CheckpointError(
                    f"{key} = {value!r} is unknown to dtron's {self.model_type}"
                    f"{nearest(key, known)}; a model that depends on it cannot be loaded"
                )


def differences(config: DecoderConfig, other: DecoderConfig) -> list[tuple[str, Any, Any]]:
    """Return [(field, value, other value)] of fields that make two models differ.

    Models differ if their parameter names, shapes or results differ.
    """
    ours, theirs = _computation_fields(config), _computation_fields(other)
    return [(k, ours[k], theirs[k]) for k in ours if not _same(ours[k], theirs[k])]


def _computation_fields(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields that affect what a model computes.

    Fields that have no effect in this config get their default values.
    """
    fields = config.model_dump()
    for name in TRAINING_FIELDS:
        fields.pop(name, None)
    if not config.kv_lora_rank:
        fields["head_dim"] = config.head_size
    fields["query_pre_attn_scalar"] = config.query_pre_attn_scalar or config.head_size
    if pattern := config.layer_pattern:
        fields["layer_pattern"] = "".join(
            pattern[layer % len(pattern)] for layer in range(config.n_layers)
        )
    if config.bias_speed:  # the model has a bias; its speed is a training setting
        fields["bias_speed"] = BIAS_SPEED
    idle = [name for name in fields if name.startswith("rope_") and name != "rope_head_dim"]
    if config.positions != "learned":
        del fields["max_seq_len"]
    if config.positions == "rope":
        scaled = config.rope_scaling_factor > 1
        idle = [] if scaled else [name for name in idle if name not in ROPE_UNSCALED]
    defaults = DecoderConfig.model_fields
    return {**fields, **{name: defaults[name].default for name in idle}}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other


TRAINING_FIELDS = (
    "dropout",
    "attention_dropout",
    "norm_zero_centered",
    "delta_kernel",
    "mtp_coefficient",
    "balance",
    "balance_coefficient",
    "z_loss",
    "jitter",
    "capacity_factor",
    "capacity_pad",
    "force_balance",
)
"""Fields of training or of weight storage, which do not change the model."""
ROPE_UNSCALED = ("rope_theta", "rope_fraction", "rope_local_theta", "rope_global_fraction")
"""Fields of the rotary embedding that have an effect without rope scaling."""
BIAS_SPEED = 0.001
"""bias_speed of an imported model with expert biases; config.json has no such key."""

IGNORED_KEYS = frozenset(
    """
    architectures auto_map dtype torch_dtype transformers_version use_cache initializer_range
    _name_or_path name_or_path output_attentions output_hidden_states return_dict id2label label2id
    problem_type chunk_size_feed_forward bos_token_id eos_token_id pad_token_id sep_token_id
    decoder_start_token_id max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens task_specific_params finetuning_task tokenizer_class prefix torchscript
    tf_legacy_loss use_bfloat16 pretraining_tp attn_implementation _attn_implementation
    _attn_implementation_autoset
    """.split()  # noqa: SIM905 -- a table
)
"""Keys of any config.json that do not affect what the model computes: metadata, special tokens,
and generation settings."""


ROPE_KEYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "llama3": {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_context",
    },
    "linear": {"factor": "rope_scaling_factor"},
    "yarn": {
        "factor": "rope_scaling_factor",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "original_max_position_embeddings": "rope_original_context",
    },
}
"""rope_type -> {key of config.json: field of DecoderConfig}."""


def read_rope(given: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """Convert the rope keys of config.json (transformers 4 or 5) to fields of DecoderConfig.

    Raises:
        CheckpointError: a key is missing or has a value that dtron does not support.
    """
    rope = _merged(given.get("rope_scaling") or {}, given.get("rope_parameters") or {})
    rope = _merged(rope, {"rope_theta": t} if (t := given.get("rope_theta")) is not None else {})
    kinds = {rope.pop(key) for key in ("rope_type", "type") if key in rope} or {"default"}
    theta = rope.pop("rope_theta", default_theta)
    kind = kinds.pop()
    if kinds or kind not in ROPE_KEYS:
        raise CheckpointError(
            f"rope_type = {kind!r} is not supported; dtron has {', '.join(ROPE_KEYS)}"
        )
    if (fraction := rope.pop("partial_rotary_factor", 1.0)) != 1:
        raise CheckpointError(f"partial_rotary_factor = {fraction} is not supported; dtron has 1.0")
    if kind in ("default", "linear"):
        rope.pop("original_max_position_embeddings", None)  # no effect
    fields: dict[str, Any] = {"rope_theta": float(theta)}
    if kind == "yarn":
        fields |= _read_temperature(rope)
    for key, name in ROPE_KEYS[kind].items():
        value = rope.pop(key, None)
        if value is None and key == "original_max_position_embeddings":
            value = given.get("max_position_embeddings")
        if value is None and key not in ("beta_fast", "beta_slow"):
            raise CheckpointError(f"{key} of rope_type = {kind!r} is missing")
        if value is not None:
            fields[name] = value
    if rope:
        key, value = next(iter(rope.items()))
        raise CheckpointError(f"{key} = {value!r} of rope_type = {kind!r} is not supported")
    if fields.get("rope_scaling_factor", 1) != 1:
        fields["rope_scaling"] = kind
    return fields


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for key in one.keys() & other.keys():
        if one[key] != other[key]:
            raise CheckpointError(f"{key} is both {one[key]!r} and {other[key]!r}; keep one")
    return {**one, **other}


def _read_temperature(rope: dict[str, Any]) -> dict[str, Any]:
    """Pop the keys of YaRN's temperature and rounding from `rope`; return fields of the config."""
    mscale, whole = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
    magnitude = rope.pop("attention_factor", None)
    fields = {"rope_truncate": rope.pop("truncate", True)}
    if magnitude is not None:
        log = 0.1 * math.log(rope.get("factor") or 1)
        if magnitude < 1 or (log == 0 and magnitude != 1):
            raise CheckpointError(f"attention_factor = {magnitude} is not supported")
        return {**fields, "rope_mscale": (magnitude - 1) / log if log else 1.0}
    if mscale and whole:
        fields |= {"rope_mscale": float(mscale), "rope_mscale_all_dim": float(whole)}
    return fields


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of the rotary embedding for transformers 4 and 5."""
    kind = config.rope_scaling if config.rope_scaling_factor > 1 else "default"
    scaling = {key: getattr(config, name) for key, name in ROPE_KEYS[kind].items()}
    if kind == "yarn":
        if config.rope_mscale and config.rope_mscale_all_dim:
            scaling["mscale"] = config.rope_mscale
            scaling["mscale_all_dim"] = config.rope_mscale_all_dim
        elif config.rope_mscale != 1 or config.rope_mscale_all_dim:
            scaling["attention_factor"] = rope_magnitude(config)
        if not config.rope_truncate:  # new in transformers 4.55
            scaling["truncate"] = False
    older = {"rope_type": kind, **scaling} if kind != "default" else None
    newer = {"rope_type": kind, "rope_theta": config.rope_theta, **scaling}
    return {"rope_theta": config.rope_theta, "rope_scaling": older, "rope_parameters": newer}


def read_context(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return {max_seq_len: the model's context length}; {} if config.json has none."""
    positions = given.get("max_position_embeddings")
    return {"max_seq_len": positions} if positions else {}


def write_context(config: DecoderConfig) -> dict[str, Any]:
    """Return {max_position_embeddings: max_seq_len, or the length after rope scaling if larger}."""
    extended = 0
    if config.rope_scaling_factor > 1:
        extended = round(config.rope_scaling_factor * config.rope_original_context)
    return {"max_position_embeddings": max(config.max_seq_len, extended)}


def rope_converter(read: ReadKeys = read_rope) -> KeyConverter:
    """Return the converter of the rotary embedding."""
    keys = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
    return KeyConverter(keys, read, write_rope)


def llama_converters(read: ReadKeys = read_rope) -> tuple[KeyConverter, ...]:
    """Return the converters of Llama and of models derived from it; `read` reads the rope keys."""
    return (rope_converter(read), CONTEXT, HEAD_DIM, KV_HEADS)


def optional_key(key: str, name: str, default: int = 0) -> KeyConverter:
    """Return the converter of a key that is null if the field `name` is 0.

    Args:
        default: default of the key in transformers.
    """
    return KeyConverter(
        frozenset({key}),
        lambda given: {name: given.get(key, default) or 0},
        lambda config: {key: getattr(config, name) or None},
    )


def expert_groups(groups: int, top: int) -> KeyConverter:
    """Return the converter of groups of experts; `groups`, `top`: defaults in transformers.

    Selection from all groups becomes n_groups = 1.
    """

    def read(given: Mapping[str, Any]) -> dict[str, Any]:
        number, selected = given.get("n_group", groups), given.get("topk_group", top)
        every = number == selected
        return {"n_groups": 1 if every else number, "top_groups": 1 if every else selected}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"n_group": config.n_groups, "topk_group": config.top_groups}

    return KeyConverter(frozenset({"n_group", "topk_group"}), read, write)


FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(given: Mapping[str, Any], window: int, every: int) -> dict[str, Any]:
    """Read which layers have a window: all layers, no layer, or all except every n-th.

    Args:
        window: the default of sliding_window.
        every: n, if config.json has no layer_types.
    """
    window, n_layers = given.get("sliding_window", window), given["num_hidden_layers"]

    def kinds_of(every: int) -> list[str]:
        return [FULL if every and (i + 1) % every == 0 else SLIDING for i in range(n_layers)]

    kinds = given.get("layer_types") or kinds_of(every)
    if not window or SLIDING not in kinds:
        return {"window": 0}
    every = kinds.index(FULL) + 1 if FULL in kinds else 0
    if kinds != kinds_of(every) or every == 1:
        raise CheckpointError(
            f"layer_types = {kinds} is not supported; in dtron's model every n-th layer has full "
            "attention"
        )
    return {"window": window, "full_attention_every": every}


def write_windows(config: DecoderConfig, window: int) -> dict[str, Any]:
    """Return the keys of the windows; `window`: the number if no layer has one, not null."""
    kinds = [SLIDING if each else FULL for each in config.windows]
    return {"sliding_window": config.window or window, "layer_types": kinds}


CONTEXT = KeyConverter(frozenset({"max_position_embeddings"}), read_context, write_context)
HEAD_DIM = KeyConverter(  # 0 if missing: hidden_size / num_attention_heads
    frozenset({"head_dim"}),
    lambda given: {"head_dim": given.get("head_dim") or 0},
    lambda config: {"head_dim": config.head_size},
)
KV_HEADS = KeyConverter(  # as many as query heads if missing
    frozenset({"num_key_value_heads"}),
    lambda given: {
        "n_kv_heads": given.get("num_key_value_heads") or given.get("num_attention_heads")
    },
    lambda config: {"num_key_value_heads": config.n_kv_heads},
)

LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "ffn_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
    "attention_dropout": "attention_dropout",
}
"""`HuggingFace.fields` of Llama and of models derived from it."""
LLAMA_DEFAULTS = {"tie_word_embeddings": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6}
LLAMA_BASE = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rope"}
LLAMA_ATTENTION = (
    WeightName("embed", "model.embed_tokens"),
    WeightName("norm", "model.norm"),
    WeightName("head", "lm_head"),
    WeightName("blocks.*.attn_norm", "model.layers.*.input_layernorm"),
    WeightName("blocks.*.attn.wq", "model.layers.*.self_attn.q_proj"),
    WeightName("blocks.*.attn.wk", "model.layers.*.self_attn.k_proj"),
    WeightName("blocks.*.attn.wv", "model.layers.*.self_attn.v_proj"),
    WeightName("blocks.*.attn.wo", "model.layers.*.self_attn.o_proj"),
    WeightName("blocks.*.attn.q_norm", "model.layers.*.self_attn.q_norm"),
    WeightName("blocks.*.attn.k_norm", "model.layers.*.self_attn.k_norm"),
    WeightName("blocks.*.ffn_norm", "model.layers.*.post_attention_layernorm"),
)
LLAMA_FFN = (
    WeightName("blocks.*.ffn.gate", "model.layers.*.mlp.gate_proj"),
    WeightName("blocks.*.ffn.up", "model.layers.*.mlp.up_proj"),
    WeightName("blocks.*.ffn.down", "model.layers.*.mlp.down_proj"),
)
LLAMA_NAMES = (*LLAMA_ATTENTION, *LLAMA_FFN)
LLAMA_IGNORED_TENSORS = ("model.layers.*.self_attn.rotary_emb.inv_freq",)

MOE_FIELDS = {
    **{key: name for key, name in LLAMA_FIELDS.items() if key != "intermediate_size"},
    "num_experts_per_tok": "experts_per_token",
}
"""`HuggingFace.fields` of mixtures of experts."""
MOE_IGNORED_KEYS = frozenset({"router_aux_loss_coef", "output_router_logits"})
"""Training settings: the load-balancing loss is `model.override.balance`."""
EXPERT_NAMES = tuple(
    WeightName(
        f"blocks.*.ffn.experts.{w}", f"model.layers.*.mlp.experts.{{expert}}.{w}_proj.weight"
    )
    for w in ("gate", "up", "down")
)
