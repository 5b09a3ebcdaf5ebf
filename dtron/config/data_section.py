"""The section `data` of a config."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveInt, PrivateAttr, field_validator

from dtron.config.schema import MAX_RANKS, MAX_SECONDS, LocalPath, Section, StatedPath, Text

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""Name of a source in metrics and checkpoints."""
Format = Literal["text", "chat", "prompt_completion", "image_text"]
SourcePaths = Annotated[tuple[StatedPath, ...], Field(strict=False, min_length=1)]


class SpanLengths(NamedTuple):
    """Numbers of tokens of a sequence of which spans are removed; the same for all sequences."""

    text: int
    """Tokens of the text: `train.seq_len`."""
    removed: int
    """Tokens of all spans."""
    spans: int
    """Number of spans, at least 1."""

    @property
    def encoder(self) -> int:
        """Tokens that the encoder reads: the rest, a sentinel for each span, and EOS."""
        return self.text - self.removed + self.spans + 1

    @property
    def decoder(self) -> int:
        """Tokens that the decoder predicts: spans, each after its sentinel, and EOS."""
        return self.removed + self.spans + 1


class MixtureSource(Section):
    """One corpus of `data.mixture`."""

    name: Name
    """Name of the source; a run that resumes finds its position in the source by it."""
    paths: SourcePaths
    """As `data.paths`."""
    weight: float | Annotated[tuple[float, ...], Field(strict=False)] = 1.0
    """Share of the sequences from this source, relative to the sum of all weights. A list has the
    weight up to the first of `data.mixture_steps`, then up to the second, ..."""
    epochs: float | None = Field(default=None, gt=0, le=1e6)
    """How often the source may be read; then the others share its weight. Left out: no limit."""
    format: Format | None = None
    """As `data.format`, which it is if left out."""

    @field_validator("weight")
    @classmethod
    def _check_weight(cls, weight: float | tuple[float, ...]) -> float | tuple[float, ...]:
        weights = weight if isinstance(weight, tuple) else (weight,)
        if any(not 0 <= each <= 1e6 for each in weights):
            raise ValueError("a weight is at least 0 and at most 1,000,000")
        return weight

    def weight_in(self, stage: int) -> float:
        """Return the weight in a stage, counted from 0."""
        return self.weight[stage] if isinstance(self.weight, tuple) else self.weight


class ValidationSet(Section):
    """One corpus of `data.validation`."""

    name: Name
    """Name of the set in the metrics."""
    paths: SourcePaths
    """As `data.paths`."""
    format: Format | None = None
    """As `data.format`, which it is if left out."""


