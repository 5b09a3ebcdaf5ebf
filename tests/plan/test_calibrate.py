"""A measured machine becomes a row that the planner reads, and says what it did not measure."""

import json
import math
import os
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtron.bench import measure
from dtron.cli import commands
from dtron.errors import ConfigError, TrainingError
from dtron.float8 import RECIPES
from dtron.float8.products import why_emulated
from dtron.plan.calibrate import as_text, measure_machine, row_of
from dtron.plan.hardware import HARDWARE, Hardware, hardware
from dtron.plan.measure_hardware import (
    KINDS,
    MATMULS,
    Calibration,
    fit,
    fitted_ceiling,
    fitted_depth,
    link_fields,
    rate_of,
)
from dtron.plan.overlap import SENT, WORK, overlap_fields
from dtron.run.process import Place
from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]
H200 = HARDWARE["h200"]


def _measured(inside: int) -> Calibration:
    measure._BUDGET_SECONDS = 0.01
    os.environ["LOCAL_WORLD_SIZE"] = str(inside)
    rank = torch.distributed.get_rank()
    return measure_machine(H200, Place(rank, rank % inside, torch.distributed.get_world_size()))


def test_two_hosts_of_two_ranks_are_measured() -> None:
    """Every collective inside of hosts and across them."""
    made = run_ranks(4, _measured, 2)[0]
    row, kept = row_of(made, H200, "here", "now")
    assert {(r["kind"], r["ranks"]) for r in made.collectives} == {
        (kind, ranks) for kind in KINDS for ranks in (2, 4)
    }
    for name in ("ceiling", "copy", "launch", "host_link", "nvlink", "network"):
        assert 0 < getattr(row, name) != getattr(H200, name), name
    assert {kind for kind, _ in row.kinds} == set(KINDS)
    assert sorted(kept) == ["calls", "domain", "host", "outside", "peak", "wide", "widest"]
    assert row.calls == H200.calls
    assert row.overlap != H200.overlap
    assert {key[:2] for key in row.overlap} == {key[:2] for key in H200.overlap}
    # Of float8 there is nothing on a CPU, and that is known too.
    assert row.ceiling_float8 == 0
    assert {each["kernel"] for each in made.attention} == {"math"}
    # Every kind of work beside every collective of FSDP's, inside of a host.
    assert [(r["work"], r["shape"], r["collective"]) for r in made.overlap] == [
        (*work, kind) for work in WORK["cpu"] for kind, _ in SENT
    ]
    for each in made.overlap:
        assert each["ranks"] == 2
        for time_of in ("alone", "overlapped", "collective_alone", "collective_overlapped"):
            assert 0 < each[time_of] < 1, each


def test_what_work_and_collectives_leave_each_other_is_a_mean_of_shapes() -> None:
    def row(work: str, overlapped: float, sent: float) -> dict[str, Any]:
        what = {"work": work, "collective": "all_gather", "alone": 1.0, "collective_alone": 3.0}
        return what | {"overlapped": overlapped, "collective_overlapped": sent}

    rows = [
        row("grouped_matmul", 2.0, 3.0),
        row("grouped_matmul_gradient", 1.25, 6.0),
        row("copy", 0.8, 4.0),
    ]
    found = overlap_fields(rows)["overlap"]
    assert found == (
        (
            "grouped_matmul",
            "all_gather",
            pytest.approx((0.5 + 0.8) / 2),
            pytest.approx((1 + 0.5) / 2),
        ),
        ("copy", "all_gather", 1.0, 0.75),  # work is not faster beside a collective
    )
    assert overlap_fields([]) == {}  # one rank: the base's


def _collectives(row: Hardware, ranks: int, inside: int) -> list[dict[str, Any]]:
    """What a machine that is as the row says would measure."""
    return [
        {
            "kind": kind,
            "ranks": ranks,
            "inside": inside,
            "bytes": size,
            "seconds": row.collective(kind, size, ranks, inside),
        }
        for kind in KINDS
        for size in (2**16, 2**22, 2**28)
    ]


