"""Rows to experts on other ranks by DeepEP, a library that is not part of dtron.

DeepEP sends tokens: each has some experts, crosses once to every rank that holds one of them, and
gets back the sum of what these ranks give. A dispatcher is handed rows that are sorted by expert,
one for each choice of a token. Here a row is a token of DeepEP's with one expert and weight 1:

    rows (M, D), expert of each (M, 1) --dispatch--> rows (N, D), own expert of each (N, 1)
                                                       | sorted by expert, computed, sorted back
    results (M, D), zero without one  <--combine---  results (N, D)

so that sums have one term and nothing is rounded. What it costs: a token whose k experts are on
fewer than k ranks crosses k times, as by `AllToAll`.

Of dispatch the gradient is combine, and of combine dispatch, both along the ways that the handle of
the forward's dispatch remembers. Dispatch has the host wait for how many rows come. What a model
computes between `begin` and `finish` runs beside the forward's rows, and nothing beside the others.

Shapes: M rows, D width, E experts, P = ep ranks, N rows that came.
Source: DeepEP's `Buffer` as documented in the legacy interface of 2.x (docs/legacy.md;
deep_ep/buffers/legacy.py at commit 189df34), whose names 1.2.1 exports too. Followed, never run
against it.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError
from dtron.kernels.permute import inverse_of, reordered
from dtron.parallelisms.expert.peer_memory import check_host

KEY = 'parallel.dispatcher = "deepep"'
_INSTEAD = 'use parallel.dispatcher = "all_to_all"'
_NAMES = ("Buffer", "topk_idx_t")
_BYTES, _MOST = 32, 16_352
"""Rows are copied in two halves, multiples of 16 bytes, each within a warp's 8 KiB less 8 bytes."""
_RANKS = 8
"""At most: those of one host."""


def check_settings(ep: int, etp: int, deterministic: bool, float8: bool = False) -> None:
    """Refuse what the settings alone rule out.

    Raises:
        ConfigError: ep > 8, etp > 1, float8, or deterministic algorithms, under which torch fills
            new tensors.
    """
    if float8:
        raise ConfigError(
            f"float8.dispatch with {KEY}: rows are handed to DeepEP in bfloat16 alone; use "
            'float8.dispatch = false, or parallel.dispatcher = "symmetric_memory" (inside a host) '
            'or "all_to_all"'
        )
    if ep > _RANKS:
        raise ConfigError(
            f"{KEY} with parallel.ep = {ep}: only DeepEP's way inside a host is followed; use "
            f"parallel.ep = 2, 4 or {_RANKS}, or {_INSTEAD}"
        )
    if etp > 1:
        raise ConfigError(
            f"{KEY} with parallel.etp = {etp}: DeepEP sends a row to one rank, not to all that "
            f"share an expert; use parallel.etp = 1, or {_INSTEAD}"
        )
    if deterministic:
        raise ConfigError(
            f"{KEY} with debug.deterministic = true: torch then fills each new tensor, which "
            f"DeepEP refuses beside its communication; {_INSTEAD}"
        )


def check_rows(dtype: torch.dtype, dim: int) -> None:
    """Refuse rows that DeepEP does not send, of a dtype and so many elements.

    Raises:
        ConfigError: not bfloat16, no multiple of 32 bytes, or more than 16,352.
    """
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"{KEY} sends rows in bfloat16, not in {str(dtype).removeprefix('torch.')}; use "
            f'train.dtype = "bfloat16", or {_INSTEAD}'
        )
    if dim * dtype.itemsize % _BYTES or dim * dtype.itemsize > _MOST:
        raise ConfigError(
            f"{KEY} sends rows of a multiple of {_BYTES // dtype.itemsize} elements, up to "
            f"{_MOST // dtype.itemsize}, which model.dim = {dim} is not; {_INSTEAD}"
        )


def library(ep: int, on_gpus: bool) -> Any:
    """The package deep_ep, for ep ranks of this machine.

    Raises:
        ConfigError: no GPUs, it is absent or another version, or it has no setting for ep ranks.
    """
    if not on_gpus:
        raise ConfigError(f"{KEY} needs GPUs; {_INSTEAD} on CPUs")
    try:
        found = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(
            f"{KEY} needs the package deep_ep, which cannot be imported ({error}); build it from "
            "github.com/deepseek-ai/DeepEP, or use parallel.dispatcher = "
            '"symmetric_memory" (inside a host) or "all_to_all"'
        ) from error
    if lacking := [name for name in _NAMES if not hasattr(found, name)]:
        raise ConfigError(
            f"{KEY} needs deep_ep.{lacking[0]}, which the installed version lacks; install DeepEP "
            f"1.2.1 or a 2.x that has it, or {_INSTEAD}"
        )
    try:
        _configs(found.Buffer, ep)
    except AssertionError as error:
        raise ConfigError(
            f"{KEY} with parallel.ep = {ep}: the installed DeepEP has no setting for so many ranks "
            f"({error}); use parallel.ep = 2, 4 or 8, or another dispatcher"
        ) from error
    return found


