"""Requirements of a custom model family, checked on the meta device.

    SPEC = ModelSpec("mine", SIZES, build=Mine, reads={"vocab_size", "dim", "n_layers"})

Layers, embedding, head and vocabulary modules have the names given in the ModelSpec. `forward`
accepts FORWARD_ARGUMENTS by name. `reads` lists the DecoderConfig fields that the module uses;
overriding any other field is an error.
"""

import inspect
from collections.abc import Iterator

import torch
from torch import nn

from dtron.errors import ConfigError
from dtron.models.attention import BACKENDS
from dtron.models.config import DecoderConfig
from dtron.models.decoder import Decoder
from dtron.models.encoder_decoder import EncoderDecoder
from dtron.models.spec import ModelSpec
from dtron.models.vision import VisionDecoder

FORWARD_ARGUMENTS = ("positions", "documents", "dropout_keys")
"""Keyword arguments of every forward, in addition to the tokens or hidden states."""
EXTRA_READS = frozenset({"documents", "attention", "labels"})
"""Names allowed in `ModelSpec.reads` in addition to the fields of DecoderConfig."""


def ignored(spec: ModelSpec, name: str) -> bool:
    """Whether a family ignores a field of DecoderConfig or a name of EXTRA_READS."""
    return not _is_decoder(spec) and name not in (spec.reads or ())


def reads_images(spec: ModelSpec) -> bool:
    """Whether a family has a vision encoder."""
    return isinstance(spec.build, type) and issubclass(spec.build, VisionDecoder)


def has_encoder(spec: ModelSpec) -> bool:
    """Whether a family is an encoder-decoder."""
    return isinstance(spec.build, type) and issubclass(spec.build, EncoderDecoder)


def _is_decoder(spec: ModelSpec) -> bool:
    return isinstance(spec.build, type) and issubclass(spec.build, Decoder)


def counted_as_decoder(row: str, spec: ModelSpec) -> Iterator[str]:
    """Yield a warning if parameters and FLOPs are counted as for a Decoder, not for this model."""
    if not _is_decoder(spec):
        yield (
            f"model.name = {row} builds its own module: its parameters, FLOPs, MFU, memory and "
            "time are counted as those of a Decoder of the same config"
        )


def check_family(row: str, spec: ModelSpec, config: DecoderConfig) -> None:
    """Check that a family meets the requirements of all passes, before the process group starts.

    Args:
        row: `model.name` of the family.
        config: config of the model to build.
    Raises:
        ConfigError: lists all broken requirements.
    """
    if _is_decoder(spec):
        return
    if broken := list(_broken(row, spec, config)):
        shown = "".join(f"\n  - {each}" for each in broken)
        raise ConfigError(
            f"the ModelSpec of model.name = {row} breaks requirements (docs/models.md):{shown}"
        )


def _broken(row: str, spec: ModelSpec, config: DecoderConfig) -> Iterator[str]:
    if spec.name != row:
        yield f'name = "{spec.name}" differs from its key; use ModelSpec("{row}", ...)'
    known = DecoderConfig.model_fields.keys() | EXTRA_READS
    if spec.reads is None:
        yield (
            "reads is not set; name the fields of DecoderConfig that build reads, such as "
            'reads={"vocab_size", "dim", "n_layers"}, "documents" if attention masks documents, '
            '"attention" if it uses the backend, and "labels" if forward gives them to the head'
        )
    elif unknown := sorted(spec.reads - known):
        yield f"reads has unknown names, {', '.join(unknown)}; use fields of DecoderConfig"
    with torch.device("meta"):
        model = spec.build(config, BACKENDS["math"])
    if not isinstance(model, nn.Module):
        yield f"build returns a {type(model).__name__}; return an nn.Module"
        return
    modules = dict(model.named_modules())
    layers = [spec.layer.format(i) for i in range(config.n_layers)]
    wanted = {
        "layer": layers,
        "embedding": spec.embedding(config),
        "head": spec.head,
        "vocabulary": spec.vocabulary(config),
    }
    for key, names in wanted.items():
        if absent := [name for name in names if name not in modules]:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            yield (
                f"no module {absent[0]}{more}, which ModelSpec.{key} names; the model has "
                f"{', '.join(name for name, _ in model.named_children()) or 'none'}"
            )
    for name in spec.vocabulary(config):
        weight = getattr(modules.get(name), "weight", None)
        if weight is not None and weight.shape[0] != config.vocab_size:
            yield (
                f"{name}.weight has {weight.shape[0]} rows, and vocab_size = {config.vocab_size}; "
                "build it from the config"
            )
    arguments = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in arguments.values())
    if lacking := [name for name in FORWARD_ARGUMENTS if name not in arguments and not takes_all]:
        yield f"forward does not take {', '.join(lacking)}; add {', '.join(lacking)}=None"
    if buffers := [name for name, _ in model.named_buffers()]:
        yield f"buffer {buffers[0]} loses its values on the meta device; compute it in forward"
