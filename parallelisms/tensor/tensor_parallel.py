"""Tensor and sequence parallelism: layers split over the tp axis by DTensor placements.

Attention splits by heads, the feed-forward layer by neurons, embedding and head by vocabulary:

    x --prepare_input--> [wq wk wv colwise] -> heads -> [wo rowwise] --> x
    x --prepare_input--> [gate up colwise] -> neurons -> [down rowwise] --> x

Without sequence parallelism x is replicated and a layer costs 2 all-reduces forward (after wo and
down) and 2 backward (before each group of colwise layers). With sequence parallelism x is sharded
along the sequence between those regions: an all-gather before and a reduce-scatter after a region
replace the all-reduce, with the same bytes; norms, dropout and residuals work on T / tp tokens.

With more ranks than key/value heads, wk and wv are still split by rows, inside a head: the ranks
that share a head gather its keys and values (`whole_heads`), and the backward reduce-scatters their
gradients. Only activations are replicated, no weights.

Matrices become DTensors; activations are plain local tensors between modules. Replicated parameters
that see only a shard of the tokens or heads (norms, QK norms) have partial gradients. With
replicas="backward" these parameters are DTensors whose gradients are reduced in each backward. With
replicas="step" they stay plain, and `gradients.reduce_replicas` sums all their gradients with one
collective per step.

Sources: Megatron-LM, arXiv:1909.08053; sequence parallelism, arXiv:2205.05198;
torch.distributed.tensor.parallel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from dtron.errors import PlacementError
from dtron.parallelisms.expert.peer_memory import check_host
from dtron.parallelisms.functional_collectives import is_pending
from dtron.parallelisms.placement import (
    LOW_RANK,
    Row,
    Style,
    change_argument,
    present,
    replicate,
    select,
    select_parameters,
)
from dtron.parallelisms.tensor.async_tp import distribute_adapter, distribute_parameters, fuse

AnyRow = Row | Style | ParallelStyle
Placements = Mapping[Any, AnyRow]
"""{pattern or tuple of patterns: placement rule}. A pattern that matches no module may match
parameters, such as the root's; their rule must be replicate()."""
Replicas = Literal["backward", "step"]

# Placement rules whose parameters are replicated and have partial gradients.
_PARTIAL = ("sequence", "heads")
_SPLIT = ("colwise", "rowwise")


@dataclass(frozen=True)
class Plan:
    """The placement rules of a model's modules, validated."""

    rows: dict[str, list[AnyRow]]
    """Placement rules by the module's FQN, outer modules first."""
    partial: tuple[str, ...]
    """FQNs of replicated parameters whose gradients are partial sums over tp."""
    covered: frozenset[str] = frozenset()
    """FQNs of parameters that rules cover. A tied parameter's other FQNs may be uncovered."""


def plan(model: nn.Module, placements: Placements, tp: int) -> Plan:
    """Match the patterns of `placements` with the model's modules, and check the placement rules.

    Args:
        model: the whole model, with the modules of all pipeline stages.
    Raises:
        PlacementError: a pattern matches nothing, a parameter has no rule or more than one, a tied
            parameter is sharded in two ways, or tp does not divide a sharded dimension.
    """
    rows, covered = _expand(model, placements)
    modules = dict(model.named_modules())
    partial = []
    for name in sorted(rows, key=lambda fqn: fqn.count(".")):
        for row in rows[name]:
            kind = _kind(row)
            if isinstance(row, Row) and kind in _SPLIT:
                _check_divides(name, modules[name], row, tp)
            if isinstance(row, Row) and row.n_heads:
                _check_heads(name, row.n_heads, tp)
            if kind.startswith("prepare"):
                continue
            for child, _ in modules[name].named_parameters(remove_duplicate=False):
                fqn = f"{name}.{child}"
                if fqn in covered:
                    raise PlacementError(f"two rows cover {fqn}: {covered[fqn]}, {kind}; use one")
                covered[fqn] = kind
                partial += [fqn] if kind in _PARTIAL or is_partial(kind, child) else []
    _check_covered(model, covered)
    _check_shared_parameters(model, rows)
    return Plan(rows, tuple(partial), frozenset(covered))


def is_partial(kind: str, parameter: str) -> bool:
    """Whether a parameter is the replicated factor of an adapter of a sharded weight."""
    return LOW_RANK.get(kind, {}).get(parameter, 0) is None


