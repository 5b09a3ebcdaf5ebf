"""`optim.name` of an optimizer outside of dtron, and the optimizer of a Trainer."""

import json
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtron.config import Optim, RunConfig
from dtron.errors import ConfigError
from dtron.io import user_code
from dtron.training.optim import build_optimizer, update
from dtron.training.optim.custom import custom_optimizer
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training.test_trainer import fit, losses, tiny

HERE = "tests.training.test_custom_optimizer"


def torch_adamw(named: Sequence[tuple[str, Tensor]], options: Optim) -> torch.optim.Optimizer:
    """torch's own AdamW, with the groups of dtron's."""
    matrices = [p for _, p in named if p.dim() >= 2]
    vectors = [p for _, p in named if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def only_matrices(named: Sequence[tuple[str, Tensor]], options: Optim) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named if p.dim() >= 2], lr=options.lr)


def nothing(_named: Sequence[tuple[str, Tensor]], _options: Optim) -> None:
    return None


NUMBER = 3


def fit_with_factory(config: RunConfig) -> None:
    Trainer(config, optimizer=torch_adamw).fit()


@pytest.mark.parametrize("layout", [{}, {"parallel__tp": 2}, {"parallel__pp": 2}], ids=str)
def test_torchs_adamw_trains_as_dtrons_in_layouts_and_after_a_resume(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    own = {"optim__eps": 1e-4, "train__micro_batch": 1, "optim__ema": 0.9}
    custom = {**own, "optim__name": f"{HERE}:torch_adamw", **layout}
    ranks = 2 if layout else 1
    run_ranks(1, fit, tiny(tmp_path / "dtron", **own))
    run_ranks(ranks, fit, tiny(tmp_path / "custom", **custom, checkpoint__interval=3))
    wanted = losses(tmp_path / "dtron")
    assert losses(tmp_path / "custom") == pytest.approx(wanted, rel=1e-5)
    resume = {"checkpoint__resume": str(tmp_path / "custom" / "checkpoints" / "step-3")}
    run_ranks(ranks, fit, tiny(tmp_path / "resumed", **custom, **resume))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "custom")[3:]
    if not layout:
        run_ranks(1, fit_with_factory, tiny(tmp_path / "factory", **own))
        assert losses(tmp_path / "factory") == losses(tmp_path / "custom")
        for run in ("factory", "custom"):
            info = json.loads((tmp_path / run / "run.json").read_text(encoding="utf-8"))
            assert info["optimizer"] == f"{HERE}:torch_adamw"
            config = (tmp_path / run / "config.toml").read_text(encoding="utf-8")
            assert f'name = "{HERE}:torch_adamw"' in config


def test_gradients_are_scaled_and_non_finite_steps_skipped() -> None:
    p = torch.nn.Parameter(torch.ones(2, 2))
    options = Optim(lr=0.5, weight_decay=0.1)
    optimizer = build_optimizer([("w", p)], options, factory=torch_adamw)
    p.grad = torch.ones(2, 2)
    update(optimizer, torch.tensor(torch.nan), 0.5)
    assert torch.equal(p, torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    update(optimizer, torch.tensor(0.5), 0.25)
    assert torch.equal(p.grad, torch.full((2, 2), 0.5))
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [("w", torch.nn.Parameter(torch.ones(2, 2))), ("b", torch.nn.Parameter(torch.ones(2)))]
    with pytest.raises(ConfigError, match=r"only_matrices left out b; its groups need all"):
        build_optimizer(named, Optim(name=f"{HERE}:only_matrices"))
    with pytest.raises(ConfigError, match="nothing returned a NoneType"):
        build_optimizer(named, Optim(name=f"{HERE}:nothing"))
    with pytest.raises(ConfigError, match="NUMBER is a int, not a function"):
        custom_optimizer(f"{HERE}:NUMBER")
    with pytest.raises(ConfigError, match=r"optim\.name = adamw2 is not known.*did you mean adamw"):
        fit(tiny(tmp_path, optim__name="adamw2"))
    entry = EntryPoint("short", f"{HERE}:torch_adamw", "dtron.optimizers")
    found = {"short": (entry,), "lion": (entry,)}
    monkeypatch.setattr(user_code, "registered", lambda _group: found)
    assert custom_optimizer("short") is torch_adamw
    with pytest.raises(ConfigError, match="lion is an optimizer of dtron and of an installed"):
        custom_optimizer("lion")
