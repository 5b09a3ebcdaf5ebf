"""The examples that everyone quotes are planned as they are: their degrees, sizes and bubbles."""

import contextlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtron.cli import commands, main
from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.models import MODELS
from dtron.models.flops import n_parameters
from dtron.plan.feasibility import check
from dtron.plan.hardware import hardware
from dtron.plan.plan import plan
from dtron.plan.report import _ranges
from dtron.plan.run_shape import Resolved
from dtron.run.process import Place
from dtron.setup import preflight
from dtron.setup.rules import reasons, resolve

CONFIGS = Path(__file__).parents[2] / "configs"
BYTES = 1e9
WIDE = (
    *("parallel.tp=2", "parallel.ep=64", "parallel.schedule=Interleaved1F1B"),
    *("parallel.stages_per_rank=4", "parallel.pp_layout=E|(t|)*61|mL"),
    *("float8.recipe=", "compile.enable=false"),
)
"""Words for DeepSeek-V3 with experts over 64 ranks, and 64 stages, one of them empty."""


def planned(name: str, world: int, *overrides: str) -> dict[str, Any]:
    config = RunConfig.load(CONFIGS / f"{name}.toml", overrides)
    return plan(config, world, hardware("h100"))


@pytest.mark.parametrize(
    ("name", "world", "overrides", "degrees"),
    [
        ("llama3_8b", 8, ["parallel.cp=2"], {"cp": 2, "dp_shard": 4}),
        ("llama3_70b", 64, [], {"tp": 4, "pp": 4, "cp": 2, "dp_shard": 2, "stages_per_rank": 2}),
        ("llama3_70b_host", 8, [], {"dp_shard": 8, "zero": 3}),
        ("llama3_405b", 1024, [], {"tp": 8, "pp": 8, "cp": 2, "dp_shard": 8, "stages_per_rank": 4}),
        ("deepseek_v3", 1024, [], {"tp": 1, "pp": 16, "dp_shard": 64, "ep": 8, "edp_shard": 8}),
        ("deepseek_v3", 1024, WIDE, {"tp": 2, "pp": 16, "dp_shard": 32, "ep": 64, "edp_shard": 1}),
        ("gpt3_175b", 1024, [], {"tp": 8, "pp": 16, "dp_shard": 8}),
    ],
)
def test_degrees(name: str, world: int, overrides: Sequence[str], degrees: dict[str, int]) -> None:
    found = planned(name, world, *overrides)
    assert found["legal"], found["reasons"]
    assert {key: found["parallel"][key] for key in degrees} == degrees
    if name == "llama3_405b":
        layers = found["parallel"]["layers_by_stage"]
        assert (layers[0], layers[-1], set(layers[1:-1]), sum(layers)) == (3, 3, {4}, 126)


def test_experts_split_as_tp_are_refused_with_what_fits() -> None:
    found = planned("deepseek_v3", 1024, *WIDE, "parallel.etp=2")
    assert not found["legal"]
    assert "parallel.ep = 64 x parallel.etp = 2 does not divide" in found["reasons"][0]
    assert {"etp": 1} in found["nearest"]
    assert found["memory"] is None


def test_a_batch_that_is_refused_has_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["train.global_batch=10", "train.micro_batch=2"]
    config = RunConfig.load(CONFIGS / "llama3_8b.toml", overrides)
    near = check(config, 4).nearest
    assert {"train.global_batch": 8} in near
    train = config.train.model_copy(update={"global_batch": 8})
    resolve(config.model_copy(update={"train": train}), 4)
    words = ["plan", "--config", str(CONFIGS / "llama3_8b.toml"), "--world-size", "4"]
    assert commands([*words, *overrides]) == 1
    assert "legal: train.global_batch=8" in capsys.readouterr().out


def test_copy_engines_over_several_hosts_are_refused_with_what_fits() -> None:
    """As a run refuses them that finds its ranks on several hosts."""
    copies = ["parallel.copy_engines=true", "train.global_batch=128"]
    found = planned("llama3_8b", 64, *copies)
    assert not found["legal"]
    shared = "64 ranks share parameters, but only 8 of these ranks are in one host of 8 GPUs (h100)"
    assert shared in found["reasons"][0]
    assert {"copy_engines": False} in found["nearest"]
    assert {"dp_shard": -1, "dp_replicate": 8} in found["nearest"]
    assert planned("llama3_8b", 64, *copies, "parallel.dp_replicate=8")["legal"]
    assert planned("llama3_8b", 8, *copies)["legal"]
    assert not planned("llama3_8b", 16, *copies, "parallel.tp=2")["legal"]  # 8 ranks, 4 of a host
    assert planned("llama3_8b", 16, *copies, "parallel.tp=2", "parallel.dp_replicate=2")["legal"]