def _configs(buffer: Any, ranks: int) -> list[Any]:
    return [buffer.get_dispatch_config(ranks), buffer.get_combine_config(ranks)]


@dataclass
class _Crossing:
    """Of a layer's rows: by what they went, and the ways, along which all else goes too.

    Where a forward is computed again, gradients go along the ways of the first, in whose order the
    rows have to come again. DeepEP promises no order; its kernel inside a host sends in one."""

    buffer: Any
    handle: Any = None
    event: Any = None
    """After which the rows have come."""


@dataclass
class _Travelling:
    """Rows on their way to experts of this rank."""

    rows: Tensor
    """(N, D), in DeepEP's order; not to be read before the crossing's event is waited for."""
    experts: Tensor
    """Integers (N, 1), of E / ep; not to be read before either."""
    n_experts: int
    """E / ep."""
    crossing: _Crossing


class DeepEP:
    """Dispatch and combine of the library's `Buffer`; see above.

    Args:
        group: of ep ranks, at most 8, of one host.
        capacity: not needed, buffers are as large as what comes.
        float8: refused.
    Raises:
        ConfigError: as `check_settings` and `library`, or the ranks are on several hosts.
    """

    in_graphs = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        ep: int,
        etp: int,
        capacity: float = math.inf,
        float8: bool = False,
    ) -> None:
        fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        check_settings(ep, etp, torch.are_deterministic_algorithms_enabled() and fills, float8)
        self.library = library(ep, torch.cuda.is_available())
        check_host(group, KEY, "experts", f"use a smaller parallel.ep, or {_INSTEAD}")
        self.group, self.ep = group, ep
        self._buffer: Any = None

    def layer(self, fqn: str, device: torch.device) -> str:
        """See Dispatcher."""
        return fqn

    def begin(self, rows: Tensor, offsets: Tensor, layer: str = "") -> _Travelling:
        """See Dispatcher; rows in bfloat16."""
        check_rows(rows.dtype, rows.shape[1])
        crossing = _Crossing(self._room(rows.shape[1] * rows.element_size()))
        row = torch.arange(len(rows), dtype=offsets.dtype, device=rows.device)
        expert = torch.searchsorted(offsets, row, right=True)
        chosen = torch.where(row < offsets[-1], expert, -1).to(self.library.topk_idx_t)
        arriving, experts = _Dispatched.apply(rows, chosen.unsqueeze(1), len(offsets), crossing)  # type: ignore[misc]
        return _Travelling(arriving, experts, len(offsets) // self.ep, crossing)

    def finish(self, pending: _Travelling, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See Dispatcher."""
        pending.crossing.event.current_stream_wait()
        experts, order = pending.experts.flatten().long().sort(stable=True)
        own = torch.arange(pending.n_experts, device=experts.device)
        ends = torch.searchsorted(experts, own, right=True, out_int32=True)
        inverse = inverse_of(order)
        results = compute(reordered(pending.rows, order, inverse), ends)
        return _Combined.apply(reordered(results, inverse, order), pending.crossing)  # type: ignore[return-value]

    def check(self, device: torch.device) -> None:
        """See Dispatcher; nothing is ever lost."""

    def _room(self, row: int) -> Any:
        """A buffer for rows of so many bytes, made by all ranks together with the first layer."""
        configs = _configs(self.library.Buffer, self.ep)
        size = max(config.get_nvl_buffer_size_hint(row, self.ep) for config in configs)
        if self._buffer is None or self._buffer.num_nvl_bytes < size:
            if self._buffer is not None:
                self._buffer.destroy()
            # Else its end would wait for all ranks, also that of one which has raised.
            self._buffer = self.library.Buffer(self.group, size, explicitly_destroy=True)
        return self._buffer


class _Dispatched(torch.autograd.Function):
    """Rows (M, D) with an expert each (M, 1), -1 for none, set off: (N, D), (N, 1)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, chosen: Tensor, n_experts: int, crossing: _Crossing) -> Any:
        ctx.crossing, buffer = crossing, crossing.buffer
        per_rank, per_host, per_expert, goes, _ = buffer.get_dispatch_layout(chosen, n_experts)
        arriving, experts, _, _, crossing.handle, crossing.event = buffer.dispatch(
            rows.contiguous(),
            topk_idx=chosen,
            topk_weights=torch.ones(chosen.shape, dtype=torch.float32, device=rows.device),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=goes,
            num_tokens_per_expert=per_expert,
            async_finish=True,
        )
        ctx.mark_non_differentiable(experts)
        return arriving, experts

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        crossing = ctx.crossing
        back, _, _ = crossing.buffer.combine(gradients[0].contiguous(), crossing.handle)
        return back, None, None, None


class _Combined(torch.autograd.Function):
    """Results (N, D) back to where their rows came from, (M, D)."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing = crossing
        return crossing.buffer.combine(results.contiguous(), crossing.handle)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        crossing = ctx.crossing
        there = crossing.buffer.dispatch(gradients[0].contiguous(), handle=crossing.handle)
        return there[0], None
