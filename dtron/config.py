"""One run, described: typed sections, read from TOML and `section.key=value`, written back as TOML.

Every field carries its docstring below it; `train.py --help` prints them. Choices are Literals,
units are in the names, values are frozen. What depends on several sections is checked by
`RunConfig.validate_for(world_size)`; what needs the model or the data is checked in preflight.py.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dtron.errors import ConfigError, config_error, nearest

Degree = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
DEGREES: tuple[Degree, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
ExpertDegree = Literal["pp", "dp_replicate", "edp_shard", "ep", "etp"]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class Run(Section):
    """Where a run lives."""

    dir: str = "runs/default"
    """Run directory: config, metrics, TensorBoard logs and checkpoints. Reusing one keeps what
    is in it: files of an earlier run are renamed with a number."""


class Model(Section):
    """Which model, and how its attention is computed."""

    name: str = "llama"
    """A row of dtron.models.MODELS: llama, qwen3 or gpt."""
    size: str = "debug"
    """A size of that model: for llama debug, 1b, 3b, 8b, 70b or 405b."""
    override: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's own config that replace those of the size, as `[model.override]`."""
    attention: Literal["auto", "fa4", "cudnn", "flash_attn", "flash", "flex", "sdpa", "math"] = (
        "auto"
    )
    """Attention backend; `auto` takes the best one available and the log says which."""


class Parallel(Section):
    """Degrees of parallelism. World size = pp x dp_replicate x dp_shard x cp x tp."""

    dp_replicate: int = Field(default=1, ge=1)
    """Data-parallel replicas: gradients are all-reduced over this axis."""
    dp_shard: int = Field(default=-1, ge=-1)
    """Data-parallel ranks that share parameters, gradients and optimizer state; -1: the rest."""
    cp: int = Field(default=1, ge=1)
    """Context parallelism: ranks that share each sequence. Not built yet."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallelism: ranks that share each layer's heads and neurons."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallelism: ranks that share the layers."""
    ep: int = Field(default=1, ge=1)
    """Expert parallelism, a second view of the dp_shard x cp x tp ranks. Not built yet."""
    etp: int = Field(default=1, ge=1)
    """Tensor parallelism inside experts, in the second view. Not built yet."""
    zero: Literal[1, 2, 3] = 3
    """What dp_shard shards. 3: parameters, gradients, optimizer state; parameters are gathered
    for each forward and backward. 2: gradients and optimizer state; parameters are gathered once
    a step. 1: optimizer state; gradients are reduced once a step. Beside the sharded 16 bytes a
    parameter (12 of weights and AdamW moments in fp32, 4 of gradient), 2 and 1 hold 2 bytes a
    parameter in bfloat16, and 1 holds a whole gradient of `reduce_dtype` as well."""
    reduce: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients are reduced under accumulation. `micro_batch`: each time, gradients stay
    sharded. `step`: once, the unsharded gradients of all parameters are held meanwhile (32 GB for
    8B parameters in float32). `auto`: `step` for zero = 1 and for pure replication
    (dp_shard = 1), else `micro_batch`."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over data-parallel ranks. bfloat16 halves the bytes; it
    is refused where it would sum micro-batches too: several of them with `step` or replicas."""
    prefetch: int = Field(default=1, ge=0)
    """How many units ahead parameters are gathered while the current one computes, in forward and
    in backward."""
    sequence_parallel: bool = True
    """With tp > 1, split the sequence over tp between attention and feed-forward: norms, dropout
    and residuals cost memory and time for T / tp tokens. Off, each rank holds all tokens."""
    async_tp: bool = False
    """With tp > 1 on GPUs, overlap tensor parallelism's all-gathers and reduce-scatters with the
    matrix products that need them (symmetric memory)."""
    schedule: str = "1F1B"
    """Pipeline schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble, DualPipeV, or the path of a .csv file with your own."""
    stages_per_rank: int = Field(default=0, ge=0)
    """Pipeline stages a rank; 0: what the schedule takes by default."""
    pp_layout: str | list[int] | list[list[str]] = ""
    """Which layers are in which stage: counts of layers, a layout string such as `Ettt|tttL`, or a
    list of module names for each stage; empty: balanced, the head counted by its size."""
    defer_head: int = Field(default=0, ge=0)
    """With pp > 1 and a schedule of whole backwards: of how many micro-batches the head's weight
    gradients are put off until the pipeline drains. Each holds its logits' gradient meanwhile."""
    high_priority: list[Degree] = Field(default_factory=list)
    """Mesh axes whose NCCL collectives run on streams of high priority, on GPUs."""
    timeout_seconds: int = Field(default=600, ge=1)
    """How long a collective may wait for its peers before the run is aborted."""

    def reduces_once(self, sharded: bool) -> bool:
        """Whether gradients are reduced once a step: `reduce` resolved, with ranks that share
        parameters or without."""
        if self.reduce == "auto":
            return self.zero == 1 or not sharded
        return self.reduce == "step"