def test_copy_engines_of_experts_are_refused_too() -> None:
    """Ranks share dense parameters inside a host, and experts with ranks of other ones."""
    shared = ["parallel.copy_engines=true", "parallel.zero=2", "parallel.schedule=1F1B"]
    degrees = ["pp=1", "tp=1", "stages_per_rank=0", "dp_replicate=1", "ep=2", "etp=1", "pp_layout="]
    words = [*shared, *(f"parallel.{each}" for each in degrees), "train.global_batch=16"]
    reasons = planned("deepseek_v3", 16, *words)["reasons"]
    refused = "8 ranks share experts, but only 4 of these ranks are in one host of 8 GPUs (h100)"
    assert any(refused in reason for reason in reasons)


def test_experts_memory_over_several_hosts_is_refused() -> None:
    keys = ["parallel.dispatcher=symmetric_memory", "parallel.ep=64"]
    found = planned("deepseek_v3", 1024, *WIDE, *keys)
    assert len(found["reasons"]) == 1
    shared = "64 ranks share experts, but only 8 of these ranks are in one host of 8 GPUs (h100)"
    assert shared in found["reasons"][0]
    assert {"ep": 8} in found["nearest"]
    assert {"dispatcher": "all_to_all"} in found["nearest"]
    assert planned("deepseek_v3", 1024, *WIDE, *keys[:1], "parallel.ep=8")["legal"]


@pytest.mark.parametrize("dispatcher", ["bounded_all_to_all", "hierarchical"])
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "DualPipeV"])
def test_every_fast_path_at_once_is_legal(dispatcher: str, schedule: str) -> None:
    """DeepSeek-V3 in float8, async TP, a split backward, selective recomputation and compile."""
    words = [f"parallel.dispatcher={dispatcher}", f"parallel.schedule={schedule}"]
    words += ["float8.recipe=tensorwise", "parallel.async_tp=true", "recompute.mode=selective"]
    words += ["compile.enable=true"]
    if schedule == "DualPipeV":  # two stages a rank
        words += ["parallel.pp_layout=", "parallel.stages_per_rank=0"]
    config = RunConfig.load(CONFIGS / "deepseek_v3.toml", [*WIDE, *words])
    assert reasons(config, 1024) == []


def test_the_shipped_layout_of_deepseek_v3_fits_with_the_headroom_of_the_search() -> None:
    found = planned("deepseek_v3", 1024)
    assert found["memory"]["reserved"] < 0.95 * found["memory"]["limit"]
    assert found["time"]["mfu"]["full"] > 0.3


def test_a_dispatcher_with_which_a_run_is_legal_is_named() -> None:
    """Of the fast paths together: float8, async TP, a split backward, recomputation, compile."""
    words = ["parallel.tp=2", "parallel.async_tp=true", "recompute.mode=selective"]
    words.append("parallel.schedule=ZBVZeroBubble")
    found = planned("deepseek_v3", 1024, *words)
    assert len(found["reasons"]) == 1
    assert found["nearest"][0] == {"dispatcher": "symmetric_memory"}
    found = planned("deepseek_v3", 1024, *words, "parallel.dispatcher=symmetric_memory")
    assert found["legal"]
    assert found["time"]


def test_pipeline_ranks_of_a_column_are_listed() -> None:
    assert _ranges([2]) == "2"
    assert _ranges([2, 3, 4, 6, 8, 9]) == "2 ... 4, 6, 8 ... 9"


def test_deepep_over_several_hosts_is_refused() -> None:
    """Four of the experts' eight ranks are on a host, as two tp ranks have the same."""
    words = [*WIDE, "parallel.dispatcher=deepep", "parallel.ep=8"]
    assert planned("deepseek_v3", 1024, *words)["legal"]
    small = replace(hardware("h100"), host=4)
    config = RunConfig.load(CONFIGS / "deepseek_v3.toml", words)
    found = check(config, 1024, small)
    assert len(found.reasons) == 1
    shared = "8 ranks share experts, but only 4 of these ranks are in one host of 4 GPUs"
    assert shared in found.reasons[0]
    assert {"dispatcher": "all_to_all"} in found.nearest
    assert {"ep": 4} in found.nearest


