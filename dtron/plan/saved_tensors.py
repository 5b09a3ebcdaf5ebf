"""Tables of the tensors that a block saves for its backward, per token.

A row is one tensor that autograd saves:

    width    elements per token
    split    how tp shards it: "neurons" (heads or hidden neurons, over tp), "heads" (key/value
             heads; several tp ranks share one if tp exceeds their number), "tokens" (over tp with
             sequence parallelism), "columns" (as "tokens", and the width of experts over etp),
             "none" (whole on every tp rank)
    modes    recompute modes that keep it: none, selective, attention. All modes keep the block's
             input; `full` keeps nothing else

The rows describe a compiled block: torch's partitioner keeps the cheapest elementwise results. An
eager block keeps more (`eager`). `float8_inputs.py` changes the rows for float8 layers.
tests/plan/test_activations.py compares rows with what torch's partitioner and autograd save, for
every model family.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from dtron.models.attention import WIDEST_FLASH
from dtron.models.config import DecoderConfig, LayerKind
from dtron.models.layers import ACTIVATIONS
from dtron.models.matmuls import layer_matmuls

NONE, SELECTIVE, ATTENTION = "none", "selective", "attention"
ALL = (NONE, SELECTIVE, ATTENTION, "full")
PRODUCT = (NONE, SELECTIVE)
"""Modes that keep matmul results which the backward reads."""
Split = Literal["neurons", "heads", "tokens", "columns", "none"]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saves."""

    module: str
    width: float
    split: Split
    modes: tuple[str, ...] = (NONE,)
    wide: bool = False
    """Whether the tensor has at least 4 bytes per element in every dtype of computation."""
    eager: bool | None = None
    """True: only eager blocks keep the tensor; False: only compiled blocks; None: both."""
    arrived: bool = False
    """Whether it holds token copies received by experts, in buffers that may have free capacity."""
    results: bool = False
    """Whether it holds the results of token copies, which the dispatcher "hierarchical" sums where
    tokens arrive from other hosts, in buffers that may have free capacity."""
    pulled: bool = False
    """Whether ranks pull the tensor through symmetric memory if `parallel.dispatcher` uses it;
    selective recomputation then keeps the tensor."""
    read: bool = False
    """Whether the tensor is the input of a matmul. If a schedule defers the weight gradient, the
    tensor is kept until that gradient is computed."""
    narrow: bool = False
    """Whether the tensor is float8, 1 byte per element."""
    encoded: bool = False
    """Whether it is of an encoder's tokens, in a layer of the decoder."""
    heads: int = 1
    """Number of key/value heads, of a tensor that is split over them."""


@functools.lru_cache(maxsize=64)
def block(
    model: DecoderConfig,
    kind: LayerKind,
    padded: bool = True,
    expanded: bool = False,
    keys: tuple[int, int] = (0, 0),
) -> tuple[SavedTensor, ...]:
    """List the tensors that a block of the given kind saves.

    Args:
        padded: whether latent attention's values are padded to the width of keys, as context
            parallelism and some kernels need.
        expanded: whether the kernel of wide heads needs keys and values of each query head.
        keys: keys of a sequence, (its own, the encoder's), whose weights attention in plain PyTorch
            saves; 0: a kernel, which saves none.
    """
    rows = [SavedTensor("input", model.dim, "tokens", ALL)]
    if kind.mixer:
        rows += _norm_rows(model, f"{kind.mixer.replace('attention', 'attn')}_norm")
        rows += _merge(model) if kind.mtp else []
        rows += _mixer(model.of_layer(kind), kind, padded, expanded, keys[0])
    if not kind.ffn:
        return tuple(rows)
    if kind.mixer:
        # Selective recomputation keeps the matmul's result, a partial sum for all tokens, and
        # reduces it again.
        rows += [
            SavedTensor("wo", model.dim, "tokens"),
            SavedTensor("wo", model.dim, "none", (SELECTIVE,)),
        ]
    if model.sandwich_norms:  # "wo" above is its input, from which compiled blocks compute the sum
        rows += _statistics(model, "wo", 1, "tokens")
        rows.append(SavedTensor("wo", model.dim, "tokens", eager=True))
    rows += _cross(model, keys[1]) if kind.cross else []
    rows += _norm_rows(model, "ffn_norm", wide=kind.experts)
    rows += _mixture(model) if kind.experts else _feed_forward(model, "ffn", model.ffn_dim)
    if model.sandwich_norms:
        rows += [
            *_statistics(model, "ffn_post_norm", 1, "tokens"),
            SavedTensor("ffn_post_norm", model.dim, "tokens"),
            SavedTensor("ffn_post_norm", model.dim, "none", (SELECTIVE,)),
        ]
    if model.layer_scalars:
        rows.append(SavedTensor("scale", model.dim, "tokens"))
    if kind.normed:  # the input of the encoder's last norm
        rows += [*_statistics(model, "norm", 1, "tokens"), SavedTensor("norm", model.dim, "tokens")]
        rows.append(SavedTensor("norm", model.dim, "none", (SELECTIVE,)))
    return tuple(rows)


