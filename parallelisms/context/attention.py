"""Context parallelism: ranks share each sequence, and attention alone needs what others hold.

Every rank of the cp axis has T / cp tokens of each sequence, an early and a late piece of every
document (`parallelisms/context/load_balance.py`). All layers but attention work on tokens one by
one. Attention gets at the other ranks' keys in one of four ways:

    ring          Keys and values go round from rank to rank; each rank attends to the block at hand
                  while the next one is on its way, and merges the results by their log-sum-exp. In
                  the backward their gradients travel along.
    all_gather    All keys and values are gathered, then attended to at once; gradients are
                  reduce-scattered.
    ulysses       All-to-all: from T / cp tokens of all heads to all tokens of H / cp heads, and
                  back after attention.
    hierarchical  ulysses inside groups of `inner` neighbours, a ring between the groups.

They are one scheme: cp = outer x inner, an all-to-all over `inner` ranks, and between `outer`
blocks either a ring or a gathering. ring and all_gather have inner = 1, ulysses has outer = 1.

**One step of the ring.** A block holds an early and a late half of every document, of equal size.
Rank o with the block of rank s attends

    s = o     all its queries to all keys, causally
    s < o     all its queries to the early keys, which all lie before them; no late key does
    s > o     its late queries to all keys; none lies before an early query

so that every step but the first is half a block's worth of unmasked attention on every rank: causal
work is even, and the kernel needs no mask. Documents change nothing but that a query sees keys of
its own document only, which kernels take as segments: where each document's queries and keys are.

**Gathered**, the keys are put in the order of the sequence; then the early queries attend to all
keys up to their end, causally, and the late ones likewise. Nothing is merged.

Softmax statistics, merged outputs and travelling gradients are float32 at least. Keys and values
are sent with their G heads, not with the H of the queries. Attention is one registered operator, so
that compile keeps one graph and recomputation can keep its output.

Legend: B sequences, T tokens, t = T / cp on a rank, H query heads, G key/value heads, K head_dim, N
tokens of a block, all its sequences together.
Sources: ring attention, arXiv:2310.01889; merging, arXiv:2205.14135; Ulysses, arXiv:2309.14509;
hierarchical, USP, arXiv:2405.07719; all-gather, Llama 3, arXiv:2407.21783, section 3.3.2.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from dtron.config import CpMethod, Parallel
from dtron.errors import ConfigError
from dtron.kernels.attention import (
    KERNELS,
    Kernel,
    Score,
    Tables,
    add_sink,
    sink_gradient,
)
from dtron.parallelisms.context.load_balance import Ints, held, lengths, pieces
from dtron.parallelisms.functional_collectives import (
    NamedGroup,
    all_gather,
    all_to_all_even,
    reduce_scatter,
    wait_tensor,
)


@dataclass(frozen=True)
class Shape:
    """How a method lays out the cp axis."""

    outer: int
    inner: int
    gathers: bool

    @property
    def rings(self) -> bool:
        """Whether blocks go round."""
        return self.outer > 1 and not self.gathers


def shape_of(method: CpMethod, cp: int, inner: int = 0) -> Shape:
    """A method's layout of cp ranks.

    Args:
        inner: ranks of the hierarchical method's all-to-all; 0: the largest proper divisor of cp.

    Raises:
        ConfigError: an `inner` that does not divide cp, or a cp that has no proper divisor.
    """
    if method != "hierarchical":
        return Shape(1, cp, False) if method == "ulysses" else Shape(cp, 1, method == "all_gather")
    legal = [n for n in range(2, cp) if cp % n == 0]
    if not legal:
        raise ConfigError(
            f'parallel.cp_method = "hierarchical" needs a parallel.cp that is a product of two '
            f'numbers, such as 4; {cp} is not: use "ring" or "ulysses"'
        )
    if inner and inner not in legal:
        raise ConfigError(
            f"parallel.cp_inner = {inner} is no proper divisor of parallel.cp = {cp}; use "
            f"{', '.join(map(str, legal))}"
        )
    return Shape(cp // (inner or legal[-1]), inner or legal[-1], False)


# -- who holds which tokens ------------------------------------------------------------------------


class Split:
    """Which tokens of a micro-batch each cp rank holds, made on the host from its documents.

    Args:
        documents: integers (B, T), equal within a document; None: one document a sequence.
        shape: (B, T).

    Raises:
        ConfigError: 2 * cp does not divide T.
    """

    def __init__(self, documents: Tensor | None, shape: tuple[int, int], cp: int) -> None:
        if shape[1] % (2 * cp):
            below = shape[1] // (2 * cp) * 2 * cp
            raise ConfigError(
                f"parallel.cp = {cp} cuts a sequence into {2 * cp} pieces, which does not divide "
                f"its {shape[1]} tokens; use a multiple such as {below or 2 * cp}"
            )
        self.documents = None if documents is None else documents.numpy()
        self.cp, self.shape = cp, shape
        self.piece = pieces(self.documents, shape, 2 * cp)

    def index(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of a rank are: int64 (B, T / cp)."""
        return torch.from_numpy(held(self.piece, rank, 2 * self.cp))

    def tables(self, layouts: Mapping[CpMethod, Shape], rank: int) -> Tables | None:
        """What attention on a rank needs, by method; None where all is one document."""
        if self.documents is None:
            return None
        numbers = _count_documents(self.documents)
        return {name: _tables(self, numbers, shape, rank) for name, shape in layouts.items()}