def test_a_plan_says_that_deepep_was_not_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """It is told of runs that need it alone."""
    config = CONFIGS / "deepseek_v3_debug.toml"
    command = ["plan", "--config", str(config), "--world-size", "4"]
    words = ["parallel.ep=2", "train.dtype=bfloat16", "parallel.dispatcher=deepep"]
    messages = "not checked: the package deep_ep"
    for more, times in ((words, 1), (words[:2], 0)):
        commands([*command, *more])
        assert capsys.readouterr().out.count(messages) == times
    assert len(planned("deepseek_v3_debug", 4, *words)["unchecked"]) == 1


def test_a_dry_run_that_passes_has_looked_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(key, value)
    passed = SimpleNamespace(data=SimpleNamespace(train=None), resume=None)
    monkeypatch.setattr("dtron.plan.command.preflight", lambda *_, **__: passed)
    monkeypatch.setattr("dtron.plan.command._rate_of", lambda *_: 1e6)
    words = ["parallel.dispatcher=deepep", "parallel.ep=2", "train.dtype=bfloat16"]
    config = str(CONFIGS / "deepseek_v3_debug.toml")
    assert main(["--config", config, "--dry-run", *words]) == 0
    shown = capsys.readouterr().out
    assert "all checks of the run's start passed" in shown
    assert "not checked" not in shown


def test_gpt3_on_1024() -> None:
    """Narayanan et al. 2021: 175 B over 8 x 16 ranks, and 7.5 bytes a parameter of state."""
    found = planned("gpt3_175b", 1024)["memory"]
    assert found["parameters_per_rank"] / BYTES == pytest.approx(175 / 128, rel=0.005)
    assert found["state_per_rank"] / BYTES == pytest.approx(10.25, rel=0.005)
    each = found["state_per_rank"] / found["parameters_per_rank"]
    assert each == pytest.approx(2 + 4 + 12 / 8, rel=1e-4)


def test_a_start_names_all_reasons_as_a_plan_does() -> None:
    config = RunConfig.load(CONFIGS / "llama3_8b.toml", ["parallel.tp=3", "parallel.cp=2"])
    legality = check(config, 8)
    assert len(legality.reasons) == 4
    with pytest.raises(ValueError, match="do not multiply") as error:
        resolve(config, 8)
    assert str(error.value).splitlines() == list(legality.reasons)
    for change in legality.nearest:
        parallel = config.parallel.model_copy(update=change)
        resolve(config.model_copy(update={"parallel": parallel}), 8)
    assert legality.nearest


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All checks of a start, the plan, and nothing that a run leaves."""
    config = str(CONFIGS / "quickstart.toml")
    keys = [f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert main(["--config", config, "--dry-run", *keys]) == 0
    shown = capsys.readouterr().out
    assert "no time is predicted" in shown  # it computes in float32
    if not torch.cuda.is_available():
        assert "planned for h100, the default row; --hardware NAME selects another" in shown
    assert main(["--config", config, "--dry-run", *keys, "train.dtype=bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert "tok/s/GPU" in shown
    assert re.search(r"data: [\d,]+ tokens/s are read here; each .* needs [\d,]+", shown)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    capsys.readouterr()
    broken = ["parallel.tp=3", "recompute.every=2"]
    assert main(["--config", config, "--dry-run", *keys, *broken]) == 1
    shown = capsys.readouterr().out
    assert shown.count("not legal:") > 1
    # A model of a few MiB is told in MiB, and the row is the one that is asked for.
    assert main(["--config", config, "--dry-run", *keys, "--hardware", "b200"]) == 0
    shown = capsys.readouterr().out
    assert "on b200: fits; with PYTORCH_ALLOC_CONF=expandable_segments:True" in shown
    assert "the default row" not in shown
    assert "MiB by class" in shown
    assert main(["--config", config, "--hardware", "b200"]) == 1
    assert "no effect without --dry-run" in capsys.readouterr().err


def test_a_model_too_large_for_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes a parameter: refused over what is available, a warning from half of it on."""
    config = RunConfig.load(CONFIGS / "llama3_8b.toml", ["parallel.zero=3"])
    place = Place(rank=0, local_rank=0, world_size=1)
    model = Resolved.model_of(config)
    needed = 16 * n_parameters(model)
    for free, refused, warned in (
        (needed - 1, True, False),
        (needed * 2 - 2, False, True),
        (needed * 2, False, False),
    ):
        found = (needed * 3, free)
        monkeypatch.setattr("dtron.faults.memory.host_memory", lambda found=found: found)
        warnings: list[str] = []
        # A run that logged in this process before has taken dtron's log away from its parents.
        monkeypatch.setattr(preflight.log, "warning", lambda form, *_, to=warnings: to.append(form))
        if refused:
            with pytest.raises(ConfigError, match=r"119\.7 GiB of its memory.*dtron plan"):
                preflight._check_memory(config, model, place)
        else:
            preflight._check_memory(config, model, place)
        assert any("are available" in form for form in warnings) == warned


