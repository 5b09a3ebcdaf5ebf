"""A stand-in for the package deep_ep on CPU ranks: what its `Buffer` documents, and no more.

Arguments are asserted to be what is documented or what the library asserts itself. Whatever is
asked for with `async_finish` holds garbage until its event is waited for. Tokens come in the order
of their senders, or shuffled, as the documentation promises none.
"""

import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NONE, NOT_YET = -1, -7
RANKS = (2, 4, 8, 16)


class Config:
    """Of a number of ranks."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 64 * hidden_bytes * num_ranks


class EventOverlap:
    """What is not there before it is waited for."""

    def __init__(self, late: list[tuple[Tensor, Tensor]] | None) -> None:
        self.late = late

    def current_stream_wait(self) -> None:
        assert self.late is not None, "an event is valid with async_finish only"
        for tensor, values in self.late:
            tensor.data.copy_(values)  # unseen by autograd, as what a kernel writes


class Buffer:
    """One for all calls; `shuffled`, `made` and `destroyed` are the tests'."""

    shuffled = False
    made = destroyed = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        explicitly_destroy: bool = False,
    ) -> None:
        dist.barrier(group)
        assert not num_rdma_bytes
        assert explicitly_destroy, "its end would wait for all ranks"
        self.group, self.num_nvl_bytes = group, num_nvl_bytes
        Buffer.made += 1

    def destroy(self) -> None:
        dist.barrier(self.group)
        Buffer.destroyed += 1

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Buffer.get_dispatch_config(num_ranks)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> Any:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert (topk_idx >= NONE).all()
        assert (topk_idx < num_experts).all()
        ranks = self.group.size()
        assert num_experts % ranks == 0
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // ranks), NONE)
        in_rank = (owner.unsqueeze(2) == torch.arange(ranks)).any(1)
        per_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap(None)

    def dispatch(
        self,
        x: Tensor,
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        async_finish: bool = False,
    ) -> Any:
        self._check(x)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            in_rank, _, order = handle
            assert len(in_rank) == len(x)
            back = self._sent([x[in_rank[:, rank]] for rank in range(self.group.size())])
            out, event = self._finished([torch.cat(back)[order]], async_finish)
            return out[0], None, None, None, None, event
        assert num_tokens_per_rdma_rank is None
        in_rank, counts = is_token_in_rank, num_tokens_per_rank
        assert in_rank is not None
        assert in_rank.shape == (len(x), self.group.size())
        assert counts is not None
        assert counts.equal(in_rank.sum(0).int())
        idx, weights, per_expert = topk_idx, topk_weights, num_tokens_per_expert
        assert idx is not None
        assert weights is not None
        assert weights.shape == idx.shape
        assert len(idx) == len(x)
        assert weights.dtype == torch.float32
        assert per_expert is not None
        each = len(per_expert) // self.group.size()
        parts = [x[in_rank[:, rank]] for rank in range(self.group.size())]
        sent = [
            torch.where(idx // each == rank, idx - rank * each, NONE)[in_rank[:, rank]]
            for rank in range(self.group.size())
        ]
        rows, own = self._sent(parts), self._sent(sent)
        weighed = self._sent([weights[in_rank[:, rank]] for rank in range(self.group.size())])
        order = torch.arange(sum(map(len, rows)))
        if self.shuffled:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(len(order)))
        found = [torch.cat(part)[order] for part in (rows, own, weighed)]
        list_ = torch.cat(own).flatten()
        list_ = list_[list_ >= 0].bincount(minlength=each).tolist()
        out, event = self._finished(found, async_finish)
        return *out, list_, (in_rank, [len(part) for part in rows], order), event

    def combine(
        self,
        x: Tensor,
        handle: tuple,
        topk_weights: Tensor | None = None,
        async_finish: bool = False,
    ) -> Any:
        self._check(x)
        assert topk_weights is None
        in_rank, counts, order = handle
        assert len(x) == sum(counts)
        by_sender = torch.empty_like(x)
        by_sender[order] = x
        parts = self._sent(list(by_sender.split(counts)))
        total = torch.zeros(len(in_rank), x.shape[1])
        for rank, part in enumerate(parts):
            total[in_rank[:, rank]] += part.float()
        out, event = self._finished([total.to(x.dtype)], async_finish)
        return out[0], None, event

    def _check(self, x: Tensor) -> None:
        assert x.dim() == 2
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert not x.requires_grad or not torch.is_grad_enabled()
        assert x.shape[1] * x.element_size() % 32 == 0
        assert x.shape[1] * x.element_size() // 2 + 8 <= 8192
        assert self.num_nvl_bytes >= 64 * x.shape[1] * x.element_size() * self.group.size()

    def _sent(self, parts: list[Tensor]) -> list[Tensor]:
        """An all-to-all: to each rank its part, from each the one for this."""
        sent = torch.tensor([len(part) for part in parts])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        width, dtype = parts[0].shape[1], parts[0].dtype
        out = torch.empty(int(received.sum()), width, dtype=dtype)
        sizes = [counts.tolist() for counts in (received, sent)]
        as_bytes = [tensor.view(torch.uint8) for tensor in (out, torch.cat(parts))]
        dist.all_to_all_single(*as_bytes, *sizes, group=self.group)
        return list(out.split(sizes[0]))

    def _finished(self, found: list[Tensor], later: bool) -> tuple[list[Tensor], EventOverlap]:
        if not later:
            return found, EventOverlap(None)
        late = [(torch.full_like(tensor, NOT_YET), tensor) for tensor in found]
        return [tensor for tensor, _ in late], EventOverlap(late)


def installed(*without: str) -> None:
    """Have `import deep_ep` find this in the process, without some of its names."""
    module: Any = types.ModuleType("deep_ep")
    names = {"Buffer": Buffer, "Config": Config, "EventOverlap": EventOverlap}
    names["topk_idx_t"] = torch.int64  # type: ignore[assignment]
    for name, value in names.items():
        if name not in without:
            setattr(module, name, value)
    sys.modules["deep_ep"] = module
