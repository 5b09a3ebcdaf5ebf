"""The configuration: what is read, refused and written back."""

import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from dtron.cli import commands, main
from dtron.config import Degree, RunConfig, fields, resolve_degrees, resolve_expert_degrees
from dtron.errors import CheckpointError, ConfigError, cause_of
from dtron.float8.compare import compare
from dtron.io.filesystem import read_json
from dtron.models import MODELS
from dtron.parallelisms.pipeline.layout import _placement_of_csv
from dtron.parallelisms.pipeline.schedules import read_csv
from dtron.run.directory import check_not_moved
from dtron.setup.rules import resolve
from dtron.training.trainer import Trainer

CONFIGS = sorted(Path("configs").glob("*.toml"))


def load(tmp_path: Path, text: str = "", *overrides: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return RunConfig.load(file, overrides)


def test_toml_round_trip_keeps_every_value(tmp_path: Path) -> None:
    config = load(
        tmp_path, '[run]\ndir = "a \\"b\\" ü"\n[model.override]\ndim = 64\n[optim]\nlr = 1e-9\n'
    )
    assert RunConfig.of(tomllib.loads(config.to_toml())) == config


def test_overrides_are_toml_values_or_bare_words(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "",
        "train.steps=7",
        "train.dtype=float32",
        'data.paths=["a.txt", "b.txt"]',
        "model.override.dim=32",
        "checkpoint.last=false",
    )
    assert (config.train.steps, config.train.dtype) == (7, "float32")
    assert config.data.paths == ("a.txt", "b.txt")
    assert config.model.override == {"dim": 32}
    assert config.checkpoint.last is False


PUBLISHED = [  # world, tp, pp, cp -> data-parallel ranks
    (8, 1, 1, 2, 4),  # Llama-3-8B
    (64, 4, 4, 2, 2),  # 70B
    (1024, 8, 8, 2, 8),  # 405B
    (1024, 2, 16, 1, 32),  # DeepSeek-V3, its dense layers
]


@pytest.mark.parametrize(("world", "tp", "pp", "cp", "dp"), PUBLISHED)
def test_degrees_of_published_runs(world: int, tp: int, pp: int, cp: int, dp: int) -> None:
    asked: dict[Degree, int] = {"pp": pp, "dp_replicate": 1, "dp_shard": -1, "cp": cp, "tp": tp}
    assert resolve_degrees(asked, world)["dp_shard"] == dp


def test_experts_see_the_same_ranks() -> None:
    degrees: dict[Degree, int] = {"pp": 16, "dp_replicate": 1, "dp_shard": 32, "cp": 1, "tp": 2}
    assert resolve_expert_degrees(degrees, ep=64, etp=1)["edp_shard"] == 1
    with pytest.raises(ConfigError, match=r"64 x parallel.etp = 2 .*use parallel.ep = 1, 2, 4"):
        resolve_expert_degrees(degrees, ep=64, etp=2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tpp=2", "unknown key parallel.tpp; did you mean parallel.tp?"),
        ("train.steps=1e3", "Input should be a valid integer; write 1000"),
        ("train.steps=1.5", "train.steps = 1.5: Input should be"),
        ("train.steps=inf", "train.steps = inf"),
        ("data.paths=a.txt", """is not a list; write data.paths='["a.txt"]'"""),
        ("data.paths=1979-05-27", """write data.paths='["1979-05-27"]'"""),
        ("float8.skip=a", """write float8.skip='["a"]'"""),
        ("train.zero=3", "unknown key train.zero; did you mean parallel.zero?"),
        ("train.batch_size=8", "unknown key train.batch_size; did you mean train.global_batch?"),
        ("optim.learning_rate=1", "did you mean optim.lr?"),
        ("training.lr=1", "unknown key training.lr; did you mean optim.lr?"),
        ("model.n_layers=2", "model are model.override.KEY, such as model.override.n_layers"),
        ("model.hidden_size=2", "did you mean model.override.dim?"),
        ("lr=1", "section.key=value (no spaces); did you mean optim.lr?"),
        ("parallel.cp_method=ulyses", "parallel.cp_method = 'ulyses': Input should be 'ring'"),
        ("parallel.cp_method=ulyses", """'hierarchical' or "auto"; did you mean ulysses?"""),
        ('parallel.cp_method=["ring", "al"]', "parallel.cp_method.1 = 'al'"),
        ("float8.recipe=tensor", "; did you mean tensorwise?"),
        ("recompute.mode=Full", "'selective' or 'auto'; did you mean full?"),
        (
            "parallel.tp=auto",
            """parallel.tp = 'auto': Input should be a valid integer; it has no""",
        ),
        ("paralel.tp=2", "unknown key paralel.tp; did you mean parallel.tp?"),
        ("train.steps=x", "train.steps = 'x'"),
        ("train.steps=0", "train.steps = 0"),
        ("train.dtype=float16", "'bfloat16' or 'float32'"),
        ("parallel.tp=true", "parallel.tp = True"),
        ("optim.lr=inf", "optim.lr = inf"),
        ("compile.backend=none", "'inductor' or 'aot_eager'"),
        (
            "run.dir=s3://b/run",
            "run.dir = 's3://b/run': not a folder but a URL; use a folder (only ",
        ),
        ("data.cache_dir=gs://b", "(only checkpoint.dir takes URLs, for"),
        ("run.dir=$HOME/run", "run.dir = '$HOME/run': environment variables are not expanded"),
        ("checkpoint.dir=s3://${B}/run", "environment variables are not expanded; write the whole"),
        ("data.cache_dir=/x/$USER", "environment variables are not expanded"),
        ('data.paths=["$D/a.txt"]', "data.paths.0 = '$D/a.txt': environment variables are not"),
        ("schedule.warmup=100", "for 100 steps write the value of 100 / train.steps, which is 0.1"),
        ("schedule.warmup=1", "the learning rate would only rise; use less than 1"),
        ("schedule.warmup_steps=9", "mean schedule.warmup? It is a fraction of train.steps: N"),
        ("optim.lr=0", "optim.lr = 0: Input should be greater than 0"),
        ("train.steps", "not of the form section.key=value"),
        ("steps=3", "not of the form section.key=value"),
    ],
)
def test_bad_overrides_name_key_and_rule(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "", override)
    assert message in str(error.value)


