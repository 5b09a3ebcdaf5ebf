"""Parameters with their own learning rate or weight decay: `optim.groups`.

A pattern matches a parameter's FQN, or the FQN of a module that contains it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

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
    with torch.device("meta"):
        built = build_model(
            name, model.model_copy(update={"attention_dropout": 0.0}), BACKENDS["math"]
        )
    return tuple(fqn for fqn, _ in built.named_parameters())
