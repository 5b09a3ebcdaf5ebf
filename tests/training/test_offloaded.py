"""AdamW with moments in host memory: the bits of AdamW with moments on the device, with copies that
are made late, in runs of several layouts, and resumed in others."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtron.checkpoint.dcp_storage import ShardReader
from dtron.config import Optim, RunConfig
from dtron.io.safetensors_file import full_region
from dtron.parallelisms.gradients import as_dtensor
from dtron.parallelisms.host_memory import Copies
from dtron.setup import rules
from dtron.training.optim import build_optimizer, offloaded, update
from dtron.training.optim.offloaded import OffloadedAdamW, choose
from tests.harness import run_ranks
from tests.parallelisms.offloaded import LateEvent, LateLane
from tests.training.test_trainer import fit, losses, tiny

BUCKET = 2**8
SIZES = [(3, 1000), (50,), (7, 33), (2048,), (1,), (300, 5)]
MOMENTS = ["float32", "bfloat16"]


class LateForHost(LateLane):
    """Copies to the host that the host sees after `synchronize`, and the device once it waits."""

    landing: list[tuple[Tensor, Tensor]]

    def __init__(self) -> None:
        super().__init__("to host", [])
        self.landing = []

    def run(self, number: int) -> None:
        before = [[data.clone() for data, _ in pairs] for pairs in self.issued[self.done : number]]
        pending = self.issued[self.done : number]
        super().run(number)
        for pairs, olds in zip(pending, before, strict=True):
            for (data, _), old in zip(pairs, olds, strict=True):
                self.landing.append((data, data.clone()))
                data.copy_(old)

    def land(self) -> None:
        for data, value in self.landing:
            data.copy_(value)
        self.landing.clear()

    def synchronize(self) -> None:
        self.run(len(self.issued))
        self.land()


class LateForDevice(LateLane):
    """Copies to the device that find what the device has waited for."""

    def __init__(self, to_host: LateForHost) -> None:
        super().__init__("to device", [])
        self.to_host = to_host

    def copy(self, pairs: Any) -> LateEvent:
        self.to_host.land()
        return super().copy(pairs)


def made_late(optimizer: torch.optim.Optimizer) -> OffloadedAdamW:
    assert isinstance(optimizer, OffloadedAdamW)
    optimizer.to_host = LateForHost()  # type: ignore[assignment]
    optimizer.to_device = LateForDevice(optimizer.to_host)  # type: ignore[assignment, arg-type]
    return optimizer


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "BUCKET", BUCKET)
    monkeypatch.setattr(offloaded, "SMALLEST", 2)


def parameters() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [(f"{i}.weight", nn.Parameter(torch.randn(size))) for i, size in enumerate(SIZES)]


def train(named: list[tuple[str, nn.Parameter]], optimizer: Any, steps: range) -> None:
    """The third step is skipped, and the fourth has no gradient for one parameter."""
    for step in steps:
        for i, (_, p) in enumerate(named):
            torch.manual_seed(100 * step + i)
            p.grad = None if step == 3 and i == 2 else torch.randn_like(p)
        scale = torch.tensor(torch.nan if step == 2 else 0.5, device=named[0][1].device)
        update(optimizer, scale, 0.01)


def options(offload: float, moments: str = "float32") -> Optim:
    return Optim.model_validate({"offload": offload, "moments": moments, "ema": 0.5})


def result(named: list[tuple[str, nn.Parameter]], optimizer: Any) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    return [p.detach() for _, p in named] + [
        each[k] for each in state.values() for k in sorted(each)
    ]


def trained(offload: float, moments: str = "float32") -> list[Tensor]:
    named = parameters()
    optimizer = build_optimizer(named, options(offload, moments))
    if offload:
        made_late(optimizer)
    train(named, optimizer, range(6))
    return result(named, optimizer)


def is_equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_bits_are_those_of_moments_on_the_device(fraction: float, moments: str) -> None:
    assert is_equal(trained(fraction, moments), trained(0.0, moments))


def test_a_missed_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, wait = trained(0.0), Copies.wait

    def skip(self: Copies) -> None:
        if not isinstance(getattr(self._done, "lane", None), LateForDevice):
            wait(self)

    monkeypatch.setattr(Copies, "wait", skip)
    assert not is_equal(trained(1.0), wanted)


def test_a_stale_copy_on_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained(0.0)
    monkeypatch.setattr(LateForHost, "synchronize", lambda self: None)
    assert not is_equal(trained(1.0), wanted)


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_state_is_loaded_with_and_without_offload(moments: str) -> None:
    wanted = trained(0.0, moments)
    for before, after in ((0.0, 1.0), (1.0, 0.0), (0.4, 1.0), (1.0, 1.0)):
        named = parameters()
        first = build_optimizer(named, options(before, moments))
        train(named, first, range(3))
        second = build_optimizer(named, options(after, moments))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(named, second, range(3, 6))
        assert is_equal(result(named, second), wanted)
        if isinstance(second, OffloadedAdamW):  # again, in place
            held = {p: second.state[p]["exp_avg"] for p in second.offloaded}
            second.load_state_dict(second.state_dict())
            assert all(second.state[p]["exp_avg"] is x for p, x in held.items())


def test_the_fraction_is_of_elements_and_small_shards_stay() -> None:
    sizes = [2**20] * 8 + [1]
    assert sum(choose(sizes, 0.5)) == 4
    assert choose(sizes, 1.0) == [True] * 8 + [False]
    assert not any(choose(sizes, 0.0))


@pytest.fixture
def of_two_gpus() -> Iterator[DeviceMesh]:
    """A mesh of GPUs, without GPUs: its tensors may be on the CPU."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield DeviceMesh("cuda", torch.arange(2))
    dist.destroy_process_group()


