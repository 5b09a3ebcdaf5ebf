"""Measure the lower bounds of breakdown.py: the time of a step's GEMMs, attention and optimizer on
one idle device.

    python -m dtron.bench.roofline CONFIG.toml RUN.json

measures the lower bounds of a run, given by its resolved config and its run.json, and prints JSON.
`dtron bench` starts this as a separate process, so that the next run finds the device empty.

Sizes are those of one rank: micro_batch x seq_len / cp tokens per matmul (with chunked loss, fewer
for the head), widths divided by tp, numbers of layers and heads divided by pp. Matmuls are measured
one by one, each shape once: y = x w^T and its gradients g w and g^T x. Matmuls of float8 runs and
of models with experts or latent attention have no lower bound.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtron.bench.measure import copy_rate, device_name, seconds
from dtron.config import RunConfig
from dtron.models import BACKENDS, DecoderConfig, model_config
from dtron.models.attention import modifies_scores
from dtron.models.matmuls import layer_matmuls
from dtron.parallelisms.fsdp.sharding import DTYPES

# Bytes per float32 parameter by moments' dtype: gradient read; weight, moments read and written.
_ADAMW_BYTES = {"float32": 28, "bfloat16": 20}


@dataclass(frozen=True)
class StepMatmul:
    """Matmul of x (m, k) and a weight (n, k), with forward and backward.

    It runs `count` times per step and rank.
    """

    m: int
    k: int
    n: int
    count: float

    @property
    def flops(self) -> float:
        """FLOPs of all `count` matmuls, forward and both gradients."""
        return 3 * 2 * self.m * self.k * self.n * self.count


def matmuls(config: RunConfig, model: DecoderConfig, ranks: int) -> list[StepMatmul]:
    """List the matmuls of one rank's step, each shape once.

    The model must have neither experts nor latent attention.
    """
    parallel, train = config.parallel, config.train
    micro_batches = config.micro_batches(ranks)
    tokens = train.micro_batch * train.seq_len // parallel.cp
    counts = Counter(
        (tokens, *each.sharded(parallel.tp))
        for kind in model.layer_kinds
        for each in layer_matmuls(model, kind)
    )
    times = micro_batches / parallel.pp
    found = [StepMatmul(*shape, count * times) for shape, count in counts.items()]
    chunk = -(-tokens // train.loss_chunks)
    vocabulary = -(-model.vocab_size // parallel.tp)
    heads = train.loss_chunks * micro_batches / parallel.pp
    return [*found, StepMatmul(chunk, model.dim, vocabulary, heads)]


def matmul_seconds(
    matmul: StepMatmul, dtype: torch.dtype, device: torch.device
) -> tuple[float, float, float]:
    """Return the seconds of (forward, gradient of x, gradient of the weight) for one matmul."""

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=device)

    x, w, g = (
        draw(matmul.m, matmul.k),
        draw(matmul.n, matmul.k),
        draw(matmul.m, matmul.n),
    )
    forward, inputs, weight = (
        seconds(part, device) for part in (lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x)
    )
    return forward, inputs, weight


def attention_seconds(
    config: RunConfig, model: DecoderConfig, backend: str, device: torch.device
) -> float | None:
    """Return the seconds of one causal forward and backward of attention.

    None for document masks, windows, soft caps, sinks or dropout, whose time depends on more than
    the shape.
    """
    if config.data.mask_documents or modifies_scores(model) or model.attention_dropout:
        return None
    dtype, size = DTYPES[config.train.dtype], model.head_size
    tp = config.parallel.tp
    heads = (model.n_heads // tp, model.local_kv_heads(tp))
    shape = (config.train.micro_batch, config.train.seq_len)
    q, k, v = (
        torch.randn(*shape, n, size, dtype=dtype, device=device, requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    )
    run = BACKENDS[backend].run
    if config.compile.enable:
        run = torch.compile(run, backend=config.compile.backend, dynamic=False)
    gradient = torch.randn(*shape, heads[0], size, dtype=dtype, device=device)

    def both() -> None:
        out = run(q, k, v, None, size**-0.5)
        torch.autograd.grad(out, (q, k, v), gradient)

    return seconds(both, device)


def measure(config: RunConfig, facts: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Measure lower bounds of a run's time in matmuls, attention and optimizer.

    Args:
        facts: content of the run's run.json.
    Returns:
        {`floors`: milliseconds per step, by class of operators; `device`; `copy_bytes_per_second`;
        `products`: sizes, count and FLOP/s of each matmul}.
    """
    model = model_config(config.model.name, config.model.size, config.model.override)
    dtype = DTYPES[config.train.dtype]
    floors: dict[str, float] = {}
    rows = []
    other = config.float8.recipe or config.lora.rank  # other products than are listed here
    if not (other or model.n_experts or model.kv_lora_rank):
        total = 0.0
        for matmul in matmuls(config, model, facts["world_size"]):
            time = sum(matmul_seconds(matmul, dtype, device))
            total += time * matmul.count
            rate = matmul.flops / matmul.count / time
            rows.append({**asdict(matmul), "flops_per_second": rate})
        floors["GEMM"] = total * 1e3
    once = attention_seconds(config, model, facts["attention"], device)
    if once is not None:
        calls = model.n_layers * facts["micro_batches"] / config.parallel.pp
        floors["attention"] = once * calls / config.parallel.cp * 1e3
    rate = copy_rate(device)
    if config.optim.name == "adamw":
        held = facts["parameter_bytes_per_rank"]
        parameters = sum(held) / len(held) / 4
        floors["optimizer"] = parameters * _ADAMW_BYTES[config.optim.moments] / rate * 1e3
    return {
        "device": device_name(device),
        "floors": floors,
        "copy_bytes_per_second": rate,
        "products": rows,
    }


def main() -> None:
    """Print the lower bounds of the run that the arguments name."""
    config = RunConfig.load(sys.argv[1])
    facts = json.loads(Path(sys.argv[2]).read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(measure(config, facts, device)))


if __name__ == "__main__":
    main()
