"""The house rules: imports go one way, packages match the tree, nothing is imported relatively."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dtron import cli
from dtron.setup import versions

ROOT = Path(__file__).parent.parent
FOLDERS = {"dtron": "dtron", "models": "dtron.models"}
FOLDERS |= {"parallelisms": "dtron.parallelisms", "float8": "dtron.float8"}

# Rooms from the lowest: what each may import of dtron, errors and itself apart.
_FILES = {"io"}
_SETTINGS = _FILES | {"config"}
_MODELS = _FILES | {
    "kernels",
    "parallelisms.placement",
    "config.schema",
    "config.rule",
    "config.data_section",
}
_PASSES = _SETTINGS | {"kernels"}
_RUN = _SETTINGS | {"kernels.torch_internals", "models", "parallelisms", "faults"}
_CHECKPOINT = _SETTINGS | {"run", "lora", "models", "data", "parallelisms"}
_SETUP = _CHECKPOINT | {"checkpoint", "float8", "faults"}
_TRAINING = _SETUP | {"setup", "kernels"}
ALLOWED = {
    "io": set(),
    "config": _FILES,
    "kernels": set(),
    "parallelisms": _PASSES,
    "float8": {
        "io",
        "kernels",
        "parallelisms.fsdp.torch_internals",
        "parallelisms.functional_collectives",
        "parallelisms.pipeline.weight_gradients",
        "parallelisms.placement",
        "parallelisms.tensor.async_tp",
    },
    "models": _MODELS,
    "lora": _SETTINGS
    | {"kernels.grouped", "models", "parallelisms.placement", "parallelisms.tensor.async_tp"},
    "data": _SETTINGS,
    "faults": _SETTINGS | {"kernels.torch_internals", "parallelisms"},
    "run": _RUN,
    "checkpoint": _CHECKPOINT,
    "setup": _SETUP,
    "training": _TRAINING,
}
"""Names below dtron; one covers everything below it."""
MOST_FILES_OF_A_ROOM, LARGE_ROOMS, AT_THE_ROOT = 12, {"plan", "kernels"}, 5


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


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports_of(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree_of(file)):
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


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_one_way(room: str) -> None:
    inside = {module: file for module, file in MODULES.items() if below(module, f"dtron.{room}")}
    assert inside
    allowed = [f"dtron.{name}" for name in {"errors", room, *ALLOWED[room]}]
    for module, file in inside.items():
        for name in imports_of(file) - {"dtron"}:
            assert any(below(name, each) for each in allowed), f"{module}: {name}"


def test_the_drawing_of_rooms_is_what_imports_say() -> None:
    from tests.rooms import PAGE, drawn, graph  # which reads this file

    assert drawn(graph()) in PAGE.read_text(), "python -m tests.rooms"


def test_rooms_are_small() -> None:
    sizes = Counter(file.parent for module, file in MODULES.items() if below(module, "dtron"))
    del sizes[ROOT / "models"]
    assert sizes.pop(ROOT / "dtron") <= AT_THE_ROOT
    for folder, n in sizes.items():
        if ROOT / "dtron" in folder.parents and folder.name not in LARGE_ROOMS:
            assert n - 1 <= MOST_FILES_OF_A_ROOM, folder  # without __init__.py


def test_training_does_not_know_of_the_bench() -> None:
    """The planner's measurement of a machine times by its means."""
    know = {
        "dtron.cli",
        "dtron.plan.overlap",
        "dtron.plan.calibrate",
        "dtron.plan.measure_hardware",
    }
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
    code = "import sys, dtron.models; print('dtron.training.trainer' in sys.modules)"
    result = python(code, tmp_path)
    assert result.stdout.strip() == "False", result.stderr


def test_a_start_imports_no_library_that_only_some_runs_need(tmp_path: Path) -> None:
    """torchao takes a second and a half of each rank's start, transformers longer."""
    code = "import sys, dtron.training.trainer; print({'torchao', 'transformers'} & {*sys.modules})"
    result = python(code, tmp_path)
    assert result.stdout.strip() == "set()", result.stderr


def test_help_lists_every_key() -> None:
    result = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "parallel.dp_shard = -1" in result.stdout
    assert "train.steps = 100" in result.stdout


# -- torch -----------------------------------------------------------------------------------------

# Private names of torch, by file; ARCHITECTURE.md says what each is for.
PRIVATE = {
    "dtron/kernels/attention.py": {
        "_flash_attention_backward",
        "_flash_attention_forward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    },
    "dtron/kernels/torch_internals.py": {
        "_dynamo",
        "_foreach_norm",
        "_python_dispatch",
        "_subclasses",
        "_version",
    },
    "parallelisms/fsdp/torch_internals.py": {
        "_fsdp_param_group",
        "_is_root",
        "_post_accumulate_grad_hooks",
        "_root_post_backward_final_callback",
        "_training_state",
    },
    "parallelisms/functional_collectives.py": {"_c10d_functional", "_symmetric_memory"},
}
MOST_NAMES, MOST_FILES = 16, 5
OF_OTHERS = {
    "_attn_implementation": "transformers",
    "_can_set_attn_implementation": "transformers",
    "_cat_ranges": "fsspec",
    "_current_frames": "sys",
    "_data": "torchao's tensor of float8 weights",
    "_exit": "os",
    "_fingerprint": "datasets",
    "_replace": "typing.NamedTuple",
    "_scale": "torchao's tensor of float8 weights",
}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.AST) -> set[str]:
    """Functions, classes, variables, and attributes that a class sets on itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found |= {node.attr} if of_self else set()
    return found


def used_names(tree: ast.AST) -> set[str]:
    """Private names in imports from torch, accessed attributes, and strings that name attributes or
    modules of torch; whose attributes they are is not known here."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [f"torch.{node.attr}"]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            by_name = node.func.id in BY_NAME and len(node.args) > 1
            names = [f"torch.{getattr(node.args[1], 'value', '')}"] if by_name else []
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            names = [str(node.value)]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {part for own in parts if own[0] == "torch" for part in own if is_private(part)}
    return found


