"""What GPUs and the links between them do, as a table; every row says where it is from.

    products     time = max(FLOPs / (ceiling x tiles x sums), bytes / bandwidth) + launch
                 tiles: 128 x 256 tiles fill the multiprocessors in whole waves
                 sums: k / (k + depth)
    attention    FLOPs of the causal half over measured rates
    elementwise  bytes over the rate of a copy
    collectives  latency x hops + bytes on the busiest link / its rate

Rates of collectives are bus bandwidths: what a rank sends of an all-gather of n bytes over r ranks
is n (r - 1) / r. A group that spans hosts is as fast as its hosts' network: every GPU has an
adapter of its own, and those of a group in one host share the way out.

`dtron plan calibrate` writes a row as a file, which `hardware` reads.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from dtron.errors import ConfigError, cause_of, config_error, nearest
from dtron.io.untrusted import TOML_BYTES, parse, parse_toml, read_text

_TILE = (128, 256)
FILES = (".toml", ".json")
"""How a row's file ends."""
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
"""Seconds of the host by kind of call, of an H200 server, torch 2.11.0+cu130, 2026-11-22. From a
trace of two steps of the 16B mixture on 2 GPUs that the host bounds (tp 2, ep 2, zero 3, full
recomputation, micro-batches of 1 x 4,096): a kind's own time over its number. The profiler makes a
step of 1.547 s one of 2.159 s; each time is taken times 0.717, as if it slowed all kinds alike. It
was a virtual machine; rows whose hosts were not measured count none."""


BESIDE = (
    ("product", "all_gather", 0.737, 0.582),
    ("product", "reduce_scatter", 0.741, 0.559),
    ("grouped", "all_gather", 0.670, 0.637),
    ("grouped", "reduce_scatter", 0.669, 0.620),
    ("attention", "all_gather", 0.931, 0.261),
    ("attention", "reduce_scatter", 0.933, 0.267),
    ("copy", "all_gather", 0.837, 0.516),
    ("copy", "reduce_scatter", 0.850, 0.531),
)
"""Of two H200, torch 2.11.0+cu130, 2026-11-23, by `dtron.plan.overlap`: means of the table in
benchmarks/PLANNING.md. Taken for other rows too, which were not measured."""


