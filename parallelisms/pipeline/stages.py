"""Split a model into pipeline stages by the FQNs of its modules.

A stage is a copy of the whole model in which the modules of other stages return their input, so
that the model's own forward runs it and every parameter keeps its FQN. Only weights that two stages
share (tied embeddings) are copied: each stage has a copy. Both copies start equal and get the same
gradient, the sum of the two stages' gradients.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtron.errors import PlacementError
from dtron.parallelisms.gradients import flatten, local_gradients, unflatten_
from dtron.parallelisms.placement import PassThrough, select


@dataclass(frozen=True)
class Cut:
    """Modules and parameters of each stage."""

    modules: tuple[tuple[str, ...], ...]
    """FQNs of the modules of each stage."""
    names: Mapping[str, str]
    """{FQN of a parameter: its name}. The name is the first FQN if the parameter has several."""
    shared: Mapping[str, tuple[int, ...]]
    """{name of a parameter that several stages share: these stages}"""


def cut(model: nn.Module, stages: Sequence[Sequence[str]]) -> Cut:
    """Find the modules and parameters of each stage in the whole model.

    Args:
        stages: patterns of the modules of each stage, in the order of the model's forward.

    Raises:
        PlacementError: a pattern matches nothing, a module is in two stages, a parameter is in no
            stage, or a layer of a container is in an earlier stage than the layer before it.
    """
    modules = tuple(
        tuple(name for pattern in patterns for name in select(model, pattern))
        for patterns in stages
    )
    stage_of: dict[str, int] = {}
    for stage, names_of_stage in enumerate(modules):
        for name in names_of_stage:
            if name in stage_of:
                raise PlacementError(
                    f"module {name} is in stages {stage_of[name]} and {stage}; name it in one"
                )
            stage_of[name] = stage
    _check_order(model, stage_of)
    names = _names(model)
    holders: dict[str, set[int]] = {}
    for fqn, name in names.items():
        holders.setdefault(name, set()).add(_stage_of(fqn, stage_of))
    shared = {name: tuple(sorted(found)) for name, found in holders.items() if len(found) > 1}
    return Cut(modules, names, shared)


def _check_order(model: nn.Module, stage_of: Mapping[str, int]) -> None:
    """Check that stages follow the order of the layers in each container."""
    for prefix, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        names = [f"{prefix}.{name}".lstrip(".") for name, _ in container.named_children()]
        in_stages = [name for name in names if name in stage_of]
        for first, second in itertools.pairwise(in_stages):
            if stage_of[first] > stage_of[second]:
                raise PlacementError(
                    f"{first} is in stage {stage_of[first]}, but {second}, which follows it, is in "
                    f"stage {stage_of[second]}; order stages as in the forward"
                )


def uncut(model: nn.Module) -> Cut:
    """Return the Cut of a model with a single stage."""
    return Cut(((),), _names(model), {})


def _names(model: nn.Module) -> dict[str, str]:
    """Map each FQN of a parameter to the first of its FQNs."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {fqn: first.setdefault(id(parameter), fqn) for fqn, parameter in named}


def _stage_of(fqn: str, stage_of: Mapping[str, int]) -> int:
    parts = fqn.split(".")
    prefixes = [".".join(parts[:i]) for i in range(1, len(parts))]
    found = {stage_of[prefix] for prefix in prefixes if prefix in stage_of}
    if not found and len(parts) == 1:
        raise PlacementError(
            f"parameter {fqn} is owned by the root, whose forward every stage runs; move it and "
            "its uses into a module, and name that module in one stage"
        )
    if not found:
        raise PlacementError(f"parameter {fqn} is in no pipeline stage; name its module in one")
    if len(found) > 1:
        raise PlacementError(f"parameter {fqn} is in stages {sorted(found)}; name it in one")
    return found.pop()


def take_stage(model: nn.Module, stages: Cut, stage: int) -> nn.Module:
    """Copy `model` with placeholders for modules of other stages; parameters are shared."""
    absent = [name for i, names in enumerate(stages.modules) if i != stage for name in names]
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    memo |= {id(model.get_submodule(name)): PassThrough() for name in absent}
    return copy.deepcopy(model, memo)


@dataclass
class SharedWeights:
    """Parameters of this rank's stages that another stage has as well (tied weights)."""

    pairs: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    """(owner, copy) pairs with both stages on this rank, as with placement "v"."""
    remote: dict[int, list[nn.Parameter]] = field(default_factory=dict)
    """{pp rank that has the other copy: this rank's parameters}"""
    copies: list[nn.Parameter] = field(default_factory=list)
    """Local parameters owned by another stage, which counts them in the gradient norm."""

    @classmethod
    def of(
        cls, cut: Cut, parts: Mapping[int, nn.Module], ranks: Sequence[int], rank: int
    ) -> "SharedWeights":
        """Find the shared parameters of this rank's stages; call it after sharding.

        Args:
            parts: this rank's stages by stage number.
            ranks: the rank of each stage.
        Raises:
            PlacementError: more than two stages share a parameter.
        """
        found = cls()
        for name, stages in sorted(cut.shared.items()):
            if len(stages) != 2:
                raise PlacementError(f"{len(stages)} stages share {name}; at most 2 can share it")
            owner, copy_stage = stages
            first, second = ranks[owner], ranks[copy_stage]
            local = {
                stage: parameter
                for stage in stages
                if ranks[stage] == rank
                for fqn, parameter in parts[stage].named_parameters()
                if cut.names[fqn] == name and parameter.requires_grad
            }
            if not local:
                continue
            found.copies += [local[copy_stage]] if copy_stage in local else []
            if first == second == rank:
                found.pairs.append((local[owner], local[copy_stage]))
            elif rank in (first, second):
                other = second if rank == first else first
                found.remote.setdefault(other, []).extend(local.values())
        return found

    def parameters(self) -> list[nn.Parameter]:
        """Return all shared parameters of this rank, owners and copies."""
        pairs = [parameter for pair in self.pairs for parameter in pair]
        return pairs + [parameter for group in self.remote.values() for parameter in group]

    @torch.no_grad()
    def sum_gradients(self, group: dist.ProcessGroup) -> None:
        """Sum the gradient of each tied weight over its two stages, in place.

        Each pair of ranks exchanges one flat tensor.
        """
        for counted, copied in self.pairs:
            first, second = local_gradients([counted, copied])
            second.add_(first)
            first.copy_(second)
        for rank, parameters in sorted(self.remote.items()):
            gradients = local_gradients(parameters)
            flat = flatten(gradients)
            other, peer = torch.empty_like(flat), dist.get_global_rank(group, rank)
            exchange = [
                dist.P2POp(dist.isend, flat, peer, group),
                dist.P2POp(dist.irecv, other, peer, group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            unflatten_(gradients, flat + other)
