"""What a block keeps for its backward, a token: a list of tensors, as data.

Each row is a tensor that autograd saves, with the modes of recomputation in which it is kept:

    width    elements a token
    split    how tp splits it: "neurons" (heads and neurons, over tp), "heads" (key/value heads,
             which tp ranks share where there are fewer), "tokens" (over tp under sequence
             parallelism), "columns" (tokens, and the width of experts over etp), "none"
             (gathered: whole on every rank)
    modes    none, selective, attention; the block's input is kept in all, and in `full` alone

The rows are those of a compiled block: of what is elementwise, the compiler keeps what is cheapest
to keep. An eager block keeps some more (`eager`). tests/plan/test_activations.py compares both with
what torch's partitioner and autograd really save, for every family of models.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from dtron.models import MODELS
from dtron.models.config import DecoderConfig
from dtron.models.layers import ACTIVATIONS
from dtron.models.matmuls import layer_matmuls
from dtron.plan.run_shape import Resolved, expert_room, pulls_rows

NONE, SELECTIVE, ATTENTION = "none", "selective", "attention"
ALL = (NONE, SELECTIVE, ATTENTION, "full")
PRODUCT = (NONE, SELECTIVE)
"""Results of matrix products that the backward reads."""
Split = Literal["neurons", "heads", "tokens", "columns", "none"]


@dataclass(frozen=True)
class Saved:
    """One saved tensor."""

    module: str
    width: float
    split: Split
    modes: tuple[str, ...] = (NONE,)
    wide: bool = False
    """float32 whatever the computation's dtype."""
    eager: bool | None = None
    """Kept by eager blocks alone (True), by compiled ones alone (False), by both."""
    arrived: bool = False
    """Of rows that are at their experts, for which buffers may have more room."""
    pulled: bool = False
    """What peers' memory gives, which selective recomputation keeps where experts' rows come from
    there."""
    read: bool = False
    """Input of a product whose weight gradient a schedule may put off: it stays until that is
    computed."""


@functools.lru_cache(maxsize=64)
def block(model: DecoderConfig, kind: str, padded: bool = True) -> tuple[Saved, ...]:
    """Tensors that a block saves, by `Resolved.kind`.

    Args:
        padded: latent attention's values are made as wide as keys, for context parallelism and
            kernels that want them so.
    """
    mixture = kind != "dense"
    rows = [Saved("input", model.dim, "tokens", ALL), *_norm_rows(model, "attn_norm")]
    rows += _merge(model) if kind == "prediction" else []
    rows += _latent(model, padded) if model.kv_lora_rank else _attention(model)
    # Selective recomputation keeps the product, a part of a sum for all tokens, and reduces it
    # again.
    rows += [Saved("wo", model.dim, "tokens"), Saved("wo", model.dim, "none", (SELECTIVE,))]
    rows += _norm_rows(model, "ffn_norm", wide=mixture)
    rows += _mixture(model) if mixture else _feed_forward(model, "ffn", model.ffn_dim)
    return tuple(rows)


def _merge(model: DecoderConfig) -> list[Saved]:
    """The tokens ahead, both normalised, their product, and the last norm's input."""
    return [
        Saved("input", model.dim, "tokens", ALL),
        *_statistics(model, "merge", 3, "tokens"),
        Saved("merge", 2 * model.dim, "tokens", read=True),
        Saved("merge", model.dim, "tokens", PRODUCT),
        Saved("merge", model.dim, "tokens"),
    ]


def _statistics(model: DecoderConfig, module: str, number: float, split: Split) -> list[Saved]:
    """Of `number` norms a token: a reciprocal root, and LayerNorm's mean."""
    if model.norm == "layernorm":
        return [Saved(module, 2 * number, split)]
    return [Saved(module, number, split, wide=True)]


def _norm_rows(model: DecoderConfig, module: str, wide: bool = False) -> list[Saved]:
    """The normalised input of products, gathered; a router reads it in float32 too."""
    rows = _statistics(model, module, 1, "tokens")
    if wide:
        return [*rows, Saved("router", model.dim, "tokens", wide=True)]
    return [*rows, Saved(module, model.dim, "none", read=True)]


def _attended(model: DecoderConfig, width: int, read: bool = True) -> list[Saved]:
    """Attention's output, which wo reads unless it is cut first, and its log-sum-exp."""
    kept = (NONE, SELECTIVE, ATTENTION)
    return [
        Saved("attention", width, "neurons", kept, read=read),
        Saved("attention", model.n_heads, "neurons", kept, wide=True),
    ]


def _attention(model: DecoderConfig) -> list[Saved]:
    q, kv = model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    rows = [Saved("wq", q, "neurons", PRODUCT), *_shared(model, "wk", kv)]
    if model.qk_norm:
        rows += [Saved("q_norm", q, "neurons"), Saved("k_norm", kv, "heads")]
        rows += _statistics(model, "q_norm", model.n_heads, "neurons")
        rows += _statistics(model, "k_norm", model.n_kv_heads, "heads")
    return [*rows, *_shared(model, "wv", kv), *_attended(model, q)]