@dataclass(frozen=True)
class Hardware:
    """One kind of machine. Rates are in units a second, of one GPU."""

    name: str
    source: str
    peak: PositiveFloat
    """FLOP/s, dense bfloat16, of the data sheet."""
    ceiling: PositiveFloat
    """FLOP/s of large bfloat16 products, as measured."""
    ceiling_float8: NonNegativeFloat
    """The same with tensor-wise float8 operands; 0: it has none."""
    multiprocessors: PositiveInt
    memory: PositiveFloat
    """Bytes of the device."""
    outside: NonNegativeFloat
    """Bytes of it that the allocator does not get: context, NCCL, libraries."""
    copy: PositiveFloat
    """Bytes read and written a second by a copy."""
    attention: tuple[PositiveFloat, PositiveFloat]
    """FLOP/s forward and backward of causal attention, its best kernel, head width 128; those of
    the backward are counted as twice the forward's."""
    host: PositiveInt
    """GPUs of a host."""
    domain: PositiveInt
    """GPUs that reach each other by NVLink."""
    nvlink: PositiveFloat
    """Bytes a second of bus bandwidth of a large all-gather inside of the domain."""
    network: PositiveFloat
    """Bytes a second of a GPU's adapter, as collectives reach it."""
    latency: tuple[NonNegativeFloat, NonNegativeFloat]
    """Seconds a hop by NVLink and by network."""
    launch: NonNegativeFloat
    """Seconds between two kernels of a stream."""
    host_link: PositiveFloat
    """Bytes a second between a GPU and its host's pinned memory, one way."""
    host_memory: PositiveFloat
    """Bytes of a host."""
    depth: NonNegativeFloat = 96
    """Of a product whose sums have this length, half of the rate is left."""
    narrow: PositiveFloat = 0.75
    """Share of attention's rates that heads below 128 reach."""
    wide: tuple[PositiveFloat, PositiveFloat] = (0.71, 0.57)
    """And heads above 128, forward and backward together, whose values are narrower than keys, and
    as wide. Those of an H200 with cuDNN (benchmarks/RESULTS.md): keys of 192 with values of 128;
    the mean of 192 with values padded to it, and of 256."""
    kinds: tuple[tuple[str, PositiveFloat], ...] = ()
    """Shares of `nvlink` that collectives of a kind reach; those not named reach all of it."""
    issue: NonNegativeFloat = 50e-6
    """Seconds that the host takes to issue a collective: a small one takes as long, alone."""
    beside: tuple[tuple[str, str, PositiveFloat, PositiveFloat], ...] = BESIDE
    """What work of a kind (`dtron.plan.compute_time.Work`) and a collective leave of each other's
    rates while both run: (kind, collective, share of its rate that the work has, and the
    collective)."""
    calls: tuple[tuple[str, NonNegativeFloat], ...] = ()
    """Seconds of the host by kind of call (`dtron.plan.host_overhead`); none: not measured, and the
    host is taken to keep up."""

    @property
    def room(self) -> float:
        """Bytes that the allocator can have."""
        return self.memory - self.outside

    def product(self, m: int, k: int, n: int, groups: int = 1, float8: bool = False) -> float:
        """Seconds of an (m, k) by (k, n) product, or of `groups` products that share the m rows."""
        if min(m, k, n) == 0:
            return 0.0
        flops, rows = 2.0 * m * k * n, -(-m // groups)
        tiles = groups * -(-rows // _TILE[0]) * -(-n // _TILE[1])
        waves = tiles / self.multiprocessors
        filled = waves / -(-tiles // self.multiprocessors)
        used = m * n / (tiles * _TILE[0] * _TILE[1])
        rate = self.ceiling_float8 if float8 and self.ceiling_float8 else self.ceiling
        # Deep schedulers split the last wave: half of what it leaves idle is won back.
        filled = 0.5 + 0.5 * filled
        compute = flops / (rate * filled * max(used, 0.05) * k / (k + self.depth))
        traffic = 2.0 * (m * k + groups * k * n + m * n) / self.copy
        return max(compute, traffic) + self.launch

    def attend(self, flops: float, backward: bool, width: int, values: int) -> float:
        """Seconds of causal attention.

        Args:
            flops: of the half that is computed.
            width: of a head's keys.
            values: of its values, as the kernel gets them.
        """
        share = self.narrow if width < 128 else 1.0 if width == 128 else self.wide[values == width]
        return flops / (self.attention[backward] * share) + self.launch

    def left(self, work: str, collective: str) -> tuple[float, float]:
        """Shares of their rates that work of a kind and a collective have beside each other.

        Raises:
            ConfigError: the row has none of these two.
        """
        for kind, sent, own, other in self.beside:
            if (kind, sent) == (work, collective):
                return own, other
        raise ConfigError(
            f"the hardware row {self.name} has nothing of {work} beside {collective}; measure it "
            "by dtron plan calibrate"
        )

    def collective(self, kind: str, size: float, ranks: int, inside: int) -> float:
        """Seconds of one collective.

        Args:
            kind: all_gather, reduce_scatter, all_reduce, all_to_all or send.
            size: bytes of the larger of what goes in and what comes out, of one rank.
            ranks: of the group.
            inside: of these, in one NVLink domain.
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
        """Seconds of one collective that the host issues and nothing covers."""
        return max(self.issue, self.collective(kind, size, ranks, inside))


def hops(kind: str, ranks: int, inside: int) -> float:
    """Latencies that a collective takes."""
    if kind == "send":
        return 1
    if inside >= ranks:
        return 2 + ranks
    return 2 + (0 if kind == "all_to_all" else (ranks / inside) ** 0.5)


def moved(kind: str, size: float, ranks: int, inside: int) -> float:
    """Bytes that a rank sends over the slowest link; `Hardware.collective` has the arguments."""
    if kind == "send":
        return size
    if kind == "all_to_all" and inside < ranks:
        return size * (ranks - inside) / ranks
    return size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def adapters(kind: str, inside: int) -> int:
    """Adapters of a host that serve what `moved` counts: rings and trees enter a host once."""
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
    """The row of this machine's GPUs; without any, or of others, the default one."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return HARDWARE[next((row for row in HARDWARE if row in name), DEFAULT)]


def hardware(name: str, **changed: Any) -> Hardware:
    """A row of HARDWARE, or of a file that `dtron plan calibrate` wrote.

    Raises:
        ConfigError: there is none of this name, or the file is no row.
    """
    if name.endswith(FILES):
        return replace(_of_file(Path(name)), **changed)
    if name not in HARDWARE:
        raise ConfigError(
            f"--hardware {name} is not known{nearest(name, HARDWARE)}; use {', '.join(HARDWARE)} "
            "or a file of dtron plan calibrate, NAME.toml or NAME.json"
        )
    return replace(HARDWARE[name], **changed)


def _of_file(path: Path) -> Hardware:
    try:
        text = read_text(path, TOML_BYTES)
        values = parse(text) if path.suffix == ".json" else parse_toml(text)
        assert isinstance(values, dict), "it is no table"
    except FileNotFoundError:
        raise ConfigError(
            f"--hardware {path}: no such file; dtron plan calibrate writes it"
        ) from None
    except (OSError, ValueError, AssertionError) as error:
        raise ConfigError(f"--hardware {path}: {cause_of(error, path)}") from None
    values.pop("calibration", None)  # what was measured, for people
    known = [field.name for field in fields(Hardware)]
    for key in values:
        if key not in known:
            raise ConfigError(f"--hardware {path}: unknown key {key}{nearest(key, known)}")
    try:
        return Hardware(**values)
    except ValidationError as error:
        raise ConfigError(f"--hardware {path}: {config_error(error, '', known)}") from None
