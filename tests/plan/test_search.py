"""The fastest layouts are legal, fit, and follow from the model of time and memory."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtron.cli import commands
from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.parallelisms.draw.timelines import simulate
from dtron.parallelisms.pipeline.schedule_ops import Kind
from dtron.parallelisms.pipeline.schedules import order_of, stage_ranks
from dtron.plan import activations
from dtron.plan.command import main as plan_command
from dtron.plan.compute_time import layer, total
from dtron.plan.hardware import hardware
from dtron.plan.html_report import ticks
from dtron.plan.memory import fits, fitting, least, memory, worst
from dtron.plan.plan import plan
from dtron.plan.report import changed_keys, number
from dtron.plan.run_shape import Resolved
from dtron.plan.search import (
    _choices,
    _least_bytes,
    _SearchQueue,
    _time,
    _TimedLayout,
    _weights,
    _with_choice,
    pareto,
    search,
)
from dtron.plan.simulate import Traffic, run_order
from dtron.plan.steptime import predict
from dtron.setup.rules import resolve

ROOT = Path(__file__).parents[2]
SMALL = ["model.override.n_layers=8", "train.seq_len=4096"]


def test_winner_is_a_legal_config_and_no_layout_that_was_seen_is_faster(tmp_path: Path) -> None:
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", SMALL)
    found = search(config, 4, hardware("h200"))
    speeds = [each.time.tokens_per_second_per_gpu for each in found.best]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == max(point.speed for point in found.seen)
    for each in found.best:
        resolve(each.run.config, 4)
        assert each.memory.reserved <= hardware("h200").memory
    (tmp_path / "best.toml").write_text(found.best[0].run.config.to_toml())
    assert RunConfig.load(tmp_path / "best.toml") == found.best[0].run.config
    # Nothing has to be split: the smallest tp that fits is 1.
    assert found.best[0].run.tp == 1


MIXTURE = "model.name=deepseek_v3 model.size=16b"
DRAWN = [
    ("", 8),
    ("recompute.offload=true", 8),
    ("optim.name=sgd", 8),
    ("optim.moments=bfloat16 train.global_batch=64", 16),
    (f"{MIXTURE} train.seq_len=4096 train.global_batch=64 optim.moments=bfloat16", 16),
    (f"{MIXTURE} train.seq_len=4096 train.global_batch=64 recompute.offload=true", 16),
]


@pytest.mark.parametrize(("overrides", "world"), DRAWN)
def test_no_layout_needs_less_than_its_least_bytes(overrides: str, world: int) -> None:
    """Or those that fit would be thrown away; of 20 legal ones that are drawn."""
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", overrides.split())
    model = Resolved.model_of(config)
    weights, choices = _weights(config, model), list(_choices(config, model, world))
    random.Random(0).shuffle(choices)
    seen = 0
    for i, drawn in enumerate(choices):
        choice = {**drawn, "zero": 3} if drawn["zero"] and i % 2 else drawn
        try:
            run = Resolved.of(_with_choice(config, choice), world)
        except ConfigError:
            continue
        least = _least_bytes(config, model, choice, weights, world)
        assert least <= worst(memory(run)).reserved, choice
        seen += 1
        if seen == 20:
            break
    assert seen == 20


@pytest.mark.parametrize(("overrides", "world"), DRAWN)
def test_no_rank_takes_less_than_its_bound(overrides: str, world: int) -> None:
    """Computed without the allocator's holes, of ten layouts that are drawn."""
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", overrides.split())
    large = hardware("h200", memory=1e15, host_memory=1e18)
    space = _SearchQueue(config, Resolved.model_of(config), world, large, 1)
    choices = list(_choices(config, space.model, world))
    random.Random(1).shuffle(choices)
    for choice in choices[:10]:
        space.push(choice)
    seen = 0
    for entry in list(space.queue):
        timed = _time(config, entry.choice, world, large)
        if isinstance(timed, _TimedLayout):
            run = Resolved.of(_with_choice(config, entry.choice), world)
            reserved = [rank.reserved for rank in memory(run)]
            for bound, taken in zip(timed.least, reserved, strict=True):
                assert 0.5 * taken < bound <= taken, entry.choice
            seen += 1
    assert seen >= 5


