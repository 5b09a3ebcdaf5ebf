"""README.md's two commands, for .ci/run, and a check of what their tests skipped.

python3 .ci/readme.py command N     print the N-th command that begins with pip install
python3 .ci/readme.py skips FILE    fail if a package was missing for a test; FILE: JUnit XML
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
ABSENT = re.compile(r"could not import|No module named|not installed|required is")
"""In reasons of tests that were skipped because a package is missing or too old."""


def commands() -> list[str]:
    """README's fenced blocks that install dtron and then use it."""
    return re.findall(r"^```\n(pip install -e .*? && .*?)\n```$", README.read_text(), re.M | re.S)


def skipped(report: Path) -> list[str]:
    """Tests that a missing package kept from running, with the reason."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        reasons = [skip.get("message", "") for skip in case.iter("skipped")]
        name = f"{case.get('classname')}::{case.get('name')}"
        found += [f"{name}: {reason}" for reason in reasons if ABSENT.search(reason)]
    return found


def main(verb: str, argument: str) -> None:
    """Run one of the two verbs."""
    if verb == "command":
        assert len(commands()) == 2, f"README.md has {len(commands())} commands, not two"
        print(commands()[int(argument) - 1])
    elif found := skipped(Path(argument)):
        sys.exit(
            "skipped for want of a package that the test extra should bring:\n" + "\n".join(found)
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
