"""Tensors that a block keeps for its backward, per token, as tables.

Each row is a tensor that autograd saves, with the modes of recomputation in which it is kept:

    width    elements per token
    split    how tp splits it: "neurons" (heads and neurons, over tp), "heads" (key/value heads,
             which tp ranks share where there are fewer), "tokens" (over tp under sequence
             parallelism), "columns" (tokens, and the width of experts over etp), "none"
             (gathered: whole on every rank)
    modes    none, selective, attention; the block's input is kept in all modes, and is all that
             `full` keeps

The rows are those of a compiled block, whose compiler chooses the cheapest elementwise results to
keep. An eager block keeps more (`eager`). Inputs of float8 layers are kept as `in_float8` says.
tests/plan/test_activations.py compares all with what torch's partitioner and autograd save, for
every model family.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dtron.float8.recipes import Recipe
from dtron.models import MODELS
from dtron.models.config import DecoderConfig
from dtron.models.layers import ACTIVATIONS
from dtron.models.matmuls import layer_matmuls
from dtron.plan.parameters import parameters
from dtron.plan.run_shape import Resolved, expert_room, pulls_rows
from dtron.setup.float8_plan import Float8Plan

NONE, SELECTIVE, ATTENTION = "none", "selective", "attention"
ALL = (NONE, SELECTIVE, ATTENTION, "full")
PRODUCT = (NONE, SELECTIVE)
"""Modes that keep the results of matmuls that the backward reads."""
Split = Literal["neurons", "heads", "tokens", "columns", "none"]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saves."""

    module: str
    width: float
    split: Split
    modes: tuple[str, ...] = (NONE,)
    wide: bool = False
    """Whether it is float32 whatever the dtype of computation."""
    eager: bool | None = None
    """True: kept by eager blocks only; False: by compiled blocks only; None: by both."""
    arrived: bool = False
    """Whether it holds token copies received by experts, whose buffers may have spare capacity."""
    pulled: bool = False
    """Whether it is read from peers' memory; selective recomputation keeps it if token copies are
    dispatched that way."""
    read: bool = False
    """Whether it is the input of a matmul whose weight gradient a schedule may defer: it is kept
    until that gradient is computed."""
    narrow: bool = False
    """Whether it is float8, a byte an element."""


@functools.lru_cache(maxsize=64)
def block(model: DecoderConfig, kind: str, padded: bool = True) -> tuple[SavedTensor, ...]:
    """List the tensors that a block saves, by `Resolved.kind`.

    Args:
        padded: latent attention's values are padded to the width of keys, as context parallelism
            and some kernels need.
    """
    mixture = kind != "dense"
    rows = [SavedTensor("input", model.dim, "tokens", ALL), *_norm_rows(model, "attn_norm")]
    rows += _merge(model) if kind == "prediction" else []
    rows += _latent(model, padded) if model.kv_lora_rank else _attention(model)
    # Selective recomputation keeps the matmul's result, a partial sum for all tokens, and reduces
    # it again.
    rows += [
        SavedTensor("wo", model.dim, "tokens"),
        SavedTensor("wo", model.dim, "none", (SELECTIVE,)),
    ]
    rows += _norm_rows(model, "ffn_norm", wide=mixture)
    rows += _mixture(model) if mixture else _feed_forward(model, "ffn", model.ffn_dim)
    return tuple(rows)


def _merge(model: DecoderConfig) -> list[SavedTensor]:
    """Tensors of an MTP block's merge: the normalised embeddings and hidden states, the matmul's
    result and the last norm's input."""
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
    """Statistics of `number` norms per token: a reciprocal root, and LayerNorm's mean."""
    if model.norm == "layernorm":
        return [SavedTensor(module, 2 * number, split)]
    return [SavedTensor(module, number, split, wide=True)]


def _norm_rows(model: DecoderConfig, module: str, wide: bool = False) -> list[SavedTensor]:
    """The normalised, gathered input of matmuls; a router also reads it in float32."""
    rows = _statistics(model, module, 1, "tokens")
    if wide:
        return [*rows, SavedTensor("router", model.dim, "tokens", wide=True)]
    return [*rows, SavedTensor(module, model.dim, "none", read=True)]


