"""What head and loss allocate: the largest tensor and the peak, forward and backward, in bytes.

    python -m benchmarks.loss_memory --tokens 8192 --vocabulary 128256 --width 4096 --chunks 1 4 16

Every operator runs on fake tensors, which have sizes and no data: any size takes a second. Inputs
are not counted; what a kernel allocates for itself is not seen. Eager: compiled, less is held.
"""

import argparse
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtron.training.loss import ChunkedLoss, sequence_losses

GIB = 2**30


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators make, until they are freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.seen = weakref.WeakSet(x.untyped_storage() for x in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self.seen:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        self.seen.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, storage.nbytes())
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self.live -= size


def measure(tokens: int, vocabulary: int, width: int, chunks: int) -> Allocations:
    """One forward and backward in bfloat16; 1 chunk is the loss over all logits."""
    with FakeTensorMode():
        hidden = torch.empty(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(1, tokens, dtype=torch.int64)
        with Allocations([hidden, weight, labels]) as seen:
            if chunks == 1:
                loss = sequence_losses(F.linear(hidden, weight), labels).sum()
            else:
                loss, _ = ChunkedLoss(chunks)(hidden, weight, labels)
            loss.backward()
    return seen


def main() -> None:
    """Print a row for each number of chunks."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 8192), ("vocabulary", 128256), ("width", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    print("chunks  largest GiB  peak GiB")
    for chunks in options.chunks:
        seen = measure(options.tokens, options.vocabulary, options.width, chunks)
        print(f"{chunks:6}  {seen.largest / GIB:11.2f}  {seen.peak / GIB:8.2f}")


if __name__ == "__main__":
    main()
