"""The time of every step."""

import json
from pathlib import Path

import pytest
import torch

from dtron.kernels.torch_internals import compile_cache
from dtron.run.step_times import StepTimes
from tests.harness import run_ranks
from tests.training.test_trainer import fit, rows, tiny


def test_a_run_writes_every_step_of_every_rank(tmp_path: Path) -> None:
    run_ranks(2, fit, tiny(tmp_path / "run", metrics__step_times=True))
    times = json.loads((tmp_path / "run/steps.json").read_text())
    assert times["start_step"] == 0
    assert [len(rank) for rank in times["seconds"]] == [6, 6]
    assert [len(rank) for rank in times["memory_gib"]] == [6, 6]
    assert times["devices"] == ["cpu", "cpu"]
    assert times["attended"] == [32.0] * 6
    assert all(second > 0 for rank in times["seconds"] for second in rank)
    # The same steps as the log's clock saw them, which also counts what lies between two steps.
    logged = sum(row["seconds"] for row in rows(tmp_path / "run")[1:5])
    assert sum(times["seconds"][0][1:5]) == pytest.approx(logged, rel=0.3)


def test_other_runs_write_none(tmp_path: Path) -> None:
    run_ranks(1, fit, tiny(tmp_path / "run", train__steps=1))
    assert not (tmp_path / "run/steps.json").exists()


def test_a_graph_from_the_cache_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second compilation finds forward and backward: two graphs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        x = torch.ones(8, requires_grad=True)
        torch.compile(lambda x: x.sin().sum())(x).backward()
        found.append(compile_cache())
    assert found == [{"hits": 0, "misses": 2}, {"hits": 2, "misses": 0}]


@pytest.mark.gpu
def test_events_time_the_device_and_not_the_host() -> None:
    """The device waits for so many of its cycles, the host does not."""
    cycles, fastest = 5 * 10**8, 5e9  # no GPU has as many cycles a second
    times = StepTimes(torch.device("cuda", 0))
    torch.cuda.synchronize()
    times.begin()
    torch.cuda._sleep(cycles)
    times.mark(1.0)
    assert not torch.cuda.current_stream().query()
    assert times.seconds()[0] >= cycles / fastest
