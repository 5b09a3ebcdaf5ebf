"""Detect silent corruption: parameter replicas that differ, and steps that are not reproducible.

Several ranks may hold replicas of the same shard of a parameter: all shards over dp_replicate,
norms over tp, a tied embedding on two pipeline stages. Each shard's bits are hashed on the device:

    h = sum over elements i of bits_i * (2 i + 1)   modulo 2^64

One changed element always changes h: the factors are odd, and an odd number times the difference of
two words is zero modulo 2^64 only if the words are equal. An all-gather of 8 bytes per parameter
compares all replicas. The names of each rank's shards are gathered once, at the start.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtron.parallelisms.apply import Applied
from dtron.parallelisms.gradients import local_part

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_hash(tensor: Tensor) -> Tensor:
    """Hash the bits of a plain tensor: an int64 scalar on its device."""
    words = tensor.detach().contiguous().view(_WORDS[tensor.element_size()]).flatten()
    weights = torch.arange(len(words), device=tensor.device, dtype=torch.int64) * 2 + 1
    return (words.to(torch.int64) * weights).sum()


Compute = Callable[[Callable[[], Tensor]], Tensor]
"""Function that calls its argument and returns the result. The argument computes a step's gradients
and returns this rank's partial loss."""


@dataclass(frozen=True)
class Difference:
    """A shard of a parameter whose replicas differ."""

    fqn: str
    ranks: tuple[int, ...]
    """Ranks whose bits differ from those of the majority; all ranks if there is no majority."""
    others: tuple[int, ...]
    """Ranks of the majority; empty if there is no majority."""

    def __str__(self) -> str:
        if not self.others:
            return f"{self.fqn} differs among ranks {_names(self.ranks)}"
        return f"{self.fqn} of rank {_names(self.ranks)} differs from ranks {_names(self.others)}"


class Replicas:
    """Compares replicas of parameters on all ranks.

    Args:
        host: process group of all ranks for CPU tensors, used only in the constructor.

    Attributes:
        n_replicated: number of distinct shards that several ranks hold.
    """

    def __init__(self, applied: Applied, host: dist.ProcessGroup) -> None:
        self.parameters = [parameter for _, parameter in applied.named_parameters()]
        own = [_identity(name, p) for name, p in applied.named_parameters()]
        self.identities: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(self.identities, own, group=host)
        self._max_length = max(map(len, self.identities))
        copies = Counter(each for rank in self.identities for each in rank)
        self.n_replicated = sum(1 for n in copies.values() if n > 1)

    def differences(self) -> list[Difference]:
        """Compare all replicas; return the shards whose replicas differ, equal on all ranks.

        A collective; waits for the device.
        """
        hashes = [bit_hash(local_part(p)) for p in self.parameters]
        padding = self._max_length - len(hashes)
        own = torch.stack([*hashes, *[torch.zeros_like(hashes[0])] * padding])
        ranks = [torch.empty_like(own) for _ in self.identities]
        dist.all_gather(ranks, own)
        seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for rank, (own_identities, values) in enumerate(zip(self.identities, ranks, strict=True)):
            for identity, value in zip(own_identities, values.tolist(), strict=False):
                seen[identity].append((rank, value))
        return [d for identity, copies in seen.items() if (d := _compare(identity, copies))]


def _identity(name: str, parameter: nn.Parameter) -> str:
    """Return a name for a parameter's local shard, equal on all ranks that hold this shard."""
    if not isinstance(parameter, DTensor):
        return name
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh of its parameters"
    axes = zip(mesh.mesh_dim_names or (), coordinate, mesh.shape, parameter.placements, strict=True)
    parts = [f"{a}={c}" for a, c, n, p in axes if n > 1 and not p.is_replicate()]
    return " ".join([name, *parts])


def _compare(identity: str, copies: Sequence[tuple[int, int]]) -> Difference | None:
    (most, n), *rest = Counter(value for _, value in copies).most_common()
    if not rest:
        return None
    fqn = identity.split(" ")[0]
    if rest[0][1] == n:  # no majority
        return Difference(fqn, tuple(rank for rank, _ in copies), ())
    wrong = tuple(rank for rank, value in copies if value != most)
    return Difference(fqn, wrong, tuple(rank for rank, value in copies if value == most))


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def compute_twice(
    applied: Applied, accumulate: Callable[[], Tensor], host: dist.ProcessGroup
) -> tuple[Tensor, str]:
    """Run forward and backward twice from the same state; compare loss and gradients bit for bit.

    Args:
        accumulate: computes all gradients and returns this rank's partial loss.
        host: process group of all ranks for CPU tensors.
    Returns:
        (partial loss of the second run, error text). The text names the first difference of each
        rank, the loss or a gradient's FQN; it is equal on all ranks, and empty if nothing differs.
        Gradients of the second run are kept.
    """
    buffers = [buffer for part in applied.parts.values() for buffer in part.buffers()]
    before = [buffer.clone() for buffer in buffers]
    rng = torch.get_rng_state()
    device_rng = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    hashes: list[dict[str, int]] = []
    partial_loss = torch.zeros(())
    for attempt in range(2):
        if attempt:
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
            for _, parameter in applied.named_parameters():
                parameter.grad = None
            torch.set_rng_state(rng)
            if device_rng is not None:
                torch.cuda.set_rng_state(device_rng)
        partial_loss = accumulate()
        hashes.append(_state(applied, partial_loss))
    first, second = hashes
    own = next((name for name, value in first.items() if second[name] != value), "")
    ranks: list[str] = [""] * dist.get_world_size(host)
    dist.all_gather_object(ranks, own, group=host)
    wrong = [f"{name} of rank {rank}" for rank, name in enumerate(ranks) if name]
    return partial_loss, ", ".join(wrong)


def _state(applied: Applied, partial_loss: Tensor) -> dict[str, int]:
    """Hash the loss and every gradient, in the model's order."""
    gradients = {
        name: bit_hash(local_part(p.grad))
        for name, p in applied.named_parameters()
        if p.grad is not None
    }
    named = {"the loss": bit_hash(partial_loss.reshape(1)), **gradients}
    return dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True))
