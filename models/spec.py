"""What a row of the MODELS table says about a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtron.models.attention import Backend
from dtron.models.config import DecoderConfig
from dtron.models.decoder import Decoder, init_parameter

Unit = str | tuple[str, ...]  # a pattern of FQNs, one "*" matches one component; a tuple: together


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


@dataclass(frozen=True)
class ModelSpec:
    """A family of models: its sizes, and how one of them is built, initialised and split."""

    name: str
    sizes: Mapping[str, DecoderConfig]
    build: Callable[[DecoderConfig, Backend], nn.Module] = Decoder
    init_parameter: Callable[[DecoderConfig, str, Tensor, torch.Generator], None] = init_parameter
    units: Callable[[DecoderConfig], tuple[Unit, ...]] = decoder_units
