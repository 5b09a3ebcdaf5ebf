"""Seconds of a rank's computation per micro-batch: matmuls, attention and elementwise kernels."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dtron.models.config import LayerKind
from dtron.models.flops import state_flops
from dtron.models.matmuls import layer_matmuls
from dtron.models.vision import CHANNELS
from dtron.plan import activations
from dtron.plan.hardware import Hardware
from dtron.plan.run_shape import Resolved, expert_rows

PASSES = 8
"""Bytes that elementwise kernels of forward and backward move, as a multiple of a block's saved
bytes. Fitted to a single block of Llama-3-8B (benchmarks/RESULTS.md)."""
EAGER_PASSES = 18
FORWARD, EAGER_FORWARD = 0.4, 1 / 3
"""Fraction of the bytes of PASSES and EAGER_PASSES that the forward moves. FORWARD and AGAIN are
counted in inductor's fused graphs of dense blocks with the proportions of Llama-3-8B and Qwen3-8B.
"""
AGAIN = {"selective": 0.2, "attention": 0.23, "full": FORWARD}
"""Bytes that recomputation adds to a compiled backward, as a fraction of the bytes of PASSES, by
mode. Mode `full` calls the forward's graph once more. Other modes add less, since the kernels that
use recomputed values also compute them."""
UNFUSED_MOVES = 8
"""Reads and writes of the scores in the elementwise kernels of `math`, in forward or backward."""
FLOAT32 = 67 / 989
"""Rate of float32 matmuls as a fraction of that of bfloat16, by an H100's data sheet."""
CAST, CAST_WEIGHT, TURN_WEIGHT = 6, 8, 2
"""Bytes that float8 casts move per element: CAST for an input or gradient, CAST_WEIGHT for a
weight, TURN_WEIGHT for a weight that FSDP gathers in float8. A tensor is read for its largest
magnitude, read again for its cast, and written plain and transposed. The backward casts a weight
again. A weight that is gathered in float8 is only transposed."""


@dataclass(frozen=True)
class ShardedMatmul:
    """A rank's matmul (m, k) x (k, n), or `groups` such matmuls with m rows in total.

    The backward has two matmuls of this size, of a frozen weight one.
    """

    module: str
    m: int
    k: int
    n: int
    groups: int = 1
    float8: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Seconds:
    """Seconds of one layer or head per micro-batch."""

    forward: float
    inputs: float
    """The backward without the gradients of weights."""
    weights: float
    """The backward's part for the gradients of the weights."""

    @property
    def sum(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.inputs + self.weights

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.forward + other.forward,
            self.inputs + other.inputs,
            self.weights + other.weights,
        )


Work = dict[str, Seconds]
"""Seconds by kind: matmul, grouped_matmul (experts), attention, and copy (elementwise kernels)."""


def together(*parts: Work) -> Work:
    """Add up seconds by kind."""
    found: Work = {}
    for part in parts:
        for kind, seconds in part.items():
            found[kind] = found[kind] + seconds if kind in found else seconds
    return found


def total(work: Work) -> Seconds:
    """Add up the seconds of all kinds."""
    return sum(work.values(), Seconds(0.0, 0.0, 0.0))


def forward_only(work: Work) -> Work:
    """Return the seconds of the forward, those of a frozen encoder."""
    return {kind: Seconds(seconds.forward, 0.0, 0.0) for kind, seconds in work.items()}


