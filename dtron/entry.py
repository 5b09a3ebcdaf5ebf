"""Where train.py and `dtron` begin: signals are answered before anything slow is imported."""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def train() -> int:
    """Train as the arguments of the command line say; returns the exit status."""
    _leave_out_frames()
    _end_on_signals()
    _end_with_launcher()
    from dtron.cli import main

    return main()


def commands() -> int:
    """Run `dtron COMMAND ...`; returns the exit status."""
    _leave_out_frames()
    if sys.argv[1:2] == ["train"]:
        _end_on_signals()
        _end_with_launcher()
    try:
        from dtron.cli import commands

        return commands()
    except KeyboardInterrupt:  # other commands clean up behind them
        print("SIGINT: stopped", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def _leave_out_frames() -> None:
    """torch warns of each store whose rank has ended, by a page of C++ frames; it reads the level
    when it is imported. Errors stay."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _end_on_signals() -> None:
    """Until training takes signals over, and after it: there is nothing to save. SIGUSR1 waits, so
    that all ranks stop together."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def _end_with_launcher() -> None:
    """SIGTERM when torchrun dies, which cannot end its ranks then: they save and end, as for any
    SIGTERM. Linux alone has this; elsewhere ranks train on."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    import ctypes  # not before signals are answered

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1 and not _is_launcher("/proc/1/cmdline"):
        os.kill(os.getpid(), signal.SIGTERM)  # it was dead before


def _is_launcher(command: str) -> bool:
    """Whether process 1 is torchrun or a script that calls it, as in a container."""
    try:
        with open(command, "rb") as file:
            words = file.read()
    except OSError:  # hidden, by hidepid
        return True
    return b"python" in words or b"torch" in words


def _end(number: int, _frame: object) -> None:
    # An exception would be lost in callbacks, or printed by the library that is being imported.
    try:  # noqa: SIM105, contextlib is not imported yet
        sys.stdout.flush()
    except Exception:
        pass
    if os.environ.get("RANK", "0") == "0":
        name = signal.Signals(number).name
        os.write(2, f"{name}: stopped outside of training, nothing to save\n".encode())
    os._exit(128 + number)
