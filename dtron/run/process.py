"""Set-up of a rank's process: ranks, device, logging, process groups and seeds.

There is one process per rank, started by torchrun, or a single process. Collectives on GPU tensors
use NCCL. Ranks agree on decisions in a gloo group on CPU tensors, without waiting for the GPU.
"""

import atexit
import contextlib
import datetime
import errno
import io
import logging
import os
import random
import re
import sys
import uuid
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.logging import RichHandler

from dtron.config.schema import MAX_RANKS
from dtron.errors import ConfigError, printable, shorten
from dtron.io.filesystem import dangling_link

log = logging.getLogger("dtron")
_INTEGER = re.compile(r"[0-9]{1,18}", re.ASCII)
_PROBE_BYTES = 1 << 16
"""Size of the test file at a start; an empty file can be written even to a full disk."""


@dataclass(frozen=True)
class Place:
    """Rank and world size of this process, from torchrun's environment; default: world size 1."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int = 0
    """Number of restarts of the job by torchrun after failures."""
    local_world_size: int = 1
    """Number of ranks on this host."""
    job: str = ""
    """torchrun's id of the job, unchanged by restarts; "" without an id."""

    @classmethod
    def of_environment(cls) -> "Place":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and TORCHELASTIC_*.

        Raises:
            ConfigError: a variable is not an integer, or out of range.
        """
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        world_size = environment_integer("WORLD_SIZE", 1, 1, MAX_RANKS)
        return cls(
            rank=environment_integer("RANK", 0, 0, world_size - 1),
            local_rank=environment_integer("LOCAL_RANK", 0, 0, MAX_RANKS - 1),
            world_size=world_size,
            attempt=environment_integer("TORCHELASTIC_RESTART_COUNT", 0, 0, 2**31 - 1),
            local_world_size=environment_integer("LOCAL_WORLD_SIZE", world_size, 1, world_size),
            job="" if job == "none" else job,
        )

    @property
    def device(self) -> torch.device:
        """This process's GPU, or the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")


_LAUNCHER = "start ranks with torchrun, or correct it (RANK < WORLD_SIZE)"


def environment_integer(
    variable: str, default: int, least: int, most: int, fix: str = _LAUNCHER
) -> int:
    """Read an integer environment variable. Raises ConfigError: not an integer, or out of range."""
    if (text := os.environ.get(variable)) is None:
        return default
    if not _INTEGER.fullmatch(text) or not least <= int(text) <= most:
        raise ConfigError(
            f"{variable} = {shorten(text)!r} in the environment is not an integer from {least} to "
            f"{most}; {fix}"
        )
    return int(text)


class _StdoutHandler(logging.StreamHandler):
    """Logs to stdout.

    If the reader of stdout has ended or the disk is full, lines are dropped and training continues.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(error := sys.exc_info()[1], OSError):
            super().handleError(record)
        elif error.errno == errno.EPIPE:
            drop_unwritten()


def drop_unwritten() -> None:
    """Flush stdout; if that fails, discard the buffer, which would raise when the process ends."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (AttributeError, ValueError):  # stdout is None or closed
        return


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters, which a terminal would execute."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up_logging(place: Place, console: Console) -> None:
    """Log to the console: everything on rank 0, only errors on other ranks."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(_PrintableFormatter("%(message)s"))
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        atexit.unregister(drop_unwritten)
        atexit.register(drop_unwritten)
        handler = _StdoutHandler(sys.stdout)
        handler.setFormatter(_PrintableFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if place.rank == 0 else logging.ERROR)
    # In torch 2.13, each FSDP unit warns about in-place operations on its outputs; dtron has none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


@contextlib.contextmanager
def process_group(place: Place, timeout_seconds: int, store: dist.Store | None) -> Iterator[None]:
    """Create the default process group for this context; an existing group is used unchanged.

    Args:
        store: key-value store of this attempt's ranks, from `rendezvous.meet`.
    """
    if dist.is_initialized():
        yield
        return
    device = place.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
    )
    yield
    dist.destroy_process_group()  # not after an error: other ranks may be inside a collective


def warn_of_shared_store(place: Place) -> None:
    """Warn if torchrun shares its store with ranks on several hosts.

    A torchrun agent that restarts on a lost host would not get the new address of the store.
    """
    hosts, get = environment_integer("GROUP_WORLD_SIZE", 1, 1, MAX_RANKS), os.environ.get
    shares = get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank == 0 and hosts > 1 and shares and get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        log.warning(
            "a host that is lost and restarts cannot rejoin torchrun on %d hosts; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun on every host",
            hosts,
        )


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed torch, numpy and random; turn on deterministic kernels if `deterministic`.

    The seeds are for user code: dtron's random numbers do not depend on global state.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic


def host_group(timeout_seconds: int) -> dist.ProcessGroup:
    """Return a gloo group over all ranks, for collectives on CPU tensors."""
    if dist.get_backend() == "gloo":
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return new_host_group(timeout_seconds)


def new_host_group(timeout_seconds: int) -> dist.ProcessGroup:
    """Create a gloo group over all ranks, with separate connections."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every rank is in the host group"
    return group


def set_timeouts(groups: Iterable[dist.ProcessGroup], timeout_seconds: int) -> None:
    """Set the time-out of process groups; a device mesh creates its groups with torch's default."""
    for group in groups:
        group.set_timeout(datetime.timedelta(seconds=timeout_seconds))


def use_compile_cache(folder: str) -> None:
    """Keep what torch.compile makes in `folder`, so that later starts find it; empty: do nothing.

    Ranks share the folder. A graph holds the index of its GPU, so that each rank of a host compiles
    its own graphs, all at the same time; ranks with one index on several hosts share them, and all
    ranks share Triton's kernels. Call it before the first compilation.

    Raises:
        ConfigError: the folder cannot be written.
    """
    if not folder:
        return
    path = Path(os.path.abspath(os.path.expanduser(folder)))
    try:
        path.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    except OSError as error:
        raise ConfigError(
            f"compile.cache_dir = {shorten(folder)!r} cannot be written: "
            f"{error.strerror or error}; use another folder, or leave it out"
        ) from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)
    os.environ["TRITON_CACHE_DIR"] = str(path / "triton")  # torch's default is one for each GPU


def check_writable(path: Path) -> None:
    """Write a test file to a directory and remove it. Raises OSError: that fails.

    For a directory that does not exist, the nearest parent that exists is tested. Processes of
    several hosts may test the same directory at the same time.
    """
    if link := dangling_link(path):
        what = "it" if link == path else str(link)
        raise OSError(f"{what} is a link to {os.readlink(link)}, which does not exist")
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    probe = existing / f".write-test-{uuid.uuid4().hex}"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(existing)) from None
    finally:
        with contextlib.suppress(OSError):  # the error of the write matters
            probe.unlink()
