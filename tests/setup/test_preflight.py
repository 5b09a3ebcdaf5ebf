"""What the model, the batch or the machine do not fit is refused, with what they do fit."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dtron import __version__
from dtron.checkpoint.metadata import CheckpointMetadata, check_model
from dtron.cli import commands
from dtron.config import RunConfig
from dtron.errors import CheckpointError, ConfigError
from dtron.plan.hardware import hardware
from dtron.plan.plan import plan
from dtron.plan.report import print_plan
from dtron.run.process import Place
from dtron.setup import rules
from dtron.setup.preflight import preflight
from dtron.setup.resume_checks import (
    _UPDATES,
    _defaults,
    model_metadata,
    resume_settings,
    warn_of_changes,
)
from dtron.setup.rules import (
    MachineCandidate,
    all_broken,
    check_layout,
    host_warnings,
    reasons,
    setting_warnings,
)

BASE = {"train": {"global_batch": 8, "seq_len": 64}, "model": {"name": "llama", "size": "debug"}}


def config(world: int = 4, **parallel: object) -> RunConfig:
    return RunConfig.of({**BASE, "parallel": parallel})


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        ({"tp": 3}, 3, "does not divide model.n_heads = 8; use 1, 2, 4, 8"),
        ({"pp": 2, "schedule": "1F1b"}, 2, "did you mean 1F1B"),
        ({"pp": 2, "schedule": "zbv"}, 2, "did you mean ZBVZeroBubble"),
        ({"pp": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 3}, 2, "takes exactly 2"),
        ({"pp": 4, "schedule": "DualPipeV", "dp_shard": 2}, 8, "the nearest is 8"),
        ({"pp": 8, "schedule": "Interleaved1F1B"}, 8, "fills 1 to 10"),
        ({"pp": 2, "pp_layout": [4, 5]}, 2, "parallel.pp_layout"),
        ({"pp": 2, "pp_layout": "Ett|L"}, 2, "layers (t)"),
        ({"pp": 2, "schedule": "missing.csv"}, 2, "missing.csv"),
        ({"tp": 2, "async_tp": True, "sequence_parallel": False}, 2, "set it to true"),
        ({"pp": 2, "defer_head": 1, "schedule": "ZBVZeroBubble"}, 2, "has no effect"),
        ({"pp": 2, "reduce_dtype": "bfloat16", "schedule": "ZBVZeroBubble"}, 2, 'use "float32"'),
        ({"pp": 2, "reduce_by": "all_to_all", "schedule": "ZBVZeroBubble"}, 4, "reduce_scatter"),
        ({"pp": 2, "pp_layout": [["blocks.0"]]}, 2, "has 1 stages"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(parallel: dict, world: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_layout(config(**parallel), world)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "tp", "cp", "message"),
    [
        ({"n_heads": 12, "dim": 96}, 6, 1, "4 nor splits each head of 8 features evenly; use 1"),
        ({"n_kv_heads": 1, "head_dim": 4}, 8, 1, "each head of 4 features evenly; use 1, 2, 4"),
        ({"n_kv_heads": 1}, 8, 2, ""),
        ({"n_kv_heads": 2}, 4, 2, ""),
        ({}, 8, 2, "but each has 1 query and 1 key/value heads; use 1 ranks"),
    ],
)
def test_more_tp_ranks_than_key_value_heads(model: dict, tp: int, cp: int, message: str) -> None:
    """Ranks that share a head cut it evenly; the message names the degrees that do."""
    parallel = {"tp": tp, "cp": cp, "cp_method": "ulysses" if not model and cp > 1 else "ring"}
    train = {"global_batch": 8, "seq_len": 48}
    chosen = {**BASE["model"], "override": model}
    run = RunConfig.of({"train": train, "model": chosen, "parallel": parallel})
    found = reasons(run, tp * cp)
    assert len(found) == bool(message)
    assert message in "".join(found)


@pytest.mark.parametrize(
    ("chunks", "parallel", "message"),
    [
        (129, {}, "train.loss_chunks = 129 is more than the 128 tokens of a micro-batch"),
        (2, {"pp": 2, "defer_head": 1}, "use parallel.defer_head = 0 or train.loss_chunks = 1"),
    ],
)
def test_chunks_of_the_loss_that_cannot_be(chunks: int, parallel: dict, message: str) -> None:
    train = {**BASE["train"], "micro_batch": 2, "loss_chunks": chunks}
    with pytest.raises(ConfigError) as error:
        check_layout(RunConfig.of({**BASE, "train": train, "parallel": parallel}), 2)
    assert message in str(error.value)


# Settings, and the whole message: docs/context.md tells some of them.
CONTEXTS: dict[str, tuple[dict[str, object], str]] = {
    "length": (
        {"cp": 4, "seq_len": 60},
        "parallel.cp = 4 cuts train.seq_len = 60 into 2 x cp chunks; use a multiple of 8 such as "
        "56",
    ),
    "short": (
        {"cp": 4, "seq_len": 6},
        "parallel.cp = 4 cuts train.seq_len = 6 into 2 x cp chunks; use a multiple of 8 such as 8",
    ),
    "length over tp": (
        {"cp": 2, "tp": 4, "seq_len": 68},
        "parallel.cp = 2 cuts train.seq_len = 68 into 2 x cp chunks; use a multiple of 8 such as "
        "64",
    ),
    "heads": (
        {"cp": 16, "cp_method": "ulysses"},
        "parallel.cp_method = 'ulysses' splits heads over 16 ranks, but each has 8 query and 4 "
        'key/value heads; use 1, 2, 4, 8 ranks, or "ring"',
    ),
    "heads of a tp rank": (
        {"cp": 8, "tp": 2, "cp_method": ["ring"] * 7 + ["ulysses"]},
        "parallel.cp_method = 'ulysses' splits heads over 8 ranks, but each has 4 query and 2 "
        'key/value heads; use 1, 2, 4 ranks, or "ring"',
    ),
    "heads inside": (
        {"cp": 6, "cp_method": "hierarchical", "seq_len": 72},
        "parallel.cp_method = 'hierarchical' splits heads over 3 ranks, but each has 8 query and 4 "
        'key/value heads; use 1, 2, 4, 8 ranks, or "ring"',
    ),
    "prime": (
        {"cp": 2, "cp_method": "hierarchical"},
        'parallel.cp_method = "hierarchical" needs a parallel.cp that is a product of two numbers, '
        'such as 4; 2 is not: use "ring" or "ulysses"',
    ),
    "inner": (
        {"cp": 4, "cp_method": "hierarchical", "cp_inner": 3},
        "parallel.cp_inner = 3 is no proper divisor of parallel.cp = 4; use 2",
    ),
    "all inside": (
        {"cp": 8, "cp_method": "hierarchical", "cp_inner": 8},
        "parallel.cp_inner = 8 is no proper divisor of parallel.cp = 8; use 2, 4",
    ),
    "layers": (
        {"cp": 4, "cp_method": ["ring", "ulysses"]},
        "parallel.cp_method has 2 entries for the 8 layers of the model; give one method per "
        "layer, or one for all layers",
    ),
    "dropout": (
        {"cp": 4, "attention_dropout": 0.1},
        "model.override.attention_dropout = 0.1 with parallel.cp = 4: no rank computes all "
        "attention weights; use 0.0",
    ),
    "no method": (
        {"cp_method": "ulysses"},
        "parallel.cp_method = 'ulysses' has no effect without parallel.cp > 1",
    ),
    "no inner": (
        {"cp": 4, "cp_inner": 2},
        'parallel.cp_inner = 2 has no effect without parallel.cp_method = "hierarchical"',
    ),
}
TOLD = ("length", "heads", "prime", "inner", "layers", "dropout")


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_that_do_not_fit_are_refused(name: str) -> None:
    keys, message = CONTEXTS[name]
    override = {key: keys[key] for key in ("attention_dropout",) if key in keys}
    parallel = {key: value for key, value in keys.items() if key not in (*override, "seq_len")}
    sections = {
        "model": {**BASE["model"], "override": override},
        "train": {"global_batch": 8, "seq_len": keys.get("seq_len", 64)},
        "parallel": {"dp_shard": 1, **parallel},
    }
    run = RunConfig.of(sections)
    with pytest.raises(ConfigError) as error:
        check_layout(run, run.parallel.cp * run.parallel.tp)
    assert str(error.value) == message
    page = Path(__file__).parents[2] / "docs" / "context.md"
    assert (message in page.read_text().splitlines()) == (name in TOLD)


def test_more_recomputed_blocks_than_there_are_is_refused() -> None:
    run = RunConfig.of({**BASE, "recompute": {"mode": "full", "first": 9}})
    with pytest.raises(ConfigError) as error:
        check_layout(run, 1)
    assert str(error.value) == (
        "recompute.first = 9: the model has only 8 blocks; leave it out to recompute all blocks"
    )


@pytest.mark.parametrize(
    ("name", "mode", "modules", "message"),
    [
        ("llama", "full", ["mlp"], "names 'mlp', which no block of the model has; use attn, ffn"),
        ("mixtral", "full", ["ffn"], "'ffn', which no block of the model has; use attn, ffn.e"),
        ("deepseek_v3", "full", ["attn", "ffn", "ffn.experts", "ffn.shared"], ""),
        ("llama", "attention", ["ffn"], "needs attn in recompute.modules"),
    ],
)
def test_modules_that_no_block_has_are_refused(
    name: str, mode: str, modules: list[str], message: str
) -> None:
    sections = {**BASE, "model": {"name": name, "size": "debug"}}
    run = RunConfig.of({**sections, "recompute": {"mode": mode, "modules": modules}})
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        check_layout(run, 1)


@pytest.mark.parametrize(
    ("attention", "keys", "message"),
    [
        ("cudnn", {"cp_method": "all_gather"}, "does not support more keys than queries"),
        ("cudnn", {"mask_documents": True}, "does not support document masks with parallel.cp"),
        *[
            ("cudnn", {"cp_method": method, "window": 16}, "does not support model.override.window")
            for method in ("ring", "ulysses")
        ],
        ("flash", {"softcap": 2.0}, "does not support model.override.softcap = 2.0"),
        ("sdpa", {}, "returns no log-sum-exp, which parallel.cp needs"),
        ("flex", {}, "returns no log-sum-exp, which parallel.cp needs"),
        ("flash_attn", {}, "returns no log-sum-exp, which parallel.cp needs"),
    ],
)
def test_attention_without_what_contexts_need(attention: str, keys: dict, message: str) -> None:
    override = {key: keys[key] for key in ("window", "softcap") if key in keys}
    data = {key: keys[key] for key in ("mask_documents",) if key in keys}
    parallel = {key: keys[key] for key in ("cp_method",) if key in keys}
    sections = {
        "model": {**BASE["model"], "override": override, "attention": attention},
        "train": BASE["train"],
        "data": data,
        "parallel": {"cp": 2, **parallel},
    }
    with pytest.raises(ConfigError) as error:
        preflight(RunConfig.of(sections), Place(rank=0, local_rank=0, world_size=2))
    assert f"model.attention = {attention} {message}" in str(error.value)
    assert "available here: auto" in str(error.value)


def test_a_schedule_of_ones_own_for_another_number_of_micro_batches(tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(ConfigError, match=r"mine.csv holds 2 micro-batches, but a step has 8"):
        check_layout(config(pp=2, schedule=str(mine)), 2)


def test_sequences_that_tp_does_not_divide() -> None:
    odd = RunConfig.of({**BASE, "train": {"global_batch": 8, "seq_len": 63}, "parallel": {"tp": 2}})
    with pytest.raises(ConfigError, match=r"such as 62, or parallel.sequence_parallel = false"):
        check_layout(odd, 2)
    whole = odd.model_copy(
        update={"parallel": odd.parallel.model_copy(update={"sequence_parallel": False})}
    )
    check_layout(whole, 2)


@pytest.mark.parametrize("keys", [{"tp": 2, "async_tp": True}, {"high_priority": ["dp_shard"]}])
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_what_needs_gpus(keys: dict) -> None:
    place = Place(rank=0, local_rank=0, world_size=2)
    with pytest.raises(ConfigError, match="needs GPUs; this machine has none"):
        preflight(config(**keys), place)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_offload_needs_gpus() -> None:
    run = RunConfig.of({**BASE, "recompute": {"offload": True}})
    with pytest.raises(ConfigError, match=r"recompute.offload = True needs GPUs; this machine has"):
        preflight(run, Place(rank=0, local_rank=0, world_size=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_marks_of_modules_need_gpus_or_a_profile() -> None:
    place = Place(rank=0, local_rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"metrics.nvtx = true has no effect: .* no GPUs"):
        preflight(RunConfig.of({**BASE, "metrics": {"nvtx": True}}), place)
    preflight(RunConfig.of({**BASE, "metrics": {"nvtx": True, "profile_start": 2}}), place)


def test_no_cuda_graph_where_masks_have_other_sizes() -> None:
    """Masks of kernels for windows have the bounds of documents, a dense mask has not."""
    errors = {}
    for window in (0, 16):
        config = RunConfig.of(
            {
                **BASE,
                "model": {**BASE["model"], "override": {"window": window}},
                "data": {"mask_documents": True},
                "compile": {"cuda_graphs": "step"},
            }
        )
        errors[window] = "\n".join(all_broken(MachineCandidate(config, 1)))
    assert "size of the mask, differs" in errors[16]
    assert "size of the mask, differs" not in errors[0]


def test_a_start_names_all_that_is_wrong_at_once() -> None:
    """Of ranks, settings, the machine, the model and float8: once each, a line each."""
    sections = {
        "model": {**BASE["model"], "override": {"window": 16}, "attention": "sdpa"},
        "train": {"global_batch": 7, "seq_len": 60, "loss_chunks": 99},
        "parallel": {"cp": 4, "dp_shard": 2},
        "recompute": {"every": 2},
        "float8": {"recipe": "rowwise", "scaling": "delayed"},
    }
    with pytest.raises(ConfigError) as error:
        preflight(RunConfig.of(sections), Place(rank=0, local_rank=0, world_size=8))
    lines = str(error.value).splitlines()
    wanted = [
        "train.global_batch = 7 is not a multiple of 2",
        "train.loss_chunks = 99 is more than the 15 tokens",
        "recompute.every = 2 has no effect",
        "model.attention = sdpa",
        "parallel.cp = 4 cuts train.seq_len = 60",
        "needs a multiple of 16 tokens per micro-batch, not 15",
        "delayed scaling needs per-tensor scales",
    ]
    assert len(lines) == len(wanted), lines
    for line, message in zip(lines, wanted, strict=True):
        assert message in line


@pytest.mark.parametrize(
    ("recipe", "more", "refused"),
    [
        ("rowwise", {"train": {"loss_chunks": 4}}, True),
        ("rowwise", {"float8": {"output": True}, "model": {"override": {"vocab_size": 256}}}, True),
        ("rowwise", {}, False),  # the head is left
        ("rowwise", {"train": {"loss_chunks": 4}, "float8": {"skip_first": 1}}, False),
        ("rowwise", {"train": {"loss_chunks": 4}, "model": {"name": "mixtral"}}, False),
        (
            "rowwise",
            {
                "train": {"loss_chunks": 4},
                "model": {"name": "mixtral"},
                "float8": {"experts": True},
            },
            True,
        ),
        ("rowwise_with_gw_hp", {"train": {"loss_chunks": 4}}, False),
    ],
)
def test_sums_in_matmuls_need_a_matmul_that_can_add(
    recipe: str, more: dict[str, dict[str, object]], refused: bool
) -> None:
    sections: dict[str, dict[str, object]] = {
        "model": {"name": "llama", "size": "debug"},
        "train": {"micro_batch": 1, "global_batch": 8, "dtype": "bfloat16", "seq_len": 64},
        "parallel": {"dp_shard": 2, "zero": 1, "accumulate_in_matmul": True},
        "float8": {"recipe": recipe},
    }
    merged = {name: {**table, **more.get(name, {})} for name, table in sections.items()}
    found = rules.reasons(RunConfig.of(merged), 2)
    assert [line[:48] for line in found] == refused * [
        "parallel.accumulate_in_matmul has no effect: all"
    ]


def test_a_file_in_place_of_the_run_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("")
    run = RunConfig.of({**BASE, "run": {"dir": str(path)}})
    with pytest.raises(ConfigError, match=r"another run\.dir") as error:
        preflight(run, Place(rank=0, local_rank=0, world_size=1))
    assert str(error.value).count(str(path)) == 1


def test_the_head_weighs_as_it_multiplies() -> None:
    large = RunConfig.of(
        {
            "model": {"name": "llama", "size": "8b"},
            "train": {"global_batch": 8, "seq_len": 8192},
            "parallel": {"pp": 2, "schedule": "ZBVZeroBubble"},
        }
    )
    _, layout = check_layout(large, 2)
    assert layout is not None
    assert [sum(name.startswith("blocks") for name in stage) for stage in layout.stages] == [
        9,
        8,
        9,
        6,
    ]


def test_a_checkpoint_that_is_older_than_a_field_of_the_model() -> None:
    """It was made with what is the default now."""
    run = config(tp=1)
    wanted = model_metadata(run, check_layout(run, 4)[0])
    saved = {key: value for key, value in wanted.items() if key != "rope_scaling"}
    check_model(Path("step-1"), {**_defaults(), **saved}, wanted)
    with pytest.raises(CheckpointError, match="rope_scaling: 'yarn', not 'llama3'"):
        check_model(Path("step-1"), {**saved, "rope_scaling": "yarn"}, wanted)


@pytest.mark.parametrize(
    ("parallel", "world", "host", "messages"),
    [
        ({"tp": 16}, 32, 8, "parallel.tp = 16 spans hosts of 8 ranks"),
        ({"tp": 16}, 32, 8, "use parallel.tp = 8, and parallel.pp, dp_shard or dp_replicate"),
        ({"tp": 4}, 12, 6, "use parallel.tp = 2, and"),
        ({"tp": 5}, 10, 8, "use parallel.tp = 1, and"),
        ({"etp": 16}, 16, 8, "parallel.etp = 16 spans hosts of 8 ranks"),
        (
            {"tp": 4, "cp": 4, "cp_method": "ulysses"},
            16,
            8,
            "parallel.cp = 4 x parallel.tp = 4 spans hosts of 8 ranks: collectives of every layer "
            'cross the network; use parallel.cp = 2 or parallel.cp_method = "ring"',
        ),
        (
            {"tp": 4, "cp": 16, "cp_method": "hierarchical"},
            64,
            8,
            'use parallel.cp_inner = 2 or parallel.cp_method = "ring"',
        ),
    ],
)
def test_axes_that_cross_hosts_are_reported(
    parallel: dict, world: int, host: int, messages: str
) -> None:
    (found,) = host_warnings(config(**parallel), world, host)
    assert messages in found


@pytest.mark.parametrize(
    ("parallel", "world", "host"),
    [
        ({"tp": 16}, 16, 16),  # one host has all ranks
        ({"tp": 8}, 64, 8),
        ({"cp": 16}, 64, 8),  # a ring hides its transfers
        ({"cp": 16, "cp_method": "all_gather"}, 64, 8),
        ({"cp": 16, "cp_method": "hierarchical", "cp_inner": 8}, 64, 8),
        ({"ep": 64}, 64, 8),
        ({"pp": 16, "dp_replicate": 4}, 64, 8),
    ],
)
def test_axes_that_may_cross_hosts_are_not_reported(parallel: dict, world: int, host: int) -> None:
    assert not list(host_warnings(config(**parallel), world, host))


def test_a_start_and_a_plan_report_tp_across_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(
        "dtron.setup.preflight.log.warning", lambda form, *rest: messages.append(form % rest)
    )
    start = config(tp=4)
    start = start.model_copy(
        update={
            "run": start.run.model_copy(update={"dir": str(tmp_path / "run")}),
            "data": start.data.model_copy(update={"cache_dir": str(tmp_path / "cache")}),
        }
    )
    preflight(start, Place(rank=0, local_rank=0, world_size=4, local_world_size=2))
    assert [line for line in messages if "parallel.tp = 4 spans hosts of 2 ranks" in line]
    planned = plan(start, 4, replace(hardware("h100"), host=2, domain=2))
    assert "use parallel.tp = 2" in planned["warnings"][0]
    shown = Console(width=200, file=io.StringIO(), record=True)
    print_plan(shown, planned)
    assert "warning: parallel.tp = 4 spans hosts of 2 ranks" in shown.export_text()


@pytest.mark.parametrize("key", ["dir", "fast_dir"])
@pytest.mark.parametrize("below", ["", "/deep/er"])
def test_a_file_in_the_place_of_checkpoints_is_refused_at_a_start(
    tmp_path: Path, key: str, below: str
) -> None:
    """Or a run trains until its first checkpoint."""
    file = tmp_path / "file"
    file.write_text("x")
    data = {"cache_dir": str(tmp_path / "cache")}
    checkpoint = {key: f"{file}{below}", "interval": 2, "fast_interval": 1 if key != "dir" else 0}
    run = {"dir": str(tmp_path / "run")}
    config = RunConfig.of({**BASE, "data": data, "checkpoint": checkpoint, "run": run})
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key} = .*file is a file; set another"):
        preflight(config, Place(rank=0, local_rank=0, world_size=1))


@pytest.mark.parametrize("key", ["dir", "fast_dir"])
@pytest.mark.parametrize("below", ["", "/deep/er"])
def test_a_dangling_link_in_the_place_of_checkpoints_is_refused_at_a_start(
    tmp_path: Path, key: str, below: str
) -> None:
    """Or the first save ends with "File exists"."""
    (tmp_path / "link").symlink_to("nowhere")
    data = {"cache_dir": str(tmp_path / "cache")}
    folder = f"{tmp_path}/link{below}"
    checkpoint = {key: folder, "interval": 2, "fast_interval": 1 if key != "dir" else 0}
    run = {"dir": str(tmp_path / "run")}
    config = RunConfig.of({**BASE, "data": data, "checkpoint": checkpoint, "run": run})
    with pytest.raises(ConfigError) as error:
        preflight(config, Place(rank=0, local_rank=0, world_size=1))
    assert str(error.value) == (
        f"checkpoint.{key} = '{folder}': {tmp_path}/link is a link to nowhere, which does not "
        "exist; make or mount it, or set another folder"
    )


def test_the_version_and_help_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--version", "version"):
        assert commands([word]) == 0
        assert capsys.readouterr().out == f"dtron {__version__}\n"
    assert commands(["help"]) == 0
    assert "usage: dtron COMMAND" in capsys.readouterr().out


def test_settings_without_effect_or_with_another_one_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a dispatcher and a torch that are known only at the start."""
    experts = {"ep": 2, "ep_capacity": 3.0}
    (found,) = setting_warnings(config(**experts))
    assert found == (
        'parallel.ep_capacity = 3.0 has no effect: parallel.dispatcher is "all_to_all"'
    )
    assert not list(setting_warnings(config(**experts, dispatcher="symmetric_memory")))
    sources = [{"name": name, "paths": ["x"], "weight": [1, 2, 3]} for name in "ab"]
    data = {"mixture": sources, "mixture_steps": [99, 100]}
    (found,) = setting_warnings(RunConfig.of({"data": data, "train": {"steps": 100}}))
    assert found.startswith("data.mixture_steps: the run ends with step 100, so that the weights a")
    assert found.endswith("after step 100 are not used")
    exchanged = RunConfig.of(
        {"parallel": {"reduce_by": "all_to_all"}, "train": {"dtype": "bfloat16"}}
    )
    for version, told in (((2, 13), 0), ((2, 15), 1)):
        monkeypatch.setattr(rules, "release", lambda _, version=version: version)
        assert len(list(setting_warnings(exchanged))) == told