def _kind(row: AnyRow) -> str:
    if isinstance(row, Row):
        return row.kind
    if isinstance(row, Style):
        return "style" if row.covers_parameters else "prepare"
    return "prepare" if isinstance(row, PrepareModuleInput | PrepareModuleOutput) else "style"


def _expand(
    model: nn.Module, placements: Placements
) -> tuple[dict[str, list[AnyRow]], dict[str, str]]:
    """Return {FQN of a module: its rules}, and {FQN of a parameter: its kind of rule}."""
    rows: dict[str, list[AnyRow]] = {}
    named: dict[str, str] = {}
    for unit, row in placements.items():
        for pattern in (unit,) if isinstance(unit, str) else unit:
            parameters = select_parameters(model, pattern)
            if parameters and row != replicate():
                raise PlacementError(
                    f"{parameters[0]} is a parameter, not a module, and can only have the row "
                    "replicate(); for another row, put it into a separate module"
                )
            named |= dict.fromkeys(parameters, "replicate")
            for name in () if parameters else select(model, pattern):
                rows.setdefault(name, []).append(row)
    return rows, named


def _check_covered(model: nn.Module, covered: Mapping[str, str]) -> None:
    """Raise PlacementError if no placement rule covers a parameter, by any of its FQNs."""
    fqns: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        fqns.setdefault(id(parameter), []).append(fqn)
    bare = [names[0] for names in fqns.values() if not any(name in covered for name in names)]
    if bare:
        raise PlacementError(
            f"{bare[0]} is covered by no row of the placements ({len(bare)} such parameters); add "
            "a row for its module, or for the parameter if the root owns it: colwise, rowwise, "
            "sequence, heads, or replicate() if all ranks compute the same with it"
        )


def _check_shared_parameters(model: nn.Module, rows: Mapping[str, Sequence[AnyRow]]) -> None:
    """Raise PlacementError if modules share a parameter but their rules split it differently.

    The modules may be in different pipeline stages.
    """
    split: dict[int, tuple[str, str]] = {}
    for name, module in model.named_modules():
        for row in rows.get(name, ()):
            if not isinstance(row, Row) or row.kind.startswith("prepare"):
                continue
            for child, parameter in module.named_parameters():
                how = row.kind
                if how in _SPLIT:
                    how = "rows" if _splits_rows(row, module) else "columns"
                first, known = split.setdefault(id(parameter), (f"{name}.{child}", how))
                if known != how:
                    raise PlacementError(
                        f"{first} and {name}.{child} are the same parameter, but `placements` "
                        f"shards it in two ways ({known}, {how}); shard it in one way, such as "
                        "with rowwise() for an embedding and colwise() for a head"
                    )


def _splits_rows(row: Row, module: nn.Module) -> bool:
    return (row.kind == "colwise") == isinstance(module, nn.Linear)


def _check_divides(name: str, module: nn.Module, row: Row, tp: int) -> None:
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise PlacementError(
            f"{name} is a {type(module).__name__}, but {row.kind}() shards only Linear and "
            "Embedding; use another placement for it, such as replicate()"
        )
    by_rows = _splits_rows(row, module)
    size = module.weight.shape[0 if by_rows else 1]
    if size % tp:
        legal = [str(n) for n in range(1, min(size, 2 * tp) + 1) if size % n == 0]
        raise PlacementError(
            f"parallel.tp = {tp} does not divide the {size} "
            f"{'rows' if by_rows else 'columns'} of {name}.weight; use {', '.join(legal)}"
        )


def _check_heads(name: str, n_heads: int, tp: int) -> None:
    if n_heads % tp and tp % n_heads:
        raise PlacementError(
            f"parallel.tp = {tp} neither divides the {n_heads} heads of {name} nor is a multiple "
            f"of {n_heads}; use a divisor or a multiple of {n_heads}"
        )