def _attended(model: DecoderConfig, width: int, read: bool = True) -> list[SavedTensor]:
    """Attention's output, which wo reads unless it is sliced first, and its log-sum-exp."""
    kept = (NONE, SELECTIVE, ATTENTION)
    return [
        SavedTensor("attention", width, "neurons", kept, read=read),
        SavedTensor("attention", model.n_heads, "neurons", kept, wide=True),
    ]


def _attention(model: DecoderConfig) -> list[SavedTensor]:
    q, kv = model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    rows = [SavedTensor("wq", q, "neurons", PRODUCT), *_shared(model, "wk", kv)]
    if model.qk_norm:
        rows += [SavedTensor("q_norm", q, "neurons"), SavedTensor("k_norm", kv, "heads")]
        rows += _statistics(model, "q_norm", model.n_heads + model.n_kv_heads, "neurons")
    return [*rows, *_shared(model, "wv", kv), *_attended(model, q)]


def _shared(model: DecoderConfig, module: str, width: int) -> list[SavedTensor]:
    """Keys or values: the whole of a head that ranks share, or the rank's own matmul result, from
    which selective recomputation gathers again."""
    return [
        SavedTensor(module, width, "heads"),
        SavedTensor(module, width, "neurons", (SELECTIVE,)),
    ]


def _latent(model: DecoderConfig, padded: bool) -> list[SavedTensor]:
    """Tensors of latent attention. Queries, keys and padded values of all heads have the width of
    queries; unpadded values are a part of wkv_b's output, which is kept."""
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
    if is_cut:  # wo reads a copy of a slice
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
    """Tensors of a mixture, k token copies per token: inputs, hidden states and outputs of
    experts."""
    k = model.experts_per_token
    gated = ACTIVATIONS[model.activation].gated
    chosen = (NONE, SELECTIVE, ATTENTION)
    rows = [
        SavedTensor("router", model.n_experts, "tokens", PRODUCT, wide=True),
        SavedTensor("router", 2 * k, "tokens", chosen, wide=True),  # int64: chosen experts
        SavedTensor("router", k + 2, "tokens", wide=True),
        SavedTensor("dispatch", 2 * k, "tokens", chosen, wide=True),  # int64: order of token copies
        SavedTensor("dispatch", 2 * k, "tokens", wide=True),  # and its inverse
        SavedTensor("experts", k * model.dim, "tokens", arrived=True, pulled=True, read=True),
        *[SavedTensor("experts", k * model.expert_dim, "columns", PRODUCT, arrived=True)]
        * (2 if gated else 1),
        SavedTensor("experts", k * model.expert_dim, "columns", arrived=True, read=True),
        SavedTensor("experts", k * model.dim, "tokens", PRODUCT),
        # Eager recomputation keeps what its policy names, including the combine of the last matmul.
        SavedTensor("experts", k * model.dim, "tokens", (), eager=True, arrived=True, pulled=True),
    ]
    if gated:
        rows.append(
            SavedTensor("experts", k * model.expert_dim, "columns", eager=True, arrived=True)
        )
    if width := model.n_shared_experts * model.expert_dim:
        rows.append(SavedTensor("shared", model.dim, "none", read=True))
        rows += _feed_forward(model, "shared", width)
    return rows


_RESULT: dict[str, Split] = {"columns": "neurons", "rows": "none", "none": "tokens"}
"""How tp splits a matmul's result, for each way it splits the weight."""


@functools.lru_cache(maxsize=64)
def output_gradients(model: DecoderConfig, kind: str) -> tuple[SavedTensor, ...]:
    """Gradients of the results of a block's matmuls. With the tensors of `block` that are `read`,
    they are what `dtron.parallelisms.pipeline.split_backward` holds for a deferred weight
    gradient."""
    rows = []
    for each in layer_matmuls(model, kind):
        if each.module == "experts":
            split: Split = "columns" if each.split == "columns" else "tokens"
            width = model.experts_per_token * each.n
            rows.append(SavedTensor("experts", width, split, arrived=True))
        elif each.module != "router":
            rows.append(SavedTensor(each.module, each.n, _RESULT[each.split]))
    return tuple(rows)


