"""ModelSpec: how to build, initialise and shard a model family and split it into stages."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtron.models.attention import Backend
from dtron.models.config import DecoderConfig
from dtron.models.decoder import Decoder, init_parameter
from dtron.models.hf import HuggingFace
from dtron.models.layers import ACTIVATIONS
from dtron.parallelisms.placement import (
    Encoder,
    Placement,
    Replicate,
    Row,
    Shard,
    Unit,
    colwise,
    contains,
    experts,
    heads,
    prepare_input,
    replicate,
    rowwise,
    sequence,
    whole_heads,
    whole_input,
)


def embedding_modules(config: DecoderConfig) -> tuple[str, ...]:
    """Return the names of the modules of tokens, token types and positions before the layers."""
    absent = {
        "position_embed": config.positions != "learned",
        "encoder_bias": not config.encoder_layers,
        "decoder_bias": not config.encoder_layers,
        "type_embed": not config.token_types,
        "embed_norm": not config.post_norm,
    }
    return ("embed", *(name for name in absent if not absent[name]))


def vocabulary_modules(config: DecoderConfig) -> tuple[str, ...]:
    """Return the names of the modules whose weight has one row per vocabulary token."""
    return ("embed", "head", "mtp_embed") if config.mtp else ("embed", "head")


def mtp_modules(config: DecoderConfig) -> tuple[str, ...]:
    """Return the names of the modules of multi-token prediction (MTP).

    All of them are on the head's pipeline stage.
    """
    if not config.mtp:
        return ()
    layers = range(config.n_layers, config.n_layers + config.mtp)
    return ("mtp_embed", *(f"blocks.{layer}" for layer in layers))


def recurrent_cores(config: DecoderConfig) -> str:
    """Return the pattern of the recurrent modules, of one kind; empty: there are none."""
    kinds = {kind.mixer for kind in config.layer_kinds if kind.recurrent}
    return next((f"blocks.*.{kind}.core" for kind in kinds), "")


def decoder_units(config: DecoderConfig) -> tuple[Unit, ...]:
    """Return the FSDP units of a Decoder: modules whose parameters are gathered together.

    Modules outside all units form the root unit. With tied weights, the root unit has embedding,
    last norm and head, because one unit must have all modules that share a parameter. With MTP, it
    has both embeddings. Norm and head form one unit because both are needed only at the end.
    """
    if config.tied:
        return ("blocks.*",)
    if config.mtp:
        return ("blocks.*", ("norm", "head"))
    head = ("transform", "norm", "head") if config.post_norm else ("norm", "head")
    embeddings = embedding_modules(config)
    return (embeddings if len(embeddings) > 1 else "embed", "blocks.*", head)


def decoder_placements(config: DecoderConfig, sequence_parallel: bool) -> dict[str, Row]:
    """Return the tp placements of a Decoder.

    Attention heads, FFN width and vocabulary are sharded; with sequence parallelism, tokens between
    blocks too. The logits stay sharded over the vocabulary, because the loss is
    vocabulary-parallel.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    tokenwise = sequence(split=()) if sequence_parallel else replicate()
    keyed = sequence(split=(1,)) if sequence_parallel else replicate()
    routed = sequence(split=(1, 3)) if sequence_parallel else replicate()  # arguments keys, real
    looked_up = sequence(split=(0,)) if sequence_parallel else replicate()
    rows = {
        "embed": rowwise(output=between),
        "position_embed": looked_up,
        "type_embed": looked_up,
        "encoder_bias": colwise(),
        "decoder_bias": colwise(),
        "embed_norm": tokenwise,
        "embed_drop": keyed,
        "blocks.*.attn_norm": tokenwise,
        **(_latent_rows if config.kv_lora_rank else _attention_rows)(config, between, tokenwise),
        "blocks.*.attn.sinks": heads(),
        "blocks.*.attn.drop": heads(dim=1),
        "blocks.*.attn.wo": rowwise(output=between),
        **_recurrent_rows(config, between),
        "blocks.*.attn_drop": keyed,
        "blocks.*.ffn_norm": tokenwise,
        **_feed_forward_rows(config, between),
        **(_expert_rows(config, between, tokenwise, routed) if config.n_experts else {}),
        "blocks.*.*_post_norm": tokenwise,
        "blocks.*.ffn_drop": keyed,
        "blocks.*.scale": tokenwise,
        **(_mtp_rows(between, tokenwise) if config.mtp else {}),
        **(_cross_rows(config, between, tokenwise, keyed) if config.encoder_layers else {}),
        "transform.dense": tokenwise,
        "norm": tokenwise,
        "head": colwise(inputs=between),
    }
    absent = {
        "position_embed": config.positions != "learned",
        "type_embed": not config.token_types,
        "encoder_bias": not config.encoder_layers,
        "decoder_bias": not config.encoder_layers,
        "embed_norm": not config.post_norm,
        "transform.dense": not config.post_norm,
        "blocks.*.attn.sinks": not config.sinks,
        "blocks.*.ffn_norm": not any(kind.ffn for kind in config.layer_kinds),
        "blocks.*.*_post_norm": not config.sandwich_norms,
        "blocks.*.scale": not config.layer_scalars,
    }
    return {pattern: row for pattern, row in rows.items() if not absent.get(pattern)}


