"""Dispatcher over several hosts that sends each token once to each host of its experts.

A token has k experts, often several of them on one host. The other dispatchers send it over the
network once per expert. This one sends it once per host, to the rank with the sender's index there.
This *relay* copies it to the ranks of its experts, over the fast links inside the host. Results
return the same way: the relay sums those of its host by their weights, and sends one row back.

    sender             tokens (N, D) -> slots by host (H, S, D) -> all-to-all between hosts
    relay              tokens (H S, D) -> copies by expert (R, D) -> dispatcher inside the host
                       results (R, D) -> weighted sums (H S, D) -> all-to-all between hosts
    sender             sums of hosts (H, S, D) -> sum over hosts (N, D)

So at most min(k, H - 1) rows of a token leave its host, and none for experts on its own host. With
it travel k indices of experts and k weights, whose gradients return with the token's. Inside a
host, symmetric memory or, if ranks cannot read each other's memory, all-to-alls of a fixed size
exchange rows.

Sums are in float32 at least. Each is rounded to the rows' dtype before it is sent: the sum of a
host, and in the backward a host's sum of a token's gradients.

All sizes are fixed, as in `bounded_all_to_all.py`, so that blocks compile to one graph:

    even = N (1 - (1 - 1 / H)^k)             room = ceil(capacity x even), at least LEAST
    S = room, at most N                      R = room x N k / even, at most H S k

where `even` is the number of tokens that a rank sends to a host if experts are random; a relay then
has N k copies. See `bounded.py` for tokens that do not fit. All ranks must have the same N.

Shapes: N tokens of a rank, k experts per token, D width, E experts, H hosts, S tokens from a rank
to a host, R copies of tokens on a relay.
Sources: DeepSeek-V3, arXiv:2412.19437, section 3.2.2; DeepEP's internode dispatch; HybridEP.
"""

import math
import socket
from collections.abc import Callable
from itertools import groupby, permutations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError
from dtron.kernels.permute import Copies, collected, repeated, sort_by_expert, summed
from dtron.parallelisms.expert.bounded import RADIX, Bounded, LayerTensors, bucket, recorded
from dtron.parallelisms.expert.bounded_all_to_all import (
    BoundedAllToAll,
    check_float8,
    chunks_arrived,
    send_chunks,
)
from dtron.parallelisms.expert.dispatcher import Compute
from dtron.parallelisms.expert.symmetric_dispatch import SymmetricMemory
from dtron.parallelisms.functional_collectives import issue_all_to_all_even, wait_tensor

KEY = 'parallel.dispatcher = "hierarchical"'
LEAST = 512
"""Minimum of S, since loads of few tokens are never even."""
Split = Callable[[dist.ProcessGroup, int], tuple[dist.ProcessGroup, dist.ProcessGroup]]
"""(group of ep x etp ranks, ranks per host) -> (one rank per host, ranks of this host)."""


class _Layer(NamedTuple):
    """Constants of a layer between hosts and inside a host."""

    between: LayerTensors
    inside: LayerTensors


class _Routes(NamedTuple):
    """Which of this rank's tokens are sent to which host, and the experts that they have there."""

    tokens: Tensor
    """int64 (H S,): n H + h for token n in a slot of host h; -1: the slot is empty."""
    slots: Tensor
    """int64 (N H,): the slot of token n for host h, at n H + h; -1: it is not sent there."""
    experts: Tensor
    """int32 (H S, k): the experts of the slot's token, counted from the host's first one; E / H: no
    expert of this host."""
    lost: Tensor
    """bool (N, 1): the token did not fit for a host."""
    largest: Tensor
    """int64 (1,): the largest number of tokens for a host; it may exceed S."""


