"""The house rules: imports go one way, packages match the tree, nothing is imported relatively."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"dtron": "dtron", "models": "dtron.models"}
FOLDERS |= {"parallelisms": "dtron.parallelisms", "float8": "dtron.float8"}

# What each package may import of dtron; "dtron.X" covers everything below it.
ALLOWED = {
    "dtron.errors": set(),
    "dtron.sections": set(),
    "dtron.config": {"dtron.sections", "dtron.errors"},
    "dtron.kernels": {"dtron.errors", "dtron.kernels"},
    "dtron.models": {
        "dtron.models",
        "dtron.kernels",
        "dtron.errors",
        "dtron.parallelisms.placement",
        "dtron.files",
        "dtron.tensorfile",
    },
    "dtron.files": {"dtron.errors", "dtron.remote"},
    "dtron.remote": {"dtron.errors"},
    "dtron.writer": {"dtron.remote"},
    "dtron.tensorfile": {"dtron.writer"},
    "dtron.parallelisms": {
        "dtron.parallelisms",
        "dtron.config",
        "dtron.kernels",
        "dtron.errors",
    },
    "dtron.float8": {
        "dtron.float8",
        "dtron.parallelisms.async_tp",
        "dtron.parallelisms.fsdp_internals",
        "dtron.parallelisms.placement",
        "dtron.kernels",
        "dtron.errors",
    },
    "dtron.faults": {
        "dtron.faults",
        "dtron.parallelisms",
        "dtron.config",
        "dtron.errors",
        "dtron.step",
    },
    "dtron.data": {"dtron.data", "dtron.config", "dtron.errors"},
}


def modules() -> dict[str, Path]:
    """Module name -> file, of all packages."""
    found = {}
    for folder, package in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            relative = file.relative_to(ROOT / folder).with_suffix("")
            if relative.parts[0] in FOLDERS and folder == "dtron":
                continue  # reached through a link
            parts = [part for part in relative.parts if part != "__init__"]
            found[".".join([package, *parts])] = file
    return found


MODULES = modules()


def imports_of(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                names.add(full if full in MODULES else module)
    return {name for name in names if name.split(".")[0] == "dtron"}


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    checked = 0
    for module, file in MODULES.items():
        if not below(module, package):
            continue
        checked += 1
        for name in imports_of(file):
            assert any(below(name, allowed) for allowed in ALLOWED[package]), f"{module}: {name}"
    assert checked or package == "dtron.kernels"


def test_training_does_not_know_of_the_bench() -> None:
    """The planner's measurement of a machine times by its means."""
    know = {"dtron.cli", "dtron.plan.beside", "dtron.plan.calibrate", "dtron.plan.machine"}
    for module, file in MODULES.items():
        if not below(module, "dtron.bench") and module not in know:
            assert not any(below(name, "dtron.bench") for name in imports_of(file)), module


def test_the_planner_is_known_to_the_command_line_alone() -> None:
    for module, file in MODULES.items():
        if not below(module, "dtron.plan") and module != "dtron.cli":
            assert not any(below(name, "dtron.plan") for name in imports_of(file)), module


def test_models_do_not_know_of_ranks() -> None:
    for module, file in MODULES.items():
        if below(module, "dtron.models"):
            assert "torch.distributed" not in file.read_text(), module


def test_packages_of_pyproject_match_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    with_init = {
        name for name, file in MODULES.items() if file.name == "__init__.py" and file.exists()
    }
    assert set(settings["packages"]) == with_init


def test_no_catch_all_modules() -> None:
    names = {name.rsplit(".", 1)[-1] for name in MODULES}
    assert not names & {"utils", "common", "helpers", "base", "misc"}


def python(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=directory, env=path, capture_output=True, text=True
    )


@pytest.mark.parametrize("folder", ["models", "parallelisms", "float8"])
def test_root_folders_are_not_top_level_packages(folder: str) -> None:
    result = python(f"import {folder}", ROOT)
    assert result.returncode != 0
    assert f"import dtron.{folder}" in result.stderr


def test_importing_models_loads_no_trainer(tmp_path: Path) -> None:
    code = "import sys, dtron.models; print('dtron.trainer' in sys.modules)"
    result = python(code, tmp_path)
    assert result.stdout.strip() == "False", result.stderr


def test_help_lists_every_key() -> None:
    result = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "parallel.dp_shard = -1" in result.stdout
    assert "train.steps = 100" in result.stdout
