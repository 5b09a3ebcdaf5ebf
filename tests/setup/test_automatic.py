"""Automatic settings: the fastest value that the machine has, that fits and that no rule refuses.

Planted mistakes that turn this red: each condition of a row left out, a row left out, rules not
asked, memory not asked, set keys overwritten, a choice made on CPUs, "auto" kept in a config.
"""

import json
import logging
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtron.cli import commands, main
from dtron.config import RunConfig, Section, fields
from dtron.plan import automatic as planner
from dtron.plan.automatic import of_hardware
from dtron.plan.hardware import hardware
from dtron.plan.memory import fits, memory
from dtron.plan.run_shape import Resolved
from dtron.plan.steptime import predict
from dtron.run.process import Place
from dtron.run.rendezvous import meet
from dtron.setup.automatic import CHOICES, SAVINGS, Automatic, Machine, choose, has_nvlink
from dtron.setup.rules import ModelCandidate, all_broken, resolve
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training.test_trainer import tiny

CONFIGS = Path(__file__).parents[2] / "configs"
HOST = Machine(gpus=True, host=8, nvlink=True, torch=(2, 13))
KEYS = list(dict.fromkeys(choice.key for choice in (*CHOICES, *SAVINGS)))
MIXTURE = "model.name=mixtral parallel.ep=2"
PIPELINE = "parallel.pp=2 model.override.n_layers=8"
TP = "parallel.tp=2 compile.enable=true"
CP = "parallel.cp=4"
SHARED = {"zero": 2, "reduce_by": "all_to_all", "copy_engines": True}
"""Choices of a run whose ranks share parameters inside a host."""


SMALL = [
    *("model.size=debug", "compile.enable=false", "train.seq_len=256", "train.global_batch=8"),
    *("train.micro_batch=1", "parallel.zero=auto"),
]


def config_of(words: str = "") -> RunConfig:
    return RunConfig.load(CONFIGS / "llama3_8b.toml", [*SMALL, *words.split()])


def unknown(_: RunConfig) -> float:
    return float("inf")


def launches(config: RunConfig) -> float:
    """Seconds of a step in which the host is slower than the GPU."""
    return 0.5 if config.compile.cuda_graphs == "step" else 1.0


def chosen(
    words: str,
    machine: Machine = HOST,
    share: Any = 0.5,
    world: int = 8,
    seconds: Any = unknown,
) -> dict[str, Any]:
    """Name -> value of what is chosen.

    Args:
        share: of a GPU's memory that a run takes, or a function of its config.
    """

    def used(config: RunConfig) -> float:
        return share if isinstance(share, float) else share(config)

    found = choose(ModelCandidate(config_of(words), world), machine, used, seconds)
    for key, row in found.chosen.items():
        section, name = key.split(".")
        assert getattr(getattr(found.config, section), name) == row["value"]
        assert row["reason"]
    if world == 8:
        resolve(found.config, 8)
    return {key.split(".")[1]: row["value"] for key, row in found.chosen.items()}


