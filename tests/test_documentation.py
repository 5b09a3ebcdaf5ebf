"""Pages of the site that are made when it is built."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from dtron.config import RunConfig, fields

ROOT = Path(__file__).parent.parent


def hooks() -> ModuleType:
    """docs/hooks.py, which is in no package."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_has_every_key() -> None:
    page = hooks().configuration()
    for key, _, doc in fields(RunConfig):
        heading, text = f"### {key} {{#{key}}}\n", page.partition(f"### {key} ")[2]
        assert heading in page
        assert doc in text.partition("\n### ")[0]
    assert "### parallel.ep_capacity {#parallel.ep_capacity}\n\nnumber, ≥ 1.0," in page
    assert '`"float32"` | `"bfloat16"`; default `"float32"`' in page


def test_links_between_pages_of_the_repository_and_of_the_site() -> None:
    found = hooks()
    assert found.repository_path("memory.md", "../benchmarks/RESULTS.md") == "benchmarks/RESULTS.md"
    assert found.repository_path("index.md", "docs/memory.md") == "docs/memory.md"
    assert found.site_path("docs/memory.md") == "memory.md"
    assert found.site_path("README.md") == "index.md"
    assert found.site_path("launch/slurm.sh") == "launch/slurm.sh"
