"""Offloaded activations: gradients, what is copied and what stays, order of copies, memory."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from dtron.errors import ConfigError
from dtron.parallelisms import Mesh, parallelize
from dtron.parallelisms.host_memory import HostPool, host_memory
from dtron.parallelisms.offload import Offload
from tests.harness import run_ranks
from tests.models.build import small_config
from tests.parallelisms.offloaded import (
    BATCH,
    CPU,
    HIDDEN,
    LAYERS,
    MODES,
    ORDERS,
    TOKENS,
    Doubled,
    Mode,
    assert_equal,
    batch,
    gradients,
    late,
    model_of,
    step,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_bitwise_equal(mode: Mode, order: str) -> None:
    """However late the copies are, and in whatever order micro-batches come back."""
    offload = Offload(CPU, smallest=1)
    late(offload)
    model = model_of(mode, offload)
    wanted = step(model_of(mode), order)
    for _ in range(2):
        assert_equal(step(model, order), wanted)
    assert offload.copied >= 2 * (LAYERS - 1) * HIDDEN


@pytest.mark.parametrize(
    ("mode", "backend"), [*[(mode, "aot_eager") for mode in MODES], ("selective", "inductor")]
)
def test_compiled_blocks(mode: Mode, backend: str) -> None:
    """The hooks see what the compiled forward saves, except parameters."""
    offload = Offload(CPU, smallest=1)
    late(offload)
    found = step(model_of(mode, offload, backend), ORDERS[-1])
    assert_equal(found, step(model_of(mode, None, backend), ORDERS[-1]))
    config = small_config("llama")
    queries = BATCH * TOKENS * config.n_heads * config.head_size * 4
    least = {"full": HIDDEN, "attention": HIDDEN + queries}.get(mode, 3 * HIDDEN)
    calls = 4 * LAYERS - 2  # of the last two micro-batches the last block stays
    assert calls * least <= offload.copied < calls * 40 * HIDDEN


def test_what_is_copied_under_full_recomputation() -> None:
    """Each block's input, once; not the rotary table, which all blocks share."""
    offload = Offload(CPU, smallest=1)
    model = model_of("full", offload)
    step(model, "F0 B0")
    assert offload.copied == (LAYERS - 1) * HIDDEN
    step(model, "F0 B0 F1 B1")
    assert offload.copied == 3 * (LAYERS - 1) * HIDDEN


def test_what_is_copied_under_attention_recomputation() -> None:
    """And the attention's output and log-sum-exp, from the cache of the recomputation."""
    offload = Offload(CPU, smallest=1)
    step(model_of("attention", offload), "F0 B0")
    heads = small_config("llama").n_heads
    lse = BATCH * TOKENS * heads * 4
    assert offload.copied == (LAYERS - 1) * (2 * HIDDEN + lse)


def test_small_tensors_stay() -> None:
    offload = Offload(CPU, smallest=HIDDEN + 1)
    step(model_of("full", offload), "F0 B0")
    assert offload.copied == 0