CHOSEN = [
    ("train.global_batch=8", SHARED),
    ("train.global_batch=16", SHARED),
    ("parallel.zero=3", {"reduce_by": "all_to_all", "copy_engines": True}),
    # reduce_by would round sums of micro-batches
    ("parallel.zero=1 train.global_batch=16", {"accumulate_in_matmul": True}),
    ("parallel.zero=1 train.global_batch=16 train.dtype=float32", {}),
    ("parallel.zero=1 train.global_batch=16 float8.recipe=tensorwise train.loss_chunks=2", {}),
    (f"{TP} parallel.zero=1 train.global_batch=16", {"async_tp": True}),
    ("parallel.reduce_by=all_to_all train.dtype=float32", {"zero": 2, "copy_engines": True}),
    (CP, {**SHARED, "cp_method": "ulysses"}),
    (f"{CP} model.override.n_heads=6 model.override.n_kv_heads=2 model.override.head_dim=16",
     {**SHARED, "cp_method": "all_gather"}),
    (f"{CP} model.override.window=64", SHARED),
    (f"{MIXTURE}", {**SHARED, "dispatcher": "symmetric_memory"}),
    (f"{MIXTURE} parallel.ep=4", SHARED),  # more than ep_capacity
    (f"{MIXTURE} parallel.ep=4 parallel.ep_capacity=4",
     {**SHARED, "dispatcher": "symmetric_memory"}),
    (f"{MIXTURE} parallel.etp=2", SHARED),
    (f"{MIXTURE} compile.enable=true recompute.mode=selective",  # refused with all_to_all
     {**SHARED, "dispatcher": "symmetric_memory"}),
    (PIPELINE, {"zero": 2, "schedule": "ZBVZeroBubble"}),
    (f"{PIPELINE} parallel.zero=1", {"schedule": "ZBVZeroBubble"}),
    (f"{PIPELINE} parallel.zero=3", {"reduce_by": "all_to_all", "copy_engines": True}),
    (f"{PIPELINE} parallel.pp_layout=Ett|ttttttL", SHARED),  # a stage per rank
    (f"{PIPELINE} parallel.defer_head=1", {"zero": 2, "schedule": "Interleaved1F1B"}),
    (f"{PIPELINE} parallel.tp=2", SHARED),
    (f"{PIPELINE} recompute.mode=full", SHARED),
    (f"{PIPELINE} model.name=mixtral", SHARED),
    (TP, {**SHARED, "async_tp": True}),
    ("parallel.tp=2", SHARED),  # not compiled
    (f"{TP} parallel.sequence_parallel=false", SHARED),
    (f'{TP} recompute.mode=full recompute.modules=["attn"]', SHARED),
    (f"{TP} model.name=mixtral", SHARED),  # not measured
    (f"{TP} model.name=mixtral parallel.ep=2",
     {**SHARED, "dispatcher": "symmetric_memory", "async_tp": True}),
    (f"{TP} model.name=mixtral parallel.ep=2 parallel.dispatcher=all_to_all", SHARED),
    (f"{TP} model.name=mixtral parallel.ep=2 float8.recipe=tensorwise",
     {**SHARED, "dispatcher": "symmetric_memory"}),
    (f"{TP} model.name=deepseek_v3", SHARED),
    (f"{TP} parallel.pp=2 parallel.schedule=ZBVZeroBubble", {"zero": 2}),
    (f"{TP} float8.recipe=rowwise", SHARED),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), CHOSEN)
def test_a_choice_is_the_first_that_no_rule_refuses(words: str, expected: dict[str, Any]) -> None:
    assert chosen(words) == expected


ALONE = "parallel.zero=3 parallel.reduce_by=reduce_scatter"
"""Nothing is chosen with it but what saves memory."""
EVERYTHING = {
    "parallel.cp_method": CP,
    "parallel.dispatcher": MIXTURE,
    "parallel.schedule": PIPELINE,
    "parallel.async_tp": TP,
    "train.loss_chunks": "",
    "recompute.mode": "",
    "parallel.zero": "",
    "parallel.reduce_by": "",
    "parallel.copy_engines": "",
    "compile.cuda_graphs": "compile.enable=true",
    "parallel.accumulate_in_matmul": "parallel.zero=1 train.global_batch=16",
}
"""A run in which a key is chosen."""
RANKS = {"compile.cuda_graphs": 1}
"""Ranks of that run, if not 8."""


def needs_chunks(config: RunConfig) -> float:
    return 4 / (2 + config.train.loss_chunks)


def needs_recomputation(config: RunConfig) -> float:
    return {"none": 1.3, "selective": 1.01, "attention": 0.9, "full": 0.6}[config.recompute.mode]


NEEDS = {"loss_chunks": needs_chunks, "mode": needs_recomputation}
"""Memory of a run in which a key is chosen that is for memory alone."""


@pytest.mark.parametrize("key", KEYS)
def test_what_is_set_is_obeyed(key: str) -> None:
    """Even to the default; "auto" is as unset."""
    name = key.split(".")[1]
    share = NEEDS.get(name, 0.5)
    settings = {"share": share, "seconds": launches, "world": RANKS.get(key, 8)}
    assert name in chosen(EVERYTHING[key], **settings)
    assert name in chosen(f"{EVERYTHING[key]} {key}=auto", **settings)
    default = json.dumps({k: d for k, d, _ in fields(RunConfig)}[key])
    words = f"{EVERYTHING[key]} {key}={default}"
    assert name not in chosen(words, **settings)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "machine",
    [Machine(), replace(HOST, host=1), replace(HOST, nvlink=False)],
    ids=["no GPUs", "ranks on several hosts", "no NVLink"],
)
def test_a_choice_needs_the_machine(key: str, machine: Machine) -> None:
    anywhere = {"zero", "schedule"} if machine.gpus else set()
    anywhere |= {"cuda_graphs", "accumulate_in_matmul"} if machine.gpus else set()
    found = chosen(EVERYTHING[key], machine, seconds=launches, world=RANKS.get(key, 8))
    assert set(found) <= anywhere


