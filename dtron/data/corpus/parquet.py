"""Parquet files: columns of texts or chats, row by row; a bound on what a small file becomes."""

import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from dtron.data.corpus.files import open_file
from dtron.errors import ConfigError, DataError
from dtron.io.untrusted import MB

MAX_INFLATION = 200
"""Limit of decompressed over compressed size of any file; text has 3 to 20."""
_BATCH_ROWS = 256


def read_parquet(
    path: str, columns_of: Callable[[list[str]], list[str]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of a file, numbers counted from 1.

    Args:
        columns_of: function that returns the columns to read of those that the file has.
    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is damaged, lacks a column, or becomes too large.
    """
    try:
        import pyarrow
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"{path} needs pyarrow; run pip install pyarrow") from None
    row = 0
    try:
        with open_file(path) as file:
            names = pq.read_schema(file).names
            columns = columns_of(names)
            if missing := [key for key in columns if key not in names]:
                known = ", ".join(map(repr, names))
                key = " (data.text_key)" if len(columns) == 1 and columns[0] != "messages" else ""
                raise DataError(f"{path}: no column {missing[0]!r}{key} among {known}")
            check_inflation(file, columns[0], path)
            room = MAX_INFLATION * file.seek(0, os.SEEK_END) + 16 * MB
            for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=columns):
                for values in batch.to_pylist():
                    row += 1
                    yield row, values
                # Of lists, `check_inflation` does not see how often a dictionary's texts are used.
                room -= batch.nbytes
                if room < 0:
                    raise _inflated(path)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or " ".join(str(error).split())
        where = f", after row {row}" if row else ""
        raise DataError(f"{path}{where}: {cause}") from None


def check_inflation(file: BinaryIO, text_key: str, name: str) -> None:
    """Check how many bytes a file of few bytes becomes, before the library reads it.

    Pages are compressed, and a dictionary holds a text once that many rows have. Most files pass by
    a bound that reads no texts: each row has the longest text of its group's dictionary. Others are
    counted.

    Args:
        file: an open Parquet file.
        name: name of the file for messages.
    Raises:
        DataError: it becomes more than 200 times its size.
    """
    import pyarrow.parquet as pq

    room = MAX_INFLATION * file.seek(0, os.SEEK_END) + 16 * MB
    opened = pq.ParquetFile(file)
    if text_key in opened.schema.names:  # those of leaves: no list of messages
        opened = pq.ParquetFile(file, read_dictionary=[text_key])
    groups = [opened.metadata.row_group(i) for i in range(opened.metadata.num_row_groups)]
    total = sum(group.total_byte_size for group in groups)
    if total <= room and text_key in opened.schema_arrow.names:
        repeated = sum(
            group.num_rows * max(_lengths_of_dictionary(opened, i, text_key), default=0)
            for i, group in enumerate(groups)
        )
        if total + repeated > room:
            total = _text_bytes(opened, text_key)
    if total > room:
        raise _inflated(name)


def _inflated(name: str) -> DataError:
    return DataError(
        f"{name} becomes more than {MAX_INFLATION} times its size when it "
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
