"""One run, described: read from TOML and `section.key=value`, written back as TOML, checked.

The sections and their keys are in `dtron/config/schema.py`. What depends on several is checked by
`RunConfig.validate_for(world_size)`; what needs the model or the data is checked in preflight.py.
"""

import copy
import json
import math
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dtron.config.schema import (
    DEGREES,
    Checkpoint,
    Compile,
    CpMethod,
    Data,
    Debug,
    Degree,
    ExpertDegree,
    Faults,
    Float8,
    Metrics,
    Model,
    Optim,
    Parallel,
    Recompute,
    Run,
    Schedule,
    Section,
    Train,
)
from dtron.errors import ConfigError, cause_of, config_error, nearest_key, note, shorten
from dtron.io.untrusted import TOML_BYTES, parse, parse_toml, read_text_or_pipe

_PIPE_SECONDS = 10.0
"""In which a config from a pipe has to end."""

__all__ = [
    "DEGREES",
    "Checkpoint",
    "Compile",
    "CpMethod",
    "Data",
    "Debug",
    "Degree",
    "ExpertDegree",
    "Faults",
    "Float8",
    "Metrics",
    "Model",
    "Optim",
    "Parallel",
    "Recompute",
    "Run",
    "RunConfig",
    "Schedule",
    "Section",
    "Train",
    "choices",
    "fields",
    "resolve_degrees",
    "resolve_expert_degrees",
]


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
    faults: Faults = Faults()
    debug: Debug = Debug()

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> "RunConfig":
        """Read a TOML file, or a pipe with TOML, and apply `section.key=value` overrides in order.

        Args:
            complete: fills in what `checkpoint.initial` knows
            (`dtron.checkpoint.initial_weights.completed`).
        Raises:
            ConfigError: the file is missing or not TOML, or a key or value is not legal.
        """
        try:
            values = parse_toml(read_text_or_pipe(path, TOML_BYTES, _PIPE_SECONDS))
        except FileNotFoundError:
            raise ConfigError(f"--config {path}: no such file") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config {path}: {cause_of(error, path)}") from None
        own = copy.deepcopy(values)
        for override in overrides:
            _apply_override(values, override)
        config = cls.of(values)
        if given := {override.partition("=")[0].strip() for override in overrides}:
            config = config._without_dependants(values, cls._idle_in(own) | given)
        if complete is not None and (config.checkpoint.initial or config.model.size == "initial"):
            config = cls.of(complete(values))
        return config

    @classmethod
    def _idle_in(cls, values: Mapping[str, Any]) -> set[str]:
        """Keys without effect in a config file alone, which may need what overrides add."""
        try:
            return {key for key, _, _ in cls.model_validate(values)._idle_keys()}
        except ValidationError:
            return set()

    def _without_dependants(self, values: dict[str, Any], kept: Collection[str]) -> "RunConfig":
        """Leave out what an override has made idle, as `train.sample_tokens=0` a prompt.

        Args:
            values: of this config, nested; changed.
            kept: keys that are not left out: given on the command line, or idle in the file.
        """
        config = self
        while dropped := [each for each in config._idle_keys() if each[0] not in kept]:
            for key, value, need in dropped:
                section, name = key.split(".")
                values[section].pop(name)
                note(f"{key} = {value!r} has no effect without {need}; it is left out")
            config = self.of(values)
        return config

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
                    parts.append(f"{key} = {toml_value(value)}")
            for header, table in tables.items():
                parts += ["", f"[{header}]"] if table else []
                parts += [f"{key} = {toml_value(value)}" for key, value in table.items()]
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
        for rule in self.rules(world_size):
            rule()

    def rules(self, world_size: int) -> tuple[Callable[[], object], ...]:
        """The checks of `validate_for` in their order; each raises what it refuses."""
        ep, etp = self.parallel.ep, self.parallel.etp
        return (
            lambda: resolve_expert_degrees(self.degrees(world_size), ep, etp),
            lambda: self.micro_batches(world_size),
            lambda: self._refuse_idle_axes(world_size),
            lambda: self._refuse_unshared(world_size),
            lambda: self._refuse_narrow_accumulation(world_size),
            self._refuse_contradictions,
            self._refuse_settings_without_effect,
        )

    def _refuse_idle_axes(self, world_size: int) -> None:
        degrees = self.degrees(world_size)
        for axis in self.parallel.high_priority:
            if degrees[axis] == 1:
                wide = [name for name, n in degrees.items() if n > 1]
                raise ConfigError(
                    f"parallel.high_priority names {axis}, which has one rank and no collectives; "
                    f"use {' or '.join(wide) or '[]'}"
                )

    def _refuse_narrow_accumulation(self, world_size: int) -> None:
        degrees = self.degrees(world_size)
        once = self.parallel.reduces_once(sharded=degrees["dp_shard"] * degrees["cp"] > 1)
        summed = once or degrees["dp_replicate"] > 1
        micro_batches = self.micro_batches(world_size)
        if self.parallel.reduce_dtype == "bfloat16" and micro_batches > 1 and summed:
            raise ConfigError(
                f'parallel.reduce_dtype = "bfloat16" would sum {micro_batches} micro-batches in '
                'bfloat16 in this layout; use "float32", or one micro-batch'
            )
        if self.parallel.reduce_by == "all_to_all" and micro_batches > 1 and once:
            raise ConfigError(
                f'parallel.reduce_by = "all_to_all" would round sums of {micro_batches} '
                'micro-batches to train.dtype; use "reduce_scatter", or parallel.reduce = '
                '"micro_batch"'
            )

    def _refuse_unshared(self, world_size: int) -> None:
        degrees = self.degrees(world_size)
        keys = ("parallel.reduce_by", "parallel.copy_engines")
        need = "parallel.dp_shard or parallel.cp > 1: no ranks share parameters"
        self._refuse_idle([(keys, degrees["dp_shard"] * degrees["cp"] > 1, need)])

    def _refuse_settings_without_effect(self) -> None:
        self._refuse_idle(self._effects())

    def _refuse_idle(self, effects: list[tuple[tuple[str, ...], bool, str]]) -> None:
        """A key that differs from its default must act; `effects` as for `_idle_keys`."""
        for key, value, need in self._idle_keys(effects):
            raise ConfigError(f"{key} = {value!r} has no effect without {need}")

    def _idle_keys(
        self, effects: list[tuple[tuple[str, ...], bool, str]] | None = None
    ) -> Iterator[tuple[str, Any, str]]:
        """(key, value, what it needs) of keys that differ from their default and do not act.

        Args:
            effects: (keys, whether they act in this run, what they need); None: of `_effects`.
        """
        defaults = {key: default for key, default, _ in fields(type(self))}
        for keys, acts, need in self._effects() if effects is None else effects:
            for key in keys:
                section, name = key.split(".")
                value = getattr(getattr(self, section), name)
                if not acts and value != defaults[key]:
                    yield key, value, need

    def _effects(self) -> list[tuple[tuple[str, ...], bool, str]]:
        """(keys, whether they act in this run, what they need)."""
        hf, validates = self.data.source == "hf", self.train.eval_sequences > 0
        adamw = tuple(
            f"optim.{key}" for key in ("beta1", "beta2", "eps", "weight_decay", "moments")
        )
        parallel, replicas = self.parallel, self.faults.replicas_interval
        spikes = ("faults.spike_window", "faults.spike_deviations")
        rollback = ("faults.rollback_steps", "faults.max_rollbacks")
        tp = parallel.tp > 1
        hierarchical = self.parallel.cp > 1 and "hierarchical" in self.parallel.cp_methods()
        pipeline = tuple(
            f"parallel.{key}" for key in ("schedule", "stages_per_rank", "pp_layout", "defer_head")
        )
        profile = ("metrics.profile_steps", "metrics.profile_shapes")
        alone = ("recipe", "dispatch")  # of float8
        float8 = tuple(f"float8.{key}" for key in Float8.model_fields if key not in alone)
        falls = self.schedule.name in ("linear", "cosine", "wsd")
        return [
            (adamw, self.optim.name == "adamw", 'optim.name = "adamw"'),
            (("parallel.sequence_parallel", "parallel.async_tp"), tp, "parallel.tp > 1"),
            (pipeline, self.parallel.pp > 1, "parallel.pp > 1"),
            (
                ("parallel.dispatcher", "float8.dispatch"),
                parallel.ep * parallel.etp > 1,
                "parallel.ep or etp > 1",
            ),
            (
                ("parallel.ep_capacity",),
                parallel.dispatcher == "symmetric_memory",
                'parallel.dispatcher = "symmetric_memory"',
            ),
            (("parallel.cp_method",), self.parallel.cp > 1, "parallel.cp > 1"),
            (("parallel.cp_inner",), hierarchical, 'parallel.cp_method = "hierarchical"'),
            (("schedule.decay",), self.schedule.name == "wsd", 'schedule.name = "wsd"'),
            (("schedule.min_ratio",), falls, "a schedule that falls: linear, cosine or wsd"),
            (("recompute.every",), self.recompute.mode != "none", "a recompute.mode"),
            (float8, self.float8.recipe != "", "a float8.recipe"),
            (
                ("float8.amax_history",),
                self.float8.scaling == "delayed",
                'float8.scaling = "delayed"',
            ),
            (("compile.backend",), self.compile.enable, "compile.enable = true"),
            (("checkpoint.keep_every",), self.checkpoint.keep > 0, "checkpoint.keep"),
            (
                ("checkpoint.fast_interval", "checkpoint.fast_keep"),
                self.checkpoint.fast_dir != "",
                "checkpoint.fast_dir",
            ),
            (
                ("checkpoint.verify",),
                bool(self.checkpoint.resume or self.checkpoint.initial),
                "checkpoint.resume or checkpoint.initial",
            ),
            (
                ("checkpoint.allow_data_change",),
                bool(self.checkpoint.resume or self.checkpoint.initial),
                "checkpoint.resume or checkpoint.initial",
            ),
            (("data.hf_path", "data.hf_name", "data.hf_split"), hf, 'data.source = "hf"'),
            (("data.hf_streaming",), hf, 'data.source = "hf"'),
            (("data.paths",), not hf, 'data.source = "files"'),
            (("train.eval_interval",), validates, "train.eval_sequences"),
            (("train.sample_prompt",), self.train.sample_tokens > 0, "train.sample_tokens"),
            (spikes, self.faults.on_spike != "", "faults.on_spike"),
            (rollback, self.faults.on_spike == "rollback", 'faults.on_spike = "rollback"'),
            (("faults.on_corruption",), replicas > 0, "faults.replicas_interval"),
            (
                ("faults.replicas_interval",),
                parallel.dp_replicate * parallel.tp * parallel.pp > 1,
                "ranks that hold copies: parallel.dp_replicate, tp or pp > 1",
            ),
            (profile, self.metrics.profile_start > 0, "metrics.profile_start"),
        ]

    def _refuse_contradictions(self) -> None:
        parallel, faults = self.parallel, self.faults
        tokens = self.train.micro_batch * self.train.seq_len // parallel.cp
        rules = [
            (
                self.optim.moments == "bfloat16" and self.optim.beta2 > 0.99,
                f'optim.moments = "bfloat16" with optim.beta2 = {self.optim.beta2}: a second '
                "moment that changes by less than 1/512 a step is rounded back and never falls; "
                "use optim.beta2 = 0.99 or less",
            ),
            (
                faults.on_spike != "" and self.train.steps <= faults.spike_window,
                f"faults.on_spike = {faults.on_spike!r} with faults.spike_window = "
                f"{faults.spike_window} and train.steps = {self.train.steps}: nothing is a spike "
                "in the first window; use a smaller faults.spike_window, or more steps",
            ),
            (
                parallel.zero == 1 and parallel.reduce == "micro_batch",
                'parallel.reduce = "micro_batch" with parallel.zero = 1 would shard gradients, '
                "which is zero = 2; use one of the two",
            ),
            (
                self.train.loss_chunks > tokens,
                f"train.loss_chunks = {self.train.loss_chunks} is more than the {tokens} tokens of "
                "a micro-batch (train.micro_batch x train.seq_len / parallel.cp); use at most "
                f"{tokens}",
            ),
            (
                parallel.defer_head > 0 and self.train.loss_chunks > 1,
                f"parallel.defer_head = {parallel.defer_head} with train.loss_chunks = "
                f"{self.train.loss_chunks}: the head's weight gradients are computed with the loss "
                "and cannot be put off; use parallel.defer_head = 0 or train.loss_chunks = 1",
            ),
            (
                parallel.async_tp and not parallel.sequence_parallel,
                "parallel.async_tp overlaps the all-gathers and reduce-scatters of "
                "parallel.sequence_parallel, which is false; set it to true",
            ),
            (
                self.faults.on_spike == "rollback" and not self.checkpoint.interval,
                'faults.on_spike = "rollback" with checkpoint.interval = 0: there would be no '
                "checkpoint to go back to; set checkpoint.interval",
            ),
            (
                self.faults.on_spike == "rollback"
                and self.checkpoint.keep > 0
                and (self.checkpoint.keep - 1) * self.checkpoint.interval
                < self.faults.rollback_steps,
                f"checkpoint.keep = {self.checkpoint.keep} deletes what faults.on_spike = "
                f'"rollback" goes back to: ({self.checkpoint.keep} - 1) x checkpoint.interval = '
                f"{self.checkpoint.interval} steps are fewer than faults.rollback_steps = "
                f"{self.faults.rollback_steps}; keep more",
            ),
            (
                self.faults.hang_seconds >= parallel.timeout_seconds,
                f"faults.hang_seconds = {self.faults.hang_seconds} is not below "
                f"parallel.timeout_seconds = {parallel.timeout_seconds}, at which collectives end "
                "the run before the watchdog can tell why; lower the first or raise the second",
            ),
            (
                self.faults.verify_step > self.train.steps,
                f"faults.verify_step = {self.faults.verify_step} is after the last step "
                f"(train.steps = {self.train.steps}); use at most that",
            ),
            (
                self.metrics.profile_start > self.train.steps,
                f"metrics.profile_start = {self.metrics.profile_start} is after the last step "
                f"(train.steps = {self.train.steps}); use at most that",
            ),
            (
                self.train.eval_interval > 0 and not self.data.validation_fraction,
                f"train.eval_interval = {self.train.eval_interval} has no effect with "
                "data.validation_fraction = 0: nothing is held out; use a share such as 0.02",
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
        elif legal := _nearest_degree(degrees, world_size, others):
            fix += f", or set {legal}"
        raise ConfigError(
            f"parallel degrees ({shown}) do not multiply to the world size {world_size}; {fix}"
        )
    return resolved


def _nearest_degree(degrees: Mapping[Degree, int], world_size: int, others: int) -> str:
    """One lower degree with which all but dp_shard divide the world size; empty if none does."""
    for axis in ("tp", "cp", "pp", "dp_replicate"):
        rest = others // degrees[axis]
        for n in range(degrees[axis] - 1, 0, -1):
            if world_size % (rest * n) == 0:
                return f"parallel.{axis} = {n} and parallel.dp_shard = -1"
    return ""


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


@cache
def fields(model: type[BaseModel]) -> tuple[tuple[str, Any, str], ...]:
    """(dotted key, default, docstring) of every field of every section."""
    return tuple(
        (
            f"{name}.{key}",
            field.get_default(call_default_factory=True),
            " ".join((field.description or "").split()),
        )
        for name, section in model.model_fields.items()
        for key, field in section.annotation.model_fields.items()  # type: ignore[union-attr]
    )


def choices(section: str, key: str) -> tuple[Any, ...]:
    """The legal values of a key that has a fixed list of them, else an empty tuple."""
    kind = type(getattr(RunConfig(), section)).model_fields[key].annotation
    return get_args(kind) if get_origin(kind) is Literal else ()


def _apply_override(values: dict[str, Any], text: str) -> None:
    key, separator, raw = text.partition("=")
    parts = key.strip().split(".")
    known = [name for name, _, _ in fields(RunConfig)]
    if not separator or len(parts) < 2:
        hint = nearest_key(key.strip(), known) if separator else ""
        raise ConfigError(
            f"override {text!r} is not of the form section.key=value (no spaces){hint}"
        )
    unsets = not raw.strip()
    unknown = unsets and key.strip() not in known and parts[:2] != ["model", "override"]
    if parts[0] not in RunConfig.model_fields or unknown:
        raise ConfigError(f"unknown key {key}{nearest_key(key, known)}")
    table = values
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {text!r}: {part} is not a table")
    if unsets:  # back to the default
        table.pop(parts[-1], None)
        return
    table[parts[-1]] = _override_value(text, raw)


def _override_value(text: str, raw: str) -> Any:
    try:
        if raw.lstrip().startswith(("[", "{")):  # others have no keys, or are words with dots
            return parse_toml(f"x = {raw}")["x"]
        return parse(f"x = {raw}", tomllib.loads)["x"]
    except tomllib.TOMLDecodeError:
        return raw  # a bare word is a string
    except ValueError as error:
        raise ConfigError(f"override {shorten(text)!r}: {error}") from None


def toml_value(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False)  # strings, bools and numbers are written alike