def _count_documents(documents: NDArray) -> Ints:
    """Number of each token's document in the whole micro-batch: (B, T) -> int64 (B * T,)."""
    by_row = [lengths(row) for row in documents]
    return np.arange(sum(map(len, by_row))).repeat(np.concatenate(by_row))


def _tables(split: Split, numbers: Ints, shape: Shape, rank: int) -> tuple[Tensor, ...]:
    """`arrange` (N,) from the order of arrival to early, then late tokens. Then, of a ring: `order`
    (outer, N), from there to the order of the sequences, of every block; segments
    (outer, 2, n + 1) of every step. Gathered: `keys` of the early and of the late queries among the
    gathered tokens, int64 (.,) each; segments (2, 2, n + 1)."""
    flat, mine = split.piece.ravel(), rank // shape.inner
    early = [_within(flat, s * shape.inner, shape) for s in range(shape.outer)]
    late = [
        _within(flat, (2 * shape.outer - 1 - s) * shape.inner, shape) for s in range(shape.outer)
    ]
    blocks = [np.concatenate(both) for both in zip(early, late, strict=True)]
    arrange = _positions(_arrival(split, shape, mine), flat.size)[blocks[mine]]
    if shape.gathers:
        ends = ((mine + 1) * shape.inner, (2 * shape.outer - mine) * shape.inner)
        gathered = _positions(np.concatenate(blocks), flat.size)
        keys = [np.flatnonzero(flat < end) for end in ends]
        pairs = list(zip((early[mine], late[mine]), keys, strict=True))
        rest = [gathered[k] for k in keys]
    else:
        steps = range(shape.outer)
        pairs = [
            (late[mine] if s > mine else blocks[mine], early[s] if s < mine else blocks[s])
            for s in steps
        ]
        rest = [np.stack([np.argsort(block, kind="stable") for block in blocks])]
    bounds = _bounds([(numbers[q], numbers[k]) for q, k in pairs])
    return (*map(torch.from_numpy, (arrange, *rest)), bounds)


def _within(flat: Ints, first: int, shape: Shape) -> Ints:
    """Where the tokens of `inner` pieces are, sequence by sequence."""
    return np.flatnonzero((flat >= first) & (flat < first + shape.inner))


