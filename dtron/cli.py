"""The command lines of train.py and of `dtron COMMAND`."""

import argparse
import contextlib
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
"""Added to the time of a failure that is not the first cause, in torchrun's report."""
_CLOSED = 141
"""Exit status of programs whose reader has closed the pipe: 128 plus SIGPIPE's number."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit status."""
    try:
        check_words(sys.argv[1:] if arguments is None else arguments)
        options = _parser().parse_intermixed_args(arguments)
        warn_untested()
        config = RunConfig.load(options.config, options.overrides, _completed)
        check_not_moved(options.config, config.run.dir, options.overrides)
        if options.dry_run:
            from dtron.plan.command import dry_run  # after --help, which needs no torch

            return _to_reader(lambda: dry_run(config, options.hardware))
        if options.hardware:
            raise ConfigError(f"--hardware {options.hardware} has no effect without --dry-run")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # until `StopSignal` takes it
        _train(config)
    except DtronError as error:
        return _refuse(error)
    return 0


def _train(config: RunConfig) -> None:
    from dtron.plan.automatic import at_start
    from dtron.training.trainer import Trainer  # which needs torch

    trainer = Trainer(config, at_start)
    config = trainer.config
    try:
        if trainer.place.device.type == "cpu":  # a GPU's allocator fails with an error
            from dtron.plan.remedies import check_step_memory  # other runs need no planner

            check_step_memory(config, trainer.place)
        trainer.fit()
    except OutOfMemoryError as error:
        from dtron.plan.remedies import remedies

        advice = remedies(config, trainer.place.world_size, error.room, error.needed)
        raise RankError(f"{error}; {advice}") from error


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    from dtron.checkpoint.initial_weights import (
        fill_from_initial,  # not before --help and most errors, which need no torch
    )

    return fill_from_initial(values)


def commands(arguments: Sequence[str] | None = None) -> int:
    """Run `dtron COMMAND ...`; returns the exit status."""
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
    from dtron.bench.command import main as bench  # after `dtron --help`, which needs no torch

    return bench(arguments)


def _convert(arguments: Sequence[str]) -> int:
    from dtron.checkpoint.convert import (
        main as convert,  # after `dtron --help`, which needs no torch
    )

    paths = [word for word in arguments[1:] if not word.startswith("-")]
    if arguments[:1] != ["from-hf"] or not paths:
        return convert(arguments)
    if _is_of_dtron(Path(paths[0])):
        raise ConfigError(
            f"{paths[0]} is a run or checkpoint of dtron, which from-hf does not take; use dtron "
            "convert to-hf, or name it in checkpoint.initial"
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
    from dtron.plan.command import main as plan  # after `dtron --help`, which needs no torch

    return _to_reader(lambda: plan(arguments))


def _to_reader(command: Callable[[], int]) -> int:
    """Run what prints, until its reader has closed the pipe, as `| head` does."""
    try:
        status = command()
        sys.stdout.flush()  # here, where a closed pipe can be reported
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left
        return _CLOSED
    return status


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (main, "train a model, under torchrun; the same as train.py"),
    "plan": (_plan, "predict the memory and speed of a run, without a GPU"),
    "bench": (_bench, "measure the speed of a run, for every combination of settings"),
    "convert": (
        _convert,
        "turn Hugging Face folders into checkpoints and back",
    ),
}


def _unknown_command(words: Sequence[str]) -> str:
    listed = f"the commands are {', '.join(COMMANDS)}"
    if words[0].partition("=")[0] == "--config":
        return f"no command before --config; write dtron train {' '.join(words)}; {listed}"
    return f"unknown command {words[0]!r}{nearest(words[0], COMMANDS)}; {listed}"


def _commands_help() -> str:
    lines = [f"  {name:8}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: dtron COMMAND ...; dtron COMMAND --help", "", *lines])


def _refuse(error: DtronError) -> int:
    """Print an error once. One that all ranks have is printed by the first rank of a host, which
    ends; torchrun ends the others, which print only if that does not happen, because the error is
    theirs alone. A failure of one rank is printed by that rank, and by no other."""
    import torch.distributed as dist  # not before --help, which needs no torch

    from dtron.run.process import Place, drop_unwritten

    try:
        place = Place.of_environment()
    except ConfigError:  # which is the error
        place = Place(rank=0, local_rank=0, world_size=1)
    alone, shown = isinstance(error, RankError), str(error).replace("\n", "\n       ")
    first = alone or (place.local_rank == 0 and not isinstance(error, PeerError))
    _write_error_file(error, time.time() + (0 if first else _LATER_SECONDS))
    if isinstance(error, PeerError):
        if not error.stopped:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's, once that rank has ended
            time.sleep(_GRACE_SECONDS)
    elif place.local_rank == 0 or alone:
        print(f"error: {shown}", file=sys.stderr, flush=True)
    else:
        time.sleep(_GRACE_SECONDS)
        print(f"error on rank {place.rank}: {shown}", file=sys.stderr, flush=True)
    if isinstance(error, NoProgressError) and "TORCHELASTIC_RUN_ID" in os.environ:
        os.kill(os.getppid(), signal.SIGTERM)  # or torchrun would restart all ranks again
    if place.world_size > 1 and (alone or isinstance(error, PeerError) or dist.is_initialized()):
        drop_unwritten()
        os._exit(1)  # threads that wait for other ranks in a collective would abort this one
    return 1


def _write_error_file(error: DtronError, seconds: float) -> None:
    """Give torchrun the error for its own report, which has `<N/A>` otherwise, and names the rank
    that failed first by these times, in whole seconds since the epoch.

    The format is that of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`.
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
        "--dry-run", action="store_true", help="check all that a start checks, print the plan, end"
    )
    rows = "of dtron plan, for the plan of --dry-run; default: this machine's, or h100"
    parser.add_argument("--hardware", default="", metavar="NAME", help=rows)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replaces a key of the file"
    )
    return parser


def _field_help() -> str:
    """Every key with its default and docstring."""
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
