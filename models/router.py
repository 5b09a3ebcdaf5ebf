"""Which experts a token takes, and with what weights.

A row of ROUTERS turns logits into scores, says by what experts are ranked, and turns the scores of
the chosen ones into weights. All of it is computed in float32 at least: a router in bfloat16
changes choices by rounding. What is chosen carries no gradient; the router learns by the weights.

    even loads by               acts on      state
    expert_bias, bias_speed     the choice   a persistent buffer, moved once a step by `update_bias`
    balance loss, z-loss        gradients    none, or the loads of the step so far
    force_balance               the choice   none; for benchmarks

The balance loss is E sum_e f_e p_e: f_e the share of choices that expert e got, p_e the mean over
tokens of its score, as a share of all experts' scores. It is 1 where loads are even, and enters the
gradient alone (`AddedLoss`), so that what a model returns is not changed by it.

Where several ranks hold the tokens of a micro-batch, `Router.pool` looks at all of them: loads are
summed, sinkhorn sees all logits, capacity all choices. All else is a mean over tokens, whose parts
add up.

State changes outside `forward`, by `record`, which the decoder calls once a micro-batch: what
recomputation runs again must not count again. Hence `forward` returns counts and losses, and gets
the loads so far as an argument, which recomputation sees unchanged.

Shapes: B sequences, T tokens, D width, E experts, k experts a token.
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

TINY = 1e-20  # of sums that scores are divided by, as in DeepSeek-V3
SINKHORN_ROUNDS = 8


Evened = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Scoring:
    """How logits (..., E) become a choice and weights."""

    scores: Callable[[Tensor], Tensor]
    """Logits -> scores (..., E), of which the chosen ones become weights."""
    shares: Callable[[Tensor, Tensor], Tensor]
    """(logits, scores) -> shares (..., E) that sum to 1, for the balance loss."""
    weigh: Callable[[Tensor], Tensor]
    """Scores of the chosen (..., k) -> weights (..., k)."""
    group_top: int = 0
    """How many of a group's experts rank it; 0: this router has no groups."""
    evened: "Evened | None" = None
    """(logits of a whole micro-batch, which tokens are real) -> by what experts are ranked in
    training (..., E); None: by the scores."""


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
    """The logarithm of exp(logits) with rows and columns scaled to even sums, which evens loads.

    A fixed number of rounds, since waiting for convergence waits for the device. All tokens of
    the micro-batch act on each other: the choice is neither causal nor the same in other
    micro-batches. The order of the tokens does not matter.

    Args:
        logits: (..., E).
        real: bool (...), False for tokens whose experts are not to be evened; None: all are.
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
    "sinkhorn": Scoring(torch.sigmoid, _softmax_shares, _same, evened=sinkhorn),
}
"""softmax: Mixtral and Qwen3 with renormalize, DeepSeek-V2 without. sigmoid: DeepSeek-V3. In
topk_softmax (gpt-oss) the weights are the softmax of the chosen logits alone. sinkhorn chooses by
evened logits in training, by the logits themselves in evaluation, and weighs by their sigmoid."""


class AddedLoss(torch.autograd.Function):
    """Passes x through; in backward `loss` gets the gradient 1 / divisor, as if loss / divisor were
    added to what is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, divisor: Tensor) -> Tensor:
        """x of any shape; loss and divisor ()."""
        ctx.save_for_backward(divisor.to(loss.dtype).reciprocal())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient of x as it is, and the loss's own."""
        (scale,) = ctx.saved_tensors
        return gradients[0], scale, None


class Routed(NamedTuple):
    """What a router says of a micro-batch."""

    weights: Tensor
    """(B, T, k), float32 at least."""
    chosen: Tensor
    """int64 (B, T, k), different experts of each token; E of padding, which stands for none."""
    counts: Tensor
    """int64 (E,): how often each expert was chosen."""
    losses: Tensor
    """float32 (2,), without gradient: balance loss and z-loss, before their coefficients."""


class Pool(Protocol):
    """What ranks know together that share a micro-batch; none of it has a gradient."""

    def total(self, loads: Tensor) -> Tensor:
        """Loads int64 of any shape, summed over the ranks."""
        ...

    @property
    def ranks(self) -> int:
        """How many ranks have tokens of the micro-batch, as many each."""
        ...

    def in_order(
        self, drop: Callable[[Tensor], Tensor], chosen: Tensor, order: Tensor | None
    ) -> Tensor:
        """This rank's part of drop(the choices of all ranks, in the order of the sequences):
        int64 (B, T, k) -> (B, T, k); order as for `MoE.forward`."""
        ...

    @property
    def counting(self) -> int:
        """Over how many ranks `total` sums."""
        ...

    def together(self, evened: Evened, logits: Tensor, real: Tensor | None) -> Tensor:
        """This rank's part of evened(the logits of all ranks, their real tokens): (B, T, E) ->
        (B, T, E)."""
        ...


