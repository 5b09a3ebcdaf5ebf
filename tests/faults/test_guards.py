"""Loss spikes, corrupted copies and slow ranks are found, on the ranks where they are planted."""

import inspect
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtron.checkpoint.metadata import read_metadata
from dtron.config import RunConfig
from dtron.errors import ConfigError, TrainingError
from dtron.faults.corruption import bit_hash
from dtron.faults.spikes import Spikes
from dtron.faults.stragglers import Stragglers, _CpuWaits, table
from dtron.parallelisms.expert.bounded import RADIX, Bounded
from dtron.setup.rules import resolve
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training.test_expert_balancing import SMALL
from tests.training.test_trainer import contents, fit, losses, plant_loss, rows, tiny


class Planted(Trainer):
    """Acts before each step, on the rank where it is."""

    def before(self, number: int) -> None: ...

    def _one_step(self) -> None:
        self.before(self.step + 1)
        super()._one_step()


class Spiking(Planted):
    """Its loss is trebled at a step, until it has gone back."""

    at = 7

    def before(self, number: int) -> None:
        loss = self.model.loss
        factor = 3.0 if number == self.at and not self.rollback.n_rollbacks else 1.0
        plant_loss(self, lambda logits, labels: factor * loss(logits, labels))


def fit_spiking(config: RunConfig) -> None:
    Spiking(config).fit()


class SpikingAndDropping(Spiking):
    """Rank 1 also records dropped tokens in the step after the spike."""

    def before(self, number: int) -> None:
        super().before(number)
        if number == self.at + 1 and self.place.rank == 1 and not self.rollback.n_rollbacks:
            dispatcher = self.model.applied.dispatcher
            assert isinstance(dispatcher, Bounded)
            dispatcher.record.add(torch.tensor([0]), torch.tensor([2 * RADIX + 1]))


def fit_spiking_and_dropping(config: RunConfig) -> None:
    SpikingAndDropping(config).fit()


MIXED = {"parallel__tp": 2, "parallel__pp": 2, "train__micro_batch": 4}
WATCHED = {
    "faults__spike_window": 4,
    "faults__spike_deviations": 8.0,
    "checkpoint__interval": 2,
    "checkpoint__keep": 0,
    "metrics__batch_hash": True,
    "train__eval_sequences": 0,
    "optim__lr": 1e-3,
}


def test_a_spike_is_rolled_back_and_its_batches_are_left_out(tmp_path: Path) -> None:
    """tp 2 x pp 2: the flag is read a step late, so steps 5 to 8 have run when it is known."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    run_ranks(1, fit, tiny(whole, train__steps=12, metrics__batch_hash=True))
    batches = [row["batch"] for row in rows(whole)]
    assert len(set(batches)) == 12
    options = {**WATCHED, **MIXED, "faults__on_spike": "rollback", "faults__rollback_steps": 3}
    run_ranks(4, fit_spiking, tiny(run_dir, train__steps=8, **options))
    found = rows(run_dir)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]
    assert [row["batch"] for row in found] == batches  # 5 to 8 went to nothing, 9 to 12 instead
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("*step-*"))
    assert kept == [f"step-{n}" for n in (2, 4, 6, 8)]  # the first step-6 was abandoned
    for name in kept:  # or a run could not resume from it
        assert read_metadata(run_dir / "checkpoints" / name).data["order"] == "groups-1"


def test_stages_of_a_mixture_go_back_with_a_rollback(tmp_path: Path) -> None:
    """Steps 5 and 6, run again with other batches, are in the first stage again."""
    sources = []
    for name, weight in (("a", [1, 0]), ("b", [0, 1])):
        path = tmp_path / f"{name}.txt"
        path.write_text(f"text of {name}. " * 2000)
        sources.append({"name": name, "paths": [str(path)], "weight": weight})
    options = {**WATCHED, "faults__on_spike": "rollback", "faults__rollback_steps": 3}
    mixture = {"data__mixture": sources, "data__mixture_steps": [6], "train__steps": 8}
    run_ranks(1, fit_spiking, tiny(tmp_path / "run", **options, **mixture))
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]
    metadata = read_metadata(tmp_path / "run/checkpoints/step-8")
    state = json.loads(str(metadata.data["mixture"]))
    assert {name: read for name, (read, *_) in state.items()} == {"a": 8 * 8, "b": 4 * 8}


def test_a_rollback_discards_steps_that_wait_to_be_repeated(tmp_path: Path) -> None:
    """Else they would be repeated from the weights of a checkpoint before them."""
    options = {**WATCHED, **SMALL, "faults__on_spike": "rollback", "faults__rollback_steps": 3}
    options |= {"metrics__batch_hash": False, "metrics__log_interval": 12, "train__steps": 12}
    options |= {"parallel__ep": 2, "parallel__dispatcher": "symmetric_memory"}
    for name, act in (("spike", fit_spiking), ("both", fit_spiking_and_dropping)):
        run_ranks(2, act, tiny(tmp_path / name, **options, parallel__ep_capacity=1.0))
    one, other = (trained(tmp_path / name / "checkpoints/step-12") for name in ("spike", "both"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def trained(path: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint."""
    kinds = ("model.", "optimizer.state")
    found = {n: v for n, v in contents(path).items() if n.startswith(kinds) and v.dim()}
    assert any("exp_avg" in name for name in found)
    return found


