"""Print a plan in the terminal."""

import itertools
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dtron.config import RunConfig, fields
from dtron.errors import counted
from dtron.plan.search import SearchResult

GIB, MIB = 2**30, 2**20
_DEGREES = ("tp", "cp", "pp", "dp_replicate", "dp_shard", "ep", "etp", "zero", "micro_batch")


def print_plan(console: Console, plan: dict[str, Any]) -> None:
    """Print a plan; for an illegal run, the reasons and similar legal runs."""
    if not plan["legal"]:
        for reason in plan["reasons"]:
            console.print(f"not legal: {reason}", markup=False, soft_wrap=True)
        for change in plan["nearest"]:
            dotted = {key if "." in key else f"parallel.{key}": n for key, n in change.items()}
            keys = " ".join(f"{key}={value}" for key, value in dotted.items())
            console.print(f"legal: {keys}", markup=False, soft_wrap=True)
        return
    degrees = {k: v for k, v in plan["parallel"].items() if k != "layers_by_stage"}
    console.print("  ".join(f"{key} {value}" for key, value in degrees.items()), soft_wrap=True)
    console.print(_memory(plan["memory"]))
    rows = collective_rows(plan["communication"])
    console.print(table("collectives of the first pipeline rank", COLLECTIVES, rows))
    if plan["time"]:
        console.print(table("time of a step", PARTS, part_rows(plan["time"])))
    _print_summary(console, plan)


def print_search(console: Console, searched: SearchResult, room: float, file: RunConfig) -> None:
    """Print the best layouts, each with what limits it and the keys to set in the given file.

    Args:
        room: bytes available on a device.
        file: config of the searched run.
    """
    headings = ["tok/s/GPU", "MFU", *_DEGREES, "schedule", "float8", "recompute"]
    headings += ["limited by", f"GiB of {room / GIB:.0f}"]
    made = table("fastest layouts", ["", *headings])
    for place, found in enumerate(searched.best, 1):
        parallel, time = found.run.parallel(), found.time
        v = parallel.get("stages_per_rank", 1)
        made.add_row(
            str(place),
            f"{time.tokens_per_second_per_gpu:,.0f}",
            f"{time.mfu['full']:.1%}",
            *(str(parallel[key]) for key in _DEGREES),
            f"{parallel.get('schedule', '')}{f' x {v}' if v > 1 else ''}",
            found.run.config.float8.recipe,
            _recompute(found.run.config),
            found.limited,
            f"{found.memory.reserved / GIB:.1f}",
        )
    console.print(made)
    console.print(", ".join(f"{n:,} {what}" for what, n in searched.counts.items()))
    kept = f"{searched.headroom:.0%} of the memory is left free (--headroom)"
    console.print(f"{kept}; keys that differ from the given file:")
    for place, found in enumerate(searched.best, 1):
        keys = changed_keys(file, found.run.config)
        console.print(f"{place:3}  {keys}", markup=False, soft_wrap=True)


def changed_keys(file: RunConfig, config: RunConfig) -> str:
    """List the keys of `config` that differ from `file`, as words of a command line."""
    words = []
    for key, _, _ in fields(RunConfig):
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(file, section), name):
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            words.append(shlex.quote(f"{key}={shown}"))
    return " ".join(words) or "none"


def _recompute(config: RunConfig) -> str:
    modules = f" of {', '.join(config.recompute.modules)}" if config.recompute.modules else ""
    return config.recompute.mode + modules + (" + offload" if config.recompute.offload else "")