def test_moments_of_shards_on_gpus_are_on_the_host(of_two_gpus: DeviceMesh) -> None:
    """And views of them too, which checkpoints read and write without padding."""
    local = torch.arange(12.0).view(4, 3)
    p = as_dtensor(local, of_two_gpus, (Shard(0),), torch.Size((8, 3)))
    assert p.to_local().data_ptr() == local.data_ptr()
    optimizer = OffloadedAdamW([nn.Parameter(p)], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(p)
    optimizer.step()
    (state,) = optimizer.state.values()
    moment = state["exp_avg"]
    assert isinstance(moment, DTensor)
    assert (moment.device_mesh.device_type, moment.to_local().device.type) == ("cuda", "cpu")
    assert (moment.shape, moment.placements) == (p.shape, p.placements)
    assert moment.to_local().untyped_storage().nbytes() >= 2**12  # of the pool


@pytest.mark.gpu
@pytest.mark.parametrize("moments", MOMENTS)
def test_bits_on_a_gpu(moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams, with buckets that take the time of copies; then loaded by the other kind."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(offloaded, "BUCKET", 2**20)
    results = []
    for fractions in ((0.0, 0.0), (1.0, 1.0), (0.5, 0.0), (0.0, 1.0)):
        torch.manual_seed(0)
        sizes = [(3000, 1024), (1024,), (7, 3), (2**20, 5)]
        named = [
            (f"{i}.weight", nn.Parameter(torch.randn(size, device="cuda")))
            for i, size in enumerate(sizes)
        ]
        optimizer = build_optimizer(named, options(fractions[0], moments))
        train(named, optimizer, range(3))
        second = build_optimizer(named, options(fractions[1], moments))
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(named, second, range(3, 6))
        if fractions[1]:
            assert isinstance(second, OffloadedAdamW)
            (held,) = {second.state[p]["exp_avg"].device.type for p in second.offloaded}
            assert held == "cpu"
            assert all(second.state[p]["exp_avg"].is_pinned() for p in second.offloaded)
        results.append([each.cpu() for each in result(named, second)])
    assert all(is_equal(each, results[0]) for each in results[1:])


@pytest.mark.gpu
def test_copies_of_both_directions_overlap_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a trace: copies in run while others run out, and while kernels run."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(offloaded, "BUCKET", 2**24)
    named = [("0.weight", nn.Parameter(torch.randn(2**27, device="cuda")))]
    optimizer = build_optimizer(named, options(1.0))
    train(named, optimizer, range(2))  # pins the memory
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        train(named, optimizer, range(1))
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"HtoD": [], "DtoH": [], "kernel": []}
    for event in profile.events() or ():
        kind = next((k for k in ("HtoD", "DtoH") if k in event.name), "kernel")
        spans[kind].append((event.time_range.start, event.time_range.end))

    def overlapped(one: str, other: str) -> float:
        return sum(
            max(0.0, min(end, e) - max(start, s))
            for start, end in spans[one]
            for s, e in spans[other]
        )

    copied = sum(end - start for start, end in spans["HtoD"])
    assert overlapped("HtoD", "DtoH") > copied / 2
    assert overlapped("HtoD", "kernel") > 0


def test_an_offload_of_nothing_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="dtron"):
        build_optimizer(parameters(), options(1.0))
        assert "has no effect" not in caplog.text
        monkeypatch.setattr(offloaded, "SMALLEST", 2**16)
        build_optimizer(parameters(), options(1.0))
    assert "optim.offload = 1.0 has no effect" in caplog.text