def test_missing_and_broken_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        RunConfig.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"run\.toml"):
        load(tmp_path, "[train\n")


@pytest.mark.parametrize(
    "read",
    [
        RunConfig.load,
        read_json,
        lambda path: read_csv(path, 2, 1, 1, "loop"),
        lambda path: _placement_of_csv(path, 2),
        lambda path: compare(path.parent, path.parent),
    ],
)
def test_an_error_names_a_file_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """A folder in its place."""
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    with pytest.raises((CheckpointError, ConfigError), match="Is a directory") as error:
        read(path)
    assert str(error.value).count(str(path)) == 1


def test_an_error_names_the_other_file_too(tmp_path: Path) -> None:
    """Where the message names another one, and of what is no error of files all that it says."""
    path = tmp_path / "file"
    assert str(path) in cause_of(FileNotFoundError(2, "No such file", str(path)), tmp_path)
    assert cause_of(ValueError("no JSON"), path) == "no JSON"


def test_degrees_fill_up_to_the_world_size() -> None:
    asked: dict[Degree, int] = {"pp": 1, "dp_replicate": 2, "dp_shard": -1, "cp": 1, "tp": 1}
    assert resolve_degrees(asked, 8)["dp_shard"] == 4
    with pytest.raises(ConfigError, match="world size 7"):
        resolve_degrees(asked, 7)
    with pytest.raises(ConfigError, match="world size 8"):
        resolve_degrees({**asked, "dp_shard": 2}, 8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.global_batch=6", "use 4 or 8"),
        ("parallel.tp=3", "set parallel.tp = 2 and parallel.dp_shard = -1"),
        (
            'parallel.high_priority=["tp"]',
            "which has one rank and no collectives; use dp_shard",
        ),
        ("parallel.cp_method=ulysses", "no effect without parallel.cp > 1"),
        (
            "parallel.dispatcher=symmetric_memory",
            "no effect without parallel.ep > 1 or parallel.etp > 1",
        ),
        ("parallel.overlap_micro_batches=true", "no effect without parallel.ep > 1"),
        ("parallel.ep_capacity=3.0", "no effect without parallel.ep > 1 and parallel.dispatcher"),
        ("parallel.cp_inner=2", "no effect without parallel.cp_method"),
        ("parallel.schedule=GPipe", "no effect without parallel.pp > 1"),
        ("parallel.stages_per_rank=2", "no effect without parallel.pp > 1"),
        ("parallel.pp_layout=[1, 1]", "no effect without parallel.pp > 1"),
        ("parallel.sequence_parallel=false", "no effect without parallel.tp > 1"),
        ("parallel.async_tp=true", "no effect without parallel.tp > 1"),
        ("parallel.accumulate_in_matmul=true", "needs gradients that are summed"),
        ("parallel.ep=3", "parallel.ep = 3 x parallel.etp = 1 does not divide the 2 ranks"),
        ("recompute.every=2", "no effect"),
        ("recompute.first=2", "no effect"),
        ('recompute.modules=["ffn"]', "no effect"),
        ("data.source=hf", "data.hf_path"),
        ("schedule.decay=0.5", "schedule.decay = 0.5 has no effect"),
        ("compile.backend=aot_eager", "compile.enable"),
        ("compile.cache_dir=x", "compile.enable"),
        ("data.hf_name=x", "data.source"),
        ("train.sample_prompt=x", "train.sample_tokens"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, override: str, message: str) -> None:
    config = load(tmp_path, "", "train.micro_batch=2", "train.global_batch=8", override)
    with pytest.raises(ConfigError) as error:
        resolve(config, 2)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.steps=2", "no effect without train.steps > 2: that many steps of a start run"),
        ("parallel.cp=2 data.mask_documents=true", "tables of documents have other sizes"),
        ("recompute.mode=full recompute.offload=true", "memory of its pool"),
        ("metrics.memory_snapshot=3", "without calling modules"),
        ("faults.stragglers_interval=9", "NCCL does not record"),
    ],
)
def test_what_no_cuda_graph_repeats_is_refused(tmp_path: Path, words: str, message: str) -> None:
    run = ["train.micro_batch=2", "train.global_batch=8", *words.split()]
    resolve(load(tmp_path, "", *run), 2)
    with pytest.raises(ConfigError, match=message):
        resolve(load(tmp_path, "", *run, "compile.cuda_graphs=step"), 2)


