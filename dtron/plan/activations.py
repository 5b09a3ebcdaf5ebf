"""Compute the bytes that layers keep for their backward: apply a run's layout, recomputation and
float8 (`float8_inputs.py`) to the tables of `saved_tensors.py`."""

from collections.abc import Sequence
from dataclasses import replace

from dtron.lora.dora import MAGNITUDE
from dtron.models import model_spec
from dtron.models.config import LayerKind
from dtron.models.vision import CHANNELS
from dtron.plan.float8_inputs import FUSED, Float8Block, in_float8
from dtron.plan.parameters import parameters
from dtron.plan.run_shape import Resolved, expert_room, pulls_rows
from dtron.plan.saved_tensors import (
    ENCODED,
    IN_CHUNKS,
    NONE,
    SELECTIVE,
    SavedTensor,
    Split,
    block,
    of_modules,
    output_gradients,
)
from dtron.setup.float8_plan import Float8Plan
from dtron.training.loss import EVEN

_RESULTS: dict[int | None, Split] = {0: "neurons", 1: "none", None: "tokens"}
"""How tp shards the result of a matrix, by the dim of the matrix that it shards."""


def kept(run: Resolved, layer: int, whole: bool = False) -> dict[str, float]:
    """Return the bytes that a layer keeps for its backward per micro-batch on a rank, by module.

    Args:
        whole: ignore recomputation: count what exists once the backward has recomputed the layer.
    """
    found: dict[str, float] = {}
    for row in _kept_of(run, layer, whole):
        found[row.module] = found.get(row.module, 0.0) + _bytes(run, row)
    return found


def written(run: Resolved, layer: int) -> float:
    """Return the bytes that a layer's forward would write for its backward.

    These are the bytes without recomputation and float8.
    """
    key = ("written", run.kind(layer))
    if key not in run.memo:
        run.memo[key] = sum(
            _bytes(run, row) for row in _kept_rows(run, _wide_rows(run, layer), NONE)
        )
    return run.memo[key]


def _kept_of(run: Resolved, layer: int, whole: bool) -> list[SavedTensor]:
    """Return the rows of a layer that are kept.

    Args:
        whole: ignore recomputation; of a feed-forward in chunks, the rows are of one chunk.
    """
    mode = run.config.recompute.mode if run.recomputes(layer) and not whole else NONE
    rows = _kept_rows(run, _rows(run, layer), mode)
    chunks = run.ffn_chunks(layer)
    if chunks == 1:
        return rows
    others = [row for row in rows if row.module not in IN_CHUNKS]
    if run.model.post_norm:  # the norm follows the chunks, and reads the sum of all of them
        norm = [row for row in rows if row.module == "ffn_norm"]
        others += [replace(row, split="tokens", read=False) for row in norm]
    inside = [row for row in rows if row.module in IN_CHUNKS]
    return others + [replace(row, width=row.width / chunks) for row in inside if whole]


def _wide_rows(run: Resolved, layer: int) -> tuple[SavedTensor, ...]:
    """Return a layer's saved tensors as without float8.

    Values of latent attention count as padded only with cp > 1: the first choices of
    `model.attention = "auto"` pad them only then.
    """
    kind, alone = run.kind(layer), run.degrees["cp"] == 1
    expanded = alone and not run.config.data.mask_documents  # FlexAttention masks documents
    length = run.config.train.seq_len if run.saves_weights(layer) else 0
    keys = round(length * run.share(kind)), round(length * run.share(kind, encoded=True))
    return _of_own_tokens(run, kind, block(run.model, kind, not alone, expanded, keys))


def _of_own_tokens(
    run: Resolved, kind: LayerKind, rows: tuple[SavedTensor, ...]
) -> tuple[SavedTensor, ...]:
    """Return a layer's rows, in an encoder-decoder with widths per token of the text."""
    if not run.model.encoder_layers:
        return rows
    return tuple(
        replace(row, width=row.width * run.share(kind, row.encoded))
        for row in rows
        if row.module != ENCODED or run.tp > 1
    )


def _rows(run: Resolved, layer: int) -> tuple[SavedTensor, ...]:
    rows, names = _wide_rows(run, layer), run.float8_layers(layer)
    if run.float8 is None or not names:
        return rows + _not_rescaled(run, layer)
    key = ("float8 rows", run.kind(layer), names)
    if key not in run.memo:
        run.memo[key] = tuple(in_float8(rows, _float8_block(run, layer, run.float8)))
    return run.memo[key] + _not_rescaled(run, layer)


def _not_rescaled(run: Resolved, layer: int) -> tuple[SavedTensor, ...]:
    """Return the results of matrices with DoRA before they are rescaled, for the magnitudes.

    Of those that a later operation reads, a compiled block keeps no second copy.
    """
    listed = {each.name: each for each in parameters(run, run.kind(layer), layer)}
    found = []
    for name, each in listed.items():
        *path, linear, end = name.split(".")
        if end == MAGNITUDE:
            module = linear if path in ([], ["attn"]) else path[-1]
            split = _RESULTS[listed[f"{name.removesuffix(end)}weight"].split]
            eager = None if linear in ("wo", "down") else True
            found.append(SavedTensor(module, each.shape[0], split, eager=eager))
    return tuple(found)