class Poisoned(Planted):
    """Its gradients are not numbers on one rank at a step."""

    def before(self, number: int) -> None:
        loss = self.model.loss
        factor = math.nan if number == 7 and self.place.rank == self.place.world_size - 1 else 1.0
        plant_loss(self, lambda logits, labels: factor * loss(logits, labels))


def fit_poisoned(config: RunConfig) -> None:
    Poisoned(config).fit()


GUARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "experts apart, with biases": (2, {**SMALL, "parallel__tp": 2, "parallel__ep": 2}),
    "embeddings tied over stages": (
        2,
        {
            "model__name": "gpt",
            "model__override.n_kv_heads": 4,
            "model__override.tied": True,
            "parallel__pp": 2,
            "train__micro_batch": 4,
        },
    ),
}


@pytest.mark.parametrize("act", [fit_spiking, fit_poisoned])
@pytest.mark.parametrize("layout", GUARDED)
def test_the_step_of_a_spike_or_of_a_nan_is_not_taken(
    tmp_path: Path, layout: str, act: Callable[[RunConfig], None]
) -> None:
    """Nothing moves in it, on any rank, and everything in the next one."""
    ranks, changes = GUARDED[layout]
    every = {**WATCHED, "checkpoint__interval": 1, "faults__on_spike": "skip_data", **changes}
    run_ranks(ranks, act, tiny(tmp_path / "run", train__steps=8, **every))
    checkpoints = tmp_path / "run/checkpoints"
    output = rows(tmp_path / "run")
    if act is fit_spiking:
        assert output[6]["loss"] > 2 * output[5]["loss"]
    else:
        assert (output[6]["grad_norm"], output[7]["skipped"]) == (None, 1)
    before, spiked, after = (trained(checkpoints / f"step-{n}") for n in (6, 7, 8))
    assert any("expert_bias" in name for name in before) == ("experts" in layout)
    assert all(torch.equal(value, spiked[name]) for name, value in before.items())
    assert not any(torch.equal(value, after[name]) for name, value in before.items())


def means_of(values: list[float]) -> list[int]:
    spikes = Spikes(4, 6.0, skips=False, copies=1, device="cpu")
    for step, value in enumerate(values, 1):
        spikes.observe(torch.tensor(value, dtype=torch.float64), step)
    again = Spikes(4, 6.0, skips=False, copies=1, device="cpu")
    again.load_state_dict(spikes.state_dict())
    assert torch.equal(again.state, spikes.state)
    return [spike.step for spike in spikes.read(before=len(values) + 1)]


def test_spikes_stand_out_and_do_not_hide_the_next() -> None:
    calm = [4.0, 3.9, 4.1, 3.95, 4.0, 3.9]
    assert run_ranks(1, means_of, [*calm, 9.0, 3.9, float("nan"), 9.0, 3.9, 4.1]) == [[7, 10]]
    assert run_ranks(1, means_of, [9.0, 8.0, 7.0, 6.5, 6.0, 5.6, 5.2, 4.9]) == [[]]


class Flipping(Planted):
    """One bit of one rank's copy of a norm is flipped at a step."""

    def before(self, number: int) -> None:
        if number == 2 and self.place.rank == 3:
            named = dict(self.model.applied.named_parameters())
            weight = named["blocks.1.ffn_norm.weight"]
            weight.to_local().view(torch.int32)[0] ^= 1  # type: ignore[attr-defined]