def test_a_group_of_ranks_is_inside_a_host() -> None:
    hosts = replace(HOST, host=4)
    assert chosen(f"{CP} parallel.dp_replicate=2", hosts) == {**SHARED, "cp_method": "ulysses"}
    assert chosen(CP, hosts) == {"zero": 2, "cp_method": "ulysses"}
    assert chosen("parallel.cp=8", hosts) == {"zero": 2}
    assert chosen(f"{CP} parallel.tp=2", hosts) == {"zero": 2}
    assert chosen("parallel.reduce_by=all_to_all", hosts) == {"zero": 2}
    assert chosen(f"{TP} parallel.tp=4", hosts) == {"zero": 2, "async_tp": True}
    assert chosen(f"{TP} parallel.tp=4", replace(HOST, host=6)) == {"zero": 2}


def test_exact_sums_only() -> None:
    """Gradients of norms are float32 since torch 2.15; others of float32 would be rounded."""
    assert chosen("", replace(HOST, torch=(2, 15))) == {"zero": 2}
    assert chosen("train.dtype=float32") == {"zero": 2}
    assert chosen("parallel.reduce_dtype=bfloat16") == {"zero": 2}
    assert not {"moments", "reduce_dtype", "recipe"} & {key.split(".")[1] for key in KEYS}


def test_a_choice_fits() -> None:
    def of(**shares: float) -> Any:
        def share(config: RunConfig) -> float:
            parallel = config.parallel
            return max([0.5, *(shares[k] for k in shares if getattr(parallel, k) == TAKEN[k])])

        return share

    assert chosen("", share=of(zero=0.96)) == {"reduce_by": "all_to_all", "copy_engines": True}
    assert chosen("", share=of(zero=0.95)) == SHARED
    assert chosen(f"{PIPELINE} parallel.zero=1", share=of(schedule=0.96)) == {
        "schedule": "Interleaved1F1B"
    }
    assert chosen("", share=0.97) == SHARED  # none needs more
    assert chosen("", share=float("inf")) == {}  # unknown
    assert chosen("", share=1.5) == {}


TAKEN = {"zero": 2, "schedule": "ZBVZeroBubble"}


def test_chunks_where_logits_do_not_fit() -> None:
    assert chosen("", share=needs_chunks)["loss_chunks"] == 4
    assert chosen("", share=lambda c: 8 / (2 + c.train.loss_chunks))["loss_chunks"] == 8
    assert chosen("", share=lambda c: 16 / (2 + c.train.loss_chunks))["loss_chunks"] == 16
    assert chosen("", share=lambda c: 32 / (2 + c.train.loss_chunks)) == {}
    assert "loss_chunks" not in chosen("", share=1.0)
    assert chosen(ALONE, share=needs_chunks) == {"loss_chunks": 4}


def test_recomputation_where_activations_do_not_fit() -> None:
    """The fastest mode that fits; not with another key of the section, nor after chunks that do."""
    assert chosen(ALONE, share=needs_recomputation) == {"mode": "attention"}
    assert chosen(f"{ALONE} recompute.offload=false", share=needs_recomputation) == {}
    assert chosen(ALONE, share=lambda c: 2 * needs_recomputation(c)) == {}
    assert chosen(ALONE, share=lambda c: needs_chunks(c) * needs_recomputation(c) / 1.3) == {
        "loss_chunks": 4
    }
    assert "mode" not in chosen(ALONE, share=1.0)
    assert "mode" not in chosen(ALONE, share=float("inf"))


