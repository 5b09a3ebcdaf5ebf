"""Patterns that select modules by FQN, and rows that define how a module is sharded over tp.

A pattern is a dotted path in which `*` matches exactly one component, so that `blocks.*` matches
blocks but not the modules inside them. A unit is a pattern (one FSDP unit per module), or a tuple
of patterns (one FSDP unit of all their modules).

Rows are data; `parallelisms/tensor/tensor_parallel.py` applies them. Placements are DTensor
placements on the tp axis: Shard(1) along the sequence, Shard(-1) along features, Replicate() equal
on all ranks.
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
    "whole_heads",
    "whole_input",
]

Unit = str | tuple[str, ...]


class PassThrough(nn.Module):
    """Placeholder for a module on another pipeline stage: returns its first tensor argument.

    It has the module's FQN, so that patterns match the same names in every stage.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(x, ...) -> x."""
        return next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))


def first_tensor(output: Any) -> Tensor:
    """Return the tensor that a pipeline stage sends on: its output, or the first tensor in it.

    The output may be a tuple, list, mapping or Hugging Face output class.

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
    """Return the modules that are on this stage, that is, no placeholders."""
    return {name: m for name, m in modules.items() if not isinstance(m, PassThrough)}


@dataclass(frozen=True)
class Row:
    """How one module is sharded over tp; made by the functions below.

    Instances of `Style` and of torch's ParallelStyle are accepted as rows too.
    """

    kind: str
    inputs: Placement | None = None
    output: Placement | None = None
    argument: int | str = 0
    split: tuple[int, ...] = ()
    n_heads: int = 0


class Style:
    """How one module is sharded, as code: a row that a pass makes.

    (Subclasses of torch's ParallelStyle would have to override a private method.)
    """

    covers_parameters = True
    """Whether it shards the module's parameters; false: only its inputs."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard the module over a 1-D mesh, in place."""
        raise NotImplementedError


def colwise(inputs: Placement = Replicate(), output: Placement = Shard(-1)) -> Row:
    """Shard a Linear by output features, or an Embedding by width (torch's ColwiseParallel).

    Args:
        inputs: placement of the input; other than Replicate(), it is gathered.
        output: placement of the output: Shard(-1) stays sharded, Replicate() is gathered.
    """
    return Row("colwise", inputs, output)


def rowwise(output: Placement = Replicate()) -> Row:
    """Shard a Linear by input features, or an Embedding by vocabulary (torch's RowwiseParallel).

    Args:
        output: Replicate(): partial sums are all-reduced; Shard(1): they are reduce-scattered along
            the sequence.
    """
    return Row("rowwise", None, output)


def sequence(dim: int = 1, split: Sequence[int] = ()) -> Row:
    """A module that computes on a shard of the sequence (torch's SequenceParallel): norms, dropout.

    Its parameters are replicated; each rank has partial gradients, to be summed over tp.

    Args:
        dim: sequence dim of its input.
        split: positions of arguments that are passed unsharded and are to be sharded along `dim`.
    """
    return Row("sequence", Shard(dim), split=tuple(split))


def heads(dim: int = 2) -> Row:
    """A module that computes on a shard of the heads: norms of queries and keys, attention dropout.

    Its parameters are replicated; each rank has partial gradients, to be summed over tp. An
    attribute `head_shard` of the module, if it has one, is set to the rank's index.

    Args:
        dim: head dim of its input.
    """
    return Row("heads", Shard(dim))


def replicate() -> Row:
    """A module with replicated parameters and equal inputs, hence equal gradients, on all ranks."""
    return Row("replicate")


def experts() -> Row:
    """Stacked experts, which `expert_parallel.py` shards over the expert mesh."""
    return Row("experts")


def prepare_input(
    layout: Placement, desired: Placement = Replicate(), argument: int | str = 0
) -> Row:
    """Redistribute an input of a module, once for all its children (torch's PrepareModuleInput).

    Forward gathers Shard(1); backward reduces gradients once.

    Args:
        argument: the tensor's keyword, or its position, where keyword arguments follow positional
            ones in the order of the call.
    """
    return Row("prepare_input", layout, desired, argument)


def whole_input(layout: Placement, argument: int | str = 0) -> Row:
    """Gather an input of a module from `layout` to a plain tensor on all ranks.

    The backward all-reduces or reduce-scatters the ranks' partial gradients.
    """
    return Row("prepare_whole", layout, Replicate(), argument)


def whole_heads(n_heads: int) -> Row:
    """Gather the output of a colwise module of `n_heads` heads to whole heads, as a plain tensor.

    With more tp ranks than heads, the tp / n_heads neighbouring ranks that have parts of one head
    gather it, each for different query heads; the backward reduce-scatters its gradient. Weights
    and their gradients stay sharded as by `colwise`.

    Source: grouped queries under tensor parallelism, as Megatron-LM gathers keys and values.
    """
    return Row("prepare_heads", Shard(-1), Replicate(), n_heads=n_heads)


def prepare_output(layout: Placement, desired: Placement) -> Row:
    """Redistribute a module's output from `layout` to `desired` (torch's PrepareModuleOutput)."""
    return Row("prepare_output", layout, desired)


def leaves(values: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and mappings, except None."""
    if isinstance(values, tuple | list | Mapping):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from leaves(value)
    elif values is not None:
        yield values


def change_argument(
    module: nn.Module, argument: int | str, change: Callable[[nn.Module, Any], Any]
) -> None:
    """Replace an argument x of a module's forward by change(module, x).

    Args:
        argument: as `prepare_input` counts.
    Raises:
        PlacementError: on a call without that argument.
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
    """Whether an FQN matches a pattern, component by component."""
    parts, names = pattern.split("."), fqn.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def select(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return modules of `model` whose FQN matches `pattern`, in the model's order.

    Raises:
        PlacementError: no module matches; names the most similar FQN.
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
    """FQNs of the parameters that a pattern matches; none if it matches a module.

    These are parameters of the root, which has no FQN, or of a module with children.
    """
    if any(matches(pattern, name) for name, _ in model.named_modules()):
        return []
    named = model.named_parameters(remove_duplicate=False)
    return [fqn for fqn, _ in named if matches(pattern, fqn)]


def select_units(model: nn.Module, units: Unit | Sequence[Unit]) -> list[dict[str, nn.Module]]:
    """Expand units to groups of modules, in order.

    A pattern gives one group per module, a tuple of patterns one group for all their modules.

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
    """Raise if modules of different units share a parameter, as each unit would gather a copy.

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
