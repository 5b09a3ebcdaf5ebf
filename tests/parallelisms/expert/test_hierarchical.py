"""Tokens sent once per host: results, gradients, rows between hosts, tokens that do not fit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtron.kernels.permute import Copies, repeated, sort_by_expert, summed
from dtron.parallelisms import Mesh
from dtron.parallelisms.expert import hierarchical
from dtron.parallelisms.expert.bounded_all_to_all import BoundedAllToAll
from dtron.parallelisms.expert.hierarchical import Hierarchical
from dtron.parallelisms.expert.symmetric_dispatch import SymmetricMemory
from tests.harness import run_ranks
from tests.parallelisms.expert.test_symmetric_dispatch import compute_of, layer_of

EXPERTS, TOKENS, DIM, K = 8, 13, 5, 3
LOADS = ("random", "one expert", "own host", "some nowhere", "none")


def drawn(loads: str, rank: int, round: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, their weights, and different experts for each; EXPERTS: none."""
    generator = torch.Generator().manual_seed(100 * rank + round)
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


def made(ep: int, etp: int, inner: int, capacity: float = 2.0) -> Hierarchical:
    mesh = Mesh(ep=ep, etp=etp)
    return Hierarchical(
        mesh.expert_group(), ep, etp, capacity, inner=inner, split=mesh.expert_hosts
    )


def compare(etp: int, inner: int, kind: Any) -> None:
    hierarchical.kind_inside = lambda _: kind
    hierarchical.LEAST = 1
    rank, world = dist.get_rank(), dist.get_world_size()
    dispatcher, ep = made(world // etp, etp, inner), world // etp
    whole = matrices().requires_grad_()
    own = matrices().chunk(ep)[rank // etp].clone().requires_grad_()
    compute = compute_of(own, 1 / etp)
    for i, loads in enumerate(LOADS):
        case = drawn(loads, rank, i)
        layer = layer_of(dispatcher, f"layer {i}")
        found, wanted = dispatched(dispatcher, layer, case, compute), directly(case, whole)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=loads)
        factor = (rank + 1) * torch.arange(1.0, DIM + 1)
        losses = [(each * factor).square().sum() for each in (found, wanted)]
        gradients = [
            torch.autograd.grad(loss, [*case[:2], weight])
            for loss, weight in zip(losses, (own, whole), strict=True)
        ]
        dist.all_reduce(gradients[1][2])
        assert not dispatcher.grow(torch.device("cpu"))
        part = gradients[1][2].chunk(ep)[rank // etp]
        expected = [*gradients[1][:2], part / etp]
        for one, other in zip(gradients[0], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=loads)


@pytest.mark.parametrize("kind", [SymmetricMemory, BoundedAllToAll])
@pytest.mark.parametrize(("etp", "inner"), [(1, 2), (1, 1), (2, 1)])
def test_equals_one_process(etp: int, inner: int, kind: Any) -> None:
    run_ranks(4, compare, etp, inner, kind)
