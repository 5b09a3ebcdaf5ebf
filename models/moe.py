"""Mixture of experts: the feed-forward layer of a block whose tokens take k of E networks.

    router      x (B, T, D) -> for each token k experts and their weights (`router.py`)
    send        sorts the (token, expert) pairs by expert: a row each
    experts     stacked matrices, multiplied by groups of rows: one grouped product each
    shared      a feed-forward layer that every token takes
    receive     adds the results up by weight, and the shared ones

Only `experts` may be elsewhere: expert parallelism replaces their `begin`, which sends rows away,
and their `finish`, which waits for them. What all tokens take is computed in between, while rows
travel. A block calls all of these in turn, so that a graph that breaks at the experts breaks there
alone.
In bfloat16 nothing waits for the device: the rows of each expert are given by offsets, int32 (E,),
which are on it. Row r belongs to expert e where offsets[e - 1] <= r < offsets[e], with
offsets[-1] = 0.

Experts are numbered 0 ... E - 1 in `chosen`; E stands for none, where capacity drops a choice.

Shapes: B sequences, T tokens, N = B T, D width, F width of an expert, E experts, k experts a token.
Sources: arXiv:1701.06538; capacity GShard, arXiv:2006.16668; dropless grouped products MegaBlocks,
arXiv:2211.15841; shared experts DeepSeekMoE, arXiv:2401.06066.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.kernels.grouped import grouped_product
from dtron.kernels.permute import inverse_of, repeated, summed
from dtron.models.config import DecoderConfig
from dtron.models.layers import ACTIVATIONS, FeedForward
from dtron.models.router import Router


class Experts(nn.Module):
    """E feed-forward layers, as stacked matrices gate and up (E, F, D), down (E, D, F), and with
    `bias` vectors gate_bias and up_bias (E, F), down_bias (E, D).

    Attributes:
        activate: (gate, up) -> h, or up -> h without gate, element by element. Replaced from
            outside by one kernel, where no graph holds it.
        part: (index, number) of the parts into which widths are split from outside: F of every
            matrix, D of down_bias. What comes out is then one of as many parts of a sum.
        multiply: as `grouped_product`; replaced from outside by products in fewer bits.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        gated, function = self.activation.gated, self.activation.function
        self.activate: Callable[..., Tensor] = self.activation if gated else function
        self.part = (0, 1)
        self.multiply = grouped_product
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
        """The parameter of this name, as far as this rank has it: a plain tensor. Replaced from
        outside where there is only a part of it."""
        return getattr(self, name)

    def begin(self, rows: Tensor, offsets: Tensor, tail: bool = True) -> Any:
        """Set rows off to their experts; arguments as for `forward`. What it returns is for
        `finish`, once, and for nothing else."""
        return rows, offsets, tail

    def finish(self, pending: Any) -> Tensor:
        """What `forward` gives for the rows that `begin` was given."""
        return self(*pending)

    def product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        """Each expert's rows by its matrix of this name, (N, K) -> (N, M). Replaced from outside
        where weight gradients are put off."""
        weight = self.own(name)
        assert weight is not None, f"experts have no {name}"
        return self.multiply(x, weight, offsets)

    def forward(self, x: Tensor, offsets: Tensor, tail: bool = True) -> Tensor:
        """Each expert's network on its rows.

        Args:
            x: (N, D), sorted by expert.
            offsets: int32 (E,), where each expert's rows end.
            tail: rows may follow those of the last expert, and their results and gradients are to
                be zero. Without it what comes of such rows is anything, and nobody may read it.
        Returns:
            (N, D).
        """
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        inside = (rows < offsets[-1]).unsqueeze(1)
        if tail:  # for the gradients, which grouped_mm leaves open there, as it does results
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
        if bias is None:
            return out
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        expert = torch.searchsorted(offsets, rows, right=True).clamp(max=len(offsets) - 1)
        added = torch.where(inside, bias[expert], 0)  # no gradient from rows after the last
        index, number = self.part
        if name == "down" and number > 1:  # each part of the sum has its own columns
            width = added.shape[1]
            added = F.pad(added, (index * width, (number - 1 - index) * width))
        return out + added


