"""Two micro-batches at once: what is issued in which order, and results that stay the same.

tests/parallelisms/test_parity.py compares layouts with one process, test_planted_bugs.py plants
mistakes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dtron.config import Compile, Float8, Parallel, Recompute
from dtron.errors import ConfigError
from dtron.parallelisms.apply import ParallelPlan, Passes, apply_passes
from dtron.parallelisms.expert import all_to_all
from dtron.parallelisms.expert.all_to_all import AllToAll
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.pipeline import block_overlap, weight_gradients
from dtron.parallelisms.pipeline.block_overlap import BlockOverlap, Tape
from dtron.parallelisms.pipeline.lowering import add_communication
from dtron.parallelisms.pipeline.schedule_ops import Action, Kind, execute, together
from dtron.parallelisms.pipeline.schedules import order_of, stage_ranks
from tests.gpu_ranks import run_on_gpus
from tests.harness import run_ranks
from tests.parallelisms.parity import Case, parallel_run, shallow

TOGETHER = Parallel(ep=2, zero=1, overlap_micro_batches=True)
PLAIN = shallow(Case("mixtral", 2, TOGETHER, steps=1))
DUAL = Parallel(pp=2, ep=2, zero=1, schedule="DualPipeV", overlap_micro_batches=True)
PIPELINE = Case("mixtral", 4, DUAL, steps=1, override={"n_layers": 10})


def recorded(case: Case) -> str:
    """What a rank issues in a step: F, the forward of a block; B, a part of a backward; digits: the
    first and the second process group, at each dispatch."""
    events: list[str] = []
    cut, run_part, begin = Tape.cut, Tape.run_part, AllToAll.begin

    def cut_and_tell(self: Tape, x: torch.Tensor) -> torch.Tensor:
        events.append("F")
        return cut(self, x)

    def run_and_tell(self: Tape) -> None:
        events.append("B")
        run_part(self)

    groups: list[str] = []

    def begin_and_tell(self: AllToAll, *args: Any) -> Any:
        name = self.group.group_name
        groups.extend([name] if name not in groups else [])
        events.append(str(groups.index(name)))
        return begin(self, *args)

    Tape.cut, Tape.run_part = cut_and_tell, run_and_tell  # type: ignore[method-assign]
    AllToAll.begin = begin_and_tell  # type: ignore[method-assign]
    parallel_run(case)
    return "".join(events)


def test_blocks_of_two_micro_batches_alternate() -> None:
    """Three micro-batches of three blocks; the embedding is the fourth part of a backward."""
    first, together, last = "F0F0F0", "BF1BF1BF1B", "BBBB"
    expected = first + together + together.replace("1", "0") + last
    assert run_ranks(2, recorded, PLAIN) == [expected] * 2


def test_recomputation_uses_the_group_of_its_micro_batch() -> None:
    """A part of the backward dispatches again, in the other lane than the forward."""
    case = replace(PLAIN, recompute=Recompute(mode="full"), sequences=4)
    expected = "F0F0F0" + "B0F1B0F1B0F1B" + "B1B1B1B"
    assert run_ranks(2, recorded, case) == [expected] * 2


def test_pairs_of_a_pipeline_alternate() -> None:
    for events in run_ranks(4, recorded, PIPELINE):
        assert "BF1BF" in events or "BF0BF" in events
        assert events.count("F") == events.count("0") + events.count("1")


def exchanged_and_computed(case: Case) -> str:
    """What a rank issues in a step: S, an all-to-all of tokens or their gradients; W, the weight
    gradient of a matrix of experts."""
    events: list[str] = []
    issue, add = all_to_all._issue_rows, weight_gradients._add_weight_gradient

    def issue_and_tell(*args: Any) -> torch.Tensor:
        events.append("S")
        return issue(*args)

    def add_and_tell(*args: Any) -> None:
        events.append("W")
        add(*args)

    all_to_all._issue_rows = issue_and_tell  # type: ignore[assignment]
    weight_gradients._add_weight_gradient = add_and_tell  # type: ignore[assignment]
    parallel_run(case)
    return "".join(events)


def test_weight_gradients_of_experts_follow_the_gradients_of_tokens() -> None:
    """In each of three blocks gradients arrive and leave, then three matrices get theirs."""
    for events in run_ranks(2, exchanged_and_computed, PLAIN):
        assert events.endswith("SSWWW" * 3)  # the last backward runs alone
        assert events.count("W") == 3 * 3 * 3


class FakeStream:
    """A CUDA stream that only records which of them was current."""

    current: list["FakeStream"] = []  # noqa: RUF012

    def __init__(self, *_: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    @contextmanager
    def use(self) -> Iterator[None]:
        self.current.append(self)
        yield
        self.current.pop()


def test_weight_gradients_do_not_queue_behind_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's stream of additions waits for the whole block before their matmuls are issued."""
    lane = FakeStream()
    monkeypatch.setattr(FakeStream, "current", [lane])
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", FakeStream.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: FakeStream.current[-1])
    used: dict[str, FakeStream] = {}

    def accumulate_on(_: Any, stream: FakeStream) -> list[Any]:
        used["additions"] = stream
        return []

    class Queue:
        collected = 1

        def run_collected(self) -> None:
            used["matmuls"] = FakeStream.current[-1]

    monkeypatch.setattr(block_overlap, "accumulate_on", accumulate_on)
    arguments: Any = ([torch.nn.Identity()], [], Mock(), [Mock(), Mock()], torch.device("cuda"))
    overlap = BlockOverlap(*arguments, deferred=Queue())  # type: ignore[arg-type]
    overlap.begin_step()
    overlap._add_weight_gradients()
    streams = {*used.values(), *(each.stream for each in overlap.lanes)}
    assert len(streams) == 4


