"""What checkpoints and restarts cost a run: python -m benchmarks.checkpoint_times

    python -m benchmarks.checkpoint_times --config configs/llama3_8b.toml --ranks 4 \
        --directory DIR --other parallel.tp=2 --hf --out times.json optim.moments=bfloat16

Runs of train.py under torchrun, read line by line; a line's time is when it comes. A row of every
step is logged, for which the device is waited for, so that

    stop             time between the rows before and behind a save, less the median step's
    until published  from the row before a save to the line that tells of the checkpoint
    load             what the run says itself, checksums included
    restart          from SIGKILL of a rank, with `torchrun --max-restarts`, to the next row

A stop so contains what a save beside training slows down the next step by, which is much where the
processes that write share cores with training; `benchmarks.save_stall` tells the two apart.

One run saves once while training waits, the next one resumes, saves twice beside training, and has
its last rank killed; others load what it left under another layout and from Hugging Face's format.
Files to be loaded are dropped from the page cache before (where the file system can), but for
the restart. Each run is ended by SIGKILL once it has said what is wanted.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
EVENTS = {
    "row": r"step +(?P<step>\d+)  loss",
    "saved": r"checkpoint: \S*step-(?P<step>\d+) in",
    "waited": r"the last checkpoint is still being written",
    "resumed": r"resumed from \S*step-(?P<step>\d+) in (?P<seconds>[\d.]+) s",
    "weights": r"weights of \S+ in (?P<seconds>[\d.]+) s",
}
"""What lines of a run are waited for."""
COMMON = (
    "train.steps=100000",
    "train.eval_sequences=0",
    "train.sample_tokens=0",
    "checkpoint.keep=1",
    "metrics.log_interval=1",
    "metrics.tensorboard=false",
)
SYNC_SAVE = 4
"""The step after which the synchronous save is."""
TABLE = (
    ("write", "GB/s of a plain write"),
    ("gib", "GiB of a checkpoint"),
    ("step", "s of a step"),
    ("sync_stop", "s that training stops for a synchronous save"),
    ("async_first_stop", "s for the first one beside training, which reserves memory"),
    ("async_stop", "s for a later one"),
    ("ratio", "a later one, of the synchronous one"),
    ("async_step", "s of a step beside a save"),
    ("sync_published", "s until a synchronous save is published"),
    ("async_published", "s until one beside training is"),
    ("load", "s to load, the same layout"),
    ("load_restarted", "s to load in the restarted attempt"),
    ("load_other", "s to load, another layout"),
    ("cold_start", "s from launch to the first step, nothing loaded, nothing compiled before"),
    ("resumed_start", "s from launch to the first step, resumed"),
    ("restart", "s from SIGKILL of a rank to the first step after it"),
    ("to_hf", "s of dtron convert to-hf"),
    ("load_hf", "s to load from there"),
)


class EndedError(Exception):
    """A run ended, or the time was up, before it said what was waited for."""


class Event(NamedTuple):
    """A line that was waited for."""

    at: float
    """Seconds of `time.perf_counter()`."""
    kind: str
    step: int
    seconds: float
    """That the line itself tells."""


class Run:
    """A torchrun of train.py that is killed at the end of its context.

    Attributes:
        begun: when it was launched, by `time.perf_counter()`.
        events: in the order in which they came.
    """

    def __init__(self, given: argparse.Namespace, name: str, *words: str) -> None:
        command = [*_torchrun(given.ranks), "--max-restarts", "1", str(ROOT / "train.py")]
        command += ["--config", given.config, *COMMON, *given.overrides, *words]
        self.events: list[Event] = []
        self._path = given.directory / f"{name}.log"
        self._log = self._path.open("w", buffering=1)
        self.begun = time.perf_counter()
        self._process = _start(command)
        self._timer = threading.Timer(_left(given), self.kill)
        self._timer.start()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.kill()
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()

    def until(self, kind: str, step: int | None = None, after: float = 0.0) -> Event:
        """The first such event after a time; reads on until it is there. Raises EndedError."""
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event.kind == kind and event.at > after and step in (None, event.step):
                    return event
            seen = len(self.events)
            self._read()

    def _read(self) -> None:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        at = time.perf_counter()
        if not line:
            raise EndedError(f"{self._path} ends with\n{self._path.read_text()[-3000:]}")
        self._log.write(line)
        for kind, pattern in EVENTS.items():
            if found := re.search(pattern, line):
                said = {"step": 0, "seconds": 0, **found.groupdict()}
                self.events.append(Event(at, kind, int(said["step"]), float(said["seconds"])))

    def steps(self, first: int, last: int) -> list[float]:
        """Seconds of these steps, each from row to row."""
        rows = {event.step: event.at for event in self.events if event.kind == "row"}
        return [rows[n] - rows[n - 1] for n in range(first, last + 1)]

    def published(self, step: int) -> float:
        """Seconds from the row before a save to its publication; reads on until it is there."""
        return self.until("saved", step).at - self.until("row", step).at

    def ranks(self) -> list[int]:
        """Process ids of torchrun's children."""
        pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        return sorted(pid for pid in pids if _parent(pid) == self._process.pid)

    def kill(self) -> None:
        """End torchrun and its ranks, which are in sessions of their own."""
        for pid in (self._process.pid, *self.ranks()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Measure what there is time for; 1 if that is not all."""
    given = _parser().parse_intermixed_args()
    given.deadline = time.monotonic() + 60 * given.minutes
    given.directory /= "checkpoint-times"
    shutil.rmtree(given.directory, ignore_errors=True)
    given.directory.mkdir(parents=True)
    figures: dict[str, Any] = {"command": shlex.join(sys.argv)}
    status = 0
    try:
        figures["write"] = _write_speed(given.directory, given.write_gib)
        for phase in (once, beside, elsewhere, *([hugging_face] if given.hf else [])):
            phase(given, figures)
            given.out.write_text(json.dumps(figures, indent=1) + "\n")
    except EndedError as error:
        print(f"not all was measured: {error}", file=sys.stderr)
        status = 1
    given.out.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(_table(figures)), flush=True)
    shutil.rmtree(given.directory)
    return status


def once(given: argparse.Namespace, figures: dict[str, Any]) -> None:
    """A save while training waits."""
    folder = given.directory / "run"
    keys = (f"run.dir={folder}", f"checkpoint.interval={SYNC_SAVE}")
    with Run(given, "sync", *keys) as run:
        figures["cold_start"] = run.until("row").at - run.begun
        figures["sync_published"] = run.published(SYNC_SAVE)
        run.until("row", SYNC_SAVE + 3)
    alone = [*run.steps(2, SYNC_SAVE), *run.steps(SYNC_SAVE + 2, SYNC_SAVE + 3)]
    figures["step"] = statistics.median(alone)
    figures["sync_stop"] = run.steps(SYNC_SAVE + 1, SYNC_SAVE + 1)[0] - figures["step"]
    saved = folder / f"checkpoints/step-{SYNC_SAVE}"
    figures["gib"] = sum(file.stat().st_size for file in saved.iterdir()) / 2**30
    figures["run"] = json.loads((folder / "run.json").read_text())


def beside(given: argparse.Namespace, figures: dict[str, Any]) -> None:
    """The run goes on and saves twice beside training, and a rank is killed."""
    folder = given.directory / "run"
    every = SYNC_SAVE + math.ceil(1.3 * figures["sync_published"] / figures["step"])
    first, second = every, 2 * every
    keys = (f"run.dir={folder}", f"checkpoint.interval={every}", "checkpoint.mode=async")
    _forget(folder)
    with Run(given, "async", *keys, "checkpoint.resume=latest") as run:
        figures["load"] = run.until("resumed").seconds
        figures["resumed_start"] = run.until("row").at - run.begun
        published = run.until("saved", first)
        figures["async_published"] = run.published(second)
        run.until("row", second + 2)
        killed = time.perf_counter()
        os.kill(run.ranks()[-1], signal.SIGKILL)
        again = run.until("resumed", after=killed)
        figures["load_restarted"], figures["resumed_step"] = again.seconds, again.step
        figures["restart"] = run.until("row", after=again.at).at - killed
    before = [event for event in run.events if event.at < killed]
    figures["saves_waited_for_the_one_before"] = sum(e.kind == "waited" for e in before)
    run.events = before  # steps come again after the restart
    for key, step in (("async_first_stop", first), ("async_stop", second)):
        figures[key] = run.steps(step + 1, step + 1)[0] - figures["step"]
    figures["ratio"] = figures["async_stop"] / figures["sync_stop"]
    during = [
        e.step for e in before if e.kind == "row" and first + 1 < e.step and e.at < published.at
    ]
    if during:
        figures["async_step"] = statistics.median(run.steps(during[0], during[-1]))


def elsewhere(given: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Another layout resumes it."""
    source = given.directory / "run"
    keys = (f"run.dir={given.directory / 'other'}", f"checkpoint.resume={source}", *given.other)
    _forget(source)
    with Run(given, "other", *keys, "checkpoint.last=false") as run:
        figures["load_other"] = run.until("resumed").seconds
        run.until("row")
    figures["other"] = json.loads((given.directory / "other/run.json").read_text())["mesh"]


def hugging_face(given: argparse.Namespace, figures: dict[str, Any]) -> None:
    """It becomes a Hugging Face folder in bfloat16, which a run starts from."""
    source, out = given.directory / "run", given.directory / "hf"
    begun = time.perf_counter()
    words = ["-m", "dtron", "convert", "to-hf", str(source), str(out), "--dtype", "bfloat16"]
    with (given.directory / "convert.log").open("w") as log:
        process = _start([*_torchrun(given.ranks), *words], log)
        try:
            failed = process.wait(_left(given))
        except subprocess.TimeoutExpired:
            process.terminate()
            failed = process.wait()
    if failed:
        raise EndedError(f"dtron convert: {(given.directory / 'convert.log').read_text()[-3000:]}")
    figures["to_hf"] = time.perf_counter() - begun
    keys = (f"run.dir={given.directory / 'from-hf'}", f"checkpoint.initial={out}")
    _forget(out)
    with Run(given, "from-hf", *keys, "checkpoint.last=false") as run:
        figures["load_hf"] = run.until("weights").seconds
        run.until("row")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="keys of all runs, as train.py takes them")
    parser.add_argument("--config", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument(
        "--directory", type=Path, required=True, help="for two checkpoints at a time"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument(
        "--other", action="append", default=[], help="a key of the other layout; may be repeated"
    )
    parser.add_argument("--hf", action="store_true", help="Hugging Face's format too")
    parser.add_argument("--write-gib", type=float, default=4.0, help="of the plain write")
    parser.add_argument("--minutes", type=float, default=9.0, help="what is not done then is left")
    return parser


def _left(given: argparse.Namespace) -> float:
    return max(0.0, given.deadline - time.monotonic())


def _write_speed(folder: Path, gib: float) -> float:
    """GB/s of one process that writes a file and waits until the disk has it."""
    piece = os.urandom(1 << 26)
    begun = time.perf_counter()
    with (folder / "write").open("wb", buffering=0) as file:
        for _ in range(max(1, round(gib * 2**30 / len(piece)))):
            file.write(piece)
        os.fsync(file.fileno())
        size = file.tell()
    seconds = time.perf_counter() - begun
    (folder / "write").unlink()
    return size / seconds / 1e9


def _forget(folder: Path) -> None:
    """Drop its tensors' files from the page cache."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _table(figures: dict[str, Any]) -> list[str]:
    return [f"{figures[key]:10.3f}  {label}" for key, label in TABLE if key in figures]


def _torchrun(ranks: int) -> list[str]:
    base = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*base, "--nproc-per-node", str(ranks)]


def _start(command: list[str], out: Any = subprocess.PIPE) -> subprocess.Popen:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=env)


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return 0
    return int(stat.rsplit(")", 1)[1].split()[1])


if __name__ == "__main__":
    sys.exit(main())