def slots_by_expert(chosen: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots (token i's j-th choice is slot i k + j) sorted by expert, in order of tokens.

    Args:
        chosen: int64 (N, k), n_experts where nothing is chosen: these come last.
    Returns:
        order int64 (N k,), slots by row; its inverse, rows by slot; offsets int32 (E,).
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(n_experts + 1).scatter_add(0, flat, torch.ones_like(flat))
    return order, inverse_of(order), counts[:-1].cumsum(0).int()


def capacity(n_slots: int, n_experts: int, factor: float) -> int:
    """Of the n_slots choices of a micro-batch, how many one expert may take."""
    return math.ceil(factor * n_slots / n_experts)


def capacity_of(chosen: Tensor, n_experts: int, factor: float) -> Tensor:
    """The same of the choices that are there, int64 () on their device: n_experts is none."""
    n_slots = (chosen < n_experts).sum()
    return (n_slots.double() * factor / n_experts).ceil().long()


def within_capacity(chosen: Tensor, n_experts: int, most: int | Tensor) -> Tensor:
    """Drop what an expert may not take: the choices of its last tokens, so that no token loses its
    expert to a later one of its sequence.

    Args:
        chosen: int64 (..., k), sequence after sequence; n_experts: none.
        most: of `capacity`.
    Returns:
        The same, n_experts where a choice is dropped.
    """
    order, _, offsets = slots_by_expert(chosen, n_experts)
    starts = F.pad(offsets, (1, 0))  # of the dropped too
    expert = chosen.flatten()[order]
    place = torch.arange(len(order), device=chosen.device) - starts[expert]
    kept = torch.where(place < most, expert, n_experts)
    return order.scatter(0, order, kept).view_as(chosen)


def padded_places(
    chosen: Tensor, places: tuple[Tensor, Tensor, Tensor], n_experts: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `slots_by_expert`, whose results are given, but `most` rows an expert: -1 for the slot of
    a row that is none's, and for the row of a choice that was dropped."""
    slots, rows, offsets = places
    starts = F.pad(offsets, (1, 0)).long()
    source = starts[:-1, None] + torch.arange(most, device=slots.device)  # (E, most)
    filled = source < offsets[:, None]
    padded = torch.where(filled, slots[source.clamp(max=len(slots) - 1)], -1).flatten()
    expert = chosen.flatten()
    taken = torch.where(expert < n_experts, expert * most + rows - starts[expert], -1)
    ends = (torch.arange(n_experts, device=slots.device) + 1) * most
    return padded, taken, ends.int()


class Kept(NamedTuple):
    """What a layer keeps while rows are at their experts."""

    x: Tensor
    """(B, T, D), its input."""
    weights: Tensor
    """(N, k)."""
    slots: Tensor
    """int64 (R,), by row."""
    rows: Tensor
    """int64 (N k,), by slot."""
    counts: Tensor
    losses: Tensor
    """Both for `Router.record`."""
    tail: bool
    """Whether rows may follow those of the last expert: of choices that were dropped, and of
    padding."""


class MoE(nn.Module):
    """Router, experts and shared experts, in the place of a block's feed-forward layer.

    Attributes:
        factor: capacity factor; 0: nothing is dropped.
        pad: every expert computes as many rows as it may take.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        width = config.n_shared_experts * config.expert_dim
        self.shared = FeedForward(config, width) if width else None
        self.shared_gate = nn.Linear(config.dim, 1, bias=False) if config.shared_gate else None
        self.factor, self.pad = config.capacity_factor, config.capacity_pad

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        loads: Tensor | None = None,
        order: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Feed forward, each token by its experts; arguments as for `send`.

        Returns:
            (B, T, D) in x's dtype, and counts and losses for `Router.record`.
        """
        rows, offsets, kept = self.send(x, keys, loads, order, real)
        pending = self.experts.begin(rows, offsets, kept.tail)
        beside = self.beside(x)
        return self.receive(self.experts.finish(pending), beside, kept)

    def send(
        self,
        x: Tensor,
        keys: Tensor | None,
        loads: Tensor | None,
        order: Tensor | None,
        real: Tensor | None,
    ) -> tuple[Tensor, Tensor, Kept]:
        """What comes before the experts.

        Args:
            x: (B, T, D), normalised.
            keys: int64 (B, T) of `token_keys`; needed in training with jitter.
            loads: of `Router.loads`.
            order: int64 (B, T of all ranks), where in its sequence each token of the ranks that
                share the micro-batch is, rank after rank; None: they are in order. For capacity.
            real: bool (B, T), False for padding, which takes no experts and counts nowhere; None:
                there is none.
        Returns:
            Rows (R, D) sorted by expert and offsets int32 (E,), for the experts; what is kept.
        """
        weights, chosen, counts, losses = self.router(x, keys, loads, real)
        chosen, most = self._admitted(chosen, order, padded=real is not None)
        flat, weights, chosen = (tensor.flatten(0, 1) for tensor in (x, weights, chosen))
        places = slots_by_expert(chosen, self.router.n_experts)
        if self.pad:
            most = min(most, len(flat))
            places = padded_places(chosen, places, self.router.n_experts, most)
        slots, by_slot, offsets = places
        rows = repeated(flat, slots, by_slot, chosen.shape[1])
        tail = not self.pad and (bool(self.factor) or real is not None)
        return rows, offsets, Kept(x, weights, slots, by_slot, counts, losses, tail)

    def beside(self, x: Tensor) -> Tensor | None:
        """What all tokens take, (B, T, D) -> (B, T, D); None where there are no shared experts."""
        if self.shared is None:
            return None
        shared = self.shared(x)
        return shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid()

    def receive(
        self, rows: Tensor, beside: Tensor | None, kept: Kept
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What comes after the experts, which gave (R, D); returns what `forward` does."""
        x = kept.x
        out = summed(rows, kept.weights, kept.slots, kept.rows).view_as(x).to(x.dtype)
        return out if beside is None else out + beside, kept.counts, kept.losses

    def _admitted(self, chosen: Tensor, order: Tensor | None, padded: bool) -> tuple[Tensor, int]:
        """Choices (B, T, k) without those over capacity, and what each expert may take of all if
        none is of padding."""
        if not self.factor:
            return chosen, 0
        pool, n_experts = self.router.pool, self.router.n_experts
        ranks = 1 if pool is None else pool.ranks
        most = capacity(chosen.numel() * ranks, n_experts, self.factor)

        def drop(whole: Tensor) -> Tensor:
            limit = capacity_of(whole, n_experts, self.factor) if padded else most
            return within_capacity(whole, n_experts, limit)

        return (drop(chosen) if pool is None else pool.in_order(drop, chosen, order)), most
