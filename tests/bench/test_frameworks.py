"""Peers: what they are asked for, what their logs show, and that unequal work has no ratio."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dtron.bench import frameworks as peers
from dtron.bench.command import main
from dtron.bench.frameworks import (
    compare,
    config_for_peer,
    dtron_facts,
    read_titan,
    require,
    run_peer,
    titan_arguments,
    unequal,
    window_speeds,
    write_titan_data,
)
from dtron.bench.run import FORCED, Options, Outcome
from dtron.config import DEGREES, RunConfig, fields
from dtron.errors import ConfigError

OPTIONS = Options(ranks=4, warmup=5, steps=10)
CONFIG = {
    "model": {"name": "llama", "size": "8b"},
    "train": {"global_batch": 8, "micro_batch": 2, "seq_len": 8192},
    "compile": {"enable": True},
}
PREFIX = "[titan] 2026-11-21 10:00:00,000 - root - INFO - "
LOG = [
    "torchtitan version: 0.2.2 (0.0.0 means __version__ is not defined correctly).",
    "\x1b[34mModel llama3 8B \x1b[31msize: 8,030,261,248 total parameters\x1b[39m",
    "Mixed precision training is handled by fully_shard",
    "Trainer is initialized with local batch size 2, global batch size 8, gradient accumulation "
    "steps 1, sequence length 8192, total steps 15 (warmup 200)",
    *(
        f"\x1b[31mstep: {step:2}  \x1b[32mloss:  7.00000  \x1b[38;2;180;60;0mgrad_norm:  9.0000  "
        f"\x1b[36mmemory: {memory}GiB(78.25%)  \x1b[34mtps: {tps}  \x1b[36mtflops: 594.00  "
        "\x1b[35mmfu: 60.06%\x1b[39m"
        for step, memory, tps in (
            (1, "99.00", "312"),
            (5, "109.10", "9,000"),
            (10, "109.12", "10,200"),
            (15, "109.11", "10,300"),
        )
    ),
]
RESOLVED: dict[str, Any] = {
    "training": {"mixed_precision_param": "bfloat16", "dtype": "float32"},
    "activation_checkpoint": {"mode": "none", "selective_ac_option": "2"},
}


def log(*more: str) -> str:
    return "".join(f"[rank0]:{PREFIX}{line}\n" for line in (*LOG, *more))


def config(**changes: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {**CONFIG, **changes}
    return RunConfig.of(values)


def outcome(run: RunConfig | None = None) -> Outcome:
    facts = {"parameters": 8_030_261_248, "dtype": "bfloat16", "world_size": 4}
    return Outcome("x", "ok", config=(run or config()).model_dump(mode="json"), facts=facts)


def test_log_of_torchtitan() -> None:
    found = read_titan(log(), RESOLVED, warmup=5)
    assert found.facts == {
        "parameters": 8_030_261_248,
        "tokens_a_step": 65536,
        "seq_len": 8192,
        "dtype": "bfloat16",
        "recompute": "none",
    }
    assert found.speeds == [10200, 10300]  # rows whose five steps lie behind the warm-up
    assert found.memory_gib == 109.12
    assert read_titan(log(), RESOLVED, warmup=6).speeds == [10300]


def test_log_overrides_what_was_asked_for() -> None:
    lines = ("Mixed precision training is disabled", "Applied full activation checkpointing to it")
    found = read_titan(log(*lines), RESOLVED, warmup=5)
    assert (found.facts["dtype"], found.facts["recompute"]) == ("float32", "full")
    each_third = {"mode": "selective", "selective_ac_option": "3"}
    resolved = {**RESOLVED, "activation_checkpoint": each_third}
    selective = log("Applied selective activation checkpointing to the model")
    assert read_titan(selective, resolved, 5).facts["recompute"] == "full, every 3"


def test_tied_models_are_counted_whole() -> None:
    """torchtitan logs Qwen3-0.6B, of 596,049,920 parameters, without its embedding."""
    lines = [
        'Building qwen3 0.6Bwith {\n  "dim": 1024,\n  "hidden_dim": 3072,\n  "vocab_size": 151936,',
        '  "enable_weight_tying": true\n}',
        "Model qwen3 0.6B size: 440,467,456 total parameters",
    ]
    found = read_titan("\n".join(lines), RESOLVED, warmup=5)
    assert found.facts["parameters"] == 596_049_920
    untied = "\n".join(lines).replace("true", "false")
    assert read_titan(untied, RESOLVED, warmup=5).facts["parameters"] == 440_467_456


def test_equal_runs_have_a_ratio_of_their_windows() -> None:
    own, titan = outcome(), read_titan(log(), RESOLVED, warmup=5)
    seconds = [1.0] * 4 + [2.0] + [1.0] * 5  # windows of 6 and of 5 s
    found = compare(own, titan, seconds)
    assert found.differs == []
    tokens = 8 * 8192 / 4
    assert found.own_speed == pytest.approx((tokens * 5 / 6 + tokens) / 2)
    assert found.ratio == pytest.approx(found.own_speed / 10250)


@pytest.mark.parametrize(
    ("fact", "line", "other"),
    [
        ("parameters", "8,030,261,248 total", "8,030,261,249 total"),
        ("tokens_a_step", "global batch size 8", "global batch size 16"),
        ("seq_len", "sequence length 8192", "sequence length 4096"),
        ("dtype", "is handled by fully_shard", "is disabled"),
        ("recompute", "torchtitan version", "Applied full activation checkpointing"),
        ("parameters", "Model llama3", ""),
    ],
)
def test_unequal_runs_have_none(fact: str, line: str, other: str) -> None:
    changed = log().replace(line, other)
    if not other:  # the peer does not say
        changed = "".join(row for row in log().splitlines(True) if line not in row)
    titan = read_titan(changed, RESOLVED, warmup=5)
    found = compare(outcome(), titan, [1.0] * 10)
    assert found.ratio is None
    assert any(text.startswith(f"{fact}: ") for text in found.differs)


def test_recompute_of_dtron_counts_its_blocks() -> None:
    own = dtron_facts(outcome(config(recompute={"mode": "full", "every": 2})))
    assert own["recompute"] == "full, every 2"
    assert unequal(own, {**own, "recompute": "full"}) == [
        "recompute: full, every 2 in dtron, full in torchtitan"
    ]


def test_windows_are_whole() -> None:
    assert window_speeds([1.0, 1.0, 2.0, 2.0, 9.0], 2, 10.0) == [10.0, 5.0]
    assert window_speeds([1.0], 2, 10.0) == []


def flag(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(f"--{name}") + 1]


def test_arguments_say_the_same_work(tmp_path: Path) -> None:
    found = titan_arguments(config(), 4, OPTIONS, tmp_path)
    assert found[:3] == ["--standalone", "--nproc-per-node", "4"]
    expected = {
        "model.name": "llama3",
        "model.flavor": "8B",
        "training.seq_len": "8192",
        "training.local_batch_size": "2",
        "training.global_batch_size": "8",
        "training.steps": "15",
        "training.mixed_precision_param": "bfloat16",
        "activation_checkpoint.mode": "none",
        "parallelism.data_parallel_shard_degree": "4",
    }
    assert {name: flag(found, name) for name in expected} == expected
    assert "--compile.enable" in found
    qwen = config(model={"name": "qwen3", "size": "0.6b"}, recompute={"mode": "full", "every": 2})
    found = titan_arguments(qwen, 4, OPTIONS, tmp_path)
    assert (flag(found, "model.name"), flag(found, "model.flavor")) == ("qwen3", "0.6B")
    assert flag(found, "activation_checkpoint.mode") == "selective"
    assert flag(found, "activation_checkpoint.selective_ac_option") == "2"
    piped = config(parallel={"pp": 2, "schedule": "Interleaved1F1B"}, compile={"enable": False})
    found = titan_arguments(piped, 4, OPTIONS, tmp_path)
    assert flag(found, "training.local_batch_size") == "4"
    assert flag(found, "parallelism.pipeline_parallel_microbatch_size") == "2"
    assert flag(found, "parallelism.pipeline_parallel_schedule") == "Interleaved1F1B"
    assert "--compile.enable" not in found


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": {"name": "llama", "size": "debug"}}, "'llama' with model.size = 'debug'"),
        ({"model": {"name": "gpt", "size": "debug"}}, "'gpt' with model.size = 'debug'"),
        ({"model": {"name": "llama", "size": "8b", "override": {"n_layers": 2}}}, "n_layers"),
        ({"data": {"mask_documents": True}}, "mask_documents"),
        ({"parallel": {"reduce_dtype": "bfloat16"}}, "reduce_dtype"),
        ({"recompute": {"mode": "selective"}}, "selective"),
        ({"recompute": {"offload": True}}, "offload"),
        ({"recompute": {"mode": "full", "first": 4}}, "first"),
        ({"optim": {"moments": "bfloat16"}}, "moments"),
        ({"float8": {"recipe": "tensorwise"}}, "float8"),
        ({"model": {"name": "qwen3", "size": "8b"}, "parallel": {"pp": 2}}, "no pipeline"),
    ],
)
def test_work_without_an_equal_is_refused(tmp_path: Path, changes: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        titan_arguments(config(**changes), 4, OPTIONS, tmp_path)


def test_what_dtron_chose_for_itself_is_no_other_work(tmp_path: Path) -> None:
    """The peer gets a chosen schedule, which it has; what is set and has no equal stays refused."""
    chosen = {"reduce_by": "all_to_all", "copy_engines": True, "pp": 2, "schedule": "ZBVZeroBubble"}
    own = outcome(config(parallel=chosen))
    with pytest.raises(ConfigError, match="reduce_by"):
        titan_arguments(config_for_peer(own), 4, OPTIONS, tmp_path)
    keys = ("reduce_by", "copy_engines", "schedule")
    own.facts["automatic"] = {f"parallel.{key}": {"value": chosen[key]} for key in keys}
    arguments = titan_arguments(config_for_peer(own), 4, OPTIONS, tmp_path)
    assert any("ZBVZeroBubble" in each for each in arguments)


# Keys with which both still do the same work: how dtron does it, and what takes no time.
FREE = {
    "run.dir",
    "run.wait_seconds",
    "model.attention",
    "parallel.encoder_tp",  # of models with an encoder, which have no row there
    "parallel.ep",  # of models with experts, which have no row there
    "parallel.etp",
    "parallel.zero",
    "parallel.reduce",
    "parallel.accumulate_in_matmul",
    "compile.cuda_graphs",
    "parallel.overlap_micro_batches",
    "parallel.prefetch",
    "parallel.blocks_per_unit",
    "parallel.stages_per_rank",
    "parallel.cp_inner",  # of a cp_method that is refused
    "parallel.timeout_seconds",
    "train.seed",
    "train.max_skipped",
    "train.gc_interval",
    "train.sample_prompt",  # nothing is sampled
    "optim.beta1",
    "optim.beta2",
    "optim.eps",
    "optim.weight_decay",
    "optim.momentum",  # of Muon, which is refused
    "optim.adjust_lr_fn",
    "parallel.dispatcher",
    "parallel.ep_capacity",
    "parallel.ep_inner",
    *(key for key, _, _ in fields(RunConfig) if key.startswith("checkpoint.")),  # none is saved
    *(key for key, _, _ in fields(RunConfig) if key.startswith("faults.")),  # dtron alone is slower
    "debug.collectives",  # of the first step
    "debug.deterministic",  # dtron alone is slower
}
SAID = {"model.name", "model.size", "model.override", "recompute.mode", "recompute.every"}
SAID |= {"train.seq_len", "train.global_batch", "train.micro_batch", "train.dtype"}
SAID |= {"train.max_grad_norm", "optim.lr", "compile.enable"}
ENDS = {"train.steps", "train.epochs", "train.tokens"}  # a measurement has its own end
SAID |= {f"parallel.{name}" for name in (*DEGREES, "schedule", "async_tp")}


def test_every_key_is_said_refused_or_free() -> None:
    """A new key has to be put somewhere before runs with it are compared."""
    names = {key for key, _, _ in fields(RunConfig)}
    names = {key for key in names if not key.startswith(("data.", "schedule.", "metrics."))}
    float8 = {key for key in names if key.startswith("float8.")}  # need a recipe, or experts
    float8 |= {key for key in names if key.startswith("lora.")}  # need a rank
    known = SAID | FREE | FORCED.keys() | set(peers._TITAN_LACKS) | float8 | ENDS
    assert names - known == set()


def test_data_are_what_it_reads(tmp_path: Path) -> None:
    write_titan_data(tmp_path, ["In the beginning", "é\n"])
    rows = (tmp_path / "data/data.json").read_text().splitlines()
    assert [json.loads(row)["text"] for row in rows] == ["In the beginning", "é\n"]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json"))
    ids = tokenizer.encode("In é").ids
    assert len(ids) == 5  # bytes
    assert tokenizer.decode(ids) == "In é"


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install torchtitan"):
        require()
    with pytest.raises(ConfigError, match="not installed"):
        main(["configs/llama3_8b.toml", "--against", "torchtitan"])


def test_a_pair_is_run_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that prints torchtitan's log, started as a peer is."""
    script = tmp_path / "peer.py"
    (tmp_path / "sample.log").write_text(log())
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text(json.dumps(RESOLVED))
    script.write_text(
        "import os\nassert os.environ['NCCL_MAX_CTAS'] == '8'\n"
        f"print(open({str(tmp_path / 'sample.log')!r}).read())\n"
    )
    monkeypatch.setattr(peers, "titan_arguments", lambda *_: ["--standalone", str(script)])
    own = outcome()
    own.environment = {"NCCL_MAX_CTAS": "8"}
    own.times = {"seconds": [[9.0] * 5 + [1.6] * 10] * 4}
    found = run_peer(own, [], OPTIONS, tmp_path / "out")
    assert found["run"]["status"] == "ok"
    assert found["comparison"]["ratio"] == pytest.approx(8 * 8192 / 4 / 1.6 / 10250)
    assert (tmp_path / "out/data/data.json").exists()
    assert found["run"]["command"].startswith("NCCL_MAX_CTAS=8 ")
    (tmp_path / "out/config.json").unlink()
    found = run_peer(own, [], OPTIONS, tmp_path / "out")
    assert found.keys() == {"run"}
    assert "config.json" in found["run"]["reason"]
    script.write_text("raise RuntimeError('no memory left')\n")
    found = run_peer(own, [], OPTIONS, tmp_path / "out")
    assert found.keys() == {"run"}
    assert found["run"]["reason"] == "RuntimeError: no memory left"
