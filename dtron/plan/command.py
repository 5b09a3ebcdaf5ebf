"""The command line of `dtron plan`."""

import argparse
import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dtron.checkpoint.initial_weights import fill_from_initial
from dtron.config import RunConfig
from dtron.data import Loader, TrainingSource
from dtron.data.inspection import measured_rate
from dtron.data.mixture import Mixture
from dtron.errors import ArgumentParser, ConfigError, check_words, counted
from dtron.models import model_spec
from dtron.models.contract import check_family
from dtron.plan.automatic import of_hardware, of_place
from dtron.plan.exact import exact, print_exact
from dtron.plan.hardware import DEFAULT, HARDWARE, hardware, of_device
from dtron.plan.html_report import page
from dtron.plan.output_file import check_target, write_target
from dtron.plan.plan import plan
from dtron.plan.report import print_plan, print_search
from dtron.plan.run_shape import Resolved
from dtron.plan.search import HEADROOM, search
from dtron.run.process import Place
from dtron.setup.automatic import Automatic
from dtron.setup.preflight import mixture_of, preflight


def plan_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `dtron plan`."""
    parser = ArgumentParser(
        prog="dtron plan",
        description="Estimate a run's memory and speed, without a GPU. `dtron plan "
        "calibrate` measures this machine for --hardware.",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="a TOML file")
    parser.add_argument("--world-size", type=int, default=8, metavar="N", help="GPUs; default 8")
    rows = f"{', '.join(HARDWARE)}, or a file from dtron plan calibrate; default {DEFAULT}"
    parser.add_argument("--hardware", default=DEFAULT, metavar="NAME", help=rows)
    parser.add_argument("--tokens", type=float, default=0.0, help="training tokens, for the cost")
    varied = "degrees, schedule, micro-batch size and recomputation, also those that are set"
    searches = f"find the fastest layout that fits; varies {varied}"
    parser.add_argument("--search", action="store_true", help=searches)
    parser.add_argument("--float8", action="store_true", help="--search also tries float8")
    free = f"fraction of GPU memory that --search leaves free; default {HEADROOM}"
    parser.add_argument("--headroom", type=float, metavar="FRACTION", help=free)
    parser.add_argument("--out", type=Path, metavar="FILE", help="TOML file for the fastest layout")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the plan as an HTML page")
    parser.add_argument("--exact", action="store_true", help="also trace a step of the real code")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print a plan; return 0 if the run is legal and fits, else 1.

    Raises:
        ConfigError: an argument or the config file is invalid, or --search finds no layout.
    """
    if arguments and arguments[0] == "calibrate":
        from dtron.plan.calibrate import main as calibrate  # imports dtron.bench

        return calibrate(arguments[1:])
    check_words(arguments)
    given = plan_parser().parse_intermixed_args(arguments)
    if given.world_size < 1:
        raise ConfigError(f"--world-size {given.world_size} is less than 1; use the number of GPUs")
    if given.headroom is not None and not 0 <= given.headroom < 1:
        raise ConfigError(f"--headroom {given.headroom:g} is not a fraction; use 0 to less than 1")
    if not 0 <= given.tokens < math.inf:
        raise ConfigError(
            f"--tokens {given.tokens:g} is negative or not finite; use a number such as 15e12"
        )
    for option, path in (("--out", given.out), ("--page", given.page)):
        check_target(option, path)
    config = RunConfig.load(given.config, given.overrides, fill_from_initial)
    check_family(config.model.name, model_spec(config.model.name), Resolved.model_of(config))
    row = hardware(given.hardware)
    searched = None
    if given.search:
        searched = search(
            config,
            given.world_size,
            row,
            float8=given.float8,
            tell=functools.partial(print, file=sys.stderr, flush=True),
            headroom=HEADROOM if given.headroom is None else given.headroom,
        )
        file, config = config, searched.best[0].run.config
        if not given.json:
            print_search(_console(), searched, row.room, file)
    elif idle := [
        option
        for option in ("--out", "--float8", "--headroom")
        if (value := getattr(given, option[2:])) is not None and value is not False  # 0.0 is given
    ]:
        raise ConfigError(f"{idle[0]} has no effect without --search; add --search")
    automatic = of_hardware(config, given.world_size, row)
    config = automatic.config
    if given.out:
        write_target("--out", given.out, config.to_toml(automatic.chosen))
        _tell(given, f"the fastest layout is written to {given.out}")
    found = plan(config, given.world_size, row, given.tokens) | {"automatic": automatic.chosen}
    if given.exact and found["legal"]:
        found["exact"] = exact(config, given.world_size)
    if given.page and found["legal"]:
        if not found["time"]:
            raise ConfigError(f"--page needs predicted times: {found['no_time']}")
        run = Resolved.of(config, given.world_size)
        write_target("--page", given.page, page(run, found, row, searched))
        _tell(given, f"the page is written to {given.page}")
    elif given.page:
        _tell(given, "--page: no page is written, since the layout is not legal")
    gpus = counted(given.world_size, "GPU")
    _tell(given, f"planned for {gpus} (--world-size), {row.name} (--hardware)")
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        _print_automatic(automatic)
        print_plan(_console(), found)
        if "exact" in found:
            print_exact(_console(), found["exact"])
    return 0 if found["legal"] and found["memory"]["fits"] else 1


