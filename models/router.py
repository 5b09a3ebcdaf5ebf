"""Router of a mixture of experts: selects k experts per token and their weights.

A row of ROUTERS defines scores from logits, the ranking of experts, and weights from the scores of
the selected experts. All are computed in float32 at least: rounding in bfloat16 would change the
selection. The selection has no gradient; the router learns through the weights.

    load balancing by           affects      state
    expert_bias, bias_speed     selection    persistent buffer, updated per step by `update_bias`
    balance loss, z-loss        gradients    none, or the loads of the step so far
    force_balance               selection    none; for benchmarks

The balance loss is E sum_e f_e p_e: f_e is expert e's fraction of the selected slots, p_e the mean
over tokens of its score divided by the sum of all experts' scores. It is 1 for even loads. It
contributes gradient only (`AddedLoss`); the model's outputs are unchanged.

If several ranks share the tokens of a micro-batch, `Router.pool` combines them: loads are summed,
sinkhorn gets all logits, capacity all selections. All other values are means over tokens.

`forward` changes no state, since it may run twice under recomputation. It takes the loads so far as
an argument, and returns counts and losses, which the decoder passes to `record` once per
micro-batch.

Shapes: B sequences, T tokens, D width, E experts, k experts per token.
Sources: balance loss GShard, arXiv:2006.16668, Switch, arXiv:2101.03961; global batch
arXiv:2501.11873; z-loss arXiv:2202.08906; bias arXiv:2408.15664; groups DeepSeek-V2,
arXiv:2405.04434, and -V3, arXiv:2412.19437; sinkhorn arXiv:2103.16716 and Megatron-LM's router.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.models.config import DecoderConfig
from dtron.models.dropout import ROUTER, uniform

TINY = 1e-20  # added to sums that scores are divided by, as in DeepSeek-V3
SINKHORN_ROUNDS = 8


LogitBalancer = Callable[[Tensor, Tensor | None], Tensor]
"""(logits (..., E) of a whole micro-batch, `real` (...)) -> balanced logits (..., E)."""


@dataclass(frozen=True)
class Scoring:
    """Functions of a router type, from logits (..., E) to the selection and weights."""

    scores: Callable[[Tensor], Tensor]
    """Logits -> scores (..., E)."""
    shares: Callable[[Tensor, Tensor], Tensor]
    """(logits, scores) -> probabilities (..., E) that sum to 1, for the balance loss."""
    weigh: Callable[[Tensor], Tensor]
    """Scores of the selected experts (..., k) -> weights (..., k)."""
    group_top: int = 0
    """Groups are ranked by the sum of their `group_top` best scores; 0: groups not supported."""
    balancer: LogitBalancer | None = None
    """Function of the logits whose result ranks experts in training; None: the scores do."""


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _normalized(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + TINY)


def _same(scores: Tensor) -> Tensor:
    return scores


def _score_shares(logits: Tensor, scores: Tensor) -> Tensor:
    return _normalized(scores)


def _softmax_shares(logits: Tensor, scores: Tensor) -> Tensor:
    return logits.softmax(-1)


@torch.no_grad()
def sinkhorn(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Balance logits by Sinkhorn's algorithm: scale rows and columns of exp(logits) to equal sums.

    The number of rounds is fixed: a test for convergence would synchronise with the device. All
    tokens of the micro-batch affect each other, so the selection is not causal and depends on the
    micro-batch, but not on the order of its tokens.

    Args:
        logits: (..., E).
        real: bool (...), False for padding, which is not balanced; None: no padding.
    Returns:
        (..., E), the logarithm of the scaled values.
    """
    flat = logits.flatten(0, -2)
    out = None if real is None else ~real.flatten().unsqueeze(1)
    for _ in range(SINKHORN_ROUNDS):
        evened = flat if out is None else flat.masked_fill(out, -torch.inf)
        flat = flat - evened.logsumexp(0, keepdim=True)
        flat = flat - flat.logsumexp(1, keepdim=True)
    return flat.view_as(logits)


