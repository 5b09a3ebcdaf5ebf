"""Hugging Face data sets, tokenized once like files, or read as a stream.

`data.hf_path` is loaded by the first of these rules that fits:
    a directory written by `save_to_disk`    -> datasets.load_from_disk
    a .jsonl, .json, .parquet or .csv file   -> datasets.load_dataset(its kind, data_files=...)
    anything else                            -> datasets.load_dataset(hf_path, hf_name): a name on
                                                the Hub, or a directory of data files
The library `datasets` is in the extra `hf` and is imported only here. Private name: `_fingerprint`
of a Dataset, the library's hash of its content; tested with datasets 5.2.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtron.config import Data
from dtron.data.documents import MAX_INFLATION, Corpus, hint_of_key, text_of
from dtron.data.stream import START
from dtron.errors import ConfigError, DataError, DtronError
from dtron.io.untrusted import MB

BATCH_ROWS = 256
SAVED = (
    "dataset_info.json",
    "dataset_dict.json",
)  # one of them is in each folder written by save_to_disk
_INDEX = "__index_level_0__"
"""Column that the library adds for the first field of rows longer than the header."""
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def hf_corpus(data: Data) -> Corpus:
    """Return all rows of `data.text_key` as a corpus, to be tokenized once.

    Raises:
        ConfigError: the library is not installed.
        DataError: the data set, its split or the column does not exist.
    """
    dataset = _load(data, streaming=False)
    _check_columns(data, dataset)

    def texts() -> Iterator[str]:
        row = 0
        for batch in dataset.select_columns([data.text_key]).iter(batch_size=BATCH_ROWS):
            for text in batch[data.text_key]:
                row += 1
                yield text_of({data.text_key: text}, data.text_key, f"{name}, row {row}")

    name = stream_name(data)
    identity = json.dumps(["hf", dataset._fingerprint, len(dataset), data.text_key])
    return Corpus(name, identity, texts)


class HfStream:
    """A Hugging Face data set as a stream; its state is that of the library, as JSON.

    Raises:
        ConfigError: the library is not installed.
        DataError: the data set, its split or the column does not exist.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self._dataset = _load(data, streaming=True)
        if self._dataset.column_names is not None:
            _check_columns(data, self._dataset)
        self.name = stream_name(data)
        splits = self._dataset.info.splits or {}
        info = splits.get(data.hf_split)
        self.n_documents: int | None = info.num_examples if info else None

    def read(self, state: str) -> Iterator[str]:
        """Yield the documents after a state."""
        # An empty state makes the library start from the first row.
        self._dataset.load_state_dict({} if state == START else json.loads(state))
        row, failures = 0, _failures()
        try:
            for values in self._dataset:
                row += 1
                where = f"{self.name}, row {row} of this reading"
                yield text_of(values, self._data.text_key, where)
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
            _check_parquet(data, file)
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


def _check_parquet(data: Data, file: Path) -> None:
    """Check how many bytes a file of few bytes becomes, before the library reads it.

    Pages are compressed, and a dictionary holds a text once that many rows have. Most files pass by
    a bound that reads no texts: each row has the longest text of its group's dictionary. Others are
    counted.

    Raises:
        DataError: it becomes more than 200 times its size.
    """
    import pyarrow.parquet as pq

    room = MAX_INFLATION * file.stat().st_size + 16 * MB
    opened = pq.ParquetFile(file, read_dictionary=[data.text_key])
    groups = [opened.metadata.row_group(i) for i in range(opened.metadata.num_row_groups)]
    total = sum(group.total_byte_size for group in groups)
    if total <= room and data.text_key in opened.schema_arrow.names:
        repeated = sum(
            group.num_rows * max(_lengths_of_dictionary(opened, i, data.text_key), default=0)
            for i, group in enumerate(groups)
        )
        if total + repeated > room:
            total = _text_bytes(opened, data.text_key)
    if total > room:
        raise DataError(
            f"{stream_name(data)}: {file} becomes more than {MAX_INFLATION} times its size when it "
            "is read; write its text as .jsonl if you want to train on it"
        )


def _lengths_of_dictionary(opened: Any, group: int, text_key: str) -> list[int]:
    """Return the bytes of each text in the dictionary of a row group; its first row has all."""
    import pyarrow.compute as pc

    for batch in opened.iter_batches(1, row_groups=[group], columns=[text_key]):
        if hasattr(batch.column(0), "dictionary"):  # else no text, which the library refuses
            return pc.call_function("binary_length", [batch.column(0).dictionary]).to_pylist()
        break
    return []


def _text_bytes(opened: Any, text_key: str) -> int:
    """Return the bytes of all texts, counted by their numbers in the dictionary."""
    import pyarrow.compute as pc

    total = 0
    for batch in opened.iter_batches(1024, columns=[text_key]):
        (column,) = batch.columns
        lengths = pc.call_function("binary_length", [column.dictionary])
        taken = pc.cast(lengths.take(column.indices), "int64")
        total += pc.call_function("sum", [taken]).as_py() or 0
    return total


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
    if data.text_key not in columns:
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
