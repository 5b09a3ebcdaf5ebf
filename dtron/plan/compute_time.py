"""Computation of a rank per micro-batch: matmuls, attention and elementwise work of each layer."""

import functools
from dataclasses import dataclass

from dtron.models.matmuls import layer_matmuls
from dtron.plan import activations
from dtron.plan.hardware import Hardware
from dtron.plan.run_shape import Resolved, expert_rows

PASSES = 8
"""How often a block's saved bytes are read or written by elementwise kernels, forward and backward;
fitted to a single block of Llama-3-8B (benchmarks/RESULTS.md). Without torch.compile: 18."""
EAGER_PASSES = 18
FORWARD, EAGER_FORWARD = 0.4, 1 / 3
"""Fraction of these bytes that the forward moves. It and the fractions of recomputation are counted
in inductor's fused graphs of dense blocks with the proportions of Llama-3-8B and Qwen3-8B."""
AGAIN = {"selective": 0.2, "attention": 0.23, "full": FORWARD}
"""Fraction that recomputation adds in a compiled backward, by mode: recomputed values are fused
with the kernels that read them. Mode `full` calls the forward's graph once more."""
CAST, CAST_WEIGHT, TURN_WEIGHT = 6, 8, 2
"""Bytes per element of casts to float8. An input or gradient is read for its largest magnitude and
again to be cast, and is written both as it is and transposed; a weight likewise, and again in the
backward; a weight gathered in float8 is only transposed."""


@dataclass(frozen=True)
class ShardedMatmul:
    """A rank's matmul (m, k) x (k, n), or `groups` of them with m tokens in total; the backward is
    two matmuls of this size."""

    module: str
    m: int
    k: int
    n: int
    groups: int = 1
    float8: bool = False


@dataclass(frozen=True)
class Seconds:
    """Seconds of one layer or head per micro-batch."""

    forward: float
    inputs: float
    """The backward's part for the gradient of the input."""
    weights: float
    """The backward's part for the gradients of the weights."""

    @property
    def sum(self) -> float:
        """Forward and backward."""
        return self.forward + self.inputs + self.weights

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.forward + other.forward,
            self.inputs + other.inputs,
            self.weights + other.weights,
        )


Work = dict[str, Seconds]
"""Seconds by kind: matmul, grouped_matmul (experts), attention, and copy, which stands for
elementwise kernels."""


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


def matmuls(run: Resolved, kind: str) -> list[ShardedMatmul]:
    """List a rank's matmuls in the forward of a layer, by `Resolved.kind`."""
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
    """A rank's attention FLOPs in a layer's forward, counting the half that a causal mask
    leaves."""
    model, length = run.model, run.config.train.seq_len
    window = run.window(layer)
    seen = min(length, 2 * window) if window else length
    widths = model.n_heads * (model.head_size + value_width(run)) // run.tp
    return float(widths) * run.tokens * seen


def value_width(run: Resolved) -> int:
    """Width of a head's values as attention's kernel gets them: context parallelism pads values to
    the width of keys."""
    return run.model.head_size if run.degrees["cp"] > 1 else run.model.v_head_size


@functools.lru_cache(maxsize=4096)
def _product(hardware: Hardware, p: ShardedMatmul) -> Seconds:
    shape = (p.groups, p.float8)
    return Seconds(
        hardware.product(p.m, p.k, p.n, *shape),
        hardware.product(p.m, p.n, p.k, *shape),
        # The weight's gradient sums over tokens; for experts, over each expert's own tokens.
        hardware.product(p.n, p.m, p.k, 1, p.float8)
        if p.groups == 1
        else hardware.product(p.m, p.n, p.k, *shape),
    )


def cast_seconds(run: Resolved, listed: list[ShardedMatmul], hardware: Hardware) -> Seconds:
    """Seconds of float8 casts; each matmul casts its own input, weight and gradient. Time is bytes
    over the rate of a copy; inputs and half of the weights' bytes count for the forward."""
    eight = [p for p in listed if p.float8]
    weight = TURN_WEIGHT if run.config.float8.all_gather else CAST_WEIGHT
    forward = sum(CAST * p.m * p.k + weight * p.k * p.n / 2 for p in eight)
    backward = sum(CAST * p.m * p.n + weight * p.k * p.n / 2 for p in eight)
    return Seconds(forward / hardware.copy, backward / hardware.copy, 0.0)


def layer(run: Resolved, index: int, hardware: Hardware) -> Work:
    """Computation of a layer, without communication."""
    listed = matmuls(run, run.kind(index))
    mode, casts = run.config.recompute.mode, cast_seconds(run, listed, hardware)
    flops, widths = attention_flops(run, index), (run.model.head_size, value_width(run))
    forward = hardware.attend(flops, False, *widths)
    attention = Seconds(forward, hardware.attend(2 * flops, True, *widths), 0.0)
    compiled = run.config.compile.enable
    passes, ahead = (PASSES, FORWARD) if compiled else (EAGER_PASSES, EAGER_FORWARD)
    moved = passes * activations.written(run, index) / hardware.copy
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
        *({"grouped_matmul" if p.groups > 1 else "matmul": _product(hardware, p)} for p in listed)
    )


def repeated(run: Resolved, index: int) -> list[ShardedMatmul]:
    """Matmuls that a layer's backward recomputes in a mode that keeps none: all whose results are
    read.

    The last matmul of a feed-forward or shared expert is only added to the layer's output, and no
    gradient reads its result; the gradients of combine weights read experts' results. A compiled
    block that contains its recomputation omits that matmul. Eager recomputation, which stops at the
    last tensor that autograd lacks, omits it if it is the layer's last. A block compiled inside its
    recomputation runs whole.
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
    """Seconds that a layer waits per micro-batch for copies to the host and back: kept bytes over
    the rate of the host link, minus the forward and backward of a layer, which overlap the
    copies."""
    if not run.config.recompute.offload:
        return 0.0
    copied = sum(activations.kept(run, index).values()) / hardware.host_link
    own = total(layer(run, index, hardware))
    return max(0.0, copied - own.forward) + max(0.0, copied - own.inputs - own.weights)


def head(run: Resolved, hardware: Hardware) -> Work:
    """Computation of norm, head and loss, for each prediction."""
    vocabulary = -(-run.model.vocab_size // run.tp)
    once = _product(hardware, ShardedMatmul("head", run.tokens, run.model.dim, vocabulary))
    moved = 5.0 * run.element * run.tokens * vocabulary / hardware.copy
    each: Work = {"matmul": once, "copy": Seconds(moved / 2, moved / 2, 0.0)}
    return together(*[each] * (1 + run.model.mtp))
