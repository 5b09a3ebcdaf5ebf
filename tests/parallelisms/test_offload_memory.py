"""Offloaded activations where graphs are dropped, blocks and copies fail, and on GPUs."""

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtron.parallelisms.host_memory import Buffer, CopyStream
from dtron.parallelisms.offload import Offload
from dtron.run.process import seed_everything
from tests.models.build import tokens
from tests.parallelisms.offloaded import (
    CPU,
    LAYERS,
    MODES,
    ORDERS,
    Doubled,
    Mode,
    assert_equal,
    batch,
    gradients,
    late,
    model_of,
    step,
)

# An assertion in `LateLane.run` that fails when memory is let go.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def test_a_graph_that_is_dropped_gives_its_memory_back() -> None:
    offload = Offload(CPU, smallest=1)
    late(offload)
    model = model_of("full", offload)
    wanted = step(model, "F0 B0")
    allocated = offload.pool.allocated
    for number in range(3):
        model(batch(number))  # and no backward
    assert_equal(step(model, "F0 B0"), wanted)
    assert offload.pool.allocated <= 2 * allocated
    with torch.no_grad():
        model(batch())
    assert len(offload._ends[0]) == 0


@pytest.mark.parametrize("also_the_model", [False, True])
def test_what_is_dropped_after_a_prefetch(also_the_model: bool) -> None:
    """Memory of copies that nobody needs is held until the computation has waited for them."""
    offload = Offload(CPU, smallest=1)
    log = late(offload)
    lanes: list[Any] = [offload._to_host, offload._to_device]
    model = model_of("none", offload)
    wanted = step(model, "F0 B0")
    log.clear()
    losses = [model(batch(number)).mean() for number in range(3)]
    losses[0].backward()
    assert log.count("to device") == LAYERS + 1  # the last one is for the second micro-batch
    assert lanes[1].done == len(lanes[1].issued) - 1
    losses.clear()
    if also_the_model:
        del model, offload
        gc.collect()
    else:
        assert_equal(step(model, "F0 B0"), wanted)
    assert all(lane.done == len(lane.issued) for lane in lanes)


def test_a_second_backward_through_the_same_graph() -> None:
    offload = Offload(CPU, smallest=1)
    log = late(offload)
    model = model_of("none", offload)
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    once = [grad.clone() for grad in gradients(model)]
    log.clear()
    model(batch())
    assert log.count("to host") == LAYERS - 1  # what is in use is neither copied nor freed
    loss.backward()
    assert_equal(gradients(model), [2 * grad for grad in once])


