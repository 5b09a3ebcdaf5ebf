"""Where train.py and `dtron` begin: signals are answered before anything slow is imported."""

import contextlib
import os
import signal
import sys
from types import FrameType


def train() -> int:
    """Train as the arguments of the command line say; returns the exit status."""
    _end_on_signals()
    from dtron.cli import main

    return main()


def commands() -> int:
    """Run `dtron COMMAND ...`; returns the exit status."""
    if sys.argv[1:2] == ["train"]:
        _end_on_signals()
    try:
        from dtron.cli import commands

        return commands()
    except KeyboardInterrupt:  # other commands clean up behind them
        print("SIGINT: stopped", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def _end_on_signals() -> None:
    """Until training takes signals over, and after it: there is nothing to save. SIGUSR1 waits, so
    that all ranks stop together."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def _end(number: int, _frame: FrameType | None) -> None:
    # An exception would be lost in callbacks, or printed by the library that is being imported.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if os.environ.get("RANK", "0") == "0":
        name = signal.Signals(number).name
        os.write(2, f"{name}: stopped outside of training, nothing to save\n".encode())
    os._exit(128 + number)
