"""Activation offload: keep the tensors that a block saves for its backward in host memory.

    forward    block 0 | block 1    | block 2    | head
    to host            | saved by 0 | saved by 1 |
    backward                                     | head | block 2    | block 1    | block 0
    to device                                           | saved by 1 | saved by 0 |

Copies run on two streams, one per direction, and overlap computation. A block's saved tensors are
copied to the host during the next block's forward, freed on the device at its end, and copied back
during the next block's backward. So the device holds the saved tensors of at most two blocks. A
block whose backward follows its forward directly is not offloaded. Each call of a block has
separate storages and buffers, so that micro-batches in flight do not mix. The backward of a stage's
first block prefetches the last block's tensors for the next micro-batch of the stage.

`saved_tensors_hooks` around the block's forward get the tensors that autograd saves: with full
recomputation the block's inputs, in a compiled block the tensors that its graph saves. Eager
selective recomputation keeps its tensors in a separate cache, which is passed to `Offload.watch`.

A storage is copied once per call, however many views of it are saved. Small storages stay on the
device, and so do storages that other objects keep alive: parameters (also gathered ones) and
buffers of the block, and inputs that are leaves of the graph (rotary tables, masks). On a CPU, the
copies go to other CPU memory, synchronously.

Memory is reused only when its copies are done (`host_memory.py`).

Undocumented, tested with torch 2.11, 2.13 and 2.15: the cache of selective recomputation is
`storage` of the context that torch.utils.checkpoint makes; its entries have `val` and `get_val`.

Source: Ren et al., ZeRO-Offload, arXiv:2101.06840; Rajbhandari et al., ZeRO-Infinity,
arXiv:2104.07857; torch.autograd.graph.saved_tensors_hooks.
"""

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from dtron.kernels.torch_internals import version
from dtron.parallelisms.functional_collectives import is_pending
from dtron.parallelisms.host_memory import Buffer, Copies, CopyStream, HostPool
from dtron.parallelisms.placement import leaves

SMALLEST = 2**20
"""Minimum bytes of an offloaded storage: copies of smaller ones cost more time than they save."""
_SETTING = (
    "recompute.offload = true",
    'use recompute.mode = "attention" or "full", or a smaller train.micro_batch',
)


class _Storage:
    """A saved storage, on the device, on the host, or both; owned by the autograd graph."""

    def __init__(self, call: "_BlockCall", tensor: Tensor) -> None:
        self.call = call
        self.memory: Tensor | None = _as_bytes(tensor)
        """uint8 (bytes,) on the device; None if it is only on the host."""
        self.buffer: Buffer | None = None
        """The storage's copy on the host; None before the copy is issued."""
        self._tensor: Tensor | None = tensor.detach()  # shares the version counter
        self._saved_at = version(tensor)

    def check(self) -> None:
        """Raise RuntimeError if the tensor was modified in place after it was saved."""
        if self._tensor is not None and version(self._tensor) != self._saved_at:
            raise RuntimeError(
                f"a tensor {tuple(self._tensor.shape)} that a block saved for its backward was "
                "modified in place afterwards; use an out-of-place operator"
            )

    def free(self) -> None:
        """Free the device memory."""
        self.check()
        assert self.buffer is not None, "storages are copied to the host before they are freed"
        self.memory = self._tensor = None


@dataclass(eq=False)
class _BlockCall:
    """One call of a block, with the storages that it saves for its backward."""

    stage: int
    number: int
    """Index of the block in its stage."""
    others: set[int]
    """Addresses of storages that are not offloaded, since other objects keep them alive."""
    units: Sequence[nn.Module]
    """FSDP units inside the block; each gathers its parameters only during its own forward."""
    previous: "_BlockCall | None" = None
    """The call of the previous block in the same forward."""
    caches: list[Mapping[Any, Any]] = field(default_factory=list)
    """Caches of selective recomputation."""
    storages: "weakref.WeakValueDictionary[int, _Storage]" = field(
        default_factory=weakref.WeakValueDictionary
    )
    """Storages that the graph still references, by their address in the forward."""
    copies: Copies | None = None
    """The latest issued copies."""
    is_used: bool = False
    """Whether the backward of this call has begun."""

    def wait(self) -> None:
        """Make the compute stream wait for the copies."""
        if self.copies is not None:
            self.copies.wait()


