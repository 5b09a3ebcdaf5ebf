"""Megatron-Core's PREFIX.idx and PREFIX.bin, written here by the description of the format."""

import json
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtron.config import Data
from dtron.data import identity_of, load_tokenizer, prepare
from dtron.data.command import main
from dtron.data.corpus.documents import Reading, files_corpus
from dtron.data.corpus.readers.megatron import TYPES, read_megatron
from dtron.data.sources import open_corpus_and_index
from dtron.errors import DataError

MakeData = Callable[..., Data]
TOKENIZER = load_tokenizer(Data())
CODES = {np.dtype(name): code for code, name in TYPES.items()}


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "<u2"
) -> Path:
    """Write documents, each of one sequence or several, as Megatron-Core does; return the .bin."""
    sequences = [np.array(each, dtype) for document in documents for each in document]
    lengths = np.array([len(each) for each in sequences], "<i4")
    sizes = lengths.astype("<i8") * np.dtype(dtype).itemsize
    borders = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    header = struct.pack(
        "<9sQBQQ", b"MMIDIDX", 1, CODES[np.dtype(dtype)], len(lengths), len(borders)
    )
    pointers = (np.cumsum(sizes) - sizes).astype("<i8")
    index = header + lengths.tobytes() + pointers.tobytes() + borders.tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(each.tobytes() for each in sequences))
    return prefix.with_suffix(".bin")


