"""Learning-rate schedules and the update that skips itself."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtron.config import Optim, Schedule
from dtron.config.learning_rate import SCHEDULES, learning_rate
from dtron.parallelisms.gradients import clip_scale
from dtron.training.optim import AdamW, build_optimizer, update
from tests.harness import run_ranks


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 10, 1000])
def test_schedules_are_positive_and_at_most_the_peak(name: str, steps: int) -> None:
    options = Schedule.model_validate({"name": name})
    rates = [learning_rate(step, steps, 2.0, options) for step in range(steps)]
    assert all(0 < rate <= 2.0 for rate in rates)


def test_end_points() -> None:
    def rates(name: str) -> list[float]:
        options = Schedule.model_validate(
            {"name": name, "warmup": 0.1, "decay": 0.2, "min_ratio": 0.1}
        )
        return [learning_rate(step, 100, 1.0, options) for step in range(100)]

    for name in SCHEDULES:
        assert rates(name)[0] == pytest.approx(0.1)
        assert rates(name)[9] == pytest.approx(1.0)
    assert rates("constant")[-1] == 1.0
    for name in ("linear", "cosine", "wsd"):
        assert rates(name)[-1] == pytest.approx(0.1)
    assert rates("linear")[10] == 1.0
    assert rates("wsd")[79] == 1.0
    assert rates("wsd")[80] < 1.0
    assert rates("inverse_sqrt")[39] == pytest.approx(math.sqrt(10 / 40))
    middle = rates("cosine")
    assert (middle[54] + middle[55]) / 2 == pytest.approx(0.55, abs=1e-2)


def model_with_gradients(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


ALL = [
    Optim(name="adamw"),
    Optim(name="adamw", moments="bfloat16"),
    Optim(name="sgd"),
    Optim(name="muon"),
    Optim(name="lion", moments="bfloat16"),
]


@pytest.mark.parametrize("options", ALL, ids=["adamw", "narrow adamw", "sgd", "muon", "lion"])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_non_finite_norm_changes_nothing_and_training_goes_on(options: Optim, norm: float) -> None:
    model = model_with_gradients(1.0)
    optimizer = build_optimizer(model.named_parameters(), options)
    update(optimizer, clip_scale(torch.tensor(5.0), 1.0), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(list(optimizer.state.values()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, norm)
    update(optimizer, clip_scale(torch.tensor(norm), 1.0), 0.1)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    torch.testing.assert_close(list(optimizer.state.values()), state, rtol=0, atol=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update(optimizer, clip_scale(torch.tensor(1.0), 1.0), 0.1)
    assert not torch.equal(next(iter(model.parameters())), before[0])


def test_clipping_inside_fused_adamw_equals_clipping_before_it() -> None:
    ours, theirs = model_with_gradients(2.0), model_with_gradients(2.0)
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours.named_parameters(), Optim(weight_decay=0.1))
    norm = torch.tensor(2.0 * math.sqrt(8))
    update(optimizer, clip_scale(norm, 1.0), 0.01)
    nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    other = build_optimizer(theirs.named_parameters(), Optim(weight_decay=0.1))
    for group in other.param_groups:
        group["lr"] = 0.01
    other.step()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))


def _trained(name: str, meshes: bool) -> list[torch.Tensor]:
    """Four matrices and a vector after three steps, whole: by torch's optimizer over whole tensors,
    or by ours over shards on two meshes at once, its state saved and loaded before the last."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2))
    other = init_device_mesh("cpu", (4,))
    wholes = [torch.randn(8, 6) for _ in range(4)] + [torch.randn(8)]
    places = [(mesh, [Shard(0), Shard(1)]), (mesh, [Replicate(), Shard(0)]), (other, [Shard(0)])]
    places += [(other, [Replicate()]), (mesh, [Shard(0), Replicate()])]

    def placed(i: int, whole: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(whole, *places[i], src_data_rank=None) if meshes else whole

    options = Optim.model_validate({"name": name, "lr": 0.1, "weight_decay": 0.2})
    parameters = [nn.Parameter(placed(i, w.clone())) for i, w in enumerate(wholes)]
    made: Any
    if meshes:
        made = build_optimizer(((str(i), p) for i, p in enumerate(parameters)), options)
    elif name == "muon":
        made = TorchMuon(parameters[:4], parameters[4:], options)
    elif name == "adamw":
        settings = {"lr": 0.1, "betas": (options.beta1, options.beta2), "eps": options.eps}
        groups = [
            {"params": parameters[:4], "weight_decay": 0.2},
            {"params": parameters[4:], "weight_decay": 0.0},
        ]
        made = torch.optim.AdamW(groups, **settings)
    else:
        made = torch.optim.SGD(parameters, lr=0.1)
    for step in range(3):
        gradients = [torch.randn_like(w) for w in wholes]
        for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
            p.grad = placed(i, g * 0.5 if not meshes else g)
        if meshes:
            update(made, torch.tensor(0.5), 0.1)
            if step == 1:
                state = copy.deepcopy(made.state_dict())
                made = build_optimizer(((str(i), p) for i, p in enumerate(parameters)), options)
                made.load_state_dict(state)
        else:
            made.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


class TorchMuon:
    """torch.optim.Muon for matrices, AdamW for vectors."""

    def __init__(
        self, matrices: list[nn.Parameter], vectors: list[nn.Parameter], options: Optim
    ) -> None:
        muon = (options.lr, options.weight_decay, options.momentum)
        betas = (options.beta1, options.beta2)
        self.both = (
            torch.optim.Muon(matrices, *muon, adjust_lr_fn=options.adjust_lr_fn),
            torch.optim.AdamW(vectors, options.lr, betas, options.eps, weight_decay=0.0),
        )

    def step(self) -> None:
        for each in self.both:
            each.step()


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_steps_over_shards_are_those_of_torch_over_whole_tensors(name: str) -> None:
    ours, theirs = run_ranks(4, _trained, name, True), run_ranks(4, _trained, name, False)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original"])
def test_muon_is_torchs_muon(adjust_lr_fn: str) -> None:
    """Wide, square and tall matrices; equal ones are one batch. Stacks are matrices each."""
    shapes = [(8, 16), (16, 8), (24, 24), (8, 16), (2, 16, 8), (16,)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    stack = [nn.Parameter(p.clone()) for p in theirs[4].detach().unbind()]
    keys = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "adjust_lr_fn": adjust_lr_fn}
    options = Optim.model_validate({"name": "muon", **keys})
    optimizer = build_optimizer(((str(i), p) for i, p in enumerate(ours)), options)
    other = TorchMuon([*theirs[:4], *stack], theirs[5:], options)
    for _ in range(3):
        for own, others in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own)
            others.grad = own.grad * 0.5
        assert theirs[4].grad is not None
        for matrix, grad in zip(stack, theirs[4].grad, strict=True):
            matrix.grad = grad
        update(optimizer, torch.tensor(0.5), options.lr)
        other.step()
    theirs[4].data = torch.stack([p.detach() for p in stack])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_lion_is_its_formula(moments: str) -> None:
    keys = {"beta1": 0.8, "beta2": 0.99, "weight_decay": 0.2, "moments": moments}
    options = Optim.model_validate({"name": "lion", **keys})
    p = nn.Parameter(torch.randn(7, 5))
    optimizer = build_optimizer([("p", p)], options)
    wanted, m = p.detach().clone(), torch.zeros(7, 5)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        g = p.grad * 0.5
        wanted = wanted * (1 - 0.1 * 0.2) - 0.1 * (0.8 * m + 0.2 * g).sign()
        m = (0.99 * m + 0.01 * g).to(getattr(torch, moments)).float()
        update(optimizer, torch.tensor(0.5), 0.1)
    torch.testing.assert_close(p.detach(), wanted)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"].float(), m, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_groups_have_their_own_lr_and_decay(name: str) -> None:
    """The first that matches; a module's name stands for its parameters."""
    decays = name != "sgd"
    tables = [
        {"match": "norm", "lr": 0.5, **({"weight_decay": 0.7} if decays else {})},
        {"match": "*.bias", "lr": 0.02},
        {"match": "norm.weight", "lr": 0.03},
    ]
    options = Optim.model_validate({"name": name, "lr": 0.1, "groups": tables})
    model = Stacked()
    optimizer = build_optimizer(model.named_parameters(), options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer, torch.tensor(1.0), 0.05)  # half of the peak
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    rates = {name: of[id(p)]["lr"] for name, p in model.named_parameters()}
    assert rates == pytest.approx(
        {
            **{"norm.weight": 0.25, "norm.bias": 0.25, "linear.bias": 0.01},
            **{"linear.weight": 0.05, "up": 0.05, "up_bias": 0.05},
        }
    )
    assert of[id(model.norm.weight)]["weight_decay"] == (0.7 if decays else 0.0)
    assert model.norm.weight.detach().unique().tolist() == pytest.approx(
        [1 - 0.25 * 0.7 if decays else 1.0]
    )


