"""The command line of `dtron plan`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dtron.config import RunConfig
from dtron.errors import ArgumentParser, ConfigError
from dtron.plan.hardware import HARDWARE, hardware
from dtron.plan.report import print_plan
from dtron.plan.whole import plan


def plan_parser() -> argparse.ArgumentParser:
    """Arguments of `dtron plan`."""
    parser = ArgumentParser(
        prog="dtron plan",
        description="What a run needs and how fast it will be, told without a GPU.",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="a TOML file")
    parser.add_argument("--world-size", type=int, default=8, metavar="N", help="GPUs; default 8")
    parser.add_argument("--hardware", default="h100", help=f"{', '.join(HARDWARE)}; default h100")
    parser.add_argument("--tokens", type=float, default=0.0, help="of the training, for its cost")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print a plan; 0 if the run is legal and fits, else 1.

    Raises:
        ConfigError: the arguments are wrong, or the file is no config.
    """
    given = plan_parser().parse_intermixed_args(arguments)
    if given.world_size < 1:
        raise ConfigError(f"--world-size {given.world_size} is no number of GPUs; use at least 1")
    config = RunConfig.load(given.config, given.overrides)
    row = hardware(given.hardware)
    found = plan(config, given.world_size, row, given.tokens)
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        print_plan(Console(width=None if Console().is_terminal else 200), found)
    return 0 if found["legal"] and found["memory"]["fits"] else 1
