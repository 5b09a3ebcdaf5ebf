"""A Hugging Face Llama by plain FSDP2 and by `dtron.huggingface`, one after the other: speed, loss.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.hf_plugin --size 1.5b --sequences 4

`plain`: fully_shard of each decoder layer in bfloat16, torch.compile of each layer, torch's
attention, cross-entropy of transformers, torch.optim.AdamW(fused=True), as FSDP2's tutorial has it.
`dtron`: parallelize with fast_plan, and dtron.AdamW with float32 moments. Both gather parameters
for the forward and again for the backward (ZeRO-3). `plain-zero2` and `dtron-zero2` keep them after
the forward, which takes 2 bytes per parameter; dtron then also sends gradients in bfloat16 by copy
engines, as its trainer does by itself. `float8`: `dtron-zero2` with tensorwise linear layers. All
clip gradients to a norm of 1. The loss of the last step is printed, since equal weights and data
must give nearly equal losses.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from dtron import AdamW, Mesh, parallelize
from dtron.config import Compile, Parallel
from dtron.huggingface import fast_plan
from dtron.parallelisms import clip_scale, global_norm

SIZES: dict[str, dict[str, int]] = {
    "debug": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
VARIANTS = ("plain", "dtron", "plain-zero2", "dtron-zero2", "float8")
Step = Callable[[Tensor], Tensor]
"""Tokens (B, T) of this rank -> the loss; one whole step of training."""


def build(size: str, attention: str, length: int) -> LlamaForCausalLM:
    """Random weights in float32, the same on all ranks."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES[size], "max_position_embeddings": length}
    sizes |= {"attn_implementation": attention, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes)).train()


def plain(model: LlamaForCausalLM, mesh: Mesh, compile: Compile, reshard: bool) -> Step:
    """FSDP2 as its tutorial has it."""
    nn.Module.to(model, mesh.device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if compile.enable:
            layer.compile(backend=compile.backend)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(
    model: LlamaForCausalLM, mesh: Mesh, compile: Compile, parallel: Parallel, float8: str
) -> Step:
    """The five lines of the plug-in's page."""
    plan = fast_plan(model, mesh, compile=compile, float8=float8, parallel=parallel)
    model = parallelize(model, mesh, plan)
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=1e-4)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens, labels=tokens).loss
        (loss / mesh.size("dp_shard")).backward()
        optimizer.scale = clip_scale(global_norm(parameters, mesh), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def step_of(variant: str, size: str, length: int, mesh: Mesh, compile: Compile) -> Step:
    """Build a variant's model and return its step."""
    kept = variant in ("plain-zero2", "dtron-zero2", "float8")
    if variant.startswith("plain"):
        return plain(build(size, "sdpa", length), mesh, compile, reshard=not kept)
    parallel = fast_parallel(mesh) if kept else Parallel()
    float8 = "tensorwise" if variant == "float8" else ""
    return ours(build(size, "dtron", length), mesh, compile, parallel, float8)


def fast_parallel(mesh: Mesh) -> Parallel:
    """Parameters stay gathered; on GPUs of one host, gradients and parameters go by copies."""
    if mesh.device_type != "cuda" or mesh.size("dp_shard") == 1:
        return Parallel(zero=2)
    return Parallel(zero=2, reduce_by="all_to_all", copy_engines=True)


def measure(step: Step, batches: Iterator[Tensor], steps: int, warm_up: int) -> tuple[float, float]:
    """Return (tokens a second of this rank, the last step's loss averaged over ranks)."""
    for _ in range(warm_up):
        step(next(batches))
    wait()
    start, tokens = time.perf_counter(), 0
    for _ in range(steps):
        batch = next(batches)
        tokens += batch.numel()
        loss = step(batch)
    wait()
    seconds = time.perf_counter() - start
    dist.all_reduce(loss)
    return tokens / seconds, loss.item() / dist.get_world_size()


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_batches(mesh: Mesh, vocabulary: int, shape: tuple[int, int]) -> Iterator[Tensor]:
    """The same for every variant, and other ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        tokens = torch.randint(vocabulary, shape, generator=generator)
        if mesh.device_type == "cuda":  # a copy from pageable memory would wait for the device
            tokens = tokens.pin_memory()
        yield tokens.to(mesh.device_type, non_blocking=True)


def main() -> None:
    """Measure each variant and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="debug")
    for name, default in (("length", 4096), ("sequences", 1), ("steps", 20), ("warm-up", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--by", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--backend", default="inductor", help="of torch.compile; none: eager")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = Mesh()
    on = args.backend != "none"
    compile = Compile(enable=True, backend=args.backend) if on else Compile()
    rows = []
    for name in args.by:
        torch.compiler.reset()  # else blocks check the graphs of the variant before
        step = step_of(name, args.size, args.length, mesh, compile)
        shape = (args.sequences, args.length)
        batches = random_batches(mesh, SIZES[args.size]["vocab_size"], shape)
        speed, loss = measure(step, batches, args.steps, args.warm_up)
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        rows.append(f"{name:11} {speed:10,.0f} tok/s/rank  loss {loss:.4f}  peak {memory:.1f} GiB")
        del step
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if dist.get_rank() == 0:
        print("\n".join(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
