"""Random corpora from random sources: files, prepared folders, URLs, Megatron-Core's files.

Whatever the source and the number of ranks, sequences are those of the files on one rank; and an
epoch with `packing = "pad"` holds each training document once. Each planted bug turns this red.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtron.config import Data
from dtron.data import Loader, open_data, packing, prepare, sources
from dtron.data.corpus import document_index, token_corpus
from dtron.data.corpus.documents import files_corpus
from dtron.data.corpus.prepare import prepare_folder
from dtron.data.tokenizer import ByteTokenizer
from dtron.io.filesystem import location
from tests.data.corpus.test_data_megatron import write_megatron

pytest.importorskip("fsspec")
SEQ_LEN = 24
STEPS = 6


@dataclass(frozen=True)
class Draw:
    """A corpus and how it is read."""

    seed: int
    source: str
    """`files`, `prepared`, `folders` (two of them), `store` or `megatron`."""
    packing: str
    mask_documents: bool
    fraction: float
    dp_size: int
    micro_batch: int
    ahead: int
    resumed_after: int
    """Step after which other loaders go on from the state."""


def draw(seed: int) -> Draw:
    rng = random.Random(seed)
    return Draw(
        seed,
        ("files", "prepared", "folders", "store", "megatron")[seed % 5],
        rng.choice(("cut", "best_fit", "pad")),
        rng.random() < 0.5,
        rng.choice((0.0, 0.1)),
        rng.choice((1, 2, 4)),
        rng.choice((1, 2)),
        rng.choice((0, 1, 3)),
        rng.randrange(STEPS),
    )


def texts_of(seed: int) -> list[str]:
    """About 90 documents in two files; some are empty, some are copies."""
    rng = random.Random(seed)
    texts = [f"{i:02d}" + "abcdefghij" * rng.randrange(1, 5) for i in range(80)]
    return texts + [""] * 5 + rng.sample(texts, 6)


def write_files(folder: Path, texts: list[str]) -> list[str]:
    folder.mkdir(exist_ok=True)
    half, paths = len(texts) // 2, []
    for name, part in (("a", texts[:half]), ("b", texts[half:])):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        paths.append(str(path))
    return paths


def write_tokens(folder: Path, texts: list[str]) -> list[str]:
    """The same documents as Megatron-Core data sets; the second is read over a URL."""
    half, encode = len(texts) // 2, ByteTokenizer().encode
    a = write_megatron(folder / "a", [[encode(text)] for text in texts[:half]], "<u2")
    b = write_megatron(
        folder / "b", [[[*encode(t), 256] if t else []] for t in texts[half:]], "<i8"
    )
    return [str(a.with_suffix("")), f"file://{b.with_suffix('.idx')}"]


def section(case: Draw, source: str, folder: Path) -> Data:
    """The data section of a source, which is prepared."""
    files = write_files(folder, texts_of(case.seed))
    keys: dict[str, Any] = {
        "packing": case.packing,
        "mask_documents": case.mask_documents,
        "validation_fraction": case.fraction,
        "cache_dir": str(folder / f"cache-{source}"),
    }
    if source == "megatron":
        data = Data.model_validate({"paths": write_tokens(folder, texts_of(case.seed)), **keys})
    elif source == "files":
        data = Data.model_validate({"paths": files, **keys})
    else:
        groups = [[file] for file in files] if source == "folders" else [files]
        folders = [str(folder / f"{source}-{number}") for number in range(len(groups))]
        if source == "store":
            folders = [f"file://{each}" for each in folders]
        for paths, out in zip(groups, folders, strict=True):
            corpus = files_corpus(Data.model_validate({"paths": paths}))
            prepare_folder(corpus, ByteTokenizer(), location(out), 1, False)
        data = Data.model_validate({"source": "prepared", "paths": folders, **keys})
    prepare(data, SEQ_LEN)
    return data


Step = list[list[list[int]]]
"""Tokens, labels and positions of each sequence of a step."""


def steps_of(data: Data, case: Draw, first: int, state: Any) -> tuple[list[Step], Any]:
    """Steps from `first` on, of all ranks; and the state after `resumed_after` steps."""
    ranks = []
    for rank in range(case.dp_size):
        source, _ = sources.open_data(data, seq_len=SEQ_LEN, seed=case.seed)
        settings: Any = {"micro_batch": case.micro_batch, "dp_rank": rank, "dp_size": case.dp_size}
        ranks.append(Loader(source, global_batch=8, ahead=case.ahead, **settings))
        if state is not None:
            ranks[-1].load_state_dict(state)
    found: list[Step] = []
    kept = None
    for step in range(first, STEPS):
        if step == case.resumed_after:
            kept = max(json.dumps(rank.state_dict()) for rank in ranks)
        rows: dict[int, list[list[int]]] = {}
        for batch in (batch for rank in ranks for batch in rank.step()):
            for row, number in enumerate(batch.sequence.tolist()):
                values = [batch.tokens, batch.labels, batch.positions]
                rows[number] = [value[row].tolist() for value in values if value is not None]
        found.append([rows[number] for number in sorted(rows)])
    for rank in ranks:
        rank.close()
    return found, json.loads(kept) if kept else None


def deviations(case: Draw, folder: Path) -> list[str]:
    """What differs from the files on one rank, and from the documents themselves."""
    alone = Draw(case.seed, "files", case.packing, case.mask_documents, case.fraction, 1, 8, 0, 0)
    expected, _ = steps_of(section(alone, "files", folder), alone, 0, None)
    data = section(case, case.source, folder)
    found, state = steps_of(data, case, 0, None)
    wrong = ["steps"] * (found != expected)
    resumed, _ = steps_of(data, case, case.resumed_after, state)
    wrong += ["resumed steps"] * (resumed != expected[case.resumed_after :])
    return wrong + ["documents"] * (documents_of(data) != documents_of_files(case))


def documents_of_files(case: Draw) -> list[str]:
    return sorted(text for text in texts_of(case.seed) if text)


def documents_of(data: Data) -> list[str]:
    """All documents of an epoch and of the held-out sequences, each in one piece."""
    whole = data.model_copy(update={"packing": "pad", "mask_documents": False})
    prepare(whole, 64)
    training, held_out = open_data(whole, seq_len=64, seed=5)
    waste = training.waste()
    assert waste is not None
    rows = [training.sequence(k) for k in range(waste.sequences)]
    rows += [held_out.sequence(k) for k in range(len(held_out))] if held_out else []
    eos = ByteTokenizer().eos_id
    found = []
    for row in rows:
        tokens = row.tokens[: row.tokens.tolist().index(eos)]
        found.append(bytes(tokens.astype(np.uint8)).decode())
    return sorted(found)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tasks, groups and shards."""
    monkeypatch.setattr("dtron.data.corpus.documents.TASK_BYTES", 700)
    monkeypatch.setattr(document_index, "GROUP_DOCUMENTS", 16)


