"""`dtron plan calibrate`: measure this machine and write a hardware row for `dtron plan`.

    dtron plan calibrate --out mine.toml                                  one GPU, or a CPU
    torchrun --nproc-per-node 4 -m dtron plan calibrate --out mine.toml   links between ranks too
    dtron plan --config FILE --hardware mine.toml

Fields that are not measured are copied from the row that --base names and marked in the file: the
data-sheet peak, the number of GPUs per host and per NVLink domain, bytes outside the allocator, the
host's time per call, and links that connect no two ranks of this run. The file has the measurements
of the first rank.
"""

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dtron.bench.measure import device_name
from dtron.bench.report import versions
from dtron.config import toml_value
from dtron.errors import ArgumentParser, ConfigError
from dtron.plan.hardware import FILES, Hardware, hardware, of_device
from dtron.plan.measure_hardware import Calibration, link_fields, measure_device, measure_links
from dtron.plan.overlap import measure_overlap, overlap_fields
from dtron.plan.report import table
from dtron.run.process import Place, process_group
from dtron.run.rendezvous import meet


def row_of(made: Calibration, base: Hardware, name: str, source: str) -> tuple[Hardware, list[str]]:
    """Return the hardware row of a calibration, and the names of fields copied from `base`."""
    found = {**made.found, **link_fields(made.collectives, base), **overlap_fields(made.overlap)}
    kept = [each.name for each in fields(Hardware) if each.name not in {*found, "name", "source"}]
    pairs = {"latency[0]": "nvlink", "latency[1]": "network"}
    if "latency" in found:
        kept += [entry for entry, rate in pairs.items() if rate not in found]
    return replace(base, name=name, source=source, **found), kept


_SHAPE = ("kind", "bytes", "ranks", "inside")


def as_text(row: Hardware, made: Calibration, base: str, kept: Sequence[str], suffix: str) -> str:
    """Return the text of a hardware row's file: its fields, then the measurements.

    The format is TOML, or JSON by `suffix`.
    """
    values = {key: _rounded(value) for key, value in asdict(row).items()}
    origin = {"base": base, "kept": list(kept), "versions": versions()}
    lists = {key: getattr(made, key) for key in ("matmuls", "attention", "collectives", "overlap")}
    lists["collectives"] = [
        each | {"predicted_seconds": row.alone(*(each[name] for name in _SHAPE))}
        for each in made.collectives
    ]
    measured = {
        key: [{k: _rounded(v) for k, v in each.items()} for each in rows]
        for key, rows in lists.items()
        if rows
    }
    if suffix == ".json":
        return json.dumps({**values, "calibration": {**origin, **measured}}, indent=1) + "\n"
    lines = []
    for key, value in values.items():
        old = ", ".join(entry for entry in kept if entry.split("[")[0] == key)
        lines.append(
            f"{key} = {toml_value(value)}{f'  # {old} of {base}, not measured' if old else ''}"
        )
    lines += [
        "",
        "[calibration]",
        f"base = {toml_value(base)}",
        f"kept = {toml_value(origin['kept'])}",
    ]
    lines += ["", "[calibration.versions]"]
    lines += [f"{toml_value(key)} = {toml_value(value)}" for key, value in versions().items()]
    for key, rows in measured.items():
        for each in rows:
            lines += ["", f"[[calibration.{key}]]"]
            lines += [f"{name} = {toml_value(value)}" for name, value in each.items()]
    return "\n".join(lines) + "\n"


