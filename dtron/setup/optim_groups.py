"""Parameters with their own learning rate or weight decay: `optim.groups`.

A pattern matches a parameter's FQN, or the FQN of a module that contains it.
"""

import functools
from collections.abc import Iterator, Sequence

import torch

from dtron.config import OptimGroup
from dtron.errors import nearest
from dtron.models import build_model
from dtron.models.attention import BACKENDS
from dtron.models.config import DecoderConfig
from dtron.parallelisms.placement import contains


def group_of(fqn: str, groups: Sequence[OptimGroup]) -> OptimGroup | None:
    """Return the first group that matches a parameter; None: no group does."""
    return next((group for group in groups if contains(group.match, fqn)), None)


def idle_groups(name: str, model: DecoderConfig, groups: Sequence[OptimGroup]) -> Iterator[str]:
    """Yield an error for each group that no parameter of the model `name` belongs to."""
    fqns = _parameter_names(name, model) if groups else ()
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
                f"optim.groups: match = {group.match!r} matches no parameter of the model"
                f"{nearest(group.match, fqns)}; correct the pattern, in which * is one component "
                "of a name, or remove the group"
            )


@functools.lru_cache(maxsize=8)  # a search of layouts asks for each
def _parameter_names(name: str, model: DecoderConfig) -> tuple[str, ...]:
    with torch.device("meta"):
        built = build_model(
            name, model.model_copy(update={"attention_dropout": 0.0}), BACKENDS["math"]
        )
    return tuple(fqn for fqn, _ in built.named_parameters())
