"""AdamW with 8-bit moments: equal to torchao's, in every layout, and after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit

from dtron.checkpoint.dcp_storage import ShardReader
from dtron.config import Optim
from dtron.errors import ConfigError
from dtron.io.safetensors_file import full_region
from dtron.training.optim import build_optimizer, update
from dtron.training.optim.adamw8bit import AdamW8bit, check_blocks
from tests.harness import run_ranks
from tests.training.test_trainer import fit, losses, tiny

OPTIONS = Optim(name="adamw8bit", lr=0.1)


def start() -> Tensor:
    return torch.randn(20, 512, generator=torch.Generator().manual_seed(0))


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(20, 512, generator=generator) * 10.0**-i for i in range(4)]


def stepped(p: torch.nn.Parameter, grads: list[Tensor], skip: bool = False) -> AdamW8bit:
    optimizer = build_optimizer([("w", p)], OPTIONS)
    assert isinstance(optimizer, AdamW8bit)
    for gradient in grads:
        p.grad = gradient
        if skip:
            before = {k: v.clone() for k, v in optimizer.state[p].items()}
            update(optimizer, torch.tensor(torch.inf), 0.1)
            if before:
                assert all(torch.equal(v, before[k]) for k, v in optimizer.state[p].items())
        update(optimizer, torch.tensor(1.0), 0.1)
    return optimizer


def test_updates_are_those_of_torchao() -> None:
    """Rows are whole blocks, so that blocks are the same; skipped steps change nothing."""
    theirs, ours = start(), torch.nn.Parameter(start())
    moments = [
        OptimState8bit.zeros(theirs.shape, s, 256, "cpu", torch.float32) for s in (True, False)
    ]
    decay, eps = OPTIONS.weight_decay, OPTIONS.eps
    for step, gradient in enumerate(gradients()):
        count, rate = torch.tensor(step + 1.0), torch.tensor(0.1)
        betas = OPTIONS.beta1, OPTIONS.beta2
        state = (gradient, count, moments[0], moments[1], None)
        single_param_adam(theirs, *state, rate, *betas, decay, eps, True, False)
    optimizer = stepped(ours, gradients(), skip=True)
    state = optimizer.state[ours]
    assert (ours - theirs).abs().max() < 1e-6
    for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        assert (state[f"{name}_codes"] != moment.codes).float().mean() < 1e-3
        assert torch.allclose(state[f"{name}_scales"].view(-1), moment.scale)
    assert sum(v.nbytes for v in state.values()) - 4 == 2 * (ours.numel() + ours.numel() // 64)
    assert sum(OPTIONS.state_bytes(hidden=False)) == 2 * (1 + 1 / 64)
    again = build_optimizer([("w", ours)], OPTIONS)
    again.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(v, state[k]) for k, v in again.state[ours].items())
    assert again.state[ours]["exp_avg_codes"].dtype == torch.uint8


def on_shards() -> tuple[Tensor, str]:
    """On two ranks: the weights after updates of a matrix split by rows; the error by columns."""
    mesh = init_device_mesh("cpu", (2,))
    p = torch.nn.Parameter(distribute_tensor(start(), mesh, [Shard(0)]))
    optimizer = stepped(p, [distribute_tensor(g, mesh, [Shard(0)]) for g in gradients()])
    scales = optimizer.state[p]["exp_avg_scales"]
    assert (scales.shape, scales.to_local().shape) == ((20, 2), (10, 2))
    narrow = torch.nn.Parameter(distribute_tensor(torch.zeros(64, 256), mesh, [Shard(1)]))
    try:
        check_blocks([("w", narrow)])
    except ConfigError as error:
        return whole(p), str(error)
    return whole(p), ""


def whole(p: torch.nn.Parameter) -> Tensor:
    assert isinstance(p.data, DTensor)
    return p.data.full_tensor()


def test_shards_are_updated_as_the_whole_matrix() -> None:
    p = torch.nn.Parameter(start())
    stepped(p, gradients())
    for found, message in run_ranks(2, on_shards):
        assert torch.equal(found, p)
        assert "rows of w have 128 elements on a rank, not a multiple of 256" in message


SIZE = {"dim": 256, "head_dim": 128, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 512}
RUN = {f"model__override.{key}": value for key, value in SIZE.items()}
RUN |= {"optim__name": "adamw8bit", "train__micro_batch": 1, "train__steps": 4, "optim__eps": 1e-4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 3": {"parallel__zero": 3},
    "tp": {"parallel__tp": 2},
    "pp": {"parallel__pp": 2},
}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    path = tmp_path_factory.mktemp("adamw8bit")
    run_ranks(1, fit, tiny(path, **RUN))
    return losses(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_alike_and_resume_in_others(
    tmp_path: Path, wanted: list[float], layout: str
) -> None:
    half = {"checkpoint__interval": 2, **LAYOUTS[layout]}
    run_ranks(2, fit, tiny(tmp_path / "run", **RUN, **half))
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-4)
    resume = {"checkpoint__resume": str(tmp_path / "run" / "checkpoints" / "step-2")}
    run_ranks(1, fit, tiny(tmp_path / "other", **RUN, **resume))
    assert losses(tmp_path / "other") == pytest.approx(wanted[2:], rel=1e-4)
    run_ranks(2, fit, tiny(tmp_path / "same", **RUN, **LAYOUTS[layout], **resume))
    assert losses(tmp_path / "same") == losses(tmp_path / "run")[2:]
    first, second = (ShardReader(tmp_path / n / "checkpoints" / "step-4") for n in ("run", "same"))
    names = [name for name in first.index.tensors if name.endswith("_codes")]
    assert names
    for name in names:
        region = full_region(first.index.tensors[name].size)
        assert torch.equal(first.region(name, region), second.region(name, region)), name