def _mixer(
    model: DecoderConfig, kind: LayerKind, padded: bool, expanded: bool, keys: int
) -> list[SavedTensor]:
    """Return the tensors of what mixes tokens, up to the input of wo."""
    if kind.mixer == "delta":
        return _gated_delta_net(model)
    if kind.mixer == "mamba":
        return _mamba(model)
    wide = expanded and model.head_size > WIDEST_FLASH and not keys
    rows = _latent(model, padded) if model.kv_lora_rank else _attention(model, wide)
    if not keys:
        return rows
    return _in_plain_pytorch(model, rows, _operands(model), keys, model.attention_dropout > 0)


ENCODED = "encoded"
"""Module of the encoder's output, which tp ranks gather in each layer of the decoder."""


def _cross(model: DecoderConfig, keys: int) -> list[SavedTensor]:
    """Return the tensors of a decoder's attention to an encoder."""
    q, kv = model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    names = ("cross.wq", "cross.kv.wk", "cross.kv.wv")
    heads = [row for name in names[1:] for row in _shared(model, name, kv)]
    rows = [
        SavedTensor("cross.wq", q, "neurons", PRODUCT),
        *(replace(row, encoded=True) for row in heads),
        *_attended(model, q),
    ]
    if keys:
        rows = _in_plain_pytorch(model, rows, names, keys, dropped=False)
    return [
        *_norm_rows(model, "cross_norm"),
        SavedTensor(ENCODED, model.dim, "none", read=True, encoded=True),
        *(replace(r, module="cross.attention") if r.module == "attention" else r for r in rows),
        SavedTensor("cross.wo", model.dim, "tokens"),
        SavedTensor("cross.wo", model.dim, "none", (SELECTIVE,)),
    ]


def _merge(model: DecoderConfig) -> list[SavedTensor]:
    """Return the tensors of an MTP block's merge.

    These are the normalised embeddings and hidden states, the matmul's result and the last norm's
    input.
    """
    return [
        SavedTensor("input", model.dim, "tokens", ALL),
        *_statistics(model, "merge", 3, "tokens"),
        SavedTensor("merge", 2 * model.dim, "tokens", read=True),
        SavedTensor("merge", model.dim, "tokens", PRODUCT),
        SavedTensor("merge", model.dim, "tokens"),
    ]


def _statistics(
    model: DecoderConfig, module: str, number: float, split: Split
) -> list[SavedTensor]:
    """Return the saved statistics of `number` norms per token.

    The statistics are the reciprocal root and, for LayerNorm, the mean.
    """
    if model.norm == "layernorm":
        return [SavedTensor(module, 2 * number, split)]
    return [SavedTensor(module, number, split, wide=True)]


def _norm_rows(model: DecoderConfig, module: str, wide: bool = False) -> list[SavedTensor]:
    """A norm's statistics, and its gathered output or (`wide`) the float32 input of a router."""
    rows = _statistics(model, module, 1, "tokens")
    if wide:
        return [*rows, SavedTensor("router", model.dim, "tokens", wide=True)]
    return [*rows, SavedTensor(module, model.dim, "none", read=True)]


def _attended(model: DecoderConfig, width: int, read: bool = True) -> list[SavedTensor]:
    """Return attention's output and log-sum-exp.

    `read`: whether wo reads the output itself, not a slice of it.
    """
    kept = (NONE, SELECTIVE, ATTENTION)
    return [
        SavedTensor("attention", width, "neurons", kept, read=read),
        SavedTensor("attention", model.n_heads, "neurons", kept, wide=True),
    ]