def test_only_inductor_has_a_folder_of_graphs(tmp_path: Path) -> None:
    words = ["train.micro_batch=2", "train.global_batch=8", "compile.cache_dir=x"]
    words += ["compile.enable=true", "compile.backend=aot_eager"]
    with pytest.raises(ConfigError, match=r"compile.cache_dir = 'x' has no effect without .*induc"):
        resolve(load(tmp_path, "", *words), 2)


@pytest.mark.parametrize("key", ["data.text_key=body", "data.max_document_mb=1"])
def test_a_prepared_corpus_has_its_texts(tmp_path: Path, key: str) -> None:
    """Keys of reading texts would have no effect."""
    words = ["train.micro_batch=2", "train.global_batch=8", "data.source=prepared", key]
    with pytest.raises(ConfigError, match=f"{key.partition('=')[0]} = .* has no effect"):
        resolve(load(tmp_path, "", *words), 2)


@pytest.mark.parametrize(
    ("key", "paths", "message"),
    [
        ("fetch_ahead=2", "a", "data.fetch_ahead = 2 has no effect"),
        ("store_seconds=9", "a", "data.store_seconds = 9 has no effect"),
        ("store_seconds=600", "s3://a", "data.store_seconds = 600 is more than half of parallel."),
    ],
)
def test_keys_of_a_store(tmp_path: Path, key: str, paths: str, message: str) -> None:
    words = ["train.micro_batch=2", "train.global_batch=8", "data.source=prepared", f"data.{key}"]
    with pytest.raises(ConfigError) as error:
        resolve(load(tmp_path, "", *words, f'data.paths=["{paths}"]'), 2)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ('["ffn"]', "recompute.modules with parallel.async_tp"),
        ('[""]', "at least 1"),
        ('["attn", "ffn", "attn"]', "names a module twice"),
    ],
)
def test_modules_that_recompute(tmp_path: Path, modules: str, message: str) -> None:
    """Not with async TP, and each by its name, once."""
    words = ["recompute.mode=full", f"recompute.modules={modules}", "parallel.tp=2"]
    with pytest.raises(ConfigError, match=message):
        resolve(load(tmp_path, "", *words, "parallel.async_tp=true"), 2)