def test_kept_tensors_that_are_modified_are_an_error() -> None:
    """As they are without offload, where autograd sees it in the backward."""

    class Modified(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()  # saves y
            return y.add_(1)

    offload = Offload(CPU, smallest=1)
    model = nn.Sequential(Modified(), Modified())
    offload.attach(0, model)  # type: ignore[arg-type]
    x = torch.zeros(4, 8).requires_grad_()
    with pytest.raises(RuntimeError, match=r"\(4, 8\) that a block saved.*modified in place"):
        model(x).sum().backward()


def test_a_block_that_fails() -> None:
    """The one before it may be stored already; its backward still works."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("failing")

    offload = Offload(CPU, smallest=1)
    log = late(offload)
    model = nn.Sequential(Doubled(), Failing())
    offload.attach(0, model)  # type: ignore[arg-type]
    x = torch.randn(4, 8).requires_grad_()
    y = model[0](x + 0)
    with pytest.raises(ValueError, match="failing"):
        model[1](y)
    y.sum().backward()
    del y
    model[0](x + 0).sum().backward()
    model[0](x + 0).sum().backward()
    assert log == ["to host"]


def test_copies_that_fail() -> None:
    """As for lack of memory: what has no copy is not freed, and what has not come is not used."""
    offload = Offload(CPU, smallest=1)
    late(offload)
    x = torch.randn(4, 8, dtype=torch.float64).requires_grad_()
    model = nn.Sequential(Doubled(), Doubled(), Doubled()).double()
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    offload.attach(0, model)  # type: ignore[arg-type]
    failed = []
    for lane in (offload._to_host, offload._to_device):
        lane.copy = functools.partial(one_time_in_three, failed, lane.copy, itertools.count())  # type: ignore[method-assign]

    def persistent(function: Callable[..., Any], *args: Any) -> Any:
        while True:
            with contextlib.suppress(MemoryError):
                return function(*args)

    y = x + 0
    for block in model:
        y = persistent(block, y)
    (found,) = persistent(lambda: torch.autograd.grad(y.sum(), x, retain_graph=True))
    assert torch.equal(found, wanted)
    assert len(failed) == 8  # two blocks, there and back


def one_time_in_three(failed: list[int], copy: Any, numbers: Iterator[int], pairs: Any) -> Any:
    """Fail twice, then copy, and again."""
    if (number := next(numbers)) % 3 < 2:
        failed.append(number)
        raise MemoryError
    return copy(pairs)


@pytest.fixture
def deterministic() -> Iterator[None]:
    seed_everything(0, deterministic=True)
    yield
    torch.use_deterministic_algorithms(False)


def peak_and_gradients(mode: Mode, offload: Offload | None, backend: str) -> tuple[int, list[Any]]:
    """Bytes that a step adds to what is allocated at its begin; activations outweigh weights."""
    sizes = {"dim": 256, "head_dim": 64, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 512}
    model = model_of(mode, offload, backend, "flash", n_layers=GPU_LAYERS, **sizes)
    model.cuda().bfloat16()
    x, before = tokens(16, 2048).cuda(), 0
    for _ in range(GPU_STEPS):  # the first compiles, and pins memory
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return peak, [grad.cpu() for grad in gradients(model)]


GPU_LAYERS, GPU_STEPS = 8, 3


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("mode", "backend"),
    [*[(mode, "") for mode in MODES], ("none", "inductor"), ("selective", "inductor")],
)
def test_on_a_gpu(mode: Mode, backend: str) -> None:
    """Gradients are bitwise equal; the peak falls by what is offloaded, but for the blocks that are
    on the device at once; memory is pinned in the first step alone."""
    offload = Offload(torch.device("cuda"))
    peak, wanted = peak_and_gradients(mode, None, backend)
    gc.collect()
    offloaded_peak, found = peak_and_gradients(mode, offload, backend)
    assert_equal(found, wanted)
    each = offload.copied // GPU_STEPS // (GPU_LAYERS - 1)  # bytes a block; the last one stays
    assert each >= 16 * 2048 * 256 * 2
    assert offload.pool.allocated == (GPU_LAYERS - 1) * each
    assert peak - offloaded_peak >= 0.9 * (GPU_LAYERS - 3) * each


class SlowLane(CopyStream):
    """Copies that begin some milliseconds late on the device, for which the host does not wait."""

    def copy(self, pairs: Sequence[tuple[Buffer, Tensor]]) -> torch.cuda.Event | None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(10_000_000)  # cycles
        return super().copy(pairs)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("order", ORDERS)
def test_slow_copies_on_a_gpu(order: str) -> None:
    """Memory that were used again before its copy is done would spoil gradients; also that of a
    graph that is dropped after a prefetch."""
    device = torch.device("cuda")
    offload = Offload(device, smallest=1)
    offload._to_host, offload._to_device = SlowLane(device, True), SlowLane(device, False)
    model = model_of("none", offload, attention="math").cuda()
    wanted = step(model_of("none", attention="math").cuda(), order)
    for _ in range(2):
        assert_equal(step(model, order), wanted)
    losses = [model(batch(number).cuda()).mean() for number in range(3)]
    losses[0].backward()
    losses.clear()
    assert_equal(step(model, order), wanted)