def _attention_rows(config: DecoderConfig, between: Placement, tokenwise: Row) -> dict[str, Row]:
    norms = {"blocks.*.attn.[qk]_norm": heads()} if config.qk_norm else {}
    return {
        "blocks.*.attn": prepare_input(between),
        "blocks.*.attn.w[qkv]": colwise(),
        **_shared_heads(config),
        **({"blocks.*.attn.wg": colwise()} if config.output_gate else {}),
        **norms,
    }


def _shared_heads(config: DecoderConfig) -> dict[str, Row]:
    """Return the tp placements of key and value heads that ranks share, by kind of layer."""
    if not config.full_layers_differ:
        return {"blocks.*.attn.w[kv]": whole_heads(config.n_kv_heads)}
    return {
        f"blocks.{i}.attn.w[kv]": whole_heads(config.of_layer(kind).n_kv_heads)
        for i, kind in enumerate(config.layer_kinds)
        if kind.mixer == "attention"
    }


def _recurrent_rows(config: DecoderConfig, between: Placement) -> dict[str, Row]:
    """Return the tp placements of recurrent layers, which split between groups of heads.

    The parameters of convolution and decay are small and replicated; each rank uses the part of its
    heads.
    """
    if not (core := recurrent_cores(config)):
        return {}
    layer = core.removesuffix(".core")
    return {
        layer: prepare_input(between),
        f"{layer}.w_*": colwise(),
        core: heads(),
        f"{layer}.gated_norm": heads(),
        f"{layer}.wo": rowwise(output=between),
    }


def _latent_rows(config: DecoderConfig, between: Placement, tokenwise: Row) -> dict[str, Row]:
    """Return the tp placements of latent attention.

    Each rank down-projects its own tokens; the narrow outputs are gathered.
    """
    queries = {"blocks.*.attn.wq": colwise(inputs=between)}
    if config.q_lora_rank:
        queries = {
            "blocks.*.attn.wq_a": tokenwise,
            "blocks.*.attn.q_a_norm": tokenwise,
            "blocks.*.attn.wq_b": colwise(inputs=between),
        }
    return {
        **queries,
        "blocks.*.attn.wkv_a": tokenwise,
        "blocks.*.attn.kv_a_norm": tokenwise,
        "blocks.*.attn.wkv_b": colwise(inputs=between),
        "blocks.*.attn.k_rope": whole_input(between),
    }


def _neurons(prefix: str, config: DecoderConfig, between: Placement) -> dict[str, Row]:
    gate = {f"{prefix}.gate": colwise()} if ACTIVATIONS[config.activation].gated else {}
    return {**gate, f"{prefix}.up": colwise(), f"{prefix}.down": rowwise(output=between)}


def _feed_forward_rows(config: DecoderConfig, between: Placement) -> dict[str, Row]:
    dense = [i for i, kind in enumerate(config.layer_kinds) if kind.ffn == "dense"]
    if not dense:
        return {}
    layers = dense if config.n_experts else ["*"]
    inputs = {f"blocks.{i}.ffn": prepare_input(between) for i in layers}
    return {**inputs, **_neurons("blocks.*.ffn", config, between)}


def _expert_rows(
    config: DecoderConfig, between: Placement, tokenwise: Row, routed: Row
) -> dict[str, Row]:
    """Return the tp placements of a mixture of experts.

    Each rank routes its own tokens; shared experts are sharded like dense layers.
    """
    rows = {"blocks.*.ffn.router": routed, "blocks.*.ffn.experts": experts()}
    if config.n_shared_experts:
        shared = "blocks.*.ffn.shared"
        rows |= {shared: prepare_input(between), **_neurons(shared, config, between)}
    if config.shared_gate:
        rows["blocks.*.ffn.shared_gate"] = tokenwise
    return rows


