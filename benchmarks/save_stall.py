"""How long training stops for a checkpoint: written before it goes on, or beside it.

    python -m benchmarks.save_stall --dim 1024 --layers 8 --saves 5 --directory DIR

One process trains a Llama on random tokens on this machine's device and saves after every `--every`
steps; `thread` is `async` but for the process: this one writes. A stop is the time inside
`Checkpointer.save`, and what the next update waits for the copy.
Step times during a save are reported too: what copying and writing take of the processor is no
stop, but it is not free.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtron.checkpoint.async_staging import Staging
from dtron.checkpoint.checkpointer import Checkpointer
from dtron.checkpoint.locations import CheckpointLocation
from dtron.checkpoint.metadata import CheckpointMetadata
from dtron.config import Checkpoint, Optim
from dtron.io.safetensors_file import write_tensors
from dtron.models import BACKENDS, MODELS, build_model, model_config
from dtron.parallelisms.apply import Applied, Passes, apply_passes
from dtron.parallelisms.mesh import Mesh
from dtron.run.process import Place, process_group
from dtron.training.optim import build_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--directory", type=Path, required=True)
    given = parser.parse_args()
    with process_group(Place(0, 0, 1), 600, dist.HashStore()):
        for mode in ("sync", "async", "thread"):
            print(json.dumps(measure(mode, given)), flush=True)


def measure(mode: str, given: argparse.Namespace) -> dict[str, Any]:
    """One run; medians over all saves but the first, which makes the plan and takes the memory."""
    applied, optimizer = _model(given)
    folder = given.directory / mode
    shutil.rmtree(folder, ignore_errors=True)
    options = Checkpoint.model_validate({"mode": "sync" if mode == "sync" else "async", "keep": 1})
    saver = Checkpointer([CheckpointLocation(folder, 0, 1)], applied, optimizer, options)
    if mode == "thread":
        saver.staging.write = write_tensors  # type: ignore[method-assign]
    waits = _timed(saver.staging)
    tokens = torch.randint(0, 1000, (1, given.tokens), device=Place(0, 0, 1).device)
    stops, alone, beside = [], [], []
    for number in range(given.saves + 1):
        waits.clear()
        for _ in range(given.every):
            running = saver._running is not None and saver._running.running
            (beside if running else alone).append(_step(applied, optimizer, tokens))
        if number:
            stops[-1] += sum(waits)
        if number == given.saves:
            break
        saver.wait()  # so that a stop is not a wait for the save before
        started = time.perf_counter()
        saver.save(CheckpointMetadata(number + 1, 0, 0, 1, 0, {}, {}, {"next": number}))
        stops.append(time.perf_counter() - started)
    saver.wait()
    written = sum(f.stat().st_size for f in (folder / f"step-{given.saves}").iterdir())
    shutil.rmtree(folder)
    return {
        "mode": mode,
        "gib": round(written / 2**30, 3),
        "first_stop_s": round(stops[0], 4),
        "stop_s": round(statistics.median(stops[1:]), 4),
        "step_s": round(statistics.median(alone), 4),
        "step_beside_a_save_s": round(statistics.median(beside), 4) if beside else None,
    }


def _timed(staging: Staging) -> list[float]:
    """Seconds that each update waits for a copy, from now on."""
    waits: list[float] = []
    wait = staging.before_change

    def timed() -> None:
        started = time.perf_counter()
        wait()
        waits.append(time.perf_counter() - started)

    staging.before_change = timed
    return waits


def _model(given: argparse.Namespace) -> tuple[Applied, torch.optim.Optimizer]:
    spec = MODELS["llama"]
    override = {"dim": given.dim, "n_layers": given.layers, "ffn_dim": 3 * given.dim}
    config = model_config("llama", "debug", {**override, "vocab_size": 32000})
    with torch.device("meta"):
        model = build_model("llama", config, BACKENDS["sdpa"])

    def fill(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        spec.init_parameter(config, fqn, full, generator)

    mesh = Mesh(dp_shard=1, device_type=Place(0, 0, 1).device.type)
    passes = Passes(units=spec.units(config), blocks="blocks.*", dtype="float32", init=(0, fill))
    applied = apply_passes(model, mesh, passes)
    return applied, build_optimizer(applied.named_parameters(), Optim())


def _step(applied: Applied, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    started = time.perf_counter()
    applied.parts[0](tokens).float().logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
