"""The command lines of train.py and of `dtron COMMAND`."""

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dtron
from dtron.config import RunConfig, choices, fields, is_automatic
from dtron.errors import (
    ArgumentParser,
    CheckpointError,
    ConfigError,
    DtronError,
    NoProgressError,
    OutOfMemoryError,
    PeerError,
    RankError,
    check_words,
    hint_of_weights,
    nearest,
)
from dtron.io.filesystem import open_own
from dtron.run.directory import check_not_moved
from dtron.setup.versions import warn_untested

_GRACE_SECONDS = 10
_LATER_SECONDS = 60
"""Added to the timestamp of a secondary failure, so that torchrun reports the first failure."""
_CLOSED = 141
"""Exit status if the reader of stdout has closed the pipe: 128 plus the number of SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train according to the command-line arguments; return the exit status."""
    try:
        check_words(sys.argv[1:] if arguments is None else arguments)
        options = _parser().parse_intermixed_args(arguments)
        warn_untested()
        config = RunConfig.load(options.config, options.overrides, _completed)
        check_not_moved(options.config, config.run.dir, options.overrides)
        if options.dry_run:
            from dtron.plan.command import dry_run  # imports torch, which --help does not need

            return _to_reader(lambda: dry_run(config, options.hardware))
        if options.hardware:
            raise ConfigError(
                f"--hardware {options.hardware} has no effect without --dry-run; add --dry-run"
            )
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # `StopSignal` unblocks it
        _train(config)
    except DtronError as error:
        return _refuse(error)
    return 0


def _train(config: RunConfig) -> None:
    gc.disable()  # a third of the time of the imports
    from dtron.plan.automatic import at_start
    from dtron.training.trainer import Trainer  # imports torch

    gc.enable()
    trainer = Trainer(config, at_start)
    config = trainer.config
    try:
        if trainer.place.device.type == "cpu":  # on GPUs, the allocator raises an error
            from dtron.plan.remedies import check_step_memory  # imported only if it is needed

            check_step_memory(config, trainer.place)
        trainer.fit()
    except OutOfMemoryError as error:
        from dtron.plan.remedies import remedies

        advice = remedies(config, trainer.place, error.room, error.needed)
        raise RankError(f"{error}; {advice}") from error


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    from dtron.checkpoint.initial_weights import (
        fill_from_initial,  # imports torch, which --help and most errors do not need
    )

    return fill_from_initial(values)


