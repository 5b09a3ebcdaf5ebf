"""Inputs that a block with float8 layers keeps for its backward.

`float8/linear.py` and `float8/gated.py` either save the cast input instead of the input, or save
the input and cast it again in the backward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dtron.float8.recipes import Recipe
from dtron.plan.saved_tensors import NONE, SavedTensor

_READERS: dict[tuple[str, bool], tuple[str, ...]] = {
    ("attn_norm", True): ("attn.wq", "attn.wk", "attn.wv", "attn.wg", "attn.wq_a", "attn.wkv_a"),
    ("delta_norm", True): ("delta.w_qkv", "delta.w_z", "delta.w_a", "delta.w_b"),
    ("mamba_norm", True): ("mamba.w_z", "mamba.w_xbc", "mamba.w_dt"),
    ("q_a_norm", True): ("attn.wq_b",),
    ("kv_a_norm", True): ("attn.wkv_b",),
    ("attention", False): ("attn.wo",),
    ("wg", False): ("attn.wo",),
    ("delta", False): ("delta.wo",),
    ("mamba", False): ("mamba.wo",),
    ("ffn_norm", True): ("ffn.gate", "ffn.up"),
    ("ffn", False): ("ffn.down",),
    ("shared", True): ("ffn.shared.gate", "ffn.shared.up"),
    ("shared", False): ("ffn.shared.down",),
    ("merge", False): ("merge",),
    ("cross_norm", True): ("cross.wq",),
    ("encoded", True): ("cross.kv.wk", "cross.kv.wv"),
    ("cross.attention", False): ("cross.wo",),
}
"""Linear layers that read a saved tensor, as FQNs relative to the block, by (module of the tensor,
whether tp gathers the tensor). No model has all of these layers."""
FUSED = frozenset(("ffn.gate", "ffn.up", "ffn.down"))


@dataclass(frozen=True)
class Float8Block:
    """Properties of a block with float8 layers, which decide which inputs it keeps."""

    recipe: Recipe
    modules: frozenset[str]
    """FQNs of the block's modules with weights, relative to the block."""
    float8: frozenset[str]
    """FQNs of the block's float8 layers, relative to the block."""
    fused: bool
    """Whether the feed-forward is one autograd function (`float8/gated.py`)."""
    apart: bool
    """Whether each layer casts its input separately: with delayed scales but not async TP, or
    without compilation. Otherwise layers that read the same input share one cast."""
    compiled: bool
    gathered: bool
    """Whether tp gathers inputs."""


def in_float8(rows: Iterable[SavedTensor], chosen: Float8Block) -> Iterator[SavedTensor]:
    """Yield the tensors that a block saves with float8 layers, given those saved without float8.

    With per-tensor scales the cast of an input is kept, since the weight gradient reads it. The
    input is kept too if another layer or attention's backward reads it. A fused feed-forward
    recomputes its hidden state. With scales per row or block the input is kept and cast again; if
    nothing else reads the input, a compiled block recomputes it from the input of the norm or
    activation before it.
    """
    product = chosen.recipe.grad_weight
    left = chosen.recipe.output.left
    reused = product is not None and product.right == left and left.turns
    for row in rows:
        if chosen.fused and row.module == "ffn" and (row.read or row.eager is True):
            yield replace(row, modes=())
            continue
        names = _READERS.get((row.module, row.split == "none"), ()) if row.read else ()
        readers = [name for name in names if name in chosen.modules]
        cast = [name for name in readers if name in chosen.float8]
        others, attended = len(cast) < len(readers), row.modes != (NONE,)
        if not cast or product is None:
            yield row
        elif not reused:
            stays = others or attended or not chosen.compiled
            stays = stays or (chosen.gathered and row.split == "none")
            yield row if stays else replace(row, modes=())
        else:
            each = chosen.apart and not (chosen.fused and row.module == "ffn_norm")
            yield from [replace(row, modes=(NONE,), narrow=True)] * (len(cast) if each else 1)
            if others or attended:
                yield replace(row, read=others)
