"""A data source outside of dtron: the rows of SQLite files, as data.source = "MODULE:NAME".

torchrun train.py --config examples/my_source/config.toml data.paths='["corpus.db"]'
"""

import sqlite3
from pathlib import Path

from dtron.config import Data
from dtron.errors import DataError


class SQLiteRows:
    """Documents of the table `documents` of each file of `data.paths`, in the order of rowid."""

    def __init__(self, data: Data) -> None:
        self._column, self._rows = data.text_key, []
        for path in map(Path, data.paths):
            if not path.is_file():  # otherwise sqlite3 makes an empty one
                raise DataError(f"data.paths: {path}: no such file")
            table = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            rows = table.execute("SELECT rowid FROM documents ORDER BY rowid")
            self._rows += [(table, row) for (row,) in rows]
        times = [(path, Path(path).stat().st_mtime_ns) for path in data.paths]
        self.version = str(times)  # another version is tokenized again

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> str:
        table, row = self._rows[number]
        query = f'SELECT "{self._column}" FROM documents WHERE rowid = ?'
        return table.execute(query, (row,)).fetchone()[0]
