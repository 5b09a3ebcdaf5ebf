"""Auto filter: time each shape to find the linear layers that are faster in float8.

Small matmuls take less time than the casts around them. A layer's time is that of its forward and
backward under torch.compile, as in blocks, for N tokens, K input and O output features. It excludes
what layers share: reductions of scales, all-gathers of weights, the fused function of gate, up
and down.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from dtron.float8.linear import Float8Linear
from dtron.float8.recipes import Recipe
from dtron.float8.scales import ScaleGroups

Shape = tuple[int, int, int]
"""(N tokens, K input features, O output features) on a rank."""
_WARM_UP, _RUNS, _MARGIN = 3, 20, 0.97


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer's forward and backward, in both dtypes."""

    plain: float
    """Seconds in the dtype of computation."""
    float8: float

    @property
    def gains(self) -> bool:
        """Whether float8 is faster by more than the scatter of timings."""
        return self.float8 < _MARGIN * self.plain


def measure(
    shapes: Iterable[Shape], recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> dict[Shape, LayerTimes]:
    """Time each distinct shape on one GPU.

    The random state is kept, cached memory is freed, and compiled graphs and peak-memory statistics
    are reset.
    """
    found = {}
    with torch.random.fork_rng([device]):
        for shape in sorted(set(shapes)):
            with device:
                plain = nn.Linear(shape[1], shape[2], bias=False, dtype=dtype)
            cast = Float8Linear.of(plain, recipe, False, ScaleGroups())
            found[shape] = LayerTimes(_seconds(plain, shape[0]), _seconds(cast, shape[0]))
            torch.compiler.reset()  # each shape is a separate graph; dynamo keeps few graphs
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return found


def table(measured: Mapping[Shape, LayerTimes]) -> str:
    """Format the times for the log, one line per shape."""
    rows = [f"{'tokens x in x out':>24}  {'plain ms':>9}  {'float8 ms':>9}  kept in"]
    for (tokens, inward, outward), times in measured.items():
        name = f"{tokens} x {inward} x {outward}"
        kept = "float8" if times.gains else "train.dtype"
        rows.append(f"{name:>24}  {times.plain * 1e3:9.3f}  {times.float8 * 1e3:9.3f}  {kept}")
    return "\n".join(rows)


def _seconds(layer: nn.Linear, tokens: int) -> float:
    """Return the median seconds of a forward and backward, between events of the stream."""
    weight = layer.weight
    x = torch.randn(
        tokens, layer.in_features, dtype=weight.dtype, device=weight.device, requires_grad=True
    )
    grad = torch.randn(tokens, layer.out_features, dtype=weight.dtype, device=weight.device)
    run = torch.compile(layer, dynamic=False)
    times = []
    for _ in range(_WARM_UP + _RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.autograd.grad(run(x), (x, weight), grad)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[_WARM_UP:])
