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


GPU_ORDER = ("tests/parallelisms/test_parity_gpu", "tests/kernels/", "tests/float8/")
GPU_ORDER += ("tests/models/", "tests/parallelisms/", "tests/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on GPUs come last, and among them first what a run that is cut short should have seen:
    parity, kernels, then the rest."""

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("gpu") is None:
            return 0
        known = [n for n, start in enumerate(GPU_ORDER) if item.nodeid.startswith(start)]
        return 1 + min(known, default=len(GPU_ORDER))

    items.sort(key=place)  # stable


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.option.fuzz:
        return []
    return [f"fuzz: {config.option.fuzz} draws, repeat with --fuzz-seed {config.option.fuzz_seed}"]
