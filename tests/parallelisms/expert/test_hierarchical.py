"""Tokens sent once per host: results, gradients, rows between hosts, tokens that do not fit."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtron.config import Parallel
from dtron.errors import ConfigError
from dtron.kernels import permute
from dtron.kernels.permute import Copies, repeated, sort_by_expert, summed
from dtron.parallelisms import Mesh
from dtron.parallelisms.expert import bounded_all_to_all, hierarchical
from dtron.parallelisms.expert.bounded_all_to_all import BoundedAllToAll
from dtron.parallelisms.expert.hierarchical import Hierarchical
from dtron.parallelisms.expert.symmetric_dispatch import SymmetricMemory
from tests.harness import run_ranks
from tests.parallelisms.expert.test_symmetric_dispatch import compute_of, layer_of
from tests.parallelisms.parity import Case

EXPERTS, TOKENS, DIM, K = 8, 13, 5, 3
LOADS = ("random", "one expert", "own host", "some nowhere", "none")


def drawn(loads: str, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, their weights, and their experts; EXPERTS: none."""
    generator = torch.Generator().manual_seed(100 * rank)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :K]
    if loads == "own host":  # of two hosts of two ranks
        chosen = chosen % 4 + 4 * (rank // 2)
    if loads == "one expert":
        chosen[:, 0] = 5
    if loads == "some nowhere":
        chosen[chosen > 5] = EXPERTS
    if loads == "none":
        chosen = torch.full_like(chosen, EXPERTS)
    tokens, weights = (
        torch.randn(TOKENS, width, generator=generator, dtype=torch.float64).requires_grad_()
        for width in (DIM, K)
    )
    return tokens, weights, chosen


def dispatched(dispatcher: Hierarchical, layer: Any, drawn: Any, compute: Any) -> Tensor:
    tokens, weights, chosen = drawn
    slots, rows, offsets = sort_by_expert(chosen, EXPERTS)
    copies = Copies(weights, slots, torch.where(chosen.flatten() < EXPERTS, rows, -1))
    return dispatcher.finish(dispatcher.begin(tokens, offsets, layer, copies), compute)


def directly(drawn: Any, weight: Tensor) -> Tensor:
    """All experts on this rank."""
    tokens, weights, chosen = drawn
    slots, rows, offsets = sort_by_expert(chosen, EXPERTS)
    rows = torch.where(chosen.flatten() < EXPERTS, rows, -1)
    slots = torch.where(torch.arange(len(slots)) < offsets[-1], slots, -1)
    results = compute_of(weight, 1.0)(repeated(tokens, slots, rows, K), offsets)
    return summed(torch.where((slots >= 0).unsqueeze(1), results, 0), weights, slots, rows)


def matrices() -> Tensor:
    return torch.arange(1, EXPERTS * DIM + 1, dtype=torch.float64).view(EXPERTS, DIM) / 7


def made(etp: int, inner: int, capacity: float = 2.0) -> Hierarchical:
    ep = dist.get_world_size() // etp
    mesh = Mesh(ep=ep, etp=etp)
    return Hierarchical(
        mesh.expert_group(), ep, etp, capacity, inner=inner, split=mesh.expert_hosts
    )


def differing(dispatcher: Hierarchical, loads: str) -> list[str]:
    """Which of this rank's results and gradients are not those of one process."""
    rank, ep, etp = dist.get_rank(), dispatcher.ep, dispatcher.etp
    whole = matrices().requires_grad_()
    own = matrices().chunk(ep)[rank // etp].clone().requires_grad_()
    case, layer = drawn(loads, rank), layer_of(dispatcher, loads)
    found = dispatched(dispatcher, layer, case, compute_of(own, 1 / etp))
    wanted = directly(case, whole)
    factor = (rank + 1) * torch.arange(1.0, DIM + 1)
    losses = [(each * factor).square().sum() for each in (found, wanted)]
    gradients = [
        torch.autograd.grad(loss, [*case[:2], weight])
        for loss, weight in zip(losses, (own, whole), strict=True)
    ]
    dist.all_reduce(gradients[1][2])
    expected = (wanted, *gradients[1][:2], gradients[1][2].chunk(ep)[rank // etp] / etp)
    return [
        f"{loads}: {name}"
        for name, one, other in zip(NAMES, (found, *gradients[0]), expected, strict=True)
        if not torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    ]


NAMES = ("results", "gradients of tokens", "gradients of weights", "gradients of experts")


def compared(etp: int, inner: int, plant: Callable[[], None] | None = None) -> list[str]:
    """What differs, by any loads, with each dispatcher inside hosts; `inner` 0: by host names."""
    hierarchical.LEAST, found = 1, []
    for kind in (SymmetricMemory, BoundedAllToAll):
        if inner:
            hierarchical.kind_inside = lambda _, kind=kind: kind
        else:
            socket.gethostname = lambda: f"host {dist.get_rank() // 2}"
        if plant is not None:
            plant()
        dispatcher = made(etp, inner)
        assert inner or (dispatcher.n_hosts, type(dispatcher._inside)) == (2, SymmetricMemory)
        for loads in LOADS:
            found += differing(dispatcher, loads)
        assert not dispatcher.grow(torch.device("cpu"))
    return found


@pytest.mark.parametrize(("etp", "inner"), [(1, 0), (1, 1), (2, 1)])
def test_equals_one_process(etp: int, inner: int) -> None:
    assert run_ranks(4, compared, etp, inner) == [[]] * 4


def kinds(of_rank: Callable[[], str]) -> str:
    """The dispatcher inside this rank's host, of two ranks."""
    socket.gethostname = of_rank
    mesh = Mesh(ep=4)
    _, within = mesh.expert_hosts(mesh.expert_group(), 2)
    return hierarchical.kind_inside(within).__name__


def one_host() -> str:
    return "a"


def second_host_is_two() -> str:
    """As ranks whose GPUs cannot read each other's memory."""
    return "a" if dist.get_rank() < 3 else "b"


def test_all_hosts_have_the_same_dispatcher() -> None:
    """They would raise the capacity differently."""
    assert run_ranks(4, kinds, one_host) == ["SymmetricMemory"] * 4
    assert run_ranks(4, kinds, second_host_is_two) == ["BoundedAllToAll"] * 4


def lose_a_sum() -> None:
    """Planted: the sum of the last host is not added."""
    collected = permute.collected

    def lost(x: Tensor, slots: Tensor, rows: Tensor, k: int, dtype: torch.dtype) -> Tensor:
        last = torch.arange(len(rows)) % k == k - 1
        return collected(x, slots, torch.where(last, -1, rows), k, dtype)

    hierarchical.collected = lost


def test_a_lost_sum_is_seen() -> None:
    assert "random: results" in run_ranks(4, compared, 1, 2, lose_a_sum)[0]


# -- what travels between hosts -------------------------------------------------------------------


def between(twice: bool = False) -> list[tuple[int, int]]:
    """For each load: (rows that this rank sends to other hosts, pairs of a token and another host
    that has experts of it); and no token twice.

    Args:
        twice: planted: a token is sent a second time to the second host, in a free slot.
    """
    hierarchical.LEAST, found = TOKENS + 1, []
    sent: list[Tensor] = []
    send, routes_of = hierarchical.send_chunks, hierarchical.routes_of_tokens

    def seen(rows: Tensor, ranks: int, group: str) -> Tensor:
        sent.append(rows.detach())
        return send(rows, ranks, group)

    def again(*args: Any) -> Any:
        routes = routes_of(*args)
        tokens = routes.tokens.clone()
        second = tokens.chunk(2)[1]
        free = (second < 0).nonzero()
        second[free[:1]] = int(second[0])
        return routes._replace(tokens=tokens)

    hierarchical.send_chunks = seen
    hierarchical.routes_of_tokens = again if twice else routes_of
    dispatcher, own = made(1, 2), dist.get_rank() // 2
    for loads in LOADS:
        case = drawn(loads, dist.get_rank())
        sent.clear()
        dispatched(dispatcher, layer_of(dispatcher, loads), case, lambda rows, _: rows)
        tokens, _, sums = sent
        assert tokens.shape == sums.shape  # one row returns for each one that is sent
        away = [chunk for host, chunk in enumerate(tokens.chunk(2)) if host != own]
        rows = sum(int(chunk.any(1).sum()) for chunk in away)
        hosts = torch.where(case[2] < EXPERTS, case[2] // 4, own)
        found.append((rows, int((hosts != own).any(1).sum())))
    return found


def test_a_token_travels_once_to_each_host() -> None:
    for found in run_ranks(4, between):
        counts = dict(zip(LOADS, found, strict=True))
        assert all(rows == pairs for rows, pairs in found)
        assert 0 < counts["random"][0] <= TOKENS  # with 3 experts each, on 2 hosts
        assert counts["own host"] == counts["none"] == (0, 0)


def test_a_row_that_travels_twice_is_counted() -> None:
    for found in run_ranks(4, between, True)[:2]:  # ranks of the first host
        assert any(rows > pairs for rows, pairs in found)


# -- what does not fit ----------------------------------------------------------------------------

EXCEEDED = {
    # of four hosts, all tokens for one
    "one host": (1, lambda n, _: torch.full((n, 1), 5)),
    # of two hosts, all copies for one
    "copies": (2, lambda n, _: torch.tensor([0, 1, 2]).expand(n, 3)),
    # inside each host, two copies of three for one rank
    "a rank": (2, lambda n, host: torch.tensor([0, 1, 2]).expand(n, 3) + 4 * host),
}


def exceeded(name: str) -> tuple[str, Tensor]:
    """The message, and how far results are off with the capacity that was raised."""
    inner, choose = EXCEEDED[name]
    hierarchical.LEAST = bounded_all_to_all.LEAST = 1
    hierarchical.kind_inside = lambda _: BoundedAllToAll
    dispatcher, device = made(1, inner, 1.2), torch.device("cpu")
    chosen = choose(TOKENS, dist.get_rank() // 2)
    weights = torch.ones(chosen.shape, dtype=torch.float64)
    case = torch.randn(TOKENS, DIM, dtype=torch.float64), weights, chosen
    layer = [layer_of(dispatcher, f"{name}.layer") for name in ("other", "some")][1]
    first = dispatched(dispatcher, layer, case, lambda rows, _: 2 * rows)
    lost = torch.tensor([dispatcher.dropped(device), first.isnan().any()]).int()
    dist.all_reduce(lost)
    assert lost.all()  # a sender and a relay may be different ranks
    said = dispatcher.grow(device)
    assert not dispatcher.dropped(device)
    again = dispatched(dispatcher, layer, case, lambda rows, _: 2 * rows)
    if dispatcher.grow(device):  # more tokens arrive inside the host now
        again = dispatched(dispatcher, layer, case, lambda rows, _: 2 * rows)
        assert not dispatcher.grow(device)
    return said, again - 2 * chosen.shape[1] * case[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one host", "had 13 tokens for one host of some.layer, 4.00 times an even load"),
        ("copies", "had 23 tokens for one host of some.layer, 2.00 times an even load"),
        ("a rank", "had 26 tokens for one rank's experts of some.layer, 1.33 times an even"),
    ],
)
def test_tokens_that_do_not_fit_are_nan_and_then_there_is_room(name: str, message: str) -> None:
    for said, difference in run_ranks(4, exceeded, name):
        assert message in said
        assert said.startswith("parallel.ep_capacity = 1.2: rank ")
        assert difference.abs().max() < 1e-12


def test_room_for_tokens() -> None:
    """Of 4,096 tokens with 8 experts each: all but 16 have one on a given one of two hosts; two
    thirds have one on a given one of eight."""
    rooms = {hosts: hierarchical.room_of(4096, 8, hosts, 1.0) for hosts in (2, 8)}
    assert rooms == {2: 4080, 8: 2689}
    for hosts, k in ((2, 1), (8, 8), (64, 2)):
        assert hierarchical.room_of(4096, k, hosts, float(hosts)) >= 4096  # ep_capacity = ep


def test_routes_of_no_tokens() -> None:
    routes = hierarchical.routes_of_tokens(torch.zeros(0, 2, dtype=torch.int64), 4, 2, 0)
    assert [len(each) for each in routes] == [0, 0, 0, 0, 1]


# -- what is refused ------------------------------------------------------------------------------


def refused() -> list[str]:
    """Errors of a group on one host, of hosts of other sizes, and of float8."""
    found = []
    names = (lambda: "a", lambda: "a" if dist.get_rank() < 3 else "b")
    for of_rank, float8 in ((names[0], False), (names[1], False), (names[1], True)):
        socket.gethostname = of_rank
        mesh = Mesh(ep=4)
        with pytest.raises(ConfigError) as error:
            Hierarchical(mesh.expert_group(), 4, 1, 2.0, float8, split=mesh.expert_hosts)
        found.append(str(error.value))
    return found


def test_hosts_that_do_not_fit_are_refused() -> None:
    one, uneven, float8 = run_ranks(4, refused)[0]
    assert one.endswith('are on one host (a); use "symmetric_memory", or set parallel.ep_inner')
    assert "hosts have 3, 1 neighbouring ranks" in uneven
    assert float8.startswith('float8.dispatch with parallel.dispatcher = "hierarchical"')


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ep": 4, "ep_inner": 3}, "ep_inner = 3 is no proper divisor of parallel.ep = 4; use 1"),
        ({"ep": 4, "ep_inner": 4}, "ep_inner = 4 is no proper divisor of parallel.ep = 4; use 1"),
        ({"etp": 4}, "needs parallel.ep > 1"),
        ({"ep": 4, "ep_inner": 2, "dispatcher": "all_to_all"}, "ep_inner = 2 has no effect"),
    ],
)
def test_settings_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Case("mixtral", 4, Parallel(**{"dispatcher": "hierarchical", **keys})).resolved()
