"""The floor: a transformer and its training loop in one file, without a framework.

    python benchmarks/bare.py --size gpt2-124m --length 1024 --sequences 32
    torchrun --standalone --nproc-per-node 2 benchmarks/bare.py --size llama3-8b --length 8192

`dtron bench` gives the other side; docs/benchmarking.md has the pairs of commands. Both sides have

- float32 master weights, cast to bfloat16 for forward and backward, and gradients in float32;
- activations in bfloat16, with norms, rotary embeddings and the softmax of the loss in float32;
- one attention kernel of torch's, cuDNN's if there is a GPU;
- AdamW with float32 moments in torch's fused kernel, after clipping to a norm of 1.

On one GPU the whole model with its loss is one compiled graph. On several, FSDP2 shards each block;
its hooks cannot be compiled, so that each block and the head with its loss are graphs. Llama's
scaling of rotary frequencies is left out: it changes no shape. Tokens are random and stay on the
device: reading data costs nothing here.
"""

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

COMPUTE = torch.bfloat16
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Size:
    """Shape of a model: D width, H query heads, G key/value heads, K width of a head, F hidden."""

    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    tied: bool = False
    gpt: bool = False
    """LayerNorm, GELU, biases and learned positions; else RMSNorm, SwiGLU and rotary embeddings."""
    qk_norm: bool = False
    theta: float = 500_000.0
    eps: float = 1e-5


SIZES = {
    "debug": Size(256, 64, 2, 4, 2, 16, 128),
    "debug-gpt": Size(256, 64, 2, 4, 4, 16, 256, tied=True, gpt=True),
    "gpt2-124m": Size(50257, 768, 12, 12, 12, 64, 3072, tied=True, gpt=True),
    "qwen3-0.6b": Size(
        151936, 1024, 28, 16, 8, 128, 3072, tied=True, qk_norm=True, theta=1e6, eps=1e-6
    ),
    "llama-1.5b": Size(128256, 2048, 16, 32, 8, 64, 8192),
    "llama3-8b": Size(128256, 4096, 32, 32, 8, 128, 14336),
}


def cast(parameter: Tensor) -> Tensor:
    """Return a parameter in the dtype of computation; FSDP2 has cast its parameters already."""
    return parameter.to(COMPUTE)


class Linear(nn.Linear):
    """A linear layer with float32 weights, computed in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, cast(self.weight), None if self.bias is None else cast(self.bias))


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim."""

    def __init__(self, dim: int, size: Size) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), size.eps
        self.bias = nn.Parameter(torch.zeros(dim)) if size.gpt else None

    def forward(self, x: Tensor) -> Tensor:
        shape, weight = self.weight.shape, cast(self.weight)
        if self.bias is None:
            return F.rms_norm(x, shape, weight, self.eps)
        return F.layer_norm(x, shape, weight, cast(self.bias), self.eps)


