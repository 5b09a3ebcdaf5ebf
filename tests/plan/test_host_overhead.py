"""What the host issues is counted as a real step does it, and a step is no shorter than that."""

from dataclasses import replace
from pathlib import Path

import pytest

from dtron.config import RunConfig
from dtron.plan import replay
from dtron.plan.hardware import HARDWARE
from dtron.plan.host_overhead import CALLS, calls, host_seconds
from dtron.plan.memory import memory, worst
from dtron.plan.run_shape import Resolved
from dtron.plan.steptime import predict

CONFIGS = Path(__file__).parents[2] / "configs"
CUT = (
    "model.override.n_layers=27 train.seq_len=64 train.micro_batch=1 train.global_batch=4 "
    "parallel.tp=2 parallel.ep=2 parallel.zero=3 train.dtype=bfloat16 recompute.mode=full "
    "compile.enable=true"
)


def run(overrides: str, world: int, name: str = "deepseek_v3_debug") -> Resolved:
    return Resolved.of(RunConfig.load(CONFIGS / f"{name}.toml", overrides.split()), world)


def mixture(overrides: str) -> Resolved:
    words = (
        "model.name=deepseek_v3 model.size=16b train.seq_len=4096 optim.moments=bfloat16 "
        f"model.override.force_balance=true parallel.ep=2 {overrides}"
    )
    return run(words, 2, "llama3_8b")


BOUND = "parallel.tp=2 parallel.zero=3 train.micro_batch=1 train.global_batch=2 recompute.mode=full"
SHORT = "model.override.n_layers=14 train.micro_batch=4 train.global_batch=8 recompute.mode=none"


def test_calls_are_those_of_a_profiled_step() -> None:
    """This run on 4 gloo ranks, torch 2.11: 418 forwards and 210 backwards of graphs, 112 backwards
    of units, 3,116 functional operations, a collective or the wait for one."""
    found = calls(run(CUT, 4), 0)
    assert found["graph"] == pytest.approx(418 + 210, rel=0.01)
    assert found["unit"] == pytest.approx(112, rel=0.02)
    assert found["collective"] == pytest.approx(3116 / 2, rel=0.07)