def fit_offloaded(config: RunConfig) -> None:
    """Train on CPUs, where the key is refused since it has no use; also small tensors."""
    rules._ON_GPUS = ""
    offloaded.SMALLEST, offloaded.BUCKET = 2, BUCKET
    fit(config)


RUN: dict[str, Any] = {"train__micro_batch": 1, "train__steps": 4, "checkpoint__interval": 2}
OFFLOAD = {"optim__offload": 0.7}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 2, bfloat16": (2, {"parallel__zero": 2, "optim__moments": "bfloat16"}),
    "tp with a padded vocabulary": (2, {"parallel__tp": 2, "model__override.vocab_size": 265}),
    "pp and zero 3": (4, {"parallel__pp": 2, "parallel__zero": 3}),
    "ep and zero 1": (
        2,
        {
            "model__name": "mixtral",
            "model__override.ffn_dim": 0,
            "model__override.n_experts": 4,
            "model__override.expert_dim": 16,
            "parallel__ep": 2,
            "parallel__zero": 1,
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_alike_and_resume_with_and_without_offload(
    tmp_path: Path, layout: str
) -> None:
    """To the bit in the same layout; one process resumes what several have offloaded."""
    ranks, settings = LAYOUTS[layout]
    run = {**RUN, **settings}
    run_ranks(ranks, fit, tiny(tmp_path / "wanted", **run))
    run_ranks(ranks, fit_offloaded, tiny(tmp_path / "run", **run, **OFFLOAD))
    assert losses(tmp_path / "run") == losses(tmp_path / "wanted")
    resume = {"checkpoint__resume": str(tmp_path / "run" / "checkpoints" / "step-2")}
    run_ranks(ranks, fit, tiny(tmp_path / "resident", **run, **resume))
    resume = {"checkpoint__resume": str(tmp_path / "wanted" / "checkpoints" / "step-2")}
    run_ranks(ranks, fit_offloaded, tiny(tmp_path / "again", **run, **resume, **OFFLOAD))
    names = ("wanted", "run", "resident", "again")
    first, *others = (ShardReader(tmp_path / n / "checkpoints" / "step-4") for n in names)
    moments = [name for name in first.index.tensors if "exp_avg" in name]
    assert moments
    for name in moments:
        region = full_region(first.index.tensors[name].size)
        wanted = first.region(name, region)
        assert all(torch.equal(each.region(name, region), wanted) for each in others), name
    alone = {key: value for key, value in run.items() if not key.startswith("parallel__")}
    run_ranks(1, fit_offloaded, tiny(tmp_path / "alone", **alone, **resume, **OFFLOAD))
    assert losses(tmp_path / "alone") == pytest.approx(losses(tmp_path / "run")[2:], rel=1e-3)
