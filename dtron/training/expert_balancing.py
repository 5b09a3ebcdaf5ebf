"""Load balancing of experts: scaling of router losses, bias updates after each step, and metrics.

Only `Routing.read`, which is for logging, waits for the device.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.config import Degree
from dtron.models.router import LogitBalancer, Router, update_expert_bias
from dtron.parallelisms.functional_collectives import all_gather, all_reduce, wait_tensor
from dtron.parallelisms.mesh import MICRO_AXES, TOKEN_AXES, Mesh


class Routing:
    """Balances the routers of this rank's pipeline stages, of which some may have no router.

    Args:
        found: the routers.
        micro_batches: micro-batches per step on each rank.
    """

    def __init__(self, found: Sequence[Router], mesh: Mesh, micro_batches: int) -> None:
        self.routers, self.mesh, self.micro_batches = found, mesh, micro_batches
        # Creating groups is a collective, also for ranks whose stages have no router.
        all_tokens, tokens = (_group(mesh, axes) for axes in (TOKEN_AXES, MICRO_AXES))
        for router in found:
            # Gradients are summed over micro-batches and ranks; the divisor makes the sum a mean.
            router.loss_divisor.fill_(micro_batches * mesh.size(*TOKEN_AXES))
            loads = all_tokens if router.balance == "global_batch" else tokens
            router.pool = RankPool(loads, tokens)
        self.counts = torch.zeros(0, 1, dtype=torch.int64, device=mesh.device_type)
        self.losses = torch.zeros(0, 2, device=mesh.device_type)

    def after_update(self, taken: Tensor) -> None:
        """Update the routers' biases from the step's loads on all ranks; reset counts and losses.

        Args:
            taken: bool scalar; False if the step was skipped; then the biases do not change.
        """
        if self.routers:
            self.losses = torch.stack([router.losses for router in self.routers])
            self.counts = update_expert_bias(self.routers, self._sum, taken)

    def read(self) -> dict[str, float]:
        """Return the nonzero metrics of the latest step; equal on all ranks.

        The metrics are the router losses, as means over layers and micro-batches, and the largest
        load of an expert divided by the mean load.
        """
        sums = torch.cat([self.losses.sum(0), self.losses.new_tensor([len(self.losses)])])
        dist.all_reduce(sums)
        balance, z = (sums[:2] / (sums[2].clamp(min=1) * self.micro_batches)).tolist()
        means = self.counts.float().mean(1, keepdim=True).clamp(min=1)
        loads = (self.counts / means).flatten()
        most = torch.cat([loads, loads.new_zeros(1)]).max()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.mesh.group("pp"))
        named = {"balance_loss": balance, "z_loss": z, "max_expert_load": most.item()}
        return {name: value for name, value in named.items() if value}

    def _sum(self, counts: Tensor) -> None:
        dist.all_reduce(counts, group=self.mesh.group(*TOKEN_AXES))


def _group(mesh: Mesh, axes: Sequence[Degree]) -> dist.ProcessGroup | None:
    return mesh.group(*axes) if mesh.size(*axes) > 1 else None


class RankPool:
    """The ranks that hold tokens of one micro-batch: implements `dtron.models.router.RoutingGroup`.

    Args:
        loads: group over which expert loads are summed; None: only this rank.
        tokens: group of the ranks that have the micro-batch's tokens; None: only this rank.
    """

    def __init__(self, loads: dist.ProcessGroup | None, tokens: dist.ProcessGroup | None) -> None:
        self.loads, self.tokens = loads, tokens

    def total(self, loads: Tensor) -> Tensor:
        if self.loads is None:
            return loads
        return wait_tensor(all_reduce(loads, "sum", self.loads.group_name))

    @property
    def ranks(self) -> int:
        return 1 if self.tokens is None else self.tokens.size()

    @property
    def counting(self) -> int:
        return 1 if self.loads is None else self.loads.size()

    def in_order(
        self, drop: Callable[[Tensor], Tensor], chosen: Tensor, order: Tensor | None
    ) -> Tensor:
        if self.tokens is None:
            return drop(chosen)
        by_rank = _gather(chosen, self.tokens)
        gathered = torch.cat(by_rank.chunk(self.ranks), 1)  # the tp ranks of a cp rank are adjacent
        if order is None:
            kept = drop(gathered)
        else:
            index = order.unsqueeze(-1).expand_as(gathered)
            kept = drop(torch.empty_like(gathered).scatter(1, index, gathered)).gather(1, index)
        return kept.chunk(self.ranks, 1)[self.tokens.rank()]

    def together(self, balancer: LogitBalancer, logits: Tensor, real: Tensor | None) -> Tensor:
        if self.tokens is None:
            return balancer(logits, real)
        gathered = _gather(logits.detach(), self.tokens)
        all_real = None if real is None else _gather(real.byte(), self.tokens).bool()
        return balancer(gathered, all_real).chunk(self.tokens.size())[self.tokens.rank()]


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather (N, ...) from each rank, in rank order: (ranks * N, ...)."""
    return wait_tensor(all_gather(x, group.size(), group.group_name))