def _tell(given: argparse.Namespace, line: str) -> None:
    if not given.json:
        print(line)


def _print_automatic(automatic: Automatic) -> None:
    if line := automatic.line():
        print(line)


def dry_run(config: RunConfig, name: str) -> int:
    """Plan the run on the ranks of this launch.

    If it is legal, run all checks of a run's start. Print the plan on rank 0; if the run is not
    legal, the reasons. Return 0 if it is legal, else 1.

    Args:
        name: name or file of a hardware row; empty: the row of this machine's GPU.
    Raises:
        DtronError: a check of the run's start fails.
    """
    model_spec(config.model.name)  # its error is raised before a plan is tried
    place = Place.of_environment()
    row = hardware(name) if name else of_device(place.device)
    if name:
        automatic = of_hardware(config, place.world_size, row)
    else:
        automatic = of_place(config, place)
    asked, config = config, automatic.config
    found = plan(config, place.world_size, row)
    rate, mixture = 0.0, ""
    if found["legal"]:
        checked = preflight(asked if name else config, place, starts=False)
        mixture = mixture_of(checked.data.train, config, checked.resume)
        found["unchecked"] = []  # preflight has checked them
        rate = _rate_of(checked.data.train, config, place.world_size)
    if place.rank == 0:
        if found["legal"]:
            print(
                "all checks of the run's start passed, also of data and tokenizer; "
                f"{counted(place.world_size, 'rank')}"
            )
        if mixture:
            print(f"mixture: {mixture}")
        _print_automatic(automatic)
        print_plan(_console(), found)
        if found["legal"] and found["time"]:
            speed = found["time"]["tokens_per_second_per_gpu"] * place.world_size
            print(_data_line(rate, speed * _sequences_per_rank(config, place.world_size)))
        if not name:
            print(f"{_assumed(place.device, row.name)}; --hardware NAME selects another row")
    return 0 if found["legal"] else 1


def _rate_of(source: TrainingSource, config: RunConfig, world_size: int) -> float:
    """Measure the tokens per second that the first data-parallel rank reads here."""
    train, share = config.train, _sequences_per_rank(config, world_size)
    settings: dict[str, Any] = {
        "global_batch": train.global_batch,
        "micro_batch": train.micro_batch,
    }
    loader = Loader(source, dp_rank=0, dp_size=round(1 / share), **settings)
    begin = loader.state_dict()

    def step() -> None:
        if isinstance(source, Mixture):  # its sources may end
            loader.load_state_dict(begin)
        loader.step()

    return measured_rate(step, round(train.global_batch * share) * train.seq_len)


def _sequences_per_rank(config: RunConfig, world_size: int) -> float:
    """Return the fraction of the sequences that one data-parallel rank trains on."""
    train = config.train
    return config.micro_batches(world_size) * train.micro_batch / train.global_batch


def _data_line(rate: float, needed: float) -> str:
    """Return a line that compares the speeds of data loading and of training.

    Args:
        rate: tokens per second that this machine reads.
        needed: tokens per second that one data-parallel rank trains on, as predicted.
    """
    line = f"data: {rate:,.0f} tokens/s are read here; each data-parallel rank needs {needed:,.0f}"
    if rate > needed:
        return line
    return f"{line}: data limits the speed; see docs/data-at-scale.md"


def _assumed(device: torch.device, row: str) -> str:
    """Return a line that names the hardware row used without --hardware, and why it is used."""
    if device.type != "cuda":
        return f"no GPU on this machine: planned for {row}, the default row"
    gpu = torch.cuda.get_device_name(device)
    if row in gpu.lower():
        return f"planned for {row}, the row of this machine's {gpu}"
    return f"no hardware row for this machine's {gpu}: planned for {row}, the default row"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich's default exits the process


def _console() -> Console:
    """Make a console of at least 200 columns, so that rich cuts no table; terminals wrap lines."""
    return _Console(width=max(200, Console().width))