class Stacked(nn.Module):
    """A vector of each of four experts, as experts have them, beside a matrix and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(3)
        self.up = nn.Parameter(torch.zeros(4, 5, 3))
        self.up_bias = nn.Parameter(torch.zeros(4, 5))


def test_matrices_alone_are_decayed() -> None:
    model = Stacked()
    groups = build_optimizer(model.named_parameters(), Optim(weight_decay=0.3)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert sorted({group["weight_decay"] for group in groups}) == [0.0, 0.3]
    decayed = {name for name, p in model.named_parameters() if decay[id(p)]}
    assert decayed == {"linear.weight", "up"}


def test_clip_scale() -> None:
    assert clip_scale(torch.tensor(0.5), 1.0) == 1.0
    assert clip_scale(torch.tensor(4.0), 1.0).item() == pytest.approx(0.25)
    assert clip_scale(torch.tensor(4.0), 0.0) == 1.0
    assert clip_scale(torch.tensor(math.inf), 1.0).isnan()
    assert clip_scale(torch.tensor(math.nan), 0.0).isnan()


def test_adamw_reads_its_settings() -> None:
    ours, theirs = model_with_gradients(0.3), model_with_gradients(0.3)
    theirs.load_state_dict(ours.state_dict())
    options = Optim(beta1=0.5, beta2=0.7, eps=1e-3, weight_decay=0.0)
    optimizer = build_optimizer(ours.named_parameters(), options)
    other = torch.optim.AdamW(
        theirs.parameters(), lr=0.1, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.0
    )
    for value in (0.3, -0.1, 0.2):
        for parameter in [*ours.parameters(), *theirs.parameters()]:
            parameter.grad = torch.full_like(parameter, value)
        update(optimizer, torch.ones(()), 0.1)
        other.step()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))


def test_narrow_moments_are_half_as_large_and_stay_so_when_loaded() -> None:
    first, second = model_with_gradients(0.3), model_with_gradients(0.3)
    options = Optim(moments="bfloat16")
    trained, loaded = (build_optimizer(m.named_parameters(), options) for m in (first, second))
    update(trained, torch.ones(()), 0.1)
    loaded.load_state_dict(copy.deepcopy(trained.state_dict()))
    for optimizer in (trained, loaded):
        for state in optimizer.state.values():
            assert {name: value.dtype for name, value in state.items()} == {
                "step": torch.float32,
                "exp_avg": torch.bfloat16,
                "exp_avg_sq": torch.bfloat16,
            }
    second.load_state_dict(first.state_dict())
    for optimizer in (trained, loaded):
        update(optimizer, torch.ones(()), 0.1)
    torch.testing.assert_close(list(second.parameters()), list(first.parameters()), rtol=0, atol=0)


def test_counts_follow_the_parameters_that_have_gradients() -> None:
    """Also where a set of them comes back: a missing expert, a frozen layer."""
    a, b = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = AdamW([{"params": [a, b]}], torch.bfloat16, lr=0.1)
    for members in ([a, b], [b], [a, b], [a]):
        for parameter in (a, b):
            parameter.grad = torch.ones(4) if any(parameter is p for p in members) else None
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in (a, b)] == [3, 3]


def updates_beside_torch(
    device: str, shapes: list[tuple[int, ...]], moments: torch.dtype | None
) -> None:
    """Several updates with clipping, of which one is skipped, and a load of the state between."""
    ours = [nn.Parameter(torch.randn(shape).to(device)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = AdamW([{"params": ours}], moments, **settings)
    other = torch.optim.AdamW(theirs, **settings)  # type: ignore[arg-type]
    for factor in (1.0, 0.25, math.nan, 0.5):
        for own, others in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own)
            others.grad = own.grad * factor
        optimizer.scale = torch.tensor(factor, device=device)
        optimizer.step()
        if math.isfinite(factor):
            other.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = AdamW([{"params": ours}], moments, **settings)
        optimizer.load_state_dict(state)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_kernel_in_float32_trains_as_torchs_optimizer() -> None:
    updates_beside_torch("cpu", [(7, 5), (5,)], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [None, torch.float32])
@pytest.mark.parametrize(
    "shapes", [[(7, 5), (5,)], [(3000, 1024), (1024,)]], ids=["small", "large"]
)
def test_updates_on_a_gpu_are_those_of_torchs_optimizer(
    shapes: list, moments: torch.dtype | None
) -> None:
    """By torch's kernel where tensors are small and moments not set, else by dtron's."""
    updates_beside_torch("cuda", shapes, moments)