@pytest.mark.parametrize(
    "overrides", [("parallel.zero=1",), ("parallel.dp_replicate=2",), ("parallel.reduce=step",)]
)
def test_micro_batches_are_never_summed_in_bfloat16(tmp_path: Path, overrides: tuple) -> None:
    config = load(tmp_path, "", "parallel.reduce_dtype=bfloat16", *overrides)
    with pytest.raises(ConfigError, match="2 micro-batches in bfloat16"):
        resolve(config, 4)
    resolve(config, 8)  # one micro-batch
    resolve(load(tmp_path, "", "parallel.reduce_dtype=bfloat16"), 4)  # shards sum in float32


@pytest.mark.parametrize("override", ["parallel.zero=1", "parallel.reduce=step"])
def test_sums_of_micro_batches_never_travel_in_bfloat16(tmp_path: Path, override: str) -> None:
    config = load(tmp_path, "", "parallel.reduce_by=all_to_all", override)
    with pytest.raises(ConfigError, match="2 micro-batches to train"):
        resolve(config, 4)
    resolve(config, 8)  # one micro-batch
    replicated = ("parallel.dp_replicate=2", "parallel.dp_shard=2")
    resolve(load(tmp_path, "", "parallel.reduce_by=all_to_all", *replicated), 4)


def test_gradients_that_no_ranks_share_do_not_travel(tmp_path: Path) -> None:
    for override, world in (("parallel.zero=2", 1), ("parallel.dp_replicate=2", 2)):
        config = load(tmp_path, "", "parallel.reduce_by=all_to_all", override)
        with pytest.raises(ConfigError, match="no effect without"):
            resolve(config, world)


def test_every_field_has_a_docstring() -> None:
    assert [key for key, _, doc in fields(RunConfig) if not doc] == []
    (families,) = (doc for key, _, doc in fields(RunConfig) if key == "model.name")
    assert set(MODELS) <= set(families.replace(",", " ").replace(".", " ").split())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_load_and_say_their_hardware(path: Path) -> None:
    assert path.read_text().startswith("# ")
    RunConfig.load(path)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_quickstart_is_legal_on_every_small_world(world: int) -> None:
    config = RunConfig.load("configs/quickstart.toml")
    resolve(config, world)
    assert config.train.global_batch == 16 * config.train.micro_batch
    assert config.train.seq_len % 16 == 0


