"""torchrun that ends in one line and with its ranks' exit code, for torchrun.sh.

Ranks print their errors themselves; torchrun's log of them and its traceback are left out. LOGLEVEL
brings the log back.
"""

import ctypes
import logging
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LOST = 69
"""Exit status where agents of other hosts, or their store, are not there; host.py tries again."""


def main() -> int:
    """Run as torchrun's arguments say; returns the exit status."""
    if sys.platform == "linux":  # torchrun.sh cannot end it when it is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # ranks inherit it, and lose none
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # in this process alone
    try:
        return _run()
    except KeyboardInterrupt:  # before torchrun answers signals
        return _end("stopped by SIGINT", 128 + 2)


def _run() -> int:
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    if level is None and "LOGLEVEL" not in os.environ:  # torch reads it when it is imported
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # a lost store is a page of C++ frames
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    if level is None:
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)  # ranks have their own
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        return _end(f"rank {rank} ended first, with exit code {failure.exitcode}", code)
    except SignalException as error:
        return _end(f"stopped by {error.sigval.name}", 128 + error.sigval)
    except (DistError, RendezvousError) as error:  # also a port in use
        return _end(str(error).splitlines()[0], _LOST)
    except ValueError as error:  # wrong arguments
        return _end(str(error).splitlines()[0], 1)
    return 0


def _end(why: str, code: int) -> int:
    print(f"torchrun: {why}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