class Data(Section):
    """Training data: source, tokenizer, packing."""

    source: Text = "files"
    """`files`: JSONL, Parquet or text files, tokenized once and cached. `hf`: a Hugging Face data
    set, which needs the extra `hf`. `prepared`: folders that `dtron data prepare` has written. Or
    a custom source: `MODULE:NAME`, a class or function in a module of an installed package or of
    the working directory, or the name of an entry point of group `dtron.sources`; it may read
    `paths`. `python`: the argument `data` of Trainer."""
    paths: tuple[StatedPath, ...] = Field(default=("assets/kjv.jsonl.gz",), strict=False)
    """Files, folders and globs of `source = "files"`, relative to the working directory: .jsonl
    with one document per line, .txt with one document per file, each also as .gz or .zst,
    .parquet, and Megatron-Core's .idx with .bin. Folders of `source = "prepared"`. Both may be
    URLs, such as s3://bucket/folder."""
    format: Format = "text"
    """What a row is. `text`: a text, which is trained on whole. `chat`: a conversation, `messages`
    of {role, content} and perhaps `tools`; only tokens of assistants have a loss.
    `prompt_completion`: two texts or lists of messages; only the completion has a loss.
    `image_text`: a text with `<image>` in place of each image, and `images`, a list of paths
    relative to the file; the text has a loss, and the model needs a vision encoder."""
    chat_template: StatedPath = ""
    """Template that renders chats: the path of a jinja file, or `chatml`. Empty: the tokenizer's
    own, in its folder; for bytes `chatml`."""
    image_size: int = Field(default=0, ge=0, le=2**14)
    """Pixels per side to which images are resized: `model.override.vision_image_size`."""
    image_tokens: int = Field(default=0, ge=0, le=2**16)
    """Tokens per image: the number of patches of the model's vision encoder."""
    image_token: int = Field(default=0, ge=0, le=2**28)
    """Id of the token in whose places the tokens of images are: `model.override.image_token`."""
    text_key: Text = "text"
    """Key of a JSON line, or column of a Hugging Face data set, that holds the text."""
    tokenizer: StatedPath = "byte"
    """`byte`, or the path of a Hugging Face tokenizer.json or of its folder. If the key is not set,
    the tokenizer of `checkpoint.initial` is used, if it has one."""
    eos_token: Text = ""
    """Token that ends a document; empty: the first usual end token in the vocabulary, such as </s>.
    """
    bos_token: Text = ""
    """Token that begins a document, such as <s>; empty: none does. Chats begin as their template
    says."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Fraction of the documents that is held out for validation, chosen by a hash of their
    tokens; at most about 2^18 documents. Copies of a held-out document are held out too."""
    packing: Literal["cut", "best_fit", "pad"] = "cut"
    """How documents become sequences. `cut`: documents are concatenated and cut every train.seq_len
    tokens; no padding, but most documents are split. `best_fit`: whole documents share a sequence
    (best-fit decreasing), padded. `pad`: one document per sequence, padded. With `best_fit` and
    `pad`, only documents longer than a sequence are split, and labels never cross documents."""
    mask_documents: bool = False
    """Restrict attention to each document, and restart positions at its first token."""
    objective: Literal["auto", "next_token", "masked", "span_corruption"] = "auto"
    """What the model predicts. `next_token`: each token from those before it. `masked`: tokens of
    which it sees a mask, from all other tokens. `span_corruption`: spans of tokens, from the text
    without them, which an encoder reads (T5). `auto`: that for which the model is built."""
    mask_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Probability that a token is predicted, with `objective = "masked"`; with "span_corruption"
    the fraction of a sequence's tokens."""
    mask_span: float = Field(default=3.0, ge=1, le=1e6)
    """Mean number of tokens of a span, with `objective = "span_corruption"`."""
    mask_token: Text = ""
    """Token that masks others; empty: the first usual one in the vocabulary, such as [MASK]."""
    max_document_mb: float = Field(default=128.0, gt=0, le=10_000)
    """Maximum size of a document or line of a file, in MB (10^6 bytes). A longer one is an error:
    this limits host memory."""
    cache_dir: LocalPath = "~/.cache/dtron"
    """Folder of tokenized data, which later runs use again."""
    fetch_ahead: int = Field(default=8, ge=0, le=1000)
    """Number of steps that a background thread reads ahead, of prepared folders in an object store,
    of a stream, and of images. 0: each step reads its own sequences, while the GPU waits."""
    store_seconds: int = Field(default=300, ge=1, le=MAX_SECONDS)
    """Prepared folders in an object store: seconds for which a request that fails is repeated,
    before the run ends with an error."""
    hf_path: StatedPath = ""
    """Name or local path of the Hugging Face data set."""
    hf_name: Text = ""
    """Configuration of the Hugging Face data set, if it has several."""
    hf_split: Text = "train"
    """Split of the Hugging Face data set."""
    hf_streaming: bool = False
    """Read the Hugging Face data set as a stream instead of tokenizing it before the start. Then
    documents are not shuffled, and the first documents are held out for validation."""

    substreams: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Number of parts, by files, into which a stream is divided; sequence k of the run is from part
    k mod n. Each data-parallel rank tokenizes the parts of its own sequences only. Parts repeat by
    themselves, so their files should hold about as many tokens."""

    mixture: tuple[MixtureSource, ...] = Field(default=(), strict=False)
    """Several corpora in place of `paths`, mixed by weight, each as a table [[data.mixture]]."""
    mixture_steps: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Numbers of steps after which the next weights of the mixture begin. With n of them, `weight`
    is one number, or a list of n + 1."""
    validation: tuple[ValidationSet, ...] = Field(default=(), strict=False)
    """Corpora for validation only, each as a table [[data.validation]] with `name` and `paths`.
    Their losses are logged as `validation_loss/NAME`; `validation_fraction` is independent. With
    `source = "files"` or `"prepared"`."""

    _documents: Any = PrivateAttr(None)

    @property
    def documents(self) -> Any:
        """Documents of `source = "python"`, in this process only; None: not given."""
        return self._documents

    def of_documents(self, documents: Any) -> "Data":
        """Return the section with `source = "python"` and these documents."""
        found = self.model_copy(update={"source": "python"})
        found._documents = documents
        return found

    @property
    def parts(self) -> dict[str, "Data"]:
        """Sources of the mixture by name, as sections of their own; without a mixture, `self`, with
        the name ""."""
        return {each.name: self._of(each) for each in self.mixture} or {"": self}

    @property
    def validation_parts(self) -> dict[str, "Data"]:
        """Corpora of `validation` by name, as sections of their own that hold nothing out."""
        return {each.name: self._of(each, 0.0) for each in self.validation}

    def _of(
        self, one: MixtureSource | ValidationSet, validation_fraction: float | None = None
    ) -> "Data":
        changed = {"paths": one.paths, "mixture": (), "mixture_steps": (), "validation": ()}
        if one.format is not None:
            changed["format"] = one.format
        if validation_fraction is not None:
            changed["validation_fraction"] = validation_fraction
        return self.model_copy(update=changed)

    def span_lengths(self, seq_len: int) -> "SpanLengths":
        """Return the lengths of a text of `seq_len` tokens with `objective = "span_corruption"`."""
        removed = min(max(round(seq_len * self.mask_fraction), 1), seq_len - 1)
        spans = min(max(round(removed / self.mask_span), 1), removed, seq_len - removed)
        return SpanLengths(seq_len, removed, spans)

    @property
    def masked(self) -> bool:
        """Whether only some tokens of a document have a loss."""
        return self.format != "text"

    @property
    def chats(self) -> bool:
        """Whether rows are chats."""
        return self.format in ("chat", "prompt_completion")

    @property
    def has_chats(self) -> bool:
        """Whether a part of the data, or a validation set, is of chats."""
        parts = [*self.parts.values(), *self.validation_parts.values()]
        return any(part.chats for part in parts)

    @property
    def has_images(self) -> bool:
        """Whether a part of the data, or a validation set, has images."""
        parts = [*self.parts.values(), *self.validation_parts.values()]
        return any(part.format == "image_text" for part in parts)

    @property
    def in_store(self) -> bool:
        """Whether training or validation reads its tokens from an object store."""
        parts = [*self.parts.values(), *self.validation_parts.values()]
        paths = [path for part in parts for path in part.paths]
        return self.source == "prepared" and any("://" in path for path in paths)

    @property
    def steps_ahead(self) -> int:
        """Number of steps that the loader reads ahead: `fetch_ahead`; 0 if that has no effect."""
        slow = self.hf_streaming or self.in_store or self.has_images
        return self.fetch_ahead if slow else 0