def test_bfloat16_moments_take_a_short_memory(tmp_path: Path) -> None:
    narrow = ("optim.moments=bfloat16", "optim.beta2=0.999")
    with pytest.raises(ConfigError, match=r"use optim\.beta2 = 0\.99 or less"):
        resolve(load(tmp_path, "", *narrow), 1)
    resolve(load(tmp_path, "", *narrow, "optim.beta2=0.99"), 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.momentum=0.9", 'optim.momentum = 0.9 has no effect without optim.name = "muon"'),
        ("optim.adjust_lr_fn=original", "'original' has no effect without optim.name = \"muon\""),
        ("optim.name=sgd optim.beta1=0.8", "optim.beta1 = 0.8 has no effect without optim.name ="),
        ("optim.name=lion optim.eps=1e-4", "optim.eps = 0.0001 has no effect without optim.name ="),
        ('optim.groups=[{match="embed"}]', "'embed' sets neither lr nor weight_decay; set one"),
        (
            'optim.name=sgd optim.groups=[{match="embed",weight_decay=0.1}]',
            "weight_decay = 0.1 of match = 'embed' has no effect with optim.name = \"sgd\"",
        ),
        (
            'optim.groups=[{match="blocks.*.attn.wp",lr=0.1}]',
            "match = 'blocks.*.attn.wp' matches no trained parameter of the model; did you mean",
        ),
        (
            'optim.groups=[{match="blocks",lr=0.1},{match="blocks.*.attn",lr=0.2}]',
            "all parameters that match = 'blocks.*.attn' selects belong to earlier groups; move",
        ),
    ],
)
def test_optimizer_keys_without_effect_are_refused(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(load(tmp_path, "", *override.split()), 1)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "parallel.tp=4 model.override.dim=512 model.override.ffn_dim=2048",
            "rows of blocks.0.attn.wo.weight have 128 elements on a rank, not a multiple of 256; "
            "use parallel.tp = 1 or 2, or another optim.name",
        ),
        (
            "parallel.tp=2 lora.rank=16 model.override.dim=256 model.override.ffn_dim=512",
            "rows of blocks.0.attn.wo.lora_a have 128 elements",
        ),
        (
            "parallel.etp=2 model.name=mixtral model.override.expert_dim=256",
            "with parallel.etp = 2: rows of blocks.0.ffn.experts.down have 128 elements",
        ),
    ],
)
def test_shards_without_whole_blocks_of_8_bits_are_refused(
    tmp_path: Path, override: str, message: str
) -> None:
    words = ["model.override.n_heads=4", *override.split()]
    config = load(tmp_path, '[optim]\nname = "adamw8bit"', *words)
    with pytest.raises(ConfigError) as error:
        resolve(config, 4)
    assert message in str(error.value)
    resolve(config.changed(parallel={"tp": 1, "etp": 1}), 4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.rank=0 lora.alpha=8", "lora.alpha = 8.0 has no effect without lora.rank"),
        ("lora.initial=x", "lora.initial = 'x' has no effect without checkpoint.initial"),
        ('lora.modules=["blocks.*.attn.wp"]', "selects no linear layer and no experts"),
        ('lora.modules=["embed"]', "Routers, embeddings, norms and the head have no adapters"),
        (
            "parallel.tp=2 float8.recipe=tensorwise float8.gather_inputs=true",
            "float8.gather_inputs gathers only float8 values",
        ),
        (
            "parallel.dp_replicate=2 float8.recipe=tensorwise float8.all_gather=true",
            "frozen weights are not gathered",
        ),
        (
            "lora.dora=true float8.recipe=tensorwise float8.all_gather=true",
            "lora.dora = true with float8.all_gather",
        ),
        ("lora.rank=0 lora.dora=true", "lora.dora = True has no effect without lora.rank"),
        ("model.name=mixtral lora.rank=8 lora.dora=true", "only linear layers have magnitudes"),
        ("parallel.pp=2 parallel.defer_head=1", "a frozen head has no weight gradient"),
        ("parallel.accumulate_in_matmul=true parallel.zero=1", "are frozen and have no gradient"),
        (
            'parallel.pp=2 lora.modules=["blocks.0"]',
            "pipeline rank 1 has no adapters, nothing to train",
        ),
        ("lora.rank=4096", "lora.rank = 4096 is more than the model's width"),
        (
            "model.name=deepseek_v3 model.override.bias_speed=0.1 lora.rank=8",
            "bias_speed has no effect with lora.rank = 8",
        ),
        ("model.name=mixtral", "lora.rank = 4 is not a multiple of 8, which grouped matmuls"),
        (
            'optim.groups=[{match="embed",lr=0.1}]',
            "match = 'embed' matches no trained parameter of the model",
        ),
    ],
)
def test_keys_of_adapters_that_cannot_act_are_refused(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(load(tmp_path, "[lora]\nrank = 4", *override.split()), 2)
    assert message in str(error.value)
    assert load(tmp_path, "[lora]\nrank = 4").lora.scale == 4.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.blocks_per_unit=2 parallel.dp_replicate=2", "no parameters are sharded"),
        (
            "parallel.blocks_per_unit=2 model.name=mixtral parallel.ep=2 parallel.zero=1 "
            "parallel.overlap_micro_batches=true",
            "for those of the other",
        ),
        (
            "parallel.blocks_per_unit=5 model.override.n_layers=4",
            "blocks of a stage is 4",
        ),
        (
            "parallel.blocks_per_unit=2 model.override.n_layers=2 parallel.pp=2 parallel.cp=2",
            "blocks of a stage is 1",
        ),
    ],
)
def test_keys_of_fsdp_units_that_cannot_act_are_refused(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(load(tmp_path, "", *override.split()), 4 if "pp" in override else 2)
    assert message in str(error.value)


def test_a_capacity_needs_several_groups_of_experts(tmp_path: Path) -> None:
    """With ep = 1 no rank can receive more tokens than even loads send it."""
    size = 'model.name="mixtral" parallel.etp=2 parallel.dp_shard=2 parallel.ep_capacity=3'
    for dispatcher in ("symmetric_memory", "bounded_all_to_all"):
        overrides = f"{size} parallel.dispatcher={dispatcher}".split()
        with pytest.raises(
            ConfigError, match=r"ep_capacity = 3\.0 has no effect without parallel\.ep"
        ):
            resolve(load(tmp_path, "", *overrides), 2)


def test_groups_of_parameters_are_written_as_tables(tmp_path: Path) -> None:
    groups = '[[optim.groups]]\nmatch = "*.weight"\nlr = 0.1\n[[optim.groups]]\n'
    config = load(tmp_path, groups + 'match = "blocks.*.attn.*.bias"\nweight_decay = 0\n')
    assert RunConfig.of(tomllib.loads(config.to_toml())) == config
    assert config.optim.groups[1].weight_decay == 0


def test_a_switch_on_the_command_line_turns_its_dependants_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[train]\nsample_tokens = 8\nsample_prompt = "In"\neval_sequences = 4\neval_interval = 2\n'
        '[data]\npaths = ["a.jsonl"]\n'
    )
    off = ["train.sample_tokens=0", "train.eval_sequences=0", "data.source=hf", "data.hf_path=x"]
    config = RunConfig.load(file, off)
    resolve(config, 1)
    assert config.train.sample_prompt == RunConfig().train.sample_prompt
    assert (config.train.eval_interval, config.data.paths) == (0, RunConfig().data.paths)
    said = capsys.readouterr().err
    for key in ("train.sample_prompt = 'In'", "train.eval_interval = 2", "data.paths = "):
        assert f"note: {key}" in said
    given = RunConfig.load(file, ["train.sample_tokens=0", "train.sample_prompt=me"])
    with pytest.raises(ConfigError, match=r"train\.sample_prompt = 'me' has no effect"):
        resolve(given, 1)
    file.write_text('[train]\nsample_prompt = "In"\n')  # which the file alone makes idle
    with pytest.raises(ConfigError, match=r"train\.sample_prompt = 'In' has no effect"):
        resolve(RunConfig.load(file, ["train.steps=3"]), 1)


