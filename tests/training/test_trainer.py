"""Whole runs through the Trainer, on the embedded corpus with a tiny model."""

import atexit
import contextlib
import functools
import io
import json
import logging
import os
import re
import resource
import shutil
import signal
import tempfile
import threading
import time
import tomllib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtron.checkpoint.dcp_storage import ShardReader
from dtron.checkpoint.metadata import CheckpointMetadata, read_metadata
from dtron.config import RunConfig
from dtron.config.learning_rate import learning_rate, warmup_steps
from dtron.data import Loader
from dtron.errors import CheckpointError, ConfigError, TrainingError
from dtron.faults.signals import StopSignal
from dtron.parallelisms.expert import symmetric_dispatch
from dtron.parallelisms.expert.bounded import RADIX
from dtron.parallelisms.expert.symmetric_dispatch import SymmetricMemory
from dtron.parallelisms.gradients import local_part
from dtron.run.metrics import MetricsWriter
from dtron.run.process import Place, set_up_logging
from dtron.run.trackers import Trackers
from dtron.setup.preflight import preflight
from dtron.setup.resume_checks import resumed_warmup, schedule_settings
from dtron.training import step as training_step
from dtron.training import step_log
from dtron.training.callbacks import Callback
from dtron.training.step import LossFunction, StepResult, TrainStep
from dtron.training.trainer import Trainer
from tests.harness import run_ranks

MIXTURE = {
    **{"model__name": "mixtral", "train__dtype": "bfloat16", "model__override__ffn_dim": 0},
    **{"model__override__n_experts": 4, "model__override__experts_per_token": 2},
    "model__override__expert_dim": 32,
}
"""Changes that make the model a mixture of experts."""
TINY = {
    "model.override.n_layers": 2,
    "model.override.dim": 32,
    "model.override.n_heads": 4,
    "model.override.n_kv_heads": 2,
    "model.override.ffn_dim": 48,
    "model.override.vocab_size": 264,
    "train.steps": 6,
    "train.seq_len": 32,
    "train.global_batch": 8,
    "train.micro_batch": 2,
    "train.dtype": "float32",
    "train.eval_sequences": 4,
    "optim.lr": 3e-3,
    "metrics.log_interval": 1,
    "metrics.tensorboard": False,
    "debug.deterministic": True,
}


def tiny(run_dir: Path, **changes: Any) -> RunConfig:
    """A config of a run that takes well under a second; keys with "__" for the dot."""
    values: dict[str, Any] = {}
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in {**TINY, "run.dir": str(run_dir), **dotted}.items():
        *parts, last = key.split(".")
        table = values
        for part in parts:
            table = table.setdefault(part, {})
        table[last] = value
    values.setdefault("data", {}).setdefault("cache_dir", corpus_cache())
    return RunConfig.of(values)


NO_TRACKERS = Trackers([], RunConfig(), Path(), 0)


@functools.cache
def corpus_cache() -> str:
    """A directory in which the embedded corpus is tokenized once for all runs of this process."""
    directory = tempfile.mkdtemp(prefix="dtron-corpus-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def fit(config: RunConfig) -> None:
    Trainer(config).fit()


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(run_dir) if "loss" in row]


FIGURES = ("loss", "grad_norm", "validation_loss", "max_expert_load", "skipped")


def figures(run_dir: Path) -> list[dict]:
    """What a run logs that depends on no clock."""
    return [{key: row.get(key) for key in FIGURES} for row in rows(run_dir)]


COLUMNS = "step loss grad_norm lr tokens tokens_per_second tokens_per_second_per_device mfu"
COLUMNS += " mfu_causal seconds memory_gib data_seconds"


def slow_data(config: RunConfig) -> list[str]:
    """The warnings of a run whose sequences take longer than its steps."""
    messages: list[str] = []
    step_log.log.warning = lambda form, *rest: messages.append(form % rest)  # type: ignore
    step = Loader.step

    def slow(self: Loader) -> Any:
        time.sleep(0.3)
        return step(self)

    Loader.step = slow  # type: ignore[method-assign]
    Trainer(config).fit()
    return messages


def test_a_wait_for_data_is_logged_once(tmp_path: Path) -> None:
    (messages,) = run_ranks(1, slow_data, tiny(tmp_path / "run"))
    (message,) = messages
    assert re.match(r"data: the slowest rank waits for its sequences during \d\d% of", message)
    assert all(row["data_seconds"] >= 0.3 for row in rows(tmp_path / "run"))


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"parallel__dp_replicate": 2}),
    (4, {}),
    (4, {"parallel__dp_replicate": 2}),
    (4, {"parallel__dp_replicate": 4, "train__micro_batch": 1}),
    (2, {"parallel__zero": 1}),
    (2, {"parallel__tp": 2}),
    (4, {"parallel__tp": 2, "parallel__pp": 2, "parallel__schedule": "ZBVZeroBubble"}),
    (2, {"parallel__pp": 2, "parallel__pp_layout": "Ett|L", "train__micro_batch": 4}),
    (2, {"parallel__cp": 2, "train__sample_tokens": 2}),
    (4, {"parallel__cp": 4, "parallel__cp_method": "hierarchical", "train__sample_tokens": 2}),
    (4, {"parallel__cp": 2, "parallel__pp": 2, "parallel__cp_method": "ulysses"}),
    (1, {"train__loss_chunks": 5, "train__sample_tokens": 2}),
    (2, {"train__loss_chunks": 5, "train__sample_tokens": 2, "parallel__tp": 2}),
]


def name_of(value: Any) -> str:
    """The id of a number of ranks, or of changed keys: their last words and values."""
    if not isinstance(value, dict):
        return str(value)
    return "-".join(f"{key.rpartition('__')[2]}={changed}" for key, changed in value.items())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The rows of a run of one process."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run_ranks(1, fit, tiny(run_dir))
    return rows(run_dir)


def test_one_process_logs_its_losses(one_process: list[dict]) -> None:
    assert [row["step"] for row in one_process] == [1, 2, 3, 4, 5, 6]
    assert ["validation_loss" in row for row in one_process] == [False] * 5 + [True]
    assert list(one_process[0]) == COLUMNS.split()
    assert one_process[5]["loss"] < one_process[0]["loss"]
    assert one_process[5]["tokens"] == 6 * 8 * 32


