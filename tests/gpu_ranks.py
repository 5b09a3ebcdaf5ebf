"""Ranks that stay alive over calls, one process a GPU: CUDA, NCCL and imports start once.

    run_on_gpus(2, body, *args)     what `body(*args)` returned on each rank; skips on fewer GPUs

With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer) ranks share GPUs, so that one GPU runs the
layouts of four.

A failed call is the caller's alone: ranks that still answer serve the next call, ranks that do not
are killed, and the next call starts new ones. On CPUs the same processes use gloo, for the tests of
what runs here.
"""

import atexit
import datetime
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
import torch.distributed as dist

from tests.harness import _PRELOAD

_HOST = "127.0.0.1"
_START_SECONDS = 180  # imports and NCCL's first communicator
_CALL_SECONDS = 120
_GRACE_SECONDS = 15
"""How long the other ranks may take once one has failed: they may wait for it."""
_MOST_HANGS = 3
"""After so many calls that hung, all later ones fail at once: a run has minutes, not hours."""

Answer = tuple[str, Any]
"""A rank's traceback, empty where there is none, and what it returned."""


_SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
_MOST_SHARED = 4
_FEW_BUFFERS = {"NCCL_MAX_NCHANNELS": "4"}
"""Communicators have buffers per channel: after all layouts of two ranks 23 GB on each GPU."""
_SHARING = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # torch refuses them by default
    "NCCL_MAX_NCHANNELS": "2",  # buffers of all communicators of all ranks are on one GPU
}


def most_ranks() -> int:
    """How many ranks the GPUs here can have: one each, or more where NCCL lets them share."""
    gpus = torch.cuda.device_count()
    return max(gpus, _MOST_SHARED) if gpus and os.environ.get(_SHARE_GPUS) == "1" else gpus


class RankError(AssertionError):
    """A rank failed, died or did not answer in time."""