@pytest.fixture
def all_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the runs below were traced: FSDP reduced what one rank has alone, too."""
    monkeypatch.setattr(Resolved, "keeps_dense", False)
    monkeypatch.setattr(Resolved, "keeps_experts", False)


def test_what_one_rank_has_alone_is_not_reduced() -> None:
    """Its gradients are an operation each: of 13 layers three stacked weights, or everything."""
    shared, alone = calls(mixture(SHORT), 0), calls(mixture(BOUND), 0)
    assert (shared["reduction"], alone["reduction"]) == (29 - 13, 0)
    kernels = mixture(f"{SHORT} {DISPATCHERS[1]}")
    assert calls(kernels, 0)["operation"] == 13 * 3
    reduced = mixture(f"{SHORT} {DISPATCHERS[1]} train.global_batch=16 parallel.reduce=micro_batch")
    assert calls(reduced, 0)["operation"] == 2 * 13 * 3
    assert calls(reduced, 0)["reduction"] == 2 * 16


@pytest.mark.usefixtures("all_reduced")
def test_calls_are_those_of_a_trace_on_two_gpus() -> None:
    """A step of the trace from which prices are, and two of the device-bound ones."""
    found = calls(mixture(BOUND), 0)
    assert found["graph"] == 212 + 210 + 212
    assert found["kernel"] == pytest.approx(9324, rel=0.02)
    assert found["collective"] == pytest.approx(1508, rel=0.05)
    exact = {"unit": 110, "reduction": 55, "counts": 104, "update": 377}
    assert {name: found[name] for name in exact} == exact
    cut, whole = (calls(mixture(f"{SHORT} {by}"), 0) for by in DISPATCHERS)
    assert (cut["graph"], cut["counts"], cut["reduction"]) == (53 + 53 + 2, 13, 29)
    assert (whole["graph"], whole["counts"], whole["operation"]) == (28 + 2, 0, 0)
    assert cut["kernel"] == pytest.approx(13 * 124 + 67, rel=0.12)
    assert whole["kernel"] == pytest.approx(13 * 164 + 67, rel=0.17)


def test_a_dispatcher_that_no_graph_holds_cuts_blocks() -> None:
    """Whatever its name."""
    names = ("all_to_all", "deepep")
    cut, library = (calls(mixture(f"{SHORT} parallel.dispatcher={name}"), 0) for name in names)
    assert (library["graph"], library["counts"]) == (cut["graph"], cut["counts"])
    assert library["counts"] > 0


DISPATCHERS = ("parallel.dispatcher=all_to_all", "parallel.dispatcher=symmetric_memory")


@pytest.mark.usefixtures("all_reduced")
def test_the_host_bounds_what_it_bounded() -> None:
    """Measured on two H200: 1.547 s, bound by the host; 0.432 and 0.417 s, bound by the device."""
    h200 = HARDWARE["h200"]
    prices = dict(h200.calls)
    assert host_seconds(mixture(BOUND), 0, prices) == pytest.approx(1.547, rel=0.02)
    for by, seconds in zip(DISPATCHERS, (0.432, 0.417), strict=True):
        planned = mixture(f"{SHORT} {by}")
        assert predict(planned, h200).parts["host"] == 0
        assert host_seconds(planned, 0, prices) < seconds


def test_what_stays_on_a_rank_is_one_graph_without_tensors_apart() -> None:
    whole = CUT.replace("parallel.tp=2 parallel.ep=2 ", "")
    found = calls(run(whole, 2), 0)
    assert found["graph"] == (27 * 3 + 2) * 2
    assert found["parameter"] == found["operation"] == found["counts"] == 0
    assert found["unit"] == (27 + 2) * 2


def test_without_graphs_kernels_are_operations() -> None:
    eager = calls(mixture(f"{SHORT} compile.enable=false"), 0)
    compiled = calls(mixture(SHORT), 0)
    assert eager["graph"] == eager["kernel"] == 0
    assert eager["operation"] == compiled["operation"] + compiled["kernel"]


def test_a_step_is_as_long_as_the_host_needs() -> None:
    planned, h200 = run("", 4, "llama3_8b"), HARDWARE["h200"]
    fast = predict(planned, replace(h200, calls=()))
    slow = predict(planned, replace(h200, calls=(("unit", 1.0),)))
    assert fast.parts["host"] == 0
    assert slow.step == host_seconds(planned, 0, {"unit": 1.0}) == 34
    assert slow.step == pytest.approx(sum(slow.parts.values()))
    assert predict(planned, h200).step == fast.step  # the device takes longer


def test_every_call_has_a_price() -> None:
    assert set(calls(run(CUT, 4), 0)) == set(CALLS) == {name for name, _ in HARDWARE["h200"].calls}


SMALL = (
    "model.name=gpt model.size=125m model.override.max_seq_len=1024 train.seq_len=1024 "
    "train.global_batch=32 train.loss_chunks=4 train.eval_sequences=0"
)
GRAPHS = [(32, 0.0685, 0.0657, 12.0, 12.2), (8, 0.1797, 0.0760, 5.2, 5.4)]
"""GPT-2 124M on an H200 (benchmarks/RESULTS.md): micro-batch, seconds and GiB without and with a
CUDA graph. The host was faster than that of the prices."""


@pytest.mark.parametrize(("micro_batch", "off", "step", "before", "after"), GRAPHS)
def test_a_cuda_graph_takes_the_hosts_time_away(
    micro_batch: int, off: float, step: float, before: float, after: float
) -> None:
    h200, words = HARDWARE["h200"], f"{SMALL} train.micro_batch={micro_batch}"
    launched = run(words, 1, "llama3_8b")
    graph = run(f"{words} compile.cuda_graphs=step", 1, "llama3_8b")
    assert {k for k, n in calls(graph, 0).items() if n} == {"graph", "update"}
    assert calls(graph, 0)["update"] == calls(launched, 0)["update"]
    times = predict(launched, h200), predict(graph, h200)
    assert times[0].parts["host"] > 0 == times[1].parts["host"]
    assert times[0].step == pytest.approx(off, rel=0.25)
    assert times[1].step == pytest.approx(step, rel=0.06)
    found = [worst(memory(each)).reserved / 2**30 for each in (launched, graph)]
    assert found[0] == pytest.approx(before, rel=0.07)
    assert found[1] == pytest.approx(after, rel=0.07)
    assert found[1] - found[0] == pytest.approx(after - before, abs=0.15)
    for key in ("eval_sequences", "sample_tokens"):
        evaluated = run(f"{words} compile.cuda_graphs=step train.{key}=8", 1, "llama3_8b")
        assert worst(memory(evaluated)).reserved / 2**30 > found[1] + 0.5


def test_offloaded_moments_need_memory_outside_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded = run(f"{SMALL} compile.cuda_graphs=step optim.offload=1", 1, "llama3_8b")
    found, size = replay.reserved(offloaded, 0), replay.bytes_of_buckets(offloaded, 0)
    monkeypatch.setattr(replay, "bytes_of_buckets", lambda *_: 0)
    assert size > 2**28
    assert found >= replay.reserved(offloaded, 0) + size