_READERS: dict[tuple[str, bool], tuple[str, ...]] = {
    ("attn_norm", True): ("attn.wq", "attn.wk", "attn.wv", "attn.wq_a", "attn.wkv_a"),
    ("q_a_norm", True): ("attn.wq_b",),
    ("kv_a_norm", True): ("attn.wkv_b",),
    ("attention", False): ("attn.wo",),
    ("ffn_norm", True): ("ffn.gate", "ffn.up"),
    ("ffn", False): ("ffn.down",),
    ("shared", True): ("ffn.shared.gate", "ffn.shared.up"),
    ("shared", False): ("ffn.shared.down",),
    ("merge", False): ("merge",),
}
"""FQNs inside a block of the linear layers that read a row, by its module and whether tp gathers
it; those that a model has."""
_FUSED = frozenset(("ffn.gate", "ffn.up", "ffn.down"))


@dataclass(frozen=True)
class Float8Block:
    """What decides which inputs a block with float8 layers keeps."""

    recipe: Recipe
    modules: frozenset[str]
    """FQNs inside the block of its modules with weights."""
    float8: frozenset[str]
    """Of those that are float8 layers."""
    fused: bool
    """Whether the feed-forward is one function (`float8/gated.py`)."""
    apart: bool
    """Whether layers that read one input cast it each: with their own delayed scales, or eagerly.
    Otherwise they share a cast."""
    compiled: bool
    gathered: bool
    """Whether tp gathers inputs."""


def in_float8(rows: Iterable[SavedTensor], chosen: Float8Block) -> Iterator[SavedTensor]:
    """A block's tensors if layers are float8, as `float8/linear.py` and `gated.py` save them.

    With one scale a tensor the cast of an input serves the weight's gradient too, and is kept
    in its place. Attention's output is kept as well, for its own backward; a fused feed-forward
    casts its hidden state anew. With scales of rows or blocks an input is cast anew, which a
    compiled block does from what its norm or activation was computed from.
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


def kept(run: Resolved, layer: int, whole: bool = False) -> dict[str, float]:
    """Bytes that a layer keeps per micro-batch on a rank, by module.

    Args:
        whole: count as without recomputation, as while the layer is recomputed.
    """
    found: dict[str, float] = {}
    for row in _kept_rows(run, _rows(run, layer), _mode(run, layer, whole)):
        found[row.module] = found.get(row.module, 0.0) + _bytes(run, row)
    return found


def written(run: Resolved, layer: int) -> float:
    """Bytes that a layer's operations write for its backward, before any of it is cast to float8
    or freed."""
    key = ("written", run.kind(layer))
    if key not in run.memo:
        run.memo[key] = sum(
            _bytes(run, row) for row in _kept_rows(run, _wide_rows(run, layer), NONE)
        )
    return run.memo[key]


def _mode(run: Resolved, layer: int, whole: bool) -> str:
    return run.config.recompute.mode if run.recomputes(layer) and not whole else NONE


def _wide_rows(run: Resolved, layer: int) -> tuple[SavedTensor, ...]:
    """Tensors with the kernels that `auto` prefers, which need padded values only under cp."""
    return block(run.model, run.kind(layer), run.degrees["cp"] > 1)


def _rows(run: Resolved, layer: int) -> tuple[SavedTensor, ...]:
    rows, names = _wide_rows(run, layer), run.float8_layers(layer)
    if run.float8 is None or not names:
        return rows
    key = ("float8 rows", run.kind(layer), names)
    if key not in run.memo:
        run.memo[key] = tuple(in_float8(rows, _float8_block(run, layer, run.float8)))
    return run.memo[key]


def _float8_block(run: Resolved, layer: int, chosen: Float8Plan) -> Float8Block:
    names, compiled = run.float8_layers(layer), run.config.compile.enable
    fqn = f"{MODELS[run.config.model.name].layer.format(layer)}.ffn"
    fits = chosen.recipe.shares_scales and names >= _FUSED and not run.model.bias
    delayed = chosen.settings.scaling == "delayed" and not run.config.parallel.async_tp
    listed = (each.name.removesuffix(".weight") for each in parameters(run, run.kind(layer)))
    return Float8Block(
        chosen.recipe,
        frozenset(listed),
        names,
        fused=fqn in chosen.fused and fits,
        apart=delayed or not compiled,
        compiled=compiled,
        gathered=run.tp > 1,
    )


def _kept_rows(run: Resolved, rows: Iterable[SavedTensor], mode: str) -> list[SavedTensor]:
    selective = mode == SELECTIVE
    pulls, overlapped = selective and pulls_rows(run), selective and run.config.parallel.async_tp
    of_compiler = (None, not run.config.compile.enable)

    def stays(row: SavedTensor) -> bool:
        return (
            mode in row.modes or (pulls and row.pulled) or (overlapped and _is_gathered(run, row))
        )

    kept = [row for row in rows if row.eager in of_compiler and stays(row)]
    if overlapped:  # fused with its reduce-scatter, wo's matmul has the rank's own tokens
        kept = [replace(row, split="tokens") if row.module == "wo" else row for row in kept]
    return kept


def _is_gathered(run: Resolved, row: SavedTensor) -> bool:
    """Whether a matmul gathers its input itself (`parallel.async_tp`), and has it as a result too.
    The first layers of latent attention with low-rank queries read the rank's own tokens."""
    own = row.module == "attn_norm" and run.model.q_lora_rank > 0
    return row.read and row.split == "none" and NONE in row.modes and not own


