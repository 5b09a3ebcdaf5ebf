"""Hooks of MkDocs: pages made at build time, and links out of docs/.

    configuration.md    every key of a run's config, from dtron/config/schema.py
    PAGES               Markdown files of the repository outside docs/, such as README.md

A link to any other file of the repository copies that file into the site.
"""

import json
import os.path
import re
import types
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

from dtron.config import RunConfig, is_automatic

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "benchmarks/RESULTS.md": "benchmarks/RESULTS.md",
    "benchmarks/NOTES.md": "benchmarks/NOTES.md",
    "benchmarks/PLANNING.md": "benchmarks/PLANNING.md",
}
"""By path in the repository, where they are in the site."""
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
INTRODUCTION = """# Configuration

One TOML file is one run; `section.key=value` on the command line replaces a key. This page is
generated from `dtron/config/schema.py` and `data_section.py`; `python train.py --help` prints it.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page, the pages outside docs/ and the files that any page links to."""
    files.append(File.generated(config, "configuration.md", content=configuration()))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page in list(files.documentation_pages()):
        for _, target, _ in LINK.findall(page.content_string):
            path = repository_path(page.src_uri, target)
            uri = site_path(path)
            if (ROOT / path).is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri

    def relink(found: re.Match[str]) -> str:
        uri = site_path(repository_path(here, found[2]))
        return f"{found[1]}{os.path.relpath(uri, os.path.dirname(here) or '.')}{found[3]}"

    return LINK.sub(relink, markdown)


def repository_path(page: str, target: str) -> str:
    """The path in the repository of what `page`, a path in the site, links to."""
    sources = {uri: source for source, uri in PAGES.items()}
    folder = os.path.dirname(sources.get(page, f"docs/{page}"))
    return os.path.normpath(os.path.join(folder, target))


def site_path(path: str) -> str:
    """The path in the site of a file of the repository."""
    return PAGES.get(path, path.removeprefix("docs/"))


def configuration() -> str:
    """The page of all keys: type, default and docstring of each."""
    parts = [INTRODUCTION]
    for name, section in RunConfig.model_fields.items():
        model = section.annotation
        parts.append(f"## [{name}] {{#{name}}}\n\n{model.__doc__}\n")
        for key, field in model.model_fields.items():
            default = json.dumps(field.get_default(call_default_factory=True))
            facts = f"{type_name(field.annotation)}{bounds(field.metadata)}"
            auto = is_automatic(name, key)
            facts += ' or `"auto"`; default `"auto"`' if auto else f"; default `{default}`"
            doc = " ".join((field.description or "").split())
            parts.append(f"### {name}.{key} {{#{name}.{key}}}\n\n{facts}\n\n{doc}\n")
            parts += keys_of_tables(field.annotation)
    return "\n".join(parts)


def keys_of_tables(kind: Any) -> list[str]:
    """A list of the keys of each table, of a key whose value is a list of tables; else nothing."""
    table = next(iter(get_args(kind)), None)
    if not (isinstance(table, type) and issubclass(table, BaseModel)):
        return []
    rows = []
    for key, field in table.model_fields.items():
        given = "required" if field.is_required() else f"default `{json.dumps(field.default)}`"
        doc = " ".join((field.description or "").split())
        rows.append(f"- `{key}`: {type_name(field.annotation)}; {given}. {doc}")
    return ["\n".join(rows) + "\n"]


def type_name(kind: Any) -> str:
    """A type as a reader of TOML names it: `"a"`, `"b"` or integer."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in names:
        return names[kind]
    if origin is dict:
        return "table"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "tables"
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}"
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_name, arguments))
    return " | ".join(f"`{json.dumps(value)}`" for value in arguments)


def bounds(metadata: list[Any]) -> str:
    """The numbers that a key accepts, if they are bounded."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(rule, name):,}"
        for rule in metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    return ", " + ", ".join(found) if found else ""
