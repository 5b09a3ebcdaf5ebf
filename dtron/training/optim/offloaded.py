"""AdamW with moments in host memory, which the device updates bucket by bucket.

    to device   bucket 0 | bucket 1 | bucket 2 |          |
    update               | bucket 0 | bucket 1 | bucket 2 |
    to host              |          | bucket 0 | bucket 1 | bucket 2

Buckets are slices of parameters with their moments, of at most BUCKET elements. Copies run on one
stream per direction and overlap each other and the updates of parameters whose moments are on the
device. The device holds moments of three buckets at most, during the update only. The kernels, and
so all bits, are those of `AdamW`.

The update is not overlapped with the backward before it: clipping needs the norm of all gradients.
To copy the first bucket in during the backward, or the last one out during the next forward, would
save one of hundreds of copies, and hold a bucket of moments while activations need the memory.

A CPU optimizer would copy gradients out and parameters in, 4 bytes per element in each direction,
where this copies 8 (4 with bfloat16 moments). But it needs a second copy of the parameters on the
host, has other bits, and moves 36 bytes per element through the memory of the host, where this
moves 16. All GPUs of a host share its memory; their links to it are separate.

Source: Ren et al., ZeRO-Offload, arXiv:2101.06840; Rajbhandari et al., ZeRO-Infinity,
arXiv:2104.07857.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtron.kernels.adamw import Counts
from dtron.parallelisms.gradients import local_part
from dtron.parallelisms.host_memory import Buffer, Copies, CopyStream, HostPool
from dtron.training.optim.adamw import MOMENTS, AdamW, rates_of

log = logging.getLogger("dtron")
BUCKET = 2**24
"""Maximum number of elements of a bucket. Buckets are multiples of a cache line, so that vector
instructions of CPUs treat the same elements as without buckets."""
SMALLEST = 2**16
"""Minimum number of a shard's elements for moments in host memory: copies of smaller ones cost more
time than they save."""
ON_DEVICE = 3
"""Maximum number of buckets on the device: copied in, updated, copied out."""


@dataclass(frozen=True)
class _Slice:
    """Elements [start, stop) of a parameter's flattened shard."""

    parameter: Tensor
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this slice of a tensor's shard, (n,): a view, but for strided gradients."""
        return local_part(tensor).reshape(-1)[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        """Whether no slice of the parameter follows."""
        return self.stop == local_part(self.parameter).numel()


@dataclass(frozen=True)
class _Bucket:
    """Slices of parameters of one group, which one call updates."""

    group: dict
    by_adamw_: bool
    slices: Sequence[_Slice]


@dataclass(frozen=True)
class _Loaded:
    """A bucket with its moments on the device."""

    bucket: _Bucket
    moments: tuple[list[Tensor], ...]
    """For each of MOMENTS, a tensor (n,) per slice."""
    pairs: list[tuple[Buffer, Tensor]]
    """The same tensors with their host memory, as bytes."""
    copies: Copies


class OffloadedAdamW(AdamW):
    """AdamW that keeps moments in pinned host memory.

    In `state`, a moment in host memory is a tensor on the CPU or, if the parameter is a DTensor, a
    DTensor of the same mesh with its local tensor on the CPU.

    Args:
        fraction: share of the parameters' elements whose moments are in host memory.
        settings: as of AdamW.

    Attributes:
        offloaded: the parameters whose moments are in host memory.
        pool: pool of host memory.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        moments: torch.dtype | None = None,
        fraction: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(groups, moments, **settings)
        parameters = [p for group in self.param_groups for p in group["params"]]
        chosen = choose([local_part(p).numel() for p in parameters], fraction)
        self.offloaded = {p for p, each in zip(parameters, chosen, strict=True) if each}
        if not self.offloaded:
            log.warning(
                "optim.offload = %s has no effect: of this rank's parameters the largest shard has "
                "%d elements, and moments of fewer than %d, or of more than the fraction of all, "
                "stay on the device; use a larger fraction, or leave it out",
                fraction,
                max(local_part(p).numel() for p in parameters),
                SMALLEST,
            )
        device = parameters[0].device
        fix = "use a smaller optim.offload, or more hosts"
        self.pool = HostPool(device.type == "cuda", (f"optim.offload = {fraction}", fix))
        self.to_device, self.to_host = CopyStream(device, False), CopyStream(device, True)
        self.register_state_dict_pre_hook(lambda _: self.to_host.synchronize())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; moments in host memory are copied there, never to the device."""
        self.to_host.synchronize()
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        states, held = dict(state_dict["state"]), dict(self.state)
        moments: dict[Tensor, dict[str, Tensor]] = {}
        for i, p in zip(ids, own, strict=False):  # `super` checks the lengths
            if p in self.offloaded and i in states:
                states[i] = dict(states[i])
                moments[p] = {name: states[i].pop(name) for name in MOMENTS if name in states[i]}
        super().load_state_dict({**state_dict, "state": states})
        for p, loaded in moments.items():
            for name, value in loaded.items():
                target = held.get(p, {}).get(name)
                target = self._zeros(p) if target is None else target
                if local_part(target).data_ptr() != local_part(value).data_ptr():
                    local_part(target).copy_(local_part(value))
                self.state[p][name] = target

    def _zeros(self, parameter: Tensor) -> Tensor:
        if parameter not in self.offloaded:
            return super()._zeros(parameter)
        # `empty_like` keeps the mesh of a DTensor; its memory is replaced before it is touched.
        made = torch.empty_like(parameter, dtype=self.moments, device="cpu")
        with torch.no_grad():
            local = local_part(made)
            held = self.pool.take(local.nbytes).data.zero_()
            local.set_(held.view(local.dtype).view(local.shape))  # type: ignore[call-overload]
        return made.detach()

    def _update_all(self) -> None:
        buckets = list(self._buckets())
        loading = self._load(buckets[0]) if buckets else None
        super()._update_all()
        storing: Copies | None = None
        for following in (*buckets[1:], None):
            if (loaded := loading) is None:
                return
            loading = self._load(following) if following is not None else None
            loaded.copies.wait()
            self._update_bucket(loaded)
            if storing is not None:
                storing.wait()
            storing = Copies(self.to_host, loaded.pairs)
        if storing is not None:
            storing.wait()

    def _update_group(self, members: list[Tensor], group: dict, counts: Counts) -> None:
        if resident := [p for p in members if p not in self.offloaded]:
            self._update_members(resident, group, counts, self._needs_adamw_(members))

    def _update_bucket(self, loaded: _Loaded) -> None:
        bucket = loaded.bucket
        steps = [self.state[each.parameter]["step"] for each in bucket.slices]
        last = [each.is_last for each in bucket.slices]
        self._update(
            [each.of(each.parameter) for each in bucket.slices],
            [each.of(each.parameter.grad) for each in bucket.slices],  # type: ignore[arg-type]
            loaded.moments[0],
            loaded.moments[1],
            # each update counts, so that only the one of the last slice may change the state
            [step if end else step.clone() for step, end in zip(steps, last, strict=True)],
            self._factor(bucket.slices[0].parameter),
            rates_of(bucket.group),
            Counts(),
            bucket.by_adamw_,
        )

    def _buckets(self) -> Iterator[_Bucket]:
        """Yield the offloaded parameters that have a gradient, in buckets."""
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            by_adamw_ = bool(members) and self._needs_adamw_(members)
            slices: list[_Slice] = []
            size = 0
            for each in _cut([p for p in members if p in self.offloaded]):
                n = each.stop - each.start
                if slices and size + n > BUCKET:
                    yield _Bucket(group, by_adamw_, slices)
                    slices, size = [], 0
                slices, size = [*slices, each], size + n
            if slices:
                yield _Bucket(group, by_adamw_, slices)

    def _load(self, bucket: _Bucket) -> _Loaded:
        """Start to copy a bucket's moments to the device."""
        moments: tuple[list[Tensor], ...] = tuple([] for _ in MOMENTS)
        pairs = []
        for each in bucket.slices:
            state, device = self._state(each.parameter), local_part(each.parameter).device
            for name, listed in zip(MOMENTS, moments, strict=True):
                held = each.of(state[name])
                listed.append(torch.empty_like(held, device=device))
                pairs.append((Buffer(held.view(torch.uint8)), listed[-1].view(torch.uint8)))
        return _Loaded(bucket, moments, pairs, Copies(self.to_device, pairs))


def choose(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Choose the parameters whose moments are in host memory, the largest first.

    Args:
        sizes: number of elements of each shard.
        fraction: share of all elements that is not exceeded.
    """
    chosen, taken, most = [False] * len(sizes), 0, fraction * sum(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen[i] = sizes[i] >= SMALLEST and taken + sizes[i] <= most
        taken += sizes[i] * chosen[i]
    return chosen


def _cut(parameters: Iterable[Tensor]) -> Iterator[_Slice]:
    """Cut each parameter into slices of at most BUCKET elements."""
    for p in parameters:
        assert local_part(p).is_contiguous(), "slices of a parameter are views"
        size = local_part(p).numel()
        for start in range(0, size, BUCKET):
            yield _Slice(p, start, min(start + BUCKET, size))
