"""Predictions next to measured runs (RESULTS.md) and published speeds, as PLANNING.md has them.

    python -m benchmarks.plan_rows               measured on H200, by the row h200
    python -m benchmarks.plan_rows published     published for H100, by the row h100

The rows of FITTED set constants of the planner's step times, those of OTHERS and PUBLISHED did not.
Sources of published speeds do not state all settings: micro-batches, schedules and recomputation
are assumptions, micro-batches are close to what the planner says fits 80 GB (one row is above
it), and float8 is tensorwise.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtron.config import RunConfig
from dtron.plan.hardware import Hardware, hardware
from dtron.plan.memory import memory, worst
from dtron.plan.run_shape import Resolved
from dtron.plan.steptime import Prediction, predict

CONFIGS = Path(__file__).parents[1] / "configs"
TP = "tp=2 zero=2 micro_batch=2 global_batch=8"
PP = "pp=2 zero=1 micro_batch=1 global_batch=16"
CUT = "n_layers=8 global_batch=2"
CP = "cp=4 micro_batch=1 global_batch=1"
EAGER = "compile.enable=false mode=selective"
CHUNKED = "micro_batch=16 global_batch=16 loss_chunks=8 optim.moments=bfloat16"
LLAMA, SMALL, LARGE = ("llama3_8b", "8B"), ("gpt_1.7b", "GPT 1.7B"), ("gpt_7.1b", "GPT 7.1B")
FITTED = [
    (LLAMA, 4, "zero=3", 114.6, 1.541),
    (LLAMA, 4, "", 128.3, 1.515),
    (LLAMA, 4, TP, 90.1, 1.705),
    (LLAMA, 4, PP, 97.4, 3.320),
    (LLAMA, 1, CUT, 63.3, 0.443),
    (LLAMA, 1, f"{CUT} mode=full zero=3", 49.6, 0.556),
    (LLAMA, 1, f"{CUT} {EAGER}", 81.6, 0.504),
    (SMALL, 1, "", 90.6, 0.588),
    (SMALL, 1, "micro_batch=4 global_batch=4", 55.6, 0.315),
    (LLAMA, 4, f"{TP} async_tp=true", 90.9, 1.641),
    (LLAMA, 4, f"{CP} seq_len=32768 cp_method=ring", 90.6, 1.216),
]
OTHERS = [
    (LLAMA, 4, f"{PP} schedule=Interleaved1F1B", 105.0, 3.216),
    (LLAMA, 4, f"{PP} schedule=ZBVZeroBubble", 108.3, 3.071),
    (LLAMA, 1, f"{CUT} mode=selective", 57.6, 0.454),
    (LLAMA, 4, f"{CP} seq_len=32768 cp_method=ulysses", 91.9, 1.166),
    (LLAMA, 4, f"{CP} seq_len=32768 cp_method=all_gather", 87.8, 1.193),
    (
        LLAMA,
        4,
        f"{CP} seq_len=131072 mode=attention loss_chunks=16 cp_method=ulysses",
        72.5,
        9.779,
    ),
    (SMALL, 1, CHUNKED, 118.3, 1.180),
    (LARGE, 2, "", 105.3, 1.288),
    (LARGE, 2, "micro_batch=4 global_batch=4 loss_chunks=1 optim.moments=float32", 87.4, 0.677),
]
SECTIONS = {
    "parallel": ("tp", "pp", "cp", "zero", "schedule", "cp_method", "async_tp"),
    "train": ("micro_batch", "global_batch", "seq_len", "loss_chunks"),
    "recompute": ("mode",),
    "model.override": ("n_layers",),
}
"""Sections of the keys that are written without."""


def override(word: str) -> str:
    """`key=value` with the key's section."""
    key = word.split("=")[0]
    return next((f"{name}.{word}" for name, keys in SECTIONS.items() if key in keys), word)


@dataclass(frozen=True)
class Published:
    """A published speed, in tokens or full TFLOP per second and GPU."""

    name: str
    config: str
    world: int
    overrides: str
    tokens: float = 0.0
    tflops: float = 0.0


