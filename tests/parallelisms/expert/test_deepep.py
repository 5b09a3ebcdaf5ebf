"""Rows of experts by DeepEP's documented API: equal to all-to-alls, and refused where it cannot."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtron.config import Parallel, RunConfig
from dtron.errors import ConfigError
from dtron.parallelisms.expert import deepep
from dtron.parallelisms.expert.all_to_all import AllToAll
from dtron.parallelisms.expert.deepep import DeepEP
from dtron.parallelisms.expert.dispatcher import Dispatcher
from dtron.parallelisms.expert.dispatchers import DISPATCHERS
from dtron.plan.exact import notes, traceable
from dtron.run.process import Place
from dtron.setup.preflight import preflight
from dtron.setup.rules import MachineCandidate, check_dispatcher, check_layout, reasons
from tests.harness import run_ranks
from tests.parallelisms.expert import fake_deep_ep
from tests.parallelisms.expert.test_symmetric_dispatch import EXPERTS, LOADS, ROWS, drawn
from tests.parallelisms.parity import FULL, Case, parallel_run

DIM, LAYERS = 16, 3
MIXTURE = {
    "model": {"name": "mixtral", "size": "debug"},
    "train": {"global_batch": 8, "seq_len": 64, "dtype": "bfloat16"},
}
"""Of a run that DeepEP could serve."""


def given(loads: str, rank: int, layer: int) -> tuple[Tensor, Tensor]:
    """As `drawn`, in bfloat16, and more rows on later ranks."""
    rows, ends = drawn(loads, rank, layer, ROWS + 3 * rank, DIM)
    return rows.bfloat16(), ends


def on_gpus(kind: Callable[..., Dispatcher]) -> Callable[..., Dispatcher]:
    """Made as on a machine with GPUs, which the stand-in does not need."""

    def made(*args: Any) -> Dispatcher:
        with mock.patch("torch.cuda.is_available", return_value=True):
            return kind(*args)

    return made


def moved(kind: Callable[..., Dispatcher], loads: str) -> dict[str, list[Tensor]]:
    """On one rank, of layers whose rows are on their way at once: results, gradients of rows and of
    experts that are a vector each."""
    rank, ep = dist.get_rank(), dist.get_world_size()
    dispatcher = kind(dist.group.WORLD, ep, 1, 2.0)
    weights = torch.arange(1, EXPERTS * DIM + 1, dtype=torch.float64).view(EXPERTS, DIM) / 70
    own = weights.chunk(ep)[rank].clone().requires_grad_()

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        assert offsets.dtype == torch.int32
        assert len(rows) == offsets[-1]
        place = torch.arange(len(rows), dtype=torch.int32)
        chosen = own[torch.searchsorted(offsets, place, right=True)]
        return (rows.double() * chosen).sin().bfloat16()

    layers = [given(loads, rank, layer) for layer in range(LAYERS)]
    rows = [of_layer.requires_grad_() for of_layer, _ in layers]
    pending = [
        dispatcher.begin(x, ends, "layer") for x, (_, ends) in zip(rows, layers, strict=True)
    ]
    outs = [dispatcher.finish(of_layer, compute) for of_layer in pending]
    # Of a copied transpose, so that the gradients that come are not contiguous.
    total = torch.stack([(out.t().contiguous() * (rank + 2)).square().sum() for out in outs]).sum()
    gradients = torch.autograd.grad(total, [*rows, own])
    assert not dispatcher.grow(torch.device("cpu"))
    found = {"results": [out.detach() for out in outs], "rows": list(gradients[:-1])}
    return {**found, "experts": [gradients[-1]]}


def both_ways(shuffled: bool) -> None:
    fake_deep_ep.installed()
    fake_deep_ep.Buffer.shuffled = shuffled
    for loads in LOADS:
        found, wanted = moved(on_gpus(DeepEP), loads), moved(AllToAll, loads)
        for what in ("results", "rows"):
            for one, other in zip(found[what], wanted[what], strict=True):
                assert torch.equal(one, other), (loads, what)
                assert loads == "none" or other.any()
        torch.testing.assert_close(found["experts"], wanted["experts"], rtol=1e-12, atol=1e-12)
    assert fake_deep_ep.Buffer.made == len(LOADS)  # one for all layers


@pytest.mark.parametrize("shuffled", [False, True], ids=["by sender", "shuffled"])
@pytest.mark.parametrize("world", [2, 4])
def test_equals_all_to_all(world: int, shuffled: bool) -> None:
    run_ranks(world, both_ways, shuffled)


def handle_of_another_layer() -> None:
    """Kept once for all layers, whose rows are on their way at once."""
    combine, seen = fake_deep_ep.Buffer.combine, []

    def combined(buffer: Any, rows: Tensor, handle: tuple) -> Any:
        seen.append(handle)
        return combine(buffer, rows, seen[0])

    fake_deep_ep.Buffer.combine = combined  # type: ignore[assignment,method-assign]


def read_too_early() -> None:
    fake_deep_ep.EventOverlap.current_stream_wait = lambda _self: None  # type: ignore[method-assign]


def left_as_they_came() -> None:
    deepep.reordered = lambda rows, _order, _inverse: rows  # type: ignore[assignment]


def results_left_sorted() -> None:
    deepep.inverse_of = lambda order: order  # type: ignore[assignment]


def gradients_not_contiguous() -> None:
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.send_back(gradients[0])[0], None, None

    deepep._Transfer.backward = staticmethod(backward)  # type: ignore[method-assign]


def gradients_of_the_rank_alone() -> None:
    """What the rank computed for others, as if it were its own rows'."""

    correct = deepep._Transfer.backward

    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.send_back.func.__name__ == "dispatch":
            return correct(ctx, *gradients)
        in_rank, *_ = ctx.send_back.keywords["handle"]
        own = torch.zeros(len(in_rank), DIM, dtype=torch.bfloat16)
        n = min(len(own), len(gradients[0]))
        own[:n] = gradients[0][:n]
        return own, None, None

    deepep._Transfer.backward = staticmethod(backward)  # type: ignore[method-assign]


