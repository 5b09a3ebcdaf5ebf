"""Published speeds beside the planner's, which was fitted to none of them.

    python -m benchmarks.published

Sources do not state all settings: micro-batches, schedules and recomputation below are assumptions,
micro-batches are close to what the planner says fits 80 GB (three rows are above it), and float8
is the planner's tensor-wise.
"""

from dataclasses import dataclass
from pathlib import Path

from dtron.config import RunConfig
from dtron.plan.hardware import hardware
from dtron.plan.memory import memory, worst
from dtron.plan.run_shape import Resolved
from dtron.plan.steptime import predict

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Row:
    """One published figure: tokens or full TFLOP/s a second and GPU."""

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
ROWS = [
    Row("Megatron-LM 1.7B, TP1", "gpt_1.7b", 1, f"{_MEGATRON} train.micro_batch=4", 0, 408.8),
    Row("Megatron-LM 7.1B, TP2", "gpt_7.1b", 2, f"{_MEGATRON} train.micro_batch=1", 0, 465.9),
    Row(
        "Megatron-LM 16B, TP4",
        "gpt_7.1b",
        4,
        f"{_MEGATRON} model.size=16b parallel.tp=4 train.micro_batch=1",
        0,
        489.1,
    ),
    Row(
        "Bridge Llama-3-8B, float8, FSDP 8",
        "llama3_8b",
        8,
        f"{_EIGHT} parallel.zero=3 train.micro_batch=1",
        14451,
    ),
    Row(
        "Bridge Qwen3-8B, 16 GPUs",
        "llama3_8b",
        16,
        f"{_BASE} model.name=qwen3 model.size=8b train.micro_batch=1 train.global_batch=256 "
        "parallel.zero=3",
        10456,
    ),
    Row(
        "Bridge Moonlight 16B-A3B, EP8",
        "llama3_8b",
        8,
        f"{_MOE} model.name=deepseek_v3 model.size=16b-a3b parallel.ep=8 train.micro_batch=1 "
        "train.global_batch=128 parallel.zero=1",
        22528,
    ),
    Row(
        "Bridge Qwen3-30B-A3B, EP16",
        "llama3_8b",
        16,
        f"{_MOE} model.name=qwen3_moe model.size=30b-a3b parallel.ep=16 train.micro_batch=1 "
        "train.global_batch=128 parallel.zero=1",
        13011,
    ),
    Row("Bridge Llama-3-70B, float8, 64 GPUs", "llama3_70b", 64, _EIGHT, 1639),
    Row("Bridge Llama-3.1-405B, float8, 1,024 GPUs", "llama3_405b", 1024, _EIGHT, 318),
]


def main() -> None:
    """Print the table, as Markdown."""
    print("| run | published | predicted | error | GiB |")
    print("| --- | --- | --- | --- | --- |")
    errors = []
    for row in ROWS:
        config = RunConfig.load(CONFIGS / f"{row.config}.toml", row.overrides.split())
        run = Resolved.of(config, row.world)
        found = predict(run, hardware("h100"))
        predicted = found.tokens_per_second_per_gpu if row.tokens else found.flops["full"] / 1e12
        right, unit = (row.tokens, "tok/s") if row.tokens else (row.tflops, "TFLOP/s")
        errors.append(abs(predicted / right - 1))
        gib = worst(memory(run)).reserved / 2**30
        print(
            f"| {row.name} | {right:,.0f} {unit} | {predicted:,.0f} | {predicted / right - 1:+.1%} "
            f"| {gib:.0f} |"
        )
    print(f"\nmean error {sum(errors) / len(errors):.1%}")


if __name__ == "__main__":
    main()