SMALL_GPT = (
    "model.name=gpt model.size=125m model.override.max_seq_len=1024 train.seq_len=1024 "
    "train.global_batch=32 train.micro_batch={}"
)
SMALL_QWEN = "model.name=qwen3 model.size=0.6b train.seq_len=4096 train.micro_batch={0} {1}"
LLAMA = "model.size={0} train.seq_len=8192 train.micro_batch=1 train.global_batch={1}"
GRAPHS = [
    # Measured (benchmarks/RESULTS.md): 2.36 and 1.04 times as fast.
    (SMALL_GPT.format(8), 1, "h200", True),
    (SMALL_GPT.format(32), 1, "h200", True),
    # "The host does not bind at 4 sequences."
    (SMALL_QWEN.format(4, "train.global_batch=4"), 1, "h200", False),
    (SMALL_QWEN.format(1, "train.global_batch=4"), 1, "h200", True),
    (SMALL_QWEN.format(1, "train.global_batch=32"), 8, "h200", False),  # several GPUs
    (SMALL_QWEN.format(1, "train.global_batch=4"), 1, "h100", True),  # a host as that of the H200
    (LLAMA.format("8b", 2), 2, "h200", False),
    (LLAMA.format("8b", 64), 8, "h200", False),
    (LLAMA.format("1b", 4), 1, "h200", False),
    # Not measured: eager blocks, documents, several hosts, adapters; excluded: marks of modules.
    (SMALL_GPT.format(8) + " compile.enable=false", 1, "h200", False),
    (SMALL_GPT.format(8) + " data.mask_documents=true", 1, "h200", False),
    (SMALL_QWEN.format(1, "train.global_batch=64"), 16, "h200", False),
    (SMALL_GPT.format(8) + " lora.rank=8", 1, "h200", False),
    (SMALL_GPT.format(8) + " metrics.nvtx=true", 1, "h200", False),
    (SMALL_GPT.format(8) + " compile.cuda_graphs=off", 1, "h200", False),
    (SMALL_GPT.format(8) + " train.dtype=float32", 1, "h200", False),  # no times
    (SMALL_GPT.format(8) + " train.steps=2", 1, "h200", False),
    # Two steps, three, and any number.
    (SMALL_GPT.format(8) + " train.steps= train.tokens=65536", 1, "h200", False),
    (SMALL_GPT.format(8) + " train.steps= train.tokens=65537", 1, "h200", True),
    (SMALL_GPT.format(8) + " train.steps= train.epochs=1", 1, "h200", False),
    # Code of the user.
    (SMALL_GPT.format(8) + " optim.name=torch.optim:AdamW", 1, "h200", False),
    (SMALL_GPT.format(8) + " model.name=dtron.models.gpt:GPT", 1, "h200", False),
]


@pytest.mark.parametrize(("words", "world", "row", "expected"), GRAPHS)
def test_a_cuda_graph_where_the_host_is_slower(
    words: str, world: int, row: str, expected: bool
) -> None:
    """By the real planner; the rest of the config stays as it is without the choice."""
    config = RunConfig.load(CONFIGS / "llama3_8b.toml", words.split())
    found = of_hardware(config, world, hardware(row))
    row_of_log = found.chosen.get("compile.cuda_graphs")
    assert (found.config.compile.cuda_graphs == "step", row_of_log is not None) == (expected,) * 2
    assert not expected or 'compile.cuda_graphs = "step" (the host needs longer' in found.line()


def test_a_cuda_graph_fits() -> None:
    def share(config: RunConfig) -> float:
        return 0.96 if config.compile.cuda_graphs == "step" else 0.5

    words = "compile.enable=true"
    assert "cuda_graphs" not in chosen(words, share=share, seconds=launches, world=1)
    slower = {"off": 1.0, "step": 0.96}  # within the differences of hosts
    found = chosen(words, seconds=lambda c: slower[c.compile.cuda_graphs], world=1)
    assert "cuda_graphs" not in found


POLICIES = {"none": 1.3, "selective": 0.7, "attention": 0.5, "full": 0.3}
"""Memory of a mode in all blocks, as a fraction."""


def needs_policy(config: RunConfig) -> float:
    recompute, n_layers = config.recompute, 8
    share = sum(recompute.acts_on(i) for i in range(n_layers)) / n_layers
    whole = share * POLICIES[recompute.mode] + (1 - share) * POLICIES["none"]
    return whole * (0.4 if recompute.offload else 1.0)


def takes(config: RunConfig) -> float:
    """Seconds: each of the cheaper modes and fewer blocks are faster, and offload is slowest."""
    return 2 - needs_policy(config.changed(recompute={"offload": False})) + config.recompute.offload


