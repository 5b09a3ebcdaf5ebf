"""The drawing of rooms in ARCHITECTURE.md, from the imports: python -m tests.rooms

A room is a folder of `dtron/`, or one of the packages at the root. An arrow is an import; what is
reached by way of other rooms too has no arrow of its own.
"""

import re
from graphlib import TopologicalSorter

from tests.test_architecture import MODULES, ROOT, imports_of

PAGE = ROOT / "ARCHITECTURE.md"
_BLOCK = re.compile(r"(?<=<!-- rooms -->\n).*?(?=<!-- end of rooms -->)", re.DOTALL)
_AT_THE_ROOT = "cli"
"""entry.py, cli.py, __main__.py and the lazy names of __init__.py; errors.py is known to all."""


def room_of(module: str) -> str:
    """The folder below `dtron` that a module is in."""
    parts = module.split(".")
    folder = len(parts) > 2 or MODULES[module].name == "__init__.py"
    return parts[1] if folder and len(parts) > 1 else _AT_THE_ROOT


def graph() -> dict[str, set[str]]:
    """Room -> rooms that it imports. Raises CycleError: two rooms import each other."""
    found: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        if module == "dtron.errors":
            continue
        known = {name for name in imports_of(file) if name in MODULES}
        known -= {"dtron", "dtron.errors"}
        found.setdefault(room_of(module), set()).update(map(room_of, known))
    arrows = {room: others - {room} for room, others in found.items()}
    TopologicalSorter(arrows).prepare()
    return arrows


def drawn(arrows: dict[str, set[str]]) -> str:
    """The graph as a mermaid block."""
    reached = {room: _below(room, arrows) for room in arrows}
    lines = []
    for room in sorted(arrows):
        direct = arrows[room]
        direct = {other for other in direct if not any(other in reached[o] for o in direct)}
        lines += [f"  {room} --> {other}" for other in sorted(direct)]
    return "```mermaid\ngraph TD\n" + "\n".join(lines) + "\n```\n"


def _below(room: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(arrows[room])
    while left:
        if (other := left.pop()) not in found:
            found.add(other)
            left += arrows[other]
    return found


if __name__ == "__main__":
    PAGE.write_text(_BLOCK.sub(lambda _: drawn(graph()), PAGE.read_text()))
