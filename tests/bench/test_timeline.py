"""Timelines of synthetic traces."""

from pathlib import Path

import pytest

from benchmarks import timeline
from benchmarks.timeline import COLOURS, HOST, WIDTH, columns, main, overlap
from dtron.bench.trace import CLASSES, COLLECTIVES, DISPATCH, EXPERTS, read_trace
from tests.bench.test_breakdown import GEMM, NCCL, Synthetic

SENT = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GROUPED = "cutlass::device_kernel<cutlass::gemm::GemmUniversal<cutlass::gemm::GroupProblemShape>>"


def two_streams() -> Synthetic:
    """The window of step 1: 1000 to 2000 microseconds. Dispatch takes 400, of which 150 overlap."""
    trace = Synthetic()
    trace.mark("step", 0, 100)
    trace.mark("step", 100, 220)
    trace.mark("optimizer", 200, 210)
    trace.kernel(GEMM, 10, 700, 1000)
    trace.kernel(GEMM, 110, 1000, 1200)
    trace.kernel(GROUPED, 112, 1400, 1500)
    trace.kernel("elementwise", 205, 1900, 2000)  # of the optimizer
    for name, begin, end in ((SENT, 1150, 1350), (SENT, 1400, 1600), (NCCL, 1600, 1700)):
        trace.kernel(name, 113, begin, end)
        trace.events[-1]["tid"] = 20
    trace._add("cuda_runtime", "cudaStreamSynchronize", 1100, 1300, {"correlation": 99})
    return trace


def test_dispatch_with_computation_is_counted(tmp_path: Path) -> None:
    trace = read_trace(two_streams().write(tmp_path / "rank-0.json"))
    assert trace.windows == [(1000, 2000)]
    assert overlap(trace, trace.windows[0]) == (400, 150)
    assert overlap(trace, (1000, 1200)) == (50, 50)


def test_a_row_shows_what_takes_most_of_each_pixel(tmp_path: Path) -> None:
    trace = read_trace(two_streams().write(tmp_path / "rank-0.json"))
    (first, computed), (second, sent) = timeline.tracks(trace)
    assert (first, second) == ("stream 1", "stream 20")
    rows = [
        columns([(s.part, (s.begin, s.end)) for s in spans], trace.windows[0])
        for spans in (computed, sent)
    ]
    counts = [{label: row.count(label) for label in row} for row in rows]
    a_hundred = WIDTH // 10
    idle = 6 * a_hundred
    assert counts[0] == {"GEMM": 200, EXPERTS: a_hundred, "optimizer": a_hundred, "": idle}
    assert counts[1] == {DISPATCH: 4 * a_hundred, COLLECTIVES: a_hundred, "": idle - a_hundred}
    tiny = [("GEMM", (0.0, 0.4)), (DISPATCH, (0.4, 1.0)), (DISPATCH, (1.0, float(WIDTH)))]
    assert columns(tiny, (0.0, float(WIDTH))) == [DISPATCH] * WIDTH


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trace, out = two_streams().write(tmp_path / "rank-0.json"), tmp_path / "step.svg"
    main([str(trace), str(out)])
    assert "37.5% of 0.40 ms of dispatch and combine overlap" in capsys.readouterr().out
    svg = out.read_text(encoding="utf-8")
    for shown in ("stream 1<", "stream 20<", "host<", "0.00 ms<", "1.00 ms<"):
        assert shown in svg
    for colour in (COLOURS[DISPATCH], COLOURS[EXPERTS], *HOST.values()):
        assert svg.count(colour) >= 2  # in a row, and in the legend
    assert COLOURS[DISPATCH] == HOST["waits for the device"]
    assert svg.count(COLOURS[DISPATCH]) == 5  # two dispatches, a wait, and two in the legend
    main([str(trace), str(out), "--begin", "0.7", "--end", "0.9"])
    assert "no dispatch or combine" in capsys.readouterr().out
    for wrong in (["--step", "3"], ["--begin", "5"]):
        with pytest.raises(SystemExit):
            main([str(trace), str(out), *wrong])


def test_every_part_of_a_class_has_a_colour() -> None:
    assert {part for _, part, _ in CLASSES} | {"elementwise"} == COLOURS.keys()