def policy(words: str, scale: float, machine: Machine = HOST) -> dict[str, Any]:
    config = config_of(f"recompute.mode=auto model.override.n_layers=8 {words}")
    run = ModelCandidate(config, 8)
    found = choose(run, machine, lambda c: scale * needs_policy(c), takes)
    recompute = found.config.recompute.model_dump(exclude_defaults=True)
    chosen = {k.split(".")[1]: v["value"] for k, v in found.chosen.items() if k[:9] == "recompute"}
    recompute.pop("ffn_chunks", None)
    assert not machine.gpus or chosen == {"mode": "none", **recompute}
    return recompute


def test_the_fastest_policy_that_fits() -> None:
    """`none` if it fits, else as few blocks as fit, offload only where nothing else does."""
    assert policy("", 0.7) == {}
    assert policy("", 0.8) == {"mode": "selective", "first": 2}
    assert policy("", 1.0) == {"mode": "attention", "first": 4}
    assert policy("", 1.9) == {"mode": "attention"}
    assert policy("", 3.0) == {"mode": "full"}
    assert policy("", 4.0)["offload"]
    assert policy("", 40.0) == {"mode": "full", "offload": True}  # the least memory
    assert policy("", float("inf")) == {}  # unknown memory
    assert policy("recompute.ffn_chunks=2", 0.8) == {"mode": "attention", "first": 2}
    assert policy("", 4.0, Machine()) == {}
    assert chosen("recompute.mode=auto", share=float("inf")) == {"mode": "none"}
    config = config_of("recompute.mode=auto recompute.offload=true")
    assert any("recompute.offload" in error for error in all_broken(ModelCandidate(config, 8)))


def test_a_policy_is_chosen_from_plans() -> None:
    """Of the real planner: fits in memory, and is not slower than modes of all blocks."""
    words = "model.size=8b train.seq_len=8192 train.micro_batch=2 train.global_batch=16"
    row = hardware("h100")
    found = of_hardware(config_of(f"{words} recompute.mode=auto"), 8, row)
    run = Resolved.of(found.config, 8)
    assert fits(run, memory(run), row)
    assert "the fastest policy that fits" in found.chosen["recompute.mode"]["reason"]
    for mode in ("selective", "attention", "full"):
        other = Resolved.of(found.config.changed(recompute={"mode": mode, "first": 0}), 8)
        if fits(other, memory(other), row):
            assert predict(run, row).step <= predict(other, row).step


def test_errors_are_those_of_a_run_without_choices() -> None:
    """Degrees that do not multiply, a model that does not exist: rules report them."""
    for words in ("parallel.dp_shard=3", "model.size=none", f"{TP} model.override.n_heads=3"):
        assert chosen(words, world=7) == {}


def test_cpus_have_the_defaults() -> None:
    """Of every shipped config, and of one with "auto", which no code sees."""
    for path in CONFIGS.glob("*.toml"):
        config = RunConfig.load(path)
        found = planner.of_place(config, Place(rank=0, local_rank=0, world_size=8))
        if not torch.cuda.is_available():
            assert (found.config, found.chosen, found.line()) == (config, {}, "")
    plain = RunConfig()
    unset = " ".join(f"{key}=auto" for key in KEYS if key != "recompute.mode")
    assert config_of(unset) == config_of()
    place = Place(rank=0, local_rank=0, world_size=8)
    found = planner.of_place(config_of("recompute.mode=auto"), place, Machine())
    assert found.config.recompute.mode == "none"
    assert (plain.parallel.zero, plain.parallel.schedule, plain.train.loss_chunks) == (3, "1F1B", 1)


def test_each_automatic_key_has_a_row() -> None:
    sections = {k: v.annotation for k, v in RunConfig.model_fields.items()}
    known = {
        f"{section}.{name}"
        for section, model in sections.items()
        if isinstance(model, type) and issubclass(model, Section)
        for name in model.automatic
    }
    assert known == set(KEYS)
    assert len(KEYS) == len(known)


def test_the_resolved_config_repeats_the_run() -> None:
    """It holds every value, so that nothing is chosen again on another machine."""
    run = ModelCandidate(config_of(TP), 8)
    found = choose(run, HOST, lambda _: 0.5)
    again = RunConfig.of(tomllib.loads(found.config.to_toml()))
    assert again == found.config
    assert again.parallel.copy_engines is again.parallel.async_tp is True
    assert choose(replace(run, config=again), HOST, lambda _: 0.5).chosen == {}
    assert choose(replace(run, config=again), Machine(), lambda _: 0.5).config == again


