"""Activation recomputation: save fewer activations in forward, recompute the others in backward.

    mode         saved per block                         recomputed
    full         its input                               everything, about a third more compute
    attention    also the outputs of attention           everything else, matmuls too
    selective    also the results of matmuls,            norms, rotary embedding, activations, sums
                 and tokens received from other ranks

With `modules`, only these modules of a block are recomputed, each from its own input.

`attention` is for long sequences: attention's compute grows with the square of the length, its
output only linearly. `selective` recomputes only memory-bound operators. Dropout of dtron's models
uses a counter-based generator, so that recomputation gives the same mask without saved RNG state.

Source: Korthikanti et al., arXiv:2205.05198; torch.utils.checkpoint.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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
    "dtron.gated_delta_rule.default",
    "dtron.fla_delta_rule.default",
    "dtron.state_space.default",
    "flash_attn._flash_attn_forward.default",
    "flash_attn_3._flash_attn_forward.default",
)
"""Attention operators; their backward needs their output and log-sum-exp. That of
recurrences needs their inputs only, but their forward takes as long as attention."""

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
"""Operators that choose experts and the order of token copies. Their results are always saved:
recomputed with other rounding, they could contradict the other saved results."""

MOVES = ("dtron.peers_move.default", "dtron.peers_arrived.default")
"""Operators of dispatch and combine. Their results are inputs and outputs of experts, which the
weight gradients of experts and router need. Recomputing them takes as long as a matmul; saving them
takes one token buffer per layer, which would be most of what mode `attention` saves. Save the
results of both operators, or recompute both: a result of `peers_move` can be used only once."""

CPU_ATTENTION = ("aten._scaled_dot_product_flash_attention_for_cpu.default",)
"""Saved by all compiled code: torch counts it as random. To compute it again, compiled code saves
the state of the CPU's generator behind the device mesh of DTensors, where torch 2.13 takes no
tensor."""

SAVED_OPS: dict[str, tuple[str, ...]] = {
    "full": CHOICES,
    "attention": (*ATTENTION, *CHOICES),
    "selective": (*ATTENTION, *PRODUCTS, *CHOICES, *MOVES),
}
"""{mode: operators whose results it saves, if this torch has them}; `full` is used with `modules`
only. With the `math` backend, attention is several operators: then `selective` saves the results of
attention's matmuls, and `attention` saves none of attention's results."""


def recompute(
    blocks: Iterable[tuple[int, nn.Module]],
    options: Recompute,
    keep_rng: bool = False,
    watch: Callable[[Any], None] | None = None,
) -> int:
    """Make blocks, or `options.modules` of blocks, recompute their activations, in place.

    `options.acts_on` chooses the blocks. Only `forward` is replaced (`local_forward` of experts
    under expert parallelism): classes and FQNs stay.

    Args:
        blocks: (index in the whole model, block).
        keep_rng: restore the RNG state that the first forward had; needed with `nn.Dropout`.
        watch: callback of offload, called in each forward of a block under selective recomputation
            with the context that caches the saved results.

    Returns:
        Number of blocks that recompute.
    """
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keep_rng}
    if options.mode != "full" or options.modules:
        settings["context_fn"] = functools.partial(_selective_contexts, options.mode, watch)
    chosen = [_modules(block, options.modules) for i, block in blocks if options.acts_on(i)]
    for module in (module for modules in chosen for module in modules):
        # Experts under expert parallelism recompute `local_forward`, without dispatch and combine.
        name = "local_forward" if hasattr(module, "local_forward") else "forward"
        call = functools.partial(_checkpointed, getattr(module, name), settings)
        setattr(module, name, call)
    return sum(bool(modules) for modules in chosen)


def chunk_feed_forward(blocks: Iterable[nn.Module], n_chunks: int, keep_rng: bool = False) -> int:
    """Make blocks apply `feed_forward` to chunks of their tokens, each recomputed, in place.

    `feed_forward`, a method of the block, maps (B, T, D) to (B, T, D), each token separately. Each
    chunk runs the hooks of the modules inside: under tp a chunk is of the rank's own tokens, and
    gathers and reduces only these. Blocks without the method are unchanged.

    Args:
        n_chunks: number of chunks of T; if it does not divide T, the last chunk is smaller.
        keep_rng: as of `recompute`.

    Returns:
        Number of blocks that have the method.
    """
    chosen = [block for block in blocks if hasattr(block, "feed_forward")]
    for block in chosen:
        call = functools.partial(_in_chunks, block.feed_forward, n_chunks, keep_rng)
        block.feed_forward = call  # type: ignore[assignment]
    return len(chosen)


def _in_chunks(apply: Any, n_chunks: int, keep_rng: bool, x: Tensor) -> Tensor:
    chunks = x.chunk(n_chunks, dim=1)
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keep_rng}
    return torch.cat([checkpoint(apply, chunk, **settings) for chunk in chunks], dim=1)


def _modules(block: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules to recompute in a block.

    Names that the block lacks are skipped: they may belong to another kind of block.
    """
    if not names:
        return [block]
    inside = dict(block.named_modules())
    return [inside[name] for name in names if name in inside]


def _checkpointed(forward: Callable, settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, **settings, **kwargs)


def _selective_contexts(mode: str, watch: Callable[[Any], None] | None) -> tuple[Any, Any]:
    compiled = CPU_ATTENTION if torch.compiler.is_compiling() else ()
    saved, moves = _ops((*SAVED_OPS[mode], *compiled)), _ops(MOVES)

    def save_expensive(_ctx, op, *_args, **_kwargs) -> CheckpointPolicy:
        if op in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_RECOMPUTE if op in moves else CheckpointPolicy.PREFER_RECOMPUTE

    caching, cached = create_selective_checkpoint_contexts(save_expensive)
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
