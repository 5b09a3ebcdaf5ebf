"""torchtitan beside dtron: the same model, tokens, precision and recomputation on the same GPUs.

A config is said in the peer's words (what has no equal there is refused), its log is read, and
which facts its log shows, so that equality is asserted from what both runs say of themselves and
not from what was asked for:

    parameters      all of the model, a tied weight once
    tokens_a_step   over all ranks
    seq_len         tokens a sequence
    dtype           of computation
    recompute       mode

Speeds are compared over windows of as many steps as the peer logs at once: median of the windows
on both sides. dtron logs as often, so that in each window both wait for the device once. Figures of
FLOPs are not used; tokens a second are. Both get the variables of the point's environment.

torchtitan: flags, log lines and models of release 0.2.2. Its log says "Mixed precision training is
disabled" where it computes in float32 whatever was asked for, and the size that it logs lacks the
embedding where that is tied to the head (it is left out of a sum that had it once already).
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
from dtron.data.sources import CORPORA
from dtron.errors import ConfigError

PEER, RELEASE = "torchtitan", "0.2.2"
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_CONFIG = "config.json"
"""Where in its directory it writes its resolved config."""
Facts = dict[str, Any]
_CHARACTERS = 10**7


@dataclass(frozen=True)
class PeerRun:
    """What a peer's log shows."""

    facts: Facts
    speeds: list[float]
    """Tokens a second and device, of each window behind the warm-up."""
    memory_gib: float


def dtron_facts(outcome: Outcome) -> Facts:
    """The same facts of a run of dtron, from its run.json and resolved config."""
    config = RunConfig.of(outcome.config)
    return {
        "parameters": outcome.facts["parameters"],
        "tokens_a_step": config.train.global_batch * config.train.seq_len,
        "seq_len": config.train.seq_len,
        "dtype": outcome.facts["dtype"],
        "recompute": recompute_name(config),
    }


def recompute_name(config: RunConfig) -> str:
    """The mode, with `every` where it is not each block."""
    mode, every = config.recompute.mode, config.recompute.every
    return mode if every == 1 or mode == "none" else f"{mode}, every {every}"


def unequal(own: Facts, theirs: Facts) -> list[str]:
    """Each fact that differs, in words; empty where the two do the same work."""
    return [
        f"{name}: {own[name]} against {theirs.get(name)}"
        for name in own
        if own[name] != theirs.get(name)
    ]


def window_speeds(seconds: Sequence[float], window: int, tokens: float) -> list[float]:
    """Tokens a second of windows of steps; an incomplete last window is left out.

    Args:
        seconds: of each step.
        tokens: a step and device.
    """
    starts = range(0, len(seconds) - window + 1, window)
    return [tokens * window / sum(seconds[i : i + window]) for i in starts]


# -- torchtitan ------------------------------------------------------------------------------------

LOG_STEPS = 5
"""Steps that torchtitan's log rows are means of."""

_TITAN_MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("llama3", {"8b": "8B", "70b": "70B", "405b": "405B"}),
    "qwen3": (
        "qwen3",
        {size: size.upper() for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
    ),
}
# Keys without an equal, which have to keep their default.
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
    "recompute.first",
    "recompute.offload",
    "float8.recipe",
    "compile.backend",
)
_TITAN_DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


def titan_arguments(config: RunConfig, ranks: int, options: Options, directory: Path) -> list[str]:
    """A config in torchtitan's words.

    How parameters are sharded in time (`parallel.zero`) is left at torchtitan's default: it is a
    choice of layout, as any flag that --peer-args adds.
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
    if degrees["pp"] > 1:  # there a step is one local batch, cut into micro-batches
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
    """Raise for what torchtitan has no equal of."""
    name, size = config.model.name, config.model.size
    known = {name: list(sizes) for name, (_, sizes) in _TITAN_MODELS.items()}
    if size not in known.get(name, []):
        raise ConfigError(
            f"model {name} {size} is not one that torchtitan has too; use one of {known}"
        )
    if config.model.override:
        raise ConfigError(
            f"model.override = {config.model.override}: torchtitan's {name} {size} is fixed; "
            "leave it out"
        )
    defaults = {key: default for key, default, _ in fields(RunConfig)}
    for key in _TITAN_LACKS:
        section, field_name = key.split(".")
        value = getattr(getattr(config, section), field_name)
        if value != defaults[key]:
            raise ConfigError(
                f"{key} = {value!r} has no equal in torchtitan; use {defaults[key]!r}"
            )
    if name == "qwen3" and config.parallel.pp > 1:
        raise ConfigError(f"parallel.pp = {config.parallel.pp}: torchtitan's qwen3 has no pipeline")
    if config.recompute.mode in ("attention", "selective"):
        raise ConfigError(
            f'recompute.mode = "{config.recompute.mode}": torchtitan keeps other results, so the '
            'two would do different work; use "none" or "full"'
        )


def _titan_recompute(config: RunConfig) -> dict[str, Any]:
    if config.recompute.mode == "full" and config.recompute.every > 1:
        every = config.recompute.every  # its "selective" with a number recomputes each n-th block
        option = "activation_checkpoint.selective_ac_option"
        return {"activation_checkpoint.mode": "selective", option: every}
    return {"activation_checkpoint.mode": config.recompute.mode}


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TITAN_STEP = re.compile(r"step: +(\d+) .*memory: +([\d.]+)GiB.* tps: ([\d,]+) ")
_TITAN_BATCH = re.compile(r"global batch size (\d+), .*sequence length (\d+),")
_TITAN_SIZE = re.compile(r"size: ([\d,]+) total parameters")
_TITAN_RECOMPUTE = re.compile(r"Applied (\w+) activation checkpointing")


def read_titan(log: str, resolved: dict[str, Any], warmup: int) -> PeerRun:
    """Read torchtitan's log; facts that it does not show are missing.

    Args:
        resolved: its config, as it wrote it.
        warmup: rows count whose steps all lie behind it.
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
    """Parameters of an embedding that is tied to the head, by the model's arguments in the log."""
    if not re.search(r'"enable_weight_tying": true', log):
        return 0
    sizes = [re.search(rf'"{name}": (\d+)', log) for name in ("vocab_size", "dim")]
    return math.prod(int(size[1]) for size in sizes if size)


