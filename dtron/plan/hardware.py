"""Rates of GPUs and the links between them, as a table; each row names its source.

    matmuls      max(FLOPs / (ceiling x tiles x sums), bytes / rate of a copy) + launch
                 tiles: fraction of full 128 x 256 tiles, in whole waves over multiprocessors
                 sums: k / (k + depth)
    attention    FLOPs of the causal half / measured rates
    elementwise  bytes / rate of a copy
    collectives  latency x hops + bytes on the busiest link / its rate

Rates of collectives are bus bandwidths: a rank sends n (r - 1) / r bytes of an all-gather of n
bytes over r ranks. A group that spans hosts runs at the speed of their network: every GPU has a
network adapter, and the adapters of a group's GPUs in one host share the group's traffic.

`dtron plan calibrate` writes a row as a file, which `hardware` reads.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from dtron.config.schema import MAX_RANKS
from dtron.errors import ConfigError, cause_of, config_error, nearest
from dtron.io.untrusted import TOML_BYTES, parse, parse_toml, read_text
from dtron.models.attention import WIDEST_FLASH

_TILE = (128, 256)
FILES = (".toml", ".json")
"""File name extensions of a row's file."""
DEFAULT = "h100"
HOST = (
    ("graph", 324e-6),
    ("parameter", 26.5e-6),
    ("kernel", 39.9e-6),
    ("operation", 67.9e-6),
    ("collective", 169e-6),
    ("unit", 1.08e-3),
    ("reduction", 2.01e-3),
    ("counts", 1.13e-3),
    ("update", 82.5e-6),
)
"""Host seconds per call, by kind, on an H200 server (a virtual machine) with torch 2.11.0+cu130,
2026-11-22. From a trace of two host-bound steps of the 16B mixture on 2 GPUs (tp 2, ep 2, zero 3,
full recomputation, micro-batches of 1 x 4,096): each kind's self time over its number of calls. The
profiler slows a step from 1.547 s to 2.159 s; all times are multiplied by 0.717, assuming that all
kinds slow down alike. Rows of hosts that were not measured have no `calls`."""


OVERLAP = (
    ("matmul", "all_gather", 0.737, 0.582),
    ("matmul", "reduce_scatter", 0.741, 0.559),
    ("grouped_matmul", "all_gather", 0.670, 0.637),
    ("grouped_matmul", "reduce_scatter", 0.669, 0.620),
    ("attention", "all_gather", 0.931, 0.261),
    ("attention", "reduce_scatter", 0.933, 0.267),
    ("copy", "all_gather", 0.837, 0.516),
    ("copy", "reduce_scatter", 0.850, 0.531),
)
"""Rates under overlap on two H200, torch 2.11.0+cu130, 2026-11-23, measured by
`dtron.plan.overlap`: means of the table in benchmarks/PLANNING.md. Rows of GPUs that were not
measured use these rates too."""


Rate = Annotated[float, Field(ge=1, le=1e20)]
Bytes = Annotated[float, Field(ge=1e3, le=1e18)]
Seconds = Annotated[float, Field(ge=0, le=10)]
Fraction = Annotated[float, Field(ge=1e-3, le=10)]
Count = Annotated[int, Field(ge=1, le=MAX_RANKS)]
"""Types of a row's values, with bounds that keep predictions finite."""


