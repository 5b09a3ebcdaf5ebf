"""Options of the test suite."""

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help="compare N random layouts")
    parser.addoption("--soak-minutes", type=float, default=10, help="how long -m soak takes")
    parser.addoption("--soak-seed", type=int, default=1, help="what happens in -m soak")
    parser.addoption("--fuzz-seed", type=int, default=None, help="seed of --fuzz; default: random")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.fuzz_seed is None:
        config.option.fuzz_seed = random.randrange(10**6)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.option.fuzz:
        return []
    return [f"fuzz: {config.option.fuzz} draws, repeat with --fuzz-seed {config.option.fuzz_seed}"]