def test_a_key_can_be_unset(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 7\n[model.override]\nn_layers = 3\n")
    config = RunConfig.load(file, ["train.steps=", "model.override.n_layers=", "optim.lr="])
    assert config == RunConfig()
    with pytest.raises(ConfigError, match=r"unknown key train\.stepz; did you mean"):
        RunConfig.load(file, ["train.stepz="])
    file.write_text("train = 5\n")
    with pytest.raises(ConfigError, match="train is not a table"):
        RunConfig.load(file, ["train.steps="])


def from_pipe(write: Callable[[int], object], seconds: float = 10.0) -> RunConfig:
    """As bash's <(command) gives it; the writing end is open while `write` runs."""
    ours, theirs = os.pipe()
    writer = threading.Thread(target=lambda: (write(theirs), os.close(theirs)))
    writer.start()
    try:
        with patch("dtron.config.run_config._PIPE_SECONDS", seconds):
            return RunConfig.load(f"/dev/fd/{ours}")
    finally:
        os.close(ours)
        writer.join()


def test_a_config_from_a_pipe() -> None:
    def slowly(pipe: int) -> None:
        for part in (b"[train]\n", b"steps = 7\n", b"# " + b"x" * 200_000):
            os.write(pipe, part)
            time.sleep(0.1)

    assert from_pipe(slowly).train.steps == 7
    with pytest.raises(ConfigError, match=r"/dev/fd/\d+: .*not ended after 0\.3 s; use a file"):
        from_pipe(lambda _: time.sleep(1), 0.3)
    with (
        patch("dtron.config.run_config.TOML_BYTES", 1000),
        pytest.raises(ConfigError, match="than 1000 bytes"),
    ):
        from_pipe(lambda pipe: os.write(pipe, b"#" * 2000))


def test_a_named_fifo_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo: not a regular file"):
        RunConfig.load(tmp_path / "fifo")


def test_a_config_from_stdin(tmp_path: Path) -> None:
    code = "from dtron.config import RunConfig; print(RunConfig.load('/dev/stdin').train.steps)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input="[train]\nsteps = 7\n", capture_output=True, text=True)
    assert done.stdout == "7\n", done.stderr


def test_a_section_that_is_a_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model = 3: model is a section; write \[model\]"):
        load(tmp_path, "model = 3")


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("metrics", {"profile_start": 101}, "metrics.profile_start = 101 is after the last step"),
        ("train", {"eval_interval": 5}, "train.eval_interval = 5 has no effect with"),
    ],
)
def test_settings_that_never_act_are_refused(section: str, keys: dict, message: str) -> None:
    base = {"train": {"steps": 100}, "data": {"paths": ["x.txt"], "validation_fraction": 0.0}}
    config = RunConfig.of({**base, section: {**base.get(section, {}), **keys}})
    with pytest.raises(ConfigError) as error:
        resolve(config, 1)
    assert message in str(error.value)