@dataclass(frozen=True)
class Hardware:
    """Rates of one kind of machine, per second and GPU."""

    name: str
    source: str
    peak: Rate
    """Dense bfloat16 FLOP/s of the data sheet."""
    ceiling: Rate
    """Measured FLOP/s of large bfloat16 matmuls."""
    ceiling_float8: Annotated[float, Field(ge=0, le=1e20)]
    """Measured FLOP/s of large matmuls with tensor-wise float8 operands; 0: no float8."""
    multiprocessors: Count
    memory: Bytes
    """Bytes of device memory."""
    outside: Annotated[float, Field(ge=0, le=1e16)]
    """Bytes of device memory outside the allocator: CUDA context, NCCL, libraries."""
    copy: Rate
    """Bytes per second of a copy, read plus written."""
    attention: tuple[Rate, Rate]
    """FLOP/s of causal attention, forward and backward, with the fastest kernel and head width 128;
    the backward's FLOPs are counted as twice the forward's."""
    host: Count
    """GPUs per host."""
    domain: Count
    """GPUs per NVLink domain."""
    nvlink: Rate
    """Bus bandwidth of a large all-gather inside the NVLink domain, bytes per second."""
    network: Rate
    """Bandwidth that collectives reach on a GPU's network adapter, bytes per second."""
    latency: tuple[Seconds, Seconds]
    """Latency per hop over NVLink and over the network, seconds."""
    launch: Seconds
    """Seconds between two kernels on a stream."""
    host_link: Rate
    """Bandwidth between a GPU and its host's pinned memory in one direction, bytes per second."""
    host_memory: Bytes
    """Bytes of host memory."""
    depth: Annotated[float, Field(ge=0, le=1e6)] = 96
    """Inner dimension k at which a matmul reaches half of its full rate."""
    narrow: Fraction = 0.75
    """Fraction of attention's rates that heads narrower than 128 reach."""
    wide: tuple[Fraction, Fraction] = (0.71, 0.57)
    """Fractions of attention's rates that heads wider than 128 reach in both forward and backward:
    (values narrower than keys, equal widths). From an H200 with cuDNN (benchmarks/RESULTS.md): keys
    of 192 with values of 128; the mean of 192 with padded values and of 256."""
    widest: Fraction = 0.15
    """Fraction of attention's rates that heads wider than 256 reach, by torch's memory-efficient
    kernel or FlexAttention; an estimate, not measured."""
    kinds: tuple[tuple[str, Fraction], ...] = ()
    """Fraction of `nvlink` that collectives reach, by kind; kinds not listed reach all of it."""
    issue: Seconds = 50e-6
    """Host seconds to issue a collective: the minimum time of a collective without overlap."""
    overlap: tuple[tuple[str, str, Fraction, Fraction], ...] = OVERLAP
    """Rates under overlap: (kind of computation in `dtron.plan.compute_time.Work`, collective,
    fraction of its rate that the computation keeps, fraction that the collective keeps)."""
    calls: tuple[tuple[str, Seconds], ...] = ()
    """Host seconds per call, by kind (`dtron.plan.host_overhead`); empty: not measured, counted as
    0."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.room <= 0:
            raise ValueError(f"memory = {self.memory:g} must exceed outside = {self.outside:g}")
        return self

    @property
    def room(self) -> float:
        """Bytes available to the allocator."""
        return self.memory - self.outside

    def product(self, m: int, k: int, n: int, groups: int = 1, float8: bool = False) -> float:
        """Seconds of a matmul (m, k) x (k, n), or of `groups` matmuls that share the m rows."""
        if min(m, k, n) == 0:
            return 0.0
        flops, rows = 2.0 * m * k * n, -(-m // groups)
        tiles = groups * -(-rows // _TILE[0]) * -(-n // _TILE[1])
        waves = tiles / self.multiprocessors
        filled = waves / -(-tiles // self.multiprocessors)
        used = m * n / (tiles * _TILE[0] * _TILE[1])
        rate = self.ceiling_float8 if float8 and self.ceiling_float8 else self.ceiling
        # GEMM kernels split the last wave along k, which recovers half of its idle time.
        filled = 0.5 + 0.5 * filled
        compute = flops / (rate * filled * max(used, 0.05) * k / (k + self.depth))
        traffic = 2.0 * (m * k + groups * k * n + m * n) / self.copy
        return max(compute, traffic) + self.launch

    def attend(self, flops: float, backward: bool, width: int, values: int) -> float:
        """Seconds of causal attention, forward or backward.

        Args:
            flops: FLOPs of the half of the scores that the causal mask leaves.
            width: width of a head's keys.
            values: width of a head's values in the kernel, after padding.
        """
        share = self.narrow if width < 128 else 1.0 if width == 128 else self.wide[values == width]
        share = self.widest if width > WIDEST_FLASH else share
        return flops / (self.attention[backward] * share) + self.launch

    def left(self, work: str, collective: str) -> tuple[float, float]:
        """Return the fractions of full speed of (computation, collective) while both overlap.

        Args:
            work: kind of computation, such as "matmul".
            collective: kind of collective, such as "all_gather".
        Raises:
            ConfigError: the hardware row has no rates for this pair.
        """
        for kind, sent, own, other in self.overlap:
            if (kind, sent) == (work, collective):
                return own, other
        raise ConfigError(
            f"the hardware row {self.name} has no rates for {work} overlapped with {collective}; "
            "measure them with dtron plan calibrate"
        )

    def collective(self, kind: str, size: float, ranks: int, inside: int) -> float:
        """Seconds of one collective, without the host's time to issue it.

        Args:
            kind: all_gather, reduce_scatter, all_reduce, all_to_all or send.
            size: bytes of a rank's input or output, whichever is larger.
            ranks: number of ranks of the group.
            inside: number of these ranks in one NVLink domain.
        """
        if ranks == 1 or size == 0:
            return 0.0
        spans = inside < ranks
        rate = self.nvlink * dict(self.kinds).get(kind, 1.0)
        if spans:
            rate = min(self.nvlink, self.network * adapters(kind, inside))
        hop = self.latency[1 if spans else 0]
        return hop * hops(kind, ranks, inside) + moved(kind, size, ranks, inside) / rate

    def alone(self, kind: str, size: float, ranks: int, inside: int) -> float:
        """Seconds of one collective without overlap: at least the host's time to issue it."""
        return max(self.issue, self.collective(kind, size, ranks, inside))


def hops(kind: str, ranks: int, inside: int) -> float:
    """Number of hops of a collective; each costs a latency."""
    if kind == "send":
        return 1
    if inside >= ranks:
        return 2 + ranks
    return 2 + (0 if kind == "all_to_all" else (ranks / inside) ** 0.5)


