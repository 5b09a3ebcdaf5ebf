"""Documents of the user's own code: MODULE:NAME, entry points, and Trainer(config, data=...)."""

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtron import Trainer
from dtron.config import Data, RunConfig
from dtron.data import identity_of, load_tokenizer, prepare
from dtron.data.command import main
from dtron.data.corpus.readers.custom import GROUP, custom_corpus
from dtron.errors import ConfigError, DataError
from dtron.inference.loaded_model import config_of
from dtron.io.user_code import registered
from dtron.run.process import Place
from dtron.setup.preflight import preflight
from tests.harness import run_ranks
from tests.training.test_trainer import fit, losses, tiny

HERE, SQLITE = "tests.data.corpus.test_data_custom", "examples.my_source.source:SQLiteRows"
PLACE = Place(rank=0, local_rank=0, world_size=1)
TOKENIZER = load_tokenizer(Data())


class Items:
    """A source of given documents."""

    def __init__(self, items: list[Any], version: Any = "1") -> None:
        self.items, self.version = items, version

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


def of_kinds(data: Data) -> Items:
    """The lines of a JSONL file as texts, as rows, and as tokens of several types."""
    texts = [json.loads(line)["text"] for line in Path(data.paths[0]).read_text().splitlines()]
    ids = [TOKENIZER.encode(text) for text in texts]
    kinds: list[Callable[[int], Any]] = [
        lambda k: texts[k],
        lambda k: {"text": texts[k]},
        lambda k: ids[k],
        lambda k: np.array(ids[k], np.uint16),
        lambda k: torch.tensor(ids[k]),
    ]
    return Items([make(k) for n, make in enumerate(kinds) for k in range(n, len(texts), 5)])


def of_paths(data: Data) -> Items:
    return Items([f"{path} {n}" for path in data.paths for n in range(40)])


NOTHING = Items([])


def no_version(data: Data) -> Items:
    return Items(["text"], None)


def fails(data: Data) -> Items:
    raise RuntimeError("no database")


def second(item: Any) -> Items:
    return Items(["a text", item])


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> dict[str, Any]:
    """Settings of a run on a JSONL file; the order of its documents does not matter."""
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": f"{text}{n}"}) + "\n" for n in range(3) for text in texts]
    path.write_text("".join(lines[k] for kind in range(5) for k in range(kind, len(lines), 5)))
    return {"data__paths": [str(path)], "data__cache_dir": str(tmp_path / "cache")}


def fit_items(config: RunConfig, items: Items) -> None:
    Trainer(config, data=items).fit()


def test_a_run_equals_that_on_files(tmp_path: Path, corpus: dict) -> None:
    """By name and by Trainer's argument, on two ranks; the argument resumes what the name began."""
    path = Path(corpus["data__paths"][0])
    run_ranks(2, fit, tiny(tmp_path / "files", **corpus))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    inverse = np.argsort([k for kind in range(5) for k in range(kind, len(texts), 5)])
    path.write_text("".join(json.dumps({"text": texts[k]}) + "\n" for k in inverse))
    named = {**corpus, "data__source": f"{HERE}:of_kinds", "checkpoint__interval": 3}
    run_ranks(2, fit, tiny(tmp_path / "named", **named))
    assert losses(tmp_path / "named") == losses(tmp_path / "files")
    given = {"data__cache_dir": corpus["data__cache_dir"], "metrics__log_interval": 1}
    resume = {"checkpoint__resume": str(tmp_path / "named/checkpoints/step-3")}
    run_ranks(2, fit_items, tiny(tmp_path / "given", **given, **resume), Items(texts))
    assert losses(tmp_path / "given") == losses(tmp_path / "files")[3:]
    again = RunConfig.load(tmp_path / "given/config.toml")
    with pytest.raises(ConfigError, match="are an argument of Trainer"):
        preflight(again, PLACE)
    with pytest.raises(ConfigError, match=r"config\.toml has the data source .*add data\.source="):
        config_of(str(tmp_path / "named"), None, [], 1)
    config_of(str(tmp_path / "named"), None, [f"data.source={HERE}:of_kinds"], 1)