ROUTERS: dict[str, Scoring] = {
    "softmax": Scoring(_softmax, _softmax_shares, _same, group_top=1),
    "sigmoid": Scoring(torch.sigmoid, _score_shares, _same, group_top=2),
    "topk_softmax": Scoring(_same, _softmax_shares, _softmax),
    "sinkhorn": Scoring(torch.sigmoid, _softmax_shares, _same, balancer=sinkhorn),
}
"""softmax: Mixtral and Qwen3 with renormalize, DeepSeek-V2 without. sigmoid: DeepSeek-V3.
topk_softmax (gpt-oss): weights are the softmax over the selected logits only. sinkhorn: selects by
balanced logits in training and by the logits in evaluation; weights are the sigmoid of logits."""


class AddedLoss(torch.autograd.Function):
    """Return x unchanged, and add loss / divisor to the training loss.

    Only the backward does that: `loss` gets the gradient 1 / divisor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, divisor: Tensor) -> Tensor:
        """Return x, of any shape, and save 1 / divisor; loss and divisor are scalar tensors."""
        ctx.save_for_backward(divisor.to(loss.dtype).reciprocal())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of x, unchanged, and the gradient of the loss."""
        (scale,) = ctx.saved_tensors
        return gradients[0], scale, None


class RouterOutput(NamedTuple):
    """Results of a router for a micro-batch."""

    weights: Tensor
    """(B, T, k), float32 at least."""
    chosen: Tensor
    """int64 (B, T, k), distinct experts of each token; E (no expert) for padding."""
    counts: Tensor
    """int64 (E,): tokens per expert."""
    losses: Tensor
    """float32 (2,), without gradient: balance loss and z-loss, before their coefficients."""


class RoutingGroup(Protocol):
    """Communication between the ranks that share a micro-batch, without gradients."""

    def total(self, loads: Tensor) -> Tensor:
        """Sum loads, int64 of any shape, over the ranks."""
        ...

    @property
    def ranks(self) -> int:
        """Number of ranks with tokens of the micro-batch; all have the same number of tokens."""
        ...

    def in_order(
        self, drop: Callable[[Tensor], Tensor], chosen: Tensor, order: Tensor | None
    ) -> Tensor:
        """Apply `drop` to the selections of all ranks; return this rank's part of the result.

        The selections are gathered first, in the order of the sequences.

        Args:
            chosen: int64 (B, T, k), this rank's selections.
            order: index of each token in its sequence, on all ranks; see `MoE.dispatch`.
        Returns:
            int64 (B, T, k).
        """
        ...

    @property
    def counting(self) -> int:
        """Number of ranks that `total` sums over."""
        ...

    def together(self, balancer: LogitBalancer, logits: Tensor, real: Tensor | None) -> Tensor:
        """Apply `balancer` to the gathered logits of all ranks; return this rank's part.

        Shapes: (B, T, E) -> (B, T, E).
        """
        ...