def commands(arguments: Sequence[str] | None = None) -> int:
    """Run `dtron COMMAND ...`; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in ("--version", "version"):
            print(f"dtron {dtron.__version__}")
            return 0
        if not words or words[0] in ("-h", "--help", "help"):
            print(_commands_help())
            return 0 if words else 2
        if words[0] not in COMMANDS:
            raise ConfigError(_unknown_command(words))
        if words[0] != "train" and not {"-h", "--help"} & set(words):
            warn_untested()
        return COMMANDS[words[0]][0](words[1:])
    except DtronError as error:
        return _refuse(error)


def _bench(arguments: Sequence[str]) -> int:
    from dtron.bench.command import main as bench  # imports torch, which --help does not need

    return bench(arguments)


def _convert(arguments: Sequence[str]) -> int:
    from dtron.checkpoint.convert import (
        main as convert,  # imports torch, which `dtron --help` does not need
    )

    paths = [word for word in arguments[1:] if not word.startswith("-")]
    if arguments[:1] != ["from-hf"] or not paths:
        return convert(arguments)
    if _is_of_dtron(Path(paths[0])):
        raise ConfigError(
            f"{paths[0]} is a run or checkpoint of dtron, but from-hf reads a Hugging Face folder; "
            "to export it, use dtron convert to-hf; to train from it, set checkpoint.initial"
        )
    try:
        return convert(arguments)
    except CheckpointError as error:
        if not (hint := hint_of_weights(paths[0])):
            raise
        raise CheckpointError(f"{error}{hint}") from error


def _is_of_dtron(folder: Path) -> bool:
    own = ("dtron.json", "checkpoints", "run.json")
    return any((folder / name).exists() for name in own)


def _plan(arguments: Sequence[str]) -> int:
    from dtron.plan.command import main as plan  # imports torch, which --help does not need

    return _to_reader(lambda: plan(arguments))


def _memory(arguments: Sequence[str]) -> int:
    from dtron.plan.memory_command import main as memory  # imports torch, as the others

    return _to_reader(lambda: memory(arguments))


def _data(arguments: Sequence[str]) -> int:
    from dtron.data.command import main as data  # imports torch, which --help does not need

    return _to_reader(lambda: data(arguments))


def _eval(arguments: Sequence[str]) -> int:
    from dtron.inference.command import evaluate  # imports torch, which --help does not need

    return _to_reader(lambda: evaluate(arguments))


def _generate(arguments: Sequence[str]) -> int:
    from dtron.inference.command import generate  # imports torch, which --help does not need

    return _to_reader(lambda: generate(arguments))


def _serve_check(arguments: Sequence[str]) -> int:
    from dtron.inference.serve_check import main as check  # imports torch, as the others

    return _to_reader(lambda: check(arguments))


def _to_reader(command: Callable[[], int]) -> int:
    """Run a command that prints; return `_CLOSED` if the reader closes the pipe, as `head` does."""
    try:
        status = command()
        sys.stdout.flush()  # raises BrokenPipeError here and not at exit
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards buffered output
        return _CLOSED
    return status


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (main, "train a model, under torchrun; the same as train.py"),
    "plan": (_plan, "predict the memory and speed of a run, without a GPU"),
    "data": (_data, "prepare, show and count training data"),
    "bench": (_bench, "measure the speed of a run, for every combination of settings"),
    "eval": (_eval, "print the loss of trained weights on validation sets"),
    "generate": (_generate, "continue a text with trained weights"),
    "convert": (
        _convert,
        "convert Hugging Face folders to checkpoints and back",
    ),
    "serve-check": (_serve_check, "compare a checkpoint's logits with its export's"),
    "memory": (_memory, "show who held a run's memory, next to the plan"),
}


def _unknown_command(words: Sequence[str]) -> str:
    listed = f"the commands are {', '.join(COMMANDS)}"
    if words[0].partition("=")[0] == "--config":
        return f"no command before --config; write dtron train {' '.join(words)}; {listed}"
    return f"unknown command {words[0]!r}{nearest(words[0], COMMANDS)}; {listed}"


def _commands_help() -> str:
    lines = [f"  {name:13}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: dtron COMMAND ...; dtron COMMAND --help", "", *lines])


def _refuse(error: DtronError) -> int:
    """Print an error once; return or exit with status 1.

    A rank prints its RankError at once, and never prints a PeerError. Any other error is expected
    on all ranks: the first rank of each host prints it and ends, so that torchrun ends the other
    ranks. A rank that is still alive after `_GRACE_SECONDS` prints its error, which only it has.
    """
    import torch.distributed as dist  # --help does not need torch

    from dtron.run.process import Place, drop_unwritten

    try:
        place = Place.of_environment()
    except ConfigError:  # a variable of the environment is invalid
        place = Place(rank=0, local_rank=0, world_size=1)
    alone, shown = isinstance(error, RankError), str(error).replace("\n", "\n       ")
    first = alone or (place.local_rank == 0 and not isinstance(error, PeerError))
    _write_error_file(error, time.time() + (0 if first else _LATER_SECONDS))
    if isinstance(error, PeerError):
        if not error.stopped:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun sends it to end this rank
            time.sleep(_GRACE_SECONDS)
    elif place.local_rank == 0 or alone:
        print(f"error: {shown}", file=sys.stderr, flush=True)
    else:
        time.sleep(_GRACE_SECONDS)
        print(f"error on rank {place.rank}: {shown}", file=sys.stderr, flush=True)
    if isinstance(error, NoProgressError) and "TORCHELASTIC_RUN_ID" in os.environ:
        os.kill(os.getppid(), signal.SIGTERM)  # otherwise torchrun restarts all ranks again
    if place.world_size > 1 and (alone or isinstance(error, PeerError) or dist.is_initialized()):
        drop_unwritten()
        os._exit(1)  # a normal exit aborts if threads are waiting in collectives
    return 1


def _write_error_file(error: DtronError, seconds: float) -> None:
    """Write an error for torchrun's failure report, which otherwise shows `<N/A>`.

    torchrun reports the rank with the smallest time, here `seconds` since the epoch, as the first
    failure. Format: `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`.
    """
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    message = {"message": f"error: {error}", "extraInfo": {"timestamp": str(int(seconds))}}
    with contextlib.suppress(OSError), open_own(Path(path), os.O_WRONLY) as file:
        file.truncate(0)
        file.write(json.dumps({"message": message}).encode())


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="train.py",
        description="Train a model: torchrun --nproc-per-node N train.py --config FILE",
        epilog=_field_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a TOML file")
    parser.add_argument(
        "--dry-run", action="store_true", help="run all checks of a start, print the plan and exit"
    )
    rows = "hardware of dtron plan, for --dry-run; default: this machine's GPU, or h100"
    parser.add_argument("--hardware", default="", metavar="NAME", help=rows)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="overrides a key of the file"
    )
    return parser


def _field_help() -> str:
    """Return every key with its default, docstring and legal values, for --help."""
    lines, section = ["keys:"], ""
    for key, default, doc in fields(RunConfig):
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append(f"\n[{section}]")
        shown = list(default) if isinstance(default, tuple) else default
        shown = "auto" if is_automatic(*key.split(".")) else shown
        lines.append(f"  {key} = {json.dumps(shown)}")
        lines.append(f"      {doc}")
        if legal := choices(*key.split(".")):
            lines.append(f"      One of {', '.join(json.dumps(value) for value in legal)}.")
    return "\n".join(lines)