def test_an_encoder_split_over_tp_stays_so() -> None:
    keys = "model.name=llava train.seq_len=4096 parallel.tp=2 parallel.encoder_tp=2"
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", keys.split())
    choices = list(_choices(config, Resolved.model_of(config), 8))
    by_tp = {c["tp"]: c for c in choices if c["pp"] == 1 and not c["overlap"]}
    assert {1, 2, 4} <= by_tp.keys()
    for tp, choice in by_tp.items():
        assert Resolved.of(_with_choice(config, choice), 8).config.parallel.encoder_tp == tp


@pytest.mark.parametrize(
    ("dispatcher", "compiled"), [("all_to_all", False), ("bounded_all_to_all", True)]
)
def test_selective_recomputation_is_compiled_where_the_dispatcher_can_be(
    dispatcher: str, compiled: bool
) -> None:
    words = [f"parallel.dispatcher={dispatcher}", "model.size=16b", "compile.enable=true"]
    config = RunConfig.load(ROOT / "configs/deepseek_v3_debug.toml", words)
    choices = _choices(config, Resolved.model_of(config), 8)
    choice = next(c for c in choices if c["ep"] > 1 and c["mode"] == "selective")
    found = _with_choice(config, choice)
    assert found.compile.enable == compiled
    Resolved.of(found, 8)  # legal


def test_memory_is_replayed_of_the_fastest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a search of many ranks takes minutes; what is printed is what a plan of it says."""
    replayed: list[Resolved] = []

    def counted(run: Resolved, *rest: Any) -> Any:
        replayed.append(run)
        return fitting(run, *rest)

    monkeypatch.setattr("dtron.plan.search.fitting", counted)
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", ["train.global_batch=32"])
    found = search(config, 8, hardware("h100"), processes=1)
    assert found.counts["predicted"] > len(found.best) == 10
    assert sum(found.counts.values()) == 2 * found.counts["enumerated"]
    assert 10 <= len(replayed) <= 20
    assert found.best[0].memory == worst(memory(found.best[0].run))
    slowest = found.best[-1].time.tokens_per_second_per_gpu
    assert all(point.speed <= 1.01 * slowest for point in found.seen[10:])


def test_nothing_found_depends_on_the_number_of_processes() -> None:
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", ["train.global_batch=32"])
    one, three = (search(config, 8, hardware("h100"), processes=n) for n in (1, 3))
    assert one.counts == three.counts
    assert one.seen == three.seen
    for a, b in zip(one.best, three.best, strict=True):
        assert (a.run.config, a.memory, a.time) == (b.run.config, b.memory, b.time)


def test_a_rank_that_does_not_fit_ends_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fullest rank comes first, and no other is looked at."""
    words = ["parallel.pp=4", "parallel.zero=1", "train.micro_batch=1"]
    run = Resolved.of(RunConfig.load(ROOT / "configs/llama3_8b.toml", words), 4)
    ranks, bounds = memory(run), least(run, hardware("h200"))
    full = worst(ranks)
    assert fitting(run, hardware("h200"), bounds) == ranks
    tight = hardware("h200", memory=full.reserved - 1, outside=0.0)
    taken: list[int] = []
    monkeypatch.setattr(
        "dtron.plan.memory.replay.reserved", lambda run, rank, *_: taken.append(rank) or 10**12
    )
    assert fitting(run, tight, bounds) is None
    assert taken == [full.rank]
    assert least(run, hardware("h200", memory=min(bounds) - 1, outside=0.0)) == ()


def test_a_rank_of_empty_stages_alone_is_predicted() -> None:
    """The embedding and no layer is a legal stage; nothing is divided by its time."""
    overrides = "parallel.pp=4 parallel.pp_layout=E|t*11|t*11|t*10L train.micro_batch=1"
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", overrides.split())
    run = Resolved.of(config, 4)
    assert [len(stage.layers) for stage in run.stages] == [0, 11, 11, 10]
    found = predict(run, hardware("h200"))
    assert found.step > found.parts["compute"] > 0


def test_nothing_fits_is_told() -> None:
    config = RunConfig.load(ROOT / "configs/llama3_405b.toml", ["train.global_batch=8"])
    with pytest.raises(ConfigError, match="no legal layout of 8 GPUs"):
        search(config, 8, hardware("h100"))