class Train(Section):
    """The loop: how many steps of how many sequences, in which precision."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    seq_len: int = Field(default=2048, ge=2)
    """Tokens a sequence."""
    global_batch: int = Field(default=8, ge=1)
    """Sequences a step, over all ranks and micro-batches."""
    micro_batch: int = Field(default=1, ge=1)
    """Sequences a rank computes at once."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of computation. Parameters and optimizer state are float32 in both cases."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, data order and dropout. The same seed gives the same losses in
    every layout."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    max_skipped: int = Field(default=10, ge=1)
    """A step whose gradients are not finite is skipped; this many in a row end the run."""
    eval_interval: int = Field(default=0, ge=0)
    """Steps between validations on the held-out split; 0: only after the last step."""
    eval_sequences: int = Field(default=64, ge=0)
    """Held-out sequences a validation takes, if there are so many; 0: no validation."""
    sample_tokens: int = Field(default=0, ge=0)
    """Tokens of text to generate after the last step."""
    sample_prompt: str = "In the beginning"
    """What the generated text starts with."""
    gc_interval: int = Field(default=200, ge=1)
    """Steps between garbage collections, which all ranks do at the same step."""


class Data(Section):
    """What is trained on."""

    source: Literal["files", "hf"] = "files"
    """`files`: JSONL or text files, tokenized once and cached. `hf`: a Hugging Face data set
    (needs the extra `hf`)."""
    paths: tuple[str, ...] = Field(default=("assets/kjv.jsonl.gz",), strict=False)
    """Files of `source = "files"`, relative to the working directory: .jsonl with one document a
    line, .txt with one document a file, both also as .gz."""
    text_key: str = "text"
    """Key of a JSON line, or column of a Hugging Face data set, that holds the text."""
    tokenizer: str = "byte"
    """`byte`, or the path of a Hugging Face tokenizer.json."""
    eos_token: str = ""
    """Token that ends a document; empty: the tokenizer's usual one."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of documents held out for validation, chosen by a hash of their position."""
    mask_documents: bool = False
    """Keep attention inside each document and restart positions there."""
    cache_dir: str = "~/.cache/dtron"
    """Where tokenized data is kept."""
    hf_path: str = ""
    """Name or local path of the Hugging Face data set."""
    hf_name: str = ""
    """Its configuration, if it has several."""
    hf_split: str = "train"
    """Its split."""
    hf_streaming: bool = False
    """Read it as a stream instead of tokenizing it once; documents then come in stream order and
    the first ones are the held-out split."""


