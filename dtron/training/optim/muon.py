"""Muon: matrices of hidden layers move by the orthogonalized momentum; AdamW updates the rest.

With the gradient g (A, B), times the clipping factor, momentum mu and learning rate lr:

    m = mu m + (1 - mu) g,   u = (1 - mu) g + mu m                      (Nesterov)
    o = NewtonSchulz(u)      about U V^T, where u = U S V^T
    p = p (1 - lr decay) - lr f(A, B) o

    match_rms_adamw   f = 0.2 sqrt(max(A, B)): the RMS of AdamW's updates, so that both share lr
    original          f = sqrt(max(1, A / B))

The mathematics, coefficients and dtypes are those of torch.optim.Muon, which takes whole matrices
only. Here parameters, momentum and the update are shards; `matrix_owners.py` brings whole matrices
to one rank each, in bfloat16, for Newton-Schulz alone. Equal matrices are one batch.

Sources: Muon, kellerjordan.github.io/posts/muon; match_rms_adamw, arXiv:2502.16982, section 2.2.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtron.kernels.adamw import Counts
from dtron.kernels.muon import momentum_, move_
from dtron.parallelisms.gradients import local_gradients, local_part
from dtron.parallelisms.matrix_owners import Exchange, exchanges, on_owners
from dtron.training.optim.adamw import AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial, steepest at 0."""
STEPS, EPS = 5, 1e-7
LARGEST = 2**25
"""Elements of a rank's shards that are updated at once, with about 12 bytes each; more take several
batches."""


class Muon(AdamW):
    """Muon for groups with `orthogonalize`, AdamW for the others.

    Args:
        groups: parameter groups. With `orthogonalize`: matrices (A, B), or stacks of them
            (E, A, B), sharded in any way as DTensors.
        momentum: mu.
        adjust_lr_fn: a key of ADJUST.
    """

    def __init__(
        self,
        groups: list[dict],
        moments: torch.dtype | None = None,
        momentum: float = 0.95,
        adjust_lr_fn: str = "match_rms_adamw",
        **settings: Any,
    ) -> None:
        super().__init__(groups, moments, **settings)
        self.momentum, self.adjust_lr_fn = momentum, adjust_lr_fn

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not AdamW's, which expects a count of steps in the state of every parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    def _update_group(self, members: list[Tensor], group: dict, counts: Counts) -> None:
        if not group["orthogonalize"]:
            super()._update_group(members, group, counts)
            return
        for batch, route in _batches(members):
            self._update_batch(batch, route, group["lr"], group["weight_decay"])

    def _update_batch(
        self, members: list[Tensor], route: list[Exchange], lr: float, decay: float
    ) -> None:
        """Update equal parameters, sharded alike; their updates are one tensor (k, a, b)."""
        parameters = [local_part(p) for p in members]
        *stacked, a, b = parameters[0].shape  # a shard may be empty
        # float64 is for tests alone, which compare layouts to 1e-10
        wide = parameters[0].dtype == torch.float64
        dtype = torch.float64 if wide else torch.bfloat16
        u = parameters[0].new_empty(len(members), math.prod(stacked), a, b, dtype=dtype)
        factor = self._factor(members[0])
        for p, g, into in zip(members, local_gradients(members), u.unbind(), strict=True):
            momentum_(g.contiguous(), local_part(self._momentum(p)), into, factor, self.momentum)
        o = on_owners(u.flatten(0, 1), route, newton_schulz).contiguous().view_as(u)
        step = lr * ADJUST[self.adjust_lr_fn](*members[0].shape[-2:])
        for p, update in zip(parameters, o.unbind(), strict=True):
            move_(p, update, factor, 1 - lr * decay, step)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = self._zeros(parameter)
        return state["momentum_buffer"]


ADJUST = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Factor of the learning rate of a matrix."""


def newton_schulz(x: Tensor) -> Tensor:
    """Orthogonalize matrices (m, A, B): move all singular values close to 1 (about 0.5 to 1.5)."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the smaller Gram matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def _batches(members: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Exchange]]]:
    """Yield parameters of equal shape and sharding, with their exchanges.

    A batch has at least one matrix for each rank, and at most LARGEST local elements otherwise.
    Ranks that exchange shards hold the same parameters in the same order: batches are equal.
    """
    alike: dict[Any, list[Tensor]] = {}
    for p in members:
        layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        alike.setdefault((p.shape, p.dtype, layout), []).append(p)
    for equal in alike.values():
        route = exchanges(equal[0])
        ranks = math.prod(exchange.ranks for exchange in route)
        # Of the mean rank: uneven shards differ, and ranks must agree.
        largest = LARGEST * _shards(equal[0]) // max(1, equal[0].numel())
        each = max(-(-ranks // _stacked(equal[0])), largest)
        for first in range(0, len(equal), each):
            yield equal[first : first + each], route


def _shards(parameter: Tensor) -> int:
    """Return the number of shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh, placements = parameter.device_mesh, parameter.placements
    return math.prod(mesh.size(i) for i, p in enumerate(placements) if not p.is_replicate())


def _stacked(parameter: Tensor) -> int:
    """Return the number of matrices of a parameter that a rank holds, the same on all ranks."""
    if parameter.dim() == 2:
        return 1
    whole = [1]
    if isinstance(parameter, DTensor):
        placements = enumerate(parameter.placements)
        mesh = parameter.device_mesh
        whole += [mesh.size(axis) for axis, each in placements if getattr(each, "dim", None) == 0]
    return max(1, len(parameter) // math.prod(whole))