def test_the_config_of_a_moved_run_names_its_directory(tmp_path: Path) -> None:
    """A start would otherwise train afresh in the old place."""
    folder = tmp_path / "moved"
    folder.mkdir()
    file, old = folder / "config.toml", str(tmp_path / "old")
    check_not_moved(file, old, [])  # a file of that name that no run has written
    (folder / "run.json").touch()
    with pytest.raises(ConfigError, match=f"add run.dir={folder} to resume that run, or run.dir="):
        check_not_moved(file, old, ["train.steps=3"])
    check_not_moved(file, old, ["run.dir=new"])
    check_not_moved(file, f"{folder}/../moved", [])
    check_not_moved(folder / "other.toml", old, [])


def test_paths_may_have_dollars_and_checkpoints_urls(tmp_path: Path) -> None:
    config = load(tmp_path, "", "run.dir=/runs/5$", "checkpoint.dir=s3://bucket/run")
    assert (config.run.dir, config.checkpoint.dir) == ("/runs/5$", "s3://bucket/run")


TABLES: Any = {"train": {"steps": 2}}
TEXT: Any = "run.toml"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: RunConfig.load(file, "train.steps=2"), "FILE, ['train.steps=2'])"),
        (
            lambda file: RunConfig.load(file, TABLES),
            "is not a list; write RunConfig.load(FILE, ['train.steps=2'])",
        ),
        (lambda file: RunConfig.of(TEXT), "read a file with RunConfig.load(FILE)"),
        (
            lambda file: setattr(RunConfig.load(file).train, "steps", 3),
            "train.steps = 3: a config cannot be changed; make a new config, such as "
            "RunConfig.load(FILE, ['train.steps=3'])",
        ),
        (lambda file: Trainer(TEXT), "not 'run.toml'; write Trainer(RunConfig.load(FILE))"),
        (lambda file: Trainer(TABLES), "write Trainer(RunConfig.of(values))"),
    ],
)
def test_wrong_types_from_python_say_what_to_write(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("")
    with pytest.raises(ConfigError) as error:
        make(file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--config", "a.toml", "--config", "b.toml"],
            "--config is given twice, a.toml and b.toml",
        ),
        (["--config=a.toml", "--config", "b.toml"], "--config is given twice, a.toml and b.toml"),
        (["a.toml"], "write --config a.toml"),
        (["a.toml", "train.steps=5"], "write --config a.toml"),
        (["--config", "a.toml", "--train.steps=5"], "write train.steps=5, without --"),
        (["--config", "a.toml", "--train.steps", "5"], "write train.steps=5, without --"),
        (["--config", "a.toml", "--parallel.tp"], "write parallel.tp=VALUE, without --"),
    ],
)
def test_wrong_command_lines_say_what_to_write(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--config", "a.toml"], ["learn"], ["--steps"]])
def test_an_unknown_command_lists_all(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands(words) == 1
    shown = capsys.readouterr().err
    assert "train, plan, data, bench, eval, generate, convert" in shown
    assert ("dtron train --config" in shown) == (words[0] == "--config")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.log_interval=5", "did you mean metrics.log_interval?"),
        ("data.seq_len=5", "did you mean train.seq_len?"),
        ("train.tp=2", "did you mean parallel.tp?"),
        ("optim.warmup=0.1", "did you mean schedule.warmup?"),
        ("compile.enable=True", "compile.enable = 'True': Input should be a valid boolean; write"),
        ("compile.enable=1", "compile.enable = 1: Input should be a valid boolean; write true or"),
        ('train.steps="4"', "train.steps = '4': Input should be a valid integer; write 4"),
        ('optim.lr="3e-4"', "optim.lr = '3e-4': Input should be a valid number; write 3e-4"),
        ("parallel.zero=zero3", """'zero3': Input should be 1, 2, 3 or "auto"; did you mean 3?"""),
        (
            "checkpoint.resume=true",
            "checkpoint.resume = True: Input should be a valid string; write",
        ),
        ("checkpoint.resume=Latest", "checkpoint.resume = 'Latest': write \"latest\""),
        ("compile=true", "such as compile.enable=true"),
        ("train=5", "train is a section; write train.KEY=value, such as train.steps=100"),
        (
            "data.paths=[my.jsonl]",
            """the shell has removed the quotes; write data.paths='["my.js""",
        ),
        ("data.paths=[a.txt, b.txt]", """write data.paths='["a.txt", "b.txt"]'"""),
    ],
)
def test_hints_name_the_likely_fix(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "", override)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf[train]\nsteps = 3\n", "begins with a byte order mark; save it as UTF-8"),
        (b"[compile]\nenable = False\n", "line 2: TOML writes true and false in lower case"),
        (b"[train]\ndtype = bfloat16\n", 'line 2: text is quoted in TOML; write "bfloat16"'),
        (b'[run]\ndir = "C:\\Users\\x"\n', 'line 2: a backslash in "..." begins an escape'),
        (b"\xff\xfe[\x00t\x00]\x00", "not UTF-8 but UTF-16; save it as UTF-8"),
    ],
)
def test_broken_toml_names_the_fix(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        RunConfig.load(file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_in_place_of_a_config_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Is a directory; name a TOML file"):
        RunConfig.load(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(
        ConfigError, match=rf"Is a directory; write --config {tmp_path}/config.toml"
    ):
        RunConfig.load(tmp_path)
