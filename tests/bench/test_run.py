"""Runs of points: what is forced on them, how they end, what is read of them."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtron.bench.breakdown import EXPOSED
from dtron.bench.command import bench_parser
from dtron.bench.run import (
    _OPTIONS,
    FORCED,
    Options,
    Outcome,
    bench_config,
    descendants,
    end,
    launch,
    reason,
    refused,
    run_point,
)
from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.setup.rules import resolve

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = ROOT / "configs/quickstart.toml"


@pytest.mark.parametrize("profile_steps", [0, 3])
def test_a_point_only_trains(tmp_path: Path, profile_steps: int) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        "[train]\ntokens = 99\nsample_tokens = 9\nsample_prompt = 'x'\neval_interval = 2\n"
        "[metrics]\nprofile_start = 7\nprofile_steps = 2\n"
    )
    options = Options(ranks=1, warmup=4, steps=6, profile_steps=profile_steps)
    config, every = bench_config(file, ["parallel.zero=2"], options, tmp_path / "run")
    resolve(config, 1)  # nothing without effect is left
    assert (config.train.steps, config.train.tokens) == (10 + profile_steps, 0)
    assert config.metrics.profile_start == (11 if profile_steps else 0)
    assert config.parallel.zero == 2
    assert (config.checkpoint.last, config.train.sample_tokens) == (False, 0)
    assert RunConfig.load(file, every) == config  # the overrides repeat it


def test_reports_of_float8_are_left_out(tmp_path: Path) -> None:
    """They belong to log rows, of which a point has none."""
    file = tmp_path / "own.toml"
    file.write_text("[float8]\nrecipe = 'tensorwise'\nreport_interval = 10\n")
    config, _ = bench_config(file, [], Options(ranks=1), tmp_path / "run")
    assert (config.float8.recipe, config.float8.report_interval) == ("tensorwise", 0)


def test_rows_of_the_log_are_as_far_apart_as_asked(tmp_path: Path) -> None:
    options = Options(ranks=1, log_interval=5)
    config, _ = bench_config(QUICKSTART, [], options, tmp_path)
    assert config.metrics.log_interval == 5


@pytest.mark.parametrize("key", _OPTIONS)
def test_options_that_set_a_key_exist(key: str) -> None:
    known = bench_parser().format_help()
    assert all(option in known for option in re.findall(r"--[a-z-]+", _OPTIONS[key]))


@pytest.mark.parametrize("key", ["run.dir", "train.steps", "metrics.profile_start", *FORCED])
def test_keys_of_the_bench_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        bench_config(QUICKSTART, [f"{key}=7"], Options(ranks=1), tmp_path)


def test_values_that_the_bench_sets_anyway_are_accepted(tmp_path: Path) -> None:
    same = ["train.eval_sequences=0", "train.epochs=0", "checkpoint.last=false"]
    config, _ = bench_config(QUICKSTART, same, Options(ranks=1), tmp_path)
    assert config == bench_config(QUICKSTART, [], Options(ranks=1), tmp_path)[0]
    with pytest.raises(ConfigError, match=r"train\.eval_sequences is set by dtron bench"):
        bench_config(QUICKSTART, ["train.eval_sequences=8"], Options(ranks=1), tmp_path)


def test_a_refused_point_starts_nothing(tmp_path: Path) -> None:
    found = run_point(QUICKSTART, ["parallel.tp=3"], {}, Options(ranks=2), tmp_path, "tp")
    assert found.status == "refused"
    assert "do not multiply to the world size 2" in found.reason
    assert not (tmp_path / "log.txt").exists()


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("parallel.tp=3", "do not multiply to the world size 2"),
        ("parallel.tpp=2", "parallel.tpp"),
        ("train.steps=3", "use --steps"),
    ],
)
def test_what_cannot_run_is_known_without_a_process(word: str, why: str) -> None:
    found = refused(QUICKSTART, [word], Options(ranks=2), "point")
    assert found is not None
    assert found.status == "refused"
    assert why in found.reason
    assert refused(QUICKSTART, ["parallel.tp=2"], Options(ranks=2), "point") is None


LOGS = {
    "x\nerror: unknown key a.b\nTraceback\n": "error: unknown key a.b",
    "error on rank 3: no space\n": "error: no space",
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a "
    "total capacity\n": "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB",
    "[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: ValueError: no\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n": "ValueError: no",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n  exitcode: -11\n"
    "  traceback : Signal 11 (SIGSEGV) received by PID 7\n": "a rank ended by Signal 11 (SIGSEGV)",
    "nothing": "exit status 1; see the log",
}


@pytest.mark.parametrize(("log", "why"), LOGS.items(), ids=range(len(LOGS)))
def test_reasons_are_one_line(log: str, why: str) -> None:
    assert reason(log, 1, 5) == why


def test_time_out_ends_every_process(tmp_path: Path) -> None:
    """Ranks that ignore SIGTERM end too, and the point is a row that says why."""
    script = tmp_path / "hang.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    child = subprocess.Popen([sys.executable, str(script)])
    shell = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess; subprocess.run([{sys.executable!r}, {str(script)!r}])",
        ]
    )
    while not descendants(shell.pid):
        time.sleep(0.05)
    (grandchild,) = descendants(shell.pid)
    end(child)
    end(shell)
    assert child.poll() is not None
    assert shell.poll() is not None
    deadline = time.monotonic() + 10
    while alive(grandchild):
        assert time.monotonic() < deadline, "the grandchild still runs"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "(python" in (text := Path(f"/proc/{pid}/stat").read_text()) and ") Z" not in text
    except OSError:
        return False


def test_a_failed_run_keeps_its_log_and_says_why(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise MemoryError('all gone')\n")
    outcome = Outcome("x", "ok")
    log = launch(outcome, [str(script)], {}, Options(ranks=1), tmp_path)
    assert (outcome.status, outcome.reason) == ("failed", "MemoryError: all gone")
    assert "Traceback" in log
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(600)\n")
    launch(outcome, [str(slow)], {}, Options(ranks=1, timeout_seconds=0.5), tmp_path)
    assert outcome.reason == "timed out after 0.5 s"
    assert outcome.wall_seconds < 60


def test_bench_of_a_sweep(tmp_path: Path) -> None:
    """The whole command on two ranks: one point runs and is broken down, one is refused by the
    trainer itself, and the sweep ends with tables and a JSON file that repeats each run."""
    overrides = ["model.override.n_layers=1", "train.seq_len=32", "train.global_batch=2"]
    command = [sys.executable, "-m", "dtron", "bench", str(QUICKSTART), *overrides]
    command += ["data.tokenizer=byte,no/such.json", "--steps", "3", "--warmup", "1", "--breakdown"]
    command += ["--nproc-per-node", "2", "--out", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "out/bench.json").read_text())
    good, bad = written["points"]
    assert good["point"]["data.tokenizer"] == "byte"
    (run,) = good["runs"]
    assert [len(seconds) for seconds in run["times"]["seconds"]] == [7, 7]
    means = [sum(ranks) / 2 for ranks in zip(*run["times"]["seconds"], strict=True)]
    step = good["figures"]["step_seconds"]
    assert step == pytest.approx(sorted(means[1:4])[1])
    tokens = 2 * 32 / step / 2
    assert good["figures"]["tokens_per_second_per_device"] == pytest.approx(tokens)
    assert good["figures"]["mfu"] == {"full": None, "causal": None}
    assert good["figures"]["hidden"] is None
    assert run["config"]["train"]["seq_len"] == 32
    assert run["command"].startswith("torchrun --standalone --nproc-per-node 2 -m dtron train")
    assert not list((tmp_path / "out/000/run").glob("checkpoints/*"))
    assert written["versions"]["torch"]
    assert (bad["figures"], bad["runs"][0]["status"]) == (None, "refused")
    assert "no/such.json" in bad["runs"][0]["reason"]
    assert "no/such.json" in done.stdout
    check_breakdown(run["breakdown"], run["times"]["seconds"])


def check_breakdown(found: dict[str, Any], seconds: list[list[float]]) -> None:
    assert (found["device"], found["steps"], len(found["ranks"])) == ("cpu", 3, 2)
    for rank, times in zip(found["ranks"], seconds, strict=True):
        assert sum(rank["parts"].values()) == pytest.approx(rank["step"])
        assert min(rank["parts"].values()) >= 0
        for part in ("GEMM", "attention", "loss", "optimizer", "elementwise", EXPOSED):
            assert rank["parts"][part] > 0, part
        # The marks of the trace and the trainer's clock see the same steps.
        assert rank["step"] <= sum(times[4:]) / 3 * 1e3
    floors = found["ceiling"]["floors"]
    assert set(floors) == {"GEMM", "attention", "optimizer"}
    assert all(floor > 0 for floor in floors.values())
