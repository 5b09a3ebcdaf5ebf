"""Comparison with torchtitan: the same model, tokens, dtype and recomputation on the same GPUs.

A config is translated to torchtitan's flags; settings without an equivalent are refused. To check
that both runs trained in the same way, metadata that the runs report are compared, not settings:

    parameters      of the whole model; a tied weight counts once
    tokens_a_step   over all ranks
    seq_len         tokens per sequence
    dtype           of computation
    recompute       mode

Speeds are medians of tokens per second over windows of LOG_STEPS steps, torchtitan's log interval.
dtron logs at the same interval, so that both wait for the device once per window. Both runs get the
environment variables of the point.

Flags, log lines and models are those of torchtitan 0.2.2. If torchtitan logs "Mixed precision
training is disabled", it computes in `training.dtype`. Its logged number of parameters excludes an
embedding that is tied to the head, since torchtitan subtracts it from a sum that counts it once.
"""

import importlib.util
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dtron.bench.report import step_seconds
from dtron.bench.run import Options, Outcome, launch, one_line, shell_command, torchrun
from dtron.config import RunConfig, fields
from dtron.data.corpus.documents import Reading
from dtron.data.sources import corpus_of
from dtron.errors import ConfigError

PEER, RELEASE = "torchtitan", "0.2.2"
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_CONFIG = "config.json"
"""File in the run's directory to which torchtitan writes its resolved config."""
Facts = dict[str, Any]
_CHARACTERS = 10**7


@dataclass(frozen=True)
class PeerRun:
    """Results of a torchtitan run, from its log."""

    facts: Facts
    speeds: list[float]
    """Tokens per second and device in each window after the warm-up."""
    memory_gib: float


def dtron_facts(outcome: Outcome) -> Facts:
    """Return the compared metadata of a dtron run, from its run.json and resolved config."""
    config = RunConfig.of(outcome.config)
    return {
        "parameters": outcome.facts["parameters"],
        "tokens_a_step": config.train.global_batch * config.train.seq_len,
        "seq_len": config.train.seq_len,
        "dtype": outcome.facts["dtype"],
        "recompute": recompute_name(config),
    }


def recompute_name(config: RunConfig) -> str:
    """Return the recompute mode, with `every` if only every n-th block recomputes."""
    mode, every = config.recompute.mode, config.recompute.every
    return mode if every == 1 or mode == "none" else f"{mode}, every {every}"


def unequal(own: Facts, theirs: Facts) -> list[str]:
    """Return a line for each metadata entry that differs between the runs; empty: all are equal."""
    return [
        f"{name}: {own[name]} in dtron, {theirs.get(name)} in {PEER}"
        for name in own
        if own[name] != theirs.get(name)
    ]


def window_speeds(seconds: Sequence[float], window: int, tokens: float) -> list[float]:
    """Return the tokens per second of each full window of `window` steps.

    Args:
        seconds: time of each step.
        tokens: tokens per step and device.
    """
    starts = range(0, len(seconds) - window + 1, window)
    return [tokens * window / sum(seconds[i : i + window]) for i in starts]


# -- torchtitan ------------------------------------------------------------------------------------

LOG_STEPS = 5
"""Steps per row of torchtitan's log; a row has the mean of these steps."""

_TITAN_MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("llama3", {"8b": "8B", "70b": "70B", "405b": "405B"}),
    "qwen3": (
        "qwen3",
        {size: size.upper() for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
    ),
}
# Keys without an equivalent in torchtitan; they must have their default.
_TITAN_LACKS = (
    "parallel.cp_method",
    "parallel.pp_layout",
    "parallel.defer_head",
    "parallel.reduce_dtype",
    "parallel.reduce_by",
    "parallel.copy_engines",
    "parallel.high_priority",
    "parallel.sequence_parallel",
    "data.mask_documents",
    "data.packing",
    "train.loss_chunks",
    "optim.name",
    "optim.moments",
    "optim.offload",
    "optim.groups",
    "optim.ema",
    "recompute.first",
    "recompute.modules",
    "recompute.ffn_chunks",
    "recompute.offload",
    "float8.recipe",
    "lora.rank",
    "compile.backend",
    "compile.cache_dir",
)
_TITAN_DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