@pytest.mark.parametrize(
    ("schedule", "p", "m", "bubble"), [("1F1B", 8, 32, 0.2188), ("GPipe", 4, 8, 0.375)]
)
def test_bubbles_are_those_of_the_timeline(schedule: str, p: int, m: int, bubble: float) -> None:
    """(p - 1) / m of the computation, with a forward of 1 and a backward of 2."""
    order, ranks = order_of(schedule, p, 1, m), stage_ranks("loop", p, 1)
    costs = {
        (s, k): float(k is Kind.BACKWARD) + 1
        for s in range(p)
        for k in (Kind.FORWARD, Kind.BACKWARD)
    }
    length, _ = run_order(order, p, costs)
    assert length == simulate(order, ranks).length
    assert length / (3 * m) - 1 == pytest.approx(bubble, abs=1e-4)


def test_schedules_bubbles_of_the_literature() -> None:
    """p = 8, m = 32: share of the total, by schedule and stages a rank."""
    table = {
        ("Interleaved1F1B", 2): 0.0986,
        ("Interleaved1F1B", 4): 0.0519,
        ("ZBVZeroBubble", 2): 0.0352,
    }
    for (name, v), share in table.items():
        order = order_of(name, 8, v, 32)
        weights = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
        costs = {(s, k): w / v for s in range(8 * v) for k, w in weights.items()}
        length, _ = run_order(order, 8 * v, costs)
        assert 1 - 3 * 32 / length == pytest.approx(share, abs=1e-4)


def test_transfers_share_their_links_fairly() -> None:
    """By hand: a (4 s) alone for 2 s, then half of the link beside b (1 s), which ends at 4; a, of
    which 1 s is left, has the link to itself and ends at 5. c, on no link of theirs, takes its
    2 s."""
    traffic, out, into = Traffic(), ("out", 0), ("in", 1)
    traffic.start("a", 4.0, (out, into))
    traffic.start("c", 2.0, (("out", 2), ("in", 3)))
    assert traffic.next_end() == 2.0
    assert traffic.advance(2.0) == ["c"]
    traffic.start("b", 1.0, (out, ("in", 4)))
    assert traffic.next_end() == 4.0
    assert traffic.advance(4.0) == ["b"]
    assert traffic.next_end() == 5.0
    assert traffic.advance(5.0) == ["a"]
    assert traffic.next_end() == float("inf")


def test_a_full_link_slows_all_that_cross_it() -> None:
    """Three into one rank, each from another: a third of its link each."""
    traffic = Traffic()
    for rank in range(3):
        traffic.start(rank, 1.0, (("out", rank), ("in", 3)))
    traffic.start("alone", 3.0, (("out", 3), ("in", 0)))
    assert traffic.next_end() == pytest.approx(3.0)
    assert set(traffic.advance(traffic.next_end())) == {0, 1, 2, "alone"}


def test_sends_of_a_pipeline_share_a_ranks_link() -> None:
    """By hand: two ranks, two micro-batches, forwards 1 s, backwards 2 s, a send 2 s if alone. Rank
    0 sends from 1 s and from 2 s on: the first is half done when they begin to share, so it comes
    at 4, and the second, then half done, at 5. Rank 1 ends its forwards at 5 and 6, backwards at 8
    and 10, whose sends do not meet: they come at 10 and 12, and rank 0 ends at 14. With links of
    their own the sends come at 3 and 4, and the step takes 13 s."""
    costs = {
        (s, k): float(k is Kind.BACKWARD) + 1
        for s in range(2)
        for k in (Kind.FORWARD, Kind.BACKWARD)
    }
    length, spans = run_order(order_of("GPipe", 2, 1, 2), 2, costs, hop=2.0)
    assert [span.start for span in spans[1]] == [4, 5, 6, 8]
    assert length == 14


STEPS = [
    ("", 4, 1.515),
    ("parallel.zero=3", 4, 1.541),
    ("parallel.tp=2 parallel.zero=2", 4, 1.705),
    ("parallel.pp=2 parallel.zero=1 train.micro_batch=1 train.global_batch=16", 4, 3.320),
    ("model.override.n_layers=8 train.global_batch=2", 1, 16384 / 36149),
    (
        "float8.recipe=tensorwise float8.all_gather=true parallel.reduce_by=all_to_all "
        "optim.moments=bfloat16 train.global_batch=4",
        2,
        1.049,
    ),
]