BUGS = [
    handle_of_another_layer,
    read_too_early,
    left_as_they_came,
    results_left_sorted,
    gradients_not_contiguous,
    gradients_of_the_rank_alone,
]


def found_in(bug: Callable[[], None]) -> bool:
    """On one rank: whether it is an assertion that fails."""
    bug()
    try:
        both_ways(True)
    except AssertionError:
        return True
    except RuntimeError:  # the other rank has found it
        return False
    return False


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(bug: Callable[[], None]) -> None:
    assert any(run_ranks(2, found_in, bug))


class Narrow(Case):
    """Whose run is in bfloat16, as its model is."""

    def config(self) -> RunConfig:
        run = super().config()
        train = run.train.model_copy(update={"dtype": self.dtype})
        return run.model_copy(update={"train": train})


def trained(case: Case) -> list[dict[str, Any]]:
    """On one rank, of a model: what each dispatcher gives."""
    fake_deep_ep.installed()
    DISPATCHERS["deepep"] = on_gpus(DeepEP)  # type: ignore[assignment]
    found = []
    for name in ("deepep", "all_to_all"):
        parallel = case.parallel.model_copy(update={"dispatcher": name})
        found.append(parallel_run(replace(case, parallel=parallel)))
    assert fake_deep_ep.Buffer.made == 1
    return found


WIDE = {"dim": 32}


@pytest.mark.parametrize(
    "case",
    [
        Narrow("mixtral", 2, Parallel(ep=2), dtype="bfloat16", override=WIDE),
        Narrow("deepseek_v3", 2, Parallel(ep=2, tp=2), FULL, dtype="bfloat16", override=WIDE),
    ],
    ids=str,
)
def test_models_train_alike(case: Case) -> None:
    """Bit by bit, also with shared experts and recomputation: an expert's rows are in one order."""
    for by_library, by_all_to_all in run_ranks(case.world, trained, case, seconds=120):
        assert by_library["losses"] == by_all_to_all["losses"]
        for what in ("gradients", "parameters"):
            torch.testing.assert_close(by_library[what], by_all_to_all[what], rtol=0, atol=0)
        assert any("experts" in name and g.any() for name, g in by_library["gradients"].items())


def config(**sections: Any) -> RunConfig:
    parallel = {"ep": 2, "dispatcher": "deepep", **sections.pop("parallel", {})}
    given = {key: {**MIXTURE.get(key, {}), **value} for key, value in sections.items()}
    return RunConfig.of({**MIXTURE, **given, "parallel": parallel})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"etp": 2}}, "parallel.etp = 2: DeepEP sends a row to one rank"),
        ({"train": {"dtype": "float32"}}, 'not in float32; use train.dtype = "bfloat16"'),
        (
            {"model": {"override": {"dim": 36, "head_dim": 8}}},
            "model.dim = 36: DeepEP needs a multiple of 16 up to 8176",
        ),
        ({"model": {"override": {"dim": 8192}}}, "model.dim = 8192: DeepEP needs a multiple of"),
        ({"debug": {"deterministic": True}}, "debug.deterministic = true"),
    ],
)
def test_settings_it_cannot_serve_are_refused(sections: dict, message: str) -> None:
    """By the plan too, on a machine without the library; and what is refused is not by default."""
    check_layout(config(), 4)
    run = config(**sections)
    with pytest.raises(ConfigError, match=r"parallel\.dispatcher") as error:
        check_layout(run, 4)
    assert message in str(error.value)
    assert any(message in reason for reason in reasons(run, 4))