def titan_arguments(config: RunConfig, ranks: int, options: Options, directory: Path) -> list[str]:
    """Return the arguments of torchrun that run torchtitan with a config's settings.

    `parallel.zero` is not translated: torchtitan's resharding keeps its default, unless --peer-args
    sets it.

    Raises:
        ConfigError: torchtitan has no equivalent of a setting.
    """
    _refuse_unequal(config)
    name, sizes = _TITAN_MODELS[config.model.name]
    train, degrees = config.train, config.degrees(ranks)
    local = train.micro_batch
    flags: dict[str, Any] = {
        "model.name": name,
        "model.flavor": sizes[config.model.size],
        "model.hf_assets_path": directory / "tokenizer",
        "training.dataset": "c4_test",
        "training.dataset_path": directory / "data",
        "training.seq_len": train.seq_len,
        "training.global_batch_size": train.global_batch,
        "training.mixed_precision_param": train.dtype,
        "training.max_norm": train.max_grad_norm,
        "training.steps": options.warmup + options.steps,
        "optimizer.lr": config.optim.lr,
        "metrics.log_freq": LOG_STEPS,
        "job.dump_folder": directory,
        "job.save_config_file": _CONFIG,
    }
    if degrees["pp"] > 1:  # with PP, torchtitan splits one local batch into micro-batches
        local = train.global_batch // (degrees["dp_replicate"] * degrees["dp_shard"])
        flags["parallelism.pipeline_parallel_microbatch_size"] = train.micro_batch
        flags["parallelism.pipeline_parallel_schedule"] = config.parallel.schedule
    flags["training.local_batch_size"] = local
    flags |= {f"parallelism.{_TITAN_DEGREES[axis]}": n for axis, n in degrees.items()}
    flags |= _titan_recompute(config)
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    words += ["--compile.enable"] if config.compile.enable else []
    asynchronous = "--parallelism.enable_async_tensor_parallel"
    words += [asynchronous] if config.parallel.async_tp else []
    return [*torchrun(ranks), "--local-ranks-filter", "0", "-m", "torchtitan.train", *words]


def _refuse_unequal(config: RunConfig) -> None:
    """Raise ConfigError if torchtitan has no equivalent of a setting."""
    name, size = config.model.name, config.model.size
    known = {name: list(sizes) for name, (_, sizes) in _TITAN_MODELS.items()}
    if size not in known.get(name, []):
        raise ConfigError(
            f"model.name = {name!r} with model.size = {size!r} is not in torchtitan; use {known}"
        )
    if config.model.override:
        raise ConfigError(
            f"model.override = {config.model.override} has no equivalent in torchtitan's {name} "
            f"{size}; leave it out"
        )
    defaults = {key: default for key, default, _ in fields(RunConfig)}
    for key in _TITAN_LACKS:
        section, field_name = key.split(".")
        value = getattr(getattr(config, section), field_name)
        if value != defaults[key]:
            raise ConfigError(
                f"{key} = {value!r} has no equivalent in torchtitan; use {defaults[key]!r}"
            )
    if name == "qwen3" and config.parallel.pp > 1:
        raise ConfigError(
            f"parallel.pp = {config.parallel.pp}: torchtitan's qwen3 has no pipeline; use 1"
        )
    if config.recompute.mode in ("attention", "selective"):
        raise ConfigError(
            f'recompute.mode = "{config.recompute.mode}": torchtitan saves other activations, so '
            'that both would do different work; use "none" or "full"'
        )


def _titan_recompute(config: RunConfig) -> dict[str, Any]:
    if config.recompute.mode == "full" and config.recompute.every > 1:
        every = config.recompute.every  # "selective" with a number n recomputes every n-th block
        option = "activation_checkpoint.selective_ac_option"
        return {"activation_checkpoint.mode": "selective", option: every}
    return {"activation_checkpoint.mode": config.recompute.mode}


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TITAN_STEP = re.compile(r"step: +(\d+) .*memory: +([\d.]+)GiB.* tps: ([\d,]+) ")
_TITAN_BATCH = re.compile(r"global batch size (\d+), .*sequence length (\d+),")
_TITAN_SIZE = re.compile(r"size: ([\d,]+) total parameters")
_TITAN_RECOMPUTE = re.compile(r"Applied (\w+) activation checkpointing")