@pytest.mark.parametrize(("overrides", "world", "seconds"), STEPS)
def test_steps_that_were_measured(overrides: str, world: int, seconds: float) -> None:
    """benchmarks/RESULTS.md, within 10%."""
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", overrides.split())
    found = predict(Resolved.of(config, world), hardware("h200"))
    assert found.step == pytest.approx(seconds, rel=0.1)
    assert found.step == pytest.approx(sum(found.parts.values()), rel=0.02)


@pytest.mark.parametrize(
    ("overrides", "row", "messages"),
    [
        ("train.dtype=float32", "h100", "train.dtype = 'float32' has no rates"),
        ("float8.recipe=mxfp8", "h100", "'mxfp8' is emulated"),
        ("float8.recipe=tensorwise", "a100", "emulated on a100"),
    ],
)
def test_what_has_no_rates_has_no_time(overrides: str, row: str, messages: str) -> None:
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", [*SMALL, *overrides.split()])
    found = plan(config, 4, hardware(row))
    assert found["time"] is found["cost"] is None
    assert messages in found["no_time"]
    with pytest.raises(ConfigError, match=messages):
        search(config, 4, hardware(row))


def test_offload_waits_for_what_the_host_link_does_not_carry_in_time() -> None:
    """By hand: of 7 of 8 layers, all that each keeps there and back, less its computation."""
    words = [*SMALL, "recompute.mode=none", "recompute.offload=true"]
    run = Resolved.of(RunConfig.load(ROOT / "configs/llama3_8b.toml", words), 4)
    slow, fast = (hardware("h200", host_link=rate) for rate in (1e9, 1e15))
    layer_seconds, kept = total(layer(run, 0, slow)), sum(activations.kept(run, 0).values())
    computed = layer_seconds.forward + layer_seconds.inputs + layer_seconds.weights
    waited = predict(run, slow).parts["offload"]
    assert waited == pytest.approx(7 * run.micro_batches * (2 * kept / 1e9 - computed))
    assert predict(run, fast).parts["offload"] == 0
    assert predict(run, slow).step > predict(run, fast).step + 0.9 * waited


def test_offload_is_looked_at_where_nothing_else_fits() -> None:
    """And a host has to hold what its GPUs send."""
    words = [*SMALL, "train.seq_len=131072", "train.global_batch=8", "train.loss_chunks=16"]
    words += ["optim.moments=bfloat16", "parallel.cp_method=ulysses"]
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", words)
    small = hardware("h200", memory=42e9)
    found = search(config, 8, small)
    assert any(each.run.config.recompute.offload for each in found.best)
    choices = [(each.run.parallel(), each.run.config.recompute.mode) for each in found.best]
    assert all(choices.count(choice) == 1 for choice in choices), "twins"
    for each in found.best:
        assert fits(each.run, memory(each.run), small)
    poor = replace(small, host_memory=1e9)
    assert not any(each.run.config.recompute.offload for each in search(config, 8, poor).best)


def test_weights_are_gathered_for_each_micro_batch_where_nothing_else_fits() -> None:
    words = ["train.seq_len=16384", "train.global_batch=64", "train.loss_chunks=16"]
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", [*SMALL, *words])
    large, small = (search(config, 4, hardware("h200", memory=m), most=2) for m in (140e9, 26e9))
    for found, zero in ((large, 1), (small, 3)):
        first, second = found.best
        assert first.run.micro_batches > 1
        assert first.run.parallel()["zero"] == zero
        assert ("zero 3" in first.label) == (zero == 3)
        assert first.label != second.label