def test_links_are_read_off_their_collectives() -> None:
    truth = replace(
        H200,
        latency=(4e-6, 21e-6),
        nvlink=333e9,
        network=11e9,
        kinds=(("all_gather", 1.0), ("all_reduce", 1.4), ("send", 0.5)),
    )
    rows = _collectives(truth, 4, 4) + _collectives(truth, 16, 4)
    found = link_fields(rows, H200)
    assert found["latency"] == pytest.approx(truth.latency, rel=1e-3)
    assert found["nvlink"] == pytest.approx(truth.nvlink, rel=1e-3)
    assert found["network"] == pytest.approx(truth.network, rel=1e-3)
    assert dict(found["kinds"])["all_reduce"] == pytest.approx(1.4, rel=1e-3)
    assert dict(found["kinds"])["send"] == pytest.approx(0.5, rel=1e-3)
    measured = replace(H200, **found)
    for row in rows:
        shape = (row["kind"], row["bytes"], row["ranks"], row["inside"])
        assert measured.collective(*shape) == pytest.approx(row["seconds"], rel=1e-3)


def test_links_of_one_host_alone_keep_the_network_of_the_base() -> None:
    made = Calibration(collectives=_collectives(replace(H200, latency=(2e-6, 1.0)), 4, 4))
    row, kept = row_of(made, H200, "x", "y")
    assert row.latency == (pytest.approx(2e-6, rel=1e-3), H200.latency[1])
    assert {"network", "latency[1]", "ceiling"} <= set(kept)
    assert not {"nvlink", "latency", "latency[0]"} & set(kept)


def test_ceilings_and_depth_are_read_off_layer_matmuls() -> None:
    truth = replace(H200, ceiling=600e12, depth=160)
    times = [((m, k, n), truth.product(m, k, n)) for m, k, n in MATMULS["cuda"]]
    depth = fitted_depth(H200, times)
    assert depth == 160
    assert fitted_ceiling(replace(H200, depth=depth), times) == pytest.approx(600e12, rel=1e-3)


def test_a_line_has_no_negative_latency_and_no_negative_rate() -> None:
    found = fit([(1e6, 1e-3 + 1e-4), (1e7, 1e-3 + 1e-3)])
    assert (found.start, found.rate) == pytest.approx((1e-3, 1e10))
    found = fit([(1e6, 1e-6), (1e7, 2e-3)])
    assert found.start == 0
    assert found.rate > 0
    with pytest.raises(TrainingError, match="idle machine"):
        fit([(1e6, 1e-2), (1e7, 1e-3)])


def test_a_kind_faster_than_the_common_latency_keeps_its_own_rate() -> None:
    rows = _collectives(replace(H200, latency=(4e-6, 1.0)), 4, 4)
    for row in rows:
        row["seconds"] += 1e-2 * (row["kind"] != "send")  # the median kind's latency
    found = dict(link_fields(rows, H200)["kinds"])
    assert found["send"] > 0
    assert rate_of([(1e6, 1e-4), (1e7, 1e-3)], 1.0) is None


def test_a_floor_does_not_bend_the_line_of_large_collectives() -> None:
    """Small ones take what the host needs to issue them; rate and latency are those of the rest."""
    truth = replace(H200, latency=(5e-6, 1.0), nvlink=320e9, issue=52e-6, kinds=(("send", 0.9),))
    rows = [
        {"kind": kind, "ranks": 4, "inside": 4, "bytes": 2**i}
        for kind in KINDS
        for i in range(16, 30, 2)
    ]
    for row in rows:
        row["seconds"] = truth.alone(row["kind"], row["bytes"], 4, 4)
    assert len({row["seconds"] for row in rows if row["bytes"] <= 2**20}) == 1
    found = link_fields(rows, H200)
    assert found["issue"] == pytest.approx(52e-6, rel=1e-6)
    assert found["latency"][0] == pytest.approx(5e-6, rel=1e-6)
    assert found["nvlink"] == pytest.approx(320e9, rel=1e-6)
    assert dict(found["kinds"])["send"] == pytest.approx(0.9, rel=1e-6)


