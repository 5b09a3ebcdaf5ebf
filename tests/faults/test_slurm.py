"""launch/slurm.sh under a real Slurm (`slurm.py`): each scenario of docs/clusters.md.

pytest -m soak tests/faults/test_slurm.py
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hosts import until
from tests.faults.kills import alone, words
from tests.faults.slurm import NODES, Slurm, no_slurm
from tests.faults.trajectory import complete_rows, worst_difference

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(no_slurm()), reason=f"no Slurm: {no_slurm()}"),
]
STEPS = 120
ENDLESS = 10**6


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Rows by step of one process that nothing happens to."""
    return alone(tmp_path_factory.mktemp("reference") / "alone", STEPS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def keys(run: Path, steps: int = STEPS, **more: Any) -> list[str]:
    return words(run, train__steps=steps, parallel__timeout_seconds=60, **more)


def reach(slurm: Slurm, job: str, run: Path, step: int) -> None:
    """Wait until a step is done."""
    try:
        until(lambda: len(complete_rows(run)) >= step, 300, f"no step {step}")
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{slurm.log(job)[-6000:]}") from None


def ends_as(slurm: Slurm, job: str, run: Path, wanted: dict[int, dict[str, Any]]) -> None:
    """Wait for its end: all steps are there once, as without any fault."""
    slurm.wait(job, "COMPLETED")
    assert len(complete_rows(run)) == STEPS
    worst_difference(complete_rows(run), wanted)


def has_all_batches_once(run: Path) -> None:
    found = complete_rows(run)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    assert len({row["batch"] for row in found}) == len(found)


# -- allocations ----------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (2, 2), (4, 1)])
def test_nodes_and_gpus_are_those_of_the_allocation(
    slurm: Slurm, run: Path, wanted: dict[int, dict[str, Any]], nodes: int, gpus: int
) -> None:
    job = slurm.submit(nodes, keys(run), ["--gpus-per-node", str(gpus)])
    ends_as(slurm, job, run, wanted)
    assert f"{nodes * gpus} ranks on" in slurm.log(job)
    assert "resumed from" not in slurm.log(job)


def test_a_job_without_gpus_is_refused(slurm: Slurm, run: Path) -> None:
    job = slurm.submit(1, keys(run), ["--gpus-per-node", "0"])
    slurm.wait(job, "FAILED")
    assert slurm.log(job).startswith("error: the job has no GPUs; give sbatch --gpus-per-node=N")


# -- the end of a job -----------------------------------------------------------------------


def test_a_job_at_its_time_limit_is_queued_again_and_resumes(slurm: Slurm, run: Path) -> None:
    """Slurm counts in minutes, and may send the signal one earlier."""
    job = slurm.submit(2, keys(run, ENDLESS), ["--time", "4", "--signal", "B:USR1@90"])
    reach(slurm, job, run, 10)
    until(lambda: slurm.show(job, "Restarts") == "1", 300, "not queued again")
    stopped = len(complete_rows(run))
    assert "SIGUSR1: stopping after the next step, with a checkpoint" in slurm.log(job)
    assert (run / "checkpoints/latest").read_text() == f"step-{stopped}\n"
    reach(slurm, job, run, stopped + 10)
    slurm.run("scancel", job)
    slurm.wait(job, "CANCELLED")
    assert f"resumed from {run}/checkpoints/step-{stopped} " in slurm.log(job)
    has_all_batches_once(run)


def test_a_job_that_is_cancelled_stays_so(slurm: Slurm, run: Path) -> None:
    job = slurm.submit(2, keys(run, ENDLESS))
    reach(slurm, job, run, 10)
    slurm.run("scancel", job)
    slurm.wait(job, "CANCELLED")
    until(lambda: not any(map(slurm.processes, NODES)), 120, "processes outlive the job")
    time.sleep(20)  # longer than a job that is queued again waits
    assert slurm.show(job, "JobState") == "CANCELLED"
    assert slurm.show(job, "Restarts") == "0"
    assert (run / "checkpoints/latest").read_text() == f"step-{len(complete_rows(run))}\n"


def test_a_job_that_is_queued_again_by_hand_resumes(
    slurm: Slurm, run: Path, wanted: dict[int, dict[str, Any]]
) -> None:
    job = slurm.submit(2, keys(run))
    reach(slurm, job, run, 10)
    slurm.run("scontrol", "requeue", job)
    ends_as(slurm, job, run, wanted)
    assert slurm.show(job, "Restarts") == "1"
    assert "resumed from" in slurm.log(job)


POISON = """import os
if os.path.exists({path!r}) and "LOCAL_RANK" in os.environ:
    os._exit(1)
"""


def test_a_job_that_fails_is_queued_again_only_after_progress(slurm: Slurm, run: Path) -> None:
    """Its ranks fail from a step on: one job has made checkpoints, the next one has not."""
    folder = run.parent / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(POISON.format(path=str(folder / "fail")))
    path = {"PYTHONPATH": f"{folder}:{Path.cwd()}"}
    job = slurm.submit(2, keys(run, ENDLESS), env=path)
    reach(slurm, job, run, 10)
    (folder / "fail").touch()
    for pid in slurm.processes(NODES[1]):
        if "train.py" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[2:3]:
            slurm.run("kill", "-9", str(pid))
    slurm.wait(job, "FAILED")
    assert slurm.show(job, "Restarts") == "1"
    assert slurm.log(job).count("slurm.sh: queued again at step") == 1
    assert "slurm.sh: no checkpoint after step" in slurm.log(job)


# -- nodes and agents -----------------------------------------------------------------------


def test_a_node_that_is_lost_and_returns(
    slurm: Slurm, run: Path, wanted: dict[int, dict[str, Any]]
) -> None:
    """The job needs all four nodes."""
    job = slurm.submit(4, keys(run))
    reach(slurm, job, run, 10)
    slurm.kill_node(NODES[2])
    slurm.down(NODES[2])
    slurm.wait(job, "PENDING")
    time.sleep(15)
    assert slurm.show(job, "JobState") == "PENDING"
    slurm.restore(NODES[2])
    ends_as(slurm, job, run, wanted)
    assert "resumed from" in slurm.log(job)


@pytest.mark.parametrize("lost", [0, 1], ids=["head", "worker"])
def test_a_node_that_is_lost_is_replaced(
    slurm: Slurm, run: Path, wanted: dict[int, dict[str, Any]], lost: int
) -> None:
    job = slurm.submit(2, keys(run))
    reach(slurm, job, run, 10)
    slurm.kill_node(NODES[lost])
    slurm.down(NODES[lost])
    try:
        ends_as(slurm, job, run, wanted)
        assert NODES[lost] not in slurm.run(
            "scontrol", "show", "hostnames", slurm.show(job, "NodeList")
        )
    finally:
        slurm.restore(NODES[lost])
    assert "resumed from" in slurm.log(job)


def test_fewer_nodes_where_one_is_lost(slurm: Slurm, run: Path) -> None:
    """Four nodes, then the three that are left; 12 sequences are a multiple of both."""
    slurm.idle()
    job = slurm.submit("2-4", keys(run, train__global_batch=12))
    reach(slurm, job, run, 10)
    slurm.kill_node(NODES[3])
    slurm.down(NODES[3])
    try:
        slurm.wait(job, "COMPLETED")
    finally:
        slurm.restore(NODES[3])
    assert "4 ranks on" in slurm.log(job)
    assert "3 ranks on" in slurm.log(job)
    has_all_batches_once(run)
    assert len(complete_rows(run)) == STEPS


@pytest.mark.parametrize("node", [0, 1], ids=["head", "worker"])
def test_an_agent_that_is_killed_is_started_again_in_its_job(
    slurm: Slurm, run: Path, wanted: dict[int, dict[str, Any]], node: int
) -> None:
    job = slurm.submit(2, keys(run))
    reach(slurm, job, run, 10)
    slurm.run("kill", "-9", str(slurm.agent(NODES[node])))
    ends_as(slurm, job, run, wanted)
    assert slurm.show(job, "Restarts") == "0"
    assert "resumed from" in slurm.log(job)
