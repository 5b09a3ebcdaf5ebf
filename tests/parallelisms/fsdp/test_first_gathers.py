"""Parameters that are gathered for the next step while others are updated.

Every bit equals a run that gathers after the update, over a skipped step, a validation and a load
of other weights. Planted mistakes: a gather before its parameters are updated, and one that is kept
when other weights are loaded. test_parity.py compares layouts with one process.
"""

import pytest
import torch
from torch import Tensor, nn

from dtron.config import Optim, Parallel
from dtron.parallelisms import Mesh
from dtron.parallelisms.apply import ParallelPlan, Passes, apply_passes
from dtron.parallelisms.fsdp.sharding import FirstGathers, Policy
from dtron.parallelisms.fsdp.torch_internals import sharded_parameters, start_gathers
from dtron.parallelisms.gradients import local_part
from dtron.parallelisms.pipeline.accumulate import Accumulation
from dtron.training.optim import build_optimizer, update
from tests.gpu_ranks import run_on_gpus
from tests.harness import run_ranks

STEPS, SKIPPED, EVALUATED, LOADED = 5, 1, 2, 3


class BeforeUpdate(FirstGathers):
    """Gathers before the update."""

    @property
    def parameters(self) -> frozenset[nn.Parameter]:  # type: ignore[override]
        """Read before the first update."""
        start_gathers(self.units)
        return frozenset(p for unit in self.units for p in sharded_parameters(unit))


class NotDiscarded(FirstGathers):
    """Keeps what it has gathered when other weights are loaded."""

    def discard(self) -> None:
        """Do nothing."""


def train(
    parallel: Parallel,
    optim: Optim,
    kind: type[FirstGathers] | None,
    device: str = "cpu",
    width: int = 12,
) -> list[dict[str, Tensor]]:
    """The loss and shards of each step: parameters, and their average."""
    torch.manual_seed(0)
    mesh = Mesh(dp_shard=-1, device_type=device)
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))
    plan = ParallelPlan(units="*", parallel=parallel, dtype="float32")
    applied = apply_passes(model, mesh, Passes(**vars(plan)))
    optimizer = build_optimizer(applied.named_parameters(), optim)
    first = None if kind is None else kind(applied.first_gathered)
    execution = Accumulation(model, Policy.of(parallel, mesh), torch.device(device))
    initial = {name: local_part(p).clone() for name, p in applied.named_parameters()}
    torch.manual_seed(torch.distributed.get_rank())
    rows, found = torch.randn(STEPS, 2, 3, width).to(device) / width**0.5, []
    for step in range(STEPS):
        total = execution.train([(x, {}) for x in rows[step]], lambda out, _: out.square().sum())
        seen = {"loss": total}
        scale = torch.tensor(torch.nan if step == SKIPPED else 0.1, device=device)
        update(optimizer, scale, 0.05, first)
        optimizer.zero_grad()
        if step == EVALUATED:
            with applied.evaluating(), torch.no_grad():
                seen["validation"] = model(rows[0, 0])
        if step == LOADED:
            with torch.no_grad():
                for name, p in applied.named_parameters():
                    local_part(p).copy_(initial[name])
            if first is not None:
                first.discard()
        for name, p in applied.named_parameters():
            seen[name] = local_part(p).clone()
            seen[f"{name} average"] = local_part(optimizer.state[p]["ema"]).clone()
        found.append(seen)
    return found


def equal(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(some, others, strict=True)
    )


LAYOUTS = {
    "adamw": Parallel(zero=3),
    "lion": Parallel(zero=2, prefetch=0),
    "sgd": Parallel(blocks_per_unit=2),
}


def compare() -> dict[str, bool]:
    results = {}
    for name, parallel in LAYOUTS.items():
        moments = {} if name == "sgd" else {"moments": "bfloat16"}
        optim = Optim.model_validate({"name": name, "ema": 0.5, **moments})
        after = train(parallel, optim, None)
        for kind in (FirstGathers, BeforeUpdate, NotDiscarded)[: 3 if name == "adamw" else 1]:
            results[f"{kind.__name__} {name}"] = equal(train(parallel, optim, kind), after)
    return results


def test_every_bit_is_that_of_gathers_after_the_update() -> None:
    for found in run_ranks(2, compare):
        assert found == {
            "FirstGathers adamw": True,
            "BeforeUpdate adamw": False,
            "NotDiscarded adamw": False,
            "FirstGathers lion": True,
            "FirstGathers sgd": True,
        }


def compare_on_gpus() -> list[bool]:
    """By NCCL and by copy engines; updates take longer than the launch of what follows."""
    optim = Optim.model_validate({"name": "adamw", "ema": 0.5})
    found = []
    for copies in (False, True):
        parallel = Parallel(copy_engines=copies)
        after, during = (
            train(parallel, optim, kind, "cuda", 4096) for kind in (None, FirstGathers)
        )
        found.append(equal(after, during))
    return found


@pytest.mark.gpu
def test_every_bit_on_gpus() -> None:
    assert run_on_gpus(2, compare_on_gpus) == [[True, True]] * 2


def gathered_first() -> list[tuple[int, int, int]]:
    """(prefetch, blocks per unit, number of parameters that are updated first)."""
    found, mesh = [], Mesh(dp_shard=-1)
    for prefetch, blocks in ((0, 1), (1, 1), (1, 2)):
        parallel = Parallel(prefetch=prefetch, blocks_per_unit=blocks)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        plan = ParallelPlan(units="*", parallel=parallel, dtype="float32")
        applied = apply_passes(model, mesh, Passes(**vars(plan)))
        model(torch.ones(1, 4))
        assert applied.units == -(-5 // blocks)
        first = FirstGathers(applied.first_gathered)
        found.append((prefetch, blocks, len(first.parameters)))
    return found


def test_units_that_the_first_forward_needs_are_gathered() -> None:
    assert run_ranks(2, gathered_first)[0] == [(0, 1, 2), (1, 1, 4), (1, 2, 8)]