class Wavering(Planted):
    """The second computation of a step is not quite the first one, on one rank."""

    def before(self, number: int) -> None:
        loss, calls = self.model.loss, 0

        def wavers(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            wrong = self.place.rank == 1 and calls == self.info["micro_batches"] + 1
            return loss(logits, labels) * (1.0 + 1e-6 * wrong)

        plant_loss(self, wavers)


def told_of_corruption(flipped: RunConfig, wavering: RunConfig) -> list[str]:
    messages = []
    for kind, config in ((Flipping, flipped), (Wavering, wavering)):
        with pytest.raises(TrainingError) as error:
            kind(config).fit()
        messages.append(str(error.value))
    return messages


def test_corrupted_memory_and_computation_are_named(tmp_path: Path) -> None:
    """dp_replicate 2 x tp 2: a norm has four copies."""
    wide = {"parallel__dp_replicate": 2, "parallel__tp": 2, "train__eval_sequences": 0}
    wide |= {"train__steps": 3}
    runs = {
        "flipped": {"faults__replicas_interval": 2},
        "wavering": {"faults__verify_step": 3},
    }
    configs = [tiny(tmp_path / name, **wide, **keys) for name, keys in runs.items()]
    ranks = run_ranks(4, told_of_corruption, *configs)
    assert all(rank == ranks[0] for rank in ranks)
    flip, waver = ranks[0]
    assert "by step 2: blocks.1.ffn_norm.weight of rank 3 differs from ranks 0, 1, 2" in flip
    assert "step 3 was not bitwise reproducible: computed twice," in waver
    assert "the loss of rank 1" in waver


def test_what_looks_for_corruption_changes_no_loss(tmp_path: Path) -> None:
    wide = {"parallel__dp_replicate": 2, "train__eval_sequences": 0, "train__steps": 3}
    steady = {"faults__verify_step": 3, "faults__replicas_interval": 1}
    run_ranks(2, fit, tiny(tmp_path / "steady", **wide, **steady))
    run_ranks(2, fit, tiny(tmp_path / "plain", **wide))
    assert losses(tmp_path / "steady") == losses(tmp_path / "plain")


def test_every_bit_counts() -> None:
    weight = torch.randn(7, 5)
    before = bit_hash(weight)
    for bit in range(32):
        flipped = weight.clone()
        flipped.view(-1).view(torch.int32)[17] ^= torch.tensor(-(2**31) if bit == 31 else 1 << bit)
        assert bit_hash(flipped) != before
    assert bit_hash(weight.flatten()[torch.arange(34, -1, -1)].view(7, 5)) != before


class Slow(Planted):
    """One rank is slow to read, another to compute."""

    def before(self, number: int) -> None:
        if number > 1:
            return
        if self.place.rank == 1:
            read = self.batches.loader.step
            self.batches.loader.step = lambda: (time.sleep(0.2), read())[1]  # type: ignore[method-assign]
        if self.place.rank == 2:
            block = self.model.applied.parts[0].get_submodule("blocks.1")
            block.register_forward_pre_hook(lambda *_: time.sleep(0.1))


def slow_rows(config: RunConfig) -> list[dict[str, float]]:
    kept: list[list[dict[str, float]]] = []
    report = Stragglers.report

    def keep(self: Stragglers, step: int) -> list[dict[str, float]]:
        kept.append(report(self, step))
        return kept[-1]

    Stragglers.report = keep  # type: ignore[method-assign]
    Slow(config).fit()
    return kept[-1]


@pytest.mark.parametrize("events", [["c_call", "c_return"], ["c_return"]])
def test_waits_are_timed_by_the_events_of_each_python(events: list[str]) -> None:
    """Python 3.12 has no `c_call` for bound methods of pybind11."""
    waits, frame = _CpuWaits(), inspect.currentframe()
    assert frame is not None
    with waits:
        sys.setprofile(None)  # events come from here alone
        for event in ["return", *events]:
            if event == "c_return":
                time.sleep(0.05)
            waits._on_event(frame, event, SimpleNamespace(__name__="wait"))
    assert 0.05 <= waits.seconds < 5


def test_slow_ranks_stand_out_with_the_part_that_is_slow(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", faults__stragglers_interval=3, train__eval_sequences=0)
    found = run_ranks(4, slow_rows, config)[0]
    assert max(range(4), key=lambda rank: found[rank]["data"]) == 1
    assert found[1]["data"] > 0.19
    assert max(range(4), key=lambda rank: found[rank]["busy"]) == 2
    assert found[2]["busy"] > 0.09
    assert min(found[0]["wait"], found[3]["wait"]) > 0.1
    lines = table(found, 3)
    assert {lines[1].split()[1], lines[2].split()[1]} == {"1", "2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"faults__on_spike": "rollback", "faults__spike_window": 2}, "set checkpoint.interval"),
        ({"faults__on_spike": "warn"}, "no spike is detected in the first window"),
        ({"faults__spike_window": 5}, "has no effect without faults.on_spike"),
        ({"faults__replicas_interval": 5}, "no ranks hold copies"),
        ({"faults__hang_seconds": 600.0}, "is not below parallel.timeout_seconds"),
        ({"faults__verify_step": 7}, "after the last step"),
    ],
)
def test_guards_that_cannot_act_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    logging.getLogger("dtron").setLevel(logging.ERROR)
    with pytest.raises(ConfigError, match=message):
        resolve(tiny(tmp_path, **changes), 1)
