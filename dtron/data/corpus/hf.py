"""Hugging Face data sets, tokenized once like files, or read as a stream.

`data.hf_path` is loaded by the first of these rules that fits:
    a directory written by `save_to_disk`    -> datasets.load_from_disk
    a .jsonl, .json, .parquet or .csv file   -> datasets.load_dataset(its kind, data_files=...)
    anything else                            -> datasets.load_dataset(hf_path, hf_name): a name on
                                                the Hub, or a directory of data files
The library `datasets` is in the extra `hf` and is imported only here. Private name: `_fingerprint`
of a Dataset, the library's hash of its content; tested with datasets 5.2.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtron.config import Data
from dtron.data.corpus.documents import (
    Corpus,
    Part,
    Reading,
    columns_of,
    hint_of_key,
    identity_of_rows,
    reader_of_rows,
)
from dtron.data.corpus.parquet import check_inflation
from dtron.data.stream import START
from dtron.data.tokenizer import Document
from dtron.errors import ConfigError, DataError, DtronError
from dtron.io.untrusted import open_regular

BATCH_ROWS = 256
SAVED = (
    "dataset_info.json",
    "dataset_dict.json",
)  # one of them is in each folder written by save_to_disk
_INDEX = "__index_level_0__"
"""Column that the library adds for the first field of rows longer than the header."""
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def hf_corpus(data: Data) -> Corpus:
    """Return all rows as a corpus, to be tokenized once: of `data.text_key`, or chats.

    Raises:
        ConfigError: the library is not installed.
        DataError: the data set, its split or the column does not exist.
    """
    dataset = _load(data, streaming=False)
    _check_columns(data, dataset)
    columns, document = columns_of(data, dataset.column_names), reader_of_rows(data)

    def texts(part: Part, reading: Reading) -> Iterator[Document]:
        number = 0
        for batch in dataset.select_columns(columns).iter(batch_size=BATCH_ROWS):
            for values in zip(*(batch[column] for column in columns), strict=True):
                number += 1
                try:
                    row = dict(zip(columns, values, strict=True))
                    found = document(row, f"{name}, row {number}")
                except DataError as error:
                    reading.refuse(error)
                    continue
                yield found

    name = stream_name(data)
    rows = identity_of_rows(data)
    identity = json.dumps(["hf", dataset._fingerprint, len(dataset), rows])
    task = (Part(name, 0, 0),)
    return Corpus(name, identity, (task,), texts, lambda: identity, settings=data)


class HfStream:
    """A Hugging Face data set as a stream; its state is that of the library, as JSON.

    Raises:
        ConfigError: the library is not installed.
        DataError: the data set, its split or the column does not exist.
    """

    def __init__(self, data: Data) -> None:
        self._document = reader_of_rows(data)
        self._dataset = _load(data, streaming=True)
        if self._dataset.column_names is not None:
            _check_columns(data, self._dataset)
        self.name = stream_name(data)
        splits = self._dataset.info.splits or {}
        info = splits.get(data.hf_split)
        self.n_documents: int | None = info.num_examples if info else None
        self.holds_out = True
        self.n_files = int(getattr(self._dataset, "num_shards", 1))
        if not hasattr(self._dataset, "shard"):  # of an older version of the library
            self.n_files = 1

    def part(self, j: int, n: int) -> "HfStream":
        """Return substream j of n, each of its own files."""
        if n == 1:
            return self
        found = copy.copy(self)
        found._dataset = self._dataset.shard(num_shards=n, index=j)
        found.name, found.n_documents = f"{self.name}, part {j} of {n} by files", None
        found.holds_out = False
        return found

    def read(self, state: str) -> Iterator[Document]:
        """Yield the documents that follow the position `state`: a result of `state()`, or START."""
        # An empty state makes the library start from the first row.
        self._dataset.load_state_dict({} if state == START else json.loads(state))
        row, failures = 0, _failures()
        try:
            for values in self._dataset:
                row += 1
                where = f"{self.name}, row {row} of this reading"
                yield self._document(values, where)
        except DtronError:
            raise
        except failures as error:
            raise DataError(
                f"{self.name}, after {row} rows of this reading: {_cause(error)}"
            ) from error

    def state(self) -> str:
        """Return the state after the last document that was read."""
        return json.dumps(self._dataset.state_dict())


def _load(data: Data, *, streaming: bool) -> Any:
    datasets = _import()
    path = Path(data.hf_path).expanduser()
    if _looks_local(data.hf_path) and not path.exists():
        raise DataError(
            f"{stream_name(data)}: no such file or folder; relative paths start at the working "
            "directory, and a data set on the Hub is NAME or OWNER/NAME"
        )
    try:
        if any((path / name).is_file() for name in SAVED):
            return _load_saved(data, path, streaming=streaming)
        for file in _parquet_files(path):
            with open_regular(file) as opened:
                check_inflation(opened, columns_of(data, ())[0], f"{stream_name(data)}: {file}")
        if path.is_file() and path.suffix.lower() in KINDS:
            name, files = KINDS[path.suffix.lower()], str(path)
        else:
            name, files = (str(path) if path.exists() else data.hf_path), None
        return datasets.load_dataset(
            name,
            data.hf_name or None,
            data_files=files,
            split=data.hf_split,
            streaming=streaming,
        )
    except DtronError:
        raise
    except _failures() as error:
        raise DataError(f"{stream_name(data)}: {_cause(error)}") from error


def _parquet_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.parquet"))
    return [path] if path.is_file() and path.suffix.lower() == ".parquet" else []


def _damaged(data: Data, error: Exception) -> DataError:
    fix = "write it again by save_to_disk"
    return DataError(f"{stream_name(data)} is damaged: {_cause(error)}; {fix}")


def _looks_local(name: str) -> bool:
    """Whether a name is a path: no data set on the Hub is called so."""
    if "://" in name:
        return False
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in KINDS


def _load_saved(data: Data, path: Path, *, streaming: bool) -> Any:
    if data.hf_name:
        raise ConfigError(
            f"data.hf_name = {data.hf_name!r} has no effect: {path} was written by save_to_disk "
            "and holds a single configuration; leave it empty"
        )
    datasets = _import()
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # of any class, by what is damaged
        raise _damaged(data, error) from error
    if isinstance(dataset, datasets.DatasetDict):
        if data.hf_split not in dataset:
            raise DataError(
                f"data.hf_split = {data.hf_split!r} is not among the splits of {path}: "
                f"{', '.join(dataset)}"
            )
        dataset = dataset[data.hf_split]
    try:
        dataset.data.table.validate(full=True)  # reading offsets that lie would end the process
    except Exception as error:
        raise _damaged(data, error) from error
    return dataset.to_iterable_dataset() if streaming else dataset


def _check_columns(data: Data, dataset: Any) -> None:
    columns = dataset.column_names
    if dataset.info.builder_name == "csv" and _INDEX in columns:
        raise DataError(
            f"{stream_name(data)}: rows of the CSV have more fields than its header, so that "
            "columns would be mixed up; put text with commas into quotes"
        )
    needed = columns_of(data, columns)
    if data.masked and (missing := [key for key in needed if key not in columns]):
        raise DataError(
            f"{stream_name(data)} has no column {missing[0]!r}, as data.format = {data.format!r} "
            f"needs, but {', '.join(columns)}"
        )
    if not data.masked and data.text_key not in columns:
        raise DataError(
            f"data.text_key = {data.text_key!r} is not a column of {stream_name(data)}, which "
            f"has {', '.join(columns)}{hint_of_key(data.text_key, columns)}"
        )


def stream_name(data: Data) -> str:
    """Return the name of a Hugging Face data set for messages."""
    name = f", data.hf_name = {data.hf_name!r}" if data.hf_name else ""
    return f"data.hf_path = {data.hf_path!r}{name}, data.hf_split = {data.hf_split!r}"


def _import() -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            'data.source = "hf" needs the library datasets; run pip install datasets'
        ) from None
    return datasets


def _failures() -> tuple[type[Exception], ...]:
    """Return the classes that the library raises for missing or unreadable data."""
    from datasets.exceptions import DatasetsError

    return (OSError, ValueError, KeyError, DatasetsError)


def _cause(error: Exception) -> str:
    cause = error.__cause__ or error  # the library's outermost error does not name the reason
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"
