"""Memory that does not suffice: one message with what would fit, and nothing lost."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.cli import main
from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.faults.memory import MemoryInUse, code_of, is_out_of_memory
from dtron.faults.memory_table import read_table
from dtron.plan import remedies
from dtron.plan.memory import offloaded
from dtron.plan.run_shape import Resolved
from dtron.run.process import Place
from dtron.training.loss import sequence_losses
from tests.faults.processes import torchrun
from tests.faults.test_launch import ENV, write
from tests.test_architecture import ROOT
from tests.training.test_trainer import rows

FAILING = """
import os, sys, torch
from dtron import cli
from dtron.training import trainer

one_step = trainer.Trainer._one_step

def fail(self):
    if self.step == 3 and os.environ["RANK"] in RANKS:
        block = self.model.applied.parts[0].get_submodule("blocks.1.ffn")
        block.register_forward_pre_hook(lambda *_: torch.empty(2**50, dtype=torch.uint8))
    one_step(self)

trainer.Trainer._one_step = fail
sys.exit(cli.main())
"""
"""train.py, on some of whose ranks a feed-forward layer needs a PiB in the fourth step."""
QUICKSTART = str(ROOT / "configs/quickstart.toml")


@pytest.mark.parametrize("ranks", ["1", "01"])
def test_out_of_memory_is_one_message_of_all_ranks(tmp_path: Path, ranks: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING.replace("RANKS", repr(ranks)))
    keys = {"train__steps": 20, "checkpoint__interval": 2}
    words = write(tmp_path / "c.toml", tmp_path / "run", **keys)[1:]
    done = subprocess.run(
        torchrun(2, script, *words),
        env=ENV,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    ours = re.split(r"\n[WE]\d{4} ", done.stderr)[0].splitlines()  # then comes torchrun's log
    assert len(ours) == 1, ours
    assert re.match(
        f"error: out of memory on rank [{ranks}], step 4, in blocks.1.ffn: 1048576.0 GiB were "
        r"requested, with \d+ MiB in use \(peak \d+ MiB\) and .* free on this machine; no "
        "cheaper setting fits on 2 ranks",
        ours[0],
    )
    assert "SIGTERM" not in done.stdout
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-2\n"
    (table,) = map(read_table, (tmp_path / "run/memory").glob("rank-*.json"))
    assert table.when == "out of memory"
    assert table.totals["optimizer"] > table.totals["parameters"] > 0


class _TooMuch(torch.autograd.Function):
    """Allocates a PiB in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.empty(2**50)


def test_the_error_names_module_loss_backward_or_update(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(4, 4)
    x, labels = linear(torch.randn(2, 3, 4)), torch.zeros(2, 3, dtype=torch.long)

    def in_module() -> None:
        linear.register_forward_pre_hook(lambda *_: torch.empty(2**50))
        nn.Sequential(linear)(x)

    def in_update() -> None:
        optimizer = torch.optim.SGD(linear.parameters())
        monkeypatch.setattr(optimizer, "_init_group", lambda *_: torch.empty(2**50))
        optimizer.step()

    def in_loss() -> None:
        monkeypatch.setattr(F, "cross_entropy", lambda *_, **__: torch.empty(2**50))
        sequence_losses(x, labels)

    places = {
        in_module: "outer.linear",
        in_loss: "the loss",
        lambda: _TooMuch.apply(x).sum().backward(): "the backward",
        in_update: "the update of the parameters",
        lambda: torch.empty(2**50): "",
    }
    for allocate, place in places.items():
        with pytest.raises(RuntimeError) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
        assert code_of(caught.value.__traceback__, {linear: "outer.linear"}) == place


def test_errors_of_allocators_are_recognised() -> None:
    for allocate in (lambda: torch.empty(2**50), lambda: bytearray(2**60)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_the_error_names_what_was_requested_and_the_room() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has ...")
    output = MemoryInUse(ranks=1).explain(error, "rank 3, step 7", {})
    assert str(output).startswith("out of memory on rank 3, step 7: 20.5 GiB were requested, with ")
    assert output.needed >= 20.5 * 2**30 > output.room - 2**30


def test_a_batch_beyond_memory_is_refused_before_it_is_allocated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = ["train.global_batch=1048576", "train.micro_batch=1048576", f"run.dir={tmp_path}/run"]
    assert main(["--config", QUICKSTART, *batch]) == 1
    output = capsys.readouterr().err
    assert output.startswith("error: train.micro_batch = 1048576: a step needs about 1")
    assert "of this machine's memory are available; use train.micro_batch = " in output
    assert output.count("\n") == 1


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.load(QUICKSTART, ["train.micro_batch=8"])
    needed = remedies.most_memory(config, 2).peak
    place = Place(rank=0, local_rank=0, world_size=2, local_world_size=2)
    for available, refused in ((2 * needed + 1, False), (2 * needed - 1, True)):
        monkeypatch.setattr("dtron.faults.memory.host_memory", lambda free=available: (free, free))
        if not refused:
            remedies.check_step_memory(config, place)
            continue
        with pytest.raises(ConfigError, match=r"on each of 2 ranks \(activations .*recompute.mode"):
            remedies.check_step_memory(config, place)


TWO = Place(rank=0, local_rank=0, world_size=2, local_world_size=2)


def test_what_is_advised_fits() -> None:
    """Alone where a key suffices, together where none does; estimates grow with what was seen."""
    config = RunConfig.load(QUICKSTART, ["train.micro_batch=8"])
    needed = remedies.most_memory(config, 2).peak
    advice = remedies.remedies(config, TWO, needed / 3)
    changes = re.findall(r"(\S+) = (\S+) \(about", advice)
    assert {key for key, _ in changes} >= {"recompute.mode", "train.micro_batch"}
    for key, value in changes:
        changed = RunConfig.load(QUICKSTART, ["train.micro_batch=8", f"{key}={value}"])
        assert remedies.most_memory(changed, 2).peak <= needed / 3
    twice = remedies.remedies(config, TWO, 2 * needed / 3, 2 * needed)
    assert re.findall(r"(\S+) = (\S+) \(about", twice) == changes
    assert twice != advice
    together = remedies.remedies(config, TWO, needed / 9)
    assert 'use recompute.mode = "full", train.micro_batch = 1' in together
    assert "no cheaper setting fits on 2 ranks: with " in remedies.remedies(config, TWO, 1.0)


def test_offload_is_advised_on_gpus_whose_host_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """To remove moments from the device, which is enough here; not where the host is too small."""
    config = RunConfig.load(QUICKSTART, ["model.size=8b", "parallel.zero=3"])
    run = Resolved.of(config, 2)
    needed = remedies.most_memory(config, 2)
    room = needed.peak - 0.9 * needed.classes["optimizer"]
    assert "optim.offload" not in remedies.remedies(config, TWO, room)
    monkeypatch.setattr(Place, "device", torch.device("cuda", 0))
    monkeypatch.setattr("dtron.plan.remedies.host_memory", lambda: (2e12, 2e12))
    assert "optim.offload = 1.0 (about" in remedies.remedies(config, TWO, room)
    changed = RunConfig.load(QUICKSTART, ["model.size=8b", "parallel.zero=3", "optim.offload=1"])
    assert remedies.most_memory(changed, 2).peak <= room
    held = offloaded(Resolved.of(changed, 2))
    assert offloaded(run) == 0
    assert held == pytest.approx(needed.classes["optimizer"], rel=1e-3)  # all but norms
    monkeypatch.setattr("dtron.plan.remedies.host_memory", lambda: (2 * held, 2 * held))
    assert "optim.offload = 1.0" not in remedies.remedies(config, TWO, room)