def shared_heads(tp_plan: Plan, tp: int) -> set[int]:
    """Return the `n_heads` of `whole_heads` rules with fewer heads than tp ranks."""
    rows = [row for of_module in tp_plan.rows.values() for row in of_module if isinstance(row, Row)]
    return {row.n_heads for row in rows if 0 < row.n_heads < tp}


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    tp_plan: Plan,
    replicas: Replicas,
    overlap: bool = False,
    sharing: Callable[[int], DeviceMesh] | None = None,
) -> None:
    """Split the modules of a plan over a 1-D mesh, in place; modules of other stages are skipped.

    Args:
        overlap: fuse matmuls with their collectives where placement rules allow it
            (`async_tp.py`).
        sharing: number of heads -> 1-D mesh of the ranks that share this rank's head
            (`Mesh.heads`); required if `shared_heads` is not empty.
    Raises:
        PlacementError: modules that share a parameter split it differently.
        ConfigError: `overlap` with ranks on several hosts.
    """
    modules = present(dict(model.named_modules()))
    shared = _shared_parameters(model)
    if overlap:
        fix = "use a smaller parallel.tp, or leave async_tp out"
        check_host(mesh.get_group(), "parallel.async_tp", "activations", fix)
    done = fuse(modules, tp_plan.rows, mesh) if overlap else set()
    for name, rows in tp_plan.rows.items():
        for row in rows if name in modules else ():
            if isinstance(row, Row) and row.n_heads:
                if row.n_heads < mesh.size():
                    assert sharing is not None, "ranks share heads"
                    _gather_heads(modules[name], sharing(row.n_heads))
            elif (name, row) not in done:
                _apply_row(modules[name], mesh, row, replicas)
    for places in shared:
        # First the uses of the parameter that a placement rule covers.
        places.sort(key=lambda place: place[2] not in tp_plan.covered)
        (first, first_name, _), *others = places
        parameter = getattr(first, first_name)
        for module, name, fqn in others:
            other = getattr(module, name)
            differs = getattr(other, "placements", None) != getattr(parameter, "placements", None)
            if fqn in tp_plan.covered and differs:
                raise PlacementError(
                    f"two modules share a parameter ({name}), but their rows split it differently; "
                    "use rows that split it equally (rowwise() embedding, colwise() head)"
                )
            setattr(module, name, parameter)


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str, str]]]:
    """Return (module, attribute, FQN) of all uses of each shared parameter.

    Call it before modules are split, which replaces their parameters.
    """
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            fqn = f"{prefix}.{name}".lstrip(".")
            places.setdefault(id(parameter), []).append((module, name, fqn))
    return [found for found in places.values() if len(found) > 1]


def _apply_row(module: nn.Module, mesh: DeviceMesh, row: AnyRow, replicas: Replicas) -> None:
    if isinstance(row, Row) and row.split:
        _shard_arguments(module, mesh, row)
    for argument in row.partial if isinstance(row, Row) else ():
        PrepareArgument(argument, Replicate(), Replicate(), Partial()).apply(module, mesh)
    if hasattr(module, "head_shard") and isinstance(row, Row) and row.kind == "heads":
        module.head_shard = mesh.get_local_rank()  # type: ignore[assignment]
    if isinstance(row, Row):
        distribute_adapter(module, mesh, row.kind)
    has_parameters = any(True for _ in module.parameters())
    style = _style(row, module, has_parameters and replicas == "backward")
    if isinstance(style, Style):
        style.apply(module, mesh)
    elif style is not None:
        # Ranks have equal or no initial weights: each keeps its shard, without communication.
        parallelize_module(module, mesh, style, src_data_rank=None)


def _style(row: AnyRow, module: nn.Module, distribute: bool) -> Style | ParallelStyle | None:
    """Return a rule's ParallelStyle; None: the module takes plain local tensors without changes."""
    if not isinstance(row, Row):
        return row
    if row.kind == "rowwise":
        lookup = isinstance(module, nn.Embedding)
        return RowwiseParallel(
            input_layouts=Replicate() if lookup else Shard(-1), output_layouts=row.output
        )
    if row.kind in _PARTIAL and distribute:
        assert isinstance(row.inputs, Shard)
        return SequenceParallel(sequence_dim=row.inputs.dim, use_local_output=True)
    if row.inputs is None or row.output is None:
        return None
    if row.kind == "colwise":
        return _Colwise(row.inputs, row.output)
    if row.kind == "prepare_output":
        return PrepareModuleOutput(output_layouts=row.inputs, desired_output_layouts=row.output)
    gradient = Partial() if row.kind == "prepare_whole" else None
    return PrepareArgument(row.argument, row.inputs, row.output, gradient)