def test_etp_is_looked_at_with_experts_and_float8_where_one_asks(tmp_path: Path) -> None:
    words = [*MIXTURE.split(), "train.seq_len=4096", "train.global_batch=64"]
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", words)
    model = Resolved.model_of(config)
    choices = list(_choices(config, model, 16, float8=True))
    assert {choice["etp"] for choice in choices} == {1, 2, 4, 8}
    assert {choice["recipe"] for choice in choices} == {"", "tensorwise"}
    assert {choice["recipe"] for choice in _choices(config, model, 16)} == {""}
    dense = RunConfig.load(ROOT / "configs/llama3_8b.toml", SMALL)
    assert {c["etp"] for c in _choices(dense, Resolved.model_of(dense), 16)} == {1}
    best = search(dense, 4, hardware("h200"), float8=True).best[0]
    assert best.run.config.float8.recipe == "tensorwise"
    assert search(dense, 4, hardware("h200")).best[0].run.config.float8.recipe == ""
    with pytest.raises(ConfigError, match="a100 has no float8"):
        search(dense, 4, hardware("a100"), float8=True)


def test_pareto_front() -> None:
    points = ((1.0, 5.0), (2.0, 4.0), (2.0, 6.0), (3.0, 6.0), (0.5, 1.0))
    assert pareto(points) == [(0.5, 1.0), (1.0, 5.0), (2.0, 6.0)]


