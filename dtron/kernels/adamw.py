"""AdamW in one pass over memory, with moments that may be narrower than parameters.

For each element, with gradient g = scale * gradient, step t (1 at the first update) and lr a:

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    p = p (1 - a decay) - a (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

computed in float32 and rounded to nearest when m and v are stored. If `scale` is not finite,
nothing changes. In bfloat16, v changes only by relative steps above 1/512 to 1/256, so b2 should be
0.99 at most.

Bytes per element: 28 with float32 moments, 20 with bfloat16. GPUs run a Triton kernel, other
devices the same formula in torch.

Sources: AdamW, arXiv:1711.05101; bfloat16 moments, DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1024
"""Elements per program; on an H200 faster than 2048 and 4096 (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class Rates:
    """Scalars of an update that are known on the host."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Counts:
    """Update counts of several parameters as one tensor, incremented by one addition."""

    def __init__(self) -> None:
        self._members: list[Tensor] = []
        self._all = torch.empty(0)

    def together(self, members: list[Tensor]) -> Tensor:
        """Make n scalar tensors, `members`, views of one tensor (n,), and return that tensor.

        If the members are those of the previous call, the same tensor is returned again.
        """
        known = self._members
        if len(known) != len(members) or any(map(operator.is_not, known, members)):
            self._all, self._members = torch.stack(members), list(members)
            for member, own in zip(members, self._all.unbind(), strict=True):
                member.set_(own)  # type: ignore[call-overload]
        return self._all


def adamw_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    steps: Tensor,
    scale: Tensor,
    rates: Rates,
) -> None:
    """Update parameters, moments and steps in place.

    Args:
        parameters: float32, contiguous, of any shape.
        gradients: of the same shapes.
        firsts: first moments m, of any floating dtype.
        seconds: second moments v, of any floating dtype.
        steps: float32 (n,), number of updates of each parameter so far.
        scale: factor of all gradients, a float32 scalar on the device.
    """
    if not parameters:
        return
    # Elements are matched by their position in memory.
    assert all(x.is_contiguous() for x in (*parameters, *gradients, *firsts, *seconds))
    steps += scale.isfinite()
    tables = _corrections(steps, scale, rates)
    update = _triton if parameters[0].is_cuda else _reference
    columns = (parameters, gradients, firsts, seconds, tables.unbind())
    for p, g, m, v, scalars in zip(*columns, strict=True):
        update(p, g, m, v, scalars, rates)


def _corrections(steps: Tensor, scale: Tensor, rates: Rates) -> Tensor:
    """Return scale, lr / (1 - b1^t) and 1 / sqrt(1 - b2^t) of every tensor, float32 (n, 3).

    Powers are float64, since 1 - b^t loses digits.
    """
    t = steps.double()
    first, second = (1 - beta**t for beta in (rates.beta1, rates.beta2))
    return torch.stack([scale.expand_as(t), rates.lr / first, second.rsqrt()], dim=1).float()


def _reference(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scalars: Tensor, rates: Rates) -> None:
    scale, rate, root = scalars.unbind()
    g = g.float() * scale
    first = rates.beta1 * m.float() + (1 - rates.beta1) * g
    second = rates.beta2 * v.float() + (1 - rates.beta2) * g * g
    after = p * (1 - rates.lr * rates.weight_decay)
    after = after - rate * first / (second.sqrt() * root + rates.eps)
    for tensor, value in ((p, after), (m, first), (v, second)):
        tensor.copy_(torch.where(scale.isfinite(), value, tensor))


def _triton(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scalars: Tensor, rates: Rates) -> None:
    from dtron.kernels.adamw_triton import adamw_kernel  # Triton is needed on GPUs only

    n = p.numel()
    adamw_kernel[(-(-n // BLOCK),)](
        p,
        g,
        m,
        v,
        scalars,
        n,
        rates.beta1,
        1 - rates.beta1,
        rates.beta2,
        1 - rates.beta2,
        rates.eps,
        1 - rates.lr * rates.weight_decay,
        BLOCK=BLOCK,  # pyright: ignore[reportArgumentType]
    )