def write_titan_data(directory: Path, texts: Sequence[str]) -> None:
    """Documents and a byte-level tokenizer in the files that torchtitan reads."""
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
    """Raises ConfigError if the peer is not installed."""
    if importlib.util.find_spec(PEER) is None:
        raise ConfigError(
            f"--against {PEER}: it is not installed in this environment; "
            f"pip install {PEER}=={RELEASE}"
        )


@dataclass
class Comparison:
    """One pair of runs."""

    peer: str
    own: Facts
    theirs: Facts
    differs: list[str]
    """Facts that are not equal: then there is no ratio."""
    own_speed: float = 0.0
    """Median of the windows' tokens a second and device."""
    peer_speed: float = 0.0
    ratio: float | None = None
    """dtron over the peer."""
    peer_memory_gib: float = 0.0


def refusal(config: RunConfig, options: Options) -> str:
    """Why the peer cannot do the same work, or an empty string."""
    try:
        titan_arguments(config, options.ranks, options, Path())
    except ConfigError as error:
        return str(error)
    return ""


def config_for_peer(own: Outcome) -> RunConfig:
    """What a run did, without what it chose for itself and the peer has no equal for: such choices
    change how the same numbers are computed."""
    config, defaults = RunConfig.of(own.config), {key: d for key, d, _ in fields(RunConfig)}
    for key in own.facts.get("automatic", {}).keys() & {*_TITAN_LACKS}:
        section, name = key.split(".")
        config = config.changed(**{section: {name: defaults[key]}})
    return config


def run_peer(
    own: Outcome, extra: Sequence[str], options: Options, directory: Path
) -> dict[str, Any]:
    """Run a peer on what a run of dtron did, and set them against each other.

    Args:
        extra: arguments that the user adds.
    Returns:
        `run`, how the peer's run ended, and, if it ended well, `comparison`.
    """
    config = config_for_peer(own)
    arguments = [*titan_arguments(config, options.ranks, options, directory.absolute()), *extra]
    environment = {**own.environment, **_ENVIRONMENT}
    outcome = Outcome(PEER, "ok", directory=str(directory), environment=environment)
    outcome.command = shell_command(["torchrun", *arguments], environment)
    write_titan_data(directory, documents(config))
    log = launch(outcome, arguments, environment, options, directory)
    if outcome.status != "ok":
        return {"run": outcome.as_json()}
    try:
        outcome.config = json.loads((directory / _CONFIG).read_text())
        run = read_titan(log, outcome.config, options.warmup)
    except (OSError, ValueError, KeyError) as error:  # as of a release that writes others
        why = f"its files cannot be read: {type(error).__name__}: {error}"
        outcome.status, outcome.reason = "failed", one_line(why)
        return {"run": outcome.as_json()}
    found = compare(own, run, step_seconds(own)[options.timed])
    return {"run": outcome.as_json(), "comparison": asdict(found)}


def documents(config: RunConfig) -> list[str]:
    """Text of the run's own data for the peer to read, again and again: the first 10 million
    characters, or fewer."""
    texts, length = [], 0
    for text in CORPORA[config.data.source](config.data).texts():
        texts.append(text)
        length += len(text)
        if length >= _CHARACTERS:
            break
    return texts


def compare(outcome: Outcome, run: PeerRun, seconds: Sequence[float]) -> Comparison:
    """Set a pair of runs against each other; without a ratio where they did different work.

    Args:
        outcome: of dtron.
        seconds: its timed steps.
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
    """Both resolved configs of each point, a row for each pair, and the median of ratios."""
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
