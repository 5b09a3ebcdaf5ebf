"""Show the data of a run: the sequences of a step as text or as an HTML page, and statistics."""

import html
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dtron.data.best_fit_packing import PACKERS, PackingPlan
from dtron.data.corpus.document_index import DocumentIndex, Documents
from dtron.data.corpus.prepare import percentiles
from dtron.data.corpus.token_corpus import TokenCorpus
from dtron.data.packing import IGNORE, ConcatenatedDocuments, Packed, ids_and_labels
from dtron.data.tokenizer import Tokenizer

LENGTHS = (512, 1024, 2048, 4096, 8192, 32768, 131072)
"""Sequence lengths that `dtron data stats` compares."""
_SAMPLE_TOKENS = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Successive tokens of one document in a sequence."""

    source: str
    """File of the document and its number in the file, or "padding"; empty: unknown."""
    first: int
    """Position of the first token in the sequence."""
    tokens: list[int]
    labelled: list[bool]
    """Whether each token has a label."""


def pieces_of(packed: Packed, corpus: TokenCorpus | None) -> Iterator[Piece]:
    """Yield the document pieces of a sequence in order, then its padding.

    Args:
        corpus: the corpus, to name the source of each piece; None: the data are a stream, whose
            sources are unknown.
    """
    tokens, labelled = packed.tokens.tolist(), (packed.labels != IGNORE).tolist()
    filled = len(tokens) - packed.padding
    ends, first = _ends(packed, filled), 0
    spans = packed.spans if corpus is not None else ()
    for number, end in enumerate(ends):
        source = "padding" if first >= filled else ""
        if number < len(spans) and first < filled and corpus is not None:
            path, document = corpus.source_of(spans[number][0])
            source = f"{path}, document {document + 1:,}"
        yield Piece(source, first, tokens[first:end], labelled[first:end])
        first = end


def _ends(packed: Packed, filled: int) -> list[int]:
    """Return the end of each piece; the last end is the end of the sequence."""
    length = len(packed.tokens)
    if packed.pieces is not None:
        ends = (np.flatnonzero(np.diff(packed.pieces)) + 1).tolist()
    else:  # the last span includes the label after the sequence
        ends = np.cumsum([stop - start for start, stop in packed.spans])[:-1].tolist()
    return sorted({*ends, *([filled] if filled else []), length})


def as_text(pieces: Sequence[Piece], tokenizer: Tokenizer, most: int) -> str:
    """Return a sequence as text for a terminal, with at most `most` characters of each piece."""
    lines = []
    for piece in pieces:
        last = piece.first + len(piece.tokens) - 1
        free = piece.labelled.count(False)
        masked = f", {free:,} without a label" if free else ""
        lines.append(f"  -- tokens {piece.first:,} to {last:,}{masked}  {piece.source}")
        if piece.source != "padding":
            text = tokenizer.decode(piece.tokens).replace("\n", "\n     ")
            half = most // 2
            cut = text if len(text) <= most else f"{text[:half]} [...] {text[-half:]}"
            lines.append(f"     {cut}")
    return "\n".join(lines)


_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px/1.5 sans-serif;max-width:70em;margin:2em auto}}
pre{{white-space:pre-wrap;background:#f6f6f6;padding:.5em;border-left:4px solid #4a7}}
.n{{color:#999;background:#eee}}small{{color:#666}}</style>
<h1>{title}</h1><p>Tokens without a label are <span class="n">grey</span>; each box is a piece
of one document.</p>{body}"""


def as_page(
    title: str, sequences: Sequence[tuple[str, Sequence[Piece]]], decoder: Tokenizer
) -> str:
    """Return an HTML page of sequences, each with its heading."""
    parts = []
    for heading, pieces in sequences:
        parts.append(f"<h2>{html.escape(heading)}</h2>")
        for piece in pieces:
            last = piece.first + len(piece.tokens) - 1
            where = f"tokens {piece.first:,} to {last:,}  {piece.source}"
            parts.append(f"<small>{html.escape(where)}</small><pre>{_marked(piece, decoder)}</pre>")
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def _marked(piece: Piece, decoder: Tokenizer) -> str:
    """Return the text of a piece as HTML, with runs of tokens without a label in grey."""
    labelled = np.array(piece.labelled)
    ends = [*(np.flatnonzero(np.diff(labelled)) + 1).tolist(), len(labelled)]
    parts, first = [], 0
    for end in ends:
        ids = piece.tokens[first:end]
        text = html.escape(decoder.decode(ids)) + "⏎" * ids.count(decoder.eos_id)
        parts.append(text if labelled[first] else f'<span class="n">{text}</span>')
        first = end
    return "".join(parts)


def measured_rate(step: Callable[[], object], tokens: int, seconds: float = 0.5) -> float:
    """Measure how many tokens per second a loader reads, after a first step, which opens files.

    Args:
        step: reads the next step.
        tokens: tokens of a step.
        seconds: how long to read.
    """
    step()
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds or not count:
        step()
        count += 1
    return count * tokens / elapsed


def statistics(
    corpus: TokenCorpus, index: DocumentIndex, tokenizer: Tokenizer, seq_len: int
) -> str:
    """Return statistics of a corpus as text: counts, lengths, and the cost of each packing.

    Lengths and costs are those of the first group of documents, a random sample of at most about
    2^18 documents of the training split.

    Args:
        seq_len: tokens per sequence of the run, shown in addition to LENGTHS.
    """
    sample = index.group(0)
    held_out = index.held_out()
    n, total = index.n_documents, int(index.group_sizes[:, 1].sum())
    lines = [
        f"{n:,} documents and {total:,} tokens to train on, {len(held_out):,} documents and "
        f"{held_out.tokens:,} tokens held out",
        f"{corpus.duplicates:,} documents are duplicates of earlier ones",
        f"document length in tokens: {percentiles(sample.lengths)}",
    ]
    characters = sum(shard.characters for _, shard in corpus.shards)
    if characters:
        lines.append(f"{len(corpus.tokens) / characters:.3f} tokens per character")
    if tokenizer.unk_id is not None:
        stored = corpus.tokens[: min(_SAMPLE_TOKENS, len(corpus.tokens))].astype(np.int64)
        some, _ = ids_and_labels(stored)
        unknown = np.mean(some == tokenizer.unk_id)
        lines.append(f"{unknown:.3%} of the first {len(some):,} tokens are unknown tokens")
    lines += ["", "padding / split documents", _row("train.seq_len", [*PACKERS, "cut"])]
    for length in sorted({*LENGTHS, seq_len}):
        costs = [_cost(sample, length, packing, tokenizer) for packing in [*PACKERS, "cut"]]
        lines.append(_row(f"{length:,}", costs))
    return "\n".join(lines)


def _row(first: str, cells: Sequence[str]) -> str:
    return f"{first:>13}" + "".join(f"{cell:>20}" for cell in cells)


def _cost(sample: Documents, seq_len: int, packing: str, tokenizer: Tokenizer) -> str:
    if packing == "cut":
        return f"0 / {ConcatenatedDocuments(sample).split_documents(seq_len):.1%}"
    plan = PackingPlan(
        np.empty(0, np.int64),
        sample,
        seq_len=seq_len,
        packing=packing,
        mask_documents=False,
        eos_id=tokenizer.eos_id,
    )
    waste = plan.waste(plan.order(0, 0))
    return f"{waste.padding:.2%} / {waste.split_documents:.1%}"
