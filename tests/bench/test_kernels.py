"""Timing of kernels alone."""

import json
from pathlib import Path

import pytest
import torch

import dtron.kernels
from dtron.bench.command import main
from dtron.bench.kernels import PROBLEMS, Limit, Row, time_problem
from dtron.bench.measure import seconds
from dtron.errors import ConfigError
from dtron.kernels.attention import KERNELS

CPU = torch.device("cpu")


def test_every_file_of_kernels_is_timed() -> None:
    (folder,) = dtron.kernels.__path__
    files = {file.stem for file in Path(folder).glob("*.py")} - {"__init__"}
    assert files == {module for problem in PROBLEMS.values() for module in problem.modules}
    assert {row.name for row in PROBLEMS["attention"].rows} == KERNELS.keys()


def test_bytes_and_operations_of_attention() -> None:
    shape = (2, 10, 4, 2, 8)
    q, k = 2 * 10 * 4 * 8, 2 * 10 * 2 * 8
    forward, backward = PROBLEMS["attention"].flops(shape)
    assert forward == 2 * 2 * 2 * 4 * 8 * 100 / 2
    assert backward == 2.5 * forward
    lse = 2 * 10 * 4 * 4
    n_bytes = PROBLEMS["attention"].n_bytes(shape, torch.bfloat16)
    assert n_bytes == (2 * (2 * q + 2 * k) + lse, 2 * (4 * q + 4 * k) + lse)


def test_limit_is_the_larger_of_operations_and_bytes() -> None:
    limit = Limit(flops_per_second=100.0, bytes_per_second=10.0)
    assert limit.seconds(1000, 20) == 10
    assert limit.seconds(10, 20) == 2


def test_the_clock_takes_the_median_of_calls() -> None:
    calls = []
    assert seconds(lambda: calls.append(1), CPU) < 0.01
    assert 8 <= len(calls) <= 104


def test_the_whole_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "kernels.json"
    command = ["kernels", "--shape", "1,16,4,2,8", "--backend", "aot_eager", "--out", str(file)]
    assert main(command) == 0
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


def test_a_row_that_fails_or_errs_is_told() -> None:
    """A kernel that runs out of memory is a row with a reason; a wrong one has an error."""
    problem = PROBLEMS["attention"]
    (math,) = (row for row in problem.rows if row.name == "math")

    def out_of_memory(_: object) -> list[torch.Tensor]:
        raise RuntimeError("out of\nmemory")

    def doubled(inputs: object) -> list[torch.Tensor]:
        out, lse = math.forward(inputs)  # type: ignore[arg-type]
        return [2 * out, lse]

    rows = (
        Row("big", out_of_memory, math.backward, lambda *_: None),
        math,
        Row("wrong", doubled, math.backward, lambda *_: None),
    )
    changed = type(problem)(**{**problem.__dict__, "rows": rows})
    shape = (1, 8, 2, 1, 8)
    found = time_problem(changed, shape, torch.float32, CPU, Limit(1e12, 1e12), "aot_eager")
    assert [timing.name for timing in found] == ["math", "math, compiled", "big", "wrong"]
    assert found[2].reason == "out of memory"
    assert found[3].error is not None
    assert found[3].error[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "arguments", [["atention"], ["--shape", "1,2"], ["--shape", "1,0,2,1,8"], ["--x"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(["kernels", *arguments])
