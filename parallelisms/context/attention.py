"""Context parallelism: sequences are sharded over ranks, and only attention communicates.

Every rank of the cp axis has T / cp tokens of each sequence, an early and a late chunk of every
document (`load_balance.py`). All layers but attention process tokens independently. Attention gets
the other ranks' keys by one of four methods:

    ring          Keys and values are sent around a ring; each rank attends to the current block
                  while it receives the next one, and merges the results by their log-sum-exp. In
                  the backward, gradients of keys go around the ring after the keys (`ring.py`).
    all_gather    All keys and values are gathered, then attended to at once; their gradients are
                  reduce-scattered (`all_gather.py`).
    ulysses       All-to-all: from T / cp tokens of all heads to all tokens of H / cp heads, and
                  back after attention (`all_to_all.py`).
    hierarchical  ulysses inside groups of `inner` neighbours, a ring between the groups.

All methods are cases of one layout (`layout.py`): cp = outer x inner, with an all-to-all over
`inner` ranks and a ring or an all-gather over `outer` blocks. ring and all_gather have inner = 1,
ulysses has outer = 1.

**One step of the ring.** A block holds an early and a late half of every document, of equal size.
Rank o computes with the block of rank s:

    s = o     all its queries with all keys, causally
    s < o     all its queries with the early keys, which precede them; late keys follow them
    s > o     its late queries with all keys; all keys follow the early queries

So every step but the first is half a block of unmasked attention on every rank: the ranks
are balanced, and the kernel needs no mask. With documents, a query sees only keys of its document;
kernels take this as segments, the bounds of each document's queries and keys.

**Without a causal mask** every rank attends to all keys of every block: no part is skipped.

**A layer with a window** needs no ring: each rank receives only the keys directly before its early
and late chunks, in one all-to-all (`halo.py`).

**Gathered** keys are in sequence order. Early queries attend causally to all keys up to their own
end, then late queries to all keys up to theirs. No results are merged.

Softmax statistics, merged outputs and communicated key gradients are float32 at least. Keys and
values are sent with their G heads, not with the H heads of queries. Attention is one registered
operator, so that a compiled block is one graph and recomputation can save its output.

Legend: B sequences, T tokens, t = T / cp on a rank, H query heads, G key/value heads, K head_dim, N
tokens of a block, all its sequences together.
Sources: ring attention, arXiv:2310.01889; merging, arXiv:2205.14135; Ulysses, arXiv:2309.14509;
hierarchical, USP, arXiv:2405.07719; all-gather, Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.config import CpMethod
from dtron.errors import ConfigError
from dtron.kernels.attention import KERNELS, Score, Tables, add_sink, sink_gradient
from dtron.parallelisms.context.all_gather import GatheredBlocks
from dtron.parallelisms.context.all_to_all import to_heads, to_tokens
from dtron.parallelisms.context.blocks import Blocks
from dtron.parallelisms.context.halo import HaloBlocks
from dtron.parallelisms.context.layout import ContextLayout, table_names
from dtron.parallelisms.context.ring import RingBlocks
from dtron.parallelisms.functional_collectives import NamedGroup


@dataclass(frozen=True)
class ContextAttention:
    """Forward of an attention module: attention over sequences sharded over cp ranks."""

    method: CpMethod
    shape: ContextLayout
    outer: dist.ProcessGroup
    inner: dist.ProcessGroup
    kernel: str
    """A name in KERNELS."""
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    """Scale of the scores; 0: 1 / sqrt(K)."""
    named: NamedGroup | None = field(default=None, init=False, repr=False, compare=False)
    """Keeps `outer` registered, since the operator finds it by name."""

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
        """Compute softmax(q k^T scale) v over the whole sequence, within documents.

        Args:
            q: (B, t, H, K) of this rank's tokens, in the order of `Split.index`.
            k: (B, t, G, K).
            v: (B, t, G, K).
            mask: result of `Split.tables`; None: each sequence is one document.
            sink: (H,), attention sink: an additional score per head, without a value.
        Returns:
            (B, t, H, K) in q's dtype.
        """
        if q.shape[1] != k.shape[1] or q.shape[2] % k.shape[2]:
            raise ConfigError(
                f"attention over cp ranks takes q (B, t, H, K) and k (B, t, G, K), not "
                f"{tuple(q.shape)} and {tuple(k.shape)}; t must be equal, and G divide H"
            )
        n = self.shape.inner
        whole = q.shape[1] * n * self.shape.outer
        window = self.window if self.window < whole else 0
        tables = () if mask is None else self._select(mask, window if self.shape.rings else 0)
        if n > 1:
            q, k, v = to_heads(q, k, v, self.inner, n)
            sink = None if sink is None else sink.chunk(n)[self.inner.rank()]
        if tables and not KERNELS[self.kernel].segments:
            raise ConfigError(
                f"kernel {self.kernel!r} has no document masks with cp > 1; use another kernel"
            )
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
            window,
            self.softcap,
            self.shape.causal,
        )[0]
        return to_tokens(out, self.inner, n) if n > 1 else out

    def _select(self, mask: Tables, window: int) -> tuple[Tensor, ...]:
        """Select this method's tables; with a `window` in a ring, the tables of the window."""
        if not isinstance(mask, Mapping) or self.method not in mask:
            raise ConfigError(
                f"mask has no tables for method {self.method!r}; pass the whole dict that "
                "Split.tables returns for the model's Context, on the model's device"
            )
        if not window:
            return mask[self.method]
        name, on_host = table_names(self.method, window)
        if name not in mask:
            raise ConfigError(
                f"mask has no tables for windows of {window} tokens with method {self.method!r}; "
                f"name {window} in Context.window or Context.windows"
            )
        arrange, index, segments = mask[name]
        return arrange, index, *mask[on_host], segments