class Block(nn.Module):
    """Attention and feed-forward layer with residual connections: (B, T, D) -> (B, T, D)."""

    def __init__(self, size: Size, kernel: SDPBackend) -> None:
        super().__init__()
        self.size, self.kernel = size, kernel
        wide, narrow = size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.attn_norm, self.ffn_norm = Norm(size.dim, size), Norm(size.dim, size)
        self.wq = Linear(size.dim, wide, bias=size.gpt)
        self.wk = Linear(size.dim, narrow, bias=size.gpt)
        self.wv = Linear(size.dim, narrow, bias=size.gpt)
        self.wo = Linear(wide, size.dim, bias=size.gpt)
        self.up = Linear(size.dim, size.hidden, bias=size.gpt)
        self.down = Linear(size.hidden, size.dim, bias=size.gpt)
        self.gate = None if size.gpt else Linear(size.dim, size.hidden, bias=False)
        self.q_norm = Norm(size.head_dim, size) if size.qk_norm else None
        self.k_norm = Norm(size.head_dim, size) if size.qk_norm else None

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        x = x + self.attention(self.attn_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))

    def attention(self, x: Tensor, rope: Tensor | None) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.size.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        with sdpa_kernel(self.kernel):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        return self.wo(out.transpose(1, 2).flatten(-2))

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding of (B, T, H, K) by (T, K / 2, 2) cosines and sines, in float32."""
    cos, sin = rope[:, None, :, 0], rope[:, None, :, 1]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class Head(nn.Module):
    """The last norm, the output projection and the mean cross-entropy, in chunks of tokens."""

    def __init__(self, size: Size, chunks: int) -> None:
        super().__init__()
        self.norm, self.chunks = Norm(size.dim, size), chunks
        self.out = Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x, weight, labels = self.norm(x).flatten(0, 1), cast(self.out.weight), labels.flatten()
        if self.chunks == 1:
            return F.cross_entropy(F.linear(x, weight).float(), labels)
        return ChunkedLoss.apply(x, weight, labels, self.chunks)  # type: ignore[return-value]


class ChunkedLoss(torch.autograd.Function):
    """Head and mean cross-entropy; the forward computes the gradients too, one chunk at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, chunks: int) -> Tensor:
        total = x.new_zeros((), dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grads = []
        for hidden, label in zip(x.chunk(chunks), labels.chunk(chunks), strict=True):
            log_p = F.linear(hidden, weight).float().log_softmax(-1)
            total = total - log_p.gather(1, label[:, None]).sum()
            target = torch.arange(log_p.shape[1], device=x.device) == label[:, None]
            grad = ((log_p.exp() - target.float()) / len(labels)).to(x.dtype)
            grads.append(grad @ weight)
            grad_weight += grad.T @ hidden
        ctx.save_for_backward(torch.cat(grads), grad_weight.to(weight.dtype))
        return total / len(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        by_x, by_weight = ctx.saved_tensors
        return by_x * grad.to(by_x.dtype), by_weight * grad.to(by_weight.dtype), None, None


class Model(nn.Module):
    """A decoder: tokens and labels (B, T) -> the mean loss, a float32 scalar."""

    def __init__(self, size: Size, length: int, kernel: SDPBackend, chunks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.dim)
        self.position_embed = nn.Embedding(length, size.dim) if size.gpt else None
        self.blocks = nn.ModuleList(Block(size, kernel) for _ in range(size.layers))
        self.head = Head(size, chunks)
        if size.tied:
            self.head.out.weight = self.embed.weight
        rates = size.theta ** (-torch.arange(0, size.head_dim, 2) / size.head_dim)
        angles = torch.arange(length)[:, None] * rates
        self.register_buffer("rope", torch.stack([angles.cos(), angles.sin()], -1))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                narrow = math.sqrt(2 * size.layers) if name.split(".")[-2] in ("wo", "down") else 1
                nn.init.normal_(parameter, std=0.02 / narrow)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(tokens, cast(self.embed.weight))
        if self.position_embed is not None:
            x = x + cast(self.position_embed.weight[: tokens.shape[1]])
        rope = None if self.position_embed is not None else self.rope
        for block in self.blocks:
            x = block(x, rope)
        return self.head(x, labels)


def compiled(model: Model, args: argparse.Namespace) -> Callable[[Tensor, Tensor], Tensor]:
    """Compile and shard the model in place; return a function (tokens, labels) -> loss."""
    options = {"backend": args.backend, "mode": args.mode, "dynamic": False}
    if dist.get_world_size() == 1:
        return model if args.backend == "none" else torch.compile(model, fullgraph=True, **options)
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    units, tied = [*model.blocks, model.head], model.head.out.weight is model.embed.weight
    for unit in units:
        if args.backend != "none":
            unit.compile(fullgraph=True, **options)
        if unit is not model.head or not tied:  # a tied weight belongs to the root
            fully_shard(unit, mp_policy=policy, reshard_after_forward=args.reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    for unit, following in itertools.pairwise(units[:-1] if tied else units):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch([following])  # type: ignore[list-item]
    return model


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    """Fused AdamW with dtron's defaults; vectors have no weight decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)


def train(args: argparse.Namespace, device: torch.device) -> tuple[list[float], float]:
    """Return (seconds of each timed step, loss of the last step)."""
    torch.manual_seed(0)
    size = size_of(args)
    with device:
        model = Model(size, args.length, ATTENTION[args.attention], args.loss_chunks)
    loss_of, optimizer = compiled(model, args), optimizer_of(model)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (4, args.sequences, args.length + 1)
    text = torch.randint(size.vocabulary, shape, generator=generator, device=device)
    marks, loss = [], torch.zeros((), device=device)
    for step in range(args.warmup + args.steps):
        tokens = text[step % len(text)]
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 >= args.warmup:
            marks.append(mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return [between(*pair) for pair in itertools.pairwise(marks)], loss.item()


def mark(device: torch.device) -> Any:
    """Record the end of a step on the device, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, last: Any) -> float:
    """Return the seconds between two marks."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3


def size_of(args: argparse.Namespace) -> Size:
    """Return the shape of the model."""
    size = SIZES[args.size]
    return replace(size, layers=args.layers or size.layers)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--size", choices=SIZES, default="debug")
    add("--layers", type=int, default=0, help="number of blocks; 0: all of the size")
    add("--length", type=int, default=1024 if gpu else 64, help="tokens of a sequence")
    add("--sequences", type=int, default=1, help="sequences of a rank")
    add("--steps", type=int, default=20, help="timed steps")
    add("--warmup", type=int, default=5, help="steps before them, at least 1")
    add("--loss-chunks", type=int, default=1, help="chunks of head and loss")
    add("--attention", choices=ATTENTION, default="cudnn" if gpu else "math")
    add("--backend", default="inductor", help="of torch.compile; none: eager")
    add("--mode", help="of torch.compile, such as reduce-overhead for CUDA graphs")
    add("--reshard", action="store_true", help="free parameters after the forward (ZeRO-3)")
    return parser.parse_args(words)


def main() -> None:
    """Train, and print one line on rank 0."""
    args, local = parse(), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    seconds, loss = train(args, device)
    step = statistics.median(seconds)
    peak = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else float("nan")
    if dist.get_rank() == 0:
        print(
            f"{args.size} on {dist.get_world_size()} ranks: "
            f"{args.sequences * args.length / step:,.0f} tok/s/rank, {step * 1e3:.4g} ms a step, "
            f"{peak:.1f} GiB, loss {loss:.4f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