def _in_plain_pytorch(
    model: DecoderConfig,
    rows: list[SavedTensor],
    operands: tuple[str, str, str],
    keys: int,
    dropped: bool,
) -> list[SavedTensor]:
    """Return the tensors of attention without a kernel, from those with one.

    It reads queries, keys and values (`operands`) in float32. It saves the weights after the
    softmax and, if they differ, after dropout and in the order of the matmul; and with dropout
    which are kept. Selective recomputation keeps the results of both matmuls.
    """
    weights = SavedTensor("attention", model.n_heads * keys, "neurons", PRODUCT, wide=True)
    found = [weights]
    if dropped or model.n_heads != model.n_kv_heads:
        found.append(replace(weights, modes=(NONE,)))
    if dropped:
        found.append(replace(weights, modes=(NONE,), wide=False, narrow=True))
    for row in rows:
        if row.module in operands and not row.wide and row.split in ("neurons", "heads"):
            width = model.n_heads * model.v_head_size if row.module == "wkv_b" else row.width
            if NONE in row.modes:
                found.append(replace(row, width=width, modes=(NONE,), wide=True))
            if SELECTIVE in row.modes:
                found.append(replace(row, modes=(SELECTIVE,)))
        elif row.module != "attention":
            found.append(row)
        elif not row.wide:  # the output; there is no log-sum-exp
            found.append(replace(row, modes=(NONE,)))
            found.append(replace(row, modes=(SELECTIVE,), wide=True, read=False))
    return found


def _operands(model: DecoderConfig) -> tuple[str, str, str]:
    """Return the modules whose results are the queries, keys and values of attention."""
    if model.kv_lora_rank:
        return "wq", "k", "wkv_b"
    v = "v_norm" if model.value_norm else "wv"
    return ("q_norm", "k_norm", v) if model.qk_norm else ("wq", "wk", v)


def _attention(model: DecoderConfig, expanded: bool) -> list[SavedTensor]:
    size, heads = model.head_size, model.n_kv_heads
    q, kv = model.n_heads * size, heads * size
    rows = [SavedTensor("wq", q, "neurons", PRODUCT), *_shared(model, "wk", kv)]
    read = ["wk", "wv"]  # modules of the keys and values that attention reads
    if not model.keys_as_values:
        rows += _shared(model, "wv", kv)
    if model.qk_norm:
        read[0] = "k_norm"
        rows.append(SavedTensor("q_norm", q, "neurons"))
        rows.append(SavedTensor("k_norm", kv, "heads", heads=heads))
        rows += _statistics(model, "q_norm", model.n_heads + heads, "neurons")
    if model.value_norm:
        read[1] = "v_norm"
        rows.append(SavedTensor("v_norm", kv, "heads", heads=heads))
        # A compiled block computes the statistics of equal keys and values once.
        eager = True if model.keys_as_values and model.qk_norm else None
        found = _statistics(model, "v_norm", heads, "neurons")
        rows += [replace(row, eager=eager) for row in found]
    if expanded:
        rows = [
            replace(row, width=q, split="neurons")
            if row.module in read and row.split == "heads"
            else row
            for row in rows
        ]
    rows += _attended(model, q, read=not model.output_gate)
    if model.output_gate:
        rows += [
            SavedTensor("wg", q, "neurons", PRODUCT),
            SavedTensor("wg", q, "neurons", read=True),
        ]
    return rows


def _gated_delta_net(model: DecoderConfig) -> list[SavedTensor]:
    """Return the tensors of a gated delta net.

    These are results of its matmuls, of the convolution before and after silu, the operator's
    inputs (q, k, v, g and beta) and output, and the input of wo.
    """
    groups, heads = model.delta_key_heads, model.delta_value_heads
    channels, keys = model.delta_channels, groups * model.delta_key_dim
    values = heads * model.delta_value_dim
    return [
        SavedTensor("w_a", heads, "neurons", PRODUCT),
        SavedTensor("w_b", heads, "neurons", (SELECTIVE,)),
        SavedTensor("w_qkv", channels, "neurons", PRODUCT),
        *[SavedTensor("delta", channels, "neurons")] * 2,
        SavedTensor("delta", 2 * groups, "neurons", wide=True),
        *[SavedTensor("delta", keys, "neurons")] * 2,
        SavedTensor("delta", values, "neurons"),
        SavedTensor("delta", heads, "neurons", wide=True),
        SavedTensor("delta", heads, "neurons"),
        SavedTensor("delta", values, "neurons", (NONE, SELECTIVE, ATTENTION)),
        SavedTensor("w_z", values, "neurons", PRODUCT),
        SavedTensor("delta", heads, "neurons", wide=True),
        SavedTensor("delta", values, "neurons", read=True),
    ]


