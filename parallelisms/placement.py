"""Patterns that select modules by FQN, and placement rules: how a module is sharded over tp.

A pattern is a dotted path in which `*` matches exactly one component, so that `blocks.*` matches
blocks but not the modules inside them. A unit is a pattern (one FSDP unit per module), or a tuple
of patterns (one FSDP unit of all their modules).

Placement rules (class `Row`) are data; `parallelisms/tensor/tensor_parallel.py` applies them.
Placements are DTensor placements on the tp axis: Shard(1) along the sequence, Shard(-1) along
features, Replicate() equal on all ranks.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from dtron.errors import PlacementError, nearest

__all__ = [
    "LOW_RANK",
    "Encoder",
    "PassThrough",
    "Placement",
    "Replicate",
    "Row",
    "Shard",
    "Style",
    "Unit",
    "change_argument",
    "colwise",
    "contains",
    "experts",
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
    "sent_tensors",
    "sequence",
    "whole_heads",
    "whole_input",
]

Unit = str | tuple[str, ...]

LOW_RANK: Mapping[str, Mapping[str, int | None]] = {
    "colwise": {"lora_a": None, "lora_b": 0, "lora_magnitude": 0},
    "rowwise": {"lora_a": 1, "lora_b": None, "lora_magnitude": None},
}
"""Kind of a module's rule -> {parameter of its adapter: the dim that tp shards}.

The adapter of a weight (N, K) is lora_b (N, rank) times lora_a (rank, K), with DoRA also
lora_magnitude (N,). None: the parameter is replicated; its gradient is a partial sum over tp."""


class PassThrough(nn.Module):
    """Placeholder for a module on another pipeline stage: returns its first tensor argument.

    It has the module's FQN, so that patterns match the same names in every stage.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Return the first argument that is a tensor or a tuple of tensors: (x, ...) -> x."""
        return next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) or _is_tensors(x))


