"""Mixture of experts: a feed-forward layer in which each token is processed by k of E experts.

    router      x (B, T, D) -> k experts and their weights for each token (`router.py`)
    dispatch    copies tokens, one row per (token, expert) pair, sorted by expert
    experts     stacked matrices; one grouped matmul each
    shared      a feed-forward layer for all tokens
    combine     weighted sum of each token's rows, plus the shared experts' output

Expert parallelism replaces `experts.begin`, which sends rows to other ranks, and `experts.finish`,
which receives the results. The shared experts are computed in between, overlapped with the
communication. The block calls these functions one by one, so that a torch.compile graph that breaks
at the experts breaks only there.

In bfloat16 the host never waits for the device: the rows of each expert are given by offsets, int32
(E,), on the device. Row r belongs to expert e if offsets[e - 1] <= r < offsets[e], where
offsets[-1] means 0.

In `chosen`, experts are 0 ... E - 1; E means no expert (dropped over capacity, or padding).

Shapes: B sequences, T tokens, N = B T, D width, F width of an expert, E experts, k experts per
token, R rows (token copies).
Sources: arXiv:1701.06538; capacity GShard, arXiv:2006.16668; dropless grouped matmuls MegaBlocks,
arXiv:2211.15841; shared experts DeepSeekMoE, arXiv:2401.06066.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.kernels.grouped import grouped_matmul
from dtron.kernels.permute import Copies, repeated, sort_by_expert, summed
from dtron.models.config import DecoderConfig
from dtron.models.layers import ACTIVATIONS, FeedForward
from dtron.models.router import Router


class Experts(nn.Module):
    """E feed-forward layers as stacked matrices: gate and up (E, F, D), down (E, D, F).

    With `bias`, also gate_bias and up_bias (E, F), and down_bias (E, D).

    Attributes:
        activate: (gate, up) -> h, or up -> h without gate, elementwise. It is compiled separately
            if the experts are not in a compiled graph.
        part: (index of this rank's etp shard, number of shards). etp shards F of every matrix and D
            of down_bias; with several shards the output is a partial sum.
        multiply: `grouped_matmul`, or its float8 replacement.
        adapt: (experts, matrix name, x, result of `product`, offsets) -> result with the product of
            the matrix's adapter, set by LoRA.
        takes_tokens: whether `begin` takes tokens (N, D) instead of their rows, and `finish`
            returns each token's weighted sum (N, D). Expert parallelism sets it.
    """

    adapt: Callable[["Experts", str, Tensor, Tensor, Tensor], Tensor] | None = None
    takes_tokens = False

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        gated, function = self.activation.gated, self.activation.function
        self.activate: Callable[..., Tensor] = self.activation if gated else function
        self.part = (0, 1)
        self.multiply = grouped_matmul
        inward = (config.n_experts, config.expert_dim, config.dim)
        outward = (config.n_experts, config.dim, config.expert_dim)
        names = {"gate": inward, "up": inward, "down": outward}
        for name, shape in names.items():
            if name == "gate" and not self.activation.gated:
                continue
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            bias = nn.Parameter(torch.empty(shape[:2])) if config.bias else None
            self.register_parameter(f"{name}_bias", bias)

    def own(self, name: str) -> Tensor | None:
        """Return this rank's shard of a parameter as a plain tensor.

        Expert parallelism replaces this method.
        """
        return getattr(self, name)

    def begin(
        self, rows: Tensor, offsets: Tensor, tail: bool = True, copies: Copies | None = None
    ) -> Any:
        """Start to dispatch rows to their experts; arguments: those of `forward`.

        `copies` is used only with `takes_tokens`. Returns an opaque handle for one call of
        `finish`.
        """
        return rows, offsets, tail

    def finish(self, pending: Any) -> Tensor:
        """Return the experts' outputs for the rows given to `begin`."""
        return self(*pending)

    def product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiply each expert's R rows by the expert's matrix `name`, (M, K): (R, K) -> (R, M).

        Passes that defer weight gradients replace this method.
        """
        weight = self.own(name)
        assert weight is not None, f"experts have no {name}"
        return self.multiply(x, weight, offsets)

    def forward(self, x: Tensor, offsets: Tensor, tail: bool = True) -> Tensor:
        """Apply each expert to its rows.

        Args:
            x: (R, D), sorted by expert.
            offsets: int32 (E,), end of each expert's rows.
            tail: make outputs and gradients zero for rows after the last offset. If False, these
                rows have undefined outputs and gradients, which must not be read.
        Returns:
            (R, D).
        """
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        inside = (rows < offsets[-1]).unsqueeze(1)
        if tail:  # grouped_mm leaves outputs and gradients of these rows undefined
            x = torch.where(inside, x, 0)
        h = self._affine("up", x, offsets, inside)
        if self.activation.gated:
            h = self.activate(self._affine("gate", x, offsets, inside), h)
        else:
            h = self.activate(h)
        out = self._affine("down", h, offsets, inside)
        return torch.where(inside, out, 0) if tail else out

    def _affine(self, name: str, x: Tensor, offsets: Tensor, inside: Tensor) -> Tensor:
        out, bias = self.product(name, x, offsets), self.own(f"{name}_bias")
        if self.adapt is not None:
            out = self.adapt(self, name, x, out, offsets)
        if bias is None:
            return out
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        expert = torch.searchsorted(offsets, rows, right=True).clamp(max=len(offsets) - 1)
        added = torch.where(inside, bias[expert], 0)  # no gradient from rows after the last
        index, number = self.part
        if name == "down" and number > 1:  # each partial sum adds its own columns of the bias
            width = added.shape[1]
            added = F.pad(added, (index * width, (number - 1 - index) * width))
        return out + added


def capacity(n_slots: int, n_experts: int, factor: float) -> int:
    """Return the capacity of one expert, given the n_slots = N k of a micro-batch."""
    return math.ceil(factor * n_slots / n_experts)


def capacity_without_padding(chosen: Tensor, n_experts: int, factor: float) -> Tensor:
    """Return the capacity without padding (n_experts in `chosen`): int64 scalar on the device."""
    n_slots = (chosen < n_experts).sum()
    return (n_slots.double() * factor / n_experts).ceil().long()


def within_capacity(chosen: Tensor, n_experts: int, most: int | Tensor) -> Tensor:
    """Drop tokens of experts over capacity, from the last token on.

    So no token loses its expert because of a later token of its sequence.

    Args:
        chosen: int64 (..., k), one sequence after the other; n_experts means no expert.
        most: the capacity, from `capacity` or `capacity_without_padding`.
    Returns:
        `chosen` with n_experts in dropped slots.
    """
    order, _, offsets = sort_by_expert(chosen, n_experts)
    starts = F.pad(offsets, (1, 0))  # the last: start of slots without an expert
    expert = chosen.flatten()[order]
    place = torch.arange(len(order), device=chosen.device) - starts[expert]
    kept = torch.where(place < most, expert, n_experts)
    return order.scatter(0, order, kept).view_as(chosen)


def pad_to_capacity(
    chosen: Tensor, places: tuple[Tensor, Tensor, Tensor], n_experts: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the results `places` of `sort_by_expert` to `most` rows per expert.

    In the result, padding rows have slot -1 and dropped slots have row -1.
    """
    slots, rows, offsets = places
    starts = F.pad(offsets, (1, 0)).long()
    source = starts[:-1, None] + torch.arange(most, device=slots.device)  # (E, most)
    filled = source < offsets[:, None]
    padded = torch.where(filled, slots[source.clamp(max=len(slots) - 1)], -1).flatten()
    expert = chosen.flatten()
    taken = torch.where(expert < n_experts, expert * most + rows - starts[expert], -1)
    ends = (torch.arange(n_experts, device=slots.device) + 1) * most
    return padded, taken, ends.int()


class DispatchState(NamedTuple):
    """Results of `MoE.dispatch` that `MoE.combine` needs."""

    x: Tensor
    """(B, T, D), the layer's input."""
    copies: Copies
    counts: Tensor
    losses: Tensor
    """Like `counts`, an argument of `Router.record`."""
    tail: bool
    """Whether there may be rows after the last expert's rows: dropped slots and padding."""


class MoE(nn.Module):
    """Mixture-of-experts layer: router, experts and shared experts."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        width = config.n_shared_experts * config.expert_dim
        self.shared = FeedForward(config, width) if width else None
        self.shared_gate = nn.Linear(config.dim, 1, bias=False) if config.shared_gate else None
        self.capacity_factor, self.capacity_pad = config.capacity_factor, config.capacity_pad

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        loads: Tensor | None = None,
        order: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the layer; arguments: those of `dispatch`.

        Returns:
            (B, T, D) in x's dtype, and counts and losses for `Router.record`.
        """
        rows, offsets, state = self.dispatch(x, keys, loads, order, real)
        pending = self.experts.begin(rows, offsets, state.tail, state.copies)
        shared_output = self.shared_output(x)
        return self.combine(self.experts.finish(pending), shared_output, state)

    def dispatch(
        self,
        x: Tensor,
        keys: Tensor | None,
        loads: Tensor | None,
        order: Tensor | None,
        real: Tensor | None,
    ) -> tuple[Tensor, Tensor, DispatchState]:
        """Route tokens and copy them to rows sorted by expert.

        Args:
            x: (B, T, D), normalised.
            keys: int64 (B, T) from `token_keys`; required in training with jitter.
            loads: from `Router.loads`.
            order: int64 (B, T of all ranks that share the micro-batch), index of each token in its
                sequence, rank after rank; None: tokens are in order. Used for capacity.
            real: bool (B, T), False for padding, which gets no experts and is not counted; None:
                no padding.
        Returns:
            Rows (R, D), or tokens (N, D) if the experts take tokens; offsets int32 (E,) of the
            rows; the state for `combine`.
        """
        weights, chosen, counts, losses = self.router(x, keys, loads, real)
        chosen, most = self._drop_over_capacity(chosen, order, padded=real is not None)
        flat, weights, chosen = (tensor.flatten(0, 1) for tensor in (x, weights, chosen))
        places = sort_by_expert(chosen, self.router.n_experts)
        if self.capacity_pad:
            most = min(most, len(flat))
            places = pad_to_capacity(chosen, places, self.router.n_experts, most)
        slots, by_slot, offsets = places
        rows = flat
        if not self.experts.takes_tokens:
            rows = repeated(flat, slots, by_slot, chosen.shape[1])
        tail = not self.capacity_pad and (bool(self.capacity_factor) or real is not None)
        copies = Copies(weights, slots, by_slot)
        return rows, offsets, DispatchState(x, copies, counts, losses, tail)

    def shared_output(self, x: Tensor) -> Tensor | None:
        """Apply the shared experts, (B, T, D) -> (B, T, D); None without shared experts."""
        if self.shared is None:
            return None
        shared = self.shared(x)
        return shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid()

    def combine(
        self, rows: Tensor, shared_output: Tensor | None, state: DispatchState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the experts' outputs (R, D) by weight and add the shared experts' output.

        Returns the same as `forward`.
        """
        x = state.x
        out = rows if self.experts.takes_tokens else summed(rows, *state.copies)
        out = out.view_as(x).to(x.dtype)
        return out if shared_output is None else out + shared_output, state.counts, state.losses

    def _drop_over_capacity(
        self, chosen: Tensor, order: Tensor | None, padded: bool
    ) -> tuple[Tensor, int]:
        """Drop slots over capacity.

        Returns:
            `chosen` (B, T, k) with n_experts in dropped slots; the capacity of an expert if padding
            counts as tokens (0: no capacity).
        """
        if not self.capacity_factor:
            return chosen, 0
        pool, n_experts = self.router.pool, self.router.n_experts
        ranks = 1 if pool is None else pool.ranks
        most = capacity(chosen.numel() * ranks, n_experts, self.capacity_factor)

        def drop(whole: Tensor) -> Tensor:
            limit = (
                capacity_without_padding(whole, n_experts, self.capacity_factor) if padded else most
            )
            return within_capacity(whole, n_experts, limit)

        return (drop(chosen) if pool is None else pool.in_order(drop, chosen, order)), most