@pytest.mark.parametrize(("file", "off"), [("h200_x4.toml", 0.08), ("h200_x2.toml", 0.10)])
def test_committed_rows_say_what_their_collectives_took(file: str, off: float) -> None:
    """From 16 MiB on; sends on four GPUs are no line, and told apart in the file's source."""
    path = ROOT / "benchmarks" / file
    rows = tomllib.loads(path.read_text())["calibration"]["collectives"]
    row = hardware(str(path))
    large = [each for each in rows if each["bytes"] >= 2**24 and each["kind"] != "send"]
    assert len(large) == 12
    for each in large:
        said = row.alone(each["kind"], each["bytes"], each["ranks"], each["inside"])
        assert said == pytest.approx(each["seconds"], rel=off)
        assert said == pytest.approx(each["predicted_seconds"], rel=1e-3)
    fields = link_fields(rows, H200)
    assert row.nvlink == pytest.approx(fields["nvlink"], rel=1e-3)
    assert row.issue == pytest.approx(fields["issue"], rel=1e-3)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_the_file_is_the_row_and_marks_what_was_kept(tmp_path: Path, suffix: str) -> None:
    made = Calibration({"copy": 1e12}, collectives=_collectives(H200, 4, 4))
    row, kept = row_of(made, H200, "mine", "measured")
    file = tmp_path / f"mine{suffix}"
    file.write_text(as_text(row, made, "h200", kept, suffix))
    read = asdict(hardware(str(file)))
    assert [kind for kind, _ in read.pop("kinds")] == list(KINDS)
    for key in ("calls", "overlap"):
        assert [tuple(each) for each in read.pop(key)] == list(getattr(row, key))
    for key, value in read.items():
        wanted = getattr(row, key)
        assert value == (wanted if isinstance(wanted, str) else pytest.approx(wanted, rel=1e-3))
    if suffix == ".toml":
        (peak,) = (line for line in file.read_text().splitlines() if line.startswith("peak"))
        assert peak == "peak = 989000000000000.0  # peak of h200, not measured"
    else:
        assert "peak" in json.loads(file.read_text())["calibration"]["kept"]


def test_a_plan_by_a_measured_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half the rates: a slower step."""
    slower = replace(H200, name="slower", ceiling=H200.ceiling / 2)
    file = tmp_path / "slower.toml"
    file.write_text(as_text(slower, Calibration(), "h200", [], ".toml"))
    steps = []
    for name in ("h200", str(file)):
        config = ["--config", str(ROOT / "configs/llama3_8b.toml"), "--world-size", "4"]
        assert commands(["plan", *config, "--hardware", name, "--json"]) == 0
        steps.append(json.loads(capsys.readouterr().out)["time"]["step_seconds"])
    assert steps[1] > 1.3 * steps[0]


def test_rows_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "row.toml"
    with pytest.raises(ConfigError, match="no such file"):
        hardware(str(file))
    text = as_text(H200, Calibration(), "h200", [], ".toml")
    for change, messages in (
        (("copy =", "copies ="), "unknown key copies; did you mean copy"),
        (("copy =", "# copy ="), "copy is required"),
        (("copy = 4", "copy = -4"), "copy = -42"),
        (("copy = 4", "copy = = 4"), "row.toml"),
        (("copy = 4", "copy = 1e300 # 4"), r"copy = 1e\+300"),
        (("copy = 4", "copy = inf # 4"), "copy = inf"),
        (("copy = 4", "copy = nan # 4"), "copy = nan"),
        (("outside = ", "outside = 9e15 # "), "memory = .* must exceed outside = 9e.15"),
    ):
        file.write_text(text.replace(*change))
        with pytest.raises(ConfigError, match=messages):
            hardware(str(file))


def test_arguments_of_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, messages in (
        (["--out", "row.txt"], "must end in .toml or .json"),
        (["--out", str(tmp_path / "none" / "row.toml")], "there is no folder"),
        (["--base", "h20"], "did you mean h200"),
    ):
        assert commands(["plan", "calibrate", *words]) == 1
        assert messages in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that one GPU has; how well the row predicts is what the command prints."""
    monkeypatch.setattr(measure, "_BUDGET_SECONDS", 0.01)
    made = measure_machine(H200, Place(0, 0, 1))
    row, kept = row_of(made, H200, "here", "now")
    for name in ("ceiling", "copy", "launch", "host_link", "multiprocessors", "memory"):
        assert 0 < getattr(row, name) < math.inf, name
        assert name not in kept
    device = torch.device("cuda", 0)
    emulated = bool(why_emulated(RECIPES["tensorwise"], device, torch.bfloat16))
    assert (row.ceiling_float8 > 0) != emulated
    assert len(made.matmuls) == 3 * len(MATMULS["cuda"]) * (1 if emulated else 2)
    assert all(each["seconds"] > 0 and each["predicted_seconds"] > 0 for each in made.matmuls)
    assert {each["kernel"] for each in made.attention} - {"math"}
    assert min(row.attention) > 0