def both(case: Case) -> list[bool]:
    """Whether a rank's losses, norms, gradients and parameters are the same, bit by bit, with and
    without overlap."""
    off = replace(case, parallel=case.parallel.model_copy(update={"overlap_micro_batches": False}))
    on, plain = parallel_run(case), parallel_run(off)
    equal = [on["losses"] == plain["losses"], on["norms"] == plain["norms"]]
    for kind in ("gradients", "parameters"):
        assert on[kind].keys() == plain[kind].keys()
        equal += [torch.equal(on[kind][name], plain[kind][name]) for name in on[kind]]
    return equal


@pytest.mark.parametrize("case", [PLAIN, PIPELINE], ids=["alone", "pipeline"])
def test_results_are_the_same_bit_by_bit(case: Case) -> None:
    assert all(map(all, run_ranks(case.world, both, replace(case, steps=2))))


INNER = {"hierarchical": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["all_to_all", "bounded_all_to_all", "symmetric_memory", *INNER])
def test_results_are_the_same_on_gpus(name: Any, compiled: bool) -> None:
    """From the second step on, whose micro-batches run in two streams."""
    parallel = TOGETHER.model_copy(update={"dispatcher": name, "ep_inner": INNER.get(name, 0)})
    options = Compile(enable=compiled)
    case = replace(PLAIN, parallel=parallel, compile=options, steps=4, sequences=12)
    assert all(map(all, run_on_gpus(2, both, case)))


@pytest.mark.gpu
def test_pairs_are_the_same_on_gpus() -> None:
    assert all(map(all, run_on_gpus(4, both, replace(PIPELINE, steps=4, sequences=24))))


# -- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 13), (8, 16)])
def test_pairs_are_of_independent_micro_batches(p: int, m: int) -> None:
    """Every stage's pairs start when both inputs are there, and end before results are sent."""
    order = order_of("DualPipeV", p, 2, m, overlap=True)
    assert order == order_of("DualPipeV", p, 2, m)  # the same actions
    pairs = [group for row in order for group in together(row) if len(group) > 1]
    assert pairs
    for forward, backward in pairs:
        assert (forward.kind, backward.kind in (Kind.BACKWARD, Kind.INPUT)) == (Kind.FORWARD, True)
        assert (forward.stage, forward.micro_batch) != (backward.stage, backward.micro_batch)
    ranks = stage_ranks("v", p, 2)
    spans = {(s.rank, s.action): s for s in execute(order, len(ranks))}
    for rank, row in enumerate(order):
        for group in together(row):
            assert len({(spans[rank, a].start, spans[rank, a].end) for a in group}) == 1
    for row in add_communication(order, ranks):
        assert not [a for a in row if a.overlapped and not _followed(row, a)]


def _followed(row: Sequence[Action], action: Action) -> bool:
    """Whether the next action is a backward, with no transfer in between."""
    return row[row.index(action) + 1].kind in (Kind.BACKWARD, Kind.INPUT)


# -- what is refused ------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"recompute": Recompute(offload=True)}, "in the order of one backward"),
    ({"compile": Compile(enable=True, cuda_graphs="step")}, "recorded on one stream"),
    ({"float8": Float8(recipe="tensorwise", scaling="delayed")}, "the same largest values"),
    ({"zero": 3}, "no parameters can be freed and no gradients reduced; use parallel.zero = 1"),
    ({"zero": 2}, "no parameters can be freed and no gradients reduced; use parallel.zero = 1"),
    ({"ep": 1}, "has no effect without parallel.ep > 1"),
    ({"pp": 2, "schedule": "1F1B"}, 'use "DualPipeV", or false'),
    ({"dispatcher": "deepep"}, "DeepEP has one buffer, for one micro-batch"),
    ({"tp": 2, "async_tp": True}, "its matmuls share one buffer"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=["-".join(k) for k, _ in REFUSED])
def test_what_does_not_overlap_is_refused(keys: dict[str, Any], message: str) -> None:
    settings = {key: value for key, value in keys.items() if key in Parallel.model_fields}
    parallel = Parallel(**{**TOGETHER.model_dump(exclude_defaults=True), **settings})
    others = {key: value for key, value in keys.items() if key not in settings}
    with pytest.raises(ConfigError, match=message):
        Case("mixtral", 4, parallel, **others).resolved()


def test_one_micro_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect without several micro-batches"):
        Case("mixtral", 2, TOGETHER, sequences=2).resolved()


def no_experts() -> str:
    """The error of a model without a dispatcher, in a training loop of the user."""
    plan = ParallelPlan(units="*", parallel=Parallel(overlap_micro_batches=True))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    try:
        apply_passes(model, Mesh(), Passes(**vars(plan), keep_rng=True))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_model_without_dispatcher_is_refused() -> None:
    (message,) = run_ranks(1, no_experts)
    assert "needs ep x etp > 1" in message