class Optim(Section):
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    """A row of dtron.optim.OPTIMIZERS. `sgd` is plain: no momentum, no decay."""
    lr: float = Field(default=3e-4, ge=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""


class Schedule(Section):
    """The learning rate as a function of the step; lengths are fractions of train.steps."""

    name: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """A row of dtron.optim.SCHEDULES."""
    warmup: float = Field(default=0.1, ge=0, le=1)
    """Share of the steps over which the rate rises linearly from 0."""
    decay: float = Field(default=0.2, ge=0, le=1)
    """Share of the steps over which `wsd` falls at the end; no other schedule reads it."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate over peak, for linear, cosine and wsd."""


class Recompute(Section):
    """Activation recomputation: memory for time."""

    mode: Literal["none", "full", "selective"] = "none"
    """`full`: keep a block's input only. `selective`: keep results of matrix products and
    attention, recompute the rest."""
    every: int = Field(default=1, ge=1)
    """Recompute every n-th block; 1: all of them."""


class Compile(Section):
    """torch.compile, block by block."""

    enable: bool = False
    """Compile every block and the loss."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """`inductor`, or `aot_eager` to check graph capture without generating code."""


class Float8(Section):
    """float8 training; no keys yet."""


class Checkpoint(Section):
    """Saving and resuming."""

    interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only after the last step."""
    last: bool = True
    """Save after the last step."""
    resume: str = ""
    """`latest` (of this run directory; starts afresh if there is none), or the path of a run or
    of one checkpoint; empty: start afresh."""
    keep: int = Field(default=2, ge=0)
    """How many of the newest checkpoints are kept; 0: all."""


class Metrics(Section):
    """What is logged."""

    log_interval: int = Field(default=10, ge=1)
    """Steps between rows of metrics.jsonl; validations write a row too. The device is waited for at
    these steps alone."""
    tensorboard: bool = True
    """Write TensorBoard logs."""
    profile_start: int = Field(default=0, ge=0)
    """First step of a torch.profiler window; 0: no profile."""
    profile_steps: int = Field(default=3, ge=1)
    """Length of that window; the trace goes to RUN/trace/."""


class Debug(Section):
    """Costly checks."""

    collectives: bool = False
    """Count the collectives of the first step, calls and bytes by axis, into run.json."""
    deterministic: bool = False
    """Deterministic kernels: the same run twice gives the same bits."""


class RunConfig(Section):
    """A whole run."""

    run: Run = Run()
    model: Model = Model()
    parallel: Parallel = Parallel()
    train: Train = Train()
    data: Data = Data()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    recompute: Recompute = Recompute()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    debug: Debug = Debug()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "RunConfig":
        """Read a TOML file and apply `section.key=value` overrides in order.

        Raises:
            ConfigError: the file is missing or not TOML, or a key or value is not legal.
        """
        try:
            values = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"--config {path}: no such file") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"--config {path}: {error}") from None
        for override in overrides:
            _apply_override(values, override)
        return cls.of(values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Build from nested mappings, with ConfigErrors instead of pydantic's."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise config_error(error, "", [key for key, _, _ in fields(cls)]) from None

    def to_toml(self) -> str:
        """All fields with their values; reading it back gives an equal config."""
        parts = []
        for name in type(self).model_fields:
            section = getattr(self, name)
            parts.append(f"[{name}]")
            tables: dict[str, dict[str, Any]] = {}
            for key in type(section).model_fields:
                value = getattr(section, key)
                if isinstance(value, dict):
                    tables[f"{name}.{key}"] = value
                else:
                    parts.append(f"{key} = {_toml(value)}")
            for header, table in tables.items():
                parts += ["", f"[{header}]"] if table else []
                parts += [f"{key} = {_toml(value)}" for key, value in table.items()]
            parts.append("")
        return "\n".join(parts)

    def degrees(self, world_size: int) -> dict[Degree, int]:
        """Degree of every mesh axis, outermost first, with dp_shard = -1 resolved.

        Raises:
            ConfigError: the degrees do not multiply to the world size.
        """
        return resolve_degrees({a: getattr(self.parallel, a) for a in DEGREES}, world_size)

    def micro_batches(self, world_size: int) -> int:
        """Micro-batches a step: global_batch / (dp_replicate * dp_shard * micro_batch)."""
        degrees = self.degrees(world_size)
        ranks = degrees["dp_replicate"] * degrees["dp_shard"]
        each = ranks * self.train.micro_batch
        if self.train.global_batch % each:
            below = self.train.global_batch // each * each
            legal = " or ".join(str(n) for n in (below, below + each) if n)
            raise ConfigError(
                f"train.global_batch = {self.train.global_batch} is not a multiple of "
                f"{ranks} data-parallel ranks x train.micro_batch = {self.train.micro_batch}; "
                f"use {legal}"
            )
        return self.train.global_batch // each

    def validate_for(self, world_size: int) -> None:
        """Refuse what cannot run on this many ranks, or settings that contradict each other."""
        self._refuse_unbuilt_axes()
        self.degrees(world_size)
        self.micro_batches(world_size)
        self._refuse_bfloat16_accumulation(world_size)
        self._refuse_contradictions()
        self._refuse_settings_without_effect()

    def _refuse_bfloat16_accumulation(self, world_size: int) -> None:
        degrees = self.degrees(world_size)
        once = self.parallel.reduces_once(sharded=degrees["dp_shard"] * degrees["cp"] > 1)
        summed = once or degrees["dp_replicate"] > 1
        micro_batches = self.micro_batches(world_size)
        if self.parallel.reduce_dtype == "bfloat16" and micro_batches > 1 and summed:
            raise ConfigError(
                f'parallel.reduce_dtype = "bfloat16" would sum {micro_batches} micro-batches in '
                'bfloat16 in this layout; use "float32", or one micro-batch'
            )

    def _refuse_unbuilt_axes(self) -> None:
        for axis in ("cp", "ep", "etp"):
            if (value := getattr(self.parallel, axis)) != 1:
                raise ConfigError(f"parallel.{axis} = {value}: this axis is not built yet; use 1")

    def _refuse_settings_without_effect(self) -> None:
        """A key that differs from its default must act."""
        defaults = {key: default for key, default, _ in fields(type(self))}
        for keys, acts, need in self._effects():
            for key in keys:
                section, name = key.split(".")
                value = getattr(getattr(self, section), name)
                if not acts and value != defaults[key]:
                    raise ConfigError(f"{key} = {value!r} has no effect without {need}")

    def _effects(self) -> list[tuple[tuple[str, ...], bool, str]]:
        """(keys, whether they act in this run, what they need)."""
        hf, validates = self.data.source == "hf", self.train.eval_sequences > 0
        adamw = tuple(f"optim.{key}" for key in ("beta1", "beta2", "eps", "weight_decay"))
        tp = self.parallel.tp > 1
        pipeline = tuple(
            f"parallel.{key}" for key in ("schedule", "stages_per_rank", "pp_layout", "defer_head")
        )
        falls = self.schedule.name in ("linear", "cosine", "wsd")
        return [
            (adamw, self.optim.name == "adamw", 'optim.name = "adamw"'),
            (("parallel.sequence_parallel", "parallel.async_tp"), tp, "parallel.tp > 1"),
            (pipeline, self.parallel.pp > 1, "parallel.pp > 1"),
            (("schedule.decay",), self.schedule.name == "wsd", 'schedule.name = "wsd"'),
            (("schedule.min_ratio",), falls, "a schedule that falls: linear, cosine or wsd"),
            (("recompute.every",), self.recompute.mode != "none", "a recompute.mode"),
            (("compile.backend",), self.compile.enable, "compile.enable = true"),
            (("data.hf_path", "data.hf_name", "data.hf_split"), hf, 'data.source = "hf"'),
            (("data.hf_streaming",), hf, 'data.source = "hf"'),
            (("data.paths",), not hf, 'data.source = "files"'),
            (("train.eval_interval",), validates, "train.eval_sequences"),
            (("train.sample_prompt",), self.train.sample_tokens > 0, "train.sample_tokens"),
            (("metrics.profile_steps",), self.metrics.profile_start > 0, "metrics.profile_start"),
        ]

    def _refuse_contradictions(self) -> None:
        parallel = self.parallel
        rules = [
            (
                parallel.zero == 1 and parallel.reduce == "micro_batch",
                'parallel.reduce = "micro_batch" with parallel.zero = 1 would shard gradients, '
                "which is zero = 2; use one of the two",
            ),
            (
                parallel.async_tp and self.compile.enable and self.compile.backend != "inductor",
                f"parallel.async_tp with compile.backend = {self.compile.backend!r}: inductor is "
                "the backend that fuses; use it, or compile.enable = false",
            ),
            (
                parallel.async_tp and not parallel.sequence_parallel,
                "parallel.async_tp overlaps the all-gathers and reduce-scatters of "
                "parallel.sequence_parallel, which is false; set it to true",
            ),
            (
                self.schedule.warmup + self.schedule.decay > 1 and self.schedule.name == "wsd",
                f"schedule.warmup = {self.schedule.warmup} and schedule.decay = "
                f"{self.schedule.decay} overlap; their sum is at most 1",
            ),
            (
                self.data.source == "hf" and not self.data.hf_path,
                'data.source = "hf" needs data.hf_path',
            ),
            (
                self.data.source == "files" and not self.data.paths,
                "data.paths is empty; name at least one file",
            ),
        ]
        for broken, message in rules:
            if broken:
                raise ConfigError(message)


def resolve_degrees(degrees: Mapping[Degree, int], world_size: int) -> dict[Degree, int]:
    """Replace dp_shard = -1 by what is left of the world size and check the product."""
    fixed = math.prod(n for axis, n in degrees.items() if not (axis == "dp_shard" and n == -1))
    resolved = dict(degrees)
    if degrees["dp_shard"] == 0:
        raise ConfigError("parallel.dp_shard = 0; use -1 (what is left of the world) or at least 1")
    if degrees["dp_shard"] == -1 and world_size % fixed == 0:
        resolved["dp_shard"] = world_size // fixed
    if math.prod(resolved.values()) != world_size:
        shown = ", ".join(f"{axis} = {n}" for axis, n in degrees.items())
        others = math.prod(n for axis, n in degrees.items() if axis != "dp_shard")
        fix = f"start {fixed} ranks"
        if world_size % others == 0:
            fix += f", or set parallel.dp_shard = {world_size // others} or -1"
        raise ConfigError(
            f"parallel degrees ({shown}) do not multiply to the world size {world_size}; {fix}"
        )
    return resolved


def resolve_expert_degrees(
    degrees: Mapping[Degree, int], ep: int, etp: int
) -> dict[ExpertDegree, int]:
    """The experts' view of the same ranks: ep x etp inside dp_shard x cp x tp.

    Args:
        degrees: all resolved.
        ep: ranks that hold different experts.
        etp: ranks that share each expert's matrices.
    Returns:
        Degrees from outermost to innermost; edp_shard ranks share an expert's optimizer state.

    Raises:
        ConfigError: ep x etp does not divide the ranks there are; names what does.
    """
    ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    if ranks % (ep * etp):
        legal = [n for n in range(1, ranks + 1) if ranks % (n * etp) == 0]
        fix = f"use parallel.ep = {', '.join(map(str, legal))}" if legal else "lower parallel.etp"
        raise ConfigError(
            f"parallel.ep = {ep} x parallel.etp = {etp} does not divide the {ranks} ranks of "
            f"dp_shard x cp x tp; {fix}"
        )
    return {
        "pp": degrees["pp"],
        "dp_replicate": degrees["dp_replicate"],
        "edp_shard": ranks // (ep * etp),
        "ep": ep,
        "etp": etp,
    }


def fields(model: type[BaseModel]) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default, docstring) of every field of every section."""
    for name, section in model.model_fields.items():
        for key, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            default = field.get_default(call_default_factory=True)
            yield f"{name}.{key}", default, " ".join((field.description or "").split())


def choices(section: str, key: str) -> tuple[Any, ...]:
    """The legal values of a key that has a fixed list of them, else an empty tuple."""
    kind = type(getattr(RunConfig(), section)).model_fields[key].annotation
    return get_args(kind) if get_origin(kind) is Literal else ()


def _apply_override(values: dict[str, Any], text: str) -> None:
    key, separator, raw = text.partition("=")
    parts = key.strip().split(".")
    if not separator or len(parts) < 2:
        raise ConfigError(f"override {text!r} is not of the form section.key=value (no spaces)")
    known = [name for name, _, _ in fields(RunConfig)]
    if parts[0] not in RunConfig.model_fields:
        raise ConfigError(f"unknown key {key}{nearest(key, known)}")
    try:
        value = tomllib.loads(f"x = {raw}")["x"]
    except tomllib.TOMLDecodeError:
        value = raw  # a bare word is a string
    table = values
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {text!r}: {part} is not a table")
    table[parts[-1]] = value


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False)  # strings, bools and numbers are written alike
