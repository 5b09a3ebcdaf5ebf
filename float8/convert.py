"""Choose the layers of a model to convert to float8, and convert them.

Layers are chosen on the whole model, before pipeline stages and sharding, so that the choice is the
same in every layout. Parameters keep their names and dtypes: checkpoints do not depend on float8.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from dtron.errors import ConfigError
from dtron.float8.gated import Float8GatedUnit
from dtron.float8.linear import Float8Linear
from dtron.float8.recipes import Recipe
from dtron.float8.scales import ScaleGroups
from dtron.parallelisms.placement import matches, select

MULTIPLE = 16
"""float8 kernels need matrices whose dims are multiples of this."""


@dataclass(frozen=True)
class Choice:
    """Settings that choose the linear layers; see the keys of [float8]."""

    blocks: str
    """Pattern of the blocks."""
    filter: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    skip_first: int = 0
    skip_last: int = 0
    output: str = ""
    """FQN of the head, if the head is converted too; else empty."""
    never: tuple[str, ...] = ()
    """Patterns of layers that only `filter` can choose: they compute gates or routes."""


def layer_names(model: nn.Module, choice: Choice) -> tuple[str, ...]:
    """Return the FQNs of the linear layers to convert, in the model's order.

    Raises:
        ConfigError: a pattern matches no linear layer, the dims of a named layer are not multiples
            of 16, or no layer is left.
    """
    blocks = list(select(model, choice.blocks))
    if choice.skip_first + choice.skip_last >= len(blocks):
        raise ConfigError(
            f"float8.skip_first = {choice.skip_first} and float8.skip_last = {choice.skip_last} "
            f"skip all {len(blocks)} blocks of the model; lower them"
        )
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    outside = {
        *blocks[: choice.skip_first],
        *blocks[len(blocks) - choice.skip_last :],
    }
    skipped = _matching(choice.skip, linears, "float8.skip")
    named = _matching(choice.filter, linears, "float8.filter")
    chosen = []
    for name, linear in linears.items():
        block = next((b for b in blocks if name.startswith(f"{b}.")), None)
        wanted = name in named if choice.filter else block is not None
        if name not in named and any(matches(pattern, name) for pattern in choice.never):
            continue
        if not wanted or block in outside or name in skipped or name == choice.output:
            continue
        if name in named:
            _check_dims(name, linear, "float8.filter")
        if _fits(linear):
            chosen.append(name)
    if choice.output:
        _check_dims(choice.output, linears[choice.output], "float8.output")
        chosen.append(choice.output)
    if not chosen:
        raise ConfigError(
            "float8.filter leaves no layer: no linear layer of the blocks has dims that are "
            f"multiples of {MULTIPLE}, or float8.skip names all; choose other layers"
        )
    return tuple(chosen)


def convert(
    model: nn.Module,
    names: Collection[str],
    recipe: Recipe,
    emulate: bool,
    groups: ScaleGroups = ScaleGroups(),
    kinds: Mapping[str, type[Float8Linear]] = MappingProxyType({}),
) -> None:
    """Replace, in place, the named nn.Linear modules by float8 modules with the same parameters.

    Args:
        kinds: class of the new module, by FQN; default: Float8Linear.
    """
    for name in names:
        linear = model.get_submodule(name)
        assert type(linear) is nn.Linear, f"{name} is a {type(linear).__name__}"
        parent, _, child = name.rpartition(".")
        made = kinds.get(name, Float8Linear).of(linear, recipe, emulate, groups)
        setattr(model.get_submodule(parent), child, made)


def fuse(model: nn.Module, names: Collection[str]) -> None:
    """Fuse each of the named gated feed-forward modules, silu(gate) up, to one function, in place.

    Modules whose gate, up and down are float8 layers with per-tensor scales and without biases are
    fused; other modules are left unchanged.
    """
    for name in names:
        module = model.get_submodule(name)
        if Float8GatedUnit.fits(module):
            parent, _, child = name.rpartition(".")
            fused = Float8GatedUnit(module.gate, module.up, module.down)  # type: ignore[arg-type]
            setattr(model.get_submodule(parent), child, fused)


def _matching(patterns: Sequence[str], linears: Collection[str], key: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        hits = {name for name in linears if matches(pattern, name)}
        if not hits:
            first = next(iter(linears), "none")
            raise ConfigError(
                f"{key}: pattern {pattern!r} matches no linear layer; use names such as {first}, "
                "where * matches one component"
            )
        found |= hits
    return found


def _fits(linear: nn.Linear) -> bool:
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def _check_dims(name: str, linear: nn.Linear, key: str) -> None:
    if not _fits(linear):
        raise ConfigError(
            f"{key}: {name} is {linear.out_features} x {linear.in_features}, and float8 needs "
            f"multiples of {MULTIPLE}; leave it out, or pad the model's sizes"
        )
