"""Dispatcher that uses DeepEP, an optional library.

A dispatcher gets rows sorted by expert, one row per token and expert. DeepEP sends a token to all
its experts and sums their results. Here DeepEP gets each row as a token with one expert and weight
1, so that it sums and rounds nothing. A rank may get a token several times, as with `AllToAll`:

    rows (M, D), expert of each (M, 1) --dispatch--> rows (N, D), local expert of each (N, 1)
                                                       | sorted by expert, computed, sorted back
    results (M, D), 0 if no expert    <--combine---  results (N, D)

In dispatch the host waits for N. Dispatch overlaps with computation in the forward only.
Recomputation needs the same order of received rows, which DeepEP keeps but does not guarantee.

Shapes: M rows, D width, N received rows.
Source: `Buffer` in the legacy interface of DeepEP 2.x (docs/legacy.md, deep_ep/buffers/legacy.py at
commit 189df34); 1.2.1 exports the same names. Tested with a fake of the library only.
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
# Elements of a row: DeepEP copies each half of a row in units of 16 bytes, below 8 KiB.
_UNIT, _MOST = 16, 8176


def check_settings(ep: int, etp: int, deterministic: bool, float8: bool = False) -> None:
    """Raise ConfigError for settings that DeepEP does not support."""
    if float8:
        why = "DeepEP gets rows in bfloat16 only; use float8.dispatch = false, or"
        raise ConfigError(f"float8.dispatch with {KEY}: {why} {_OTHERS}")
    one_rank = "DeepEP sends a row to one rank, not to all ranks that share an expert"
    filled = "torch then fills uninitialized memory, which DeepEP does not allow"
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
        rule = f"DeepEP needs a multiple of {_UNIT} up to {_MOST}"
        raise ConfigError(f"{KEY} with model.dim = {dim}: {rule}; {_INSTEAD}")


def library(ep: int, on_gpus: bool) -> tuple[Any, torch.dtype, list[Any]]:
    """Return (Buffer, dtype of expert indices, [dispatch config, combine config]) of DeepEP.

    Raises:
        ConfigError: no GPUs, DeepEP cannot be imported, or it has no config for `ep` ranks.
    """
    if not on_gpus:
        raise ConfigError(f"{KEY} needs GPUs; {_INSTEAD} on CPUs")
    try:
        from deep_ep import Buffer, topk_idx_t  # type: ignore[import-not-found]

        return Buffer, topk_idx_t, [Buffer.get_dispatch_config(ep), Buffer.get_combine_config(ep)]
    except ImportError as error:
        what = f"the package deep_ep, 1.2.1 or 2.x with Buffer and topk_idx_t ({error})"
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
    """Dispatcher with DeepEP's `Buffer`; `capacity` is ignored.

    Raises:
        ConfigError: DeepEP is missing or does not support the settings.
    """

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
        """Issue the dispatch of bfloat16 rows; the host waits for N. See `Dispatcher`."""
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
        arriving = _Transfer.apply(rows, lambda _: sent, combine)  # sent above, to get the handle
        return arriving, local, len(offsets) // self.ep, event, dispatch, combine

    def finish(self, pending: tuple, compute: Compute) -> Tensor:
        """Wait for the dispatch, compute, combine, and return the results; see `Dispatcher`."""
        rows, experts, n_experts, event, dispatch, combine = pending
        event.current_stream_wait()
        experts, order = experts.flatten().long().sort(stable=True)
        local = torch.arange(n_experts, device=experts.device)
        offsets = torch.searchsorted(experts, local, right=True, out_int32=True)
        inverse = inverse_of(order)
        results = reordered(compute(reordered(rows, order, inverse), offsets), inverse, order)
        return _Transfer.apply(results, combine, dispatch)  # type: ignore[return-value]

    def _grown(self, row_bytes: int) -> Any:
        """Return the buffer; if the buffer is too small for these rows, all ranks replace it."""
        size = max(config.get_nvl_buffer_size_hint(row_bytes, self.ep) for config in self._configs)
        if self._buffer is None or self._buffer.num_nvl_bytes < size:
            if self._buffer is not None:
                self._buffer.destroy()
            # An implicit destroy would wait for all ranks, also for a rank that raised an error.
            self._buffer = self._make(self.group, size, explicitly_destroy=True)
        return self._buffer
