"""Activation recomputation: keep less in forward, compute it again in backward.

    mode         kept of a block                         computed again
    full         its input                               everything, about a third more compute
    attention    also the outputs of attention           everything else, matmuls too
    selective    also the results of matmuls,            norms, rotary embedding, activations, sums
                 and tokens received from other ranks

`attention` is for long sequences: attention's compute grows with the square of the length, its
output only with the length. What `selective` recomputes costs memory traffic alone. The dropout of
dtron's own models draws from counters, so that a second forward sees the same mask without saved
RNG state.

Source: Korthikanti et al., arXiv:2205.05198; torch.utils.checkpoint.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dtron.config import Recompute

ATTENTION = (
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "higher_order.flex_attention",
    "dtron.flash4_forward.default",
    "dtron.context_attention.default",
    "dtron.attention.default",
    "flash_attn._flash_attn_forward.default",
    "flash_attn_3._flash_attn_forward.default",
)
"""Attention as one operator, whose output and log-sum-exp its backward needs."""

PRODUCTS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "dtron.float8_product.default",
    "dtron.float8_blocks_product.default",
    "aten._grouped_mm.default",
    "dtron.float8_grouped_product.default",
    "symm_mem.fused_all_gather_matmul.default",
    "symm_mem.fused_matmul_reduce_scatter.default",
    "symm_mem.fused_all_gather_scaled_matmul.default",
    "symm_mem.fused_scaled_matmul_reduce_scatter.default",
)

CHOICES = ("aten.topk.default", "aten.sort.stable", "dtron.peers_exchange.default")
"""Operators that choose experts and the order of token copies, here and on other ranks: recomputed
by kernels that round differently, they could differ from the choice that other kept results belong
to."""

MOVES = ("dtron.peers_move.default", "dtron.peers_arrived.default")
"""Operators of dispatch and combine: token copies received by experts, which gradients of matrices
need, and combined results, which gradients of router weights need. Repeating them takes as much
time as a matmul; keeping them takes the bounded token buffer of a layer, the larger part of what
`attention` would keep. Keep both or none: the result of the first operator can be used only once by
the second."""

SAVED_OPS = {
    "attention": (*ATTENTION, *CHOICES),
    "selective": (*ATTENTION, *PRODUCTS, *CHOICES, *MOVES),
}
"""Operators whose results a mode keeps; those that this torch lacks are left out. With the `math`
backend, attention is several operators: `selective` keeps its matmuls, `attention` keeps
nothing."""


def recompute(
    blocks: Iterable[tuple[int, nn.Module]],
    options: Recompute,
    keep_rng: bool = False,
    watch: Callable[[Any], None] | None = None,
) -> int:
    """Make every `options.every`-th block recompute its activations, in place.

    The block keeps its class and its parameters their names: only its forward is replaced.

    Args:
        blocks: (index in the whole model, block).
        keep_rng: run the second forward from the first one's random state, as blocks with
            `nn.Dropout` need.
        watch: called in each forward of a block with the context that caches what a selective
            mode keeps, as offload needs.

    Returns:
        How many blocks recompute.
    """
    if options.mode == "none":
        return 0
    chosen = [block for i, block in blocks if i % options.every == 0]
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keep_rng}
    if options.mode != "full":
        settings["context_fn"] = functools.partial(_selective_contexts, options.mode, watch)
    for block in chosen:
        block.forward = functools.partial(_checkpointed, block.forward, settings)
    return len(chosen)


def _checkpointed(forward: Callable, settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, **settings, **kwargs)


def _selective_contexts(mode: str, watch: Callable[[Any], None] | None) -> tuple[Any, Any]:
    saved, moves = _ops(SAVED_OPS[mode]), _ops(MOVES)

    def keep_expensive(_ctx, op, *_args, **_kwargs) -> CheckpointPolicy:
        if op in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_RECOMPUTE if op in moves else CheckpointPolicy.PREFER_RECOMPUTE

    caching, cached = create_selective_checkpoint_contexts(keep_expensive)
    if watch is not None:
        watch(caching)
    return caching, cached


def _ops(paths: Iterable[str]) -> set:
    ops = set()
    for path in paths:
        namespace, name, *overload = path.split(".")
        op = getattr(getattr(torch.ops, namespace), name, None)
        if op is not None:
            ops.add(getattr(op, overload[0]) if overload else op)
    return ops
