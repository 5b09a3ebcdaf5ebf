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

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError
from dtron.kernels.permute import inverse_of, reordered
from dtron.parallelisms.expert.peer_memory import check_host

KEY = 'parallel.dispatcher = "deepep"'
_INSTEAD = 'use parallel.dispatcher = "all_to_all"'
_OTHERS = 'use parallel.dispatcher = "symmetric_memory" (inside a host) or "all_to_all"'
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
        why = "rows are handed to DeepEP in bfloat16 alone; use float8.dispatch = false, or"
        raise ConfigError(f"float8.dispatch with {KEY}: {why} {_OTHERS}")
    reason = ""
    if ep > _RANKS:
        reason = f"parallel.ep = {ep}: only DeepEP's kernels inside a host are supported"
    elif etp > 1:
        reason = f"parallel.etp = {etp}: DeepEP sends a row to one rank, not to all that share an "
        reason += "expert"
    elif deterministic:
        reason = (
            "debug.deterministic = true: torch then fills each new tensor, which DeepEP refuses"
        )
    if reason:
        raise ConfigError(f"{KEY} with {reason}; {_INSTEAD}")


def check_rows(dtype: torch.dtype, dim: int) -> None:
    """Refuse rows that DeepEP does not send, of a dtype and so many elements.

    Raises:
        ConfigError: not bfloat16, no multiple of 32 bytes, or more than 16,352.
    """
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        fix = f'use train.dtype = "bfloat16", or {_INSTEAD}'
        raise ConfigError(f"{KEY} sends rows in bfloat16, not in {name}; {fix}")
    each, most = _BYTES // dtype.itemsize, _MOST // dtype.itemsize
    if dim % each or dim > most:
        sizes = f"a multiple of {each} elements, up to {most}, which model.dim = {dim} is not"
        raise ConfigError(f"{KEY} sends rows of {sizes}; {_INSTEAD}")


def library(ep: int, on_gpus: bool) -> tuple[Any, torch.dtype, list[Any]]:
    """DeepEP's `Buffer`, its dtype of experts, and its settings for ep ranks of this machine.

    Raises:
        ConfigError: no GPUs, the package is absent or another version, or it has no setting for ep
            ranks.
    """
    if not on_gpus:
        raise ConfigError(f"{KEY} needs GPUs; {_INSTEAD} on CPUs")
    try:
        from deep_ep import Buffer, topk_idx_t  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            f"{KEY} needs the package deep_ep, 1.2.1 or a 2.x with these names ({error}); "
            f"build it from github.com/deepseek-ai/DeepEP, or {_OTHERS}"
        ) from error
    try:
        return Buffer, topk_idx_t, [Buffer.get_dispatch_config(ep), Buffer.get_combine_config(ep)]
    except AssertionError as error:
        why = f"the installed DeepEP has no setting for so many ranks ({error})"
        raise ConfigError(f"{KEY} with parallel.ep = {ep}: {why}; use 2, 4 or 8") from error


class _Crossing:
    """Of a layer's rows: by what they go, and the ways, along which all else goes too.

    Where a forward is computed again, gradients go along the ways of the first, in whose order the
    rows have to come again. DeepEP promises no order; its kernel inside a host sends in one.

    Args:
        chosen: an expert for each row, (M, 1), or -1 for none.
        n_experts: E, of all ranks.
    """

    def __init__(self, buffer: Any, chosen: Tensor, n_experts: int) -> None:
        self.buffer, self.chosen, self.n_experts = buffer, chosen, n_experts
        self.handle: Any = None

    def dispatch(self, rows: Tensor) -> Tensor:
        """Rows (M, D) to their experts, (N, D); the first ones' come with an expert of this rank
        each, integers (N, 1), and neither may be read before `event` is waited for."""
        rows = rows.contiguous()
        if self.handle is not None:
            return self.buffer.dispatch(rows, handle=self.handle)[0]
        layout = self.buffer.get_dispatch_layout(self.chosen, self.n_experts)
        per_rank, per_host, per_expert, goes, _ = layout
        arriving, self.experts, _, _, self.handle, self.event = self.buffer.dispatch(
            rows,
            topk_idx=self.chosen,
            topk_weights=torch.ones(self.chosen.shape, dtype=torch.float32, device=rows.device),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=goes,
            num_tokens_per_expert=per_expert,
            async_finish=True,
        )
        return arriving

    def combine(self, rows: Tensor) -> Tensor:
        """Rows (N, D) back to where they came from, (M, D)."""
        return self.buffer.combine(rows.contiguous(), self.handle)[0]


class _Sent(torch.autograd.Function):
    """Rows by one way of a crossing, and their gradients by the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0]), None, None


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
        self._make, self._dtype, self._configs = library(ep, torch.cuda.is_available())
        check_host(group, KEY, "experts", f"use a smaller parallel.ep, or {_INSTEAD}")
        self.group, self.ep = group, ep
        self._buffer: Any = None

    def layer(self, fqn: str, device: torch.device) -> str:
        """See Dispatcher."""
        return fqn

    def begin(self, rows: Tensor, offsets: Tensor, layer: str = "") -> tuple[Tensor, _Crossing]:
        """See Dispatcher; rows in bfloat16."""
        check_rows(rows.dtype, rows.shape[1])
        row = torch.arange(len(rows), dtype=offsets.dtype, device=rows.device)
        expert = torch.searchsorted(offsets, row, right=True)
        chosen = torch.where(row < offsets[-1], expert, -1).to(self._dtype).unsqueeze(1)
        buffer = self._room(rows.shape[1] * rows.element_size())
        crossing = _Crossing(buffer, chosen, len(offsets))
        return _Sent.apply(rows, crossing.dispatch, crossing.combine), crossing  # type: ignore[return-value]

    def finish(
        self, pending: tuple[Tensor, _Crossing], compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """See Dispatcher."""
        rows, crossing = pending
        crossing.event.current_stream_wait()
        experts, order = crossing.experts.flatten().long().sort(stable=True)
        own = torch.arange(crossing.n_experts // self.ep, device=experts.device)
        ends = torch.searchsorted(experts, own, right=True, out_int32=True)
        inverse = inverse_of(order)
        results = reordered(compute(reordered(rows, order, inverse), ends), inverse, order)
        return _Sent.apply(results, crossing.combine, crossing.dispatch)  # type: ignore[return-value]

    def check(self, device: torch.device) -> None:
        """See Dispatcher; nothing is ever lost."""

    def _room(self, row: int) -> Any:
        """A buffer for rows of so many bytes, made by all ranks together with the first layer."""
        size = max(config.get_nvl_buffer_size_hint(row, self.ep) for config in self._configs)
        if self._buffer is None or self._buffer.num_nvl_bytes < size:
            if self._buffer is not None:
                self._buffer.destroy()
            # Else its end would wait for all ranks, also that of one which has raised.
            self._buffer = self._make(self.group, size, explicitly_destroy=True)
        return self._buffer