def _shared(model: DecoderConfig, module: str, width: int) -> list[Saved]:
    """Keys or values: of a head that ranks share all of it, or the rank's product, from which
    selective recomputation gathers again."""
    return [Saved(module, width, "heads"), Saved(module, width, "neurons", (SELECTIVE,))]


def _latent(model: DecoderConfig, padded: bool) -> list[Saved]:
    """Queries, keys and padded values of all heads are as wide as queries; values that are not
    padded are a part of what wkv_b gives, which is kept."""
    heads, rank, latent = model.n_heads, model.q_lora_rank, model.kv_lora_rank
    q = heads * model.head_size
    kv = heads * (model.nope_head_dim + model.v_head_size)
    rows = [Saved("wq", q, "neurons", PRODUCT)]
    if rank:
        rows += [Saved("wq_a", rank, "tokens", PRODUCT), Saved("q_a_norm", rank, "none", read=True)]
        rows += _statistics(model, "q_a_norm", 1, "tokens")
    rows += [
        Saved("wkv_a", latent + model.rope_head_dim, "tokens", PRODUCT),
        *_statistics(model, "kv_a_norm", 1, "tokens"),
        Saved("kv_a_norm", latent, "none", read=True),
        Saved("wkv_b", kv, "neurons", (SELECTIVE,) if padded else PRODUCT),
        Saved("k", q, "neurons"),
    ]
    if not padded:
        return [*rows, *_attended(model, heads * model.v_head_size)]
    is_cut = q != heads * model.v_head_size
    rows += [Saved("v", q, "neurons"), *_attended(model, q, read=not is_cut)]
    if is_cut:  # what wo reads is a copy of a part
        rows.append(Saved("attention", heads * model.v_head_size, "neurons", read=True))
    return rows


def _feed_forward(model: DecoderConfig, module: str, width: int) -> list[Saved]:
    gated = ACTIVATIONS[model.activation].gated
    rows = [Saved(module, width, "neurons", PRODUCT)] * (2 if gated else 1)
    rows.append(Saved(module, width, "neurons", read=True))
    if gated:
        rows.append(Saved(module, width, "neurons", eager=True))
    return rows


def _mixture(model: DecoderConfig) -> list[Saved]:
    """k rows a token: what experts read, their hidden rows, and what they give."""
    k = model.experts_per_token
    gated = ACTIVATIONS[model.activation].gated
    chosen = (NONE, SELECTIVE, ATTENTION)
    rows = [
        Saved("router", model.n_experts, "tokens", PRODUCT, wide=True),
        Saved("router", 2 * k, "tokens", chosen, wide=True),  # int64: which experts
        Saved("router", k + 2, "tokens", wide=True),
        Saved("dispatch", 2 * k, "tokens", chosen, wide=True),  # int64: order of rows
        Saved("dispatch", 2 * k, "tokens", wide=True),  # and its inverse
        Saved("experts", k * model.dim, "tokens", arrived=True, pulled=True, read=True),
        *[Saved("experts", k * model.expert_dim, "columns", PRODUCT, arrived=True)]
        * (2 if gated else 1),
        Saved("experts", k * model.expert_dim, "columns", arrived=True, read=True),
        Saved("experts", k * model.dim, "tokens", PRODUCT),
        # Eager recomputation keeps what its policy names: of the last product the combine, too.
        Saved("experts", k * model.dim, "tokens", (), eager=True, arrived=True, pulled=True),
    ]
    if gated:
        rows.append(Saved("experts", k * model.expert_dim, "columns", eager=True, arrived=True))
    if width := model.n_shared_experts * model.expert_dim:
        rows.append(Saved("shared", model.dim, "none", read=True))
        rows += _feed_forward(model, "shared", width)
    return rows


_RESULT: dict[str, Split] = {"columns": "neurons", "rows": "none", "none": "tokens"}
"""How tp splits a matmul's result, by how it splits the weight."""


@functools.lru_cache(maxsize=64)
def output_gradients(model: DecoderConfig, kind: str) -> tuple[Saved, ...]:
    """Gradients of the results of a block's matmuls: with the rows of `block` that are `read`
    what `dtron.parallelisms.pipeline.split_backward` holds for a deferred weight gradient."""
    rows = []
    for each in layer_matmuls(model, kind):
        if each.module == "experts":
            split: Split = "columns" if each.split == "columns" else "tokens"
            width = model.experts_per_token * each.n
            rows.append(Saved("experts", width, split, arrived=True))
        elif each.module != "router":
            rows.append(Saved(each.module, each.n, _RESULT[each.split]))
    return tuple(rows)


def kept(run: Resolved, layer: int, whole: bool = False) -> dict[str, float]:
    """Bytes that a layer keeps of a micro-batch on a rank, by module.

    Args:
        whole: as without recomputation, while it is computed again.
    """
    mode = _mode(run, layer, whole)
    key = ("kept", run.kind(layer), mode)
    if key not in run.memo:
        run.memo[key] = _kept(run, run.kind(layer), mode)
    return run.memo[key]