def moved(kind: str, size: float, ranks: int, inside: int) -> float:
    """Bytes that a rank sends over the slowest link; arguments: see `Hardware.collective`."""
    if kind == "send":
        return size
    if kind == "all_to_all" and inside < ranks:
        return size * (ranks - inside) / ranks
    return size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def adapters(kind: str, inside: int) -> int:
    """Number of network adapters that share the bytes of `moved`.

    Rings and trees use the adapters of all `inside` ranks in a host.
    """
    return 1 if kind in ("send", "all_to_all") else inside


_H100 = Hardware(
    name="h100",
    source="NVIDIA H100 SXM data sheet (989 TFLOP/s, 80 GB, 3.35 TB/s, NVLink 900 GB/s, 8 x "
    "400 Gb/s a host); memory as its driver reports it (81,559 MiB); ceilings, attention and "
    "NVLink as h200's, with the same multiprocessors; host link 0.8 of PCIe 5.0 x 16, host memory "
    "of a DGX",
    peak=989e12,
    ceiling=715e12,
    ceiling_float8=1380e12,
    multiprocessors=132,
    memory=85.5e9,
    outside=3.0e9,
    copy=2.9e12,
    attention=(647e12, 510e12),
    host=8,
    domain=8,
    nvlink=280e9,
    network=40e9,
    latency=(6e-6, 15e-6),
    launch=3e-6,
    host_link=50e9,
    host_memory=2e12,
)
HARDWARE: dict[str, Hardware] = {
    row.name: row
    for row in (
        _H100,
        replace(
            _H100,
            name="h200",
            source="measured 2026-11-21 on 4 x H200, torch 2.11, cuDNN 9.19, NCCL 2.28.9 "
            "(benchmarks/RESULTS.md); 141 GB of the data sheet; network as h100's",
            memory=150.7e9,  # 140.4 GiB that the driver reports
            copy=4.2e12,
            calls=HOST,
        ),
        replace(
            _H100,
            name="a100",
            source="NVIDIA A100 SXM data sheet (312 TFLOP/s, 80 GB, 2.0 TB/s, NVLink 600 GB/s); "
            "ceilings scaled from the h200's shares of peak, attention FlashAttention-2's "
            "(arXiv:2307.08691); network 8 x 200 Gb/s; host link 0.8 of PCIe 4.0 x 16",
            peak=312e12,
            memory=85.9e9,  # 81,920 MiB
            ceiling=265e12,
            ceiling_float8=0.0,
            multiprocessors=108,
            copy=1.7e12,
            attention=(190e12, 165e12),
            nvlink=230e9,
            network=20e9,
            host_link=25e9,
        ),
        replace(
            _H100,
            name="b200",
            source="NVIDIA B200 data sheet (2,250 TFLOP/s, 180 GB, 8 TB/s, NVLink 1.8 TB/s); "
            "nothing measured: ceilings and rates are the h200's shares of peak",
            peak=2250e12,
            ceiling=1630e12,
            ceiling_float8=3100e12,
            multiprocessors=148,
            memory=180e9,
            copy=6.8e12,
            attention=(1300e12, 1000e12),
            nvlink=620e9,
            network=40e9,
        ),
    )
}


def of_device(device: torch.device) -> Hardware:
    """Return the row of a device's GPU; the default row for a CPU or an unknown GPU."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return HARDWARE[next((row for row in HARDWARE if row in name), DEFAULT)]


def hardware(name: str, **changed: Any) -> Hardware:
    """Return a row of HARDWARE, or of a file written by `dtron plan calibrate`.

    Raises:
        ConfigError: no row has this name, or the file has no valid row.
    """
    if name.endswith(FILES):
        return replace(_of_file(Path(name)), **changed)
    if name not in HARDWARE:
        raise ConfigError(
            f"--hardware {name} is not known{nearest(name, HARDWARE)}; use {', '.join(HARDWARE)} "
            "or a file from dtron plan calibrate, NAME.toml or NAME.json"
        )
    return replace(HARDWARE[name], **changed)


def _of_file(path: Path) -> Hardware:
    try:
        text = read_text(path, TOML_BYTES)
        values = parse(text) if path.suffix == ".json" else parse_toml(text)
        assert isinstance(values, dict), "it has no fields of a row"
    except FileNotFoundError:
        raise ConfigError(
            f"--hardware {path}: no such file; dtron plan calibrate writes it"
        ) from None
    except (OSError, ValueError, AssertionError) as error:
        raise ConfigError(f"--hardware {path}: {cause_of(error, path)}") from None
    values.pop("calibration", None)  # measurements, which a plan does not use
    known = [field.name for field in fields(Hardware)]
    for key in values:
        if key not in known:
            raise ConfigError(f"--hardware {path}: unknown key {key}{nearest(key, known)}")
    try:
        return Hardware(**values)
    except ValidationError as error:
        raise ConfigError(f"--hardware {path}: {config_error(error, '', known)}") from None