def test_several_hosts_are_refused() -> None:
    wide = config(
        model={"override": {"n_experts": 16}}, parallel={"ep": 16}, train={"global_batch": 16}
    )
    with pytest.raises(ConfigError, match=r"parallel.ep = 16: only DeepEP's kernels inside a host"):
        check_layout(wide, 16)


def grown() -> None:
    fake_deep_ep.installed()
    dispatcher = on_gpus(DeepEP)(dist.group.WORLD, 2, 1, 2.0)
    ends = torch.full((EXPERTS,), 4, dtype=torch.int32)
    for width in (DIM, 2 * DIM, DIM):
        rows = torch.ones(4, width).bfloat16()
        pending = dispatcher.begin(rows, ends, "")
        assert torch.equal(dispatcher.finish(pending, lambda x, _: 2 * x), 2 * rows)
    assert (fake_deep_ep.Buffer.made, fake_deep_ep.Buffer.destroyed) == (2, 1)


def test_a_buffer_grows() -> None:
    run_ranks(2, grown)


def test_a_trace_says_what_it_leaves_out() -> None:
    run = config()
    assert any("not DeepEP" in note for note in notes(run, traceable(run, 2), 2))


CUDA = torch.device("cuda")


def test_absence_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # import fails, installed or not
    with pytest.raises(ConfigError, match=r"needs the package deep_ep.*build it.*all_to_all"):
        check_dispatcher(MachineCandidate(config(), 4, CUDA))
    with pytest.raises(ConfigError, match="needs the package deep_ep"):
        on_gpus(DeepEP)(None, 2, 1, 2.0)


def test_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(ConfigError, match="needs GPUs"):
        check_dispatcher(MachineCandidate(config(), 4, torch.device("cpu")))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs GPUs"):
        DeepEP(None, 2, 1, 2.0)  # type: ignore[arg-type]


def test_what_the_machine_lacks_is_told_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in float32 are not sent either, and settings may have no effect."""
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    monkeypatch.setattr("dtron.setup.rules.choose_backend", lambda *_, **__: None)  # asks the GPU
    run, place = config(train={"dtype": "float32"}), Place(rank=0, local_rank=0, world_size=4)
    for gpus, message in ((False, "needs GPUs"), (True, "needs the package deep_ep")):
        monkeypatch.setattr("torch.cuda.is_available", lambda found=gpus: found)
        with pytest.raises(ConfigError, match=rf"{message}[\s\S]*bfloat16, not in float32"):
            preflight(run, place)
        with pytest.raises(ConfigError, match=r"has no effect without parallel\.ep > 1 or"):
            preflight(config(parallel={"ep": 1}), place)


@pytest.mark.parametrize("name", ["Buffer", "topk_idx_t"])
def test_other_versions_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    fake_deep_ep.installed(name)
    with pytest.raises(ConfigError, match=f"needs the package deep_ep.*import name '{name}'"):
        check_dispatcher(MachineCandidate(config(), 4, CUDA))


def test_numbers_of_ranks_without_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    fake_deep_ep.installed()
    check_dispatcher(MachineCandidate(config(), 4, CUDA))
    with pytest.raises(ConfigError, match=r"parallel.ep = 6: .*Unsupported number"):
        check_dispatcher(MachineCandidate(config(parallel={"ep": 6}), 4, CUDA))


def test_dispatchers_refuse_what_preflight_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """For models in a loop of one's own."""
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    fake_deep_ep.installed()
    with pytest.raises(ConfigError, match=r"parallel.etp = 2"):
        on_gpus(DeepEP)(None, 2, 2, 2.0)
    run_ranks(2, refused_rows)


def refused_rows() -> None:
    fake_deep_ep.installed()
    dispatcher = on_gpus(DeepEP)(dist.group.WORLD, 2, 1, 2.0)
    ends = torch.full((EXPERTS,), 4, dtype=torch.int32)
    for rows, message in ((torch.ones(4, DIM), "float32"), (torch.ones(4, 12).bfloat16(), "12")):
        with pytest.raises(ConfigError, match=message):
            dispatcher.begin(rows, ends, "")
    import socket

    socket.gethostname = lambda: f"host{dist.get_rank()}"
    with pytest.raises(
        ConfigError, match=r"ranks \[0, 1\] share experts on several hosts \(host0, host1\)"
    ):
        on_gpus(DeepEP)(dist.group.WORLD, 2, 1, 2.0)