def matmuls(run: Resolved, kind: LayerKind) -> list[ShardedMatmul]:
    """List a rank's matmuls in the forward of a layer of the given kind."""
    own, eight = -(-run.tokens // run.between), bool(run.config.float8.recipe)
    frozen = run.frozen
    groups = run.model.n_experts // run.experts["ep"] if kind.experts else 1
    found = []
    for each in layer_matmuls(run.model, kind):
        if each.module == "experts":
            shape = (expert_rows(run), *each.sharded(run.experts["etp"]))
            found.append(ShardedMatmul("experts", *shape, groups, frozen=frozen))
        else:
            tokens = own if each.split == "none" else run.tokens
            tokens = round(tokens * run.share(kind, each.module.startswith("cross.kv.")))
            float8 = eight and each.module not in ("router", "shared_gate")
            shape = (tokens, *each.sharded(run.tp))
            found.append(ShardedMatmul(each.module, *shape, 1, float8, frozen))
    return found + [x for each in found for x in _adapter(run, kind, each)]


def _adapter(run: Resolved, kind: LayerKind, of: ShardedMatmul) -> list[ShardedMatmul]:
    """List the two matmuls of the adapter of a matmul of a layer; empty: it has none."""
    layer = next(i for i in range(run.n_layers) if run.kind(i) == kind)
    if not any(f".{of.module}." in f".{name}" for name in run.adapters(layer)):
        return []
    rank = run.config.lora.rank
    shapes = ((of.k, rank), (rank, of.n))
    return [ShardedMatmul("adapter", of.m, k, n, of.groups) for k, n in shapes]


def attention_flops(run: Resolved, layer: int) -> float:
    """Return a rank's attention FLOPs in a layer's forward.

    With a causal mask these are the FLOPs over half of the scores.

    For a recurrent layer these are the FLOPs in its states.
    """
    if (kind := run.kind(layer)).mixer != "attention":
        return state_flops(run.model, kind) * run.tokens / run.tp
    model, length = run.model, run.config.train.seq_len
    if model.encoder_layers:
        encoder, decoder = run.share(kind, encoded=True), run.share(LayerKind(cross=True))
        pairs = 2 * encoder**2 if kind.encoder else decoder * (decoder + 2 * encoder)
        return 2.0 * model.n_heads * model.head_size // run.tp * pairs * run.tokens * length
    window = run.window(layer)
    seen = min(length, 2 * window) if window else length * (1 if model.causal else 2)
    widths = model.n_heads * sum(head_widths(run, kind)) // run.tp
    return float(widths) * run.tokens * seen


def head_widths(run: Resolved, kind: LayerKind) -> tuple[int, int]:
    """Return the widths of a head's keys and values in the attention kernel of a layer.

    Context parallelism pads values to the width of keys.
    """
    model = run.model.of_layer(kind)
    keys = model.head_size
    return keys, keys if run.degrees["cp"] > 1 else model.v_head_size


@functools.lru_cache(maxsize=4096)
def _product(hardware: Hardware, p: ShardedMatmul) -> Seconds:
    shape = (p.groups, p.float8)
    return Seconds(
        hardware.product(p.m, p.k, p.n, *shape),
        hardware.product(p.m, p.n, p.k, *shape),
        # The weight's gradient sums over tokens; for experts, over each expert's own tokens.
        0.0
        if p.frozen
        else hardware.product(p.n, p.m, p.k, 1, p.float8)
        if p.groups == 1
        else hardware.product(p.m, p.n, p.k, *shape),
    )


def cast_seconds(run: Resolved, listed: list[ShardedMatmul], hardware: Hardware) -> Seconds:
    """Seconds of float8 casts: bytes / rate of a copy.

    Each matmul casts its input, weight and output gradient. The forward counts inputs, the backward
    gradients; each counts half of the weights' bytes.
    """
    eight = [p for p in listed if p.float8]
    weight = TURN_WEIGHT if run.config.float8.all_gather else CAST_WEIGHT
    forward = sum(CAST * p.m * p.k + weight * p.k * p.n / 2 for p in eight)
    backward = sum(CAST * p.m * p.n + weight * p.k * p.n / 2 for p in eight)
    return Seconds(forward / hardware.copy, backward / hardware.copy, 0.0)


def layer(run: Resolved, index: int, hardware: Hardware) -> Work:
    """Return the seconds of a layer's computation per micro-batch, without communication."""
    listed = matmuls(run, run.kind(index))
    mode, casts = run.config.recompute.mode, cast_seconds(run, listed, hardware)
    attention = _attention(run, index, hardware)
    compiled = run.config.compile.enable
    passes, ahead = (PASSES, FORWARD) if compiled else (EAGER_PASSES, EAGER_FORWARD)
    moved = passes * activations.written(run, index) / hardware.copy
    elementwise = Seconds(moved * ahead, moved * (1 - ahead), 0.0)
    parts = [_kinds(listed, hardware), {"attention": attention, "copy": casts + elementwise}]
    if run.recomputes(index):
        again = moved * (AGAIN[mode] if compiled else ahead)
        again *= activations.recomputed_share(run, index)
        if mode != "selective":
            once_more, whole = repeated(run, index), run.recomputes_whole(index)
            again += (casts if whole else cast_seconds(run, once_more, hardware)).forward
            repeats = _kinds(once_more, hardware)
            parts.append({kind: Seconds(0.0, each.forward, 0.0) for kind, each in repeats.items()})
        parts.append({"copy": Seconds(0.0, again, 0.0)})
        mixer = run.kind(index).mixer.replace("attention", "attn")
        if mode == "full" and run.recomputes(index, mixer):
            parts.append({"attention": Seconds(0.0, attention.forward, 0.0)})
    if run.ffn_chunks(index) > 1:
        parts += _again_in_chunks(run, index, hardware, moved * ahead)
    return together(*parts)


def _attention(run: Resolved, index: int, hardware: Hardware) -> Seconds:
    """Return the seconds of a layer's attention, or of its recurrent states."""
    model, mixer, flops = run.model, run.kind(index).mixer, attention_flops(run, index)
    widths = {
        "attention": head_widths(run, run.kind(index)),
        "delta": (model.delta_key_dim, model.delta_value_dim),
        "mamba": (model.mamba_state_dim, model.mamba_head_dim),
    }
    if not mixer:
        return Seconds(0.0, 0.0, 0.0)
    if run.unfused(index):
        return _unfused(run, index, hardware)
    forward = hardware.attend(flops, False, *widths[mixer])
    return Seconds(forward, hardware.attend(2 * flops, True, *widths[mixer]), 0.0)


def _unfused(run: Resolved, index: int, hardware: Hardware) -> Seconds:
    """Return the seconds of a layer's attention in float32, over all scores, without a kernel.

    The forward has two matmuls and the backward five; each scores tensor is moved by
    UNFUSED_MOVES elementwise kernels in each.
    """
    model = run.model.of_layer(run.kind(index))
    keys, heads = activations.keys_of_query(run, index), model.n_heads // run.tp
    flops = 2.0 * heads * run.tokens * keys * model.head_size
    moved = UNFUSED_MOVES * 4.0 * heads * run.tokens * keys / hardware.copy
    rate = hardware.ceiling * FLOAT32
    return Seconds(2 * flops / rate + moved, 5 * flops / rate + moved, 0.0)


def _again_in_chunks(
    run: Resolved, index: int, hardware: Hardware, elementwise: float
) -> Iterator[Work]:
    """Yield what `recompute.ffn_chunks` computes again.

    Args:
        elementwise: seconds of the elementwise kernels of the layer's forward.
    """
    again = in_chunks(run, index)
    casts = cast_seconds(run, again, hardware).forward
    seconds = elementwise * activations.share_in_chunks(run, index) + casts
    yield {"copy": Seconds(0.0, seconds, 0.0)}
    for kind, each in _kinds(again, hardware).items():
        yield {kind: Seconds(0.0, each.forward, 0.0)}


def in_chunks(run: Resolved, index: int) -> list[ShardedMatmul]:
    """List the matmuls of a layer's feed-forward that `recompute.ffn_chunks` computes again.

    No gradient needs the last one's result.
    """
    if run.ffn_chunks(index) == 1:
        return []
    return [p for p in matmuls(run, run.kind(index)) if p.module == "ffn"][:-1]


def _kinds(listed: list[ShardedMatmul], hardware: Hardware) -> Work:
    return together(
        *({"grouped_matmul" if p.groups > 1 else "matmul": _product(hardware, p)} for p in listed)
    )


_MATMULS = {
    "delta": frozenset(("w_qkv", "w_z", "w_a", "w_b", "delta.wo")),
    "mamba": frozenset(("w_z", "w_xbc", "w_dt", "mamba.wo")),
    "attn": frozenset(("wq", "wk", "wv", "wg", "wo", "wq_a", "wq_b", "wkv_a", "wkv_b")),
    "ffn": frozenset(("ffn",)),
    "ffn.experts": frozenset(("experts",)),
    "ffn.shared": frozenset(("shared",)),
}
"""Names of matmuls (`ShardedMatmul.module`) in each module that `recompute.modules` may list."""


def _output(kind: LayerKind) -> str:
    """Return the name of the last matmul of what mixes tokens."""
    return "wo" if kind.mixer == "attention" else f"{kind.mixer}.wo"


def repeated(run: Resolved, index: int) -> list[ShardedMatmul]:
    """List the matmuls that a layer's backward recomputes in a mode that keeps no matmul result.

    The last matmul of a feed-forward or shared expert, or of a layer without these, may be omitted:
    its result is only added to the layer's output, so no gradient reads it. (Gradients of combine
    weights read the results of experts, and those of post-norms their inputs.) A compiled block
    whose backward graph contains the recomputation omits it. Eager recomputation stops at the last
    tensor that autograd needs, so it omits this matmul only if it is the layer's last. In mode
    `full`, a compiled block repeats its whole forward.
    """
    kind, options = run.kind(index), run.config
    listed = matmuls(run, kind)
    if modules := options.recompute.modules:
        # A module's output, from its last matmul, is kept. Attention's input has the same size as
        # its output: a compiler that has to keep one of them keeps the input. So it is with a
        # feed-forward layer whose output a post-norm reads.
        chained = options.compile.enable and run.tp == 1 and bool(kind.ffn)
        inside = {n: [p for p in listed if p.module in _MATMULS.get(n, ())] for n in modules}
        mixers = ("attn", "delta", "mamba")
        equal = (*mixers, "ffn") if run.model.sandwich_norms else mixers
        whole = {name for name in modules if name in equal and chained}
        return [p for n, own in inside.items() for p in (own if n in whole else own[:-1])]
    if run.ffn_chunks(index) > 1:
        # A compiled backward computes the feed-forward once more, for the chunks and the block.
        once = options.compile.enable and options.recompute.mode != "full"
        return [p for p in listed if p.module != "ffn"] if once else listed
    mixture = kind.experts
    whole = options.recompute.mode == "full" if options.compile.enable else mixture
    name = "shared" if mixture else "ffn" if kind.ffn else _output(kind)
    places = [place for place, p in enumerate(listed) if p.module == name]
    if whole or not places or run.model.sandwich_norms or run.model.layer_scalars:
        return listed
    return listed[: places[-1]] + listed[places[-1] + 1 :]


def offload_wait(run: Resolved, index: int, hardware: Hardware) -> float:
    """Seconds that a layer waits per micro-batch for copies to the host and back.

    Each copy takes (bytes kept by the layer) / (rate of the host link). The layer waits if
    the copy to the host takes longer than its forward, or the copy back longer than its backward.
    The wait is the difference.
    """
    if not run.config.recompute.offload:
        return 0.0
    copied = sum(activations.kept(run, index).values()) / hardware.host_link
    own = total(layer(run, index, hardware))
    return max(0.0, copied - own.forward) + max(0.0, copied - own.inputs - own.weights)


def ends_of_encoder(run: Resolved, hardware: Hardware) -> Work:
    """Return the seconds of the encoder's patches and projector; empty without an encoder."""
    if run.encoder is None:
        return {}
    model, tokens = run.model, run.encoder.tokens
    sizes = (CHANNELS * model.vision_patch_size**2, model.vision_dim, model.dim, model.dim)
    pairs = itertools.pairwise(sizes)
    work = _kinds([ShardedMatmul("images", tokens, k, n) for k, n in pairs], hardware)
    return forward_only(work) if run.frozen else work


def head(run: Resolved, hardware: Hardware) -> Work:
    """Return the seconds of final norm, head and loss per micro-batch.

    The seconds of all 1 + mtp predictions are added up.
    """
    vocabulary = -(-run.model.vocab_size // run.tp)
    shape, frozen = (run.predicted, run.model.dim, vocabulary), run.frozen
    once = _product(hardware, ShardedMatmul("head", *shape, frozen=frozen))
    moved = 5.0 * run.element * run.predicted * vocabulary / hardware.copy
    if run.model.post_norm:  # the linear layer before the head
        own = -(-run.tokens // run.between)
        width = run.model.dim
        once = once + _product(hardware, ShardedMatmul("transform", own, width, width))
    each: Work = {"matmul": once, "copy": Seconds(moved / 2, moved / 2, 0.0)}
    return together(*[each] * (1 + run.model.mtp))
