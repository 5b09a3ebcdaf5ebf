"""Tokenizers: convert text to token ids and back.

There are two: a tokenizer of UTF-8 bytes, which needs no file, and any Hugging Face
`tokenizer.json`, read by the `tokenizers` library. Tokenizers add no special tokens;
`encode_documents` appends one end-of-document token (EOS) to each text. A chat is a MaskedText,
whose tokens without a loss have the bit NO_LOSS, wherever tokens are stored.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from dtron.config import Data
from dtron.errors import ConfigError, DataError, nearest
from dtron.io.untrusted import TEXT_BYTES, read_text

NO_LOSS = 1 << 31
"""Bit of a stored token that has no loss as a label; ids are below it."""

# In order of preference: the vocabulary of a chat model also has a token that ends a turn.
USUAL_EOS = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<|im_end|>",
)


@dataclass(frozen=True)
class MaskedText:
    """A document of which only some text has a loss, such as a chat."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """(first, last + 1) characters with a loss; so has a token that holds one of them."""
    ended: bool = False
    """Whether EOS follows, with a loss."""

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True)
class ImageText:
    """A document of text and images, of which only the text has a loss."""

    parts: tuple[str, ...]
    """Texts before, between and after the images."""
    images: tuple[str, ...]
    """Paths of the images relative to `folder`, one fewer than `parts`."""
    folder: Path
    name: str
    """File and line, for messages."""
    token: int
    """Id of the token in whose places the tokens of images are."""
    tokens: int
    """Number of tokens per image."""

    @property
    def paths(self) -> list[str]:
        """Paths of the images."""
        return [str(self.folder / image) for image in self.images]

    def __len__(self) -> int:
        return sum(map(len, self.parts))


@dataclass(frozen=True)
class TokenDocument:
    """A document that was tokenized before."""

    ids: np.ndarray
    """any integer dtype (n,)"""
    name: str
    """File and number, for messages."""
    start: int | None = None
    """Byte of the first token in the file; None: unknown."""

    def __len__(self) -> int:
        return len(self.ids)

    def check(self, tokenizer: "Tokenizer") -> None:
        """Raise DataError if the vocabulary lacks an id."""
        if not len(self.ids) or 0 <= self.ids.min() <= self.ids.max() < tokenizer.vocab_size:
            return
        place = int(((self.ids < 0) | (self.ids >= tokenizer.vocab_size)).argmax())
        at = "" if self.start is None else f", byte {self.start + place * self.ids.itemsize}"
        raise DataError(
            f"{self.name}{at}: token {place + 1:,} of the document is {self.ids[place]}, which "
            f"the vocabulary of {tokenizer.vocab_size} tokens does not have; set data.tokenizer to "
            "the tokenizer that has made these tokens"
        )


Ids = Sequence[int] | np.ndarray
Spans = Sequence[tuple[int, int]]
Document = str | MaskedText | TokenDocument | ImageText
"""A document before it is tokenized, or a tokenized one without EOS or with it."""


class Tokenizer(Protocol):
    """The interface of a tokenizer, for the data package and text generation."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        ...

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a document."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a document; None: none does."""
        ...

    @property
    def unk_id(self) -> int | None:
        """Id of the token for unknown text; None: every text can be encoded."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifier that changes whenever the same text might get other ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without EOS."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without EOS."""
        ...

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], Spans]]:
        """Return the ids of each text, and the (first, last + 1) characters of each id."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without EOS."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a special token, such as `[MASK]`; None: the vocabulary lacks it."""
        ...


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: ids 0 to 255; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    bos_id = None
    unk_id = None
    fingerprint = "byte-1"

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without EOS."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without EOS."""
        return [self.encode(text) for text in texts]

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], Spans]]:
        """Return the ids of each text, and the (first, last + 1) characters of each id."""
        found = []
        for text in texts:
            spans = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
            found.append((self.encode(text), spans))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; EOS is dropped, and bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i != self.eos_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """Return None: there are no special tokens."""
        return None


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`.

    Args:
        path: the file, or the folder that holds it.
        eos_token: the token that ends a document; empty: the first of USUAL_EOS in the vocabulary.
        bos_token: the token that begins a document; empty: none does.
    Raises:
        DataError: the file is missing or not a tokenizer.
        ConfigError: the vocabulary has no such token.
    """

    def __init__(self, path: str, eos_token: str = "", bos_token: str = "") -> None:
        self._path, content = path, _read(path)
        with self._naming_errors("not a Hugging Face tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
            # A file saved by a fine-tuning script may truncate or pad every text.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            if isinstance(self._tokenizer.model, tokenizers.models.BPE):
                self._tokenizer.model.dropout = None  # otherwise ids are random
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            for part in ("normalizer", "decoder"):
                if (step := getattr(self._tokenizer, part)) is not None:
                    growth = _growth(json.loads(step.__getstate__()))
                    if growth > _MOST_GROWTH:
                        raise ValueError(f"its {part} makes texts {growth:.0e} times as long")
        self.eos_id = vocabulary[_eos(path, eos_token, vocabulary)]
        self.bos_id: int | None = None
        if bos_token:
            self.bos_id = vocabulary[_token("data.bos_token", path, bos_token, vocabulary)]
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self.unk_id: int | None = vocabulary.get(unknown) if unknown else None
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have holes
        identity = json.dumps([content, self.eos_id, *([self.bos_id] if bos_token else [])])
        self.fingerprint = f"json-{hashlib.sha256(identity.encode()).hexdigest()}"

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without EOS and without the special tokens of a template."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without EOS; the library uses all cores."""
        with self._naming_errors("it cannot encode a text"):
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encoded]

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], Spans]]:
        """Return the ids of each text, and the (first, last + 1) characters of each id."""
        with self._naming_errors("it cannot encode a text"):
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
            return [(each.ids, each.offsets) for each in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; EOS, BOS and other special tokens are dropped."""
        kept = [i for i in ids if i not in (self.eos_id, self.bos_id)]
        with self._naming_errors("it cannot decode its tokens"):
            return self._tokenizer.decode(kept, skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None: the vocabulary lacks it."""
        return self._tokenizer.token_to_id(token)

    @contextlib.contextmanager
    def _naming_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except (
            BaseException
        ) as error:  # the library has no narrower class, and a Rust panic is no Exception
            raise DataError(f"data.tokenizer = {self._path}: {what}: {error}") from None


def load_tokenizer(data: Data) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    Raises:
        DataError: the file is missing or not a tokenizer.
        ConfigError: `data.eos_token` or `data.bos_token` is not in the vocabulary, or is set for
            the byte tokenizer; or the former is empty and the vocabulary has none of USUAL_EOS.
    """
    if data.tokenizer != "byte":
        return JsonTokenizer(data.tokenizer, data.eos_token, data.bos_token)
    for key in ("eos_token", "bos_token"):
        if value := getattr(data, key):
            raise ConfigError(
                f'data.{key} = {value!r} has no effect with data.tokenizer = "byte", whose '
                "documents end with 256; leave it empty"
            )
    return ByteTokenizer()


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Ids]:
    """Return the tokens of each document; a document without text has none.

    A text begins with BOS, if the tokenizer has it, and ends with EOS; a TokenDocument gets those
    that it lacks. Tokens of a MaskedText without a loss have the bit NO_LOSS.
    """
    masked = [each for each in documents if isinstance(each, MaskedText)]
    encoded = iter(tokenizer.encode_with_spans([each.text for each in masked]) if masked else ())
    texts = iter(_encode_texts(tokenizer, [each for each in documents if isinstance(each, str)]))
    return [
        next(texts)
        if isinstance(each, str)
        else _bordered(tokenizer, each.ids)
        if isinstance(each, TokenDocument)
        else encode_image_text(tokenizer, each)
        if isinstance(each, ImageText)
        else _masked(tokenizer, each, *next(encoded))
        for each in documents
    ]


def _bordered(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Return the ids of a document with BOS and EOS, int64 or as they are."""
    if not len(ids):
        return ids
    before = [] if tokenizer.bos_id in (None, int(ids[0])) else [tokenizer.bos_id]
    after = [] if ids[-1] == tokenizer.eos_id else [tokenizer.eos_id]
    return np.concatenate([np.array(x, np.int64) for x in (before, ids, after)])


def encode_image_text(tokenizer: Tokenizer, document: ImageText) -> list[int]:
    """Return the tokens of a document; without text and images there are none."""
    if not document.images and not "".join(document.parts).strip():
        return []
    image = [document.token | NO_LOSS] * document.tokens
    first, *others = tokenizer.encode_batch(document.parts)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    rest = [token for ids in others for token in (*image, *ids)]
    return [*begin, *first, *rest, tokenizer.eos_id]


def _masked(tokenizer: Tokenizer, document: MaskedText, ids: list[int], spans: Spans) -> list[int]:
    tokens, characters = np.array(ids, np.int64), np.array(spans, np.int64).reshape(-1, 2)
    has_loss = np.zeros(len(tokens), bool)
    for first, end in document.spans:
        has_loss |= (characters[:, 1] > first) & (characters[:, 0] < end)
    tokens[~has_loss] |= NO_LOSS
    return [*tokens.tolist(), *([tokenizer.eos_id] if document.ended else [])]


def _encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    encoded = tokenizer.encode_batch(texts)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [
        [*begin, *ids, tokenizer.eos_id] if ids and not text.isspace() else []
        for text, ids in zip(texts, encoded, strict=True)
    ]


_MOST_GROWTH = 1000


def _growth(step: dict[str, Any]) -> float:
    """Return the maximum factor by which a normalizer or decoder can lengthen a text.

    The factors of successive replacements multiply only if a replacement can match characters that
    an earlier replacement has added. If each of ten replacements doubles a character, but none
    matches what another adds, the maximum factor is 2.
    """
    grown: list[tuple[set[str] | None, float]] = []  # characters added (None: any), growth
    for each in _flat(step):
        content = each.get("content", each.get("prepend"))
        pattern = each.get("pattern", {}).get("String", "")
        factor = len(content or "") / len(pattern) if pattern else len(content or "") + 1
        matched = [
            growth
            for added, growth in grown
            if not pattern or added is None or added & set(pattern)
        ]
        before = max(matched, default=1.0)
        grown.append((None if content is None else set(content), before * max(1.0, factor)))
    return max((growth for _, growth in grown), default=1.0)


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the normalizers or decoders of a sequence, in order."""
    parts = step.get("normalizers", step.get("decoders", [step]))
    return parts if parts == [step] else [each for part in parts for each in _flat(part)]


def tokenizer_file(path: str) -> Path:
    """Return the file that `data.tokenizer` names, directly or by its folder."""
    where = Path(path).expanduser()
    return where / "tokenizer.json" if where.is_dir() else where


def _read(path: str) -> str:
    try:
        return read_text(tokenizer_file(path), TEXT_BYTES)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise DataError(
            f"data.tokenizer = {path}: {cause}; "
            'give the path of a Hugging Face tokenizer.json or of its folder, or "byte"'
        ) from None


def _token(key: str, path: str, wanted: str, vocabulary: dict[str, int]) -> str:
    """Return the token that a key names. Raises ConfigError: the vocabulary lacks it."""
    if wanted not in vocabulary:
        raise ConfigError(
            f"{key} = {wanted!r} is not in the vocabulary of {path}{nearest(wanted, vocabulary)}"
        )
    return wanted


def _eos(path: str, wanted: str, vocabulary: dict[str, int]) -> str:
    if wanted:
        return _token("data.eos_token", path, wanted, vocabulary)
    for token in USUAL_EOS:
        if token in vocabulary:
            return token
    raise ConfigError(
        f"data.eos_token is empty and the vocabulary of {path} has none of the usual ones "
        f"({', '.join(USUAL_EOS)}); name the token that ends a document"
    )