def _mtp_rows(between: Placement, tokenwise: Row) -> dict[str, Row]:
    """Return the tp placements of MTP blocks.

    Norms and merge process the rank's own tokens; `mtp_embed` is sharded like `embed`.
    """
    own = dict.fromkeys(("token_norm", "hidden_norm", "merge", "norm"), tokenwise)
    rows = {f"blocks.*.{name}": row for name, row in own.items()}
    return {"mtp_embed": rowwise(output=between), **rows}


def _cross_rows(
    config: DecoderConfig, between: Placement, tokenwise: Row, keyed: Row
) -> dict[str, Row]:
    """Return the tp placements of a decoder's attention to its encoder.

    Each layer gathers the encoder's output for its keys and values.
    """
    cross = "blocks.*.cross"
    return {
        f"blocks.{config.encoder_layers - 1}.norm": tokenwise,
        "blocks.*.cross_norm": tokenwise,
        f"{cross}.wq": colwise(inputs=between),
        f"{cross}.kv": prepare_input(between),
        f"{cross}.kv.*": colwise(),
        f"{cross}.kv.w[kv]": whole_heads(config.n_kv_heads),
        f"{cross}.drop": heads(dim=1),
        f"{cross}.wo": rowwise(output=between),
        "blocks.*.cross_drop": keyed,
    }


@dataclass(frozen=True)
class ModelSpec:
    """A model family: its sizes, and how to build, initialise and shard a model."""

    name: str
    sizes: Mapping[str, DecoderConfig]
    build: Callable[[DecoderConfig, Backend], nn.Module] = Decoder
    """Builds the module; `contract.py` has the requirements of modules other than Decoder."""
    reads: Set[str] | None = None
    """Fields of DecoderConfig that a custom `build` uses; add "documents" if its attention masks
    documents, "attention" if modules `cores` use the backend, and "labels" if `forward` has this
    argument and calls the head with labels=labels. Settings of any other name are errors. None:
    `build` is Decoder, which uses all fields."""
    init_parameter: Callable[[DecoderConfig, str, Tensor, torch.Generator], None] = init_parameter
    units: Callable[[DecoderConfig], tuple[Unit, ...]] = decoder_units
    placements: Callable[[DecoderConfig, bool], dict[str, Row]] = decoder_placements
    """(config, sequence parallelism) -> tp placements by FQN pattern."""
    vocabulary: Callable[[DecoderConfig], tuple[str, ...]] = vocabulary_modules
    """Modules whose weight has one row per vocabulary token, padded if tp does not divide it."""
    embedding: Callable[[DecoderConfig], tuple[str, ...]] = embedding_modules
    """Modules of the first pipeline stage in addition to its layers."""
    encoder: Encoder | None = None
    """Modules of the encoder, on the first pipeline stage; None: the family has none."""
    layer: str = "blocks.{}"
    """FQN of a layer, with {} for its index."""
    head: tuple[str, ...] = ("norm", "head")
    """Modules of the last pipeline stage in addition to its layers; the last module returns the
    logits."""
    mtp_modules: Callable[[DecoderConfig], tuple[str, ...]] = mtp_modules
    """Modules of multi-token prediction, on the last pipeline stage."""
    cores: str = "blocks.*.attn.core"
    """Attention modules; context parallelism replaces their forward."""
    recurrent_cores: Callable[[DecoderConfig], str] = recurrent_cores
    """Pattern of the recurrent modules, whose forward context parallelism replaces too; empty:
    none."""
    feed_forward: str = "blocks.*.ffn"
    """Modules with gate, up and down, which float8 fuses."""
    hf: HuggingFace | None = None
    """Names in Hugging Face's format; None: transformers has no such model."""
    experts: str = "blocks.*.ffn.experts"
    """Modules with stacked experts, for expert parallelism."""
    gates: tuple[str, ...] = (
        "blocks.*.ffn.router",
        "blocks.*.ffn.shared_gate",
        "blocks.*.delta.w_[ab]",
        "blocks.*.mamba.w_dt",
    )
    """Modules of layers whose matrices Muon leaves to AdamW, as embedding and head."""

    def is_hidden_matrix(self, fqn: str, n_dims: int) -> bool:
        """Whether Muon updates a parameter: a matrix, or a stack of matrices, of a layer."""
        if fqn.endswith("bias") or any(contains(pattern, fqn) for pattern in self.gates):
            return False
        stacked = n_dims == 3 and contains(self.experts, fqn)  # not, say, weights of convolutions
        return contains(self.layer.format("*"), fqn) and (n_dims == 2 or stacked)
