"""The command line of `dtron plan`."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from dtron.checkpoint.initial_weights import fill_from_initial
from dtron.config import RunConfig
from dtron.errors import ArgumentParser, ConfigError, cause_of, check_words
from dtron.models import MODELS
from dtron.models.contract import check_family
from dtron.plan.automatic import of_hardware, of_place
from dtron.plan.exact import exact, print_exact
from dtron.plan.hardware import DEFAULT, HARDWARE, hardware, of_device
from dtron.plan.html_report import page
from dtron.plan.plan import plan
from dtron.plan.report import print_plan, print_search
from dtron.plan.run_shape import Resolved
from dtron.plan.search import HEADROOM, search
from dtron.run.process import Place
from dtron.setup.automatic import Automatic
from dtron.setup.preflight import preflight


def plan_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `dtron plan`."""
    parser = ArgumentParser(
        prog="dtron plan",
        description="Estimate a run's memory and speed, without a GPU. `dtron plan "
        "calibrate` measures this machine for --hardware.",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="a TOML file")
    parser.add_argument("--world-size", type=int, default=8, metavar="N", help="GPUs; default 8")
    rows = f"{', '.join(HARDWARE)}, or a file of dtron plan calibrate; default {DEFAULT}"
    parser.add_argument("--hardware", default=DEFAULT, metavar="NAME", help=rows)
    parser.add_argument("--tokens", type=float, default=0.0, help="of the training, for its cost")
    parser.add_argument("--search", action="store_true", help="find the fastest layout that fits")
    parser.add_argument("--float8", action="store_true", help="--search looks at float8 too")
    free = f"share of the memory that --search leaves free; default {HEADROOM}"
    parser.add_argument("--headroom", type=float, metavar="SHARE", help=free)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --search writes its winner")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the plan as an HTML page")
    parser.add_argument("--exact", action="store_true", help="also trace the real code")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print a plan; return 0 if the run is legal and fits, else 1.

    Raises:
        ConfigError: the arguments are wrong, or the file is no config.
    """
    if arguments and arguments[0] == "calibrate":
        from dtron.plan.calibrate import main as calibrate  # what it measures needs dtron.bench

        return calibrate(arguments[1:])
    check_words(arguments)
    given = plan_parser().parse_intermixed_args(arguments)
    if given.world_size < 1:
        raise ConfigError(
            f"--world-size {given.world_size} is not a number of GPUs; use at least 1"
        )
    if given.headroom is not None and not 0 <= given.headroom < 1:
        raise ConfigError(f"--headroom {given.headroom:g} is not a fraction; use 0 to less than 1")
    if not 0 <= given.tokens < math.inf:
        raise ConfigError(
            f"--tokens {given.tokens:g} is not a number of tokens; use a number such as 15e12"
        )
    for option, path in (("--out", given.out), ("--page", given.page)):
        _check_target(option, path)
    config = RunConfig.load(given.config, given.overrides, fill_from_initial)
    check_family(config.model.name, MODELS[config.model.name], Resolved.model_of(config))
    row = hardware(given.hardware)
    searched = None
    if given.search:
        searched = search(
            config,
            given.world_size,
            row,
            float8=given.float8,
            tell=_progress,
            headroom=HEADROOM if given.headroom is None else given.headroom,
        )
        file, config = config, searched.best[0].run.config
        if not given.json:
            print_search(_console(), searched, row.room, file)
    elif idle := [
        option
        for option in ("--out", "--float8", "--headroom")
        if getattr(given, option[2:]) not in (None, False)
    ]:
        raise ConfigError(f"{idle[0]} has no effect without --search")
    automatic = of_hardware(config, given.world_size, row)
    config = automatic.config
    if given.out:
        _write("--out", given.out, config.to_toml(automatic.chosen))
        _tell(given, f"the fastest layout is in {given.out}")
    found = plan(config, given.world_size, row, given.tokens) | {"automatic": automatic.chosen}
    if given.exact and found["legal"]:
        found["exact"] = exact(config, given.world_size)
    if given.page and found["legal"]:
        if not found["time"]:
            raise ConfigError(f"--page needs predicted times: {found['no_time']}")
        run = Resolved.of(config, given.world_size)
        _write("--page", given.page, page(run, found, row, searched))
        _tell(given, f"the page is in {given.page}")
    elif given.page:
        _tell(given, "no page is written, since the layout is not legal")
    _tell(given, f"for {given.world_size} GPUs (--world-size), {row.name} (--hardware)")
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        _print_automatic(automatic)
        print_plan(_console(), found)
        if "exact" in found:
            print_exact(_console(), found["exact"])
    return 0 if found["legal"] and found["memory"]["fits"] else 1


def _check_target(option: str, path: Path | None) -> None:
    """Raise ConfigError if a file cannot be written, before the work starts."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written; name another file")


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written: {cause_of(error, path)}; name another file"
        ) from None


def _progress(line: str) -> None:
    """Print progress to stderr, separate from the command's output."""
    print(line, file=sys.stderr, flush=True)


def _tell(given: argparse.Namespace, line: str) -> None:
    if not given.json:
        print(line)


def _print_automatic(automatic: Automatic) -> None:
    if line := automatic.line():
        print(line)


def dry_run(config: RunConfig, name: str) -> int:
    """Print the plan for this launch's ranks and every reason why they cannot start, on the first
    rank; then run the checks of a start. Returns the exit status.

    Args:
        name: hardware row, or its file; empty: this machine's row.
    Raises:
        DtronError: what a start would raise.
    """
    place = Place.of_environment()
    row = hardware(name) if name else of_device(place.device)
    if name:
        automatic = of_hardware(config, place.world_size, row)
    else:
        automatic = of_place(config, place)
    asked, config = config, automatic.config
    found = plan(config, place.world_size, row)
    if found["legal"]:
        preflight(asked if name else config, place, starts=False)
        found["unchecked"] = []  # all of it was looked for
    if place.rank == 0:
        if found["legal"]:
            print(f"all checks of a start passed, data and tokenizer too; {place.world_size} ranks")
        _print_automatic(automatic)
        print_plan(_console(), found)
        if not name:
            print(f"{_assumed(place.device, row.name)}; --hardware NAME takes another row")
    return 0 if found["legal"] else 1


def _assumed(device: torch.device, row: str) -> str:
    """Describe the hardware row that was chosen without --hardware, and why."""
    if device.type != "cuda":
        return f"no GPU is here: planned for {row}, the default row"
    gpu = torch.cuda.get_device_name(device)
    if row in gpu.lower():
        return f"planned for {row}, the row of this machine's {gpu}"
    return f"there is no row of this machine's {gpu}: planned for {row}, the default row"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process


def _console() -> Console:
    """Make a console wide enough for all columns of a table: a terminal breaks lines instead."""
    return _Console(width=max(200, Console().width))