def test_views_and_duplicates_are_copied_once() -> None:
    offload = Offload(CPU, smallest=1)
    late(offload)
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64).requires_grad_()
    model = nn.Sequential(Doubled(), Doubled(), Doubled()).double()
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    offload.attach(0, model)  # type: ignore[arg-type]
    (found,) = torch.autograd.grad(model(x + 0).sum(), x)
    assert torch.equal(found, wanted)
    # x, y, first * second, exp(part): of the first two blocks
    assert offload.copied == 2 * (2 * x.nbytes + 2 * x.nbytes // 2)


def test_an_input_that_its_maker_holds_stays() -> None:
    offload = Offload(CPU, smallest=1)
    model = nn.Sequential(Doubled(), Doubled())
    offload.attach(0, model)  # type: ignore[arg-type]
    x = torch.randn(4, 8).requires_grad_()
    model(x).sum().backward()
    assert offload.copied == 2 * x.nbytes


class Gathered(nn.Module):
    """Squares a DTensor that is gathered asynchronously, and saves it whole."""

    def forward(self, x: Any) -> Any:
        whole = x.redistribute(placements=[Replicate()], async_op=True)
        return (whole * whole).redistribute(placements=[Shard(0)])


def dtensors_offloaded() -> tuple[bool, int]:
    """Whether gradients of DTensors are equal, and bytes copied for them."""
    offload = Offload(CPU, smallest=1)
    late(offload)
    model = nn.Sequential(Gathered(), Gathered())
    x: Any = DTensor.from_local(torch.randn(4, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
    x.requires_grad_()
    wanted: Any = torch.autograd.grad(model(x).sum(), x)[0]
    offload.attach(0, model)  # type: ignore[arg-type]
    found: Any = torch.autograd.grad(model(x).sum(), x)[0]
    return torch.equal(found.to_local(), wanted.to_local()), offload.copied


def test_dtensors() -> None:
    """Their local parts are copied, also those that are still on their way."""
    assert run_ranks(2, dtensors_offloaded) == [(True, 2 * 4 * 8 * 4)] * 2


def test_order_of_copies() -> None:
    """To the host while the next block computes; to the device, one block ahead."""
    offload = Offload(CPU, smallest=1)
    log = late(offload)
    model = model_of("full", offload)
    for number, block in model.blocks.items():
        block.register_forward_pre_hook(lambda *_, n=number: log.append(f"forward {n}"))
        # The recomputation is the beginning of a block's backward.
        block.get_submodule("attn_norm").register_forward_hook(
            lambda *_, n=number: log.append(f"compute {n}")
        )
    step(model, "F0 B0")
    forwards = ["forward 0", "compute 0"]
    for n in range(1, LAYERS):
        forwards += [f"forward {n}", "to host", f"compute {n}"]
    # The last block has stayed; before a block is computed again, the copies for the next begin.
    backwards = []
    for n in reversed(range(LAYERS)):
        backwards += [*(["to device"] if n > 0 else []), f"compute {n}"]
    assert log == forwards + backwards


def test_a_pipeline_prefetches_the_next_micro_batch() -> None:
    """In the first block's backward, if the micro-batch's last block is not on the device."""
    offload = Offload(CPU, smallest=1)
    log = late(offload)
    model = model_of("full", offload)
    losses = [model(batch(n)).mean() for n in range(3)]
    log.clear()
    losses[0].backward()
    assert log == ["to device"] * (LAYERS + 1)  # one of them is of the second micro-batch
    log.clear()
    losses[1].backward()
    assert log == ["to device"] * (LAYERS - 1)  # the third one's last block has stayed
    log.clear()
    losses[2].backward()
    assert log == ["to device"] * (LAYERS - 1)


def test_a_stage_prefetches_for_itself() -> None:
    """Also where its first block saves nothing, as one does whose input the schedule holds."""
    offload = Offload(CPU, smallest=1)
    log = late(offload)
    first, second = nn.Sequential(Doubled()), nn.Sequential(nn.Identity(), Doubled())
    for stage, model in enumerate((first, second)):
        offload.attach(stage, model)  # type: ignore[arg-type]
    x = torch.randn(4, 8).requires_grad_()
    outs = [first(x + 0), second(x + 0), second(x + 0)]
    log.clear()
    outs[1].sum().backward()
    assert log == ["to device"]  # its own; the next micro-batch's has stayed


@contextlib.contextmanager
def inputs_of(blocks: nn.ModuleDict) -> Iterator[list[StorageWeakRef]]:
    """Weak references to the blocks' inputs."""
    seen: list[StorageWeakRef] = []

    def see(_module: nn.Module, args: Any) -> None:
        seen.append(StorageWeakRef(args[0].untyped_storage()))

    hooks = [block.register_forward_pre_hook(see) for block in blocks.values()]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("mode", MODES)
def test_memory_is_freed_but_for_two_blocks(mode: Mode) -> None:
    offload = Offload(CPU, smallest=1)
    model = model_of(mode, offload)
    held: list[int] = []
    with inputs_of(model.blocks) as seen:
        hooks = [
            block.get_submodule("ffn").register_forward_hook(
                lambda *_: held.append(sum(not storage.expired() for storage in seen))
            )
            for block in model.blocks.values()
        ]
        loss = model(batch()).mean()
        for hook in hooks:
            hook.remove()
    assert held == [1, 2, 2, 2]  # while a block runs, its input and that of the one before
    assert [storage.expired() for storage in seen] == [True, True, True, False]
    loss.backward()
    assert all(storage.expired() for storage in seen)


def test_second_step_allocates_nothing() -> None:
    offload = Offload(CPU, smallest=1)
    model = model_of("selective", offload)
    step(model, ORDERS[-1])
    allocated = offload.pool.allocated
    assert allocated < offload.copied  # reused within the step
    for _ in range(2):
        step(model, ORDERS[-1])
    assert offload.pool.allocated == allocated
    free = sum(b.data.nbytes for buffers in offload.pool._free.values() for b in buffers)
    assert free == allocated


POOL = "dtron.parallelisms.host_memory"


def test_pool_gives_buffers_of_the_size_asked_for() -> None:
    pool = HostPool(False, ("recompute.offload = true", "use less"))
    first, second = pool.take(10), pool.take(20)
    pool.give(first)
    assert pool.take(20) is not second
    assert pool.take(10) is first
    assert (pool.allocated, second.data.numel()) == (50, 20)


@pytest.mark.parametrize("size", [64 * 1024, 96 * 1024, 260 * 1024])
def test_pool_cuts_buffers_from_few_chunks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each a power of two, which torch does not round up as it would the buffers."""
    chunks: list[int] = []
    monkeypatch.setattr(f"{POOL}.CHUNK", 2**23)
    monkeypatch.setattr(f"{POOL}._check_host_memory", lambda more, *_: chunks.append(more))
    pool = HostPool(False, ("recompute.offload = true", "use less"))
    buffers = [pool.take(size).data for _ in range(300)]
    assert all(chunk & (chunk - 1) == 0 for chunk in chunks)
    assert max(chunks) <= 2**23
    assert len(chunks) <= len(buffers) / 9
    assert sum(chunks) == pool.reserved < 1.2 * pool.allocated
    places = sorted(buffer.data_ptr() for buffer in buffers)
    assert all(x + size <= y for x, y in itertools.pairwise(places))


def test_too_little_host_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the end of a process by the kernel."""
    pool = HostPool(False, ("recompute.offload = true", "use less"))
    pool.take(2**20)
    monkeypatch.setattr(f"{POOL}.host_memory", lambda: (100 * 2**30, 5 * 2**30))
    with pytest.raises(ConfigError, match=r"only 5\.0 of the host's 100\.0 GiB are available"):
        pool.take(2**20)


def test_rank_of_several_stages() -> None:
    """Stages of a V: their calls are stored in the order of their forwards."""
    offload = Offload(CPU, smallest=1)
    late(offload)
    wanted = step(model_of("selective"), "F0 F1 B0 B1")
    models = [model_of("selective", offload, stage=stage) for stage in range(2)]
    losses = {}
    for action in ["F00", "F10", "F01", "B10", "F11", "B00", "B11", "B01"]:
        stage, number = int(action[1]), int(action[2])
        if action[0] == "F":
            losses[stage, number] = models[stage](batch(number)).square().mean()
        else:
            losses.pop((stage, number)).backward()
    for model in models:
        assert_equal(gradients(model), wanted)


WHOLE, HALVES = ("blocks.*",), ("blocks.*.attn", "blocks.*.ffn")


def bytes_copied(mode: Mode, units: tuple[str, ...]) -> tuple[int, bool]:
    """Bytes that a rank's two sequences cost, and whether gathered parameters are freed."""
    offload = Offload(CPU, smallest=1)
    model = model_of(mode, offload)
    blocks = model.blocks.values()
    parallelize(model, Mesh(), units=(*units, "embed", ("norm", "head")), dtype="float32")
    gathered: list[Tensor] = []

    def see(module: nn.Module, _args: Any) -> None:
        assert all(not isinstance(p, DTensor) for p in module.parameters())
        gathered.extend(p.detach() for p in module.parameters())

    for block in blocks:
        for name in ("attn", "ffn"):
            block.get_submodule(name).get_submodule(FIRST[name]).register_forward_pre_hook(see)
    loss = model(batch()).square().mean()
    freed = all(p.untyped_storage().nbytes() == 0 for p in gathered)
    assert len(gathered) == 2 * LAYERS
    loss.backward()
    return offload.copied, freed


FIRST = {"attn": "wq", "ffn": "up"}


@pytest.mark.parametrize("units", [WHOLE, HALVES])
@pytest.mark.parametrize("mode", ["none", "attention"])
def test_gathered_parameters_are_neither_copied_nor_held(
    mode: Mode, units: tuple[str, ...]
) -> None:
    """Nor those of units inside of a block, which are gathered after its forward has begun."""
    (alone, _) = run_ranks(1, bytes_copied, mode, units)[0]
    for copied, freed in run_ranks(2, bytes_copied, mode, units):
        assert copied == alone
        assert freed


def test_memory_of_a_container_counts(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert host_memory(tmp_path) == (0, float("inf"))
    write("proc/meminfo", "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n")
    assert host_memory(tmp_path) == (102400, 40960)
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/memory.current", "30000\n")
    assert host_memory(tmp_path) == (102400, 40960)
    write("sys/fs/cgroup/memory.max", "50000\n")
    assert host_memory(tmp_path) == (50000, 20000)
    write("sys/fs/cgroup/memory.stat", "anon 20000\nactive_file 4000\ninactive_file 6000\n")
    assert host_memory(tmp_path) == (50000, 30000)