def _float8_block(run: Resolved, layer: int, chosen: Float8Plan) -> Float8Block:
    names, compiled = run.float8_layers(layer), run.config.compile.enable
    fqn = f"{model_spec(run.config.model.name).layer.format(layer)}.ffn"
    fits = chosen.recipe.shares_scales and names >= FUSED and not run.model.bias
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


def _kept_rows(run: Resolved, rows: Sequence[SavedTensor], mode: str) -> list[SavedTensor]:
    selective, modules = mode == SELECTIVE, run.config.recompute.modules
    pulls, overlapped = selective and pulls_rows(run), selective and run.config.parallel.async_tp
    compiled = run.config.compile.enable
    of_compiler, chained = (None, not compiled), compiled and run.tp == 1 and not selective
    chained = chained and any(row.module == "ffn_norm" for row in rows)  # not in the last module

    def stays(row: SavedTensor) -> bool:
        if modules and not of_modules(row, modules, chained):
            return NONE in row.modes
        return (
            mode in row.modes or (pulls and row.pulled) or (overlapped and _is_gathered(run, row))
        )

    kept = [row for row in rows if row.eager in of_compiler and stays(row)]
    if overlapped:  # wo's matmul, fused with its reduce-scatter, returns the rank's own tokens
        kept = [replace(row, split="tokens") if row.module == "wo" else row for row in kept]
    return kept


def _is_gathered(run: Resolved, row: SavedTensor) -> bool:
    """Whether a matmul with `parallel.async_tp` gathers the tensor.

    The matmul then also returns the gathered tensor. False for the input of latent attention with
    low-rank queries, since the first layers of this attention read only the tokens of their own
    rank.

    The matmul then also returns the gathered tensor. False for the attention input of latent
    attention with low-rank queries: its first layers read only the tokens of their rank.
    """
    own = row.module == "attn_norm" and run.model.q_lora_rank > 0
    return row.read and row.split == "none" and NONE in row.modes and not own


def share_in_chunks(run: Resolved, layer: int) -> float:
    """Return the fraction of a layer's saved bytes that `recompute.ffn_chunks` recomputes."""
    if run.ffn_chunks(layer) == 1:
        return 0.0
    rows = _kept_rows(run, _wide_rows(run, layer), NONE)
    inside = sum(_bytes(run, row) for row in rows if row.module in IN_CHUNKS)
    return inside / sum(_bytes(run, row) for row in rows)


def recomputed_share(run: Resolved, layer: int) -> float:
    """Return the fraction of a layer's saved bytes that `recompute.modules` recompute.

    The modules of `recompute.modules` write these bytes. 1 if the key is empty.
    """
    rows, modules = _kept_rows(run, _wide_rows(run, layer), NONE), run.config.recompute.modules
    if not modules:
        return 1.0
    inside = sum(_bytes(run, row) for row in rows if of_modules(row, modules, chained=False))
    return inside / sum(_bytes(run, row) for row in rows)


def tensors(run: Resolved, layer: int, whole: bool = False) -> list[int]:
    """Return the bytes of each tensor that a layer keeps for its backward on a rank.

    `whole`: ignore recomputation: count what exists once the backward has recomputed the layer.
    """
    return [int(_bytes(run, row)) for row in _kept_of(run, layer, whole)]


def deferred(run: Resolved, layer: int) -> tuple[list[int], list[int]]:
    """Return bytes (inputs, queued) that a layer holds for its deferred weight gradients.

    The tensors are held until W, the action that computes these gradients. `inputs` are inputs of
    matmuls, which the layer keeps or recomputes anyway. `queued` are tensors that only W needs:
    gradients of matmul results and, in float8, inputs that are cast again.
    """
    reads = [row for row in _rows(run, layer) if row.read]
    kind = run.kind(layer)
    queued = list(_of_own_tokens(run, kind, output_gradients(run.model, kind)))
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
    """Whether the operands of a layer's deferred weight gradients are queued in float8.

    An operand then has 1 byte per element. `layer` None: the head's operands.
    """
    chosen = run.float8
    if chosen is None or chosen.recipe.grad_weight is None:
        return False
    if layer is None:
        return chosen.settings.output
    return bool(run.float8_layers(layer))


def _bytes(run: Resolved, row: SavedTensor) -> float:
    columns = run.between * run.experts["etp"]
    shared = {
        "neurons": run.tp,
        "heads": min(run.tp, row.heads),
        "tokens": run.between,
        "columns": columns,
        "none": 1,
    }[row.split]
    element = 1 if row.narrow else max(4, run.element) if row.wide else run.element
    more = expert_room(run) if row.arrived else 1.0
    if row.results and run.config.parallel.dispatcher == "hierarchical":
        more = expert_room(run) / run.experts["etp"]
    return more * row.width * element * run.tokens / shared