_BASE = "compile.enable=true train.seq_len=4096"
_MEGATRON = f"{_BASE} parallel.async_tp=false train.loss_chunks=1 optim.moments=float32"
_EIGHT = "float8.recipe=tensorwise"
_MOE = f"{_BASE} model.override.force_balance=true"
PUBLISHED = [
    Published("Megatron-LM 1.7B, TP1", "gpt_1.7b", 1, f"{_MEGATRON} train.micro_batch=4", 0, 408.8),
    Published("Megatron-LM 7.1B, TP2", "gpt_7.1b", 2, f"{_MEGATRON} train.micro_batch=1", 0, 465.9),
    Published(
        "Megatron-LM 16B, TP4",
        "gpt_7.1b",
        4,
        f"{_MEGATRON} model.size=16b parallel.tp=4 train.micro_batch=1",
        0,
        489.1,
    ),
    Published(
        "Bridge Llama-3-8B, float8, FSDP 8",
        "llama3_8b",
        8,
        f"{_EIGHT} parallel.zero=3 train.micro_batch=1",
        14451,
    ),
    Published(
        "Bridge Qwen3-8B, 16 GPUs",
        "llama3_8b",
        16,
        f"{_BASE} model.name=qwen3 model.size=8b train.micro_batch=1 train.global_batch=256 "
        "parallel.zero=3",
        10456,
    ),
    Published(
        "Bridge Moonlight 16B-A3B, EP8",
        "llama3_8b",
        8,
        f"{_MOE} model.name=deepseek_v3 model.size=16b-a3b parallel.ep=8 train.micro_batch=1 "
        "train.global_batch=128 parallel.zero=1",
        22528,
    ),
    Published(
        "Bridge Qwen3-30B-A3B, EP16",
        "llama3_8b",
        16,
        f"{_MOE} model.name=qwen3_moe model.size=30b-a3b parallel.ep=16 train.micro_batch=1 "
        "train.global_batch=128 parallel.zero=1",
        13011,
    ),
    Published("Bridge Llama-3-70B, float8, 64 GPUs", "llama3_70b", 64, _EIGHT, 1639),
    Published("Bridge Llama-3.1-405B, float8, 1,024 GPUs", "llama3_405b", 1024, _EIGHT, 318),
]


def predicted(
    config: str, words: Sequence[str], world: int, row: Hardware
) -> tuple[float, Prediction]:
    """GiB that the fullest rank's allocator reserves, and the step, of a config with overrides."""
    run = Resolved.of(RunConfig.load(CONFIGS / f"{config}.toml", words), world)
    return worst(memory(run)).by_allocator / 2**30, predict(run, row)


def show_measured(rows: list[tuple[tuple[str, str], int, str, float, float]]) -> None:
    """Print a table and its mean errors."""
    print("| run | GiB | measured | error | step s | measured | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    errors: list[tuple[float, float]] = []
    for (config, name), world, words, gib, seconds in rows:
        held, time = predicted(config, [*map(override, words.split())], world, hardware("h200"))
        off = held / gib - 1, time.step / seconds - 1
        errors.append(off)
        label = f"{name}, {world} GPU{'s' if world > 1 else ''}: `{words or 'as shipped'}`"
        print(
            f"| {label} | {held:.1f} | {gib} | {off[0]:+.1%} "
            f"| {time.step:.3f} | {seconds:.3f} | {off[1]:+.1%} |"
        )
    means = [statistics.mean(map(abs, each)) for each in zip(*errors, strict=True)]
    most = [max(map(abs, each)) for each in zip(*errors, strict=True)]
    print(
        f"\nMean error: memory {means[0]:.1%}, step time {means[1]:.1%}; largest {most[0]:.1%} "
        f"and {most[1]:.1%}.\n"
    )


def show_published() -> None:
    """Print the table of published speeds and its mean error."""
    print("| run | published | predicted | error | GiB |")
    print("| --- | --- | --- | --- | --- |")
    errors = []
    for row in PUBLISHED:
        gib, time = predicted(row.config, row.overrides.split(), row.world, hardware("h100"))
        speed = time.tokens_per_second_per_gpu if row.tokens else time.flops["full"] / 1e12
        real, unit = (row.tokens, "tok/s") if row.tokens else (row.tflops, "TFLOP/s")
        errors.append(abs(speed / real - 1))
        print(
            f"| {row.name} | {real:,.0f} {unit} | {speed:,.0f} | {speed / real - 1:+.1%} "
            f"| {gib:.0f} |"
        )
    print(f"\nmean error {sum(errors) / len(errors):.1%}")


if __name__ == "__main__":
    if sys.argv[1:] == ["published"]:
        show_published()
    else:
        show_measured(FITTED)
        show_measured(OTHERS)
