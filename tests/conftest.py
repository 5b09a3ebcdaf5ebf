"""Options of the test suite, which tests a run selects, and how many processes run it."""

import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.selection import COLLECTED, ONLY_BY_NAME, only_by_name, run_of

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: ranks share the cores

MOST_WORKERS = 4
BEGIN = pytest.StashKey[float]()
LATE = "past --minutes"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help="compare N random layouts")
    parser.addoption("--outcomes", metavar="DIR", help="keep the matrix's outcomes; reuse them")
    parser.addoption("--soak-minutes", type=float, default=10, help="how long -m soak takes")
    parser.addoption("--soak-seed", type=int, default=1, help="what happens in -m soak")
    parser.addoption("--soak-kills", type=int, default=10**6, help="after how many -m soak ends")
    parser.addoption("--minutes", type=float, help="skip what would begin later, and count it")
    parser.addoption("--fuzz-seed", type=int, default=None, help="seed of --fuzz; default: random")


def _named(config: pytest.Config) -> list[str]:
    return [marker for marker in ONLY_BY_NAME if marker in config.option.markexpr]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in a process per core; single files, and tests that need a machine for
    themselves, in one. `-n` overrides this."""
    option = config.option
    if "PYTEST_XDIST_WORKER" in os.environ:  # this is one of the processes
        return
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    alone = set(_named(config)) - {"gpu"} or option.usepdb or option.collectonly
    if getattr(option, "numprocesses", 0) is None and whole and not alone:
        option.numprocesses = min(MOST_WORKERS, os.cpu_count() or 1)
        if _named(config):
            option.dist, option.loadscopereorder = "loadfile", False  # in GPU_ORDER
        else:
            option.dist = "worksteal"  # neighbours stay in one process: they share fixtures


def pytest_configure(config: pytest.Config) -> None:
    if config.option.fuzz_seed is None:
        config.option.fuzz_seed = random.randrange(10**6)
    config.stash[BEGIN] = time.monotonic()


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.option.minutes
    if limit is not None and time.monotonic() - item.config.stash[BEGIN] >= 60 * limit:
        pytest.skip(LATE)


@pytest.fixture(autouse=True)
def _logging_as_at_the_start() -> None:
    """A Trainer in this process, also that of a module's fixture, makes the logger its own, out of
    sight of caplog."""
    log = logging.getLogger("dtron")
    log.handlers, log.propagate = [], True
    log.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """What follows in this process would take it for its own."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the default process group is left initialized")


@pytest.fixture(autouse=True)
def _torch_is_not_left_deterministic() -> Iterator[None]:
    """As a Trainer in this process leaves it, which changes the errors of later tests."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that share a GPU do not see what the others only keep."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        sys.modules["torch"].cuda.empty_cache()


# Tests on GPUs come last, and among them first what a run that is cut short should have seen.
PARITY = "tests/parallelisms/test_parity_gpu.py"
GPU_ORDER = {
    PARITY: 1,
    **dict.fromkeys(("tests/kernels/", "tests/float8/", "tests/models/"), 2),
    **dict.fromkeys((f"{PARITY}::test_compiled", f"{PARITY}::test_document"), 3),
    **dict.fromkeys(("tests/", "tests/float8/test_float8_async_tp.py"), 4),
}
"""Places by how a test's name starts; the longest one counts."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is not in the default run, and drop what runs only where -m names its marker."""
    config.stash[COLLECTED] = list(items)
    for item in items:
        asked = config.option.fuzz and item.path.name == "test_fuzz.py"
        if not (asked or only_by_name(item)) and (run := run_of(item.nodeid)):
            item.add_marker(run)
    absent = set(ONLY_BY_NAME) - set(_named(config))
    dropped = [item for item in items if only_by_name(item) & absent]
    items[:] = [item for item in items if not only_by_name(item) & absent]
    config.hook.pytest_deselected(items=dropped)
    items.sort(key=_place)  # stable


def _place(item: pytest.Item) -> int:
    if item.get_closest_marker("gpu") is None:
        return 0
    known = [start for start in GPU_ORDER if item.nodeid.startswith(start)]
    return GPU_ORDER[max(known, key=len)] if known else 4


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many random layouts had each feature; how many tests of each file were out of time."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    drawn = Counter(value for r in reports for key, value in r.user_properties if key == "feature")
    if drawn:
        counts = ", ".join(f"{feature} {n}" for feature, n in drawn.most_common())
        terminalreporter.write_line(f"random layouts with: {counts}")
    skipped = [r for r in terminalreporter.stats.get("skipped", ()) if LATE in str(r.longrepr)]
    if late := Counter(r.location[0] for r in skipped):
        terminalreporter.section(f"{late.total()} tests not run: {LATE}")
        terminalreporter.write_line(", ".join(f"{file} {n}" for file, n in late.most_common()))


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.option.fuzz:
        return []
    return [f"fuzz: {config.option.fuzz} draws, repeat with --fuzz-seed {config.option.fuzz_seed}"]