def widest(run: Resolved, layer: int) -> float:
    """Bytes of the largest tensor that a layer saves for its backward."""
    key = ("widest", run.kind(layer))
    if key not in run.memo:
        chunks = run.ffn_chunks(layer)
        run.memo[key] = max(
            _bytes(run, row) / (chunks if row.module in IN_CHUNKS else 1)
            for row in _wide_rows(run, layer)
        )
    return run.memo[key]


def context_gradients(run: Resolved, layer: int) -> float:
    """Return the bytes of temporaries in the backward of a layer's context-parallel attention.

    These are float32 gradients of queries and of exchanged keys and values, and the kernel's
    results before they are added. `dtron.plan.memory` counts the keys and values themselves.
    """
    cp = run.degrees["cp"]
    if cp == 1 or run.kind(layer).mixer != "attention":
        return 0.0
    shape, model, e = run.context(layer), run.model.of_layer(run.kind(layer)), run.element
    q = model.n_heads * model.head_size // run.tp
    kv = 2 * model.local_kv_heads(run.tp) * model.head_size
    if shape.gathers:  # of all ranks' tokens: zeros, their reduction by block, and its order
        width = 3 * 4 * kv * cp + (4 + e) * q
    elif shape.outer > 1:  # a ring: the gradients of two blocks, one received
        width = 3 * 4 * kv + (6 + 1.5 * e) * q + e * kv
    else:  # only all-to-alls, of gradients, queries, keys, values and outputs
        width = 4 * kv + (8 + 5 * e) * q + e * kv
    return float(width * run.tokens)


def unfused_scores(run: Resolved, layer: int) -> float:
    """Return the bytes of a layer's scores in the backward of attention without a fused kernel.

    The kernel `math` has four float32 tensors of scores, by a rank's queries and the keys of a
    block. Where autograd differentiates plain PyTorch, the weights that it saved are two of them.
    """
    if not run.unfused(layer):
        return 0.0
    shape = run.context(layer)
    # A ring has the keys of one block of ranks at a time.
    keys = keys_of_query(run, layer) / (shape.outer if shape.rings else 1)
    number = 2 if run.saves_weights(layer) else 4
    return 4.0 * number * (run.model.n_heads // run.tp) * run.tokens * keys


def keys_of_query(run: Resolved, layer: int) -> float:
    """Return the keys that attention without a fused kernel scores per token of a micro-batch.

    Packed sequences of a micro-batch are one to the kernel.
    """
    train, kind = run.config.train, run.kind(layer)
    if run.model.encoder_layers:
        encoder, decoder = run.share(kind, encoded=True), run.share(LayerKind(cross=True))
        pairs = encoder**2 if kind.encoder else decoder * (decoder + encoder)
        return train.seq_len * pairs
    packed = run.config.data.mask_documents and not run.saves_weights(layer)
    return train.seq_len * (train.micro_batch if packed else 1)


def boundary(run: Resolved) -> float:
    """Bytes of the hidden states between two layers, per micro-batch on a rank."""
    return run.model.dim * run.element * run.hidden_tokens / run.between


def ends_of_encoder(run: Resolved, encoder: Resolved) -> int:
    """Bytes that the encoder's patches and projector keep for their backward, per micro-batch.

    These are the pixels of patches, the projector's input and the two inputs of its second matmul.
    """
    width = CHANNELS * run.model.vision_patch_size**2 + run.model.vision_dim + 2 * run.model.dim
    return 0 if run.frozen else width * encoder.tokens * run.element


def logits_gradient(run: Resolved) -> int:
    """Bytes of one prediction head's logits gradient, per micro-batch on a rank."""
    return run.element * run.predicted * -(-run.model.vocab_size // run.tp)


def loss_tensors(run: Resolved) -> list[int]:
    """Bytes of the tensors that exist at once while the gradient of the loss is computed.

    A compiled loss holds the logits of each prediction and their gradient. An eager loss holds 12
    bytes per logit of one prediction (softmax and two gradients in float32); with MTP also the
    logits and softmax of all predictions. A chunked loss holds these tensors for one chunk of one
    prediction, where the gradient overwrites the logits, and, until the backward, the gradients of
    the head's weight and of the hidden states. It pads an odd vocabulary, and holds the padded
    weight.
    """
    vocabulary = -(-run.model.vocab_size // run.tp)
    chunks, predictions = run.config.train.loss_chunks, 1 + run.model.mtp
    padding = -vocabulary % EVEN if chunks > 1 else 0
    vocabulary += padding
    each = -(-run.predicted // chunks) * vocabulary
    several = run.model.mtp if chunks == 1 else 0
    waiting = several * (4 + run.element) + (run.element if several else 0)
    found = [run.element * each] * (1 if chunks > 1 else 2 * (1 + several))
    if not run.config.compile.enable:
        found = [(12 + waiting) * each]
    if chunks > 1:
        dim = run.model.dim
        found += [4 * dim * vocabulary, run.element * dim * vocabulary]
        found.append(run.element * dim * run.predicted * predictions)
    if padding:
        found.append(run.element * dim * vocabulary)
    if run.model.logit_softcap:  # what its backward reads: the tanh, or a chunk's capped logits
        found.append((4 if chunks > 1 else run.element * (1 + run.model.mtp)) * each)
    return found