@pytest.mark.parametrize("seed", range(12))
def test_every_source_gives_the_sequences_of_the_files(tmp_path: Path, seed: int) -> None:
    case = draw(seed)
    assert deviations(case, tmp_path) == [], case


# -- planted bugs ---------------------------------------------------------------------------


def shard_dropped(patch: pytest.MonkeyPatch) -> None:
    """The last folder or shard is not opened."""
    joined = token_corpus.joined
    patch.setattr(sources, "joined", lambda corpora, size: joined(corpora[:1], size))


def order_by_rank(patch: pytest.MonkeyPatch) -> None:
    """Each rank opens its data with a seed of its own."""
    opened, calls = sources.open_data, iter(range(1000))

    def shifted(data: Data, *, seq_len: int, seed: int) -> Any:
        return opened(data, seq_len=seq_len, seed=seed + next(calls))

    patch.setattr(sources, "open_data", shifted)


def stale_index(patch: pytest.MonkeyPatch) -> None:
    """The index of another fraction of held-out documents is taken, if there is one."""
    patch.setattr(document_index, "index_key", lambda corpus, fraction: "a" * 32)
    patch.setattr("dtron.data.corpus.cache.index_key", lambda corpus, fraction: "a" * 32)
    build = document_index.build_index

    def of_an_older_corpus(corpus: Any, fraction: float, folder: Path) -> None:
        build(corpus, 0.5, folder)

    patch.setattr("dtron.data.corpus.cache.build_index", of_an_older_corpus)


def group_repeated(patch: pytest.MonkeyPatch) -> None:
    """An epoch reads its first group twice and its second one never."""
    order = packing.order_of_groups

    def wrong(index: Any, seed: int, epoch: int) -> Any:
        groups = order(index, seed, epoch)
        groups[1] = groups[0]
        return groups

    for module in ("packing", "best_fit_packing"):
        patch.setattr(f"dtron.data.{module}.order_of_groups", wrong)


def state_of_what_was_read(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint keeps the position of the background thread."""
    patch.setattr(Loader, "state_dict", lambda self: self._state())


@pytest.mark.parametrize(
    ("bug", "changes", "wrong"),
    [
        (shard_dropped, {"source": "folders"}, "documents"),
        (order_by_rank, {"dp_size": 2}, "steps"),
        (stale_index, {"source": "prepared", "fraction": 0.1}, "steps"),
        (group_repeated, {}, "steps"),
        (state_of_what_was_read, {"ahead": 3, "resumed_after": 2}, "resumed steps"),
    ],
)
def test_planted_bugs_turn_it_red(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    changes: dict[str, Any],
    wrong: str,
) -> None:
    case = Draw(**{**vars(draw(1)), "packing": "cut", **changes})
    assert deviations(case, tmp_path / "without") == []
    alone = Draw(case.seed, "files", case.packing, case.mask_documents, case.fraction, 1, 8, 0, 0)
    expected, _ = steps_of(section(alone, "files", tmp_path / "without"), alone, 0, None)
    bug(monkeypatch)
    (tmp_path / "with").mkdir()
    data = section(case, case.source, tmp_path / "with")
    found, state = steps_of(data, case, 0, None)
    red = {
        "steps": lambda: found != expected,
        "resumed steps": lambda: (
            steps_of(data, case, case.resumed_after, state)[0] != expected[case.resumed_after :]
        ),
        "documents": lambda: documents_of(data) != documents_of_files(case),
    }
    assert red[wrong]()
