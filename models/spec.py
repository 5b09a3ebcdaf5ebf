"""What a row of the MODELS table says about a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtron.models.attention import Backend
from dtron.models.config import DecoderConfig
from dtron.models.decoder import Decoder, init_parameter
from dtron.models.hf import HuggingFace
from dtron.models.layers import ACTIVATIONS
from dtron.parallelisms.placement import (
    Replicate,
    Row,
    Shard,
    Unit,
    colwise,
    heads,
    prepare_input,
    replicate,
    rowwise,
    sequence,
)


def embedding_modules(config: DecoderConfig) -> tuple[str, ...]:
    """What turns tokens into hidden states."""
    return ("embed", "position_embed") if config.positions == "learned" else ("embed",)


def decoder_units(config: DecoderConfig) -> tuple[Unit, ...]:
    """Which modules of a Decoder are gathered together under sharding.

    What no unit names stays in the root's group. With tied weights that is the embedding, the
    last norm and the head, since a parameter that two modules share must be in one group. Norm
    and head form one unit, since both are needed at the end only.
    """
    if config.tied:
        return ("blocks.*",)
    embeddings = ("embed", "position_embed") if config.positions == "learned" else "embed"
    return (embeddings, "blocks.*", ("norm", "head"))


def decoder_placements(config: DecoderConfig, sequence_parallel: bool) -> dict[str, Row]:
    """How a Decoder splits over tp: heads, neurons, vocabulary; with sequence parallelism the
    tokens between them too. The head's output stays split: the loss is vocabulary-parallel."""
    between = Shard(1) if sequence_parallel else Replicate()
    tokenwise = sequence(split=()) if sequence_parallel else replicate()
    keyed = sequence(split=(1,)) if sequence_parallel else replicate()
    looked_up = sequence(split=(0,)) if sequence_parallel else replicate()
    rows = {
        "embed": rowwise(output=between),
        "position_embed": looked_up,
        "embed_drop": keyed,
        "blocks.*.attn_norm": tokenwise,
        "blocks.*.attn": prepare_input(between),
        "blocks.*.attn.w[qkv]": colwise(),
        "blocks.*.attn.[qk]_norm": heads(),
        "blocks.*.attn.sinks": heads(),
        "blocks.*.attn.drop": heads(dim=1),
        "blocks.*.attn.wo": rowwise(output=between),
        "blocks.*.attn_drop": keyed,
        "blocks.*.ffn_norm": tokenwise,
        "blocks.*.ffn": prepare_input(between),
        "blocks.*.ffn.gate": colwise(),
        "blocks.*.ffn.up": colwise(),
        "blocks.*.ffn.down": rowwise(output=between),
        "blocks.*.ffn_drop": keyed,
        "norm": tokenwise,
        "head": colwise(inputs=between),
    }
    absent = {
        "position_embed": config.positions != "learned",
        "blocks.*.attn.[qk]_norm": not config.qk_norm,
        "blocks.*.attn.sinks": not config.sinks,
        "blocks.*.ffn.gate": not ACTIVATIONS[config.activation].gated,
    }
    return {pattern: row for pattern, row in rows.items() if not absent.get(pattern)}


@dataclass(frozen=True)
class ModelSpec:
    """A family of models: its sizes, and how one of them is built, initialised and split."""

    name: str
    sizes: Mapping[str, DecoderConfig]
    build: Callable[[DecoderConfig, Backend], nn.Module] = Decoder
    init_parameter: Callable[[DecoderConfig, str, Tensor, torch.Generator], None] = init_parameter
    units: Callable[[DecoderConfig], tuple[Unit, ...]] = decoder_units
    placements: Callable[[DecoderConfig, bool], dict[str, Row]] = decoder_placements
    """(config, sequence parallelism) -> rows by pattern."""
    vocabulary: tuple[str, ...] = ("embed", "head")
    """Modules whose rows are the vocabulary, padded where tp does not divide it."""
    embedding: Callable[[DecoderConfig], tuple[str, ...]] = embedding_modules
    """What the first pipeline stage has beside its layers."""
    layer: str = "blocks.{}"
    """Name of a layer."""
    head: tuple[str, ...] = ("norm", "head")
    """What the last pipeline stage has beside its layers; the last one gives the logits."""
    cores: str = "blocks.*.attn.core"
    """Modules that attend, for context parallelism."""
    feed_forward: str = "blocks.*.ffn"
    """Modules of gate, up and down, for float8."""
    hf: HuggingFace | None = None
    """What it is called in Hugging Face's format; None: it has no name there."""