def test_a_resume_names_all_settings_that_change_updates(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Settings that only change the order of sums are not among them, nor what an older checkpoint
    does not say."""
    before = RunConfig()
    saved = CheckpointMetadata(1, 0, 0, 1, 0, resume_settings(before), {}, {})
    changes = {
        "optim": {"beta1": 0.8, "weight_decay": 0.0},
        "train": {"global_batch": 16, "max_grad_norm": 2.0, "micro_batch": 2},
        "float8": {"recipe": "rowwise"},
    }
    warn_of_changes(Path("step-1"), RunConfig.of(changes), saved)
    found = [record.getMessage() for record in caplog.records]
    keys = "optim.beta1 optim.weight_decay train.global_batch train.max_grad_norm float8.recipe"
    assert [line.split(" = ")[0] for line in found] == keys.split()
    assert "train.global_batch = 16, but step-1 was made with 8: updates from here on" in found[2]
    caplog.clear()
    settings = resume_settings(before)
    older = {key: value for key, value in settings.items() if key not in _UPDATES}
    warn_of_changes(Path("step-1"), RunConfig.of(changes), replace(saved, settings=older))
    assert not caplog.records


def test_bfloat16_on_a_cpu_is_one_warning() -> None:
    (line,) = rules.cpu_warnings(RunConfig(), torch.device("cpu"))
    assert line.endswith("set train.dtype=float32")
    assert not list(rules.cpu_warnings(RunConfig(), torch.device("cuda")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "from-hf", "{}/model.pt", "{}/out"], "does not read pickles"),
        (["convert", "from-hf", "owner/name", "{}/out"], "run hf download owner/name --local-dir"),
        (["convert", "from-hf", "{}/run", "{}/out"], "use dtron convert to-hf"),
        (["train", "checkpoint.initial={}/model.pt"], "does not read pickles"),
        (["train", "checkpoint.initial=owner/name"], "dtron does not download: run hf download"),
    ],
)
def test_weights_of_another_kind_say_what_to_do(
    tmp_path: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(arguments: list[str]) -> int:
        raise CheckpointError(f"{arguments[1]}/config.json cannot be read")

    monkeypatch.setattr("dtron.checkpoint.convert.main", refuse)
    (tmp_path / "model.pt").touch()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "a.toml").touch()
    config = ["--config", str(tmp_path / "a.toml")] if words[0] == "train" else []
    assert commands([*(word.format(tmp_path) for word in words), *config]) == 1
    assert message in capsys.readouterr().err