def halves(ids: list[int]) -> list[list[int]]:
    return [ids[: len(ids) // 2], ids[len(ids) // 2 :]]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    """The same 40 documents as x.jsonl, and as Megatron-Core data sets a and b.

    Documents of `a` have two sequences and end with EOS, those of `b` have one and lack EOS.
    """
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "x.jsonl").write_text(lines, encoding="utf-8")
    ids = [TOKENIZER.encode(text) for text in texts]
    (tmp_path / "sets").mkdir()
    write_megatron(tmp_path / "sets" / "a", [halves([*each, 256]) for each in ids[:25]])
    write_megatron(tmp_path / "sets" / "b", [[each] for each in ids[25:]], "<i4")
    (tmp_path / "sets" / "weights.bin").write_bytes(b"not tokens")  # in the folder, without .idx
    return tmp_path


def data_of(tmp_path: Path, *paths: Path, **keys: Any) -> Data:
    cache = str(tmp_path / "cache")
    return Data.model_validate({"paths": [*map(str, paths)], "cache_dir": cache} | keys)


@pytest.mark.parametrize("task_bytes", [100, 1 << 20])
def test_the_same_documents_as_jsonl(
    corpus: Path, task_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by folder, prefix, .idx or .bin; in one task or in many; of uint16 and of int32."""
    monkeypatch.setattr("dtron.data.corpus.documents.TASK_BYTES", task_bytes)
    monkeypatch.setattr("dtron.data.sources.cores", lambda: 1)
    wanted = data_of(corpus, corpus / "x.jsonl")
    prepare(wanted)
    sets = corpus / "sets"
    for paths in ([sets], [sets / "a", sets / "b.bin"], [sets / "a.idx", sets / "b.*x"]):
        data = data_of(corpus, *paths)
        prepare(data)
        assert identity_of(data, TOKENIZER) == identity_of(wanted, TOKENIZER)


def test_sequences_and_statistics(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dtron data prepare`, `show` and `stats` take them; a document is named by its file."""
    out, a = corpus / "out", corpus / "sets" / "a.bin"
    cache = f"data.cache_dir={corpus / 'cache'}"
    assert main(["prepare", "--paths", str(a), "--out", str(out)]) == 0
    assert "25 documents" in capsys.readouterr().out
    words = [f'data.paths=["{a}"]', cache, "train.seq_len=32", "train.global_batch=4"]
    assert main(["show", *words]) == 0
    assert f"{a}, document " in capsys.readouterr().out
    assert main(["stats", *words]) == 0
    assert "24 documents and 852 tokens to train on, 1 documents" in capsys.readouterr().out


def test_parts_have_each_document_once(tmp_path: Path) -> None:
    """Wherever a file is divided; empty documents too."""
    documents = [[[n] * (n % 4)] * (n % 3) for n in range(50)]
    path = write_megatron(tmp_path / "x", documents, "<u2")
    size = path.stat().st_size
    for step in (1, 2, 7, 64, size):
        bounds = [(start, min(start + step, size)) for start in range(0, size, step)]
        parts = [read_megatron(str(path), a, b, 1 << 40, pytest.fail) for a, b in bounds]
        found = [document.ids.tolist() for part in parts for document in part]
        assert found == [[n for sequence in document for n in sequence] for document in documents]


HEADER = 34
"""Bytes before the lengths; then 3 lengths of 4 bytes, 3 pointers of 8 and 3 borders of 8."""
DAMAGES: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "magic": (lambda x: x.__setitem__(0, 0), "x.idx, byte 0: it does not begin with MMIDIDX"),
    "version": (lambda x: x.__setitem__(9, 2), "x.idx, byte 9: version 2"),
    "type": (lambda x: x.__setitem__(17, 6), "x.idx, byte 17: type 6 of tokens"),
    "header": (lambda x: x.__delitem__(slice(20, None)), "x.idx, byte 20: truncated"),
    "truncated": (lambda x: x.__delitem__(slice(90, None)), "x.idx, byte 90: truncated: 3 sequ"),
    "longer": (lambda x: x.extend(b"12"), "x.idx, byte 94: 2 bytes more"),
    "modes": (lambda x: x.extend(b"\0\1\0"), "x.idx, byte 94: multimodal"),
    "many": (lambda x: x.__setitem__(24, 9), "x.idx, byte 94: truncated"),
    "negative": (lambda x: x.__setitem__(HEADER + 7, 255), "x.idx, byte 38: a sequence of -"),
    "first": (lambda x: x.__setitem__(HEADER + 12, 2), "x.idx, byte 46: the first sequence begins"),
    "beyond": (lambda x: x.__setitem__(HEADER + 23, 1), r"x.idx, byte 54: sequence 2 .* 20 bytes"),
    "gap": (lambda x: x.__setitem__(HEADER + 20, 8), "x.idx, byte 46: sequence 1 has the bytes 0"),
    "border": (lambda x: x.__setitem__(HEADER + 44, 9), "x.idx, byte 78: document 2 begins with"),
    "last": (lambda x: x.__setitem__(HEADER + 52, 2), "x.idx, byte 70: documents have the sequ"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_indices(damage: str, tmp_path: Path) -> None:
    """Named with the file and the byte; nothing is read as if it were whole."""
    spoil, message = DAMAGES[damage]
    path = write_megatron(tmp_path / "x", [[[1, 2, 3], [4, 5]], [[6, 7, 8, 9, 10]]])
    index = path.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    spoil(content)
    index.write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(data_of(tmp_path, path))


def test_other_errors(tmp_path: Path) -> None:
    """A truncated .bin, a .bin that is missing, another vocabulary, chats."""
    path = write_megatron(tmp_path / "x", [[[1, 2, 3]], [[4, 300, 5]]])
    with pytest.raises(DataError) as error:
        prepare(data_of(tmp_path, path))
    assert (
        f"{path}, document 2, byte 8: token 2 of the document is 300, which the vocabulary of "
        in (str(error.value))
    )
    with pytest.raises(DataError, match=re.escape("x.idx has no rows, as data.format = 'chat'")):
        prepare(data_of(tmp_path, path, format="chat"))
    with pytest.raises(DataError, match="million bytes"):
        prepare(data_of(tmp_path, path, max_document_mb=1e-6))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"x.idx, byte 50: sequence 2 .* which has 11 bytes"):
        prepare(data_of(tmp_path, path))
    path.unlink()
    with pytest.raises(DataError, match=r"x.bin: No such file"):
        prepare(data_of(tmp_path, path))


def test_tokens_without_sequences_are_refused(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x", [])
    path.write_bytes(bytes(20))
    with pytest.raises(DataError, match=r"x.idx has no sequences, but .*x.bin has 20 bytes"):
        prepare(data_of(tmp_path, path))


def test_what_cannot_be_read_may_be_left_out(tmp_path: Path) -> None:
    path, out = (
        write_megatron(tmp_path / "x", [[[1, 2, 3]], [[4, 300, 5]], [[6]]]),
        tmp_path / "out",
    )
    assert main(["prepare", "--paths", str(path), "--out", str(out), "--on-error", "skip"]) == 0
    data = data_of(tmp_path, path, max_document_mb=5e-6)
    assert [x.ids.tolist() for x in files_corpus(data).documents(Reading(data, True))] == [[6]]  # type: ignore[union-attr]
    data = data_of(tmp_path, out, source="prepared", validation_fraction=0)
    corpus, _ = open_corpus_and_index(data)
    assert corpus.tokens[: len(corpus.tokens)].tolist() == [1, 2, 3, 256, 6, 256]
