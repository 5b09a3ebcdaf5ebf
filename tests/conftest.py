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


# Tests on GPUs come last, and among them first what a run that is cut short should have seen. Ranks
# compile what parity's last cases need while this process runs the kernels' tests.
PARITY = "tests/parallelisms/test_parity_gpu.py"
GPU_ORDER = {
    PARITY: 1,
    **dict.fromkeys(("tests/kernels/", "tests/float8/", "tests/models/"), 2),
    **dict.fromkeys((f"{PARITY}::test_compiled", f"{PARITY}::test_document"), 3),
    **dict.fromkeys(("tests/", "tests/float8/test_fused.py"), 4),
}
"""Places by how a test's name starts; the longest one counts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("gpu") is None:
            return 0
        known = [start for start in GPU_ORDER if item.nodeid.startswith(start)]
        return GPU_ORDER[max(known, key=len)] if known else 4

    items.sort(key=place)  # stable


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.option.fuzz:
        return []
    return [f"fuzz: {config.option.fuzz} draws, repeat with --fuzz-seed {config.option.fuzz_seed}"]
