"""RunConfig, the settings of one run: read from TOML and `section.key=value`, written as TOML.

The sections and their keys are in `dtron/config/schema.py` and `data_section.py`; rules across
several keys are in `dtron/config/setting_rules.py` and `dtron/setup/rules.py`.
"""

import copy
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dtron.config.data_section import Data
from dtron.config.schema import (
    DEGREES,
    Checkpoint,
    Compile,
    Debug,
    Degree,
    ExpertDegree,
    Faults,
    Float8,
    Lora,
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
from dtron.config.setting_rules import idle_keys
from dtron.errors import (
    ConfigError,
    cause_of,
    config_error,
    counted,
    nearest,
    nearest_key,
    note,
    shorten,
)
from dtron.io.untrusted import TOML_BYTES, parse, parse_toml, read_text_or_pipe

_PIPE_SECONDS = 10.0
"""Time limit for reading a config from a pipe."""
_CHOSEN = 'chosen automatically; "auto" chooses again'


class RunConfig(Section):
    """All settings of a run."""

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
    lora: Lora = Lora()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    faults: Faults = Faults()
    debug: Debug = Debug()

    @classmethod
    def load(
        cls,
        path: str | Path | None,
        overrides: Sequence[str] = (),
        complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        sections: Collection[str] | None = None,
    ) -> "RunConfig":
        """Read a TOML file, or a pipe with TOML, and apply `section.key=value` overrides in order.

        Args:
            path: the file; None: defaults only.
            complete: function that sets the keys that `checkpoint.initial` determines,
                `dtron.checkpoint.initial_weights.fill_from_initial`; None: leave them as they are.
            sections: sections of the file to read; None: all.
        Raises:
            ConfigError: the file is missing or not TOML, or a key or value is not legal.
        """
        if isinstance(overrides, str | Mapping):
            raise ConfigError(
                f"overrides = {shorten(repr(overrides))} is not a list; write "
                f"RunConfig.load(FILE, {_as_overrides(overrides)})"
            )
        try:
            text = "" if path is None else read_text_or_pipe(path, TOML_BYTES, _PIPE_SECONDS)
            values = _parsed(text)
        except FileNotFoundError:
            raise ConfigError(f"--config {path}: no such file") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config {path}: {_cause_and_fix(error, str(path))}") from None
        own = copy.deepcopy(values)
        if sections is not None:
            values = {name: table for name, table in values.items() if name in sections}
        for override in overrides:
            _apply_override(values, override)
        config = cls.of(values)
        if given := {override.partition("=")[0].strip() for override in overrides}:
            kept = cls._idle_in(own) | given
            config = config._without_dependants(values, kept, logged=sections is None)
        if complete is not None and (config.checkpoint.initial or config.model.size == "initial"):
            config = cls.of(complete(values))
        return config

    @classmethod
    def _idle_in(cls, values: Mapping[str, Any]) -> set[str]:
        """Return the keys that have no effect in the config file alone, without overrides."""
        try:
            return {key for key, _, _ in idle_keys(cls.model_validate(values))}
        except ValidationError:
            return set()

    def _without_dependants(
        self, values: dict[str, Any], kept: Collection[str], logged: bool
    ) -> "RunConfig":
        """Drop keys that lose their effect by an override.

        Example: train.sample_prompt has no effect with train.sample_tokens=0.

        Args:
            values: the nested values of this config; changed in place.
            kept: keys to keep: keys of the command line, and keys that have no effect even without
                the overrides.
            logged: whether to print which keys are dropped.
        """
        config = self
        while dropped := [each for each in idle_keys(config) if each[0] not in kept]:
            for key, value, need in dropped:
                section, name = key.split(".")
                values[section].pop(name)
                if logged:
                    note(f"{key} = {value!r} has no effect without {need}; it is ignored")
            config = self.of(values)
        return config

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Build a config from nested mappings. Raises ConfigError: a key or value is not legal."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"RunConfig.of takes nested tables such as {{'train': {{'steps': 3}}}}, not "
                f"{shorten(repr(values))}; read a file with RunConfig.load(FILE)"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            known = [key for key, _, _ in fields(cls)]
            automatic = [key for key in known if is_automatic(*key.split("."))]
            raise config_error(error, "", known, automatic, values) from None

    def to_toml(self, chosen: Collection[str] = ()) -> str:
        """Return TOML of all keys with their values; reading it gives an equal config.

        Args:
            chosen: keys that were chosen automatically; they get a comment.
        """
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
                    why = f"  # {_CHOSEN}" if f"{name}.{key}" in chosen else ""
                    parts.append(f"{key} = {toml_value(value)}{why}")
            for header, table in tables.items():
                parts += ["", f"[{header}]"] if table else []
                parts += [f"{key} = {toml_value(value)}" for key, value in table.items()]
            parts.append("")
        return "\n".join(parts)

    def changed(self, **sections: Mapping[str, Any]) -> "RunConfig":
        """Return a copy with these values, given by section and key, without checking them."""
        update = {k: getattr(self, k).model_copy(update=v) for k, v in sections.items()}
        return self.model_copy(update=update)

    def degrees(self, world_size: int) -> dict[Degree, int]:
        """Return the degree of every mesh axis, outermost first, with dp_shard = -1 resolved.

        Raises:
            ConfigError: the degrees do not multiply to the world size.
        """
        return resolve_degrees({a: getattr(self.parallel, a) for a in DEGREES}, world_size)

    def micro_batches(self, world_size: int) -> int:
        """Return micro-batches per step: global_batch / (dp_replicate * dp_shard * micro_batch)."""
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

    def expert_degrees(self, world_size: int) -> dict[ExpertDegree, int]:
        """Return the degree of every axis of the experts' mesh, outermost first.

        Raises ConfigError: the degrees of this mesh or of the main mesh do not fit.
        """
        parallel = self.parallel
        return resolve_expert_degrees(self.degrees(world_size), parallel.ep, parallel.etp)

    @property
    def tokens(self) -> int:
        """Tokens per rank in one micro-batch, before tp splits them."""
        return self.train.micro_batch * self.train.seq_len // self.parallel.cp


def resolve_degrees(degrees: Mapping[Degree, int], world_size: int) -> dict[Degree, int]:
    """Replace dp_shard = -1 by the world size divided by the other degrees.

    Raises ConfigError: a degree is illegal, or the product is not the world size.
    """
    for axis, n in degrees.items():
        rest = axis == "dp_shard"
        if not isinstance(n, int) or (n < 1 and not (rest and n == -1)):
            legal = "-1 (all ranks that the other degrees leave) or " if rest else ""
            raise ConfigError(f"parallel.{axis} = {n!r}; use {legal}at least 1")
    fixed = math.prod(n for axis, n in degrees.items() if not (axis == "dp_shard" and n == -1))
    resolved = dict(degrees)
    if degrees["dp_shard"] == -1 and world_size % fixed == 0:
        resolved["dp_shard"] = world_size // fixed
    if math.prod(resolved.values()) != world_size:
        shown = ", ".join(f"{axis} = {n}" for axis, n in degrees.items())
        others = math.prod(n for axis, n in degrees.items() if axis != "dp_shard")
        fix = f"start {counted(fixed, 'rank')}"
        if world_size % others == 0:
            fix += f", or set parallel.dp_shard = {world_size // others} or -1"
        elif legal := _nearest_degree(degrees, world_size, others):
            fix += f", or set {legal}"
        raise ConfigError(
            f"parallel degrees ({shown}) do not multiply to the world size {world_size}; {fix}"
        )
    return resolved


def _nearest_degree(degrees: Mapping[Degree, int], world_size: int, others: int) -> str:
    """Suggest a lower degree of one axis; empty: no lower degree helps.

    With it, the product of all degrees except dp_shard divides the world size.

    Args:
        others: current product of all degrees except dp_shard.
    """
    for axis in ("tp", "cp", "pp", "dp_replicate"):
        rest = others // degrees[axis]
        for n in range(degrees[axis] - 1, 0, -1):
            if world_size % (rest * n) == 0:
                return f"parallel.{axis} = {n} and parallel.dp_shard = -1"
    return ""


def resolve_expert_degrees(
    degrees: Mapping[Degree, int], ep: int, etp: int
) -> dict[ExpertDegree, int]:
    """Return the degrees of the experts' mesh: edp_shard x ep x etp = dp_shard x cp x tp.

    Args:
        degrees: degrees of the mesh of the other parameters, from `resolve_degrees`.
        ep: number of ranks over which the experts are distributed.
        etp: number of ranks over which each expert's hidden width is split.
    Returns:
        Degrees from outermost to innermost; edp_shard ranks shard each expert's parameters.
    Raises:
        ConfigError: ep x etp does not divide dp_shard x cp x tp.
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
    """Return (dotted key, default, docstring) of every field of every section."""
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
    """Return the legal values of a Literal key; an empty tuple for any other key."""
    kind = type(getattr(RunConfig(), section)).model_fields[key].annotation
    if get_origin(kind) is not Literal:
        return ()
    also = ("auto",) if is_automatic(section, key) else ()
    return tuple(dict.fromkeys((*get_args(kind), *also)))


def is_automatic(section: str, key: str) -> bool:
    """Whether a key is chosen automatically if it is unset or "auto" (dtron/setup/automatic.py)."""
    return key in getattr(RunConfig(), section).automatic


_BROKEN_LINES = (
    (r"=\s*(True|False)\b", "TOML writes true and false in lower case"),
    (r"=\s*(None|null)\b", "TOML has no empty value; leave the line out"),
    (r'=\s*\[?\s*"[^"]*\\', "a backslash in \"...\" begins an escape; write '...' or \\\\"),
    (r"=\s*([A-Za-z_~./][\w~./-]*)\s*(#.*)?$", 'text is quoted in TOML; write "{}"'),
)
"""Pattern of a line that is not TOML -> fix."""


def _parsed(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError: not TOML; with a fix if _BROKEN_LINES has one."""
    if text.startswith("\ufeff"):
        raise ValueError("the file begins with a byte order mark; save it as UTF-8 without one")
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        line = text.splitlines()[int(at[1]) - 1] if at else ""
        for pattern, fix in _BROKEN_LINES:
            if at and (found := re.search(pattern, line)):
                hint = fix.format(found[1] if found.groups() else "")
                raise ValueError(f"line {at[1]}: {hint}") from None
        raise


def _cause_and_fix(error: Exception, path: str | Path) -> str:
    cause = cause_of(error, path)
    if isinstance(error, IsADirectoryError):
        file = Path(path) / "config.toml"
        fix = f"write --config {file}" if file.is_file() else "name a TOML file"
        return f"{error.strerror}; {fix}"
    if isinstance(error, UnicodeDecodeError):
        utf16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
        return f"not UTF-8{' but UTF-16' if utf16 else ''}; save it as UTF-8"
    return cause


def _as_overrides(given: str | Mapping[str, Any]) -> list[str]:
    if isinstance(given, str):
        return given.split()
    tables = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    flat = {key: value for key, value in given.items() if key not in tables}
    flat |= {
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }
    return [f"{key}={value}" for key, value in flat.items()]


def _apply_override(values: dict[str, Any], text: str) -> None:
    key, separator, raw = text.partition("=")
    parts = key.strip().split(".")
    known = [name for name, _, _ in fields(RunConfig)]
    if not separator or len(parts) < 2:
        hint = nearest_key(key.strip(), known) if separator else ""
        if key.strip() in RunConfig.model_fields:
            first = next(name for name in known if name.startswith(f"{key.strip()}."))
            default = {name: value for name, value, _ in fields(RunConfig)}[first]
            wanted = isinstance(default, bool) and raw.strip() in ("true", "false")
            example = raw.strip() if wanted else toml_value(default)
            raise ConfigError(
                f"override {text!r}: {key.strip()} is a section; write {key.strip()}.KEY=value, "
                f"such as {first}={example}"
            )
        raise ConfigError(
            f"override {text!r} is not of the form section.key=value (no spaces){hint}"
        )
    unsets = not raw.strip()
    unknown = unsets and key.strip() not in known and tuple(parts[:2]) not in _NESTED
    if parts[0] not in RunConfig.model_fields or unknown:
        raise ConfigError(f"unknown key {key}{nearest_key(key, known)}")
    table: Any = values
    for part in parts[:-1]:
        table = _table_of(table, part, text)
    if isinstance(table, list):
        named = ".".join(parts[:-1])
        raise ConfigError(f"override {text!r}: write {named}.NAME.KEY=value, or {named}='[...]'")
    if unsets:  # back to the default
        table.pop(parts[-1], None)
        return
    table[parts[-1]] = _override_value(text, raw)


_NESTED = (("model", "override"), ("data", "mixture"), ("data", "validation"))
"""Keys whose values have keys of their own."""


def _table_of(table: Any, key: str, override: str) -> Any:
    """Return the table or list of a key, or of a list of tables the one that has this name."""
    if isinstance(table, list):
        tables = {str(each.get("name")): each for each in table if isinstance(each, dict)}
        if key not in tables:
            known = f"{nearest(key, tables)}; use {', '.join(tables) or 'a list of tables'}"
            raise ConfigError(f"override {override!r}: no table has the name {key}{known}")
        return tables[key]
    found = table.setdefault(key, {})
    if not isinstance(found, dict | list):
        raise ConfigError(f"override {override!r}: {key} is not a table")
    return found


def _override_value(text: str, raw: str) -> Any:
    try:
        if raw.lstrip().startswith(("[", "{")):  # only these have keys, which `parse_toml` checks
            return parse_toml(f"x = {raw}")["x"]
        return parse(f"x = {raw}", tomllib.loads)["x"]
    except tomllib.TOMLDecodeError:
        if words := re.fullmatch(r"\s*\[([^\[\]\"'{}]+)\]\s*", raw):
            key, listed = text.partition("=")[0], [word.strip() for word in words[1].split(",")]
            raise ConfigError(
                f"override {text!r}: the shell has removed the quotes; write "
                f"{key}='{json.dumps([word for word in listed if word])}'"
            ) from None
        return raw  # a bare word is a string
    except ValueError as error:
        raise ConfigError(f"override {shorten(text)!r}: {error}") from None


def toml_value(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Section):
        given = [f"{k} = {toml_value(v)}" for k, v in value if v is not None]
        return "{" + ", ".join(given) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False)  # JSON and TOML agree on strings, bools, numbers
