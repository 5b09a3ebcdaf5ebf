"""Runs a function on n gloo ranks in milliseconds: forkserver children with torch preloaded."""

import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd",
    "torch._inductor.debug",
    "torch._inductor.fx_passes.post_grad",
    "torch.export._trace",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "dtron.training.trainer",
    "s3fs",  # skipped, as transformers, where it is not installed
    "tests.parallelisms.parity",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
]
_TIMEOUT_SECONDS = 180  # of a collective: one rank may compile while the others wait
_CRASHES = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS}


class _CrashError(Exception):
    """A rank's process was ended by a fault in native code."""


def run_ranks(
    n: int, body: Callable[..., Any], *args: Any, seconds: int = _TIMEOUT_SECONDS
) -> list[Any]:
    """Call `body(*args)` on n ranks of a gloo process group and return what each gave, by rank.

    `body` must be importable. The first rank that fails ends the others, and its traceback is
    raised here.

    All that is tested is Python, which cannot corrupt a heap. torch on gloo sometimes does (seen:
    `malloc(): unaligned tcache chunk detected`, in a backward under tp). Ranks that crash so are
    started once more, with a warning; ranks that crash again fail.

    Args:
        seconds: how long `body` may take; a single collective has three minutes in any case.
    """
    try:
        return _run(n, body, args, seconds)
    except _CrashError as crash:
        warnings.warn(f"{crash}; its stack is above. Started once more.", stacklevel=2)
    try:
        return _run(n, body, args, seconds)
    except _CrashError as crash:
        raise AssertionError(f"twice: {crash}") from None


def _run(n: int, body: Callable[..., Any], args: tuple, seconds: int) -> list[Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        pipes, processes = [], []
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, n, store, theirs, body, args, seconds)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], processes: list[BaseProcess], seconds: int) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=seconds + _TIMEOUT_SECONDS)
        assert ready, f"ranks hang; finished: {sorted(results)}"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failure, results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise _death(rank, processes[rank]) from None
            assert failure is None, f"rank {rank}:\n{failure}"
    return [results[rank] for rank in range(len(pipes))]


def _death(rank: int, process: BaseProcess) -> Exception:
    process.join(_TIMEOUT_SECONDS)
    number = -(process.exitcode or 0)
    if number in _CRASHES:
        return _CrashError(f"rank {rank} crashed by {signal.Signals(number).name}")
    return AssertionError(f"rank {rank} died")


def _rank(
    rank: int, n: int, store: str, pipe: Connection, body: Callable, args: tuple, seconds: int
) -> None:
    gc.freeze()  # what is imported is no garbage: compilers have the collector walk it a second
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # more ranks than GPUs: these tests are the CPU's
    faulthandler.enable()  # where a rank crashes
    faulthandler.dump_traceback_later(seconds - 5)  # where a rank hangs
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=n,
            timeout=datetime.timedelta(seconds=_TIMEOUT_SECONDS),
        )
        result = body(*args)
        dist.barrier()
        pipe.send_bytes(pickle.dumps((None, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        os._exit(0)  # no tear-down: a peer may be stuck in a collective