class Ranks:
    """n processes of one process group, over NCCL with a GPU each or over gloo.

    Args:
        device_type: "cuda" or "cpu".
    """

    def __init__(self, n: int, device_type: str = "cuda") -> None:
        self.n, self.device_type = n, device_type
        self.starts, self.hangs = 0, 0
        self._lock = threading.Lock()
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._store: dist.TCPStore | None = None

    def call(self, body: Callable[..., Any], *args: Any, seconds: int = _CALL_SECONDS) -> list[Any]:
        """Call `body(*args)` on all ranks and return what each returned, by rank.

        Args:
            body: importable; it returns what pickle can send, tensors on the host.
            seconds: how long it may take.
        Raises:
            RankError: a rank failed; the message holds the traceback of each that did.
        """
        with self._lock:
            if self.hangs > _MOST_HANGS:
                raise RankError(f"not run: {self.hangs} earlier calls of {self.n} ranks hung")
            if not self._processes:
                self._start_all()
            return self._call(body, args, seconds)

    def close(self) -> None:
        """Kill the processes; the next call starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start_all(self) -> None:
        try:
            self._start()
        except RankError:
            self.hangs += 2  # a second try may help, more would not
            raise

    def _start(self) -> None:
        # A process that forks has no CUDA in its children once it has used CUDA itself.
        kind = "spawn" if self.device_type == "cuda" else "forkserver"
        context: Any = multiprocessing.get_context(kind)
        if kind == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        else:  # of each rank; by default as many as cores, for graphs of a few kernels
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")
        self.starts += 1
        self._directory = tempfile.TemporaryDirectory()
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        for rank in range(self.n):
            ours, theirs = context.Pipe()
            place = (rank, self.n, self.device_type, self._store.port)
            stack = self._directory.name + f"/stack.{rank}"
            process = context.Process(target=_serve, args=(*place, stack, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(_START_SECONDS)  # ready, or why not

    def _call(self, body: Callable[..., Any], args: tuple, seconds: int) -> list[Any]:
        message = _message(body, args, seconds)
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            self.close()
            raise RankError("a rank died between two calls") from None
        return self._answers(seconds + 2)

    def _answers(self, seconds: float) -> list[Any]:
        """What each rank returned."""
        answers = self._collect(seconds)
        failures = [f"rank {rank}:\n{answers[rank][0]}" for rank in sorted(answers)]
        failures = [failure for rank, failure in enumerate(failures) if answers[rank][0]]
        if len(answers) == self.n and not failures:
            return [answers[rank][1] for rank in range(self.n)]
        raise RankError("\n".join(failures))

    def _collect(self, seconds: float) -> dict[int, Answer]:
        """An answer of each rank; where one failed, ranks are left in a state that serves the next
        call."""
        answers: dict[int, Answer] = {}
        end = time.monotonic() + seconds
        while len(answers) < self.n:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(open_pipes, timeout=max(0.0, end - time.monotonic()))
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                answers[rank] = self._receive(rank)
                if answers[rank][0]:
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
            if not ready:
                break
        silent = [rank for rank in range(self.n) if rank not in answers]
        failed = any(failure for failure, _ in answers.values())
        for rank in silent:
            answers[rank] = (f"no answer in {seconds:.0f} s; its stack:\n{self._stack(rank)}", None)
        if silent and not failed:
            self.hangs += 1
        if silent or (failed and not self._settles()):
            self.close()
        return answers

    def _receive(self, rank: int) -> Answer:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(5)
            code = process.exitcode
            name = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
            return f"the process ended: {name}\n{self._stack(rank)}", None

    def _stack(self, rank: int) -> str:
        """What faulthandler wrote of a rank that hangs or crashed."""
        assert self._directory is not None
        file = Path(self._directory.name, f"stack.{rank}")
        return file.read_text() if file.exists() else ""

    def _settles(self) -> bool:
        """Whether all ranks, after a failure of all, are idle and reach each other."""
        try:
            message = _message(_settle, (), _GRACE_SECONDS)
            for pipe in self._pipes:
                pipe.send_bytes(message)
            answers = [p.recv_bytes() for p in self._pipes if p.poll(_GRACE_SECONDS)]
        except (EOFError, OSError):
            return False
        return len(answers) == self.n and not any(pickle.loads(each)[0] for each in answers)


@functools.cache
def ranks_of(n: int, device_type: str = "cuda") -> Ranks:
    """The ranks of this test run, started by their first call and killed at its end."""
    ranks = Ranks(n, device_type)
    atexit.register(ranks.close)
    return ranks


def run_on_gpus(
    n: int, body: Callable[..., Any], *args: Any, seconds: int = _CALL_SECONDS
) -> list[Any]:
    """Call `body(*args)` on n GPUs and return what each rank returned; skips on fewer GPUs."""
    if most_ranks() < n:
        pytest.skip(f"needs {n} GPUs")
    return ranks_of(n).call(body, *args, seconds=seconds)


def _message(body: Callable[..., Any], args: tuple, seconds: int) -> bytes:
    """Body and arguments pickled on their own: what a rank cannot import is an answer of it."""
    return pickle.dumps((pickle.dumps(body), pickle.dumps(args), seconds))


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    torch._dynamo.reset()
    dist.barrier()


def _serve(
    rank: int, n: int, device_type: str, port: int, stack_file: str, pipe: Connection
) -> None:
    """A rank: start, answer one call after the other, end with the pipe."""
    gc.freeze()  # imported modules are no garbage, and compilers make the collector walk them
    os.environ.update(_FEW_BUFFERS, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    if os.environ.get(_SHARE_GPUS) == "1":
        os.environ.update(_SHARING)
    if device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before this process asks for CUDA
    with Path(stack_file).open("a") as stack:
        faulthandler.enable(stack)
        pipe.send_bytes(_answer(_join, (rank, n, device_type, port), _START_SECONDS, stack))
        while True:
            try:
                message = pipe.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # no tear-down: a peer may be stuck in a collective
            body, args, seconds = pickle.loads(message)
            pipe.send_bytes(_answer(_call, (body, args), seconds, stack))


def _call(body: bytes, args: bytes) -> Any:
    """Nothing of earlier calls is left: graphs, which count against a limit of recompilations,
    memory that other processes need, and what ranks share by the name of a group, which has to go
    on all of them at the same time."""
    torch._dynamo.reset()
    gc.collect()
    try:
        return pickle.loads(body)(*pickle.loads(args))
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _answer(body: Callable[..., Any], args: tuple, seconds: int, stack: TextIO) -> bytes:
    """The pickled Answer of one call."""
    stack.truncate(0)
    faulthandler.dump_traceback_later(seconds, file=stack)  # where it hangs
    try:
        return pickle.dumps(("", body(*args)))
    except BaseException:
        return pickle.dumps((traceback.format_exc(), None))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _join(rank: int, n: int, device_type: str, port: int) -> None:
    """Start the process group as the Trainer does."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")  # no TF32
    device = None
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.TCPStore(_HOST, port, is_master=False),
        rank=rank,
        world_size=n,
        timeout=datetime.timedelta(seconds=600),  # `Ranks` ends what hangs, and sooner
        device_id=device,
    )
    dist.barrier()
