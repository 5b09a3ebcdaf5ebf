"""What the stream of computation takes, on steps small enough to be counted by hand."""

from pathlib import Path

import pytest

from dtron.config import RunConfig
from dtron.parallelisms.offload import SMALLEST, Offload
from dtron.plan import activations, replay
from dtron.plan.allocator import Block, Held
from dtron.plan.parameters import elements, units
from dtron.plan.resolved import Resolved
from tests.parallelisms.offloaded import CPU, LAYERS, ORDERS, batch, model_of

LLAMA = Path(__file__).parents[2] / "configs/llama3_8b.toml"
GIB = 2**30


def run(overrides: str, world: int) -> Resolved:
    return Resolved.of(RunConfig.load(LLAMA, overrides.split()), world)


def taken(overrides: str, world: int, moments: int = 2, moment: int = 4) -> int:
    return replay.reserved(run(overrides, world), 0, moment, moments, 4)


def test_elements_of_a_unit_are_those_of_its_parameters() -> None:
    planned = run("parallel.tp=2", 4)
    for unit in units(planned, planned.stages[0]):
        listed = elements(planned, unit.kind)
        assert sum(gathered for gathered, _ in listed) == unit.gathered
        assert sum(shard for _, shard in listed) == unit.shard


def test_tensors_of_a_layer_are_what_it_keeps() -> None:
    for mode in ("none", "selective", "attention", "full"):
        planned = run(f"recompute.mode={mode}", 4)
        assert sum(activations.tensors(planned, 0)) == sum(activations.kept(planned, 0).values())


def test_zero_3_copies_one_unit_out_at_a_time() -> None:
    """Beside the last unit, which stays; what is fetched ahead is of the gathers' stream."""
    few, many = (taken(f"parallel.zero={zero} recompute.mode=full", 4) for zero in (3, 2))
    planned = run("parallel.zero=3", 4)
    layer = 2 * units(planned, planned.stages[0])[1].gathered
    assert many - few == pytest.approx(31 * layer, rel=0.1)


def test_moments_are_cut_from_what_the_first_step_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the second step takes more, about as much as they do; the third takes nothing."""
    planned = run("", 4)
    own = 8 * sum(u.shard for u in units(planned, planned.stages[0]))
    found = []
    for steps in (1, 3, 4):
        monkeypatch.setattr(replay, "STEPS", steps)
        found.append(taken("", 4))
    first, third, fourth = found
    assert third - first == pytest.approx(own, rel=0.25)
    assert fourth == third


def test_what_was_sent_waits_through_the_next_forward() -> None:
    """Of two micro-batches, and where the second's loss is the largest moment."""
    each = "train.micro_batch=2 parallel.zero=3"
    one, two, three = (taken(f"{each} train.global_batch={n}", 4) for n in (8, 16, 24))
    planned = run("parallel.zero=3", 4)
    sent = 4 * units(planned, planned.stages[0])[0].gathered
    assert sent <= two - one < 2 * sent  # and no holes as large
    assert three == two


def test_pipelines_hold_what_is_in_flight() -> None:
    pipelined = "parallel.pp=2 parallel.zero=1 train.micro_batch=1"
    few, many = (taken(f"{pipelined} train.global_batch={n}", 4) for n in (2, 16))
    planned = run(f"{pipelined} train.global_batch=16", 4)
    first = planned.stages[0]
    kept = sum(sum(activations.kept(planned, layer).values()) for layer in first.layers)
    assert many - few > 0.8 * kept  # one micro-batch more, and sums of gradients


MOVED, PASSING = 7, 1000


class _Counted(Held):
    """Counts what of offloaded blocks is there while one computes."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.seen = 0, list[int]()

    def take(self, nbytes: int) -> Block:
        self.there += nbytes == MOVED
        return super().take(nbytes)

    def give(self, block: Block) -> None:
        if block.nbytes == PASSING:
            self.seen.append(self.there)
        self.there -= block.nbytes == MOVED
        super().give(block)


def _replayed_blocks(order: str) -> list[int]:
    """Offloaded blocks on the device while each computes, and after each pass."""
    planned = run("recompute.mode=full recompute.offload=true", 4)
    pool = _Counted()
    steps = replay._Replay(planned, 0, 4, pool)  # type: ignore[arg-type]
    unit = replay._Unit([], [], [], [MOVED], [], PASSING, 0, False)
    steps.stages, steps.hidden = {0: [unit] * LAYERS}, 0
    found = []
    for action in order.split():
        pool.seen.clear()
        is_forward, n = action[0] == "F", int(action[1:])
        if is_forward:
            steps._forward(0, n)
        else:
            steps._backward(0, n, last=False)
        found += pool.seen[:: 2 if is_forward else 3]  # passing tensors
        found.append(pool.there)
    return found


def _real_blocks(order: str) -> list[int]:
    """The same of a model whose blocks are offloaded."""
    offload = Offload(CPU, smallest=1)
    model, calls, found, losses = model_of("full", offload), [], [], {}
    add = offload._add

    def note(call) -> None:
        calls.append(call)
        add(call)

    def count(*_: object) -> None:
        every = calls if offload._current is None else [*calls, offload._current]
        there = [any(s.memory is not None for s in c.storages.values()) for c in every]
        found.append(sum(there))

    offload._add = note  # type: ignore[method-assign]
    for block in model.blocks.values():  # in the forward, and where it is computed again
        block.get_submodule("attn_norm").register_forward_hook(count)
    for action in order.split():
        n = int(action[1:])
        if action[0] == "F":
            losses[n] = model(batch(n)).mean()
        else:
            losses.pop(n).backward()
        count()
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_offloaded_blocks_are_there_when_those_of_a_real_model_are(order: str) -> None:
    assert _replayed_blocks(order) == _real_blocks(order)


def test_what_stays_of_an_offloaded_layer() -> None:
    """Small tensors, and the input of a stage behind the first, of which the schedule holds one a
    micro-batch."""
    keys = "parallel.pp=2 parallel.zero=1 train.micro_batch=1 recompute.offload=true"
    planned = run(keys, 4)
    small = [size for size in activations.tensors(planned, 0) if size < SMALLEST]
    for stage in planned.stages:
        layers = [unit for unit in replay._listed(planned, stage, 4) if unit.widest]
        for place, (unit, layer) in enumerate(zip(layers, stage.layers, strict=True)):
            whole = activations.tensors(planned, layer)
            assert sorted(unit.kept + unit.moved) == sorted(whole)
            held = [whole[0]] if stage.index and place == 0 else []
            assert sorted(unit.kept) == sorted(small + held)
    assert small