def _rounded(value: Any) -> Any:
    """Round floats to 4 significant digits; further digits are noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, tuple | list):
        return [_rounded(each) for each in value]
    return value


def calibrate_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `dtron plan calibrate`."""
    parser = ArgumentParser(
        prog="dtron plan calibrate",
        description="Measure this machine and write a row for dtron plan --hardware FILE; under "
        "torchrun its links too.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="NAME.toml or NAME.json")
    parser.add_argument("--name", help="name of the row; default: the file's name")
    parser.add_argument(
        "--base", help="row for fields that are not measured; default: this GPU's row, or h100"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure this machine, and write or print the hardware row.

    Raises:
        ConfigError: an argument is invalid.
    """
    given = calibrate_parser().parse_args(arguments)
    if given.out and given.out.suffix not in FILES:
        raise ConfigError(f"--out {given.out}: the file's name must end in {' or '.join(FILES)}")
    if given.out and not given.out.parent.is_dir():
        raise ConfigError(
            f"--out {given.out}: there is no folder {given.out.parent}; create it first"
        )
    place = Place.of_environment()
    base = hardware(given.base) if given.base else of_device(place.device)
    name = given.name or (given.out.stem if given.out else "measured")
    made = measure_machine(base, place)
    if place.rank:
        return 0
    row, kept = row_of(made, base, name, _source(place))
    text = as_text(row, made, base.name, kept, given.out.suffix if given.out else ".toml")
    if not given.out:
        print(text, end="")
        return 0
    given.out.write_text(text, encoding="utf-8")
    _show(row, made, kept, base)
    print(f"the row is written to {given.out}; use it with dtron plan --hardware {given.out}")
    return 0


def measure_machine(base: Hardware, place: Place) -> Calibration:
    """Measure this machine; all ranks call this. Each rank returns its own measurements."""
    device = place.device
    with process_group(place, 600, meet(place, 600).store):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        made = measure_device(base, device)
        if place.world_size > 1:
            near = measure_links(made, place, device)
            measure_overlap(made, near, device)
    return made


def _source(place: Place) -> str:
    day, count = datetime.date.today().isoformat(), place.world_size
    return f"measured {day} on {count} x {device_name(place.device)} by dtron plan calibrate"


def _show(row: Hardware, made: Calibration, kept: Sequence[str], base: Hardware) -> None:
    console = Console(width=None if Console().is_terminal else 120)
    for shown in tables(row, made):
        if shown.row_count:
            console.print(shown)
    rates = {"ceiling": 1e12, "ceiling_float8": 1e12, "copy": 1e9, "nvlink": 1e9, "host_link": 1e9}
    for key, unit in rates.items():
        now, before = getattr(row, key) / unit, getattr(base, key) / unit
        from_base = ", not measured" if key in kept else f" ({base.name}: {before:.4g})"
        console.print(f"{key} {now:.4g} {'T' if unit == 1e12 else 'G'}/s{from_base}")
    console.print(f"copied from {base.name}, not measured: {', '.join(kept)}", soft_wrap=True)


def tables(row: Hardware, made: Calibration) -> list[Table]:
    """Make tables of all measurements, with the prediction error of the fitted row."""
    matmuls = (
        (
            each["dtype"],
            "{m} x {k} x {n}".format(**each),
            _ms(each["seconds"]),
            f"{each['flops_per_second'] / 1e12:.4g}",
            _change(each["seconds"], each["predicted_seconds"]),
        )
        for each in made.matmuls
    )
    attention = (
        (each["kernel"], _shape(each), _ms(each["forward"]), _ms(each["backward"]))
        for each in made.attention
    )
    collectives = (
        (
            each["kind"],
            str(each["ranks"]),
            f"{each['bytes'] / 1e6:.4g}",
            _ms(each["seconds"]),
            f"{each['bus_rate'] / 1e9:.4g}",
            _change(each["seconds"], row.alone(*(each[name] for name in _SHAPE))),
        )
        for each in made.collectives
    )
    overlapped = (
        (
            each["work"],
            _shape(each),
            _ms(each["alone"]),
            each["collective"],
            f"{each['bytes'] / 1e6:.4g}",
            _ms(each["collective_alone"]),
            _change(each["alone"], each["overlapped"]),
            _change(each["collective_alone"], each["collective_overlapped"]),
        )
        for each in made.overlap
    )
    sent = ("kind", "ranks", "MB", "ms", "bus GB/s", "error of the row")
    both = ("work", "shape", "ms", "collective", "MB", "ms")
    both += ("work slower by", "collective slower by")
    return [
        table("matmuls", ("dtype", "m x k x n", "ms", "TFLOP/s", "error of the row"), matmuls),
        table("attention, ms", ("kernel", "shape", "forward", "backward"), attention),
        table("collectives", sent, collectives),
        table("computation overlapped with collectives", both, overlapped),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}"


def _shape(each: Mapping[str, Any]) -> str:
    return " x ".join(map(str, each["shape"]))