def test_a_run_logs_one_line_and_writes_what_was_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {
        "parallel.zero": {"value": 2, "reason": "it fits"},
        "parallel.reduce_by": {"value": "all_to_all", "reason": "half the bytes"},
    }
    config = tiny(tmp_path / "run", parallel__zero=2, train__steps=1)
    Trainer(config, lambda *_: Automatic(config, chosen)).fit()
    logging.getLogger("dtron").handlers.clear()
    lines = [line for line in capsys.readouterr().out.splitlines() if "automatically" in line]
    (line,) = lines
    assert line.endswith(
        'chosen automatically: parallel.zero = 2 (it fits), parallel.reduce_by = "all_to_all" '
        "(half the bytes)"
    )
    assert json.loads((tmp_path / "run/run.json").read_text())["automatic"] == chosen
    written = (tmp_path / "run/config.toml").read_text()
    assert 'zero = 2  # chosen automatically; "auto" chooses again\n' in written
    assert "loss_chunks = 1\n" in written
    assert RunConfig.load(tmp_path / "run/config.toml").parallel.zero == 2
    config = tiny(tmp_path / "run", checkpoint__resume="latest", train__steps=2)
    Trainer(config).fit()
    said = capsys.readouterr().out
    assert "parallel.zero = 3, but 2 was chosen automatically for" in said
    assert "parallel.reduce_by = 'reduce_scatter', but 'all_to_all' was chosen auto" in said


@pytest.mark.gpu
def test_a_start_on_a_gpu_records_a_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path / "run", train__dtype="bfloat16", compile__enable=True, train__steps=5)
    Trainer(config, planner.at_start).fit()
    logging.getLogger("dtron").handlers.clear()
    log = capsys.readouterr().out
    assert 'compile.cuda_graphs = "step" (the host needs longer' in log
    assert log.count("the gradients of a step are one CUDA graph from now on") == 1
    assert "compile.cuda_graphs" in json.loads((tmp_path / "run/run.json").read_text())["automatic"]


def test_shipped_configs_are_fast_as_they_are() -> None:
    """On the hardware that their comments name."""
    h200 = hardware("h200")
    for name, world, expected in (
        ("llama3_8b", 4, {"reduce_by": "all_to_all", "copy_engines": True}),
        ("llama3_8b_32k", 4, {**SHARED, "cp_method": "ulysses"}),
        ("llama3_8b_128k", 4, {**SHARED, "cp_method": "ulysses"}),
        ("gpt_7.1b", 2, {"async_tp": True}),
    ):
        found = of_hardware(RunConfig.load(CONFIGS / f"{name}.toml"), world, h200)
        values = {key.split(".")[1]: row["value"] for key, row in found.chosen.items()}
        if torch.__version__ >= "2.15":
            expected = {k: v for k, v in expected.items() if k not in ("reduce_by", "copy_engines")}
        assert values == expected, name


