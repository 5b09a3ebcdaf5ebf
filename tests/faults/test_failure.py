"""Which rank has failed first, and which errors tell of another one."""

import os
import socket
import time

import pytest
import torch.distributed as dist
from torch._inductor.exc import InductorError

from dtron.cli import _refuse
from dtron.errors import PeerError
from dtron.faults.failure import FirstFailure, is_of_lost_peer

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]"
NCCL = "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error"
REMOTE = (
    "NCCL error in: NCCLUtils.cpp:94, unhandled\nncclRemoteError: A call failed possibly due to"
)
RECV = "Failed to recv, got 0 bytes. Connection was likely closed."


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("[pair.cc:462] Connection reset by peer"), True),
        (dist.DistBackendError(NCCL), True),
        (RuntimeError("[a/pair.cc:9] Read error [10.0.0.1]:7: Connection reset by peer"), True),
        (dist.DistBackendError(f"Gloo connectFullMesh failed with {GLOO}"), True),
        (dist.DistBackendError(REMOTE), True),
        (dist.DistNetworkError(RECV), True),
        (dist.DistNetworkError("Connection reset by peer"), True),
        (RuntimeError("Broken pipe"), False),  # nothing of gloo's
        (RuntimeError("cannot read 'connection refused.txt': failed to recv"), False),
        (RuntimeError(f"the text was {NCCL!r}"), False),
        (
            dist.DistBackendError("NCCL error in: a.cpp:1, unhandled system error: Broken pipe"),
            False,
        ),
        (dist.DistNetworkError("no route to the host of connection refused by peer"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (dist.DistBackendError("NCCL error: unhandled cuda error"), False),
        (InductorError(BrokenPipeError(32, "Broken pipe"), None), False),
        (NotImplementedError("Broken pipe"), False),  # of RuntimeError's subclasses
        (BrokenPipeError(32, "Broken pipe"), False),  # a child's
        (ConnectionResetError(104, "Connection reset by peer"), False),  # a store of checkpoints
    ],
)
def test_errors_of_connections_to_ranks(error: Exception, lost: bool) -> None:
    assert is_of_lost_peer(error) == lost


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtron.faults.failure._SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        failure, begun = FirstFailure(1, 2, "attempt"), time.monotonic()
        assert not failure.reported_by_peer()
        assert failure.claim()
        assert time.monotonic() - begun < 5


def test_the_first_failure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True)
    monkeypatch.setitem(os.environ, "MASTER_ADDR", "127.0.0.1")
    monkeypatch.setitem(os.environ, "MASTER_PORT", str(store.port))
    first, second = (FirstFailure(rank, 2, "attempt") for rank in range(2))
    assert not first.reported_by_peer()
    assert second.claim()
    assert second.claim()
    assert not first.claim()
    assert first.reported_by_peer()
    assert not FirstFailure(0, 2, "the next attempt").reported_by_peer()


def test_a_rank_that_torchrun_has_stopped_waits_for_no_second_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    assert _refuse(PeerError("lost another rank", stopped=True)) == 1