def _mode(run: Resolved, layer: int, whole: bool) -> str:
    return run.config.recompute.mode if run.recomputes(layer) and not whole else NONE


def _rows(run: Resolved, kind: str) -> tuple[Saved, ...]:
    """With the kernels that `auto` prefers, which take values as they are but for cp."""
    return block(run.model, kind, run.degrees["cp"] > 1)


def _kept(run: Resolved, kind: str, mode: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in _kept_rows(run, kind, mode):
        found[row.module] = found.get(row.module, 0.0) + _bytes(run, row)
    return found


def _kept_rows(run: Resolved, kind: str, mode: str) -> list[Saved]:
    pulls = mode == SELECTIVE and pulls_rows(run)
    of_compiler = (None, not run.config.compile.enable)
    rows = [row for row in _rows(run, kind) if row.eager in of_compiler]
    return [row for row in rows if mode in row.modes or (pulls and row.pulled)]


def tensors(run: Resolved, layer: int, whole: bool = False) -> list[int]:
    """Bytes of each tensor that a layer keeps; arguments are those of `kept`."""
    mode = _mode(run, layer, whole)
    return [int(_bytes(run, row)) for row in _kept_rows(run, run.kind(layer), mode)]


def put_off(run: Resolved, layer: int) -> tuple[list[int], list[int]]:
    """Bytes of what a layer holds until its weight gradients are computed, where these are put off:
    inputs of products, which are among the tensors that it keeps or computes again, and what is
    made for W alone: gradients of results, and in float8 the inputs too."""
    kind = run.kind(layer)
    reads = [row for row in _rows(run, kind) if row.read]
    queued = list(output_gradients(run.model, kind))
    if not queues_float8(run, layer):
        return [int(_bytes(run, row)) for row in reads], [int(_bytes(run, row)) for row in queued]
    # Experts' weight gradients are in the dtype of computation (float8/recipes.py).
    small = [row for row in (*queued, *reads) if row.module != "experts"]
    wide = [
        [int(_bytes(run, r)) for r in rows if r.module == "experts"] for rows in (reads, queued)
    ]
    return wide[0], [*wide[1], *[int(_bytes(run, row)) // run.element for row in small]]


def queues_float8(run: Resolved, layer: int | None) -> bool:
    """Whether the operands of a layer's deferred weight gradients are queued in float8, an element
    a byte; None: of the head."""
    chosen = run.float8
    if chosen is None or chosen.recipe.grad_weight is None:
        return False
    if layer is None:
        return chosen.settings.output
    block = MODELS[run.config.model.name].layer.format(layer)
    return any(name.startswith(f"{block}.") for name in chosen.layers)


def _bytes(run: Resolved, row: Saved) -> float:
    columns = run.between * run.experts["etp"]
    heads = min(run.tp, run.model.n_kv_heads)
    shared = {
        "neurons": run.tp,
        "heads": heads,
        "tokens": run.between,
        "columns": columns,
        "none": 1,
    }[row.split]
    element = max(4, run.element) if row.wide else run.element
    more = expert_room(run) if row.arrived else 1.0
    return more * row.width * element * run.tokens / shared


def widest(run: Resolved, layer: int) -> float:
    """Bytes of the largest tensor that a layer saves."""
    key = ("widest", run.kind(layer))
    if key not in run.memo:
        run.memo[key] = max(_bytes(run, row) for row in _rows(run, key[1]))
    return run.memo[key]


def boundary(run: Resolved) -> float:
    """Bytes of hidden states between two layers, of a micro-batch on a rank."""
    return run.model.dim * run.element * run.tokens / run.between


def logits(run: Resolved) -> float:
    """Bytes of logits, softmax and their gradient at once; see `loss_tensors`."""
    return float(sum(loss_tensors(run)))


def logits_gradient(run: Resolved) -> int:
    """Bytes of the gradient of a micro-batch's logits, of one prediction."""
    return run.element * run.tokens * -(-run.model.vocab_size // run.tp)


def loss_tensors(run: Resolved) -> list[int]:
    """Bytes of what is there at once while the gradient of the loss is made: of each prediction, or
    of one chunk, and then also the gradients of the head's weight and of the hidden states, which
    wait for the backward.

    A compiled loss holds logits and their gradient, an eager one 12 bytes an element: its softmax
    and two gradients are float32. Of several predictions logits and softmax wait, until the
    gradients of one after the other are computed.
    """
    vocabulary = -(-run.model.vocab_size // run.tp)
    chunks, predictions = run.config.train.loss_chunks, 1 + run.model.mtp
    each = -(-run.tokens // chunks) * vocabulary
    several = run.model.mtp if chunks == 1 else 0
    waiting = several * (4 + run.element) + (run.element if several else 0)
    found = [run.element * each] * (2 * (1 + several))
    if not run.config.compile.enable:
        found = [(12 + waiting) * each]
    if chunks > 1:
        dim = run.model.dim
        found += [4 * dim * vocabulary, run.element * dim * vocabulary]
        found.append(run.element * dim * run.tokens * predictions)
    return found