def test_a_plan_shows_what_a_start_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "llama3_8b.toml")
    words = ["plan", "--config", config, "--world-size", "4", "parallel.zero=auto"]
    assert commands([*words, "--hardware", "h200"]) == 0
    assert "chosen automatically: parallel.zero = 2 (" in capsys.readouterr().out
    assert commands([*words, "--hardware", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["automatic"]["parallel.zero"]["value"], found["parallel"]["zero"]) == (2, 2)
    assert commands([*words, "--hardware", "h200", "--json", "parallel.zero=3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["automatic"].get("parallel.zero"), found["parallel"]["zero"]) == (None, 3)


def chosen_at_a_start(config: RunConfig, machines: list[Machine]) -> tuple[int, dict[str, Any]]:
    """On one rank: how many predictions it made, and what it trains with."""
    predicted, place = [], Place.of_environment()
    Machine.of_place = classmethod(lambda _, place: machines[place.rank])  # type: ignore[assignment]
    share = planner._share
    planner._share = lambda *given: predicted.append(given) or share(*given)
    found = planner.at_start(config, place, meet(place, 60))
    assert found == Automatic.of(config, found.chosen)
    assert found.config.recompute.mode != "auto"
    return len(predicted), {key: row["value"] for key, row in found.chosen.items()}


H200 = replace(HOST, host=4, memory=150e9)


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([H200] * 4, {f"parallel.{key}": value for key, value in SHARED.items()}),
        ([*[H200] * 3, replace(H200, nvlink=False)], {"parallel.zero": 2}),
        ([replace(H200, host=8), *[H200] * 3], {"parallel.zero": 2}),
        ([*[H200] * 3, replace(H200, memory=hardware("h100").outside + 1e6)], {}),
        ([*[H200] * 3, Machine()], {}),
    ],
    ids=["equal", "one without NVLink", "hosts differ", "one has less memory", "one has no GPU"],
)
def test_rank_0_chooses_by_what_all_machines_have(
    machines: list[Machine], expected: dict[str, Any]
) -> None:
    """And alone predicts: once where everything fits."""
    if torch.__version__ >= "2.15":
        expected = {key: value for key, value in expected.items() if key == "parallel.zero"}
    config = config_of()
    if not machines[-1].gpus:  # the default takes the place of "auto" on all ranks
        config = config_of("recompute.mode=auto")
    (n, first), *others = run_ranks(4, chosen_at_a_start, config, machines)
    assert first == expected
    fits_nowhere = not expected and all(machine.gpus for machine in machines)
    assert n > 1 if fits_nowhere else n == bool(expected)
    assert [found for _, found in others] == [expected] * 3
    assert [n for n, _ in others] == [0] * 3


def test_predictions_are_few() -> None:
    """One where everything fits."""
    asked: list[RunConfig] = []

    def used(config: RunConfig) -> float:
        asked.append(config)
        return 0.5

    choose(ModelCandidate(config_of(TP), 8), HOST, used)
    assert len(asked) == 1


def test_a_choice_may_mend_a_default() -> None:
    """1F1B has a stage a rank; a run that stays refused has no choices."""
    two = f"{PIPELINE} parallel.stages_per_rank=2"
    assert chosen(two) == {"zero": 2, "schedule": "ZBVZeroBubble"}
    run = ModelCandidate(config_of(f"{two} parallel.tp=2"), 8)
    assert choose(run, HOST, lambda _: 0.5).chosen == {}


def test_headroom_is_left_where_it_can_be() -> None:
    """Also by what saves memory: before, 0.97 fitted without recomputation."""
    shares = {"none": 0.97, "selective": 0.96, "attention": 0.5, "full": 0.4}
    assert chosen(ALONE, share=lambda c: shares[c.recompute.mode]) == {"mode": "attention"}
    shares = {"none": 1.2, "selective": 0.98, "attention": 0.97, "full": 0.96}
    assert chosen(ALONE, share=lambda c: shares[c.recompute.mode]) == {"mode": "selective"}


def test_what_saves_memory_is_chosen_together() -> None:
    def share(config: RunConfig) -> float:
        activations = {"none": 0.8, "selective": 0.7, "attention": 0.6, "full": 0.1}
        return 0.5 + 0.5 / config.train.loss_chunks + activations[config.recompute.mode]

    assert chosen(ALONE, share=share) == {"mode": "full", "loss_chunks": 4}
    searched = chosen(f"{ALONE} recompute.mode=auto", share=share, seconds=lambda _: 1.0)
    assert (searched["mode"], searched["loss_chunks"]) == ("full", 16)


MIXTURE_OF_LITTLE_ROOM = f"{MIXTURE} compile.enable=true {ALONE}"


def test_what_saves_memory_leaves_the_other_choices() -> None:
    """Dispatch that does not fit without recomputation, and a method of context parallelism."""
    found = chosen(MIXTURE_OF_LITTLE_ROOM, share=lambda c: 0.7 * needs_recomputation(c) + 0.23)
    assert found == {"mode": "selective", "dispatcher": "symmetric_memory"}
    shares = {"none": 1.3, "selective": 0.9, "attention": 0.8, "full": 0.7}
    for mode in ("", "recompute.mode=auto"):
        words = f"{CP} {ALONE} {mode}"
        found = chosen(words, share=lambda c: shares[c.recompute.mode], seconds=lambda _: 1.0)
        assert (found.pop("mode"), found.pop("cp_method")) == ("selective", "ulysses")
        assert not found.keys() - {"first"}


def test_a_policy_may_be_worth_more_than_another_choice() -> None:
    """ZeRO-2 fits with full recomputation, which costs more than it gains."""

    def share(config: RunConfig) -> float:
        modes = {"none": 1.3, "selective": 0.9, "attention": 0.85, "full": 0.5}
        return modes[config.recompute.mode] + (0.4 if config.parallel.zero == 2 else 0)

    def seconds(config: RunConfig) -> float:
        modes = {"none": 1.0, "selective": 1.1, "attention": 1.2, "full": 1.3}
        return modes[config.recompute.mode] - (0.02 if config.parallel.zero == 2 else 0)

    words = "parallel.reduce_by=reduce_scatter"
    assert chosen(words, share=share) == {"mode": "selective"}
    searched = chosen(f"{words} recompute.mode=auto", share=share, seconds=seconds)
    assert searched["mode"] == "selective"
    assert "zero" not in searched


def test_chunks_that_leave_no_headroom_are_better_than_none() -> None:
    shares = {1: 1.2, 4: 1.1, 8: 0.97, 16: 0.96}
    assert chosen("", share=lambda c: shares[c.train.loss_chunks])["loss_chunks"] == 8


def test_a_planner_that_fails_stops_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planner, "memory", lambda _: 1 // 0)
    found = of_hardware(config_of(), 8, hardware("h200"))
    assert (found.config, found.chosen) == (config_of(), {})
    assert (
        "the planner failed; settings that depend on predictions keep their defaults" in caplog.text
    )


@pytest.mark.parametrize(
    ("name", "linked"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA B200", True),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA H100 NVL", False),
        ("NVIDIA A100-PCIE-40GB", False),
        ("NVIDIA L40S", False),
        ("NVIDIA GeForce RTX 4090", False),
    ],
)
def test_links_of_gpus_by_name(name: str, linked: bool) -> None:
    assert has_nvlink(name) == linked


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a CPU here")
def test_a_start_chooses_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine that says it has GPUs; rules about it, which knows better, refuse async TP."""
    monkeypatch.setattr(Machine, "of_place", lambda _: replace(HOST, memory=150e9))
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = config_of(TP)
    found = planner.of_place(config, Place.of_environment())
    assert found.chosen.keys() == {f"parallel.{name}" for name in SHARED}
    given = []

    def trainer(config: RunConfig, choose: Any) -> None:
        given.append((config, choose))
        raise RuntimeError("stopped here")

    monkeypatch.setattr("dtron.training.trainer.Trainer", trainer)
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml().replace("zero = 3\n", ""))
    with pytest.raises(RuntimeError, match="stopped here"):
        main(["--config", str(file)])
    ((started, choose_for),) = given
    assert "zero" not in started.parallel.model_fields_set
    assert choose_for is planner.at_start
    keys = [f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert main(["--config", str(file), "--dry-run", *keys]) == 0
    assert "chosen automatically: parallel.zero = 2 (" in capsys.readouterr().out
    words = [*keys, "parallel.tp=4", "compile.enable=true", "parallel.async_tp=auto"]
    assert main(["--config", str(file), "--dry-run", "--hardware", "h200", *words]) == 0
    assert "parallel.async_tp = true (" in capsys.readouterr().out  # of H200s, not of this machine


def test_a_machine_is_what_its_ranks_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {2, 3})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Properties())

    def of(
        world: int, local: int, hosts: str = "", exported: bool = True
    ) -> tuple[bool, int, bool]:
        for name, value in (
            ("GROUP_WORLD_SIZE", hosts),
            ("LOCAL_WORLD_SIZE", str(local) * exported),
        ):
            monkeypatch.delenv(name, raising=False)
            if value:
                monkeypatch.setenv(name, value)
        found = Machine.of_place(Place(0, 0, world, local_world_size=local))
        assert found.memory == (150e9 if found.gpus else float("inf"))
        return found.gpus, found.host, found.nvlink

    assert of(8, 4, "2") == (True, 4, False)  # GPUs 2 and 3 do not reach each other
    assert of(4, 2) == (True, 2, True)
    assert of(12, 8, "2") == of(12, 4, "2") == (True, 1, True)  # hosts of 8 and 4
    assert of(8, 8)[2] is False  # two ranks share a GPU
    assert of(4, 4, exported=False) == (True, 1, True)  # srun: perhaps of several hosts
    monkeypatch.setattr(_Properties, "name", "NVIDIA H200 NVL")
    assert of(4, 2) == (True, 2, False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert of(4, 4) == (False, 1, False)


class _Properties:
    total_memory = 150e9
    name = "NVIDIA H200"
