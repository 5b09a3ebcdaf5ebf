"""What a rank computes of one micro-batch: matrix products and attention of each layer, as data."""

import functools
from dataclasses import dataclass

from dtron.models.matmuls import layer_matmuls
from dtron.plan import activations
from dtron.plan.hardware import Hardware
from dtron.plan.run_shape import Resolved, expert_rows

PASSES = 8
"""How often a block's saved bytes are read or written by elementwise kernels, forward and backward;
fitted to a block of Llama-3-8B alone (benchmarks/RESULTS.md). Without torch.compile: 18."""
EAGER_PASSES = 18
FORWARD, EAGER_FORWARD = 0.4, 1 / 3
"""Share of these bytes that the forward moves. The first, and what is computed again, is counted in
the graphs that inductor fuses of dense blocks, in the proportions of Llama-3-8B and Qwen3-8B."""
AGAIN = {"selective": 0.2, "attention": 0.23, "full": FORWARD}
"""Share that a compiled backward adds to them where it computes again, by mode: what is recomputed
is fused with what reads it. A full one calls the forward's graph once more."""
CAST, CAST_WEIGHT, TURN_WEIGHT = 6, 8, 2
"""Bytes an element of casts to float8. An input or gradient is read for its largest value and again
to be cast, and written as it is and transposed; a weight the same, and once more for the backward;
one that is gathered in float8 is turned alone."""


@dataclass(frozen=True)
class ShardedMatmul:
    """(m, k) x (k, n) of a rank, `groups` of them with m tokens in all; the backward is two of
    this size."""

    module: str
    m: int
    k: int
    n: int
    groups: int = 1
    float8: bool = False


@dataclass(frozen=True)
class Seconds:
    """Of one layer or head and one micro-batch."""

    forward: float
    inputs: float
    """Of the backward, the gradient of the input."""
    weights: float
    """And those of the weights."""

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.forward + other.forward,
            self.inputs + other.inputs,
            self.weights + other.weights,
        )


Work = dict[str, Seconds]
"""By kind: product, grouped (products of experts), attention, and copy, for which elementwise
kernels are taken."""


def together(*parts: Work) -> Work:
    """Sums by kind."""
    found: Work = {}
    for part in parts:
        for kind, seconds in part.items():
            found[kind] = found[kind] + seconds if kind in found else seconds
    return found


def total(work: Work) -> Seconds:
    """Of all kinds."""
    return sum(work.values(), Seconds(0.0, 0.0, 0.0))