def read_titan(log: str, resolved: dict[str, Any], warmup: int) -> PeerRun:
    """Read torchtitan's log; metadata that the log lacks is left out.

    Args:
        resolved: the resolved config that torchtitan wrote.
        warmup: number of warm-up steps; log rows that include one of them do not count.
    """
    log = _COLOURS.sub("", log)
    facts: Facts = {"dtype": resolved["training"]["mixed_precision_param"]}
    if "Mixed precision training is disabled" in log:
        facts["dtype"] = resolved["training"]["dtype"]
    if size := _TITAN_SIZE.search(log):
        facts["parameters"] = int(size[1].replace(",", "")) + _titan_tied(log)
    if batch := _TITAN_BATCH.search(log):
        facts["tokens_a_step"] = int(batch[1]) * int(batch[2])
        facts["seq_len"] = int(batch[2])
    applied = _TITAN_RECOMPUTE.search(log)
    facts["recompute"] = applied[1] if applied else "none"
    option = resolved["activation_checkpoint"]["selective_ac_option"]
    if facts["recompute"] == "selective" and option.isdigit():
        facts["recompute"] = f"full, every {option}"
    rows = [row for row in _TITAN_STEP.finditer(log) if int(row[1]) - LOG_STEPS >= warmup]
    speeds = [float(row[3].replace(",", "")) for row in rows]
    return PeerRun(facts, speeds, max((float(row[2]) for row in rows), default=0.0))


def _titan_tied(log: str) -> int:
    """Return the number of parameters of a tied embedding, from the log; 0: not tied."""
    if not re.search(r'"enable_weight_tying": true', log):
        return 0
    sizes = [re.search(rf'"{name}": (\d+)', log) for name in ("vocab_size", "dim")]
    return math.prod(int(size[1]) for size in sizes if size)