def test_private_names_of_torch_are_few_and_known() -> None:
    files = [file for file in MODULES.values() if file.suffix == ".py"] + [ROOT / "train.py"]
    trees = {str(file.relative_to(ROOT)): tree_of(file) for file in files}
    ours = set().union(OF_OTHERS, *map(defined_names, trees.values()))
    found = {file: used_names(tree) - ours for file, tree in trees.items()}
    assert {file: names for file, names in found.items() if names} == PRIVATE
    assert len(set().union(*PRIVATE.values())) <= MOST_NAMES
    assert len(PRIVATE) <= MOST_FILES


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch._dynamo.config", {"_dynamo"}),
        ("from torch._C import _distributed_c10d as c10d", {"_C", "_distributed_c10d"}),
        ("from torch.distributed import _functional_collectives", {"_functional_collectives"}),
        ("torch._foreach_add_(x)", {"_foreach_add_"}),
        ("state = module._fsdp_param_group", {"_fsdp_param_group"}),
        (
            "hooks = getattr(parameter, '_post_accumulate_grad_hooks', None)",
            {"_post_accumulate_grad_hooks"},
        ),
        ("'torch._inductor.graph' in sys.modules", {"_inductor"}),
        ("x.__tensor_flatten__()", set()),
        ("from flash_attn.cute.interface import _flash_attn_fwd", set()),
    ],
)
def test_private_names_are_found(code: str, names: set[str]) -> None:
    assert used_names(ast.parse(code)) == names


def test_private_names_are_listed_where_they_are_used_and_in_architecture() -> None:
    listed = (ROOT / "ARCHITECTURE.md").read_text()
    for file, names in PRIVATE.items():
        header = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
        assert "torch 2.11, 2.13 and 2.15" in header, file
        for name in names:
            assert name in header, f"{file}: {name}"
            assert name in listed, name


FILE = re.compile(r"(?<![\w./*{}<>-])[\w/]+\.py\b")
"""A file name in text, without those in URLs and patterns."""
OTHER_FILES = {
    "mine.py",  # a user's
    "models/NAME.py",
    "models/mistral.py",
    "configuration_utils.py",  # of transformers
    "modeling_rope_utils.py",
    "deep_ep/buffers/legacy.py",  # of DeepEP
}


def comments_and_docstrings(code: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def test_python_files_that_texts_name_exist() -> None:
    """Names are compared with the end of each path; those of OTHER_FILES need not exist."""
    folders = ["benchmarks", "docs", "dtron", "examples", "launch", "tests", *FOLDERS]
    code = {f for folder in folders for f in (ROOT / folder).rglob("*.py")} | {ROOT / "train.py"}
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
    parts = [file.relative_to(ROOT).parts for file in code]
    known = OTHER_FILES | {"/".join(part[i:]) for part in parts for i in range(len(part))}
    texts = [(page, page.read_text()) for page in pages if page.name != "CHANGELOG.md"]
    texts += [(f, text) for f in code for text in comments_and_docstrings(f.read_text())]
    named = {(str(file), name) for file, text in texts for name in FILE.findall(text)}
    assert {(file, name) for file, name in named if name not in known} == set()


def test_pyproject_pins_the_tested_versions_of_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = versions.TORCH
    major, _, minor = newest.partition(".")
    assert f"torch>={oldest},<{major}.{int(minor) + 1}" in project["dependencies"]


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.1", "2.15.0"])
def test_a_tested_torch_needs_no_warning(version: str) -> None:
    assert versions.untested(version) == ""


@pytest.mark.parametrize("version", ["2.10.2", "2.16.0", "3.0.0a0+git1234"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_another_torch_starts_with_one_line(
    version: str,
    rank: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On the first rank, whatever the command does next: here it finds no config."""
    monkeypatch.setattr(versions, "installed", lambda _: version)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(cli, "_GRACE_SECONDS", 0)
    missing = ["--config", "missing.toml"]
    for run in (lambda: cli.main(missing), lambda: cli.commands(["plan", *missing])):
        assert run() == 1
        lines = capfd.readouterr().err.splitlines()
        release = version.partition("+")[0]
        line = f"warning: torch {release} is not tested with dtron (2.11 to 2.15); continuing"
        assert lines.count(line) == (rank == "0")
        assert sum("warning" in each for each in lines) == (rank == "0")


def test_text_is_written_in_utf_8() -> None:
    """Whatever the locale of the machine is."""
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            modes = {each.value for each in node.args if isinstance(each, ast.Constant)}
            writes = modes & {"w", "a", "x", "wt", "at", "xt", "w+", "a+", "r+"}
            if called == "write_text" or (called in ("open", "fdopen") and writes):
                given = {keyword.arg for keyword in node.keywords}
                assert "encoding" in given, f"{module}: {ast.unparse(node)}"