def _arrival(split: Split, shape: Shape, block: int) -> Ints:
    """Tokens of a block, as indices into (B * T,), in the order in which `_to_heads` gives them."""
    ranks = range(block * shape.inner, (block + 1) * shape.inner)
    by_rank = [held(split.piece, rank, 2 * split.cp) for rank in ranks]
    rows = np.arange(split.shape[0])[:, None] * split.shape[1]
    return (np.concatenate(by_rank, axis=1) + rows).ravel()


def _positions(tokens: Ints, n: int) -> Ints:
    """The inverse of a list of indices below n."""
    found = np.zeros(n, dtype=np.int64)
    found[tokens] = np.arange(len(tokens))
    return found


def _bounds(pairs: Sequence[tuple[Ints, Ints]]) -> Tensor:
    """Segments of pairs of (queries' documents, keys' documents)."""
    documents = 1 + max(int(numbers.max()) for pair in pairs for numbers in pair)
    counts = [[np.bincount(numbers, minlength=documents) for numbers in pair] for pair in pairs]
    sums = np.cumsum(np.pad(np.array(counts), ((0, 0), (0, 0), (1, 0))), axis=-1)
    return torch.from_numpy(sums.astype(np.int32))


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContextAttention:
    """Causal attention over sequences that cp ranks share; stands in for a module's forward."""

    method: CpMethod
    shape: Shape
    outer: dist.ProcessGroup
    inner: dist.ProcessGroup
    kernel: str
    """A row of KERNELS."""
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    """Of the scores; 0: 1 / sqrt(K)."""
    named: NamedGroup | None = field(default=None, init=False, repr=False, compare=False)
    """`outer`, held for the operator."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", NamedGroup.of(self.outer))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tables | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """softmax(q k^T scale) v over the whole sequence, within documents.

        Args:
            q: (B, t, H, K) of this rank's tokens, in `Split`'s order.
            k: (B, t, G, K).
            v: (B, t, G, K).
            mask: of `Split.tables`; None: one document a sequence.
            sink: (H,), a score without a value that every query of a head sees too.
        Returns:
            (B, t, H, K) in q's dtype.
        """
        tables = () if mask is None else self._own(mask)
        if q.shape[1] != k.shape[1] or q.shape[2] % k.shape[2]:
            raise ConfigError(
                f"attention over cp ranks takes q (B, t, H, K) and k (B, t, G, K), not "
                f"{tuple(q.shape)} and {tuple(k.shape)}"
            )
        n = self.shape.inner
        if n > 1:
            q, k, v = _to_heads(q, k, v, self.inner, n)
            sink = None if sink is None else sink.chunk(n)[self.inner.rank()]
        if tables and not KERNELS[self.kernel].segments:
            raise ConfigError(f"the {self.kernel} kernel cannot keep documents apart with cp > 1")
        out = torch.ops.dtron.context_attention(
            q,
            k,
            v,
            sink,
            list(tables),
            self.outer.group_name,
            n,
            self.shape.gathers,
            self.kernel,
            self.scale or q.shape[-1] ** -0.5,
            self.window,
            self.softcap,
        )[0]
        return _to_tokens(out, self.inner, n) if n > 1 else out

    def _own(self, mask: Tables) -> tuple[Tensor, ...]:
        if not isinstance(mask, Mapping) or self.method not in mask:
            raise ConfigError(
                f"the mask of a module that attends over cp ranks by {self.method!r} is the whole "
                "dict that Split.tables gave for its Context, on the model's device"
            )
        return mask[self.method]


def _to_heads(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all from t tokens of all heads to n * t tokens of 1 / n of the heads, rank after rank.
    Key/value heads that n does not divide are repeated first."""
    copies = math.lcm(k.shape[2], n) // k.shape[2]
    if copies > 1:
        k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
    heads = [x.shape[2] // n for x in (q, k, v)]
    parts = [x.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4) for x in (q, k, v)]
    sent = torch.cat(parts, dim=3)  # (n, B, t, heads / n, K)
    got = all_to_all_even(sent, group)
    tokens = got.permute(1, 0, 2, 3, 4).flatten(1, 2)
    q, k, v = tokens.split(heads, dim=2)
    return q, k, v