def _blocks(
    q: Tensor,
    tables: Sequence[Tensor],
    group: str,
    inner: int,
    gathers: bool,
    window: int,
    causal: bool,
) -> Blocks:
    if gathers:
        return GatheredBlocks(q, tables, group, inner, causal)
    if window and NamedGroup.find(group).size() > 1:
        return HaloBlocks(q, tables, group, inner, window)
    return RingBlocks(q, tables, group, inner, causal)


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
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Compute attention of this rank's queries to all blocks of keys.

    Args:
        q: (B, inner * t, H, K), in rank order after the all-to-all, each rank's early tokens first.
        k: (B, inner * t, G, K).
        v: (B, inner * t, G, K).
        sink: (H,) or None.
        tables: from `Split.tables` for the method; empty: each sequence is one document.
        group: name of the process group over the blocks.
        inner: number of ranks per block.
        gathers: gather all keys, instead of sending them around a ring.
        kernel: a name in KERNELS.
        scale, window, softcap, causal: fields of `Score`.
    Returns:
        out like q, and log-sum-exp (B, inner * t, H) over all keys and the sink.
    """
    blocks = _blocks(q, tables, group, inner, gathers, window, causal)
    score = Score(scale, causal, window, softcap)
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
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of q, k and v; arguments as in the forward, which returned out and lse."""
    blocks = _blocks(q, tables, group, inner, gathers, window, causal)
    score = Score(scale, causal, window, softcap)
    grad, q, k, v, out, lse = (blocks.arrange(x) for x in (grad, q, k, v, out, lse))
    grads = blocks.differentiate(grad, q, k, v, out, lse, KERNELS[kernel], score)
    # Copies: gradients of k and v are views of one tensor, and operators may not return views.
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
    grad_sink = None if sink is None else sink_gradient(grad, out, lse, sink)
    return *grads, grad_sink, [None] * len(tables), *[None] * len(ctx.settings)


context_attention.register_autograd(_backward, setup_context=_save)
