"""Write checkpoint files and compute their SHA-256, in this process or in a separate process.

A separate process competes with training for cores and the disk, but not for Python's GIL, and can
be killed when a disk does not answer. It reads the data from memory that it shares with its parent.
It is started with `python -m`, so that it does not import the training script, and imports only the
standard library (and fsspec for URLs). Requests and replies are lines of JSON:

    {"target": PATH, "header": TEXT, "parts": [[offset, bytes], ...]}  ->  {"bytes": N, "sha256": S}
    {"target": PATH, "source": PATH}                                   ->  {"bytes": N, "sha256": S}

After an error, the reply is {"error": TEXT}. The process ends when its parent ends: its stdin is
closed, and on Linux the kernel kills it.
"""

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtron.io.untrusted import open_regular

_BLOCK_BYTES = 1 << 24  # size of a block that stays in the CPU's cache
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_NICENESS = 5  # lower priority than training


class HashedFile:
    """A new file that is hashed while it is written.

    Args:
        target: a path, or a URL.
    Raises:
        OSError: from every method: the disk is full, or the file exists or cannot be written.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._hash, self._bytes = hashlib.sha256(), 0
        self._file = _create(target)

    def put(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            n = self._file.write(view[:_BLOCK_BYTES])  # may write less if the disk becomes full
            self._hash.update(view[:n])
            self._bytes += n
            view = view[n:]

    def close(self) -> tuple[int, str]:
        """Wait until the file is stored; return its size in bytes and its SHA-256.

        Stored means: on the disk or in the object store.
        """
        if "://" not in self.target:
            os.fsync(self._file.fileno())
        self._file.close()
        return self._bytes, self._hash.hexdigest()

    def abandon(self) -> None:
        """Close an incomplete file without uploading it to a store."""
        with contextlib.suppress(Exception):
            if "://" in self.target and not self._file.closed and hasattr(self._file, "discard"):
                self._file.discard()
                self._file.closed = (
                    True  # otherwise close(), also by garbage collection, would upload it
                )
            self._file.close()


def _create(target: str) -> Any:
    if "://" not in target:
        return Path(target).open("xb", buffering=0)
    from dtron.io.remote_path import Remote

    return Remote.of(target).open("wb")


def write_file(target: str, blocks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a whole file; return its size in bytes and its SHA-256.

    Raises OSError: the file cannot be written.
    """
    file = HashedFile(target)
    try:
        for block in blocks:
            file.put(block)
        return file.close()
    finally:
        file.abandon()


def _content(request: dict[str, Any], memory: memoryview) -> Iterable[bytes | memoryview]:
    if "source" in request:
        with open_regular(request["source"]) as source:
            while block := source.read(_BLOCK_BYTES):
                yield block
        return
    header = request["header"].encode()
    yield len(header).to_bytes(8, "little") + header
    for offset, size in request["parts"]:
        yield memory[offset : offset + size]


class WriterProcess:
    """A child process that writes files for this process.

    Args:
        descriptor: file descriptor of the shared memory; -1: no shared memory.
        size: size of the shared memory in bytes.
    """

    COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "dtron.io.writer_process")

    def __init__(self, descriptor: int = -1, size: int = 0) -> None:
        home = str(Path(__file__).resolve().parents[2])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [*self.COMMAND, str(descriptor), str(size), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor] if descriptor >= 0 else [],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            text=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def write(self, target: str, header: str, parts: list[tuple[int, int]]) -> tuple[int, str]:
        """Write a file: a header, then parts of the shared memory.

        Args:
            parts: (offset, size) of each part in bytes.
        Returns:
            The size of the file in bytes and its SHA-256.
        Raises:
            OSError: the file cannot be written, or the process has died.
        """
        return self._request({"target": target, "header": header, "parts": parts})

    def copy(self, source: str, target: str) -> tuple[int, str]:
        """Copy a file. Returns and raises: as `write`."""
        return self._request({"target": target, "source": source})

    def _request(self, request: dict[str, Any]) -> tuple[int, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process has died: there will be no reply
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            status = self._process.wait()
            raise OSError(f"the process that writes checkpoints has died (exit status {status})")
        reply = json.loads(line)
        if "error" in reply:
            raise OSError(reply["error"])
        return reply["bytes"], reply["sha256"]

    def kill(self) -> None:
        """Kill the process. A process that waits for a dead disk may end only later."""
        self._process.kill()


def main() -> None:
    """Run the writer process; its arguments are descriptor, size and the parent's process id."""
    descriptor, size, parent = (int(word) for word in sys.argv[1:4])
    _exit_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent handles signals and may still save
    os.nice(_NICENESS)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not be read as a reply
    shared = mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b""
    for line in sys.stdin:
        replies.write(json.dumps(_handle(json.loads(line), memoryview(shared))) + "\n")
        replies.flush()


def _handle(request: dict[str, Any], memory: memoryview) -> dict[str, Any]:
    try:
        n_bytes, sha256 = write_file(request["target"], _content(request, memory))
    except Exception as error:  # the parent raises it
        return {"error": str(error) or type(error).__name__}
    return {"bytes": n_bytes, "sha256": sha256}


def _exit_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        sys.exit()


if __name__ == "__main__":
    main()
