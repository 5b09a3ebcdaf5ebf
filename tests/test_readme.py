"""What the README and the docs tell a user exists."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dtron.bench.command import bench_parser
from dtron.bench.kernels.command import kernels_parser
from dtron.bench.lr_range.command import lr_parser
from dtron.bench.run import Options, bench_config
from dtron.bench.sweep import points
from dtron.checkpoint.convert import convert_parser
from dtron.config import RunConfig
from dtron.plan.calibrate import calibrate_parser
from dtron.plan.command import plan_parser
from dtron.plan.run_shape import shortened
from dtron.setup.rules import check_layout

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
PAGES += [
    ROOT / "benchmarks/RESULTS.md",
    ROOT / "benchmarks/NOTES.md",
    ROOT / "benchmarks/PLANNING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MOST_WORDS = 2_000
"""Of a page, tables not counted."""
GENERATED = ("configuration.md", "../configuration.md")
"""Pages that docs/hooks.py makes when the site is built."""
FOLDERS = ("dtron", "models", "parallelisms", "float8")
EXTRAS = re.compile(r"(?:dtron|['\"]\.)\[([a-z0-9,]+)\]")
TRAIN = (
    "pip install -e . && torchrun --standalone --nproc-per-node 2 train.py "
    "--config configs/quickstart.toml"
)
TEST = "pip install -e '.[test]' && pytest"


def commands(page: Path) -> list[str]:
    """train.py commands of a page, continued lines joined."""
    text = page.read_text().replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if "train.py --config" in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists() or target in GENERATED, target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_name_configs_and_keys_that_exist(page: Path) -> None:
    for command in commands(page):
        words = command.split("--config", 1)[1].replace("ROW", "").split()
        if not words[0].startswith("configs/"):
            continue
        overrides = [word.strip("'`") for word in words[1:] if re.match(r"^[a-z]+\.\S+=", word)]
        RunConfig.load(ROOT / words[0].strip("`"), [o.replace("'", "") for o in overrides])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_bench_commands_are_accepted(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for line in (line.strip() for line in text.splitlines()):
        if not line.startswith("dtron bench "):
            continue
        words = shlex.split(line)[2:]
        if words[0] == "kernels":
            kernels_parser().parse_args(words[1:])
            continue
        if words[0] == "lr":
            lr_parser().parse_args(words[1:])
            continue
        given = bench_parser().parse_args(words)
        if given.baseline:
            assert given.config is None
            continue
        options = Options(ranks=given.nproc_per_node or 1)
        for point in points(given.axes):
            config, _ = bench_config(ROOT / given.config, point.overrides, options, ROOT)
            check_layout(config, options.ranks)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_convert_commands_are_accepted(page: Path) -> None:
    for line in (line.strip() for line in page.read_text().splitlines()):
        if line.startswith("dtron convert "):
            convert_parser().parse_args(shlex.split(line)[2:])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_plan_commands_are_accepted(page: Path) -> None:
    for line in (line.strip() for line in page.read_text().splitlines()):
        if line.startswith("dtron plan calibrate"):
            calibrate_parser().parse_args(shlex.split(line, comments=True)[3:])
        elif line.startswith("dtron plan "):
            given = plan_parser().parse_intermixed_args(shlex.split(line)[2:])
            config = RunConfig.load(ROOT / given.config, given.overrides)
            check_layout(shortened(config, given.world_size), given.world_size)


def test_readme_is_short_and_has_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    first_screen = text.split("\n## ")[0]
    assert len(first_screen.splitlines()) <= 60
    assert first_screen.index(TRAIN) < first_screen.index(TEST)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name)
def test_pages_are_short(page: Path) -> None:
    prose = [line for line in page.read_text().splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= MOST_WORDS


def texts_of(path: Path) -> list[str]:
    """Every string of a file of Python, with … for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """Between what differs from run to run each part of a heading is in one string of the code."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.*)`$", page, re.M)
    assert len(messages) > 20
    code = [text for name in FOLDERS for p in (ROOT / name).rglob("*.py") for text in texts_of(p)]
    parts = {
        part.strip(" ;:") for message in messages for part in message.split("…") if len(part) > 4
    }
    assert [part for part in sorted(parts) if not any(part in text for text in code)] == []


def test_architecture_is_one_page() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    without_drawing = re.sub(r"```mermaid.*?```", "", text, flags=re.DOTALL)
    assert len(without_drawing.splitlines()) <= 150


def test_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    sources = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    texts = [path.read_text() for path in [*sources, *PAGES]]
    named = {word for text in texts for found in EXTRAS.findall(text) for word in found.split(",")}
    assert {"flash", "hf", "remote"} <= named <= extras.keys()


@pytest.mark.parametrize("page", ["clusters.md", "faults.md", "security.md"])
def test_tests_that_a_page_names_exist(page: str) -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    known = "".join(f"{path.name}\n{path.read_text()}" for path in files)
    named = re.findall(r"`(test_\w+(?:\.py)?)`", (ROOT / "docs" / page).read_text())
    assert named
    assert [name for name in named if name not in known] == []


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = [sys.executable, str(ROOT / ".ci/readme.py"), "command"]
    for number, command in (("1", TRAIN), ("2", TEST)):
        done = subprocess.run([*script, number], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == command
