"""Read torch's flight recorder: the collectives that this process has issued, and their state.

The records come over HTTP from torch's worker server, on a Unix socket of this process. torch's
debug server reads them in the same way. The first call of `recorded` starts the worker server.
"""

import atexit
import contextlib
import functools
import http.client
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed.elastic.control_plane import worker_main

_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
"""Handlers for gloo, and for NCCL if torch was built with it."""
_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
_SECONDS = 10.0


def recorded(active: bool = False) -> list[dict[str, Any]]:
    """Return the records of all collectives, oldest first; empty if the recorder cannot be read.

    Args:
        active: return only collectives that are not done.
    """
    query = f"includecollectives=true&onlyactive={str(active).lower()}"
    found = [entry for handler in _HANDLERS for entry in _answer(handler, query)]
    found = [entry for entry in found if not (active and entry.get("retired"))]
    return sorted(found, key=lambda entry: entry["time_created_ns"])


def _answer(handler: str, query: str) -> list[dict[str, Any]]:
    try:
        with contextlib.closing(_Connection(_server())) as connection:
            connection.request("POST", f"/handler/{handler}?{query}")
            response = connection.getresponse()
            return json.loads(response.read()).get("entries", []) if response.status == 200 else []
    except (OSError, http.client.HTTPException, ValueError):
        return []


@functools.cache
def _server() -> str:
    """Start the server, which runs until this process ends; return the path of its socket."""
    opened = contextlib.ExitStack()
    path = str(Path(opened.enter_context(tempfile.TemporaryDirectory())) / "worker")
    previous = os.environ.get(_SOCKET)
    os.environ[_SOCKET] = path  # read by worker_main
    opened.enter_context(worker_main())  # type: ignore[arg-type]
    if previous is None:
        del os.environ[_SOCKET]
    else:
        os.environ[_SOCKET] = previous
    atexit.register(opened.close)
    return path


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)
