"""Accuracy of the casts of each float8 layer, measured on demand in a training step.

    sqnr        10 log10(sum x^2 / sum (x - x8 / scale)^2), in dB: signal to quantisation noise
    underflow   fraction of the nonzero values that become zero
    overflow    fraction of the values beyond the largest float8 number, which saturate

are computed for the input, the weight (unless it is gathered in float8) and the output's gradient,
as cast for their first matmul. Layers check for a probe in Python only: a step without a probe
computes and compiles as if probes did not exist.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.float8.casting import Scaled, dequantize, quantize, wide
from dtron.float8.linear import Float8Linear
from dtron.float8.recipes import Cast

OPERANDS = ("input", "weight", "grad")
_SIGNAL, _NOISE, _VANISHED, _NONZERO, _SATURATED, _ALL = range(6)


class Statistics:
    """Sums over all casts of a step, by layer and operand.

    This module's figures are computed from them.

    Args:
        names: FQNs of all float8 layers of the model, in the same order on all ranks.
        layers: this rank's float8 layers, by FQN.
        device: device of the sums; the host waits for it only in `read`.
    """

    def __init__(
        self, names: tuple[str, ...], layers: Mapping[str, Float8Linear], device: torch.device
    ) -> None:
        self.names, self.layers = names, layers
        shape = (len(names), len(OPERANDS), 6)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Context that sets probes in all layers, for a step without compiled graphs."""
        for name, layer in self.layers.items():
            layer.probe = _Probe(self.sums[self.names.index(name)])
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for layer in self.layers.values():
                layer.probe = None

    def read(self) -> dict[str, float]:
        """Return the figures of all ranks together, by name; all ranks call this.

        sqnr may be infinite.

        Values replicated over tp count several times, in numerator and denominator alike.
        """
        dist.all_reduce(self.sums)
        figures: dict[str, float] = {}
        for name, operands in zip(self.names, self.sums.tolist(), strict=True):
            for operand, sums in zip(OPERANDS, operands, strict=True):
                if sums[_ALL]:
                    figures |= {
                        f"float8/{name}/{operand}_{key}": value
                        for key, value in _figures(sums).items()
                    }
        return figures


class _Probe:
    """Probe that adds to the sums of one layer, (3 operands, 6 sums)."""

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    @torch.no_grad()
    def __call__(
        self, operand: str, x: Tensor, cast: Cast, groups: tuple[str, ...], scale: Tensor | None
    ) -> None:
        self.sums[OPERANDS.index(operand)] += measure(x, cast, groups, scale)


def measure(
    x: Tensor, cast: Cast, groups: Sequence[str] = (), scale: Tensor | None = None
) -> Tensor:
    """Compute the sums of one cast of a matrix x (M, S): float64 (6,).

    The sums are signal, noise, and the numbers of values that underflow, of nonzero values, of
    values that saturate, and of all values.

    Args:
        groups: names of the process groups whose ranks share the scale.
        scale: the scale of the cast; default: computed from the values.
    """
    x = x.to(wide(x.dtype))
    done = quantize(x, cast, groups, scale)
    seen = dequantize(done, x.dtype)
    ones = torch.ones_like(x).to(cast.dtype)
    limit = dequantize(Scaled(ones, done.scale, cast), x.dtype) * torch.finfo(cast.dtype).max
    nonzero = x != 0
    counts = [
        x.double().square().sum(),
        (x - seen).double().square().sum(),
        (nonzero & (seen == 0)).sum().double(),
        nonzero.sum().double(),
        (x.abs() > limit * (1 + 2**-20)).sum().double(),  # tolerates the rounding of the scale
        torch.full((), float(x.numel()), dtype=torch.float64, device=x.device),
    ]
    return torch.stack(counts)


def _figures(sums: list[float]) -> dict[str, float]:
    ratio = sums[_SIGNAL] / sums[_NOISE] if sums[_NOISE] else float("inf")
    return {
        "sqnr": torch.tensor(ratio, dtype=torch.float64).log10().item() * 10,
        "underflow": sums[_VANISHED] / max(1.0, sums[_NONZERO]),
        "overflow": sums[_SATURATED] / sums[_ALL],
    }
