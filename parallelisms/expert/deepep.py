"""Experts on other ranks by DeepEP, a library that is not part of dtron.

A dispatcher gets rows sorted by expert, one per expert of a token. DeepEP sends a token to all its
experts and sums their results; here each row is a token with one expert and weight 1, so that
nothing is summed or rounded, and a rank may get a token several times, as by `AllToAll`:

    rows (M, D), expert of each (M, 1) --dispatch--> rows (N, D), local expert of each (N, 1)
                                                       | sorted by expert, computed, sorted back
    results (M, D), zero without one  <--combine---  results (N, D)

In dispatch the host waits for N; only in the forward it overlaps with computation. Recomputation
needs the same order of received rows, which DeepEP does not guarantee, but keeps inside a host.

Shapes: M rows, D width, N received rows.
Source: `Buffer` in the legacy interface of DeepEP 2.x (docs/legacy.md, deep_ep/buffers/legacy.py at
commit 189df34); 1.2.1 exports the same names. Tested with a stand-in, never with the library.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError
from dtron.kernels.permute import inverse_of, reordered
from dtron.parallelisms.expert.dispatcher import Compute, Dispatcher
from dtron.parallelisms.expert.peer_memory import check_host

KEY = 'parallel.dispatcher = "deepep"'
_INSTEAD = 'use parallel.dispatcher = "all_to_all"'
_OTHERS = 'use parallel.dispatcher = "symmetric_memory" (inside a host) or "all_to_all"'
_UNIT, _MOST = 16, 8176  # elements: a row is copied in halves of 16-byte units, below 8 KiB each


def check_settings(ep: int, etp: int, deterministic: bool, float8: bool = False) -> None:
    """Raise ConfigError for settings that DeepEP does not support."""
    if float8:
        why = "rows are handed to DeepEP in bfloat16 alone; use float8.dispatch = false, or"
        raise ConfigError(f"float8.dispatch with {KEY}: {why} {_OTHERS}")
    one_rank = "DeepEP sends a row to one rank, not to all that share an expert"
    filled = "torch then fills each new tensor, which DeepEP refuses"
    unsupported = {
        f"parallel.ep = {ep}: only DeepEP's kernels inside a host are supported": ep > 8,
        f"parallel.etp = {etp}: {one_rank}": etp > 1,
        f"debug.deterministic = true: {filled}": deterministic,
    }
    for reason, applies in unsupported.items():
        if applies:
            raise ConfigError(f"{KEY} with {reason}; {_INSTEAD}")


def check_rows(dtype: torch.dtype, dim: int) -> None:
    """Raise ConfigError for rows of a dtype or width that DeepEP does not send."""
    if dtype != torch.bfloat16:
        name, fix = str(dtype).removeprefix("torch."), 'use train.dtype = "bfloat16", or'
        raise ConfigError(f"{KEY} sends rows in bfloat16, not in {name}; {fix} {_INSTEAD}")
    if dim % _UNIT or dim > _MOST:
        sizes = f"a multiple of {_UNIT} elements, up to {_MOST}, which model.dim = {dim} is not"
        raise ConfigError(f"{KEY} sends rows of {sizes}; {_INSTEAD}")


def library(ep: int, on_gpus: bool) -> tuple[Any, torch.dtype, list[Any]]:
    """Return `Buffer`, its dtype of experts and its configs for ep ranks. Raises ConfigError."""
    if not on_gpus:
        raise ConfigError(f"{KEY} needs GPUs; {_INSTEAD} on CPUs")
    try:
        from deep_ep import Buffer, topk_idx_t  # type: ignore[import-not-found]

        return Buffer, topk_idx_t, [Buffer.get_dispatch_config(ep), Buffer.get_combine_config(ep)]
    except ImportError as error:
        what = f"the package deep_ep, 1.2.1 or a 2.x with these names ({error})"
        fix = f"build it from github.com/deepseek-ai/DeepEP, or {_OTHERS}"
        raise ConfigError(f"{KEY} needs {what}; {fix}") from error
    except AssertionError as error:
        why = f"the installed DeepEP has no setting for so many ranks ({error})"
        raise ConfigError(f"{KEY} with parallel.ep = {ep}: {why}; use 2, 4 or 8") from error


class _Transfer(torch.autograd.Function):
    """Send rows with `send`, and their gradients with `send_back`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: Callable, send_back: Callable) -> Tensor:
        ctx.send_back = send_back
        return send(rows.contiguous())[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.send_back(gradients[0].contiguous())[0], None, None


class DeepEP(Dispatcher):
    """Dispatcher by DeepEP's `Buffer`, sized by the rows, not by `capacity`. Raises ConfigError."""

    def __init__(
        self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float, float8: bool = False
    ) -> None:
        fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        check_settings(ep, etp, torch.are_deterministic_algorithms_enabled() and fills, float8)
        self._make, self._dtype, self._configs = library(ep, torch.cuda.is_available())
        check_host(group, KEY, "experts", f"use a smaller parallel.ep, or {_INSTEAD}")
        self.group, self.ep = group, ep
        self._buffer: Any = None

    def begin(self, rows: Tensor, offsets: Tensor, layer: str = "") -> tuple[Any, ...]:
        """See Dispatcher; rows in bfloat16."""
        check_rows(rows.dtype, rows.shape[1])
        row = torch.arange(len(rows), dtype=offsets.dtype, device=rows.device)
        expert = torch.searchsorted(offsets, row, right=True)
        experts = torch.where(row < offsets[-1], expert, -1).to(self._dtype).unsqueeze(1)
        buffer = self._grown(rows.shape[1] * rows.element_size())
        layout = buffer.get_dispatch_layout(experts, len(offsets))
        sent = buffer.dispatch(
            rows.detach().contiguous(),
            topk_idx=experts,
            topk_weights=torch.ones_like(experts, dtype=torch.float32),
            num_tokens_per_rank=layout[0],
            num_tokens_per_rdma_rank=layout[1],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
            async_finish=True,
        )
        _, local, _, _, handle, event = sent
        dispatch, combine = (partial(f, handle=handle) for f in (buffer.dispatch, buffer.combine))
        arriving = _Transfer.apply(rows, lambda _: sent, combine)  # sent above, for its handle
        return arriving, local, len(offsets) // self.ep, event, dispatch, combine

    def finish(self, pending: tuple, compute: Compute) -> Tensor:
        """See Dispatcher."""
        rows, experts, n_experts, event, dispatch, combine = pending
        event.current_stream_wait()
        experts, order = experts.flatten().long().sort(stable=True)
        local = torch.arange(n_experts, device=experts.device)
        offsets = torch.searchsorted(experts, local, right=True, out_int32=True)
        inverse = inverse_of(order)
        results = reordered(compute(reordered(rows, order, inverse), offsets), inverse, order)
        return _Transfer.apply(results, combine, dispatch)  # type: ignore[return-value]

    def _grown(self, row_bytes: int) -> Any:
        """Return the buffer, which all ranks replace together if it is too small for a row."""
        size = max(config.get_nvl_buffer_size_hint(row_bytes, self.ep) for config in self._configs)
        if self._buffer is None or self._buffer.num_nvl_bytes < size:
            if self._buffer is not None:
                self._buffer.destroy()
            # An implicit destroy would wait for all ranks, also for one that has raised.
            self._buffer = self._make(self.group, size, explicitly_destroy=True)
        return self._buffer
