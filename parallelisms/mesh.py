"""The device mesh: one set of ranks, named axes, no process-global state.

Axes from outermost to innermost are pp, dp_replicate, dp_shard, cp, tp, so that neighbouring
ranks, which share the fastest links, hold the shards that talk most. An axis exists also with
degree 1.

    batch axes  dp_replicate, dp_shard       ranks that read different sequences
    fsdp axes   dp_shard, cp                 ranks that share parameters and optimizer state
    loss axes   dp_replicate, dp_shard, cp   ranks that hold different tokens
    micro axes  cp, tp                           ranks whose routers share a micro-batch
    token axes  the loss axes, tp                ranks whose routers see different tokens
    share axes  pp and the loss axes         ranks whose shares make up the loss

Experts see the same ranks by other axes, `Mesh.experts`: pp, dp_replicate, edp_shard, ep, etp.

DTensors live on `Mesh.device_mesh`, whose dims are pp, dp_replicate, the fsdp axes as one dim, and
tp: every mesh that shards parameters is a slice of it. Other axes, alone or joined, are process
groups.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtron.config import DEGREES, Degree, resolve_degrees, resolve_expert_degrees
from dtron.errors import ConfigError

BATCH_AXES: tuple[Degree, ...] = ("dp_replicate", "dp_shard")
FSDP_AXES: tuple[Degree, ...] = ("dp_shard", "cp")
LOSS_AXES: tuple[Degree, ...] = ("dp_replicate", "dp_shard", "cp")
MICRO_AXES: tuple[Degree, ...] = ("cp", "tp")
TOKEN_AXES: tuple[Degree, ...] = (*LOSS_AXES, "tp")
SHARE_AXES: tuple[Degree, ...] = ("pp", *LOSS_AXES)
_JOIN = "+"  # between the axes of a flattened mesh, in its name


def axes_of(name: str) -> tuple[str, ...]:
    """The axes of a mesh dim's name: itself, or those that a flattened dim joins."""
    return tuple(name.split(_JOIN))