def matmuls(run: Resolved, kind: str) -> list[ShardedMatmul]:
    """Matmuls of the forward of a layer, by `Resolved.kind`, on a rank."""
    own, eight = -(-run.tokens // run.between), bool(run.config.float8.recipe)
    groups = run.model.n_experts // run.experts["ep"] if kind != "dense" else 1
    found = []
    for each in layer_matmuls(run.model, kind):
        if each.module == "experts":
            shape = (expert_rows(run), *each.sharded(run.experts["etp"]))
            found.append(ShardedMatmul("experts", *shape, groups))
        else:
            tokens = own if each.split == "none" else run.tokens
            float8 = eight and each.module != "router"
            found.append(ShardedMatmul(each.module, tokens, *each.sharded(run.tp), 1, float8))
    return found


def attention_flops(run: Resolved, layer: int) -> float:
    """Of a layer's forward, of the half that a causal mask leaves, on a rank."""
    model, length = run.model, run.config.train.seq_len
    window = run.window(layer)
    seen = min(length, 2 * window) if window else length
    widths = model.n_heads * (model.head_size + value_width(run)) // run.tp
    return float(widths) * run.tokens * seen


def value_width(run: Resolved) -> int:
    """Of a head, as attention's kernel gets them: context parallelism pads values to the width of
    keys."""
    return run.model.head_size if run.degrees["cp"] > 1 else run.model.v_head_size


@functools.lru_cache(maxsize=4096)
def _product(hardware: Hardware, p: ShardedMatmul) -> Seconds:
    shape = (p.groups, p.float8)
    return Seconds(
        hardware.product(p.m, p.k, p.n, *shape),
        hardware.product(p.m, p.n, p.k, *shape),
        # The weight's gradient is deep where rows are many; of experts each has its own rows.
        hardware.product(p.n, p.m, p.k, 1, p.float8)
        if p.groups == 1
        else hardware.product(p.m, p.n, p.k, *shape),
    )


def cast_seconds(run: Resolved, listed: list[ShardedMatmul], hardware: Hardware) -> Seconds:
    """Casts of float8 products, each of its own input, weight and gradient: bytes over the rate of
    a copy, in the forward those of inputs and half of the weights'."""
    eight = [p for p in listed if p.float8]
    weight = TURN_WEIGHT if run.config.float8.all_gather else CAST_WEIGHT
    forward = sum(CAST * p.m * p.k + weight * p.k * p.n / 2 for p in eight)
    backward = sum(CAST * p.m * p.n + weight * p.k * p.n / 2 for p in eight)
    return Seconds(forward / hardware.copy, backward / hardware.copy, 0.0)


def layer(run: Resolved, index: int, hardware: Hardware) -> Work:
    """A layer's computation alone."""
    listed = matmuls(run, run.kind(index))
    mode, casts = run.config.recompute.mode, cast_seconds(run, listed, hardware)
    flops, widths = attention_flops(run, index), (run.model.head_size, value_width(run))
    forward = hardware.attend(flops, False, *widths)
    attention = Seconds(forward, hardware.attend(2 * flops, True, *widths), 0.0)
    kept = sum(activations.kept(run, index, whole=True).values())
    compiled = run.config.compile.enable
    passes, ahead = (PASSES, FORWARD) if compiled else (EAGER_PASSES, EAGER_FORWARD)
    moved = passes * kept / hardware.copy
    elementwise = Seconds(moved * ahead, moved * (1 - ahead), 0.0)
    parts = [_kinds(listed, hardware), {"attention": attention, "copy": casts + elementwise}]
    if run.recomputes(index):
        again = moved * (AGAIN[mode] if compiled else ahead)
        if mode != "selective":
            again += casts.forward
            repeats = _kinds(repeated(run, index), hardware)
            parts.append({kind: Seconds(0.0, each.forward, 0.0) for kind, each in repeats.items()})
        parts.append({"copy": Seconds(0.0, again, 0.0)})
        if mode == "full":
            parts.append({"attention": Seconds(0.0, forward, 0.0)})
    return together(*parts)


def _kinds(listed: list[ShardedMatmul], hardware: Hardware) -> Work:
    return together(
        *({"grouped" if p.groups > 1 else "product": _product(hardware, p)} for p in listed)
    )


def repeated(run: Resolved, index: int) -> list[ShardedMatmul]:
    """Products that the backward of a layer computes again, where a mode keeps none: all but those
    whose results nobody reads.

    The last one of a feed-forward, or of a shared expert, is added to the layer's output and needed
    by no gradient; what experts give is, by those of their weights. A compiled block that holds its
    recomputation leaves it out, and autograd, which stops at the last tensor that it lacks, where
    it is the layer's last product. A block that is compiled inside of its recomputation is called
    as it is.
    """
    kind, options = run.kind(index), run.config
    listed = matmuls(run, kind)
    whole = options.recompute.mode == "full" if options.compile.enable else kind != "dense"
    name = "ffn" if kind == "dense" else "shared"
    places = [place for place, p in enumerate(listed) if p.module == name]
    if whole or not places:
        return listed
    return listed[: places[-1]] + listed[places[-1] + 1 :]


def offload_wait(run: Resolved, index: int, hardware: Hardware) -> float:
    """Seconds that a layer and micro-batch wait for copies to the host and back: what it keeps over
    the host link, less the forward and the backward of a layer, beside which they run."""
    if not run.config.recompute.offload:
        return 0.0
    copied = sum(activations.kept(run, index).values()) / hardware.host_link
    own = total(layer(run, index, hardware))
    return max(0.0, copied - own.forward) + max(0.0, copied - own.inputs - own.weights)


def head(run: Resolved, hardware: Hardware) -> Work:
    """Norm, head and loss, of each prediction."""
    vocabulary = -(-run.model.vocab_size // run.tp)
    once = _product(hardware, ShardedMatmul("head", run.tokens, run.model.dim, vocabulary))
    moved = 5.0 * run.element * run.tokens * vocabulary / hardware.copy
    each: Work = {"product": once, "copy": Seconds(moved / 2, moved / 2, 0.0)}
    return together(*[each] * (1 + run.model.mtp))
