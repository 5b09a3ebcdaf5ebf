"""Patterns that name modules from outside, and the rows that say how a named module splits over tp.

A pattern is a dotted path in which `*` stands for exactly one component, so that `blocks.*` never
reaches inside a block. A unit is a pattern, or a tuple of patterns whose modules belong together.

Rows are data that `parallelisms/tensor/tensor_parallel.py` acts on. Placements are those of DTensor
on the tp axis: Shard(1) is "split along the sequence", Shard(-1) "along features", Replicate "whole
on each rank".
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from dtron.errors import PlacementError, nearest

__all__ = [
    "PassThrough",
    "Placement",
    "Replicate",
    "Row",
    "Shard",
    "Style",
    "Unit",
    "change_argument",
    "colwise",
    "experts",
    "first_tensor",
    "heads",
    "leaves",
    "matches",
    "prepare_input",
    "prepare_output",
    "present",
    "refuse_shared_parameters",
    "replicate",
    "rowwise",
    "select",
    "select_parameters",
    "select_units",
    "sequence",
    "whole_input",
]

Unit = str | tuple[str, ...]


class PassThrough(nn.Module):
    """Stands where a pipeline stage lacks a module: gives back its first argument that is a tensor.
    It keeps the module's name, so that patterns find the same names in every stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(x, ...) -> x."""
        return next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))


def first_tensor(output: Any) -> Tensor:
    """What a pipeline stage hands on: its output, or the first tensor of a tuple, a list, a mapping
    or an output class of Hugging Face.

    Raises:
        PlacementError: there is none.
    """
    values: Iterable[Any] = output if isinstance(output, tuple | list) else [output]
    for value in output.values() if isinstance(output, Mapping) else values:
        if isinstance(value, Tensor):
            return value
    raise PlacementError(
        f"a pipeline stage gives a {type(output).__name__} without a tensor; let the model return "
        "a tensor, or a tuple or mapping that has one"
    )


def present(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those that a stage has."""
    return {name: m for name, m in modules.items() if not isinstance(m, PassThrough)}


@dataclass(frozen=True)
class Row:
    """How one module splits. Made by the functions below; torch's ParallelStyles are rows too, and
    so are `Style`s."""

    kind: str
    inputs: Placement | None = None
    output: Placement | None = None
    argument: int | str = 0
    split: tuple[int, ...] = ()


class Style:
    """How one module splits, as code: a row that a pass makes for a module. (torch's ParallelStyle
    serves users; its subclasses would override a private method.)"""

    covers_parameters = True
    """Whether it splits the module's parameters, or its input alone."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Split the module over a mesh of one axis, in place."""
        raise NotImplementedError


def colwise(inputs: Placement = Replicate(), output: Placement = Shard(-1)) -> Row:
    """A Linear split by output features, or an Embedding by width (torch's ColwiseParallel).

    Args:
        inputs: how the input comes; other than Replicate() it is gathered.
        output: how the output leaves: Shard(-1) stays split, Replicate() is gathered.
    """
    return Row("colwise", inputs, output)


def rowwise(output: Placement = Replicate()) -> Row:
    """A Linear split by input features, or an Embedding by vocabulary (torch's RowwiseParallel).

    Args:
        output: the ranks' partial sums are all-reduced (Replicate()) or reduce-scattered along the
            sequence (Shard(1)).
    """
    return Row("rowwise", None, output)


def sequence(dim: int = 1, split: Sequence[int] = ()) -> Row:
    """A module that works on a part of the sequence (torch's SequenceParallel): norms, dropout.

    Its parameters are on all ranks; each rank's gradients are a part of the sum over tp.

    Args:
        dim: the sequence dim of its input.
        split: arguments, by position, that come whole and are cut along `dim` (positions, keys).
    """
    return Row("sequence", Shard(dim), split=tuple(split))


def heads(dim: int = 2) -> Row:
    """A module that works on the rank's own heads: norms of queries and keys, attention dropout.

    Its parameters are on all ranks; each rank's gradients are a part of the sum over tp. If the
    module has an attribute `head_shard`, it is set to the rank's index, from which the module knows
    which heads it sees.

    Args:
        dim: the head dim of its input.
    """
    return Row("heads", Shard(dim))


def replicate() -> Row:
    """A module that all ranks compute alike from equal inputs; its gradients are whole on each."""
    return Row("replicate")


def experts() -> Row:
    """Stacked experts, which expert parallelism splits by its own axes (`expert_parallel.py`)."""
    return Row("experts")


def prepare_input(
    layout: Placement, desired: Placement = Replicate(), argument: int | str = 0
) -> Row:
    """Bring an input of a module from `layout` to `desired` once, for all its children (torch's
    PrepareModuleInput). Forward gathers Shard(1); backward reduces the children's gradients once.

    Args:
        argument: the tensor's position, keywords counting in the order of the call, or its keyword.
    """
    return Row("prepare_input", layout, desired, argument)


def whole_input(layout: Placement, argument: int | str = 0) -> Row:
    """Bring an input of a module from `layout` to all ranks whole, as a plain local tensor. The
    ranks' gradients of it are parts of a sum, which the backward sums up or reduce-scatters."""
    return Row("prepare_whole", layout, Replicate(), argument)


def prepare_output(layout: Placement, desired: Placement) -> Row:
    """Bring a module's local output from `layout` to `desired` (torch's PrepareModuleOutput)."""
    return Row("prepare_output", layout, desired)


def leaves(values: Any) -> Iterator[Any]:
    """What tuples, lists and mappings hold, however deep; None is nothing."""
    if isinstance(values, tuple | list | Mapping):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from leaves(value)
    elif values is not None:
        yield values


def change_argument(
    module: nn.Module, argument: int | str, change: Callable[[nn.Module, Any], Any]
) -> None:
    """Let a module's forward see change(module, x) in place of an argument x.

    Args:
        argument: as `prepare_input` counts.
    Raises:
        PlacementError: in a call without that argument.
    """

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        key = argument
        if isinstance(key, int) and len(args) <= key < len(args) + len(kwargs):
            key = list(kwargs)[key - len(args)]
        if key not in kwargs and key not in range(len(args)):
            raise PlacementError(f"a {type(module).__name__} is called without argument {key!r}")
        if isinstance(key, str):
            return args, {**kwargs, key: change(module, kwargs[key])}
        return tuple(change(module, x) if i == key else x for i, x in enumerate(args)), kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


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


def select_parameters(model: nn.Module, pattern: str) -> list[str]:
    """FQNs of the parameters that a pattern names, if it names no module: those of the root, whose
    module has no name, and those a module has beside its children."""
    if any(matches(pattern, name) for name, _ in model.named_modules()):
        return []
    named = model.named_parameters(remove_duplicate=False)
    return [fqn for fqn, _ in named if matches(pattern, fqn)]


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
