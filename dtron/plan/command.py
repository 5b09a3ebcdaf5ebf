"""The command line of `dtron plan`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from dtron.config import RunConfig
from dtron.errors import ArgumentParser
from dtron.plan.whole import plan


def plan_parser() -> argparse.ArgumentParser:
    """Arguments of `dtron plan`."""
    parser = ArgumentParser(
        prog="dtron plan",
        description="What a run needs and how fast it will be: dtron plan --config FILE --world-size N",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="a TOML file")
    parser.add_argument("--world-size", type=int, default=8, metavar="N", help="GPUs of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print a plan; 0 if the run is legal, else 1.

    Raises:
        ConfigError: the arguments are wrong, or the file is no config.
    """
    given = plan_parser().parse_args(arguments)
    config = RunConfig.load(given.config, given.overrides)
    found = plan(config, given.world_size)
    print(json.dumps(found, indent=1))
    return 0 if found["legal"] else 1
