"""Models whose activations are offloaded, and copies that are made late, as a slow stream makes
them."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dtron.config import Compile, Recompute
from dtron.models import BACKENDS
from dtron.models.decoder import Decoder
from dtron.parallelisms.compile import compile_blocks
from dtron.parallelisms.host_memory import Buffer
from dtron.parallelisms.offload import Offload
from dtron.parallelisms.recompute import recompute
from tests.models.build import initialized, small_config, tokens

LAYERS, BATCH, TOKENS, DIM = 4, 2, 24, 64
MODES = ["none", "full", "attention", "selective"]
CPU = torch.device("cpu")
HIDDEN = BATCH * TOKENS * DIM * 4  # bytes of hidden states
Mode = Literal["none", "full", "attention", "selective"]


ORDERS = [
    "F0 B0 F1 B1",
    "F0 F1 F2 B0 B1 B2",
    "F0 F1 F2 B2 B1 B0",
    "F0 F1 B0 F2 B1 F3 B2 B3",
]
"""Forwards and backwards of micro-batches."""


class LateEvent:
    """The end of some copies; waiting for it makes them."""

    def __init__(self, lane: "LateLane", number: int) -> None:
        self.lane, self.number = lane, number

    def wait(self, _stream: None = None) -> None:
        self.lane.run(self.number)


class LateLane:
    """Copies that are made when they are waited for, from and to memory that must still be held,
    and not before those of the same buffer."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.issued: list[list[tuple[Tensor, StorageWeakRef]]] = []
        self.done = 0

    def copy(self, pairs: Sequence[tuple[Buffer, Tensor]]) -> LateEvent:
        self.log.append(self.name)
        for buffer, _ in pairs:
            if buffer.last is not None:
                buffer.last.wait()
        self.issued.append(
            [(buffer.data, StorageWeakRef(memory.untyped_storage())) for buffer, memory in pairs]
        )
        event = LateEvent(self, len(self.issued))
        for buffer, memory in pairs:
            to = buffer.data if self.name == "to host" else memory
            to.fill_(0xFF)  # not yet there: nan in every dtype
            buffer.last = event  # type: ignore[assignment]
        return event

    def run(self, number: int) -> None:
        for pairs in self.issued[self.done : number]:
            for data, held in pairs:
                storage = torch.UntypedStorage._new_with_weak_ptr(held.cdata)
                assert storage is not None, f"{self.name}: memory was freed before its copy"
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                to, source = (data, memory) if self.name == "to host" else (memory, data)
                to.copy_(source)
        self.done = max(self.done, number)


def late(offload: Offload) -> list[str]:
    """Make an offload's copies late; returns a log to which each issue is written."""
    log: list[str] = []
    offload._to_host = LateLane("to host", log)  # type: ignore[assignment]
    offload._to_device = LateLane("to device", log)  # type: ignore[assignment]
    return log


def model_of(
    mode: Mode = "none",
    offload: Offload | None = None,
    backend: str = "",
    attention: str = "sdpa",
    stage: int = 0,
    **override: Any,
) -> Decoder:
    """A model as apply.py makes its blocks."""
    if backend:
        torch._dynamo.reset()
    config = small_config("llama", **{"n_layers": LAYERS, **override})
    model = initialized("llama", config, BACKENDS[attention])
    blocks = dict(model.blocks.items())
    options = Compile.model_validate({"enable": bool(backend), "backend": backend or "inductor"})
    watch = offload.watch if offload is not None and not backend else None
    if mode == "full":
        compile_blocks(blocks, options, forward_only=True)
    recompute(enumerate(blocks.values()), Recompute(mode=mode), watch=watch)
    if mode != "full":
        compile_blocks(blocks, options, forward_only=True)
    if offload is not None:
        offload.attach(stage, blocks.values())
    return model


def batch(seed: int = 0) -> Tensor:
    return tokens(BATCH, TOKENS, seed=seed)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def step(model: Decoder, order: str = "F0 B0 F1 B1") -> list[Tensor]:
    """Forwards and backwards of micro-batches in this order, from no gradients."""
    model.zero_grad()
    losses, device = {}, next(model.parameters()).device
    for action in order.split():
        number = int(action[1:])
        if action[0] == "F":
            losses[number] = model(batch(number).to(device)).square().mean()
        else:
            losses.pop(number).backward()
    return [grad.clone() for grad in gradients(model)]


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


class Doubled(nn.Module):
    """Saves x twice, a part of it once, and two views of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        first, second = y.chunk(2, dim=-1)
        product = first * second * x[..., 2:6].exp()
        return x * x + torch.cat([product, product.t().contiguous().t()], dim=-1)
