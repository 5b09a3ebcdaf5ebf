"""Checks of the optimizer's parameters: `optim.groups`, and shards of AdamW with 8-bit moments.

A pattern of `optim.groups` matches a parameter's FQN, or the FQN of a module that contains it.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from dtron.config import Lora, OptimGroup
from dtron.errors import nearest
from dtron.lora.adapters import attach
from dtron.models import build_model, model_spec
from dtron.models.attention import BACKENDS
from dtron.models.config import DecoderConfig
from dtron.parallelisms.expert.expert_parallel import WIDTHS
from dtron.parallelisms.placement import LOW_RANK, contains, matches

BLOCK = 256
"""Elements of a row that share a scale in moments of 8 bits."""
_SMALL = 4096
"""Parameters with fewer elements have float32 moments, as in torchao and bitsandbytes."""


def group_of(fqn: str, groups: Sequence[OptimGroup]) -> OptimGroup | None:
    """Return the first group that matches a parameter; None: no group does."""
    return next((group for group in groups if contains(group.match, fqn)), None)


def idle_groups(groups: Sequence[OptimGroup], names: Callable[[], Sequence[str]]) -> Iterator[str]:
    """Yield an error for each group that no trained parameter belongs to.

    Args:
        names: function that returns the FQNs of the parameters; called if there are groups.
    """
    fqns = names() if groups else ()
    used = {id(group_of(fqn, groups)) for fqn in fqns}
    for group in groups:
        if id(group) in used:
            continue
        if any(contains(group.match, fqn) for fqn in fqns):
            yield (
                f"optim.groups: all parameters that match = {group.match!r} selects belong to "
                "earlier groups; move the group up, or remove it"
            )
        else:
            yield (
                f"optim.groups: match = {group.match!r} matches no trained parameter of the model"
                f"{nearest(group.match, fqns)}; correct the pattern, in which * is one component "
                "of a name, or remove the group"
            )


@functools.lru_cache(maxsize=8)  # a search of layouts asks for each
def parameter_names(name: str, model: DecoderConfig) -> tuple[str, ...]:
    """Return the FQNs of all parameters of the model `name`."""
    return tuple(fqn for fqn, _ in _built(name, model).named_parameters())


def _built(name: str, model: DecoderConfig) -> nn.Module:
    with torch.device("meta"):
        return build_model(
            name, model.model_copy(update={"attention_dropout": 0.0}), BACKENDS["math"]
        )


def has_8bit_moments(shape: Sequence[int]) -> bool:
    """Whether AdamW8bit keeps moments of 8 bits of a parameter of this unsharded shape."""
    return len(shape) > 0 and math.prod(shape) >= _SMALL and shape[-1] % BLOCK == 0


@functools.lru_cache(maxsize=8)
def split_rows(name: str, model: DecoderConfig, lora: Lora) -> tuple[tuple[str, str, int], ...]:
    """List the parameters with 8-bit moments whose rows tp or etp splits.

    Returns:
        (FQN, "tp" or "etp", unsharded length of a row) of each.
    """
    built, spec = _built(name, model), model_spec(name)
    if lora.rank:
        attach(built, spec, lora)
    rowwise = [p for p, row in spec.placements(model, True).items() if row.kind == "rowwise"]
    found = []
    for fqn, parameter in built.named_parameters():
        path, _, end = fqn.rpartition(".")
        if not parameter.requires_grad or not has_8bit_moments(parameter.shape):
            continue
        if contains(spec.experts, fqn):
            axis = "etp" if WIDTHS.get(end) == 2 else ""
        else:
            linear = isinstance(built.get_submodule(path), nn.Linear)
            by_columns = linear and any(matches(pattern, path) for pattern in rowwise)
            axis = "tp" if by_columns and LOW_RANK["rowwise"].get(end, 1) == 1 else ""
        if axis:
            found.append((fqn, axis, parameter.shape[-1]))
    return tuple(found)