def _mamba(model: DecoderConfig) -> list[SavedTensor]:
    """Return the tensors of Mamba-2.

    These are results of its matmuls, of the convolution, the operator's inputs (x, dt, g, b and c)
    and output, and the input of wo.
    """
    heads, channels = model.mamba_heads, model.mamba_channels
    inner = heads * model.mamba_head_dim
    return [
        SavedTensor("w_dt", heads, "neurons", PRODUCT),
        SavedTensor("w_xbc", channels, "neurons", PRODUCT),
        *[SavedTensor("mamba", channels, "neurons")] * 2,
        *[SavedTensor("mamba", heads, "neurons", wide=True)] * 2,
        SavedTensor("mamba", inner, "neurons", (NONE, SELECTIVE, ATTENTION)),
        SavedTensor("w_z", inner, "neurons", PRODUCT),
        SavedTensor("mamba", model.mamba_groups, "neurons", wide=True),
        SavedTensor("mamba", inner, "neurons", read=True),
    ]


def _shared(model: DecoderConfig, module: str, width: int) -> list[SavedTensor]:
    """Return keys or values.

    Whole heads are saved, but in mode selective the rank's own matmul result, from which the
    backward gathers the heads again.
    """
    return [
        SavedTensor(module, width, "heads", heads=model.n_kv_heads),
        SavedTensor(module, width, "neurons", (SELECTIVE,)),
    ]


def _latent(model: DecoderConfig, padded: bool) -> list[SavedTensor]:
    """Return the tensors of latent attention.

    Queries, keys and padded values of all heads have the width of queries; unpadded values are a
    part of wkv_b's output, which is kept.
    """
    heads, rank, latent = model.n_heads, model.q_lora_rank, model.kv_lora_rank
    q = heads * model.head_size
    kv = heads * (model.nope_head_dim + model.v_head_size)
    rows = [SavedTensor("wq", q, "neurons", PRODUCT)]
    if rank:
        rows += [
            SavedTensor("wq_a", rank, "tokens", PRODUCT),
            SavedTensor("q_a_norm", rank, "none", read=True),
        ]
        rows += _statistics(model, "q_a_norm", 1, "tokens")
    rows += [
        SavedTensor("wkv_a", latent + model.rope_head_dim, "tokens", PRODUCT),
        *_statistics(model, "kv_a_norm", 1, "tokens"),
        SavedTensor("kv_a_norm", latent, "none", read=True),
        SavedTensor("wkv_b", kv, "neurons", (SELECTIVE,) if padded else PRODUCT),
        SavedTensor("k", q, "neurons"),
    ]
    if not padded:
        return [*rows, *_attended(model, heads * model.v_head_size)]
    is_cut = q != heads * model.v_head_size
    rows += [SavedTensor("v", q, "neurons"), *_attended(model, q, read=not is_cut)]
    if is_cut:  # wo reads a copy of the unpadded slice
        rows.append(SavedTensor("attention", heads * model.v_head_size, "neurons", read=True))
    return rows


def _feed_forward(model: DecoderConfig, module: str, width: int) -> list[SavedTensor]:
    gated = ACTIVATIONS[model.activation].gated
    rows = [SavedTensor(module, width, "neurons", PRODUCT)] * (2 if gated else 1)
    rows.append(SavedTensor(module, width, "neurons", read=True))
    if gated:
        rows.append(SavedTensor(module, width, "neurons", eager=True))
    return rows


