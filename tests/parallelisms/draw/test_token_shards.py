"""The pictures of token shards match `Split`, and those of the docs are up to date."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from dtron.errors import ConfigError
from dtron.parallelisms import Split
from dtron.parallelisms.draw.token_shards import draw, main, shard_documents, title_of

DOCS = Path(__file__).parents[3] / "docs"
PICTURES = {"one-document": (32,), "two-documents": (19, 13)}


@pytest.mark.parametrize("lengths", [(32,), (19, 13), (1, 30, 1), (8, 8, 16)], ids=str)
def test_shards_are_those_of_a_run(lengths: tuple[int, ...]) -> None:
    found = shard_documents(lengths, 4)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    split = Split(documents, (1, 32), 4)
    for rank in range(4):
        held = split.index(rank)[0].tolist()
        assert sorted(held) == [token for token in range(32) if found.rank(token) == rank]
        early = [token for token in held if found.is_early(token)]
        assert held[: len(early)] == early
    assert [found.place(token) for token in range(32)] == [p for n in lengths for p in range(n)]
    assert sum(found.pairs) == sum(n * (n + 1) // 2 for n in lengths)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    """Each token is drawn twice, among all and in its rank's row; the file is what is drawn now."""
    found = shard_documents(PICTURES[name], 4)
    picture = draw(found, title_of(found))
    root = ElementTree.fromstring(picture)
    boxes = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("stroke")]
    assert len(boxes) == 2 * 32
    assert (DOCS / "shares" / f"{name}.svg").read_text() == picture


def test_main_draws_prints_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "shares.svg"
    assert main(["--cp", "4", "--documents", "19", "13", "--out", str(out)]) == 0
    assert out.read_text() == (DOCS / "shares" / "two-documents.svg").read_text()
    assert "rank 2  8 tokens, 73 pairs" in capsys.readouterr().out
    assert main(["--documents", "19", "12"]) == 2
    assert "does not divide its 31 tokens; use a multiple such as 24" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "missing" / "x.svg")]) == 2


def test_the_excess_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    """The command on the page prints the figure that the page gives."""
    text = (DOCS / "context.md").read_text()
    command, messages = re.findall(
        r"token_shards (--cp 4 --documents .*)\n```\n\n.*?([\d.]+%)", text
    )[0]
    assert main(command.split()) == 0
    assert f"at most {messages} more" in capsys.readouterr().out


def test_empty_documents_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        shard_documents((4, 0, 4), 1)