class Offload:
    """Offloads tensors that blocks save for backward; one object for all stages of a rank.

        offload = Offload(torch.device("cuda"))
        offload.attach(0, model.blocks)          # after recompute and compile, before FSDP

    Args:
        device: device of the blocks.
        smallest: storages of fewer bytes are not offloaded.

    Attributes:
        pool: pool of host memory.
        copied: number of bytes copied to the host so far.
    """

    def __init__(self, device: torch.device, smallest: int = SMALLEST) -> None:
        self.device, self.smallest = device, smallest
        self.pool = HostPool(device.type == "cuda", _SETTING)
        self.copied = 0
        self._to_host, self._to_device = (
            CopyStream(device, to_host=True),
            CopyStream(device, to_host=False),
        )
        self._current: _BlockCall | None = None
        self._last: _BlockCall | None = None
        """The latest block call, unless its backward has begun."""
        self._ends: dict[int, deque[_BlockCall]] = defaultdict(deque)
        """By stage: the last block call of every forward that has had no backward yet, in order."""

    def attach(self, stage: int, blocks: Iterable[nn.Module]) -> None:
        """Offload the saved tensors of blocks; replaces only their `forward`, in place.

        Args:
            blocks: blocks in the order of their forward.
        """
        for number, block in enumerate(blocks):
            block.forward = functools.partial(self._call, block, block.forward, stage, number)

    def watch(self, caching: Any) -> None:
        """Also offload the cache of the block that runs now; a callback of `recompute`.

        Args:
            caching: context of selective recomputation, which caches the saved results.
        """
        if self._current is not None:  # None if gradients are off
            self._current.caches.append(caching.storage)

    # -- forward ----------------------------------------------------------------------------

    def _call(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        stage: int,
        number: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = self._last
        if before is not None:
            self._store(before)
        units = [m for m in block.modules() if isinstance(m, FSDPModule) and m is not block]
        others = _owned_elsewhere(block, args, kwargs)
        call = self._current = _BlockCall(stage, number, others, units)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                out = forward(*args, **kwargs)
            for entry in (entry for cache in call.caches for entry in _entries(cache)):
                self._pack_entry(entry)
        finally:
            self._current = None
        call.caches.clear()
        if before is not None:
            self._free(before)
        if call.storages:
            self._add(call)
        return out

    def _add(self, call: _BlockCall) -> None:
        """Record a call as the last block call of its forward, so far."""
        ends, last = self._ends[call.stage], self._last
        if last is not None and last.stage == call.stage and last.number < call.number:
            call.previous = last
        while ends and not ends[0].storages:  # its graph was dropped
            ends.popleft()
        if ends and ends[-1] is call.previous:
            ends.pop()
        ends.append(call)
        self._last = call

    def _pack(self, tensor: Any) -> Any:
        """Pack hook: return a function that loads the tensor, or the tensor if not offloaded."""
        if is_pending(tensor):
            return self._pack(tensor.trigger_wait())
        if _wraps(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: self._pack(getattr(tensor, name)) for name in names}
            if not any(isinstance(part, functools.partial) for part in parts.values()):
                return tensor
            layout = context, tensor.size(), tensor.stride()
            return functools.partial(self._rewrap, type(tensor), parts, *layout)
        call = self._current
        assert call is not None, "hooks are set while a block is called"
        if not isinstance(tensor, Tensor) or self._stays(tensor, call):
            return tensor
        address = tensor.untyped_storage().data_ptr()
        storage = call.storages.get(address)
        if storage is None:
            storage = call.storages[address] = _Storage(call, tensor)
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        return functools.partial(self._view, storage, tensor.dtype, *layout)

    def _pack_entry(self, entry: Any) -> None:
        """Offload an entry of selective recomputation's cache; each entry is read only once."""
        packed = self._pack(entry.val)
        if packed is not entry.val:
            entry.val, entry.get_val = None, lambda _may_be_modified: self._unpack(packed)

    def _stays(self, tensor: Tensor, call: _BlockCall) -> bool:
        plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.device.type != self.device.type:
            return True
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.smallest or storage.data_ptr() in call.others:
            return True
        gathered = (parameter for unit in call.units for parameter in unit.parameters())
        return storage.data_ptr() in addresses(gathered)

    def _store(self, call: _BlockCall) -> None:
        """Issue copies of storages that are not on the host yet."""
        pairs = {
            storage: (self.pool.take(memory.numel()), memory)
            for storage in call.storages.values()
            if storage.buffer is None and (memory := storage.memory) is not None
        }
        if not pairs:
            return
        call.copies = Copies(self._to_host, list(pairs.values()))
        for storage, (buffer, memory) in pairs.items():
            storage.buffer = buffer
            weakref.finalize(storage, self.pool.give, buffer)
            self.copied += memory.numel()

    def _free(self, call: _BlockCall) -> None:
        """Free the device memory of storages that are on the host."""
        call.wait()
        for storage in list(call.storages.values()):
            storage.free()

    # -- backward ---------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Any:
        """Unpack hook: return the saved tensor."""
        return packed() if isinstance(packed, functools.partial) else packed

    def _rewrap(self, kind: Any, parts: Mapping[str, Any], *layout: Any) -> Tensor:
        """Rebuild a wrapper tensor, such as a DTensor from its local tensor."""
        unpacked = {name: self._unpack(part) for name, part in parts.items()}
        return kind.__tensor_unflatten__(unpacked, *layout)

    def _view(self, storage: _Storage, dtype: torch.dtype, *layout: Any) -> Tensor:
        """Return a view of a saved storage."""
        if not storage.call.is_used:
            self._use(storage.call)
        memory = storage.memory
        assert memory is not None, "_use has loaded the storage"
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), *layout)  # type: ignore[call-overload]

    def _use(self, call: _BlockCall) -> None:
        """Load the storages of a call, and prefetch the storages that the next backward needs."""
        for storage in list(call.storages.values()):
            storage.check()
        self._load(call)
        call.wait()
        call.is_used = True
        if self._last is call:
            self._last = None
        ends = self._ends[call.stage]
        if call in ends:
            ends.remove(call)
        following = call.previous or next(iter(ends), None)
        call.previous = None
        if following is not None:
            self._load(following)

    def _load(self, call: _BlockCall) -> None:
        """Issue copies of storages that are not on the device."""
        pairs = {
            storage: (buffer, torch.empty_like(buffer.data, device=self.device))
            for storage in call.storages.values()
            if storage.memory is None and (buffer := storage.buffer) is not None
        }
        if not pairs:
            return
        call.copies = Copies(self._to_device, list(pairs.values()))
        for storage, (_, memory) in pairs.items():
            storage.memory = memory