def tensors(run: Resolved, layer: int, whole: bool = False) -> list[int]:
    """Bytes of each tensor that a layer keeps; arguments as for `kept`."""
    rows = _kept_rows(run, _rows(run, layer), _mode(run, layer, whole))
    return [int(_bytes(run, row)) for row in rows]


def deferred(run: Resolved, layer: int) -> tuple[list[int], list[int]]:
    """Bytes that a layer holds for deferred weight gradients until they are computed: inputs of
    matmuls, which are among the tensors that it keeps or recomputes, and what only W needs:
    gradients of their results, and in float8 those inputs that are cast anew."""
    reads = [row for row in _rows(run, layer) if row.read]
    queued = list(output_gradients(run.model, run.kind(layer)))
    if queues_float8(run, layer):
        # Experts' weight gradients are in the dtype of computation (float8/recipes.py).
        cast = [row for row in reads if row.module != "experts" and not (row.narrow and row.modes)]
        reads = [row for row in reads if row not in cast]
        queued = [
            row if row.module == "experts" else replace(row, narrow=True)
            for row in (*queued, *cast)
        ]
    return [int(_bytes(run, row)) for row in reads], [int(_bytes(run, row)) for row in queued]


def queues_float8(run: Resolved, layer: int | None) -> bool:
    """Whether the operands of a layer's deferred weight gradients are queued in float8, an element
    a byte; None: of the head."""
    chosen = run.float8
    if chosen is None or chosen.recipe.grad_weight is None:
        return False
    if layer is None:
        return chosen.settings.output
    return bool(run.float8_layers(layer))


def _bytes(run: Resolved, row: SavedTensor) -> float:
    columns = run.between * run.experts["etp"]
    heads = min(run.tp, run.model.n_kv_heads)
    shared = {
        "neurons": run.tp,
        "heads": heads,
        "tokens": run.between,
        "columns": columns,
        "none": 1,
    }[row.split]
    element = 1 if row.narrow else max(4, run.element) if row.wide else run.element
    more = expert_room(run) if row.arrived else 1.0
    return more * row.width * element * run.tokens / shared


def widest(run: Resolved, layer: int) -> float:
    """Bytes of the largest tensor that a layer saves for its backward."""
    key = ("widest", run.kind(layer))
    if key not in run.memo:
        run.memo[key] = max(_bytes(run, row) for row in _wide_rows(run, layer))
    return run.memo[key]


def boundary(run: Resolved) -> float:
    """Bytes of the hidden states between two layers, per micro-batch on a rank."""
    return run.model.dim * run.element * run.tokens / run.between


def logits(run: Resolved) -> float:
    """Bytes of logits, softmax and gradient that exist at once; see `loss_tensors`."""
    return float(sum(loss_tensors(run)))


def logits_gradient(run: Resolved) -> int:
    """Bytes of the gradient of a micro-batch's logits, for one prediction."""
    return run.element * run.tokens * -(-run.model.vocab_size // run.tp)


def loss_tensors(run: Resolved) -> list[int]:
    """Bytes that exist at once while the loss's gradient is computed, per prediction. A chunked
    loss holds those of one chunk, and the gradients of the head's weight and of the hidden states
    until the backward.

    A compiled loss holds logits and their gradient; an eager one holds 12 bytes per element, as its
    softmax and two gradients are float32. With several predictions, the logits and softmax of all
    are held while their gradients are computed one after the other.
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