def sent_tensors(output: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a pipeline stage sends on.

    These are the output, or all tensors of a tuple that contains nothing else. The output may also
    be another tuple, a list, a mapping or a Hugging Face output class; then its first tensor is
    sent.

    Raises:
        PlacementError: the output has no tensor.
    """
    if _is_tensors(output):
        return output
    values: Iterable[Any] = output if isinstance(output, tuple | list) else [output]
    for value in output.values() if isinstance(output, Mapping) else values:
        if isinstance(value, Tensor):
            return (value,)
    raise PlacementError(
        f"a pipeline stage returns a {type(output).__name__} without a tensor; let the model "
        "return a tensor, or a tuple, list or mapping with a tensor"
    )


def _is_tensors(value: Any) -> bool:
    """Whether a value is a tuple of tensors, with at least one."""
    return type(value) is tuple and len(value) > 0 and all(isinstance(x, Tensor) for x in value)


def present(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of this stage, without placeholders of other stages."""
    return {name: m for name, m in modules.items() if not isinstance(m, PassThrough)}


@dataclass(frozen=True)
class Encoder:
    """Modules of an encoder before the decoder, such as one of images.

    Its inputs (N, ...) are a batch of their own: N differs between micro-batches.
    """

    modules: tuple[str, ...]
    """FQNs in the order of the forward; the first module's first argument is the inputs."""
    blocks: str
    """Pattern of its blocks."""
    reader: str
    """FQN of the decoder's module whose second argument is the encoder's output (N, ...)."""


@dataclass(frozen=True)
class Row:
    """Placement rule: how one module is sharded over tp; created by functions such as `colwise`.

    Instances of `Style` and of torch's ParallelStyle are accepted as placement rules too.
    """

    kind: str
    inputs: Placement | None = None
    output: Placement | None = None
    argument: int | str = 0
    split: tuple[int, ...] = ()
    n_heads: int = 0
    partial: tuple[int, ...] = ()


class Style:
    """Base class of placement rules with their own sharding code, `apply`, instead of a `kind`.

    (A subclass of torch's ParallelStyle would have to override a private method.)
    """

    covers_parameters = True
    """Whether the rule shards the module's parameters; false: only the module's inputs."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard the module over a 1-D mesh, in place."""
        raise NotImplementedError


def colwise(inputs: Placement = Replicate(), output: Placement = Shard(-1)) -> Row:
    """Shard a Linear by output features, or an Embedding by width (torch's ColwiseParallel).

    Args:
        inputs: placement of the input; an input with Shard(dim) is all-gathered first.
        output: placement of the output; Shard(-1): it stays sharded; Replicate(): it is gathered.
    """
    return Row("colwise", inputs, output)


def rowwise(output: Placement = Replicate()) -> Row:
    """Shard a Linear by input features, or an Embedding by vocabulary (torch's RowwiseParallel).

    Args:
        output: Replicate(): partial sums are all-reduced; Shard(1): they are reduce-scattered along
            the sequence.
    """
    return Row("rowwise", None, output)


def sequence(dim: int = 1, split: Sequence[int] = (), partial: Sequence[int] = ()) -> Row:
    """Placement rule: the module computes on a shard of the sequence (torch's SequenceParallel).

    Examples are norms and dropout. The module's parameters are replicated; each rank's gradients
    are partial and are summed over tp.

    Args:
        dim: sequence dim of the module's input.
        split: positions of replicated arguments to shard along `dim`.
        partial: positions of replicated arguments that each rank uses for its shard of the sequence
            only: the backward all-reduces their partial gradients.
    """
    return Row("sequence", Shard(dim), split=tuple(split), partial=tuple(partial))


def heads(dim: int = 2) -> Row:
    """Placement rule: the module computes on a shard of the heads.

    Examples are query and key norms, and attention dropout. The module's parameters are replicated;
    each rank's gradients are partial and are summed over tp. If the module has an attribute
    `head_shard`, it is set to the rank's index.

    Args:
        dim: head dim of the module's input.
    """
    return Row("heads", Shard(dim))


def replicate() -> Row:
    """Placement rule: the module has replicated parameters, and equal inputs on all ranks.

    Gradients are equal on all ranks too, and are not summed over tp.
    """
    return Row("replicate")


def experts() -> Row:
    """Placement rule of stacked experts: `expert_parallel.py` shards them over the expert mesh."""
    return Row("experts")


def prepare_input(
    layout: Placement, desired: Placement = Replicate(), argument: int | str = 0
) -> Row:
    """Redistribute an input of a module, once for all its children (torch's PrepareModuleInput).

    From Shard(1) to Replicate() the forward all-gathers, and the backward reduce-scatters.

    Args:
        argument: the tensor's keyword, or its index among the call's positional and then keyword
            arguments.
    """
    return Row("prepare_input", layout, desired, argument)


def whole_input(layout: Placement, argument: int | str = 0) -> Row:
    """Gather an input of a module from `layout` to a plain tensor on all ranks.

    The backward all-reduces or reduce-scatters the ranks' partial gradients.
    """
    return Row("prepare_whole", layout, Replicate(), argument)


def whole_heads(n_heads: int) -> Row:
    """Gather the output of a colwise module of `n_heads` heads to whole heads, as a plain tensor.

    Needed if tp > n_heads: then each head is sharded over tp / n_heads neighbouring ranks. These
    ranks all-gather the head, and each uses it for its own query heads; the backward
    reduce-scatters the head's gradient. Weights and their gradients stay sharded as in `colwise`.

    Source: Megatron-LM, which gathers keys and values this way for grouped-query attention.
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
        argument: the argument's keyword, or its index among the call's positional and then keyword
            arguments.
    Raises:
        PlacementError: in the forward, if the call lacks this argument.
    """

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        key = argument
        if isinstance(key, int) and len(args) <= key < len(args) + len(kwargs):
            key = list(kwargs)[key - len(args)]
        if key not in kwargs and key not in range(len(args)):
            raise PlacementError(
                f"the forward of {type(module).__name__} was called without the argument {key!r}; "
                "name an argument that the call passes"
            )
        if isinstance(key, str):
            return args, {**kwargs, key: change(module, kwargs[key])}
        return tuple(change(module, x) if i == key else x for i, x in enumerate(args)), kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def matches(pattern: str, fqn: str) -> bool:
    """Whether an FQN matches a pattern, component by component."""
    parts, names = pattern.split("."), fqn.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def contains(pattern: str, fqn: str) -> bool:
    """Whether a pattern matches an FQN, or the FQN of a module that contains it."""
    return matches(pattern, ".".join(fqn.split(".")[: pattern.count(".") + 1]))


def select(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return modules of `model` whose FQN matches `pattern`, in the model's order.

    Raises:
        PlacementError: no module matches; the message has the most similar FQN.
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
    """Return FQNs of parameters that match a pattern; empty if the pattern matches a module.

    Used for parameters of the root, which has no FQN, or of a module with children.
    """
    if any(matches(pattern, name) for name, _ in model.named_modules()):
        return []
    named = model.named_parameters(remove_duplicate=False)
    return [fqn for fqn, _ in named if matches(pattern, fqn)]


def select_units(model: nn.Module, units: Unit | Sequence[Unit]) -> list[dict[str, nn.Module]]:
    """Expand FSDP units to groups of modules, in order.

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


def join_units(
    groups: Sequence[Mapping[str, nn.Module]], units: Unit | Sequence[Unit], n: int
) -> list[list[nn.Module]]:
    """Join each n neighbouring FSDP units that one pattern with a * gave; others stay single.

    Blocks that evaluation skips (`in_training_alone`) are not joined with others.

    Args:
        groups: the modules of each unit, by FQN, in the order of the forward.
        units: the patterns, as in `select_units`.

    Raises:
        PlacementError: n > 1, and no pattern has a *.
    """
    patterns = [u for u in ([units] if isinstance(units, str) else units) if "*" in u]
    if n > 1 and not patterns:
        raise PlacementError(
            f"parallel.blocks_per_unit = {n} joins neighbouring units of a pattern with a *, which "
            '`units` lacks; use one such as "blocks.*", or leave the key out'
        )

    def kind(group: Mapping[str, nn.Module]) -> tuple[str, bool] | None:
        (name, module), *others = group.items()
        found = (str(p) for p in patterns if not others and matches(str(p), name))
        pattern = next(found, None)
        if pattern is None:
            return None
        return pattern, bool(getattr(module, "in_training_alone", False))

    joined: list[list[nn.Module]] = []
    for of, run in itertools.groupby(groups, kind):
        alike, size = list(run), n if of else 1
        for first in range(0, len(alike), size):
            joined.append([m for group in alike[first : first + size] for m in group.values()])
    return joined


def refuse_shared_parameters(model: nn.Module, groups: Sequence[dict[str, nn.Module]]) -> None:
    """Raise PlacementError if modules of different FSDP units share a parameter."""
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
            raise PlacementError(f"module {name} is in two units; name it in one")
        seen.add(name)
    for name in seen:
        parts = name.split(".")
        for i in range(1, len(parts)):
            if (outer := ".".join(parts[:i])) in seen:
                raise PlacementError(
                    f"module {name} is in two units, its own and {outer}'s; use one"
                )