def test_json_of_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(CONFIGS / "llama3_405b.toml"), "--world-size", "8", "--json"]
    one = ["parallel.tp=8", "parallel.pp=1", "parallel.cp=1", "parallel.schedule=1F1B"]
    none = ["parallel.stages_per_rank=0", "parallel.pp_layout=", "train.global_batch=8"]
    assert commands(["plan", *arguments, *one, *none]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["legal"]
    assert found["memory"]["reserved"] > found["memory"]["limit"]
    assert not found["memory"]["fits"]
    assert found["parallel"]["tp"] == 8


DRAWN: dict[str, list[Any]] = {
    **{"tp": [1, 2, 3, 8, 16], "pp": [1, 2, 3, 8], "cp": [1, 2, 3, 8], "dp_replicate": [1, 2, 3]},
    **{"ep": [1, 2, 3, 8], "etp": [1, 2, 3], "sequence_parallel": [True, False]},
    "cp_method": ["ring", "all_gather", "ulysses", "hierarchical"],
    "schedule": ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"],
    "dispatcher": ["all_to_all", "symmetric_memory"],
}
"""Values of [parallel], of which most do not fit each other."""


@pytest.mark.parametrize("name", MODELS)
def test_reasons_of_any_layout_are_told(name: str) -> None:
    """Each rule holds whatever the others refuse; none of them divides by what does not divide."""
    draw, refused = random.Random(name), 0
    for _ in range(120):
        parallel = {key: draw.choice(values) for key, values in DRAWN.items()}
        model = {"name": name, "size": draw.choice(list(MODELS[name].sizes))}
        train = {"seq_len": draw.choice([7, 64, 4096]), "global_batch": draw.choice([7, 64])}
        with contextlib.suppress(ConfigError):  # of the file, before a model is known
            settings = RunConfig.of({"model": model, "parallel": parallel, "train": train})
            refused += bool(reasons(settings, draw.choice([1, 6, 16, 96, 1024])))
    assert refused


def test_tp_above_the_key_heads_with_cp_is_legal() -> None:
    """It once ended in a ZeroDivisionError."""
    keys = ["parallel.tp=16", "parallel.pp=2", "parallel.cp=2", "parallel.cp_method=ulysses"]
    config = RunConfig.load(CONFIGS / "llama3_70b.toml", keys)
    assert reasons(config, 64) == []


def test_predictions_in_a_stage_of_their_own_are_refused_with_what_fits() -> None:
    """A layout of DeepSeek-V3 for 16 pipeline ranks; one with as many stages is legal."""
    keys = ["model.size=671b", "parallel.pp=16", "parallel.schedule=Interleaved1F1B"]
    keys += ["parallel.tp=1", "parallel.ep=8", "parallel.stages_per_rank=2"]
    keys += ["train.global_batch=256"]  # torch lists an order in quadratic time

    def messages(layout: str) -> list[str]:
        chosen = [*keys, f"parallel.pp_layout={layout}"]
        return reasons(RunConfig.load(CONFIGS / "deepseek_v3.toml", chosen), 128)

    (reason,) = messages("Et*3|(tt|)*29,m|L")
    assert "has m in another stage than L" in reason
    assert not messages("Et*3|(tt|)*29|mL")