def write_titan_data(directory: Path, texts: Sequence[str]) -> None:
    """Write documents and a byte-level tokenizer to the files that torchtitan reads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([begin, end, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([begin, end])
    for folder in ("data", "tokenizer"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer/tokenizer.json"))
    settings = {"bos_token": begin, "eos_token": end, "add_bos_token": True, "add_eos_token": True}
    (directory / "tokenizer/tokenizer_config.json").write_text(
        json.dumps(settings), encoding="utf-8"
    )
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "data/data.json").write_text(lines, encoding="utf-8")


# -- running and comparing -------------------------------------------------------------------------


def require() -> None:
    """Raise ConfigError if torchtitan is not installed."""
    if importlib.util.find_spec(PEER) is None:
        raise ConfigError(
            f"--against {PEER}: {PEER} is not installed in this environment; "
            f"run pip install {PEER}=={RELEASE}"
        )


@dataclass
class Comparison:
    """Result of a pair of runs, one of dtron and one of the peer."""

    peer: str
    own: Facts
    theirs: Facts
    differs: list[str]
    """Why the runs cannot be compared, one line per reason; if not empty, `ratio` is None."""
    own_speed: float = 0.0
    """Median over windows of the tokens per second and device."""
    peer_speed: float = 0.0
    ratio: float | None = None
    """own_speed / peer_speed."""
    peer_memory_gib: float = 0.0


def refusal(config: RunConfig, options: Options) -> str:
    """Return why torchtitan cannot run the same training; empty: torchtitan can."""
    try:
        titan_arguments(config, options.ranks, options, Path())
    except ConfigError as error:
        return str(error)
    return ""


def config_for_peer(own: Outcome) -> RunConfig:
    """Return the config of a dtron run to translate to torchtitan's flags.

    It is the run's resolved config, in which automatic choices that torchtitan lacks are reset to
    their default. These choices change the speed, not the results.
    """
    config, defaults = RunConfig.of(own.config), {key: d for key, d, _ in fields(RunConfig)}
    for key in own.facts.get("automatic", {}).keys() & {*_TITAN_LACKS}:
        section, name = key.split(".")
        config = config.changed(**{section: {name: defaults[key]}})
    return config


def run_peer(
    own: Outcome, extra: Sequence[str], options: Options, directory: Path
) -> dict[str, Any]:
    """Run torchtitan with the settings of a dtron run, and compare both runs.

    Args:
        extra: arguments of --peer-args.
    Returns:
        `run`, the outcome of torchtitan's run, and, if it succeeded, `comparison`.
    """
    config = config_for_peer(own)
    arguments = [*titan_arguments(config, options.ranks, options, directory.absolute()), *extra]
    environment = {**own.environment, **_ENVIRONMENT}
    outcome = Outcome(PEER, "ok", directory=str(directory), environment=environment)
    outcome.command = shell_command(["torchrun", *arguments], environment)
    write_titan_data(directory, documents(config))
    log = launch(outcome, arguments, environment, options, directory)
    if outcome.status != "ok":
        return {"run": asdict(outcome)}
    try:
        outcome.config = json.loads((directory / _CONFIG).read_text())
        run = read_titan(log, outcome.config, options.warmup)
    except (OSError, ValueError, KeyError) as error:  # a release may use another format
        why = f"{PEER}'s config or log cannot be read: {type(error).__name__}: {error}"
        outcome.status, outcome.reason = "failed", one_line(why)
        return {"run": asdict(outcome)}
    found = compare(own, run, step_seconds(own)[options.timed])
    return {"run": asdict(outcome), "comparison": asdict(found)}


def documents(config: RunConfig) -> list[str]:
    """Return the first documents of the run's data, up to about 10 million characters.

    torchtitan reads them repeatedly. Raises ConfigError: the data source has no texts.
    """
    refusal = ConfigError(
        f"data.source = {config.data.source!r}, data.format = {config.data.format!r}: {PEER} "
        "needs texts; use data.source=files data.format=text"
    )
    if config.data.source == "prepared" or config.data.has_chats:
        raise refusal
    texts, length = [], 0
    for text in corpus_of(config.data).documents(Reading(config.data)):
        if not isinstance(text, str):  # tokens
            raise refusal
        texts.append(text)
        length += len(text)
        if length >= _CHARACTERS:
            break
    return texts


def compare(outcome: Outcome, run: PeerRun, seconds: Sequence[float]) -> Comparison:
    """Compare a run of dtron with a run of torchtitan; no ratio if the runs' metadata differ.

    Args:
        outcome: outcome of dtron's run.
        run: results of the peer's run.
        seconds: times of the timed steps of dtron's run.
    """
    own = dtron_facts(outcome)
    found = Comparison(PEER, own, run.facts, unequal(own, run.facts))
    each = own["tokens_a_step"] / outcome.facts["world_size"]
    speeds = window_speeds(seconds, LOG_STEPS, each)
    if not speeds or not run.speeds:
        found.differs.append(f"no window of {LOG_STEPS} steps was timed; raise --steps")
        return found
    found.own_speed, found.peer_speed = statistics.median(speeds), statistics.median(run.speeds)
    found.peer_memory_gib = run.memory_gib
    if not found.differs:
        found.ratio = found.own_speed / found.peer_speed
    return found


def print_comparisons(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print both resolved configs of each point, a row per pair, and the median of ratios."""
    pairs = [outcome for outcome in outcomes if "comparison" in outcome.against]
    for outcome in pairs:
        if outcome.repeat == 0:
            console.rule(f"{outcome.label}: dtron", align="left")
            console.print(RunConfig.of(outcome.config).to_toml(), markup=False, soft_wrap=True)
            console.rule(f"{outcome.label}: {outcome.against['run']['label']}", align="left")
            resolved = json.dumps(outcome.against["run"]["config"], indent=1)
            console.print(resolved, markup=False, highlight=False, soft_wrap=True)
    if pairs:
        console.print(comparison_table(pairs))
    for outcome in outcomes:
        failed = outcome.against.get("run", {}).get("reason", "")
        differs = outcome.against.get("comparison", {}).get("differs", [])
        if why := "; ".join([failed, *differs] if failed else differs):
            console.print(f"{outcome.label}: no ratio: {why}", markup=False, soft_wrap=True)


def comparison_table(pairs: Sequence[Outcome]) -> Table:
    table = Table(title="tok/s/GPU, pair by pair", title_justify="left")
    table.add_column("point", overflow="fold")
    for heading in ("repeat", "dtron", "peer", "ratio", "parameters", "tokens\nper step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("dtype", "recompute", "peer\nGiB"):
        table.add_column(heading, no_wrap=True)
    ratios: dict[str, list[float]] = {}
    for outcome in pairs:
        found = Comparison(**outcome.against["comparison"])
        facts, ratio = found.own, "–"
        if found.ratio is not None:
            ratios.setdefault(outcome.label, []).append(found.ratio)
            ratio = f"{found.ratio:.3f}"
        table.add_row(
            outcome.label,
            str(outcome.repeat + 1),
            f"{found.own_speed:,.0f}",
            f"{found.peer_speed:,.0f}",
            ratio,
            f"{facts['parameters']:,}",
            f"{facts['tokens_a_step']:,}",
            facts["dtype"],
            facts["recompute"],
            f"{found.peer_memory_gib:.1f}",
        )
    for label, values in ratios.items():
        table.add_row(label, "median", "", "", f"{statistics.median(values):.3f}")
    return table