class _Colwise(Style):
    """Like torch's ColwiseParallel, but the module may also return a plain tensor.

    For example, a head may return its loss.
    """

    def __init__(self, inputs: Placement, output: Placement) -> None:
        self.inputs, self.output = inputs, output

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard parameters; gather the input and redistribute the output in each call."""
        inputs, output = self.inputs, self.output
        split = Shard(1 if isinstance(module, nn.Embedding) else 0)
        distribute_parameters(module, mesh, split, split)

        def gather(_module: nn.Module, args: tuple) -> tuple:
            return _redistribute(args[0], mesh, inputs, Replicate()), *args[1:]

        def localize(_module: nn.Module, _args: tuple, out: Any) -> Any:
            if not isinstance(out, DTensor):
                return out
            return _redistribute(out, mesh, out.placements[0], output).to_local()

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(localize)


class PrepareArgument(Style):
    """Like torch's PrepareModuleInput, but for a single argument of the module.

    Args:
        gradient: pass a plain tensor, whose gradient has this placement; None: pass a DTensor.
    """

    covers_parameters = False

    def __init__(
        self,
        argument: int | str,
        layout: Placement,
        desired: Placement,
        gradient: Placement | None = None,
    ) -> None:
        self.argument, self.layout, self.desired = argument, layout, desired
        self.gradient = gradient

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Redistribute the argument in each call of the module."""
        change_argument(module, self.argument, lambda _module, x: self.redistribute(x, mesh))

    def redistribute(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """Redistribute x, a shard of placement `layout`, to `desired`."""
        found = _redistribute(x, mesh, self.layout, self.desired, asynchronous=False)
        return found if self.gradient is None else found.to_local(grad_placements=[self.gradient])


def _redistribute(
    x: Tensor, mesh: DeviceMesh, layout: Placement, desired: Placement, asynchronous: bool = True
) -> DTensor:
    """Return x as a DTensor of placement `desired`; a plain x is this rank's shard of `layout`."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [layout], run_check=False)
    if layout == desired:
        return x
    return x.redistribute(placements=[desired], async_op=asynchronous)


def _gather_heads(module: nn.Module, mesh: DeviceMesh) -> None:
    """All-gather a module's K output features over the mesh: (B, T, K / ranks) -> (B, T, K)."""

    def gather(_module: nn.Module, _args: tuple, out: Tensor) -> Tensor:
        heads = _redistribute(out, mesh, Shard(out.dim() - 1), Replicate(), asynchronous=False)
        return heads.to_local(grad_placements=[Partial()])

    module.register_forward_hook(gather)


def _shard_arguments(module: nn.Module, mesh: DeviceMesh, row: Row) -> None:
    """Shard the replicated arguments at positions `row.split` in each call of a module."""
    assert isinstance(row.inputs, Shard)
    dim, size, rank = row.inputs.dim, mesh.size(), mesh.get_local_rank()

    def shard(_module: nn.Module, args: tuple) -> tuple:
        return tuple(
            x.chunk(size, dim)[rank] if i in row.split and isinstance(x, Tensor) else x
            for i, x in enumerate(args)
        )

    module.register_forward_pre_hook(shard)


def pad_vocabulary(model: nn.Module, names: Sequence[str], multiple: int) -> dict[str, int]:
    """Append zero rows to embeddings and heads, in place, up to a multiple of `multiple` rows.

    Padding rows are not looked up and are masked in the loss, so they stay zero. Checkpoints do not
    contain them.

    Returns:
        {FQN of a padded parameter: its number of rows without padding}.
    """
    padded: dict[str, int] = {}
    new: dict[int, nn.Parameter] = {}
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear | nn.Embedding)
        old = module.weight
        n_rows = old.shape[0]
        if extra := -n_rows % multiple:
            if id(old) not in new:
                zeros = old.new_zeros(extra, old.shape[1])
                rows = torch.cat([old.detach(), zeros])
                new[id(old)] = nn.Parameter(rows, old.requires_grad)
                padded[f"{name}.weight"] = n_rows
            module.weight = new[id(old)]
            size = "out_features" if isinstance(module, nn.Linear) else "num_embeddings"
            setattr(module, size, n_rows + extra)
    return padded


def settle_outputs(model: nn.Module, compiled: Sequence[str], tp_plan: Plan) -> None:
    """Make split modules outside of compiled blocks wait for their output's collective.

    torch 2.13 silently loses the gradient of a pending output that enters a compiled block. Adding
    zero to the output waits for the collective. torch 2.11 does not need this.
    """
    modules = present(dict(model.named_modules()))
    for name, rows in tp_plan.rows.items():
        inside = any(name == block or name.startswith(f"{block}.") for block in compiled)
        if name in modules and rows and not inside:
            modules[name].register_forward_hook(_settled)


def _settled(_module: nn.Module, _args: Any, out: Any) -> Any:
    return out + 0 if is_pending(out) else out
