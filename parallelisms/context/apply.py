"""Applies context parallelism to a model: its attention modules get another forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from dtron.config import CpMethod, Parallel
from dtron.errors import ConfigError
from dtron.kernels.attention import KERNELS, Kernel
from dtron.parallelisms.context.attention import ContextAttention
from dtron.parallelisms.context.layout import ContextLayout, layout_of


@dataclass(frozen=True)
class Context:
    """Settings of context-parallel attention.

    Args:
        cores: pattern of the modules that are called as (q, k, v, mask, sink) and attend. A module
            with an attribute `scoring` = (window, softcap, scale) attends by that.
        methods: of each of them, in the model's order; one stands for all.
        inner: of the hierarchical method; 0: the largest proper divisor of cp.
        kernel: a row of KERNELS.
        window: most keys that a query attends to; 0: all.
        softcap: c for scores of c tanh(s / c); 0: off.
        scale: of the scores; 0: 1 / sqrt(K).
        windows: further ones that modules have by `scoring`, for which rings need tables of
            documents.
    """

    cores: str
    methods: tuple[CpMethod, ...] = ("ring",)
    inner: int = 0
    kernel: str = "math"
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    windows: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, parallel: Parallel, cores: str, kernel: str, window: int = 0, softcap: float = 0.0
    ) -> "Context | None":
        """From the [parallel] section; None where cp is 1."""
        if parallel.cp == 1:
            return None
        return cls(cores, parallel.cp_methods(), parallel.cp_inner, kernel, window, softcap)

    def layouts(self, cp: int) -> dict[CpMethod, ContextLayout]:
        """Layout of the cp axis by method, of those that are used."""
        windows = tuple(dict.fromkeys(w for w in (self.window, *self.windows) if w))
        return {
            method: replace(layout_of(method, cp, self.inner), windows=windows)
            for method in self.methods
        }


def apply_context(
    cores: Sequence[tuple[int, nn.Module]],
    context: Context,
    cp: int,
    groups: Callable[[int], tuple[dist.ProcessGroup, dist.ProcessGroup]],
    device_type: str,
) -> None:
    """Replace the forward of (index in the model, module), in place.

    Args:
        groups: inner -> process groups between and inside the blocks.
    """
    _check_device(context.kernel, device_type)
    layouts, own = context.layouts(cp), _Scoring(context.window, context.softcap, context.scale)
    for shape in layouts.values():  # on all ranks, whatever modules their stages have
        _check_kernel(KERNELS[context.kernel], shape, own)
    between = {method: groups(shape.inner) for method, shape in layouts.items()}
    # One for all layers that attend alike: compile takes another object for another graph.
    shared: dict[tuple[CpMethod, _Scoring], ContextAttention] = {}
    for i, core in cores:
        method = context.methods[i if len(context.methods) > 1 else 0]
        given: tuple[int, float, float] = getattr(core, "scoring", own)
        scoring = _Scoring(*given)
        if (method, scoring) not in shared:
            shape = layouts[method]
            _check_kernel(KERNELS[context.kernel], shape, scoring)
            shared[method, scoring] = ContextAttention(
                method, shape, *between[method], context.kernel, *scoring
            )
        core.forward = shared[method, scoring]  # type: ignore[method-assign]


class _Scoring(NamedTuple):
    window: int
    softcap: float
    scale: float


def _check_device(name: str, device_type: str) -> None:
    if name not in KERNELS:
        raise ConfigError(f"kernel {name!r} is not known; use {', '.join(KERNELS)}")
    if device_type != "cuda" and name != "math":
        raise ConfigError(f'kernel {name!r} needs GPUs; on a {device_type} use "math"')


def _check_kernel(kernel: Kernel, shape: ContextLayout, scoring: _Scoring) -> None:
    window, softcap, _ = scoring
    aligned = kernel.aligned_at_end
    rules = [
        (window and not kernel.window, "a window"),
        (softcap and not kernel.softcap, "a soft cap"),
        (shape.gathers and not aligned, "all_gather"),
        (shape.rings and window and not aligned, "a window in a ring"),
    ]
    for broken, what in rules:
        if broken:
            raise ConfigError(f"context parallelism cannot do {what} with the {kernel.name} kernel")