def _entries(cache: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the cached entries. Each operator has a list in torch 2.11, a dict in torch 2.13."""
    for values in cache.values():
        numbered = values.values() if isinstance(values, Mapping) else values
        yield from (leaf for leaf in leaves(list(numbered)) if hasattr(leaf, "val"))


def _owned_elsewhere(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return addresses of storages that other objects than the graph keep alive.

    These storages belong to the block's parameters and buffers, and to inputs that are leaves of
    the graph, such as the input of a pipeline stage.
    """
    inputs = (x for x in leaves((args, kwargs)) if isinstance(x, Tensor) and _views_leaf(x))
    return addresses([*block.parameters(), *block.buffers(), *inputs])


def _views_leaf(x: Tensor) -> bool:
    """Whether x is a leaf or a view of a leaf.

    FSDP replaces inputs by views, once per FSDP unit whose forward starts with this block.
    """
    node, output = x.grad_fn, x.output_nr
    for _ in range(_MAX_UNITS):
        if node is None:
            return True
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            return addresses([leaf]) == addresses([x])
        if output >= len(node.next_functions):
            return False
        node, output = node.next_functions[output]
    return False


_MAX_UNITS = 4
"""Maximum number of FSDP units whose forward starts with the same block."""


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the storage addresses of tensors."""
    return {plain.untyped_storage().data_ptr() for x in tensors for plain in _plain_parts(x)}


def _plain_parts(x: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of x: itself, or a wrapper's inner tensors."""
    if _wraps(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(x, name))
    elif isinstance(x, Tensor):
        yield x


def _wraps(x: Any) -> bool:
    """Whether x is a wrapper subclass, such as a DTensor."""
    return hasattr(type(x), "__tensor_flatten__")


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's whole storage as uint8 (bytes,)."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]