@pytest.mark.parametrize(("world", "changes"), LAYOUTS, ids=name_of)
def test_every_layout_logs_the_losses_of_one_process(
    tmp_path: Path, world: int, changes: dict[str, Any], one_process: list[dict]
) -> None:
    run_ranks(world, fit, tiny(tmp_path / "run", **changes))
    for row, reference in zip(rows(tmp_path / "run"), one_process, strict=True):
        for key in {"loss", "grad_norm", "validation_loss"} & reference.keys():
            assert row[key] == pytest.approx(reference[key], rel=1e-5), row["step"]


def fit_with_more_on_the_last_rank(config: RunConfig) -> None:
    step_log.peak_memory_gib = lambda: 1.5 + torch.distributed.get_rank()
    fit(config)


class Noting(Callback):
    """Writes each call to a file of its rank; on the last rank, stops the run at step 3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after_step(self, trainer: Trainer) -> None:
        self.note(f"step {trainer.step}")
        ranks = torch.distributed.get_world_size()
        if trainer.step == 3 and torch.distributed.get_rank() == ranks - 1:
            trainer.stop()

    def after_eval(self, trainer: Trainer, losses: Mapping[str, float]) -> None:
        self.note(f"eval {trainer.step} {losses['validation_loss']:.6f}")

    def after_save(self, trainer: Trainer, checkpoint: Any) -> None:
        self.note(f"save {checkpoint.name}")

    def note(self, what: str) -> None:
        with (self.folder / f"{torch.distributed.get_rank()}.txt").open("a") as file:
            file.write(f"{what}\n")


def fit_with_callback(config: RunConfig, callback: Callback) -> None:
    Trainer(config, callbacks=[callback]).fit()


def test_callbacks_are_called_and_stop_all_ranks(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", train__eval_interval=2)
    run_ranks(2, fit_with_callback, config, Noting(tmp_path))
    first, second = ((tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(2))
    (validated,) = [row for row in rows(tmp_path / "run") if row["step"] == 2]
    evaluated = f"eval 2 {validated['validation_loss']:.6f}"
    steps = [line for line in first if not line.startswith("save")]
    assert steps == second
    assert steps[:4] == ["step 1", evaluated, "step 2", "step 3"]
    last = steps[-1].split()[1]  # the stop is agreed on at most one step later
    assert first[-1] == f"save step-{last}"
    assert int(last) <= 4


def test_a_callback_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"derives from dtron\.Callback"):
        Trainer(tiny(tmp_path / "run"), callbacks=[print])  # type: ignore[list-item]


def test_rows_have_the_memory_of_the_rank_with_most(tmp_path: Path) -> None:
    run_ranks(2, fit_with_more_on_the_last_rank, tiny(tmp_path / "run", train__steps=1))
    assert [row["memory_gib"] for row in rows(tmp_path / "run")] == [2.5]


def test_run_directory_says_what_ran(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = tiny(run_dir, debug__collectives=True, metrics__tensorboard=True)
    run_ranks(2, fit, config)
    metadata = json.loads((run_dir / "run.json").read_text())
    assert metadata["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert (metadata["micro_batches"], metadata["attention"], metadata["compiled"]) == (
        2,
        "sdpa",
        [],
    )
    assert sum(metadata["parameter_bytes_per_rank"]) == 4 * metadata["parameters"]
    units = 4  # embed, two blocks, norm + head; the root has no parameters of its own
    shard = metadata["collectives"]["dp_shard"]
    assert shard["reduce_scatter"]["count"] == 2 * units
    assert shard["reduce_scatter"]["bytes"] == 2 * 4 * metadata["parameters"]
    assert shard["all_gather"]["count"] == 2 * (2 * units - 1)  # the last unit stays gathered
    assert RunConfig.of(tomllib.loads((run_dir / "config.toml").read_text())) == config
    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {"loss/loss", "optim/lr", "speed/tokens_per_second", "memory/memory_gib"} <= tags
    assert not any(tag.startswith("other/") for tag in tags), tags
    assert [event.step for event in board.Scalars("loss/loss")] == [
        row["step"] for row in rows(run_dir)
    ]
    (text,) = board.Tensors("config/text_summary")
    assert config.to_toml() in text.tensor_proto.string_val[0].decode()
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-6\n"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_resumed_run_equals_uninterrupted_bitwise(tmp_path: Path, world: int, model: str) -> None:
    tied = {"model__name": model, "model__override.tied": model == "gpt"}
    if model == "gpt":
        tied |= {"model__override.n_kv_heads": 4, "model__override.dropout": 0.1}
        tied |= {"optim__moments": "bfloat16"}
    whole, split = tmp_path / "whole", tmp_path / "split"
    run_ranks(world, fit, tiny(whole, **tied))
    run_ranks(world, fit, tiny(split, checkpoint__interval=3, checkpoint__last=False, **tied))
    (split / "checkpoints" / "step-6").rename(tmp_path / "gone")
    (split / "checkpoints" / "latest").write_text("step-3\n")
    run_ranks(world, fit, tiny(split, checkpoint__resume="latest", **tied))
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
    pick = [[tuple(row.get(k) for k in keys) for row in rows(d)] for d in (whole, split)]
    assert pick[0] == pick[1]
    assert same_checkpoint(whole / "checkpoints/step-6", split / "checkpoints/step-6")


def same_checkpoint(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same bits."""
    states = [contents(path) for path in (one, other)]
    assert any(name.startswith("optimizer.") for name in states[0])
    assert states[0].keys() == states[1].keys()
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def contents(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    reader = ShardReader(path)
    shapes = {name: tensor.size for name, tensor in reader.index.tensors.items()}
    return {n: reader.region(n, tuple(slice(0, k) for k in shape)) for n, shape in shapes.items()}


def test_checkpoint_resumes_under_another_layout(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    run_ranks(1, fit, tiny(whole))
    run_ranks(2, fit, tiny(split, checkpoint__interval=3, train__steps=6))
    changes = {"checkpoint__resume": str(split / "checkpoints/step-3"), "train__micro_batch": 1}
    run_ranks(4, fit, tiny(split, parallel__dp_replicate=2, **changes))
    assert losses(split) == pytest.approx(losses(whole), rel=1e-4)
    assert (split / "config-1.toml").exists()


def test_muon_resumes_under_another_layout(tmp_path: Path) -> None:
    """The update of the next step has the same momentum. (Its Newton-Schulz in bfloat16 rounds
    weights differently in each layout, so that only this step can be compared closely.)"""
    muon = {"optim__name": "muon", "train__steps": 4, "checkpoint__interval": 3}
    run_ranks(4, fit, tiny(tmp_path / "a", parallel__tp=2, checkpoint__keep=0, **muon))
    resume = {"checkpoint__resume": str(tmp_path / "a/checkpoints/step-3")}
    run_ranks(2, fit, tiny(tmp_path / "b", parallel__dp_replicate=2, **muon, **resume))
    one, other = (contents(tmp_path / name / "checkpoints/step-4") for name in "ab")
    moments = [name for name in one if name.startswith("optimizer.")]
    assert any(name.endswith("blocks.0.attn.wq.weight.momentum_buffer") for name in moments)
    assert any(name.endswith("embed.weight.exp_avg") for name in moments)
    for name in moments:
        gap = (one[name] - other[name]).norm() / one[name].norm()
        assert gap < 1e-5, name


WALKS: dict[str, tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]] = {
    "tied and padded": (
        {
            "model__name": "gpt",
            "model__override.n_kv_heads": 4,
            "model__override.vocab_size": 265,
            "model__override.max_seq_len": 32,
            "train__micro_batch": 1,
        },
        [
            (4, {"parallel__tp": 2, "checkpoint__mode": "async"}),
            (4, {}),
            (4, {"parallel__pp": 2, "parallel__cp": 2}),
            (4, {"parallel__tp": 2, "parallel__pp": 2, "parallel__schedule": "ZBVZeroBubble"}),
        ],
    ),
    "shared heads": (
        {"model__override.qk_norm": True},
        [(4, {"parallel__tp": 4}), (1, {}), (2, {"parallel__tp": 2}), (4, {"parallel__tp": 4})],
    ),
}


@pytest.mark.parametrize("name", WALKS)
def test_checkpoints_walk_through_all_layouts(tmp_path: Path, name: str) -> None:
    """Tied weights, a vocabulary that tp pads, two key/value heads over 4, 1 and 2 ranks; the
    optimizer's moments come along."""
    model, walk = WALKS[name]
    whole = tmp_path / "whole"
    run_ranks(1, fit, tiny(whole, train__steps=8, **model))
    found, resume = [], {}
    for i, (world, changes) in enumerate(walk):
        run_dir = tmp_path / str(i)
        # the learning rate depends on the number of steps: stop early by the interval instead
        saves = {"checkpoint__interval": 2, "checkpoint__keep": 0, "checkpoint__last": False}
        run_ranks(world, fit, tiny(run_dir, train__steps=8, **model, **saves, **changes, **resume))
        step = 2 * (i + 1)
        resume = {"checkpoint__resume": str(run_dir / f"checkpoints/step-{step}")}
        found += [row["loss"] for row in rows(run_dir) if step - 2 < row["step"] <= step]
    assert found == pytest.approx(losses(whole), rel=1e-5)


def test_resuming_from_another_run_keeps_both(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(1, fit, tiny(first, train__steps=3))
    before = (first / "metrics.jsonl").read_text()
    run_ranks(1, fit, tiny(second, train__steps=2))
    run_ranks(1, fit, tiny(second, checkpoint__resume=str(first)))
    assert [row["step"] for row in rows(second)] == [4, 5, 6]
    assert (second / "metrics-1.jsonl").exists()
    assert (first / "metrics.jsonl").read_text() == before


def test_fresh_start_in_a_used_directory_keeps_what_is_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_ranks(1, fit, tiny(run_dir, train__steps=2))
    first = (run_dir / "metrics.jsonl").read_text()
    run_ranks(1, fit, tiny(run_dir, train__steps=3))
    assert (run_dir / "metrics-1.jsonl").read_text() == first
    assert (run_dir / "checkpoints-1" / "step-2").is_dir()
    assert len(losses(run_dir)) == 3


def test_resuming_an_older_step_sets_the_abandoned_future_aside(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_ranks(1, fit, tiny(run_dir, checkpoint__interval=1, checkpoint__keep=0))
    older = str(run_dir / "checkpoints/step-2")
    changes = {"checkpoint__interval": 1, "checkpoint__keep": 2, "train__steps": 4}
    run_ranks(1, fit, tiny(run_dir, checkpoint__resume=older, **changes))
    names = {path.name for path in (run_dir / "checkpoints").glob("step-*")}
    assert names == {"step-3", "step-4"}
    assert not list((run_dir / "checkpoints").glob("*/abandoned.json"))  # cleared by the next save


def draw_and_poison(config: RunConfig, at_step: int) -> list[float]:
    """Train, with step `at_step` skipped; returns torch's next random numbers."""
    fit_with_poison(config, (at_step,), 0)
    return torch.rand(2).tolist()


def test_resume_restores_counters_and_random_numbers(tmp_path: Path) -> None:
    run_dir, again = tmp_path / "run", tmp_path / "again"
    (drawn,) = run_ranks(1, draw_and_poison, tiny(run_dir, train__steps=3), 2)
    found = run_ranks(
        1, draw_and_poison, tiny(again, checkpoint__resume=str(run_dir), train__steps=4), 99
    )
    assert found == [drawn]  # training itself draws nothing
    assert rows(again)[0]["skipped"] == 1
    changes = {"train__steps": 4, "train__max_skipped": 2, "checkpoint__resume": str(run_dir)}
    with pytest.raises(AssertionError, match="2 steps in a row were not finite, noticed at step 4"):
        run_ranks(1, draw_and_poison, tiny(tmp_path / "third", **changes), 3)


def test_non_finite_figures_are_null_and_streaks_count_between_logs(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_ranks(1, fit_with_poison, tiny(run_dir), (1,), 0)
    assert rows(run_dir)[1]["loss"] is None
    assert rows(run_dir)[1]["grad_norm"] is None
    config = tiny(tmp_path / "second", metrics__log_interval=6, train__max_skipped=2)
    with pytest.raises(AssertionError, match="2 steps in a row were not finite, noticed at step 6"):
        run_ranks(1, fit_with_poison, config, (1, 2), 0)


def test_validation_between_steps_changes_nothing(tmp_path: Path) -> None:
    plain, validated = tmp_path / "plain", tmp_path / "validated"
    for zero in (2, 3):
        changes = {"parallel__zero": zero, "parallel__dp_replicate": 2}
        run_ranks(4, fit, tiny(plain, **changes))
        run_ranks(4, fit, tiny(validated, train__eval_interval=2, **changes))
        assert losses(plain) == losses(validated)
    steps = [row["step"] for row in rows(validated) if "validation_loss" in row]
    assert steps == [2, 4, 6]


@pytest.mark.parametrize(
    ("changes", "reduced_bytes", "all_reduces", "gathers"),
    [
        ({"parallel__dp_replicate": 2}, 4, 4, 14),
        ({"parallel__dp_replicate": 2, "parallel__zero": 2}, 4, 4, 4),
        ({"parallel__dp_replicate": 2, "parallel__zero": 1}, 4, 4, 4),
        ({"train__global_batch": 4, "parallel__reduce_dtype": "bfloat16"}, 2, 0, 7),
    ],
)
def test_collectives_of_a_step(
    tmp_path: Path, changes: dict, reduced_bytes: int, all_reduces: int, gathers: int
) -> None:
    config = {"debug__collectives": True, "train__steps": 1, "train__micro_batch": 1, **changes}
    run_dir = tmp_path / "run"
    run_ranks(4, fit, tiny(run_dir, train__dtype="bfloat16", **config))
    metadata = json.loads((run_dir / "run.json").read_text())
    shard = metadata["collectives"]["dp_shard"]
    reductions = metadata["micro_batches"] if metadata["reduce"] == "micro_batch" else 1
    scattered = shard["reduce_scatter"]
    assert scattered["count"] == 4 * reductions
    assert scattered["bytes"] == reductions * reduced_bytes * metadata["parameters"]
    assert shard["all_gather"]["count"] == gathers
    replicate = metadata["collectives"].get("dp_replicate", {}).get("all_reduce", {"count": 0})
    assert replicate["count"] == all_reduces  # one a unit, in the last micro-batch only


def test_gradients_that_travel_in_bfloat16_have_the_sums_of_float32(tmp_path: Path) -> None:
    """To the bit with two ranks, whose sums have one order; in half of the bytes. Since torch 2.15
    gradients of norms come in float32 and are rounded before they travel."""
    found, counts = [], []
    for name in ("reduce_scatter", "all_to_all"):
        changes = {"parallel__reduce_by": name, "train__dtype": "bfloat16"}
        run_ranks(2, fit, tiny(tmp_path / name, debug__collectives=True, **changes))
        found.append([(row["loss"], row["grad_norm"]) for row in rows(tmp_path / name)])
        metadata = json.loads((tmp_path / name / "run.json").read_text())
        counts.append(metadata["collectives"]["dp_shard"][name])
    rounded = 0.0 if torch.__version__ < "2.15" else 1e-5
    for row, wanted in zip(*found, strict=True):
        assert row == pytest.approx(wanted, rel=rounded, abs=0)
    summed, sent = counts
    assert (sent["count"], 2 * sent["bytes"]) == (summed["count"], summed["bytes"])


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_copy_engines_take_the_place_of_collectives(tmp_path: Path, model: str) -> None:
    found = {}
    for copies in (False, True):
        changes = {"parallel__reduce_by": "all_to_all", "parallel__copy_engines": copies}
        run_dir = tmp_path / str(copies)
        changes |= {"model__override__ffn_dim": 0} if model == "mixtral" else {}
        config = tiny(run_dir, model__name=model, debug__collectives=True, **changes)
        run_ranks(4, fit, config)
        found[copies] = [(row["loss"], row["grad_norm"]) for row in rows(run_dir)]
        metadata = json.loads((run_dir / "run.json").read_text())
        sent = sum(
            count["bytes"]
            for kinds in metadata["collectives"].values()
            for kind, count in kinds.items()
            if kind in ("all_gather", "all_to_all", "reduce_scatter")
        )  # with copies, names of files
        assert sent < metadata["parameters"] if copies else sent >= 8 * metadata["parameters"]
    assert found[True] == found[False]


def test_collectives_of_tensor_and_pipeline_parallelism(tmp_path: Path) -> None:
    layout = {"parallel__tp": 2, "parallel__pp": 2, "train__steps": 1, "debug__collectives": True}
    run_dir = tmp_path / "run"
    run_ranks(4, fit, tiny(run_dir, **layout))
    metadata = json.loads((run_dir / "run.json").read_text())
    assert metadata["schedule"] == "1F1B"
    assert metadata["stages"] == [["embed", "blocks.0"], ["blocks.1", "norm", "head"]]
    hidden = 2 * 32 // 2 * 32 * 4  # B x T / tp x D in float32, of the first stage
    counts = metadata["collectives"]["pp"]
    header = 8 * (1 + 8 * 8)  # a number of tensors, and 8 numbers of each of at most 8
    assert counts["send"] == {"count": 4 + 1, "bytes": 4 * hidden + header}
    assert counts["recv"] == {"count": 4, "bytes": 4 * hidden}
    assert metadata["collectives"]["tp"]["all_reduce"]["count"] == 1  # the norms' gradients


class _AsksHost(TorchDispatchMode):
    """Counts how often the host reads a value of a tensor, which on a GPU is a wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.times += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def values_read_by_the_host(config: RunConfig) -> int:
    asks, call = _AsksHost(), TrainStep.__call__

    def watched(self: TrainStep, batches: Any, step: int, *others: Any) -> StepResult:
        with asks if step else contextlib.nullcontext():  # the first one makes groups
            return call(self, batches, step, *others)

    TrainStep.__call__ = watched  # type: ignore[method-assign]
    Trainer(config).fit()
    return asks.times


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim__moments": "bfloat16"},
        {"optim__name": "sgd"},
        {"optim__name": "muon"},
        {"faults__on_spike": "skip_data", "faults__spike_window": 2},
        {"parallel__zero": 2, "parallel__reduce_by": "all_to_all", "parallel__copy_engines": True},
        {"float8__recipe": "tensorwise", "float8__all_gather": True, "optim__moments": "bfloat16"},
        {"float8__recipe": "tensorwise", "float8__scaling": "delayed"},
        {**MIXTURE, "parallel__ep": 2, "parallel__dispatcher": "symmetric_memory"},
    ],
    ids=str,
)
def test_a_step_never_waits_for_a_value(tmp_path: Path, changes: dict[str, Any]) -> None:
    shapes = {"model__override__dim": 64, "model__override__ffn_dim": 64, **changes}
    config = tiny(tmp_path / "run", train__steps=3, train__micro_batch=4, **shapes)
    assert run_ranks(2, values_read_by_the_host, config) == [0, 0]


def test_a_longer_run_keeps_its_warm_up_and_says_what_its_rate_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dtron")
    run_dir, schedule = tmp_path / "run", {"schedule__warmup": 0.5, "optim__lr": 1.0}
    run_ranks(1, fit, tiny(run_dir, train__steps=4, **schedule))
    resumed = {"checkpoint__resume": "latest", **schedule}
    preflight(tiny(run_dir, train__steps=4, **resumed), Place(rank=0, local_rank=0, world_size=1))
    assert not caplog.records
    longer = tiny(run_dir, train__steps=20, **resumed)
    preflight(longer, Place(rank=0, local_rank=0, world_size=1))
    (record,) = caplog.records
    rate = learning_rate(4, 20, 1.0, longer.schedule, warmup=2)
    assert "train.steps = 20 (was 4)" in record.getMessage()
    assert f"the learning rate of step 5 is {rate:.3g}" in record.getMessage()
    run_ranks(1, fit, longer)
    rates = [row["lr"] for row in rows(run_dir)]
    assert rates[4] == pytest.approx(rate)
    assert rates[4:] == sorted(rates[4:], reverse=True), "the warm-up was over"
    again = read_metadata(next(run_dir.glob("checkpoints/step-20")))
    assert again.schedule["warmup_steps"] == 2


@pytest.mark.parametrize(
    ("step", "before", "now", "kept"),
    [
        (2, {"train__steps": 4, "schedule__warmup": 0.5}, {"train__steps": 20}, 2),
        (1, {"train__steps": 4, "schedule__warmup": 0.5}, {"train__steps": 20}, 10),
        (1, {"train__steps": 4, "schedule__warmup": 0.5}, {}, 2),
        (3, {"train__steps": 4, "schedule__warmup": 0.5}, {"schedule__warmup": 0.25}, 1),
    ],
    ids=["over", "not over", "rolled back, unchanged", "another warm-up"],
)
def test_which_warm_up_a_resumed_run_has(
    tmp_path: Path, step: int, before: dict[str, Any], now: dict[str, Any], kept: int
) -> None:
    config = tiny(tmp_path, **before)
    own = warmup_steps(config.train.steps, config.schedule)
    metadata = CheckpointMetadata(
        step, 0, 0, 1, 0, {}, {}, {}, schedule=schedule_settings(config, own)
    )
    assert resumed_warmup(tiny(tmp_path, **{**before, **now}), metadata) == kept


def test_a_finished_trunk_goes_on_into_its_decay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """wsd without a decay ends at its peak; the run that goes on from there decays."""
    trunk = {"schedule__name": "wsd", "schedule__decay": 0.0, "optim__lr": 1.0}
    run_ranks(1, fit, tiny(tmp_path / "run", train__steps=2, **trunk))
    longer = tiny(
        tmp_path / "run",
        train__steps=4,
        checkpoint__resume="latest",
        **{**trunk, "schedule__decay": 0.5, "schedule__min_ratio": 0.0},
    )
    preflight(longer, Place(rank=0, local_rank=0, world_size=1))
    assert "the learning rate of step 3 is 0.5;" in caplog.text
    run_ranks(1, fit, longer)
    assert [row["lr"] for row in rows(tmp_path / "run")][2:] == pytest.approx([0.5, 0.0])


class _RoundsScalars(TorchDispatchMode):
    """Where a scalar on the device meets a tensor of a narrower dtype: a GPU rounds it to that."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        both = [x for x in args[:2] if isinstance(x, torch.Tensor) and x.is_floating_point()]
        name = func.name().partition(".")[0].rstrip("_")
        if len(both) == 2 and name in ("aten::mul", "aten::div"):
            (short, _), (tall, _) = sorted(((x, x.dim()) for x in both), key=lambda pair: pair[1])
            if short.dim() == 0 < tall.dim() and short.dtype.itemsize > tall.dtype.itemsize:
                self.found.add("".join(traceback.format_stack()[-12:-1]))
        return func(*args, **(kwargs or {}))


def rounded_scalars(config: RunConfig) -> set[str]:
    with _RoundsScalars() as seen:
        Trainer(config).fit()
    return seen.found


@pytest.mark.parametrize(
    "changes",
    [
        {"train__loss_chunks": 3},
        {"model__name": "gpt", "model__override__dropout": 0.1},
        {**MIXTURE, "model__override__z_loss": 0.1, "model__override__jitter": 0.1},
        {
            "float8__recipe": "tensorwise",
            "model__override__dim": 64,
            "model__override__ffn_dim": 64,
        },
        {
            **{"optim__moments": "bfloat16", "parallel__reduce_dtype": "bfloat16"},
            "train__micro_batch": 8,
        },
    ],
    ids=str,
)
def test_no_factor_is_rounded_to_bfloat16(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny(tmp_path / "run", **{"train__steps": 1, "train__dtype": "bfloat16", **changes})
    (found,) = run_ranks(1, rounded_scalars, config)
    assert not found, "\n".join(found)


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_ranks(1, fit, tiny(run_dir, checkpoint__interval=1, checkpoint__keep=2))
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["latest", "step-5", "step-6"]


def plant_loss(trainer: Trainer, loss: LossFunction) -> None:
    """Another loss in training; validation keeps its own."""
    trainer.run.step.model = replace(trainer.run.step.model, loss=loss)


def fit_with_poison(config: RunConfig, poisoned: tuple[int, ...], rank: int) -> None:
    """Train with one rank's gradients made NaN at some (0-based) steps."""
    trainer = Trainer(config)
    trainer_step = trainer._one_step

    def one_step() -> None:
        hook = None
        if trainer.step in poisoned and trainer.place.rank == rank:
            loss = trainer.model.loss
            plant_loss(trainer, lambda logits, labels: loss(logits, labels) * torch.nan)
            hook = loss
        trainer_step()
        if hook is not None:
            plant_loss(trainer, hook)

    trainer._one_step = one_step  # type: ignore[method-assign]
    trainer.fit()


def test_non_finite_gradients_skip_the_step_on_all_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_ranks(2, fit_with_poison, tiny(run_dir), (2,), 1)
    found = rows(run_dir)
    assert "skipped" not in found[1]
    assert found[2]["skipped"] == found[5]["skipped"] == 1
    assert all(torch.tensor(row["loss"]).isfinite() for row in found[3:6])


def stopped_by_poison(config: RunConfig) -> str:
    with pytest.raises(TrainingError) as error:
        fit_with_poison(config, (1, 2, 3), 0)
    return str(error.value)


def test_too_many_skipped_steps_stop_the_run(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", train__max_skipped=3, checkpoint__interval=1)
    messages = run_ranks(2, stopped_by_poison, config)
    assert all("3 steps in a row were not finite, noticed at step 4" in m for m in messages)
    assert (tmp_path / "run/checkpoints/step-3").is_dir()


def fit_with_buffers(config: RunConfig, most_kept: int = 16) -> tuple[float, list[Tensor]]:
    """On one rank: the capacity at the end, and the parameters."""
    symmetric_dispatch.LEAST, training_step.MOST_KEPT = 1, most_kept
    trainer = Trainer(config)
    trainer.fit()
    dispatcher = trainer.model.applied.dispatcher
    assert isinstance(dispatcher, SymmetricMemory)
    return dispatcher.capacity, [local_part(p).clone() for p in trainer.run.step.parameters]


def slowly_told(self: StopSignal, ours: Any) -> None:
    with contextlib.closing(ours):
        while ours.recv(16):
            pass
        time.sleep(0.2)


def test_no_thread_outlives_what_listens_to_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last reference to a process group would end in it, which aborts an interpreter's end."""
    monkeypatch.setattr(StopSignal, "_listen", slowly_told)
    with StopSignal():
        assert any(thread.name == "signals" for thread in threading.enumerate())
    assert not any(thread.name == "signals" for thread in threading.enumerate())


BOUNDED = {
    **{**MIXTURE, "parallel__dispatcher": "symmetric_memory", "train__steps": 8},
    **{"metrics__log_interval": 4, "train__eval_interval": 4, "checkpoint__interval": 3},
}
"""A run whose steps are looked at when they are logged, validated or saved."""
SHORT = {"train__steps": 4}
SPIKES = {"faults__on_spike": "skip_data", "faults__spike_window": 3}


@pytest.mark.parametrize(
    ("layout", "capacity", "most_kept"),
    [
        ({"parallel__ep": 4}, 1.0, 16),
        ({"parallel__ep": 4}, 1.2, 2),
        ({"parallel__ep": 2, "parallel__pp": 2, "parallel__schedule": "ZBVZeroBubble"}, 1.0, 16),
        (
            {"parallel__ep": 4, "compile__enable": True, "compile__backend": "aot_eager", **SHORT},
            1.0,
            16,
        ),
        ({"parallel__ep": 4, **SPIKES, "model__override__dropout": 0.1}, 1.0, 16),
    ],
)
def test_steps_whose_tokens_do_not_fit_are_repeated(
    tmp_path: Path, layout: dict[str, Any], capacity: float, most_kept: int
) -> None:
    """A run is what it is with buffers for any load: no step is skipped, lost, or taken twice."""
    settings = {**BOUNDED, **layout}
    ample = tiny(tmp_path / "ample", **settings, parallel__ep_capacity=4.0)
    tight = tiny(tmp_path / "tight", **settings, parallel__ep_capacity=capacity)
    wanted = run_ranks(4, fit_with_buffers, ample)
    found = run_ranks(4, fit_with_buffers, tight, most_kept)
    for (grown, parameters), (_, of_ample) in zip(found, wanted, strict=True):
        assert grown > capacity
        torch.testing.assert_close(parameters, of_ample, rtol=0, atol=0)
    assert found[0][0] <= layout["parallel__ep"]
    assert figures(tmp_path / "tight") == figures(tmp_path / "ample")
    assert all(row["skipped"] is None for row in figures(tmp_path / "tight"))


def fit_dropping_once(config: RunConfig) -> list[Tensor]:
    """On one rank: the parameters after a run in which rank 1 records dropped tokens in step 6."""
    trainer = Trainer(config)
    one_step = trainer._one_step

    def dropping() -> None:
        if trainer.step == 5 and trainer.place.rank == 1:
            dispatcher = trainer.model.applied.dispatcher
            assert isinstance(dispatcher, SymmetricMemory)
            dispatcher.record.add(torch.tensor([0]), torch.tensor([2 * RADIX + 1]))
        one_step()

    trainer._one_step = dropping  # type: ignore[method-assign]
    trainer.fit()
    return [local_part(p).clone() for p in trainer.run.step.parameters]


def test_no_step_is_taken_after_one_that_drops(tmp_path: Path) -> None:
    """Otherwise the batch of that step would come after theirs."""
    settings = {**BOUNDED, "parallel__ep": 2}
    ample = tiny(tmp_path / "ample", **settings, parallel__ep_capacity=2.0)
    once = tiny(tmp_path / "once", **settings, parallel__ep_capacity=1.0)
    wanted, found = run_ranks(2, fit_with_buffers, ample), run_ranks(2, fit_dropping_once, once)
    for parameters, (_, of_ample) in zip(found, wanted, strict=True):
        torch.testing.assert_close(parameters, of_ample, rtol=0, atol=0)
    assert figures(tmp_path / "once") == figures(tmp_path / "ample")


def test_a_run_that_is_stopped_before_a_look_repeats_its_steps_first(tmp_path: Path) -> None:
    """Its checkpoint has no step that was not taken, and a run that goes on is the same run."""
    settings = {**BOUNDED, "parallel__ep": 4, "checkpoint__interval": 0}
    settings |= {"metrics__log_interval": 8, "train__eval_interval": 0}
    run_ranks(4, fit, tiny(tmp_path / "whole", **settings, parallel__ep_capacity=4.0))
    tight = tiny(tmp_path / "tight", **settings, parallel__ep_capacity=1.0)
    run_ranks(4, fit_tight_until_signal, tight, 3)
    assert not rows(tmp_path / "tight")
    run_ranks(4, fit, tight)
    whole, end = (figures(tmp_path / run)[-1] for run in ("whole", "tight"))
    assert end == whole


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_one_step_runs(tmp_path: Path, schedule: str) -> None:
    config = tiny(tmp_path / "run", train__steps=1, schedule__name=schedule)
    run_ranks(1, fit, config)
    assert len(losses(tmp_path / "run")) == 1


def test_sampling_and_profile_and_masked_documents(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    changes = {"train__sample_tokens": 3, "metrics__profile_start": 2, "metrics__profile_steps": 1}
    run_ranks(2, fit, tiny(run_dir, data__mask_documents=True, **changes))
    assert {p.name for p in (run_dir / "trace").iterdir()} == {"rank-0.json", "rank-1.json"}


def test_modules_and_micro_batches_are_marked_in_traces_of_the_chosen_ranks(tmp_path: Path) -> None:
    """Backwards from the last block to the first, with recomputed children inside."""
    changes = {"metrics__profile_start": 2, "metrics__profile_ranks": [1], "metrics__nvtx": True}
    changes |= {"train__micro_batch": 1, "recompute__mode": "full", "train__steps": 2}
    run_ranks(2, fit, tiny(tmp_path, **changes))
    (trace,) = (tmp_path / "trace").iterdir()
    assert trace.name == "rank-1.json"
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    marks = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"}

    def begin(name: str) -> float:
        return marks[name][0]

    for i in range(2):
        of = f"micro-batch {i}"
        assert begin(f"forward, {of}") < begin(f"embed forward, {of}")
        assert begin(f"blocks.0 forward, {of}") < begin(f"blocks.1 forward, {of}")
        order = [f"{name} backward, {of}" for name in ("norm", "blocks.1", "blocks.0", "embed")]
        assert sorted(order, key=begin) == order
        assert begin(f"blocks.0 forward, {of}") < begin(f"blocks.0.attn forward, {of}")
        if i:
            assert begin(f"forward, {of}") >= marks[f"embed backward, micro-batch {i - 1}"][1]
    name = "blocks.0.attn forward, micro-batch 1"
    spans = [(e["ts"], e["dur"]) for e in events if e["name"] == name]
    assert len(spans) == 2
    first, last = marks["blocks.0 backward, micro-batch 1"]
    again, seconds = max(spans)
    assert first <= again < again + seconds <= last
    assert {"dtron::optimizer", "dtron::loss"} <= marks.keys()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model__size": "9b"}, ConfigError, "model.size"),
        ({"model__override.dimm": 3}, ConfigError, "did you mean"),
        ({"model__override.n_kv_heads": 3}, ConfigError, "n_kv_heads = 3"),
        ({"model__override.vocab_size": 100}, ConfigError, "257 tokens"),
        ({"model__attention": "cudnn"}, ConfigError, "model.attention"),
        ({"data__paths": ["nowhere.jsonl"]}, ValueError, "nowhere.jsonl"),
        ({"checkpoint__resume": "nowhere"}, CheckpointError, "nowhere"),
        ({"run__dir": "/proc/nowhere"}, ConfigError, "run.dir"),
        ({"train__global_batch": 3}, ConfigError, "train.global_batch = 3"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        Trainer(tiny(tmp_path / "run", **changes))
    assert message in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_ranks(1, fit, tiny(run_dir, train__steps=1))
    changes = {"checkpoint__resume": "latest", "model__override.ffn_dim": 64}
    with pytest.raises(CheckpointError, match="ffn_dim: 48, not 64"):
        Trainer(tiny(run_dir, **changes))
    with pytest.raises(ConfigError, match=r"train\.steps = 1 is already reached"):
        Trainer(tiny(run_dir, train__steps=1, checkpoint__resume=str(run_dir)))
    Trainer(tiny(run_dir, train__steps=1, checkpoint__resume="latest")).fit()  # nothing left to do
    with pytest.raises(CheckpointError, match=r"optim\.name = 'adamw'"):
        Trainer(tiny(run_dir, checkpoint__resume="latest", optim__name="sgd"))


@pytest.mark.parametrize("name", ["index.json", "rank-0.safetensors"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    run_dir = tmp_path / "run"
    run_ranks(1, fit, tiny(run_dir, train__steps=1))
    (run_dir / "checkpoints/step-1" / name).unlink()
    with pytest.raises(AssertionError, match=rf"CheckpointError: .*step-1.*{name}"):
        run_ranks(1, fit, tiny(run_dir, checkpoint__resume="latest"))


def test_latest_without_a_complete_checkpoint_starts_afresh(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints/latest").write_text("step-3\n")
    assert Trainer(tiny(run_dir, checkpoint__resume="latest")).resume.checkpoint is None


def test_half_written_checkpoint_is_never_taken(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_ranks(1, fit, tiny(run_dir, train__steps=2, checkpoint__interval=1))
    (run_dir / "checkpoints/step-2").rename(run_dir / "checkpoints/step-2.partial")
    trainer = Trainer(tiny(run_dir, checkpoint__resume="latest"))
    assert trainer.resume.metadata is not None
    assert trainer.resume.metadata.step == 1


def fit_until_signal(
    config: RunConfig, at_step: int, number: signal.Signals = signal.SIGTERM
) -> None:
    """Train; rank 1 gets a signal once `at_step` steps are done."""
    trainer = Trainer(config)
    one_step = trainer._one_step

    def then_signal() -> None:
        one_step()
        if trainer.step == at_step and trainer.place.rank == 1:
            os.kill(os.getpid(), number)

    trainer._one_step = then_signal  # type: ignore[method-assign]
    trainer.fit()


def test_a_signal_to_one_rank_stops_and_saves_all_at_one_step(tmp_path: Path) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    run_ranks(2, fit, tiny(whole))
    run_ranks(2, fit_until_signal, tiny(run_dir), 2, signal.SIGUSR1)
    assert (run_dir / "checkpoints/latest").read_text() == "step-3\n"  # agreed one step later
    assert len(losses(run_dir)) == 3
    run_ranks(2, fit, tiny(run_dir, checkpoint__resume="latest"))
    assert losses(run_dir) == losses(whole)


def fit_tight_until_signal(config: RunConfig, at_step: int) -> None:
    """The same with buffers that hold no more than `ep_capacity` says."""
    symmetric_dispatch.LEAST = 1
    fit_until_signal(config, at_step)


def fit_signalled_at_the_start(config: RunConfig) -> None:
    """Rank 1 gets a signal while the model is built."""
    trainer = Trainer(config)
    build = trainer._build

    def then_signal() -> None:
        if trainer.place.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        build()

    trainer._build = then_signal  # type: ignore[method-assign]
    trainer.fit()


def test_a_signal_before_training_ends_all_ranks_before_the_first_step(tmp_path: Path) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    run_ranks(2, fit, tiny(whole))
    config = tiny(run_dir, checkpoint__resume="latest", checkpoint__interval=4)
    run_ranks(2, fit_signalled_at_the_start, config)
    assert rows(run_dir) == []
    assert not (run_dir / "checkpoints").exists()
    run_ranks(2, fit_until_signal, config, 3, signal.SIGUSR1)
    run_ranks(2, fit_signalled_at_the_start, config)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["latest", "step-4"]
    run_ranks(2, fit, config)
    assert losses(run_dir) == losses(whole)


# Losses of steps 1, 3 and 6; they change only if the model, its start, the data order or the
# optimizer do, which is then said in the changelog.
GOLDEN = {
    "llama": [5.576038, 5.335429, 5.106265],
    "gpt": [5.582700, 5.243953, 5.013486],
}


@pytest.mark.parametrize("model", GOLDEN)
def test_golden_losses(tmp_path: Path, model: str) -> None:
    heads = {"model__override.n_kv_heads": 4 if model == "gpt" else 2}
    run_ranks(1, fit, tiny(tmp_path / "run", model__name=model, **heads))
    found = losses(tmp_path / "run")
    assert [found[0], found[2], found[5]] == pytest.approx(GOLDEN[model], rel=1e-4)


def fit_on_a_full_disk(config: RunConfig) -> int:
    """From the third row on nothing can be written into the run directory; later it can again."""
    trainer = Trainer(config)
    write = trainer._log

    def log(*given: Any) -> None:
        if trainer.step == 3 and trainer.place.rank == 0:
            shutil.rmtree(trainer.rundir.path)
            trainer.rundir.path.write_text("a file where the folder was")
        if trainer.step == 5 and trainer.place.rank == 0:
            trainer.rundir.path.unlink()
        write(*given)

    trainer._log = log  # type: ignore[method-assign]
    trainer.fit()
    return trainer.step


def test_training_goes_on_without_a_run_directory(tmp_path: Path) -> None:
    """One warning, and rows that could not be written come with the next one that can."""
    config = tiny(
        tmp_path / "run",
        checkpoint__dir=str(tmp_path / "checkpoints"),
        metrics__tensorboard=True,
        metrics__step_times=True,
    )
    assert run_ranks(2, fit_on_a_full_disk, config) == [6, 6]
    assert [row["step"] for row in rows(tmp_path / "run")] == [3, 4, 5, 6]
    assert (tmp_path / "checkpoints/step-6").is_dir()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_has_all_rows_with_total_and_remaining_time(tmp_path: Path, terminal: bool) -> None:
    """A terminal too, above its live line, which has the remaining time."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with contextlib.redirect_stdout(out):
        set_up_logging(Place(0, 0, 1), console)
        writer = MetricsWriter(tmp_path / "rows", NO_TRACKERS, console, 200, 0, True)
        writer.row({"step": 10, "loss": 2.5, "seconds": 0.5})
        sets = {"validation_loss": 1.5, "validation_loss/a": 1.0, "validation_loss/b": 2.0}
        writer.row({"step": 200, "loss": 1.25, **sets, "seconds": 0.5})
        writer.close()
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", out.getvalue())
    lines = [line for line in shown.splitlines() if "training" not in line and "step" in line]
    assert "step  10/200  loss 2.5000" in lines[0]
    assert "0  loss 1.2500  validation loss 1.5000 (a 1.0000, b 2.0000)" in lines[1]
    assert lines[0].endswith("ETA 0:01:35") != terminal
    assert "ETA" not in lines[1]


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """As on a full disk: what does not fit is written in part, then writes fail."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_rows_that_fit_in_part_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, NO_TRACKERS, Console(), 3, 0, True)
    writer.row({"step": 1, "loss": 1.0})
    before = path.read_text()
    with no_file_beyond(len(before) + 5):
        writer.row({"step": 2, "loss": 1.0})
        assert path.read_text() == before
    writer.row({"step": 3, "loss": 1.0})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_a_start_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    with no_file_beyond(100), pytest.raises(ConfigError, match=r"run\.dir = .* cannot be written"):
        Trainer(tiny(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_directory_on_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("nowhere/at/all")
    with pytest.raises(ConfigError, match="it is a link to nowhere/at/all, which does not exist"):
        Trainer(tiny(tmp_path / "run"))
    with pytest.raises(ConfigError, match="/run is a link to nowhere/at/all, which does not exist"):
        Trainer(tiny(tmp_path / "run/deeper"))


def test_a_failing_tensorboard_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fails)
    trackers = Trackers(["tensorboard"], RunConfig(), tmp_path, 0)
    writer = MetricsWriter(tmp_path / "rows", trackers, Console(), 2, 0, True)
    assert trackers.names == ["tensorboard"]
    writer.row({"step": 1, "loss": 1.0})
    writer.row({"step": 2, "loss": 1.0})
    writer.close()
    assert not trackers.names
    assert len((tmp_path / "rows").read_text().splitlines()) == 2
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "No space left on device" in record.getMessage()


def test_fit_is_called_once(tmp_path: Path) -> None:
    trainer = Trainer(tiny(tmp_path / "run", train__steps=1))
    trainer.fit()
    with pytest.raises(TrainingError, match=r"make a new Trainer\(config\) for each call"):
        trainer.fit()


def test_a_checkpoint_folder_that_is_not_mounted_is_no_fresh_start(tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "mounted", tmp_path / "run"
    settings = {"checkpoint__dir": str(folder), "train__steps": 1}
    run_ranks(1, fit, tiny(run_dir, **settings))
    folder.rename(tmp_path / "elsewhere")
    place = Place(rank=0, local_rank=0, world_size=1)
    resumed = tiny(run_dir, **settings, checkpoint__resume="latest")
    with pytest.raises(CheckpointError, match=r"this run wrote .*mounted/step-1; mount or restore"):
        preflight(resumed, place)
    run_ranks(1, fit, tiny(run_dir, **settings))  # afresh, as it says
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="this run wrote"):
        preflight(resumed, place)


def test_a_row_looks_at_the_mount_once_in_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And at once where the directory's device is another one: its file system is gone."""
    looks, device = [], [1]
    monkeypatch.setattr("dtron.run.metrics._device", lambda _: device[0])
    monkeypatch.setattr("dtron.run.metrics.check_mounted", lambda *_: looks.append(_))
    writer = MetricsWriter(tmp_path / "rows", NO_TRACKERS, Console(), 100, 0, True)
    for step in range(50):
        writer.row({"step": step})
    assert len(looks) == 1
    device[0] = 2

    def gone(*_: object) -> None:
        raise OSError("its file system is no longer mounted")

    monkeypatch.setattr("dtron.run.metrics.check_mounted", gone)
    writer.row({"step": 50})
    assert len((tmp_path / "rows").read_text().splitlines()) == 50
    assert "no longer mounted; training continues" in caplog.text
    writer.close()
