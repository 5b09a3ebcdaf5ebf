"""Write baseline_h200.json from rows of RESULTS.md, for `dtron bench --baseline`.

    python -m benchmarks.baseline

Each row below names a section of RESULTS.md, the begin of a table row in it, and the settings of
that row's command which `dtron bench` does not set itself. The figures are read from the table.
`model.attention` is set in each row, since the automatic choice depends on installed packages.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from dtron.bench.baseline import Baseline, BaselineRow
from dtron.models.flops import peak_flops

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/RESULTS.md"
OUT = ROOT / "benchmarks/baseline_h200.json"
DEVICE = "NVIDIA H200"
LLAMA = "configs/llama3_8b.toml"
VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6", "nccl": "2.28.9", "python": "3.12"}
_AO, _FLASH = {"torchao": "0.17.0"}, {"flash-attn-4": "4.0.0b36"}
_FLOAT8 = "float8.recipe=tensorwise float8.all_gather=true optim.moments=bfloat16"
_PP = (
    "parallel.pp=2 parallel.zero=1 train.micro_batch=1 train.global_batch=16 "
    "recompute.mode=selective"
)
_CP = "train.seq_len=32768 parallel.cp=4 train.micro_batch=1 train.global_batch=1"
_LONG = (
    "train.seq_len=131072 parallel.cp=4 train.micro_batch=1 train.global_batch=1 "
    "train.loss_chunks=16"
)
_DEEPSEEK = (
    "model.name=deepseek_v3 model.size=16b train.seq_len=4096 parallel.ep=4 "
    "parallel.dispatcher=symmetric_memory parallel.zero=2 train.loss_chunks=4 "
    "optim.moments=bfloat16 optim.lr=1.2e-5 recompute.mode=selective train.micro_batch=3 "
    "train.global_batch=48"
)


@dataclass(frozen=True)
class Row:
    """A row of RESULTS.md."""

    name: str
    section: str
    """Begin of the heading; it ends with the date."""
    label: str
    """Begin of the table row, which is unique in its section."""
    settings: str
    ranks: int
    config: str = LLAMA


SHIPPED_4 = "Mixtures and FlashAttention-4 on four GPUs and torchtitan"
CUDNN_4 = "Four GPUs and torchtitan with cuDNN attention"
FOUR = "Llama-3-8B on four GPUs and torchtitan"
SHIPPED_2 = "Llama-3-8B as shipped beside torchtitan"
MEGATRON = "Megatron-LM's benchmark models"
ROWS = (
    Row(
        "Megatron-LM's 1.7B, 8 sequences",
        MEGATRON,
        "| 1.7B | 1, `configs/gpt_1.7b.toml` | 55",
        "",
        1,
        "configs/gpt_1.7b.toml",
    ),
    Row(
        "Megatron-LM's 1.7B, 4 sequences",
        MEGATRON,
        "| | the same, `train.micro_batch=4 train.global_batch=4` | 52",
        "train.micro_batch=4 train.global_batch=4",
        1,
        "configs/gpt_1.7b.toml",
    ),
    Row(
        "Megatron-LM's 7.1B, TP2, async TP",
        MEGATRON,
        "| 7.1B, tp 2, async TP | 2, `configs/gpt_7.1b.toml` | 12,7",
        "",
        2,
        "configs/gpt_7.1b.toml",
    ),
    Row(
        "Llama-3-8B, FSDP, 1 sequence, FlashAttention-4",
        SHIPPED_2,
        "| **dtron, FlashAttention-4** | **10,770**",
        "train.micro_batch=1 train.global_batch=2 model.attention=fa4",
        2,
    ),
    Row(
        "Llama-3-8B, FSDP, float8, 2 sequences, FlashAttention-4",
        SHIPPED_2,
        "| **dtron, FlashAttention-4, `parallel.copy_engines=true`**",
        f"train.global_batch=4 {_FLOAT8} parallel.reduce_by=all_to_all parallel.copy_engines=true "
        "model.attention=fa4",
        2,
    ),
    Row(
        "Llama-3-8B, FSDP, 2 sequences, cuDNN",
        CUDNN_4,
        "| dtron as shipped, FSDP, 2 sequences",
        "",
        4,
    ),
    Row(
        "Llama-3-8B, PP2 x FSDP2, Interleaved1F1B",
        CUDNN_4,
        "| **dtron, the same**",
        f"{_PP} parallel.schedule=Interleaved1F1B",
        4,
    ),
    Row(
        "Llama-3-8B, PP2 x FSDP2, ZBVZeroBubble",
        CUDNN_4,
        "| dtron, ZBVZeroBubble",
        f"{_PP} parallel.schedule=ZBVZeroBubble",
        4,
    ),
    Row(
        "Llama-3-8B, TP2 x PP2, Interleaved1F1B",
        CUDNN_4,
        "| dtron, TP2 × PP2, Interleaved1F1B",
        f"{_PP.replace('global_batch=16', 'global_batch=8')} parallel.tp=2 "
        "parallel.schedule=Interleaved1F1B",
        4,
    ),
    Row(
        "Llama-3-8B, CP4, 131,072 tokens, full recomputation",
        CUDNN_4,
        "| dtron, the same, steps 3 to 5",
        f"{_LONG} recompute.mode=full",
        4,
    ),
    Row(
        "Llama-3-8B, CP4, 131,072 tokens, outputs of attention kept",
        CUDNN_4,
        "| **dtron, outputs of attention kept**",
        f"{_LONG} recompute.mode=attention",
        4,
    ),
    Row(
        "Llama-3-8B, FSDP, 2 sequences, FlashAttention-4",
        SHIPPED_4,
        "| **dtron as shipped**",
        "model.attention=fa4",
        4,
    ),
    Row(
        "Llama-3-8B, FSDP, float8, the head too, FlashAttention-4",
        SHIPPED_4,
        "| **dtron, float8, the head too**",
        "float8.recipe=tensorwise float8.all_gather=true float8.output=true model.attention=fa4",
        4,
    ),
    Row(
        "Llama-3-8B, PP2 x FSDP2, ZBVZeroBubble, float8",
        SHIPPED_4,
        "| **dtron, ZBVZeroBubble, float8 tensorwise**",
        f"{_PP} parallel.schedule=ZBVZeroBubble float8.recipe=tensorwise model.attention=fa4",
        4,
    ),
    Row("DeepSeek-V2-Lite's shapes, EP4", SHIPPED_4, "| **dtron, the same**, step 9", _DEEPSEEK, 4),
    Row(
        "Llama-3-8B, TP2 x FSDP2, async TP",
        FOUR,
        "| **dtron, the same**, step 10",
        "parallel.tp=2 parallel.zero=2 train.micro_batch=4 train.global_batch=8 "
        "recompute.mode=selective model.attention=fa4",
        4,
    ),
    Row(
        "Llama-3-8B, CP4, 32,768 tokens",
        FOUR,
        "| **dtron, the same**, step 6",
        f"{_CP} recompute.mode=selective model.attention=fa4",
        4,
    ),
)
DATES = {MEGATRON: "2026-11-23"}
"""Dates of rows in sections of several dates."""


def baseline(results: str) -> Baseline:
    """Return the baseline, with figures from the text of RESULTS.md."""
    return Baseline([_row(row, results) for row in ROWS])


def _row(row: Row, results: str) -> BaselineRow:
    pattern = rf"^## ({re.escape(row.section)}[^\n]*)\n(.*?)(?=^## |\Z)"
    ((title, body),) = re.findall(pattern, results, re.MULTILINE | re.DOTALL)
    lines = body.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith(row.label))
    top = next(i for i in range(at, -1, -1) if not lines[i].startswith("|")) + 1
    cells = dict(zip(_cells(lines[top]), _cells(lines[at]), strict=True))
    # A column "MFU" is the full one; Megatron-LM's table has TFLOP/s in place of both.
    full = cells.get("MFU full") or cells.get("MFU") or cells.get("TFLOP/s full")
    causal = cells.get("MFU causal") or cells.get("causal")
    settings = row.settings.split()
    if "model.attention" not in row.settings:
        settings.append("model.attention=cudnn")
    packages = {**_AO} if "float8.recipe" in row.settings else {}
    packages |= _FLASH if "model.attention=fa4" in settings else {}
    return BaselineRow(
        name=f"{row.name}, {row.ranks} x {DEVICE}",
        command=" ".join(["dtron bench", row.config, *settings, f"--nproc-per-node {row.ranks}"]),
        device=DEVICE,
        versions={**VERSIONS, **packages},
        date=DATES.get(row.section) or title[-10:],
        tokens_per_second_per_device=_number(cells["tok/s/GPU"]),
        mfu_full=_of_peak(full),
        mfu_causal=_of_peak(causal),
        memory_gib=_number(cells["GiB"]),
        source=f"benchmarks/RESULTS.md, {title}",
    )


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _number(cell: str) -> float:
    return float(re.sub(r"[*,%]", "", cell))


def _of_peak(cell: str | None) -> float | None:
    """Return a share of the peak, from a percentage or from TFLOP/s."""
    peak = peak_flops(DEVICE)
    if cell is None or peak is None:
        return None
    return round(_number(cell) / 100 if "%" in cell else _number(cell) * 1e12 / peak, 4)


if __name__ == "__main__":
    baseline(RESULTS.read_text(encoding="utf-8")).write(OUT)