def test_page_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs/llama3_70b.toml")
    page = tmp_path / "plan.html"
    assert commands(["plan", "--config", config, "--world-size", "64", "--page", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "fits" in shown
    assert "all_gather" in shown
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_page_of_a_search_names_its_layouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the terminal has whole figures, however narrow it is."""
    monkeypatch.setattr("dtron.plan.search.TELL_EVERY", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    page, config = tmp_path / "plan.html", str(ROOT / "configs/llama3_8b.toml")
    words = [*SMALL, "--world-size", "4", "--search", "--page", str(page)]
    assert commands(["plan", "--config", config, *words]) == 0
    shown, text = capsys.readouterr(), page.read_text()
    assert "of the best 10 found; " in shown.err
    assert "…" not in shown.out
    assert " differ from the given file:" in shown.out
    assert re.search(r"\n +4  parallel\.tp=2 train\.micro_batch=4\n", shown.out)
    listed = re.findall(r"<li>(.*?)</li>", text)
    assert len(listed) == 10
    assert all(f"<title>{each}</title>" in text for each in listed)
    assert re.fullmatch(r"micro-batch \d, recompute none: [\d.]+ GiB, [\d,]+ tok/s/GPU", listed[0])


def test_winners_leave_headroom() -> None:
    """Predictions are off by some per cent: a layout that just fits is no winner."""
    config = RunConfig.load(ROOT / "configs/llama3_8b.toml", SMALL)
    best = search(config, 4, hardware("h200"), most=1).best[0]
    tight = hardware("h200", memory=best.memory.reserved * 1.02, outside=0.0)
    (kept,) = search(config, 4, tight, most=1, headroom=0.0).best
    assert kept.run.config == best.run.config
    (found,) = search(config, 4, tight, most=1).best
    assert found.memory.reserved <= 0.95 * tight.room
    with pytest.raises(ConfigError, match="of which --headroom leaves 90% free"):
        search(config, 4, tight, headroom=0.9)


def test_no_headroom_needs_a_search_too() -> None:
    with pytest.raises(ConfigError, match=r"--headroom has no effect without --search"):
        plan_command(["--config", str(ROOT / "configs/llama3_8b.toml"), "--headroom", "0"])


@pytest.mark.parametrize("value", ["1", "-0.1", "nan"])
def test_headroom_is_a_share(value: str) -> None:
    words = ["--config", str(ROOT / "configs/llama3_8b.toml"), "--search", "--headroom", value]
    with pytest.raises(ConfigError, match="is not a fraction; use 0 to less than 1"):
        plan_command(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--search", "--out", "."], "--out . is a folder; name a file in it"),
        (["--page", "."], "--page . is a folder; name a file in it"),
        (["--tokens", "nan"], "--tokens nan is negative or not finite; use a number"),
        (["--tokens", "-5"], "--tokens -5 is negative or not finite; use a number"),
        (["--tokens", "inf"], "--tokens inf is negative or not finite; use a number"),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_command(["--config", str(ROOT / "configs/llama3_8b.toml"), *words])
    assert message in str(error.value)


@pytest.mark.parametrize("words", [["--page"], ["--search", "--out"]])
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    config = str(ROOT / "configs/llama3_8b.toml")
    layout = ["--world-size", "4", *SMALL] if words == ["--page"] else ["--world-size", "1", *SMALL]
    with pytest.raises(ConfigError) as error:
        plan_command(["--config", config, *layout, *words, "/dev/full"])
    assert str(error.value) == (
        f"{words[-1]} /dev/full cannot be written: [Errno 28] No space left on device; name "
        "another file"
    )


def test_keys_of_a_layout_make_it_of_the_given_file() -> None:
    file = RunConfig.load(
        ROOT / "configs/llama3_8b.toml", [*SMALL, "parallel.high_priority=['dp_shard']"]
    )
    for found in search(file, 4, hardware("h200"), most=3).best:
        words = shlex.split(changed_keys(file, found.run.config))
        overrides = [*SMALL, "parallel.high_priority=['dp_shard']", *words]
        assert RunConfig.load(ROOT / "configs/llama3_8b.toml", overrides) == found.run.config


def test_a_page_names_an_overridden_model_its_time_and_its_cost(tmp_path: Path) -> None:
    """And what it draws lies inside of its pictures."""
    out, config = tmp_path / "plan.html", str(ROOT / "configs/llama3_8b.toml")
    words = ["--config", config, "--world-size", "4", "--page", str(out), "--tokens", "15e12"]
    keys = ["parallel.pp=2", "parallel.schedule=1F1B", "train.micro_batch=1", "parallel.zero=1"]
    plan_command([*words, *SMALL, *keys])
    text = out.read_text()
    assert "<h1>llama of 2.80 B parameters on 4 x h100</h1>" in text
    assert "15 T tokens: " in text
    for part in ("compute", "bubble", "update"):
        assert re.search(rf"<tr><td>{part}</td><td>[\d.]+</td><td>[\d.]+%</td></tr>", text)
    assert text.count("Bubble of the step") == text.count("Bubble") == 1
    memory = text.split("<svg")[1]
    written = re.findall(r'<text x="([\d.]+)"[^>]*>([^<]*)</text>', memory)
    assert {"parameters", "buffers"} <= {words for _, words in written}
    assert all(float(x) + 6 * len(words) < 1100 for x, words in written)
    assert memory.count('text-anchor="middle"') >= 4


@pytest.mark.parametrize("most", [0.0101, 0.99, 1.0, 76.8, 34885.0, 5e6])
def test_ticks_are_round_and_some(most: float) -> None:
    found = ticks(most)
    assert 4 <= len(found) <= 11
    assert found[0] == 0
    assert found[-1] <= most < found[-1] + found[1] * 1.001
    assert float(f"{found[1]:e}"[:8]) in (1, 2, 5)


def test_large_numbers_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert [number(x) for x in (0.01234, 12.345, 999.94, 12345.6)] == [
        "0.01234", "12.35", "999.9", "12,346",
    ]  # fmt: skip
    arguments = ["plan", "--config", str(ROOT / "configs/llama3_70b.toml"), "--world-size", "64"]
    commands([*arguments, "--tokens", "15e12"])
    shown = capsys.readouterr().out
    assert "15 T tokens" in shown
    assert "e+" not in shown
    commands([*arguments, "train.steps=1"])
    assert " 1 step, " in capsys.readouterr().out


@pytest.mark.parametrize("how", [["--json"], []])
def test_a_reader_that_goes_ends_it_quietly(how: list[str]) -> None:
    """The pipe is closed before anything is written."""
    command = [sys.executable, "-m", "dtron", "plan", "--config", "configs/llama3_70b.toml"]
    process = subprocess.Popen(
        [*command, "--world-size", "64", *how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    messages = process.stderr.read()
    assert process.wait() == 141
    assert "Error" not in messages
    assert "Traceback" not in messages


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")
def test_processes_end_with_the_one_that_started_them() -> None:
    """Also where it was killed: they would wait for work for good."""
    script = "import os, time\nfrom dtron.plan import workers as found\n"
    script += "with found.pool(2) as workers:\n"
    script += "    [workers.submit(os.getpid).result() for _ in range(4)]\n"
    script += "    print(*workers._processes, flush=True)\n    time.sleep(100)\n"
    command = [sys.executable, "-c", script]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        workers = [int(word) for word in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while (left := [worker for worker in workers if _runs(worker)]) and time.monotonic() < until:
        time.sleep(0.05)
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert workers
    assert not left


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
