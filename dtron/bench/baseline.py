"""Baselines: figures of `dtron bench` that were measured before, and what they are compared with.

A baseline is a JSON file of rows. A row has the command that measured it, the device and the
versions, and the figures. It is compared on a machine with the same kind of device, as many of them
or more, and the same torch; other machines would differ for other reasons than a change of code.
"""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter, ValidationError
from rich.table import Table

from dtron.bench.report import RunFigures, share, versions
from dtron.bench.run import Options
from dtron.errors import ConfigError, cause_of, first_failure
from dtron.io.filesystem import write_atomically
from dtron.io.untrusted import MB, parse, read_text
from dtron.run.step_times import device_name

_Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class BaselineRow:
    """A command, where it was measured, and its figures; None: not known."""

    name: str
    command: str
    """A command `dtron bench CONFIG section.key=value ... --nproc-per-node N` with one point."""
    device: str
    """Name of the GPU as torch reports it, or "cpu"."""
    versions: Mapping[str, str]
    """Version of each package; only that of torch decides whether a row is compared."""
    date: str
    tokens_per_second_per_device: _Positive
    mfu_full: float | None = None
    """Model FLOPs utilisation, with attention over the whole square."""
    mfu_causal: float | None = None
    """Model FLOPs utilisation, with attention over half of the square."""
    memory_gib: float | None = None
    """Peak of the reserved memory of the rank with most."""
    source: str = ""
    """Where the figures were published, if they are not of `dtron bench` itself."""

    @property
    def words(self) -> list[str]:
        """Arguments of `dtron bench`."""
        return shlex.split(self.command)[2:]


@dataclass(frozen=True)
class Baseline:
    """Content of a baseline's file."""

    rows: Sequence[BaselineRow] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """Read a file. Raises ConfigError: it cannot be read, or it is no baseline."""
        try:
            return TypeAdapter(cls).validate_python(parse(read_text(path, MB)))
        except ValidationError as error:
            why = first_failure(error)
        except (OSError, ValueError) as error:
            why = cause_of(error, path)
        raise ConfigError(
            f"--baseline {path}: {why}; use a file of dtron bench CONFIG --write-baseline FILE"
        )

    def write(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        write_atomically(path, text + "\n", synced=False)

    def updated(self, rows: Sequence[BaselineRow]) -> "Baseline":
        """Return this baseline with the new rows, in place of those with the same names."""
        every = {row.name: row for row in (*self.rows, *rows)}
        return Baseline(list(every.values()))


def measured_row(
    config: Path, settings: Mapping[str, str], options: Options, found: RunFigures, device: str
) -> BaselineRow:
    """Return the row of a point that was just measured.

    Args:
        settings: the point's keys and values as written, environment variables as `env.NAME`.
    """
    words = [str(config), *(f"{key}={value}" for key, value in settings.items())]
    counts = {"nproc-per-node": options.ranks, "warmup": options.warmup, "steps": options.steps}
    words += [word for name, n in counts.items() for word in (f"--{name}", str(n))]
    return BaselineRow(
        name=f"{shlex.join(words[: 1 + len(settings)])}, {options.ranks} x {device}",
        command=shlex.join(["dtron", "bench", *words]),
        device=device,
        versions=versions(),
        date=time.strftime("%Y-%m-%d"),
        tokens_per_second_per_device=round(found.tokens_per_second_per_device, 1),
        mfu_full=_rounded(found.mfu["full"]),
        mfu_causal=_rounded(found.mfu["causal"]),
        memory_gib=round(found.memory_gib, 2),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def why_not_here(row: BaselineRow, ranks: int) -> str | None:
    """Return why a row is not compared on this machine; None: it is."""
    device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if row.device != device:
        return f"measured on {row.device}; this machine has {device}"
    if device != "cpu" and ranks > torch.cuda.device_count():
        return f"measured on {ranks} GPUs; this machine has {torch.cuda.device_count()}"
    if (wanted := row.versions.get("torch", "")) != torch.__version__:
        return f"measured with torch {wanted}; this is {torch.__version__}"
    return None


@dataclass(frozen=True)
class Comparison:
    """A row of a baseline and what was measured now."""

    row: BaselineRow
    found: RunFigures | None
    """None: no run succeeded."""

    def verdict(self, tolerance: float) -> str:
        """Return "ok", "slower" (by more than `tolerance`), or "failed"."""
        if self.found is None:
            return "failed"
        return "ok" if self.ratio >= 1 - tolerance else "slower"

    @property
    def ratio(self) -> float:
        """Speed now over the speed of the row."""
        assert self.found is not None, "a run succeeded"
        found = self.found.tokens_per_second_per_device
        return found / self.row.tokens_per_second_per_device


def comparison_table(compared: Sequence[Comparison], tolerance: float) -> Table:
    """Build a table with a line for each row that was compared."""
    table = Table(title=f"against the baseline, tolerance {share(tolerance)}", title_justify="left")
    table.add_column("row", overflow="fold")
    for heading in ("tok/s/GPU before", "now", "ratio", "GiB before", "now", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in compared:
        row, found, verdict = each.row, each.found, each.verdict(tolerance)
        table.add_row(
            row.name,
            f"{row.tokens_per_second_per_device:,.0f}",
            "–" if found is None else f"{found.tokens_per_second_per_device:,.0f}",
            "–" if found is None else f"{each.ratio:.3f}",
            "–" if row.memory_gib is None else f"{row.memory_gib:.1f}",
            "–" if found is None else f"{found.memory_gib:.1f}",
            verdict,
            style="" if verdict == "ok" else "red",
        )
    return table