def _print_summary(console: Console, plan: dict[str, Any]) -> None:
    memory = plan["memory"]
    verdict = "fits" if memory["fits"] else "DOES NOT FIT"
    search = "" if memory["fits"] else "; dtron plan --search looks for layouts that fit"
    lines = [
        f"{parameters(memory)}, "
        f"{number(plan['flops']['full_per_token'] / 1e9)} GFLOP per token (full), "
        f"{number(plan['flops']['causal_per_token'] / 1e9)} (causal)",
        f"memory: pipeline rank {memory['worst_rank']} reserves {_size(memory['reserved'])}"
        f"{_shared(memory['symmetric'])} of {_size(memory['limit'])} on {plan['hardware']}: "
        f"{verdict}; with "
        f"PYTORCH_ALLOC_CONF=expandable_segments:True {_size(memory['expandable'])}{search}",
        *([_host(memory)] if memory["host"] else []),
        *(f"warning: {what}" for what in plan["warnings"]),
        *(f"not checked: {what}" for what in plan["unchecked"]),
        *(_speed(plan) if plan["time"] else [f"no time is predicted: {plan['no_time']}"]),
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _shared(symmetric: float) -> str:
    return f" ({_size(symmetric)} of it symmetric memory)" if symmetric else ""


def parameters(memory: dict[str, Any]) -> str:
    """Format the number of parameters; for a mixture of experts, also of active parameters."""
    total, active = memory["parameters"], memory["active_parameters"]
    text = f"{_count(total)} parameters"
    text += "" if active == total else f", {_count(active)} active"
    adapters = memory.get("adapters", 0)
    return f"{text}, frozen, and {_count(adapters)} of adapters" if adapters else text


def _count(n: float) -> str:
    """Format a count in billions, or in millions below a billion."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def number(x: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits: 0.01234, 12.34, 1,234,568.

    All digits before the decimal point are shown.
    """
    return f"{x:.{digits}g}" if abs(x) < 10 ** (digits - 1) else f"{x:,.0f}"


def _size(n_bytes: float) -> str:
    """Format bytes in GiB, or in MiB below a GiB."""
    unit, name = (GIB, "GiB") if n_bytes >= GIB else (MIB, "MiB")
    return f"{n_bytes / unit:.1f} {name}"


def _host(memory: dict[str, Any]) -> str:
    most, limit = memory["host"] / GIB, memory["host_limit"] / GIB
    return f"offloaded: {most:,.0f} GiB of host memory per host, of {limit:,.0f} GiB at most"


def _speed(plan: dict[str, Any]) -> list[str]:
    time = plan["time"]
    return [
        f"step {number(time['step_seconds'])} s, "
        f"{time['tokens_per_second_per_gpu']:,.0f} tok/s/GPU, "
        f"{time['flops_per_second']['full'] / 1e12:.0f} TFLOP/s, "
        f"MFU {time['mfu']['full']:.1%} (full) {time['mfu']['causal']:.1%} (causal)",
        costs(plan["cost"]),
    ]


def costs(cost: dict[str, float]) -> str:
    """Format the cost of the training, on one line."""
    large = cost["tokens"] >= 1e12
    tokens, unit = (cost["tokens"] / 1e12, "T") if large else (cost["tokens"] / 1e9, "B")
    steps = round(cost["steps"])
    return (
        f"{number(tokens)} {unit} tokens: {counted(steps, 'step')}, "
        f"{number(cost['days'])} days, {number(cost['gpu_hours'])} GPU-hours, without "
        "restarts and validation"
    )


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]] = (), words: int = 1
) -> Table:
    """Make a table: the first `words` columns are left-aligned, the others right-aligned."""
    made = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="left" if i < words else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def _memory(memory: dict[str, Any]) -> Table:
    """Make a table of memory by class.

    Equal pipeline ranks share a column, and classes without memory are left out.
    """
    names = [*memory["ranks"][0]["classes"], "peak", "reserved"]
    most = max(rank["reserved"] for rank in memory["ranks"])
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in memory["ranks"]:
        sizes = [*rank["classes"].values(), rank["peak"], rank["reserved"]]
        columns.setdefault(tuple(f"{size / unit:.1f}" for size in sizes), []).append(rank["rank"])
    made = table(f"{name} by class", ["pipeline rank", *map(_ranges, columns.values())])
    for what, *cells in zip(names, *columns, strict=True):
        if set(cells) != {"0.0"}:
            made.add_row(what, *cells)
    return made


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers: 2, 4 ... 7."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{r[0]}" if len(r) == 1 else f"{r[0]} ... {r[-1]}" for r in found)


COLLECTIVES = ("purpose", "axis", "collective", "ranks", "link", "calls", "GB", "s")
PARTS = ("part", "s", "share")


def collective_rows(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield table rows of a plan's collectives, with the columns COLLECTIVES."""
    for row in rows:
        yield (
            *(str(row[key]) for key in ("purpose", "axis", "kind", "ranks", "link")),
            f"{row['count']:,.0f}",
            f"{row['bytes'] / 1e9:,.2f}",
            number(row["seconds"], 3),
        )


def part_rows(time: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield table rows of the parts of a step that take time, with the columns PARTS."""
    for name, seconds in time["parts"].items():
        if seconds:
            yield name, number(seconds), f"{seconds / time['step_seconds']:.1%}"