def _to_tokens(out: Tensor, group: dist.ProcessGroup, n: int) -> Tensor:
    """The way back: (B, n * t, H / n, K) -> (B, t, H, K)."""
    sent = out.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    got = all_to_all_even(sent, group)
    return got.permute(1, 2, 0, 3, 4).flatten(2, 3)


def run_context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    tables: Sequence[Tensor],
    group: str,
    inner: int,
    gathers: bool,
    kernel: str,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to all blocks of keys.

    Args:
        q: (B, inner * t, H, K), in the order of arrival: rank after rank, each early then late.
        k: (B, inner * t, G, K).
        v: (B, inner * t, G, K).
        sink: (H,) or None.
        tables: of `Split.tables` for the method; empty: one document a sequence.
        group: name of the process group of the blocks.
        inner: ranks that the tokens come from.
        gathers: whether all keys are gathered, or go round.
        kernel: a row of KERNELS.
        scale, window, softcap: of `Score`.
    Returns:
        out as q, and lse (B, inner * t, H) over all keys and the sink.
    """
    blocks = _Blocks(q.shape, tables, group, inner, gathers)
    score = Score(scale, True, window, softcap)
    queries, keys, values = (blocks.arrange(x) for x in (q, k, v))
    out, lse = blocks.attend(queries, keys, values, KERNELS[kernel], score)
    if sink is not None:
        out, lse = add_sink(out, lse, sink)
    return blocks.restore(out).to(q.dtype), blocks.restore(lse)


context_attention = torch.library.custom_op(
    "dtron::context_attention", run_context_attention, mutates_args=()
)


@context_attention.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide)


def run_context_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: Sequence[Tensor],
    group: str,
    inner: int,
    gathers: bool,
    kernel: str,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; arguments as in the forward, which gave out and lse."""
    blocks = _Blocks(q.shape, tables, group, inner, gathers)
    score = Score(scale, True, window, softcap)
    grad, q, k, v, out, lse = (blocks.arrange(x) for x in (grad, q, k, v, out, lse))
    grads = blocks.differentiate(grad, q, k, v, out, lse, KERNELS[kernel], score)
    # Copies: those of k and v are two parts of one tensor, and operators may not return views.
    dq, dk, dv = (blocks.restore(g).to(q.dtype, copy=True) for g in grads)
    return dq, dk, dv


context_attention_backward = torch.library.custom_op(
    "dtron::context_attention_backward", run_context_attention_backward, mutates_args=()
)


@context_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, tables, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, sink, *output, *tables)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, sink, out, lse, *tables = ctx.saved_tensors
    if grad is None:
        return *[None] * 4, [None] * len(tables), *[None] * len(ctx.settings)
    grads = context_attention_backward(grad, q, k, v, out, lse, tables, *ctx.settings)
    due = None if sink is None else sink_gradient(grad, out, lse, sink)
    return *grads, due, [None] * len(tables), *[None] * len(ctx.settings)


context_attention.register_autograd(_backward, setup_context=_save)


# -- block by block --------------------------------------------------------------------------------

Where = slice | Tensor
"""Some of a block's tokens: dim 1 of a tensor (B, N / B, ...), or of (1, N, ...) with documents."""
_ALL = slice(None)


@dataclass(frozen=True)
class _Pair:
    """Queries of this rank that see keys of one block, or of all that were gathered."""

    queries: Where
    keys: Where
    causal: bool
    segments: Tensor | None


