"""Activation recomputation: keep less in forward, compute it again in backward.

`full` keeps a block's input only (about a third more compute); `selective` keeps the results of
matrix products and attention, which cost most to redo, and recomputes norms, rotary embedding,
activations and sums, which cost memory traffic alone. The dropout of dtron's own models draws from
counters, so that a second forward sees the same mask without saved RNG state.

Source: Korthikanti et al., arXiv:2205.05198; torch.utils.checkpoint.
"""

import functools
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dtron.config import Recompute

# Operators whose results `selective` keeps; those that this torch lacks are left out.
SAVED_OPS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_mm.default",
    "aten._grouped_mm.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "higher_order.flex_attention",
    "dtron.flash4_forward.default",
    "symm_mem.fused_all_gather_matmul.default",
    "symm_mem.fused_matmul_reduce_scatter.default",
    "flash_attn._flash_attn_forward.default",
    "flash_attn_3._flash_attn_forward.default",
)


def recompute(
    blocks: Iterable[tuple[int, nn.Module]], options: Recompute, keep_rng: bool = False
) -> int:
    """Make every `options.every`-th block recompute its activations, in place.

    The block keeps its class and its parameters their names: only its forward is replaced.

    Args:
        blocks: (index in the whole model, block).
        keep_rng: run the second forward from the first one's random state, as blocks with
            `nn.Dropout` need.

    Returns:
        How many blocks recompute.
    """
    if options.mode == "none":
        return 0
    chosen = [block for i, block in blocks if i % options.every == 0]
    for block in chosen:
        block.forward = functools.partial(_checkpointed, block.forward, options.mode, keep_rng)
    return len(chosen)


def _checkpointed(forward, mode: str, keep_rng: bool, *args, **kwargs):
    if mode == "full":
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=keep_rng, **kwargs
        )
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=keep_rng,
        context_fn=_selective_contexts,
        **kwargs,
    )


def _selective_contexts():
    saved = _saved_ops()

    def keep_expensive(_ctx, op, *_args, **_kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep_expensive)


def _saved_ops() -> set:
    ops = set()
    for path in SAVED_OPS:
        namespace, name, *overload = path.split(".")
        op = getattr(getattr(torch.ops, namespace), name, None)
        if op is not None:
            ops.add(getattr(op, overload[0]) if overload else op)
    return ops
