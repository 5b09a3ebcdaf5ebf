"""Compute on whole matrices that are sharded: each rank on some of them.

Newton-Schulz (Muon) needs whole matrices. An all-to-all turns shards of k equal matrices, sharded
alike over n ranks, into k / n whole matrices per rank; a second one returns shards of the results:

    rank 0   A0 B0 C0 D0             A0 A1 = A,  B0 B1 = B
    rank 1   A1 B1 C1 D1    <---->   C0 C1 = C,  D0 D1 = D

No rank computes what another rank computes, and a rank sends (n - 1) / n of its shards' bytes each
way; all-gathers of whole matrices would send n times as much. Of matrices that are sharded over
several mesh dims, one dim is exchanged after the other. FSDP has sharded what tp and etp had left,
so its dim is first; a mesh lists it before theirs. Ranks that hold copies (dp_replicate) take k / n
matrices each without communication, and all-gather the results.

Stacked experts (E, A, B) are E matrices each; a mesh dim that shards E needs no communication.

Shapes: k matrices (k, a, b) as this rank holds them; A, B are their sizes in whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtron.parallelisms.functional_collectives import all_gather, all_to_all, wait_tensor


@dataclass(frozen=True)
class Exchange:
    """How the ranks of one mesh dim hold k matrices, and how they share them out among them."""

    group: str
    """Name of the process group of the ranks."""
    ranks: int
    rank: int
    dim: int | None
    """The dim that the ranks shard, -2 or -1; None: they hold copies."""
    size: int
    """The size of `dim` over all ranks."""

    def collect(self, x: Tensor) -> Tensor:
        """Return this rank's matrices: (k, a, b) -> about (k / n, A, b), or (k / n, a, B)."""
        counts = _chunks(len(x), self.ranks)
        own = counts[self.rank]
        if self.dim is None:
            return x.split(counts)[self.rank]
        x = _padded(x, self.dim, -(-self.size // self.ranks))
        received = wait_tensor(all_to_all(x, [own] * self.ranks, counts, self.group))
        shards = received.view(self.ranks, own, *x.shape[1:]).unbind()
        return torch.cat(shards, self.dim).narrow(self.dim, 0, self.size)

    def distribute(self, x: Tensor, k: int) -> Tensor:
        """Reverse `collect`: return this rank's shards, or copies, of all k matrices."""
        counts = _chunks(k, self.ranks)
        own = counts[self.rank]
        if self.dim is None:
            x = _padded(x, 0, counts[0])
            return wait_tensor(all_gather(x, self.ranks, self.group))[:k]
        each = -(-self.size // self.ranks)
        shards = _padded(x, self.dim, each * self.ranks).split(each, self.dim)
        sent = [own] * self.ranks
        received = wait_tensor(all_to_all(torch.cat(shards), counts, sent, self.group))
        return received.narrow(self.dim, 0, _chunks(self.size, self.ranks)[self.rank])


def exchanges(parameter: Tensor) -> list[Exchange]:
    """Return the exchanges after which a rank has whole matrices, in order.

    Args:
        parameter: (A, B) or (E, A, B), sharded evenly or as by torch.chunk.
    """
    if not isinstance(parameter, DTensor):
        return []
    mesh, sizes = parameter.device_mesh, list(parameter.shape)
    found = []
    for axis in reversed(range(mesh.ndim)):  # the innermost mesh dim was sharded first
        ranks, rank = mesh.size(axis), mesh.get_local_rank(axis)
        dim = getattr(parameter.placements[axis], "dim", None)
        group = mesh.get_group(axis).group_name
        if ranks == 1:
            continue
        if dim is None:
            found.append(Exchange(group, ranks, rank, None, 0))
            continue
        if (last := dim - parameter.dim()) >= -2:
            found.append(Exchange(group, ranks, rank, last, sizes[dim]))
        sizes[dim] = _chunks(sizes[dim], ranks)[rank]
    return found[::-1]


def on_owners(x: Tensor, route: Sequence[Exchange], compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of whole matrices, each on one rank of those that hold it.

    All ranks of the exchanges' groups call it together, with equal k.

    Args:
        x: (k, a, b), this rank's shards of k matrices.
        compute: (m, A, B) -> (m, A, B); it is not called with m = 0.
    Returns:
        (k, a, b), this rank's shards of the results.
    """
    if not len(x):
        return x
    if not route:
        return compute(x)
    first, *rest = route
    return first.distribute(on_owners(first.collect(x), rest, compute), len(x))


def _chunks(size: int, ranks: int) -> list[int]:
    """Return the sizes of torch.chunk, with zeros up to `ranks` chunks."""
    each = -(-size // ranks)
    return [min(each, max(0, size - each * rank)) for rank in range(ranks)]


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Append zeros to a dim, up to `size`; contiguous."""
    if x.shape[dim] == size:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)