class _Blocks:
    """What the operator does with the tokens of one rank, arranged: early before late."""

    def __init__(
        self,
        shape: Sequence[int],
        tables: Sequence[Tensor],
        group: str,
        inner: int,
        gathers: bool,
    ) -> None:
        self.batch, self.tables, self.inner, self.gathers = shape[0], tables, inner, gathers
        self.group = NamedGroup.find(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.half = shape[1] // 2 * (shape[0] if tables else 1)

    # A rank's tokens arrive as (inner, early and late, piece); late pieces of later ranks lie
    # before those of earlier ones.

    def arrange(self, x: Tensor) -> Tensor:
        """(B, inner * t, ...) -> the same in the order of the block, (1, B * inner * t, ...) where
        there are documents."""
        if self.tables:
            return x.flatten(0, 1)[self.tables[0]].unsqueeze(0)
        if self.inner == 1:
            return x
        early, late = x.unflatten(1, (self.inner, 2, -1)).unbind(2)
        return torch.cat([early.flatten(1, 2), late.flip(1).flatten(1, 2)], dim=1)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of `arrange`."""
        if self.tables:
            flat = x.new_empty(x.shape[1:])  # contiguous, whatever strides the kernel gave
            flat[self.tables[0]] = x[0]
            return flat.unflatten(0, (self.batch, -1))
        if self.inner == 1:
            return x.contiguous()
        early, late = (part.unflatten(1, (self.inner, -1)) for part in x.chunk(2, dim=1))
        return torch.stack([early, late.flip(1)], dim=2).flatten(1, 3)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, score: Score
    ) -> tuple[Tensor, Tensor]:
        """out (., ., H, K) and lse (., ., H), in float32 at least."""

        def forward(pair: _Pair, keys: Tensor) -> tuple[Tensor, Tensor]:
            found = [_take(x, pair.keys) for x in keys]
            queries = _take(q, pair.queries)
            out, lse = kernel.forward(queries, *found, pair.segments, _of(pair, score))
            return out, lse.transpose(1, 2)

        keys = torch.stack([k, v])
        if self.gathers:
            gathered = self._gather(keys)
            parts = [forward(pair, gathered) for pair in self._gathered_pairs()]
            outs, sums = zip(*parts, strict=True)
            return torch.cat(outs, dim=1), torch.cat(sums, dim=1)
        merged = _Merged()
        for block, at_hand in self._round(keys):
            pair = self._ring_pair(block)
            merged.add(pair.queries, *forward(pair, at_hand))
        return merged.out, merged.lse

    def differentiate(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kernel: Kernel,
        score: Score,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, in float32 at least."""
        grad_q = torch.zeros_like(q, dtype=lse.dtype)

        def backward(pair: _Pair, keys: Tensor, due: Tensor) -> None:
            parts = [_take(x, pair.queries) for x in (grad, q)]
            parts += [_take(x, pair.keys) for x in keys]
            sums = [_take(x, pair.queries) for x in (out, lse)]
            sums[1] = sums[1].transpose(1, 2).contiguous()
            found = kernel.backward(*parts, *sums, pair.segments, _of(pair, score))
            for target, where, part in zip(
                (grad_q, *due), (pair.queries, pair.keys, pair.keys), found, strict=True
            ):
                _add(target, where, part)

        exchange = self._scatter if self.gathers else self._carry
        grad_k, grad_v = exchange(torch.stack([k, v]), lse.dtype, backward)
        return grad_q, grad_k, grad_v

    # -- gathered ---------------------------------------------------------------------------

    def _gather(self, keys: Tensor) -> Tensor:
        """(2, B, N / B, G, K) of all blocks, in the order of the sequence where there are no
        documents, else one after the other in a row: (2, 1, all, G, K)."""
        parts = all_gather(keys.flatten(0, 1), self.size, self.group.group_name)
        got = wait_tensor(parts).unflatten(0, (self.size, *keys.shape[:2]))
        if self.tables:
            return got.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        early, late = got.unflatten(3, (2, -1)).unbind(3)  # (blocks, 2, B, half, G, K)
        return torch.cat([*early, *late.flip(0)], dim=2)

    def _scatter(
        self, keys: Tensor, dtype: torch.dtype, backward: Callable[[_Pair, Tensor, Tensor], None]
    ) -> Tensor:
        gathered = self._gather(keys)
        due = torch.zeros_like(gathered, dtype=dtype)
        for pair in self._gathered_pairs():
            backward(pair, gathered, due)
        if self.tables:
            by_block = torch.stack(due.chunk(self.size, dim=2))
        else:
            halves = due.chunk(2 * self.size, dim=2)
            ends = zip(halves[: self.size], reversed(halves[self.size :]), strict=True)
            by_block = torch.stack([torch.cat(both, dim=2) for both in ends])
        sums = reduce_scatter(by_block.flatten(0, 2), self.size, self.group.group_name)
        return wait_tensor(sums).view(keys.shape)

    def _gathered_pairs(self) -> Iterator[_Pair]:
        halves = (slice(0, self.half), slice(self.half, None))
        if self.tables:
            _, *keys, segments = self.tables
            for where, found, bounds in zip(halves, keys, segments, strict=True):
                yield _Pair(where, found, True, bounds)
            return
        for where, end in zip(halves, (self.rank + 1, 2 * self.size - self.rank), strict=True):
            yield _Pair(where, slice(0, end * self.half), True, None)

    # -- a ring -----------------------------------------------------------------------------

    def _round(self, keys: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Blocks as they come by, each while the next one is on its way."""
        for step in range(self.size):
            last = step == self.size - 1
            coming, works = (keys, []) if last else self._pass_on(keys)
            yield (self.rank - step) % self.size, keys
            _wait(works)
            keys = coming

    def _carry(
        self, keys: Tensor, dtype: torch.dtype, backward: Callable[[_Pair, Tensor, Tensor], None]
    ) -> Tensor:
        """A block's gradients follow it, one step behind, and end where it began."""
        coming, works = None, []
        for block, at_hand in self._round(keys):
            due = torch.zeros_like(at_hand, dtype=dtype)
            backward(self._ring_pair(block), at_hand, due)
            _wait(works)
            sent = due if coming is None else due.add_(coming)  # held until it has been waited for
            coming, works = (sent, []) if self.size == 1 else self._pass_on(sent)
        _wait(works)
        assert coming is not None
        return coming

    def _ring_pair(self, block: int) -> _Pair:
        early, late = slice(0, self.half), slice(self.half, None)
        own: Where = _ALL
        theirs: Where = _ALL
        segments = None
        if self.tables:
            _, order, bounds = self.tables
            own, theirs, segments = order[self.rank], order[block], bounds[block]
        if block == self.rank:
            return _Pair(own, own, True, segments)
        if block < self.rank:
            return _Pair(own, early, False, segments)
        return _Pair(late, theirs, False, segments)

    def _pass_on(self, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Send to the next rank and receive from the one before, without waiting."""
        got = torch.empty_like(x)
        following, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        return got, dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, following, self.group),
                dist.P2POp(dist.irecv, got, before, self.group),
            ]
        )


class _Merged:
    """Attention over several blocks of keys, put together; the first one is seen by all queries."""

    out: Tensor
    lse: Tensor

    def __init__(self) -> None:
        self.empty = True

    def add(self, where: Where, out: Tensor, lse: Tensor) -> None:
        """Merge out (., n, H, K) and lse (., n, H) of some queries with what they have."""
        if self.empty:
            self.empty = False
            self.out, self.lse = (_put(x.to(lse.dtype), where) for x in (out, lse))
            return
        before = _take(self.lse, where)
        total = torch.logaddexp(before, lse)
        kept = _take(self.out, where) * (before - total).exp().unsqueeze(-1)
        self.out[:, where] = kept + out * (lse - total).exp().unsqueeze(-1)
        self.lse[:, where] = total


def _of(pair: _Pair, score: Score) -> Score:
    return Score(score.scale, pair.causal, score.window if pair.causal else 0, score.softcap)


def _take(x: Tensor, where: Where) -> Tensor:
    return x if where is _ALL else x[:, where]


def _put(x: Tensor, where: Where) -> Tensor:
    """The inverse of `_take` for all tokens in another order; a copy."""
    if where is _ALL:
        return x.clone()
    whole = torch.empty_like(x)
    whole[:, where] = x
    return whole


def _add(target: Tensor, where: Where, part: Tensor) -> None:
    """Add to some tokens of (., n, heads, K); none of them comes twice."""
    target[:, where] += part.to(target.dtype)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


# -- the pass --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """How attention of a model gets at the tokens of other ranks.

    Args:
        cores: pattern of the modules that are called as (q, k, v, mask, sink) and attend. A module
            with an attribute `scoring` = (window, softcap, scale) attends by that.
        methods: of each of them, in the model's order; one stands for all.
        inner: of the hierarchical method; 0: the largest proper divisor of cp.
        kernel: a row of KERNELS.
        window: how many keys a query sees at most; 0: all. Not for a ring.
        softcap: c for scores of c tanh(s / c); 0: off.
        scale: of the scores; 0: 1 / sqrt(K).
    """

    cores: str
    methods: tuple[CpMethod, ...] = ("ring",)
    inner: int = 0
    kernel: str = "math"
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0

    @classmethod
    def of(
        cls, parallel: Parallel, cores: str, kernel: str, window: int = 0, softcap: float = 0.0
    ) -> "Context | None":
        """From the [parallel] section; None where cp is 1."""
        if parallel.cp == 1:
            return None
        return cls(cores, parallel.cp_methods(), parallel.cp_inner, kernel, window, softcap)

    def layouts(self, cp: int) -> dict[CpMethod, Shape]:
        """Layout of the cp axis by method, of those that are used."""
        return {method: shape_of(method, cp, self.inner) for method in self.methods}


def apply_context(
    cores: Sequence[tuple[int, nn.Module]],
    context: Context,
    cp: int,
    groups: Callable[[int], tuple[dist.ProcessGroup, dist.ProcessGroup]],
    device_type: str,
) -> None:
    """Replace the forward of (index in the model, module), in place.

    Args:
        groups: inner -> process groups between and inside the blocks.
    """
    _check_device(context.kernel, device_type)
    layouts, own = context.layouts(cp), _Scoring(context.window, context.softcap, context.scale)
    for method, shape in layouts.items():  # on all ranks, whatever modules their stages have
        _check_kernel(KERNELS[context.kernel], shape, method, own)
    between = {method: groups(shape.inner) for method, shape in layouts.items()}
    # One for all layers that attend alike: compile takes another object for another graph.
    shared: dict[tuple[CpMethod, _Scoring], ContextAttention] = {}
    for i, core in cores:
        method = context.methods[i if len(context.methods) > 1 else 0]
        given: tuple[int, float, float] = getattr(core, "scoring", own)
        scoring = _Scoring(*given)
        if (method, scoring) not in shared:
            shape = layouts[method]
            _check_kernel(KERNELS[context.kernel], shape, method, scoring)
            shared[method, scoring] = ContextAttention(
                method, shape, *between[method], context.kernel, *scoring
            )
        core.forward = shared[method, scoring]  # type: ignore[method-assign]


class _Scoring(NamedTuple):
    window: int
    softcap: float
    scale: float


def _check_device(name: str, device_type: str) -> None:
    if name not in KERNELS:
        raise ConfigError(f"kernel {name!r} is not known; use {', '.join(KERNELS)}")
    if device_type != "cuda" and name != "math":
        raise ConfigError(f'kernel {name!r} needs GPUs; on a {device_type} use "math"')


def _check_kernel(kernel: Kernel, shape: Shape, method: str, scoring: _Scoring) -> None:
    window, softcap, _ = scoring
    rules = [
        (window and shape.rings, f"a window with {method}; use all_gather, ulysses"),
        (window and not kernel.window, f"a window with the {kernel.name} kernel"),
        (softcap and not kernel.softcap, f"a soft cap with the {kernel.name} kernel"),
        (shape.gathers and not kernel.aligned_at_end, f"all_gather with the {kernel.name} kernel"),
    ]
    for broken, what in rules:
        if broken:
            raise ConfigError(f"context parallelism cannot do {what}")