class Router(nn.Module):
    """Chooses experts for tokens, and keeps their biases and loads.

    Attributes; all but `pool` are buffers, of a dtype that moving the module does not change:
        expert_bias: float32 (E,), saved in checkpoints; None without bias_speed.
        counts: int64 (E,), how often each expert was chosen since `clear`.
        losses: float32 (2,), sums over micro-batches since `clear` of what `Routed` has.
        loss_divisor: float32 (), by which the gradients of the losses are divided: the number of
            micro-batches of all ranks, for the mean over them. Whoever trains sets it.
        pool: the ranks that share a micro-batch, set from outside; None: this one has all of it.
    """

    expert_bias: Tensor | None
    counts: Tensor
    losses: Tensor
    loss_divisor: Tensor
    pool: Pool | None = None

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
        # Values, unlike weights, would be lost on the meta device.
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
    ) -> Routed:
        """Choose experts for a micro-batch.

        Args:
            x: (B, T, D).
            keys: int64 (B, T) of `token_keys`, with the layer folded in; needed in training with
                jitter.
            loads: of `loads`.
            real: bool (B, T), False for padding: it chooses nothing and is in no mean; None: all
                tokens are real.
        """
        logits = self._logits(x, keys)
        scores = self.scoring.scores(logits)
        chosen = self._in_turn(scores) if self.force_balance else self._choose(logits, scores, real)
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
        return Routed(weights, chosen, counts.sum(0), losses.detach().float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move as any module, but keep the buffers' dtypes and values: bfloat16 would swallow the
        bias's small moves, and `to_empty` and the meta device would lose it."""
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer if self.weight.is_meta else buffer.to(self.weight.device))
        return self

    def loads(self) -> Tensor | None:
        """int64 (E,): the loads so far, which a balance over the global batch adds to those of the
        micro-batch. A copy, which stays what it is when the micro-batch is computed again."""
        counted = self.training and self.balance == "global_batch"
        return self.counts.clone() if counted else None

    @torch.no_grad()
    def record(self, counts: Tensor, losses: Tensor) -> None:
        """Add up what `forward` said of one micro-batch."""
        self.counts += counts
        self.losses += losses

    @torch.no_grad()
    def clear(self) -> None:
        """Begin another step."""
        self.counts.zero_()
        self.losses.zero_()

    @torch.no_grad()
    def update_bias(self, counts: Tensor, taken: Tensor | bool = True) -> None:
        """Raise the bias of experts with less than the mean load by bias_speed, lower the others'.

        Args:
            counts: int64 (E,) of a whole step, of all ranks.
            taken: whether the step was: one that was skipped moves nothing; a bool on the device.
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
        """Experts by rank, in the best groups where there are groups: int64 (B, T, k)."""
        ranked = self._ranked(logits, scores, real) if self.training else scores
        if self.expert_bias is not None:
            ranked = ranked + self.expert_bias  # float32, which does not narrow the scores
        if self.n_groups > 1:
            grouped = ranked.unflatten(-1, (self.n_groups, -1))
            best = grouped.topk(self.scoring.group_top, dim=-1).values.sum(-1)
            groups = best.topk(self.top_groups, dim=-1).indices
            outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
            ranked = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)
        return ranked.topk(self.top_k, dim=-1).indices

    def _ranked(self, logits: Tensor, scores: Tensor, real: Tensor | None) -> Tensor:
        evened = self.scoring.evened
        if evened is None:
            return scores
        if self.pool is None:
            return evened(logits, real)
        return self.pool.together(evened, logits, real)

    def _in_turn(self, scores: Tensor) -> Tensor:
        """Token i takes the experts i k, i k + 1, ... of a circle: int64 (B, T, k)."""
        n_rows, n_tokens, _ = scores.shape
        slots = torch.arange(n_rows * n_tokens * self.top_k, device=scores.device)
        return (slots % self.n_experts).view(n_rows, n_tokens, self.top_k)

    def _count(self, chosen: Tensor) -> Tensor:
        """int64 (B, E): how often each sequence chose each expert."""
        flat = chosen.flatten(1)
        counts = flat.new_zeros(flat.shape[0], self.n_experts + 1)  # the last: none
        return counts.scatter_add(1, flat, torch.ones_like(flat))[:, :-1]

    def _losses(
        self,
        logits: Tensor,
        shares: Tensor,
        counts: Tensor,
        loads: Tensor | None,
        real: Tensor | None,
    ) -> Tensor:
        """(2,): balance loss and z-loss, means over the real tokens of the micro-batch; 0 for a
        balance loss without weight."""
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
        """Loads int64 (S, E) and numbers of real tokens int64 (S,) or () of this rank -> loads of
        all that count together, and their mean number of tokens a rank, (S, 1) in `dtype`: sums
        divided by it have the mean over all tokens as their mean over ranks."""
        both, ranks = torch.cat([loads, tokens.view(-1, 1)], dim=1), 1
        if self.pool is not None:
            both, ranks = self.pool.total(both), self.pool.counting
        return both[:, :-1], both[:, -1:].clamp(min=1).to(dtype) / ranks


def routers(modules: Iterable[nn.Module]) -> list[Router]:
    """Those of some models or pipeline stages, in order."""
    return [found for module in modules for found in module.modules() if isinstance(found, Router)]


@torch.no_grad()
def update_expert_bias(
    found: Iterable[Router],
    reduce: Callable[[Tensor], object] | None = None,
    taken: Tensor | bool = True,
) -> Tensor:
    """After a step: move the biases by the loads of the step, and begin another one.

    Args:
        found: routers with as many experts each.
        reduce: sums int64 (L, E) in place over the ranks whose tokens the loads are of.
        taken: whether the step was, as for `Router.update_bias`.
    Returns:
        int64 (L, E), the loads of the step by router.
    """
    listed = list(found)
    counts = torch.stack([router.counts for router in listed])
    if reduce is not None:
        reduce(counts)
    for router, loads in zip(listed, counts, strict=True):
        router.update_bias(loads, taken)
        router.clear()
    return counts