def test_sources_are_mixed_by_their_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = '[{name="a", paths=["x", "y"]}, {name="b", paths=["z"]}]'
    words = [f"data.source={HERE}:of_paths", f"data.mixture={sources}", "train.seq_len=16"]
    assert main(["show", *words, f"data.cache_dir={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "of a\n  -- tokens 0 to" in shown.replace("\r", "")
    assert re.search(rf"{HERE}:of_paths, document \d", shown)


def test_the_example_reads_sqlite(tmp_path: Path, texts: list[str]) -> None:
    """As the files; a changed database is tokenized again."""
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "x.jsonl").write_text(lines)
    for name, some in (("a", texts[:25]), ("b", texts[25:])):
        with sqlite3.connect(tmp_path / f"{name}.db") as table:
            table.execute("CREATE TABLE documents (body TEXT)")
            table.executemany("INSERT INTO documents VALUES (?)", [(text,) for text in some])
    keys = {"text_key": "body", "cache_dir": str(tmp_path / "cache")}
    paths = {"files": ["x.jsonl"], SQLITE: ["a.db", "b.db"]}

    def identity(source: str) -> dict[str, str]:
        found = [str(tmp_path / name) for name in paths[source]]
        data = Data.model_validate({"source": source, "paths": found, **keys})
        prepare(data)
        return identity_of(data, TOKENIZER)

    before = identity(SQLITE)
    assert before == identity("files")
    with sqlite3.connect(tmp_path / "b.db") as table:
        table.execute("INSERT INTO documents VALUES ('more')")
    assert identity(SQLITE) != before
    with pytest.raises(DataError, match=r"c\.db: no such file"):
        prepare(Data.model_validate({"source": SQLITE, "paths": [str(tmp_path / "c.db")]}))


REFUSED = {
    "file": "data.source = 'file' is unknown; did you mean files?",
    f"{HERE}:nothing": f"data.source = {HERE}:nothing: module {HERE} has no attribute",
    f"{HERE}:NOTHING": f"data.source = {HERE}:NOTHING is no class or function",
    f"{HERE}:fails": f"data.source = {HERE}:fails: the call raised RuntimeError: no database",
    f"{HERE}:no_version": f"data.source = {HERE}:no_version: Items has no version; a source has",
}


@pytest.mark.parametrize("source", REFUSED)
def test_sources_that_are_refused(source: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(Data(source=source))
    assert str(error.value).startswith(REFUSED[source])


@pytest.mark.parametrize(
    ("item", "message", "keys"),
    [
        (3.5, "document 2 is 3.5; use a text, a row such as", {}),
        ([1.0], "document 2 is [1.0]; use a text", {}),
        ({"body": "x"}, "document 2: no key 'text' (data.text_key) among 'body'", {}),
        ([7, 300], "document 2: token 2 of the document is 300, which the vocabulary", {}),
        ("x", "needs a row, such as {'messages': [...]}; it is str", {"format": "chat"}),
    ],
)
def test_items_that_are_refused(
    item: Any, message: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"cache_dir": str(tmp_path), **keys}
    with pytest.raises(DataError) as error:
        prepare(Data.model_validate(settings).of_documents(second(item)))
    assert message in str(error.value)


def test_equal_versions_of_other_documents_are_told_apart() -> None:
    """All arguments of Trainer have the same name, and many begin with version "1"."""
    made = [Data().of_documents(Items([f"{word} {n}" for n in range(9)])) for word in "ab"]
    first, second = (custom_corpus(data).identity for data in made)
    assert first != second
    assert first == custom_corpus(made[0]).identity


def test_trainer_refuses_what_is_no_source(tmp_path: Path) -> None:
    for data in (["a text"], object()):
        with pytest.raises(ConfigError, match=r"data: (list|object) has no .*version"):
            Trainer(tiny(tmp_path / "run"), data=data)  # type: ignore[arg-type]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    metadata = tmp_path / "site/fancy_data-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy-data\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nfancy = {HERE}:of_paths\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    registered.cache_clear()
    yield
    registered.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_package_registers_a_short_name(tmp_path: Path) -> None:
    keys = {"paths": ["x"], "cache_dir": str(tmp_path)}
    found = []
    for source in ("fancy", f"{HERE}:of_paths"):
        data = Data.model_validate({"source": source, **keys})
        prepare(data)
        found.append(identity_of(data, TOKENIZER))
    assert found[0] == found[1]
