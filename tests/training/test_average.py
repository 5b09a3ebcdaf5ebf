"""The moving average of the weights: its formula, and the same in every layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtron import cli
from dtron.checkpoint.dcp_storage import ShardReader
from dtron.config import Optim
from dtron.errors import CheckpointError
from dtron.io.safetensors_file import full_region
from dtron.training.optim import build_optimizer, update
from dtron.training.optim.average import Average
from tests.harness import run_ranks
from tests.training.test_trainer import fit, tiny

DECAY = 0.75


def deviation(name: str) -> float:
    """The largest deviation from the formula, over steps of which one is skipped."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3))
    moments = {"moments": "bfloat16"} if name != "sgd" else {}
    options = Optim.model_validate({"name": name, "lr": 0.1, "ema": DECAY, **moments})
    optimizer = build_optimizer([("w", p)], options)
    wanted, worst = p.detach().clone(), 0.0
    for step, scale in enumerate([1.0, torch.nan, 0.5, 1.0]):
        p.grad = torch.full_like(p, step + 1.0)
        before = p.detach().clone()
        update(optimizer, torch.tensor(scale), 0.1)
        assert torch.equal(p, before) == (step == 1)
        if step != 1:
            wanted = DECAY * wanted + (1 - DECAY) * p.detach()
        worst = max(worst, (optimizer.state[p]["ema"] - wanted).abs().max().item())
    loaded = build_optimizer([("w", p)], options)
    loaded.load_state_dict(optimizer.state_dict())
    assert torch.equal(loaded.state[p]["ema"], optimizer.state[p]["ema"])  # float32, to the bit
    return worst


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_the_average_follows_its_formula(name: str) -> None:
    assert deviation(name) < 1e-6


def test_an_average_before_the_update_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Callable[..., None] = Average._begin
    follow: Callable[..., None] = Average._follow
    before: dict[Tensor, Tensor] = {}

    def remember(average: Average, optimizer: Any, *_: Any) -> None:
        begin(average, optimizer)
        (p,) = optimizer.param_groups[0]["params"]
        before[p] = p.detach().clone()

    @torch.no_grad()
    def early(average: Average, optimizer: Any, *_: Any) -> None:
        for p, weight in before.items():
            after = p.detach().clone()
            p.copy_(weight)
            follow(average, optimizer)
            p.copy_(after)

    monkeypatch.setattr(Average, "_begin", remember)
    monkeypatch.setattr(Average, "_follow", early)
    assert deviation("adamw") > 1e-3


def averages(run: Path, average: bool = True) -> dict[str, Tensor]:
    """All averages, or weights, of a run's last checkpoint, with their global shapes."""
    reader = ShardReader(run / "checkpoints" / "step-6", average)
    tensors = {k: v for k, v in reader.index.tensors.items() if k.startswith("model.")}
    return {name: reader.region(name, full_region(x.size)) for name, x in tensors.items()}


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1": {"parallel__zero": 1},
    "zero 2": {"parallel__zero": 2},
    "zero 3": {"parallel__zero": 3},
    "tp": {"parallel__tp": 2, "model__override.tied": True},
    "pp": {"parallel__pp": 2, "model__override.tied": True},
}
RUN = {"optim__ema": 0.9, "train__micro_batch": 1, "optim__eps": 1e-4}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_same_average_and_a_resume_keeps_it(tmp_path: Path, layout: str) -> None:
    changes = LAYOUTS[layout]
    model = {k: v for k, v in changes.items() if k.startswith("model")}
    run_ranks(1, fit, tiny(tmp_path / "one", **RUN, **model))
    run_ranks(2, fit, tiny(tmp_path / "run", **RUN, **changes, checkpoint__interval=3))
    resume = {"checkpoint__resume": str(tmp_path / "run" / "checkpoints" / "step-3")}
    run_ranks(1, fit, tiny(tmp_path / "again", **RUN, **model, **resume))
    wanted = averages(tmp_path / "one")
    for found in (averages(tmp_path / "run"), averages(tmp_path / "again")):
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            assert (found[name] - x).norm() <= 1e-4 * x.norm(), name
    weights = averages(tmp_path / "one", average=False)
    name = "model.blocks.0.attn.wq.weight"
    assert (weights[name] - wanted[name]).norm() > 1e-2 * wanted[name].norm()


def test_commands_use_the_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(1, fit, tiny(tmp_path / "run", **RUN))
    run, exported = str(tmp_path / "run"), str(tmp_path / "hf")
    assert cli.commands(["convert", "to-hf", run, exported, "--ema"]) == 0
    printed = []
    for words in ([run, "--ema"], [run], [exported, "--config", f"{run}/config.toml"]):
        capsys.readouterr()
        assert cli.commands(["eval", "--json", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[2] != printed[1]


def test_a_checkpoint_without_averages_is_refused(tmp_path: Path) -> None:
    run_ranks(1, fit, tiny(tmp_path / "plain"))
    resume = {"checkpoint__resume": str(tmp_path / "plain"), "train__steps": 9}
    with pytest.raises(CheckpointError, match=r"has no average of weights; set optim\.ema=0"):
        fit(tiny(tmp_path / "new", **RUN, **resume))
    with pytest.raises(CheckpointError, match="leave out --ema"):
        averages(tmp_path / "plain")
