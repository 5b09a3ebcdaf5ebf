"""Predictions by the row h200 beside the runs of RESULTS.md, as benchmarks/PLANNING.md has them.

    python -m benchmarks.plan_rows

The first table's rows set constants of the planner's times, the second's did not.
"""

import statistics
from pathlib import Path

from dtron.config import RunConfig
from dtron.plan.hardware import hardware
from dtron.plan.memory import memory, worst
from dtron.plan.run_shape import Resolved
from dtron.plan.steptime import predict

CONFIGS = Path(__file__).parents[1] / "configs"
TP = "tp=2 zero=2 micro_batch=2 global_batch=8"
PP = "pp=2 zero=1 micro_batch=1 global_batch=16"
CUT = "n_layers=8 global_batch=2"
CP = "cp=4 micro_batch=1 global_batch=1"
EAGER = "compile.enable=false mode=selective"
CHUNKED = "micro_batch=16 global_batch=16 loss_chunks=8 optim.moments=bfloat16"
LLAMA, SMALL, LARGE = ("llama3_8b", "8B"), ("gpt_1.7b", "GPT 1.7B"), ("gpt_7.1b", "GPT 7.1B")
SET = [
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


def show(rows: list[tuple[tuple[str, str], int, str, float, float]]) -> None:
    """Print a table and its mean errors."""
    print("| run | GiB | measured | error | step s | measured | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    errors: list[tuple[float, float]] = []
    for (config, name), world, words, gib, seconds in rows:
        loaded = RunConfig.load(CONFIGS / f"{config}.toml", list(map(override, words.split())))
        run = Resolved.of(loaded, world)
        held, step = worst(memory(run)).reserved / 2**30, predict(run, hardware("h200")).step
        off = held / gib - 1, step / seconds - 1
        errors.append(off)
        label = f"{name}, {world} GPU{'s' if world > 1 else ''}: `{words or 'as shipped'}`"
        print(
            f"| {label} | {held:.1f} | {gib} | {off[0]:+.1%} "
            f"| {step:.3f} | {seconds:.3f} | {off[1]:+.1%} |"
        )
    means = [statistics.mean(map(abs, each)) for each in zip(*errors, strict=True)]
    most = [max(map(abs, each)) for each in zip(*errors, strict=True)]
    print(
        f"\nMean error: memory {means[0]:.1%}, step time {means[1]:.1%}; largest {most[0]:.1%} "
        f"and {most[1]:.1%}.\n"
    )


if __name__ == "__main__":
    show(SET)
    show(OTHERS)
