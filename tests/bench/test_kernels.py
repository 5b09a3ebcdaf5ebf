"""Timing of kernels alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dtron.kernels
from dtron.bench.command import main
from dtron.bench.kernels.command import DeviceLimit, time_problem
from dtron.bench.kernels.problem import KernelRow
from dtron.bench.kernels.problems import PROBLEMS
from dtron.bench.measure import seconds
from dtron.errors import ConfigError
from dtron.kernels.attention import KERNELS

CPU = torch.device("cpu")


def test_every_file_of_kernels_is_timed() -> None:
    (folder,) = dtron.kernels.__path__
    files = {file.stem for file in Path(folder).glob("*.py")} - {"__init__", "torch_internals"}
    assert files == {module for problem in PROBLEMS.values() for module in problem.modules}
    assert {row.name for row in PROBLEMS["attention"].rows} == KERNELS.keys()


def test_bytes_and_operations_of_attention() -> None:
    shape = (2, 10, 4, 2, 8)
    q, k = 2 * 10 * 4 * 8, 2 * 10 * 2 * 8
    forward, backward = PROBLEMS["attention"].flops(shape)
    assert forward == 2 * 2 * 2 * 4 * 8 * 100 / 2
    assert backward == 2.5 * forward
    lse = 2 * 10 * 4 * 4
    inputs = PROBLEMS["attention"].draw(shape, torch.bfloat16, CPU)
    n_bytes = PROBLEMS["attention"].n_bytes(*inputs)
    assert n_bytes == (2 * (2 * q + 2 * k) + lse, 2 * (4 * q + 4 * k) + lse)


def test_bytes_of_adamw_follow_the_moments_of_a_row() -> None:
    problem = PROBLEMS["adamw"]
    drawn = problem.draw((3, 10), torch.float32, CPU)
    n_bytes = {row.name: problem.n_bytes(*row.inputs(*drawn)) for row in problem.rows}
    assert n_bytes.pop("dtron, bfloat16 moments") == (20 * 30,)
    assert set(n_bytes.values()) == {(28 * 30,)}


def test_limit_is_the_larger_of_operations_and_bytes() -> None:
    limit = DeviceLimit(flops_per_second=100.0, bytes_per_second=10.0)
    assert limit.seconds(1000, 20) == 10
    assert limit.seconds(10, 20) == 2


def test_the_clock_takes_the_median_of_calls() -> None:
    calls = []
    assert seconds(lambda: calls.append(1), CPU) < 0.01
    assert 8 <= len(calls) <= 104


def test_the_whole_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "kernels.json"
    command = ["kernels", "attention", "--shape", "1,16,4,2,8", "--backend", "aot_eager"]
    assert main([*command, "--out", str(file)]) == 0
    written = json.loads(file.read_text())
    rows = {row["name"]: row for row in written["attention"]["rows"]}
    assert rows.keys() == {"math", "math, compiled", *KERNELS}
    for name in ("math", "math, compiled"):
        assert rows[name]["reason"] == ""
        assert min(rows[name]["seconds"]) > 0
        assert min(rows[name]["of_limit"]) > 0
    assert max(rows["math, compiled"]["error"]) < 1e-5
    if not torch.cuda.is_available():
        assert rows["fa4"]["reason"] == "needs a CUDA device"
        assert "cpu" in written["device"]
    assert "math, compiled" in capsys.readouterr().out


def test_an_update_is_one_part_of_float32_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "kernels.json"
    command = ["kernels", "adamw", "--shape", "2,64", "--dtype", "bfloat16"]
    assert main([*command, "--backend", "aot_eager", "--out", str(file)]) == 0
    written = json.loads(file.read_text())["adamw"]
    assert (written["dtype"], written["parts"]) == ("torch.float32", ["update"])
    (fused,) = (row for row in written["rows"] if row["name"] == "torch, fused")
    assert all(len(fused[key]) == 1 for key in ("seconds", "tflops", "of_limit", "error"))
    table = capsys.readouterr().out
    assert "│ update │" in table
    assert "backward" not in table
    if not torch.cuda.is_available():
        assert "dtron, bfloat16 moments: needs a CUDA device" in table


def test_errors_of_adamw_are_those_of_the_first_update() -> None:
    """Each row updates its own copy, however often the others were timed; narrow moments show."""
    problem = PROBLEMS["adamw"]
    everywhere = tuple(replace(row, unavailable=lambda *_: None) for row in problem.rows)
    limit = DeviceLimit(1e12, 1e12)
    found = time_problem(
        replace(problem, rows=everywhere), (2, 1000), torch.float32, CPU, limit, "aot_eager"
    )
    errors = {timing.name: timing.error for timing in found}
    assert errors.pop("formula") is None
    narrow = errors.pop("dtron, bfloat16 moments")
    assert narrow is not None
    assert 2**-12 < narrow[0] < 2**-8
    assert errors.keys() == {"formula, compiled", "torch, fused", "dtron, float32 moments"}
    assert all(error is not None and error[0] < 1e-6 for error in errors.values())


def test_what_is_drawn_stays_as_it_is() -> None:
    problem = PROBLEMS["adamw"]
    drawn = problem.draw((2, 50), torch.float32, CPU)
    before = [x.clone() for part in drawn for x in part]
    for row in problem.rows:
        own = row.inputs(*drawn)
        assert not torch.equal(row.forward(*own)[0], before[0])
    after = [x for part in drawn for x in part]
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


def test_a_row_that_fails_or_errs_is_told() -> None:
    """A kernel that runs out of memory is a row with a reason; a wrong one has an error."""
    problem = PROBLEMS["attention"]
    (math,) = (row for row in problem.rows if row.name == "math")

    def out_of_memory(*_: object) -> list[torch.Tensor]:
        raise RuntimeError("out of\nmemory")

    def doubled(*inputs: object) -> list[torch.Tensor]:
        out, lse = math.forward(*inputs)
        return [2 * out, lse]

    rows = (
        KernelRow("big", out_of_memory, math.backward, lambda *_: None),
        math,
        KernelRow("wrong", doubled, math.backward, lambda *_: None),
    )
    changed = replace(problem, rows=rows)
    shape = (1, 8, 2, 1, 8)
    found = time_problem(changed, shape, torch.float32, CPU, DeviceLimit(1e12, 1e12), "aot_eager")
    assert [timing.name for timing in found] == ["math", "math, compiled", "big", "wrong"]
    assert found[2].reason == "out of memory"
    assert found[3].error is not None
    assert found[3].error[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["atention"],
        ["attention", "--shape", "1,2"],
        ["attention", "--shape", "1,0,2,1,8"],
        ["--shape", "1,2"],
        ["--x"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(["kernels", *arguments])
