"""Documents of the user's own code: `data.source = "MODULE:NAME"`, and `Trainer(config, data=...)`.

The code gives documents by number; dtron tokenizes them once to the cache, as it does with files,
and holds out, shuffles, packs and mixes them.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from dtron.config import Data
from dtron.data.corpus.documents import Corpus, Part, Reading, identity_of_rows
from dtron.data.tokenizer import Document, TokenDocument
from dtron.errors import ConfigError, DataError, nearest, shorten
from dtron.io.user_code import import_custom, registered

GROUP = "dtron.sources"
"""Group of entry points `SHORT_NAME = "MODULE:NAME"`."""
GIVEN = "python"
"""`data.source` of a run whose documents are an argument of Trainer."""


class DocumentSource(Protocol):
    """Documents by number, the same in every process and every run."""

    version: str
    """Changes whenever a document does: the tokens in the cache are those of a version."""

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def __getitem__(self, number: int, /) -> Any:
        """Return document `number`, 0 <= number < len(self).

        A text; or a row, as a line of a JSONL file; or token ids: a list of ints, or an array or
        tensor of any integer dtype (n,). Tokens need no EOS.
        """
        ...


Factory = Callable[[Data], DocumentSource]
"""What `data.source` names: a class or function that is called with the section `data`."""


def custom_corpus(data: Data) -> Corpus:
    """Return the documents of the user's code, to be tokenized once by this process.

    Raises:
        ConfigError: the name is unknown, its import fails, or the object is no DocumentSource.
    """
    setting, source = _open(data)
    n, version = _checked(setting, source)
    name, rows = setting.removeprefix("data.source = "), identity_of_rows(data)

    def texts(_part: Part, reading: Reading) -> Iterator[Document]:
        for number in range(n):
            try:
                document = _document(source, number, f"{name}, document {number + 1:,}", reading)
            except DataError as error:
                reading.refuse(error)
                continue
            yield document

    own = [type(source).__module__, type(source).__qualname__, version, _sample(source, n)]
    identity = json.dumps(["custom", data.source, [*data.paths], n, *own, rows])
    return Corpus(name, identity, ((Part(name, 0, 0),),), texts, lambda: identity, settings=data)


def check_source(source: object) -> None:
    """Raise ConfigError if the argument `data` of Trainer is no DocumentSource."""
    _checked("data", source)


def _open(data: Data) -> tuple[str, Any]:
    """Return (key and value, for messages; the source)."""
    if data.source == GIVEN:
        if data.documents is None:
            raise ConfigError(
                f'data.source = "{GIVEN}": its documents are an argument of Trainer(config, '
                "data=...); start the script that makes them"
            )
        return f"data.source = {GIVEN}", data.documents
    if (found := import_custom("data.source", data.source, GROUP)) is None:
        known = ["files", "hf", "prepared", *registered(GROUP)]
        raise ConfigError(
            f"data.source = {data.source!r} is unknown{nearest(data.source, known)}; use "
            f"{', '.join(known)}, or MODULE:NAME"
        )
    setting, factory = found
    if not callable(factory):
        raise ConfigError(f"{setting} is no class or function; name one that takes a data section")
    try:
        return setting, factory(data)
    except (DataError, ConfigError):
        raise
    except Exception as error:
        raise ConfigError(f"{setting}: the call raised {_shown(error)}; fix the code") from error


def _checked(setting: str, source: Any) -> tuple[int, str]:
    """Return the number of documents and the version."""
    lacks = [name for name in ("__len__", "__getitem__") if not hasattr(type(source), name)]
    lacks += ["version"] * (not isinstance(getattr(source, "version", None), str))
    if lacks:
        raise ConfigError(
            f"{setting}: {type(source).__name__} has no {', no '.join(lacks)}; a source has "
            "__len__, __getitem__(number), and a text `version` that changes whenever a document "
            "does"
        )
    try:
        return len(source), source.version
    except Exception as error:
        raise ConfigError(f"{setting}: its __len__ raised {_shown(error)}; fix the code") from error


def _sample(source: DocumentSource, n: int) -> str:
    """Return a digest of three documents, which tells apart sources of one class and version."""
    digest = hashlib.sha256()
    for number in sorted({0, n // 2, n - 1} & set(range(n))):
        try:
            found = source[number]
        except Exception as error:  # reported with its number when the documents are read
            found = repr(error)
        whole = found if isinstance(found, str | Mapping) else np.asarray(found).tolist()
        digest.update(f"{whole!r}\n".encode())
    return digest.hexdigest()


def _document(source: DocumentSource, number: int, where: str, reading: Reading) -> Document:
    try:
        found = source[number]
    except Exception as error:
        raise DataError(f"{where}: the source raised {_shown(error)}") from error
    if isinstance(found, Mapping):
        return reading.document(dict(found), where)
    if reading.data.masked:
        raise DataError(
            f"{where}: data.format = {reading.data.format!r} needs a row, such as "
            f"{{'messages': [...]}}; it is {type(found).__name__}"
        )
    if isinstance(found, str):
        return reading.document({reading.data.text_key: found}, where)
    try:
        ids = np.asarray(found)
        ids = ids.astype(np.int64) if not ids.size else ids
    except (TypeError, ValueError):
        ids = np.empty(0)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(
            f"{where} is {shorten(repr(found), 80)}; use a text, a row such as {{'text': ...}}, or "
            "token ids (n,)"
        )
    return TokenDocument(ids, where)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {shorten(' '.join(str(error).split()), 300)}"