def _mixture(model: DecoderConfig) -> list[SavedTensor]:
    """Return the tensors of a mixture of experts, with k token copies per token.

    These are inputs, hidden states and outputs of experts.
    """
    k = model.experts_per_token
    gated = ACTIVATIONS[model.activation].gated
    chosen = (NONE, SELECTIVE, ATTENTION)
    rows = [
        SavedTensor("router", model.n_experts, "tokens", PRODUCT, wide=True),
        SavedTensor("router", 2 * k, "tokens", chosen, wide=True),  # int64: chosen experts
        SavedTensor("router", k + 2, "tokens", wide=True),
        SavedTensor("dispatch", 2 * k, "tokens", chosen, wide=True),  # int64: order of token copies
        SavedTensor("dispatch", 2 * k, "tokens", wide=True),  # int64: the inverse order
        SavedTensor("experts", k * model.dim, "tokens", arrived=True, pulled=True, read=True),
        *[SavedTensor("experts", k * model.expert_dim, "columns", PRODUCT, arrived=True)]
        * (2 if gated else 1),
        SavedTensor("experts", k * model.expert_dim, "columns", arrived=True, read=True),
        SavedTensor("experts", k * model.dim, "tokens", PRODUCT, results=True),
        # Kept only by eager selective recomputation with symmetric memory: the combined outputs.
        SavedTensor("experts", k * model.dim, "tokens", (), eager=True, arrived=True, pulled=True),
    ]
    if gated:
        rows.append(
            SavedTensor("experts", k * model.expert_dim, "columns", eager=True, arrived=True)
        )
    if width := model.n_shared_experts * model.expert_dim:
        rows.append(SavedTensor("shared", model.dim, "none", read=True))
        rows += _feed_forward(model, "shared", width)
    return rows + (_gated_output(model) if model.shared_gate else [])


def _gated_output(model: DecoderConfig) -> list[SavedTensor]:
    """Return the factors of the gated output of shared experts; mode selective: as with `wo`."""
    return [
        SavedTensor("shared", model.dim, "tokens"),
        SavedTensor("shared", model.dim, "none", (SELECTIVE,)),
        SavedTensor("shared_gate", 1, "tokens", PRODUCT),
    ]


IN_CHUNKS = ("ffn_norm", "ffn")
"""Modules of the rows that `recompute.ffn_chunks` recomputes, chunk by chunk."""

_RECURRENT = {
    "delta": {"w_qkv", "w_z", "w_a", "w_b", "delta"},
    "mamba": {"w_xbc", "w_z", "w_dt", "mamba"},
}
"""{name of a recurrent module: modules of its rows}."""
_ATTENTION = {
    *("wq", "wk", "wv", "wg", "q_norm", "k_norm", "v_norm", "attention"),
    *("wq_a", "q_a_norm", "wkv_a", "kv_a_norm", "wkv_b", "k", "v"),
}


def of_modules(row: SavedTensor, names: Collection[str], chained: bool) -> bool:
    """Whether the backward recomputes a tensor with `recompute.modules` = `names`.

    Experts' outputs count as kept: torch 2.13 keeps them, eager or compiled; torch 2.14 recomputes
    compiled ones.

    Args:
        chained: whether attention is compiled, keeps no matmul result, and is not all that the
            block has. Its backward then also recomputes the output of the norm before it, and that
            of a feed-forward layer the input of the post-norm after it.
    """
    if row.module == "ffn_post_norm":
        return "ffn" in names and chained and row.width > 1
    if row.module == "attn_norm":
        return "attn" in names and chained and row.read
    for name, own in _RECURRENT.items():
        if row.module == f"{name}_norm":
            return name in names and chained and row.read
        if row.module in own and name in names:
            return True
    return (
        (row.module in _ATTENTION and "attn" in names)
        or (row.module == "ffn" and "ffn" in names)
        or (row.module == "shared" and row.split == "neurons" and "ffn.shared" in names)
        or (row.module == "experts" and row.split == "columns" and "ffn.experts" in names)
    )


_RESULT: dict[str, Split] = {"columns": "neurons", "rows": "none", "none": "tokens"}
"""How tp shards a matmul's result, by how tp shards its weight (`Matmul.split`)."""


@functools.lru_cache(maxsize=64)
def output_gradients(model: DecoderConfig, kind: LayerKind) -> tuple[SavedTensor, ...]:
    """List the gradients of the results of a block's matmuls.

    Deferred weight gradients need these and the `read` tensors of `block`;
    `dtron.parallelisms.pipeline.split_backward` holds both.
    """
    rows = []
    for each in layer_matmuls(model, kind):
        if each.module == "experts":
            split: Split = "columns" if each.split == "columns" else "tokens"
            width = model.experts_per_token * each.n
            rows.append(SavedTensor("experts", width, split, arrived=True))
        elif each.module != "router":
            encoded = each.module.startswith("cross.kv.")
            rows.append(SavedTensor(each.module, each.n, _RESULT[each.split], encoded=encoded))
    return tuple(rows)