class Router(nn.Module):
    """Router with its biases and load counters.

    Attributes; all but `pool` are buffers, whose dtype `Module.to` does not change:
        expert_bias: float32 (E,), saved in checkpoints; None without bias_speed.
        counts: int64 (E,), tokens per expert since the previous `clear`.
        losses: float32 (2,), `RouterOutput.losses` summed over micro-batches since the previous
            `clear`.
        loss_divisor: float32 scalar, divisor of the gradients of the losses. The training loop sets
            it to the number of micro-batches of all ranks, so that the training loss gets their
            mean.
        pool: the ranks that share a micro-batch, set from outside; None: each micro-batch is on
            one rank.
    """

    expert_bias: Tensor | None
    counts: Tensor
    losses: Tensor
    loss_divisor: Tensor
    pool: RoutingGroup | None = None

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.n_experts, self.top_k = config.n_experts, config.experts_per_token
        self.scoring = ROUTERS[config.router]
        self.renormalize, self.scaling = config.renormalize, config.routed_scaling
        self.n_groups, self.top_groups = config.n_groups, config.top_groups
        self.bias_speed, self.jitter = config.bias_speed, config.jitter
        self.balance, self.balance_coefficient = config.balance, config.balance_coefficient
        self.z_loss, self.force_balance = config.z_loss, config.force_balance
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.bias = nn.Parameter(torch.empty(config.n_experts)) if config.bias else None
        # The meta device would lose the values; weights are initialised later.
        device = torch.get_default_device()
        device = torch.device("cpu") if device.type == "meta" else device
        zeros = torch.zeros(config.n_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", zeros if config.bias_speed else None)
        self.register_buffer("counts", torch.zeros_like(zeros, dtype=torch.int64), persistent=False)
        self.register_buffer("losses", torch.zeros(2, device=device), persistent=False)
        self.register_buffer("loss_divisor", torch.ones((), device=device), persistent=False)

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        loads: Tensor | None = None,
        real: Tensor | None = None,
    ) -> RouterOutput:
        """Select experts for a micro-batch.

        Args:
            x: (B, T, D).
            keys: int64 (B, T) from `token_keys`, with the layer folded in; required in training
                with jitter.
            loads: from `loads`.
            real: bool (B, T), False for padding, which gets no experts and is excluded from means;
                None: no padding.
        """
        logits = self._logits(x, keys)
        scores = self.scoring.scores(logits)
        chosen = (
            self._round_robin(scores) if self.force_balance else self._choose(logits, scores, real)
        )
        weights = self.scoring.weigh(scores.gather(-1, chosen))
        if self.renormalize:
            weights = _normalized(weights)
        if self.scaling != 1:
            weights = weights * self.scaling
        if real is not None:
            chosen = torch.where(real.unsqueeze(-1), chosen, self.n_experts)
        counts = self._count(chosen)
        losses = logits.new_zeros(2)
        if self.training and (self.balance_coefficient or self.z_loss):
            shares = self.scoring.shares(logits, scores)
            losses = self._losses(logits, shares, counts, loads, real)
            total = losses[0] * self.balance_coefficient + losses[1] * self.z_loss
            weights = AddedLoss.apply(weights, total, self.loss_divisor)
        return RouterOutput(weights, chosen, counts.sum(0), losses.detach().float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Apply `fn` as nn.Module does, but keep the buffers' dtypes and values.

        In bfloat16, small updates of the bias would be lost; `to_empty` would lose the values.
        """
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer if self.weight.is_meta else buffer.to(self.weight.device))
        return self

    def loads(self) -> Tensor | None:
        """Return the loads of the step so far, int64 (E,), for balance = "global_batch"; else None.

        The tensor is a copy, so that recomputation gets the same values.
        """
        counted = self.training and self.balance == "global_batch"
        return self.counts.clone() if counted else None

    @torch.no_grad()
    def record(self, counts: Tensor, losses: Tensor) -> None:
        """Accumulate the counts and losses of one micro-batch."""
        self.counts += counts
        self.losses += losses

    @torch.no_grad()
    def clear(self) -> None:
        """Reset counts and losses for the next step."""
        self.counts.zero_()
        self.losses.zero_()

    @torch.no_grad()
    def update_bias(self, counts: Tensor, taken: Tensor | bool = True) -> None:
        """Change each expert's bias by bias_speed: up if the load is below the mean, down if above.

        Args:
            counts: int64 (E,), tokens per expert in the step, over all ranks.
            taken: bool or scalar bool tensor; False: the step was skipped; keep the bias.
        """
        if self.expert_bias is not None:
            below = (counts.sum() - counts * self.n_experts).sign()  # exact, in integers
            self.expert_bias += self.bias_speed * below * taken

    def _logits(self, x: Tensor, keys: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x.to(wide)
        if self.jitter and self.training:
            assert keys is not None, "jitter needs dropout keys"
            x = x * (1 + self.jitter * (2 * uniform(keys, ROUTER, x.shape[-1]) - 1))
        return F.linear(x, self.weight.to(wide), None if self.bias is None else self.bias.to(wide))

    @torch.no_grad()
    def _choose(self, logits: Tensor, scores: Tensor, real: Tensor | None) -> Tensor:
        """Select the top-k experts, in the best groups if experts have groups: int64 (B, T, k)."""
        ranked = self._ranked(logits, scores, real) if self.training else scores
        if self.expert_bias is not None:
            ranked = ranked + self.expert_bias  # float32; scores are float32 or wider
        if self.n_groups > 1:
            grouped = ranked.unflatten(-1, (self.n_groups, -1))
            best = grouped.topk(self.scoring.group_top, dim=-1).values.sum(-1)
            groups = best.topk(self.top_groups, dim=-1).indices
            outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
            ranked = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)
        return ranked.topk(self.top_k, dim=-1).indices

    def _ranked(self, logits: Tensor, scores: Tensor, real: Tensor | None) -> Tensor:
        balancer = self.scoring.balancer
        if balancer is None:
            return scores
        if self.pool is None:
            return balancer(logits, real)
        return self.pool.together(balancer, logits, real)

    def _round_robin(self, scores: Tensor) -> Tensor:
        """Assign experts i k, i k + 1, ... (modulo E) to token i: int64 (B, T, k)."""
        n_rows, n_tokens, _ = scores.shape
        slots = torch.arange(n_rows * n_tokens * self.top_k, device=scores.device)
        return (slots % self.n_experts).view(n_rows, n_tokens, self.top_k)

    def _count(self, chosen: Tensor) -> Tensor:
        """Count tokens per sequence and expert: int64 (B, E)."""
        flat = chosen.flatten(1)
        counts = flat.new_zeros(flat.shape[0], self.n_experts + 1)  # the last: no expert
        return counts.scatter_add(1, flat, torch.ones_like(flat))[:, :-1]

    def _losses(
        self,
        logits: Tensor,
        shares: Tensor,
        counts: Tensor,
        loads: Tensor | None,
        real: Tensor | None,
    ) -> Tensor:
        """Return [balance loss, z-loss], (2,): means over the micro-batch without padding.

        The balance loss is 0 if its coefficient is 0.
        """
        over = (1,) if self.balance == "sequence" else (0, 1)
        squares = logits.logsumexp(-1).square()
        if self.balance == "sequence":
            loads = counts
        else:
            own = counts.sum(0, keepdim=True)
            loads = own if loads is None else own + loads
        if real is None:
            if self.pool is not None and self.balance_coefficient:
                loads = self.pool.total(loads)
            means, square = shares.mean(over), squares.mean()
        else:
            loads, tokens = self._of_all(loads, real.sum(over), shares.dtype)
            means = (shares * real.unsqueeze(-1)).sum(over) / tokens
            square = (squares * real).sum() / tokens.sum()
        balance = logits.new_zeros(())
        if self.balance_coefficient:
            loads = loads.to(shares.dtype)
            fractions = self.n_experts * loads / loads.sum(-1, keepdim=True).clamp(min=1)
            balance = (fractions * means).sum(-1).mean()
        return torch.stack([balance, square])

    def _of_all(self, loads: Tensor, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sum loads and average numbers of tokens over the ranks that share the micro-batch.

        If every rank divides its sum over tokens by the average number of tokens, the mean over
        ranks equals the mean over all tokens.

        Args:
            loads: int64 (S, E); S = B or 1.
            tokens: int64 (S,) or a scalar, this rank's numbers of tokens without padding.
        Returns:
            loads int64 (S, E), summed; numbers of tokens (S, 1) in `dtype`, averaged.
        """
        both, ranks = torch.cat([loads, tokens.view(-1, 1)], dim=1), 1
        if self.pool is not None:
            both, ranks = self.pool.total(both), self.pool.counting
        return both[:, :-1], both[:, -1:].clamp(min=1).to(dtype) / ranks


def routers(modules: Iterable[nn.Module]) -> list[Router]:
    """List the routers of models or pipeline stages, in order."""
    return [found for module in modules for found in module.modules() if isinstance(found, Router)]


@torch.no_grad()
def update_expert_bias(
    found: Iterable[Router],
    reduce: Callable[[Tensor], object] | None = None,
    taken: Tensor | bool = True,
) -> Tensor:
    """Update the expert biases after a step, and reset counts and losses.

    Args:
        found: routers with the same number of experts.
        reduce: sums counts, int64 (L, E), in place over the ranks of the batch; L routers.
        taken: whether the step changed the weights; if not, the biases are unchanged.
    Returns:
        int64 (L, E), tokens per router and expert in the step.
    """
    listed = list(found)
    counts = torch.stack([router.counts for router in listed])
    if reduce is not None:
        reduce(counts)
    for router, loads in zip(listed, counts, strict=True):
        router.update_bias(loads, taken)
        router.clear()
    return counts