class Mesh:
    """Named axes over the ranks of the default process group.

    Args:
        dp_shard: ranks that share parameters; -1 takes what the other degrees leave.
        ep: ranks that hold different experts, within dp_shard x cp x tp.
        etp: ranks that share each expert's matrices, likewise.
        device_type: "cuda" or "cpu"; by default cuda where there is one.
        options: process-group options by axis: a backend's name, its options object (such as
            ProcessGroupNCCL.Options), or both as a tuple.
        high_priority: axes whose NCCL collectives run on streams of high priority, so that they
            start before computation that is queued already.

    Raises:
        ConfigError: the degrees do not multiply to the world size, or there is no process group.
    """

    def __init__(
        self,
        *,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        cp: int = 1,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int = 1,
        device_type: str | None = None,
        options: Mapping[Degree, Any] | None = None,
        high_priority: Sequence[Degree] = (),
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("a Mesh needs a process group; call init_process_group first")
        asked: dict[Degree, int] = {
            "pp": pp,
            "dp_replicate": dp_replicate,
            "dp_shard": dp_shard,
            "cp": cp,
            "tp": tp,
        }
        self.degrees = resolve_degrees(asked, dist.get_world_size())
        self.device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        place = np.unravel_index(dist.get_rank(), tuple(self.degrees.values()))
        self._place = {axis: int(i) for axis, i in zip(DEGREES, place, strict=True)}
        high = {axis: _high_priority() for axis in high_priority}
        override: dict[str, Any] = high | dict(options or {})
        sizes = {
            "pp": self.degrees["pp"],
            "dp_replicate": self.degrees["dp_replicate"],
            _JOIN.join(self._wide(FSDP_AXES)): self.size(*FSDP_AXES),
            "tp": self.degrees["tp"],
        }
        self.device_mesh = init_device_mesh(
            self.device_type,
            tuple(sizes.values()),
            mesh_dim_names=tuple(sizes),
            backend_override={a: o for a, o in override.items() if a in sizes} or None,
        )
        self._groups = {axes_of(name): self.device_mesh.get_group(name) for name in sizes}
        for axis in FSDP_AXES:
            if (axis,) not in self._groups:
                self._groups[axis,] = _group(self.degrees, [axis], override.get(axis))
        inside = {f"cp_{part}": override["cp"] for part in ("outer", "inner") if "cp" in override}
        self._override_of_context = inside or None
        self.expert_degrees = resolve_expert_degrees(self.degrees, ep, etp)
        self._experts: DeviceMesh | None = None
        self._expert_group: dist.ProcessGroup | None = None
        self._context: dict[int, DeviceMesh] = {}
        self._heads: dict[int, DeviceMesh] = {}
        self._override_of_heads = override.get("tp")

    @property
    def experts(self) -> DeviceMesh:
        """The experts' view of the same ranks, made when first asked for (by all ranks together):
        pp, dp_replicate, edp_shard, ep, etp."""
        if self._experts is None:
            degrees = self.expert_degrees
            self._experts = init_device_mesh(
                self.device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
            )
        return self._experts

    def expert_group(self) -> dist.ProcessGroup:
        """The process group over ep x etp, etp being the innermost."""
        if self._expert_group is None:
            group: dist.ProcessGroup = _group(self.expert_degrees, ["ep", "etp"])
            self._expert_group = group
        return self._expert_group

    def sharing_experts(self) -> DeviceMesh:
        """(dp_replicate, edp_shard) where there are replicas, else (edp_shard,)."""
        if self.degrees["dp_replicate"] == 1:
            return self.experts["edp_shard"]
        return self.experts["dp_replicate", "edp_shard"]

    def context(self, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The cp axis as blocks of `inner` neighbours: the process group of this rank's place in
        every block, and that of its block. Made when first asked for, by all ranks together."""
        if inner not in self._context:
            cp, tp = self.degrees["cp"], self.degrees["tp"]
            self._context[inner] = init_device_mesh(
                self.device_type,
                (dist.get_world_size() // (cp * tp), cp // inner, inner, tp),
                mesh_dim_names=("others", "cp_outer", "cp_inner", "tp"),
                backend_override=self._override_of_context,  # type: ignore[arg-type]
            )
        mesh = self._context[inner]
        return mesh["cp_outer"].get_group(), mesh["cp_inner"].get_group()

    def heads(self, n_heads: int) -> DeviceMesh:
        """The tp axis as `n_heads` blocks of neighbours that share a head: the 1-D mesh of this
        rank's block. Made when first asked for, by all ranks together."""
        tp = self.degrees["tp"]
        if n_heads == 1:
            return self.flat("tp")
        if n_heads not in self._heads:
            degrees = {axis: n for axis, n in self.degrees.items() if axis != "tp"}
            degrees |= {"tp_outer": n_heads, "tp_inner": tp // n_heads}
            group = _group(degrees, ["tp_inner"], self._override_of_heads)
            self._heads[n_heads] = DeviceMesh.from_group(
                group, self.device_type, mesh_dim_names=("tp_inner",)
            )
        return self._heads[n_heads]

    def replicated(self, *axes: Degree) -> DeviceMesh:
        """The 2-D mesh of dp_replicate and these axes together, as `flat` takes them."""
        return self.device_mesh["dp_replicate", _JOIN.join(self._wide(axes))]

    def size(self, *axes: Degree) -> int:
        """Number of ranks over these axes together."""
        return math.prod(self.degrees[axis] for axis in axes)

    def rank(self, *axes: Degree) -> int:
        """This rank's index over these axes together, the first axis being outermost."""
        rank = 0
        for axis in axes:
            rank = rank * self.degrees[axis] + self._place[axis]
        return rank

    def flat(self, *axes: Degree) -> DeviceMesh:
        """The 1-D mesh of pp, dp_replicate or tp, or over the fsdp axes together."""
        return self.device_mesh[_JOIN.join(self._wide(axes))]

    def group(self, *axes: Degree) -> dist.ProcessGroup:
        """The process group over these axes together; those of degree 1 cost no group. Joined axes
        get theirs when first asked for, by all ranks together."""
        wide = self._wide(axes)
        if wide not in self._groups:
            self._groups[wide] = _group(self.degrees, wide)
        return self._groups[wide]

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group made so far."""
        return [group for _, group in self._labelled()]

    def group_names(self) -> dict[str, str]:
        """Axis, or axes joined by "+", of every process group made so far, by the group's name."""
        world = dist.group.WORLD
        names: dict[str, str] = {str(world.group_name): "world"} if world else {}
        for label, group in self._labelled():
            name = str(group.group_name)
            # One of all ranks is shared by all that ask for it: the first axis names it.
            names[name] = label if names.get(name, "world") == "world" else names[name]
        return names

    def _wide(self, axes: Sequence[Degree]) -> tuple[Degree, ...]:
        """Those of degree 2 or more, or the last one."""
        return tuple(axis for axis in axes if self.degrees[axis] > 1) or tuple(axes[-1:])

    def _labelled(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Every process group made so far, with its axis or its axes joined by "+"."""
        single = [axes for axes in ((axis,) for axis in DEGREES) if axes in self._groups]
        for axes in (*single, *(axes for axes in self._groups if len(axes) > 1)):
            yield _JOIN.join(axes), self._groups[axes]
        for mesh in self._context.values():
            yield from ((axis, mesh.get_group(axis)) for axis in ("cp_outer", "cp_inner"))
        yield from (("tp_inner", mesh.get_group()) for mesh in self._heads.values())
        if self._experts is not None:
            axes = ("dp_replicate", "edp_shard", "ep", "etp")
            yield from ((axis, self._experts.get_group(axis)) for axis in axes)
        if self._expert_group is not None:
            yield _JOIN.join(("ep", "etp")), self._expert_group


def _group(degrees: Mapping[Any, int], axes: Sequence[str], override: Any = None) -> Any:
    """This rank's process group over some axes together, made by all ranks together.

    Args:
        degrees: of all axes, from outermost to innermost.
        override: a backend's name, its options, or both.
    """
    world = dist.group.WORLD
    assert world is not None, "a Mesh has a process group"
    order = [axis for axis in degrees if axis not in axes] + list(axes)
    ranks = np.arange(dist.get_world_size()).reshape(tuple(degrees.values()))
    ranks = ranks.transpose([list(degrees).index(axis) for axis in order])
    ranks = ranks.reshape(-1, math.prod(degrees[axis] for axis in axes))
    if len(ranks) == 1 and override is None:
        return world
    backend, options = override if isinstance(override, tuple) else (override, None)
    if not isinstance(backend, str | None):
        backend, options = None, backend
    name = f"mesh_{_JOIN.join(axes)}"
    if world.bound_device_id is not None and backend in (None, dist.get_backend()):
        # NCCL's communicator is there: one call splits it into all groups.
        return dist.split_group(world, ranks.tolist(), pg_options=options, group_desc=name)
    made = [
        dist.new_group(each, backend=backend, pg_options=options, group_desc=name)
        for each in ranks.tolist()
    ]
    return next(group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)


def _high_priority() -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("high-priority streams need NCCL, which this torch does not have")
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
