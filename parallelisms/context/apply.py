"""Apply context parallelism to a model: replace the forward of its attention modules."""

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
        cores: pattern of the attention modules, which are called as (q, k, v, mask, sink). Their
            attributes `scoring` = (window, softcap, scale) and `context_kernel` override these
            fields, and `kernel`.
        methods: method of each module, in the model's order; or one method for all.
        inner: all-to-all ranks of the hierarchical method; 0: the largest proper divisor of cp.
        kernel: a name in KERNELS.
        window: maximum number of keys that a query attends to; 0: all.
        softcap: c in scores c tanh(s / c); 0: off.
        scale: scale of the scores; 0: 1 / sqrt(K).
        windows: windows of modules with an own `scoring`; rings with documents need tables for each
            window.
        recurrent: pattern of recurrent modules (`recurrent.py`); empty: none.
        causal: whether a query sees only keys up to its own.
    """

    cores: str
    methods: tuple[CpMethod, ...] = ("ring",)
    inner: int = 0
    kernel: str = "math"
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    windows: tuple[int, ...] = ()
    recurrent: str = ""
    causal: bool = True

    @classmethod
    def of(
        cls,
        parallel: Parallel,
        cores: str,
        kernel: str,
        window: int = 0,
        softcap: float = 0.0,
        recurrent: str = "",
        causal: bool = True,
    ) -> "Context | None":
        """Return the settings that the [parallel] section defines; None if cp = 1."""
        if parallel.cp == 1:
            return None
        methods, inner = parallel.cp_methods(), parallel.cp_inner
        more = {"recurrent": recurrent, "causal": causal}
        return cls(cores, methods, inner, kernel, window, softcap, **more)

    def layouts(self, cp: int) -> dict[CpMethod, ContextLayout]:
        """Return {method: its layout of the cp axis} for all methods in use."""
        windows = tuple(dict.fromkeys(w for w in (self.window, *self.windows) if w))
        return {
            method: replace(layout_of(method, cp, self.inner), windows=windows, causal=self.causal)
            for method in self.methods
        }


def apply_context(
    cores: Sequence[tuple[int, nn.Module]],
    context: Context,
    cp: int,
    groups: Callable[[int], tuple[dist.ProcessGroup, dist.ProcessGroup]],
    device_type: str,
) -> None:
    """Replace the forward of attention modules, in place.

    Args:
        cores: (index in the model, module).
        groups: number of ranks in a block -> (process group between blocks, group in a block).
    """
    _check_device(context.kernel, device_type)
    layouts, default = context.layouts(cp), _Scoring(context.window, context.softcap, context.scale)
    for shape in layouts.values():  # on all ranks, also if their stages have no attention
        _check_kernel(KERNELS[context.kernel], shape, default)
    process_groups = {method: groups(shape.inner) for method, shape in layouts.items()}
    # Layers with equal settings share one object, since torch.compile makes a graph per object.
    shared: dict[tuple[CpMethod, _Scoring, str], ContextAttention] = {}
    for i, core in cores:
        method = context.methods[i if len(context.methods) > 1 else 0]
        settings: tuple[int, float, float] = getattr(core, "scoring", default)
        scoring = _Scoring(*settings)
        kernel = getattr(core, "context_kernel", "") or context.kernel
        key = method, scoring, kernel
        if key not in shared:
            shape = layouts[method]
            _check_device(kernel, device_type)
            _check_kernel(KERNELS[kernel], shape, scoring)
            groups_of = process_groups[method]
            shared[key] = ContextAttention(method, shape, *groups_of, kernel, *scoring)
        core.forward = shared[key]  # type: ignore[method-assign]


class _Scoring(NamedTuple):
    """Window, soft cap and scale of an attention module; see Context."""

    window: int
    softcap: float
    scale: float


def _check_device(name: str, device_type: str) -> None:
    if name not in KERNELS:
        raise ConfigError(f"kernel {name!r} is unknown; use {', '.join(KERNELS)}")
    if device_type != "cuda" and name != "math":
        raise ConfigError(f'kernel {name!r} needs GPUs; on a {device_type} use "math"')


def _check_kernel(kernel: Kernel, shape: ContextLayout, scoring: _Scoring) -> None:
    window, softcap, _ = scoring
    if window and not shape.causal:
        raise ConfigError(
            f"window = {window} with causal = False: windows need a causal mask with cp > 1; use "
            "window = 0"
        )
    aligned = kernel.aligned_at_end
    rules = [
        (window and not kernel.window, "a window"),
        (softcap and not kernel.softcap, "a soft cap"),
        (shape.gathers and not aligned, "all_gather"),
        (shape.rings and window and not aligned, "a window in a ring"),
    ]
    for unsupported, what in rules:
        if unsupported:
            raise ConfigError(
                f"kernel {kernel.name!r} does not support {what} with cp > 1; use another kernel"
            )
