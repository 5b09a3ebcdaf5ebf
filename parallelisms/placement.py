"""Patterns that name modules from outside: `blocks.*` is every direct child of `blocks`.

A pattern is a dotted path in which `*` stands for exactly one component, so that `blocks.*` never
reaches inside a block. A unit is a pattern, or a tuple of patterns whose modules belong together.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from dtron.errors import PlacementError, nearest

Unit = str | tuple[str, ...]


def matches(pattern: str, fqn: str) -> bool:
    """Whether a dotted name fits a pattern, component by component."""
    parts, names = pattern.split("."), fqn.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def select(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Modules of `model` whose FQN fits `pattern`, in the model's order.

    Raises:
        PlacementError: no module fits; names the nearest module.
    """
    names = [name for name, _ in model.named_modules() if name]
    found = {name: model.get_submodule(name) for name in names if matches(pattern, name)}
    if not found:
        children = ", ".join(name for name, _ in model.named_children())
        raise PlacementError(
            f"pattern {pattern!r} matches no module{nearest(pattern, names)} "
            f"(the model has {children})"
        )
    return found


def select_units(model: nn.Module, units: Unit | Sequence[Unit]) -> list[dict[str, nn.Module]]:
    """Expand units into groups of modules, in order: one group a module for a pattern, one group in
    all for a tuple of patterns.

    Raises:
        PlacementError: a pattern matches nothing, or a module is in two units.
    """
    groups: list[dict[str, nn.Module]] = []
    for unit in [units] if isinstance(units, str) else units:
        if isinstance(unit, str):
            groups += [{name: module} for name, module in select(model, unit).items()]
        else:
            groups.append({k: v for pattern in unit for k, v in select(model, pattern).items()})
    _refuse_overlap(name for group in groups for name in group)
    return groups


def refuse_shared_parameters(model: nn.Module, groups: Sequence[dict[str, nn.Module]]) -> None:
    """Refuse a parameter that modules of different units share: each unit gathers its own copy.

    Raises:
        PlacementError: names both modules.
    """
    unit_of = {
        f"{name}.{child}".rstrip("."): index
        for index, group in enumerate(groups)
        for name, module in group.items()
        for child, _ in module.named_modules()
    }
    seen: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            first = seen.setdefault(id(parameter), name)
            if unit_of.get(first) != unit_of.get(name):
                raise PlacementError(
                    f"{first or 'the root'} and {name} share a parameter but are in different "
                    "units; put both into one unit, or into none"
                )


def _refuse_overlap(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlacementError(f"module {name} is in two units")
        seen.add(name)
    for name in seen:
        parts = name.split(".")
        for i in range(1, len(parts)):
            if (outer := ".".join(parts[:i])) in seen:
                raise PlacementError(f"module {name} is in two units: its own and that of {outer}")