def routes_of_tokens(experts: Tensor, n_experts: int, n_hosts: int, most: int) -> _Routes:
    """Compute the routes between hosts.

    Args:
        experts: int64 (N, k); n_experts: no expert.
        n_experts: E.
        most: S.
    """
    each = n_experts // n_hosts
    host = torch.arange(n_hosts, device=experts.device)
    sent = (experts.unsqueeze(1) // each == host.unsqueeze(1)).any(2)  # (N, H)
    place = sent.cumsum(0) - 1
    fits = sent & (place < most)
    slots = torch.where(fits, host * most + place, -1).flatten()
    last = n_hosts * most
    numbers = torch.arange(len(slots), device=slots.device)
    tokens = slots.new_full((last + 1,), -1)
    tokens = tokens.scatter(0, torch.where(slots < 0, last, slots), numbers)[:-1]

    own = experts[tokens.clamp(min=0) // n_hosts] - (host * each).repeat_interleave(most)[:, None]
    here = (own >= 0) & (own < each) & (tokens >= 0).unsqueeze(1)
    own = torch.where(here, own, each).int()
    lost = (sent & ~fits).any(1, keepdim=True)
    return _Routes(tokens, slots, own, lost, sent.sum(0).amax().unsqueeze(0))


class _InFlight(NamedTuple):
    """Issued all-to-alls between hosts, whose results have not arrived."""

    tokens: Tensor
    """(H S, D), by sender."""
    weights: Tensor
    """(H S, k)."""
    experts: Tensor
    """int32 (H S, k), as in `_Routes`."""
    routes: _Routes
    layer: _Layer
    n_experts: int
    """E / H."""


class Hierarchical(Bounded):
    """Dispatcher that sends a token once to each host of its experts; see the module's docstring.

    Args:
        group: ep x etp ranks, etp innermost.
        capacity: maximum number of tokens from a rank to a host, and of token copies inside a host,
            as a multiple of an even load.
        float8: not implemented.
        inner: number of neighbouring ep ranks in a host; 0: those with equal host names.
        split: makes the process groups between hosts and inside a host, `Mesh.expert_hosts`.
    Raises:
        ConfigError: all ranks are on one host, or hosts have different numbers of ranks.
    """

    takes_tokens = True
    dropped_rows = "rank {rank} had {rows} tokens for one host"

    def __init__(
        self,
        group: dist.ProcessGroup,
        ep: int,
        etp: int,
        capacity: float,
        float8: bool = False,
        *,
        inner: int = 0,
        split: Split,
    ) -> None:
        check_float8(float8, KEY)
        check_inner(ep, inner)
        super().__init__(group, ep, etp, capacity)
        inside = inner * etp or ranks_per_host(group, etp)
        self.n_hosts = group.size() // inside
        self._split = lambda group: split(group, inside)
        self._between, within = split(group, inside)
        self._inside = kind_inside(within)(within, inside // etp, etp, capacity)
        self._inside.enough = self.enough

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Use the groups between and inside hosts of these ranks; see `Dispatcher`."""
        super().use_group(group)
        self._between, within = self._split(group)
        self._inside.use_group(within)

    def layer(self, fqn: str, device: torch.device) -> _Layer:  # type: ignore[override]
        """Number a layer and return its constants as tensors; see `Dispatcher`."""
        return _Layer(super().layer(fqn, device), self._inside.layer(fqn, device))

    def even_load(self, n_rows: int) -> float:
        """Return the number of tokens from a rank to a host, of `even_pairs`; see `Bounded`."""
        return n_rows / self.n_hosts

    def dropped(self, device: torch.device) -> Tensor:
        """Return whether a layer of this rank dropped tokens; see `Dispatcher`."""
        return super().dropped(device) | self._inside.dropped(device)

    def grow(self, device: torch.device) -> str:
        """Raise the capacity if tokens were dropped; see `Dispatcher`."""
        messages = [super().grow(device), self._inside.grow(device)]
        self.capacity = self._inside.capacity = max(self.capacity, self._inside.capacity)
        return "; ".join(filter(None, messages))

    def begin(  # type: ignore[override]
        self, rows: Tensor, offsets: Tensor, layer: _Layer, copies: Copies
    ) -> _InFlight:
        """Issue the dispatch of tokens (N, D) between hosts; see `Dispatcher`."""
        n_tokens, k = copies.weights.shape
        n_experts, most = len(offsets), min(n_tokens, self._room(n_tokens, k))
        experts = torch.where(copies.rows < 0, n_experts, bucket(offsets, copies.rows))
        routes = routes_of_tokens(experts.view(n_tokens, k), n_experts, self.n_hosts, most)
        own = self._record(routes.experts, layer, routes.largest, n_tokens, k)
        ways = (routes.tokens, routes.slots, self.n_hosts)
        return _InFlight(
            send_chunks(repeated(rows, *ways), *self._ranks()),
            send_chunks(repeated(copies.weights, *ways), *self._ranks()),
            issue_all_to_all_even(own, *self._ranks()),
            routes,
            layer,
            n_experts // self.n_hosts,
        )

    def finish(self, pending: _InFlight, compute: Compute) -> Tensor:
        """Wait for tokens, compute inside the host, and combine; see `Dispatcher`."""
        routes = pending.routes
        experts = wait_tensor(pending.experts).long()
        weights = chunks_arrived(pending.weights, *self._ranks())
        tokens = chunks_arrived(pending.tokens, *self._ranks())
        sums = self._relayed(tokens, weights, experts, pending, compute).to(tokens.dtype)
        sums = chunks_arrived(send_chunks(sums, *self._ranks()), *self._ranks())
        out = collected(sums, routes.tokens, routes.slots, self.n_hosts, weights.dtype)
        return torch.where(routes.lost, torch.nan, out)

    def _relayed(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, pending: _InFlight, compute: Compute
    ) -> Tensor:
        """Copy tokens (H S, D) to experts of this host; return their weighted sums (H S, D)."""
        n_tokens, k = len(pending.routes.lost), weights.shape[1]
        pairs, copies = even_pairs(n_tokens, k, self.n_hosts), max(1, n_tokens * k * self.n_hosts)
        most = min(experts.numel(), self._room(n_tokens, k) * copies // pairs)
        slots, rows, offsets = sort_by_expert(experts, pending.n_experts)
        needed = (offsets[-1:].long() * pairs + copies - 1) // copies  # tokens with so many copies
        offsets = self._record(offsets, pending.layer, needed, n_tokens, k)
        ends = offsets.clamp(max=most)
        row = torch.arange(most, device=slots.device)
        slots = torch.where(row < ends[-1], slots[:most], -1)
        lost = (rows >= most) & (rows < offsets[-1])
        rows = torch.where(rows < ends[-1], rows, -1)
        copied = repeated(tokens, slots, rows, k)
        sent: Any = self._inside.begin(copied, ends, pending.layer.inside, n_tokens * k)
        sums = summed(self._inside.finish(sent, compute), weights, slots, rows)
        return torch.where(lost.view(-1, k).any(1, keepdim=True), torch.nan, sums)

    def _room(self, n_tokens: int, k: int) -> int:
        return room_of(n_tokens, k, self.n_hosts, self.capacity)

    def _record(self, x: Tensor, layer: _Layer, needed: Tensor, n_tokens: int, k: int) -> Tensor:
        """Record whether `needed`, int64 (1,), exceeds the room; return a copy of x."""
        pairs = even_pairs(n_tokens, k, self.n_hosts)
        exceeded = needed > self._room(n_tokens, k)
        exceeded = torch.where(exceeded, needed * RADIX + pairs, 0)
        return recorded(x, layer.between.number, exceeded, self.record.name)

    def _ranks(self) -> tuple[int, str]:
        return self.n_hosts, self._between.group_name


def even_pairs(n_tokens: int, k: int, n_hosts: int) -> int:
    """Return the number of pairs of a token and a host with experts of it, for random experts."""
    return max(1, round(n_tokens * n_hosts * (1 - (1 - 1 / n_hosts) ** k)))


def room_of(n_tokens: int, k: int, n_hosts: int, capacity: float) -> int:
    """Return `room` of the module's docstring, for N tokens of a rank."""
    return max(LEAST, math.ceil(capacity * even_pairs(n_tokens, k, n_hosts) / n_hosts))


def check_inner(ep: int, inner: int) -> None:
    """Raise ConfigError if `inner` ranks are no host of ep ranks; 0: found at the start."""
    if ep == 1:
        raise ConfigError(f'{KEY} needs parallel.ep > 1; use "symmetric_memory"')
    if inner and (ep % inner or inner == ep):
        legal = [str(n) for n in range(1, ep) if ep % n == 0]
        raise ConfigError(
            f"parallel.ep_inner = {inner} is no proper divisor of parallel.ep = {ep}; use "
            f"{', '.join(legal)}"
        )


def ranks_per_host(group: dist.ProcessGroup, etp: int) -> int:
    """Return the number of a group's ranks on each host, by host names; a collective.

    Raises:
        ConfigError: there is one host, or hosts do not have equal blocks of neighbouring ranks.
    """
    names = [name for name, _ in _machines(group)]
    blocks = [len(list(block)) for _, block in groupby(names)]
    if len(blocks) == 1:
        raise ConfigError(
            f"{KEY}: all ranks of parallel.ep x parallel.etp are on one host ({names[0]}); use "
            '"symmetric_memory", or set parallel.ep_inner'
        )
    if len(set(names)) < len(blocks) or len(set(blocks)) > 1 or blocks[0] % etp:
        raise ConfigError(
            f"{KEY}: hosts have {', '.join(map(str, blocks))} neighbouring ranks of parallel.ep x "
            f"parallel.etp, but each must have the same number, a multiple of parallel.etp = {etp};"
            ' set parallel.ep_inner, or use "bounded_all_to_all"'
        )
    return blocks[0]


def kind_inside(group: dist.ProcessGroup) -> type[SymmetricMemory] | type[BoundedAllToAll]:
    """Return the dispatcher between the ranks of a host; a collective over all ranks.

    SymmetricMemory if the ranks of each host can read each other's memory, else BoundedAllToAll:
    all ranks have the same, since the capacity of both kinds differs.
    """
    machines = _machines(group)
    pairs = list(permutations([device for _, device in machines], 2))
    linked = all(a < 0 or torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    own = bool(pairs) and linked and len({name for name, _ in machines}) == 1
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return SymmetricMemory if all(of_ranks) else BoundedAllToAll


def _machines(group: dist.ProcessGroup) -> list[tuple[str, int]]:
    """Return (host name, index of the GPU or -1) of each rank of a group; a collective."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    found: list[tuple[str, int]] = [("", -1)] * group.size()
    dist.all_gather_object(found, (socket.gethostname(), device), group)
    return found
