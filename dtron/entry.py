"""Entry points of train.py and `dtron`, which handle signals before slow imports."""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def train() -> int:
    """Train according to the command line; return the exit status."""
    _leave_out_frames()
    _end_on_signals()
    _end_with_launcher()
    from dtron.cli import main

    return main()


def commands() -> int:
    """Run `dtron COMMAND ...`; return the exit status."""
    _leave_out_frames()
    if sys.argv[1:2] == ["train"]:
        _end_on_signals()
        _end_with_launcher()
    try:
        from dtron.cli import commands

        return commands()
    except KeyboardInterrupt:  # not from `train`; the command has cleaned up
        print("SIGINT: stopped", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def _leave_out_frames() -> None:
    """Hide torch's C++ warnings: each store of an ended rank logs a page of C++ frames.

    Errors are still logged. torch reads the level when it is imported.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _end_on_signals() -> None:
    """Exit at once on SIGINT and SIGTERM before and after training, when there is nothing to save.

    Block SIGUSR1 until `StopSignal` handles it, so that all ranks stop together.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def _end_with_launcher() -> None:
    """Make Linux send SIGTERM to this rank if torchrun dies, so that the rank saves and ends.

    On other systems the rank continues to train.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    import ctypes  # after the signal handlers are set

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1 and not _is_launcher("/proc/1/cmdline"):
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun died before the call of prctl


def _is_launcher(command: str) -> bool:
    """Whether process 1 is torchrun or a Python script, as in some containers.

    Args:
        command: path of the file with the command line of process 1.
    """
    try:
        with open(command, "rb") as file:
            words = file.read()
    except OSError:  # hidden by the mount option hidepid
        return True
    return b"python" in words or b"torch" in words


def _end(number: int, _frame: object) -> None:
    # No exception: callbacks may swallow it, and a library that is being imported may print it.
    try:  # noqa: SIM105, contextlib is not imported yet
        sys.stdout.flush()
    except Exception:
        pass
    if os.environ.get("RANK", "0") == "0":
        name = signal.Signals(number).name
        os.write(2, f"{name}: stopped outside of training, nothing to save\n".encode())
    os._exit(128 + number)
