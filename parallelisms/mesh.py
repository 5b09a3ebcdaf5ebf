"""The device mesh: named axes over all ranks, without process-global state.

The axes are, from outermost to innermost: pp, dp_replicate, dp_shard, cp, tp. So neighbouring
ranks, which have the fastest links, communicate most. Axes of degree 1 exist too.

    batch axes  dp_replicate, dp_shard       ranks that read different sequences
    fsdp axes   dp_shard, cp                 ranks over which FSDP shards parameters
    loss axes   dp_replicate, dp_shard, cp   ranks that have different tokens
    micro axes  cp, tp                       ranks whose routers process the same micro-batch
    token axes  the loss axes, tp            ranks whose routers process different tokens
    share axes  pp, the loss axes            ranks whose partial losses sum to the loss

Experts use other axes over the same ranks, `Mesh.experts`: pp, dp_replicate, edp_shard, ep, etp.

All parameters but experts are DTensors on slices of `Mesh.device_mesh`. Its dims are pp,
dp_replicate, the fsdp axes flattened to one dim, and tp. All other axes and combinations of axes
are process groups only.
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
_JOIN = "+"  # joins the names of flattened axes


def axes_of(name: str) -> tuple[str, ...]:
    """Split the name of a mesh dim into its axes; only a flattened dim has several."""
    return tuple(name.split(_JOIN))


class Mesh:
    """Named axes over the ranks of the default process group.

    Args:
        dp_shard: degree of parameter sharding; -1: the world size divided by the other degrees.
        ep: degree of expert parallelism.
        etp: degree of tensor parallelism of experts; ep x etp divides dp_shard x cp x tp.
        device_type: "cuda" or "cpu"; None: "cuda" if a GPU is available.
        options: process-group options by axis: a backend's name, its options object (such as
            ProcessGroupNCCL.Options), or both as a tuple.
        high_priority: axes whose NCCL collectives run on high-priority streams, before kernels
            that are already queued on other streams.

    Raises:
        ConfigError: the degrees do not multiply to the world size, or no process group exists.
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
        degrees: dict[Degree, int] = {
            "pp": pp,
            "dp_replicate": dp_replicate,
            "dp_shard": dp_shard,
            "cp": cp,
            "tp": tp,
        }
        self.degrees = resolve_degrees(degrees, dist.get_world_size())
        self.device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        index = np.unravel_index(dist.get_rank(), tuple(self.degrees.values()))
        self._coordinate = {axis: int(i) for axis, i in zip(DEGREES, index, strict=True)}
        high = {axis: _high_priority() for axis in high_priority}
        override: dict[str, Any] = high | dict(options or {})
        sizes = {
            "pp": self.degrees["pp"],
            "dp_replicate": self.degrees["dp_replicate"],
            _JOIN.join(self._used_axes(FSDP_AXES)): self.size(*FSDP_AXES),
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
        self._context_override = inside or None
        self.expert_degrees = resolve_expert_degrees(self.degrees, ep, etp)
        self._experts: DeviceMesh | None = None
        self._expert_groups: list[dist.ProcessGroup] = []
        self._expert_hosts: dict[Any, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        self._context: dict[int, DeviceMesh] = {}
        self._heads: dict[int, DeviceMesh] = {}
        self._heads_override = override.get("tp")

    @property
    def experts(self) -> DeviceMesh:
        """The expert mesh over the same ranks: (pp, dp_replicate, edp_shard, ep, etp).

        The first use creates the mesh and is a collective over all ranks.
        """
        if self._experts is None:
            degrees = self.expert_degrees
            self._experts = init_device_mesh(
                self.device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
            )
        return self._experts

    def expert_group(self, number: int = 0) -> dist.ProcessGroup:
        """The process group over ep x etp, etp innermost.

        The first call for each number is a collective over all ranks.

        Args:
            number: index among groups of the same ranks, whose collectives do not wait for each
                other.
        """
        while len(self._expert_groups) <= number:
            again = bool(self._expert_groups)
            group = _group(self.expert_degrees, ["ep", "etp"], separate=again)
            self._expert_groups.append(group)
        return self._expert_groups[number]

    def expert_hosts(
        self, group: dist.ProcessGroup, inside: int
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Split an `expert_group` into hosts of `inside` neighbouring ranks; return two groups.

        The first group has one rank per host: the rank with this rank's index in its host. The
        second group has the ranks of this rank's host. The first call for each group is a
        collective over all ranks.
        """
        if (key := (str(group.group_name), inside)) not in self._expert_hosts:
            ranks = self.expert_degrees["ep"] * self.expert_degrees["etp"]
            degrees = {
                axis: n for axis, n in self.expert_degrees.items() if axis not in ("ep", "etp")
            }
            degrees |= {"ep_outer": ranks // inside, "ep_inner": inside}
            outer, inner = (_group(degrees, [a], separate=True) for a in ("ep_outer", "ep_inner"))
            self._expert_hosts[key] = outer, inner
        return self._expert_hosts[key]

    def sharing_experts(self) -> DeviceMesh:
        """The mesh over which FSDP shards experts.

        Its dims are (edp_shard,) if dp_replicate = 1, else (dp_replicate, edp_shard).
        """
        if self.degrees["dp_replicate"] == 1:
            return self.experts["edp_shard"]
        return self.experts["dp_replicate", "edp_shard"]

    def context(self, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Split the cp axis into blocks of `inner` neighbouring ranks; return two process groups.

        The first group has one rank per block: the rank with this rank's index in its block. The
        second group has the ranks of this rank's block. The first call for an `inner` creates the
        groups and is a collective over all ranks.
        """
        if inner not in self._context:
            cp, tp = self.degrees["cp"], self.degrees["tp"]
            self._context[inner] = init_device_mesh(
                self.device_type,
                (dist.get_world_size() // (cp * tp), cp // inner, inner, tp),
                mesh_dim_names=("others", "cp_outer", "cp_inner", "tp"),
                backend_override=self._context_override,  # type: ignore[arg-type]
            )
        mesh = self._context[inner]
        return mesh["cp_outer"].get_group(), mesh["cp_inner"].get_group()

    def heads(self, n_heads: int) -> DeviceMesh:
        """Split the tp axis into `n_heads` blocks; the ranks of a block share one head.

        Returns the 1-D mesh of this rank's block. The first call for an `n_heads` is a collective
        over all ranks.
        """
        tp = self.degrees["tp"]
        if n_heads == 1:
            return self.flat("tp")
        if n_heads not in self._heads:
            degrees = {axis: n for axis, n in self.degrees.items() if axis != "tp"}
            degrees |= {"tp_outer": n_heads, "tp_inner": tp // n_heads}
            group = _group(degrees, ["tp_inner"], self._heads_override)
            self._heads[n_heads] = DeviceMesh.from_group(
                group, self.device_type, mesh_dim_names=("tp_inner",)
            )
        return self._heads[n_heads]

    def replicated(self, *axes: Degree) -> DeviceMesh:
        """The 2-D mesh (dp_replicate, these axes flattened); `flat` documents legal axes."""
        return self.device_mesh["dp_replicate", _JOIN.join(self._used_axes(axes))]

    def size(self, *axes: Degree) -> int:
        """Product of the degrees of these axes."""
        return math.prod(self.degrees[axis] for axis in axes)

    def rank(self, *axes: Degree) -> int:
        """This rank's index in the flattened axes; the first axis is outermost."""
        rank = 0
        for axis in axes:
            rank = rank * self.degrees[axis] + self._coordinate[axis]
        return rank

    def flat(self, *axes: Degree) -> DeviceMesh:
        """The 1-D mesh of pp, dp_replicate or tp, or of the fsdp axes flattened."""
        return self.device_mesh[_JOIN.join(self._used_axes(axes))]

    def group(self, *axes: Degree) -> dist.ProcessGroup:
        """The process group over the flattened axes.

        The first call with several axes of degree 2 or more is a collective over all ranks.
        """
        used = self._used_axes(axes)
        if used not in self._groups:
            self._groups[used] = _group(self.degrees, used)
        return self._groups[used]

    def groups(self) -> list[dist.ProcessGroup]:
        """All process groups created so far."""
        return [group for _, group in self._named_groups()]

    def group_names(self) -> dict[str, str]:
        """{name of a process group: its axis, or axes joined by "+"}, for all groups created."""
        world = dist.group.WORLD
        names: dict[str, str] = {str(world.group_name): "world"} if world else {}
        for label, group in self._named_groups():
            name = str(group.group_name)
            # An axis over all ranks uses the world's group; the first such axis names it.
            names[name] = label if names.get(name, "world") == "world" else names[name]
        return names

    def _used_axes(self, axes: Sequence[Degree]) -> tuple[Degree, ...]:
        """Return the axes of degree 2 or more; if all degrees are 1, the last axis."""
        return tuple(axis for axis in axes if self.degrees[axis] > 1) or tuple(axes[-1:])

    def _named_groups(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Yield (axis, or axes joined by "+"; process group) of all groups created so far."""
        single = [axes for axes in ((axis,) for axis in DEGREES) if axes in self._groups]
        for axes in (*single, *(axes for axes in self._groups if len(axes) > 1)):
            yield _JOIN.join(axes), self._groups[axes]
        for mesh in self._context.values():
            yield from ((axis, mesh.get_group(axis)) for axis in ("cp_outer", "cp_inner"))
        yield from (("tp_inner", mesh.get_group()) for mesh in self._heads.values())
        if self._experts is not None:
            axes = ("dp_replicate", "edp_shard", "ep", "etp")
            yield from ((axis, self._experts.get_group(axis)) for axis in axes)
        for group in self._expert_groups:
            yield _JOIN.join(("ep", "etp")), group
        for groups in self._expert_hosts.values():
            yield from zip(("ep_outer", "ep_inner"), groups, strict=True)


def _group(
    degrees: Mapping[Any, int], axes: Sequence[str], override: Any = None, separate: bool = False
) -> Any:
    """Create process groups over the flattened axes; return this rank's group. A collective.

    Args:
        degrees: degrees of all axes, from outermost to innermost.
        override: a backend's name, its options object, or both as a tuple.
        separate: create a group even if the world's group has the same ranks.
    """
    world = dist.group.WORLD
    assert world is not None, "a Mesh has a process group"
    order = [axis for axis in degrees if axis not in axes] + list(axes)
    ranks = np.arange(dist.get_world_size()).reshape(tuple(degrees.values()))
    ranks = ranks.transpose([list(degrees).index(axis) for axis in order])
    ranks = ranks.reshape(-1, math.prod(degrees[axis] for axis in axes))
    if len(ranks) == 1 and override is None and not separate:
        return world
    backend, options = override if isinstance(override, tuple) else (override, None)
    if not isinstance(backend, str | None):
        backend, options = None, backend
    name = f"mesh_{_JOIN.join(axes)}"
    if world.bound_device_id is not None and backend in (None, dist.get_backend()):
        # NCCL's communicator exists: one call splits it into all groups.
        return dist.split_group(world, ranks.tolist(), pg_options=options, group_desc=name)
    made = [
        dist.new_group(each, backend=backend, pg_options=options, group_desc=name)
        for each in ranks.tolist()
    ]
    return next(group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)


def _high_priority() -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("high_priority needs NCCL, which this torch does not have; leave it out")
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
