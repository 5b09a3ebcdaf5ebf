"""A causal transformer of one's own whose sequences several ranks share; it knows of none of them.

torchrun --standalone --nproc-per-node 4 examples/context.py --cp 4
torchrun --standalone --nproc-per-node 4 examples/context.py --cp 4 --method ulysses
torchrun --standalone --nproc-per-node 4 examples/context.py --cp 2  # dp_shard takes the rest
"""

import argparse
import os
from typing import get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.config import CpMethod
from dtron.parallelisms import (
    Context,
    Mesh,
    Split,
    clip_scale,
    global_norm,
    parallelize,
    scale_or_zero_,
)


class Core(nn.Module):
    """Causal attention, heads (B, T, H, K): all that context parallelism replaces."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.core = nn.LayerNorm(64), Core()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (12, 16)).chunk(3, dim=2)
        return x + self.out(self.core(q, k, v).flatten(2))


class Model(nn.Module):
    """Tokens (B, T) at their positions (B, T) -> logits (B, T, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(64, 64), nn.Embedding(128, 64)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.position(positions)))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens at hand."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def main() -> None:
    """A few steps on sequences that count upwards."""
    parser = argparse.ArgumentParser()
    for name, default in (("cp", 1), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--method", choices=get_args(CpMethod), default="ring")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    # -- parallel
    mesh = Mesh(cp=args.cp)
    kernel = "flash" if mesh.device_type == "cuda" else "math"
    context = Context("blocks.*.core", (args.method,), kernel=kernel)
    model = parallelize(Model(), mesh, units="blocks.*", context=context)
    index = Split(None, (8, 128), args.cp).index(mesh.rank("cp"))  # (8, 128 / cp)
    # -- end
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    torch.manual_seed(mesh.rank("dp_shard"))  # cp ranks read the same sequences
    for step in range(args.steps):
        whole = (torch.randint(64, (8, 1)) + torch.arange(129)) % 64
        x, y = (z.gather(1, index).to(mesh.device_type) for z in (whole[:, :-1], whole[:, 1:]))
        share = loss(model(x, index.to(mesh.device_type)), y) / mesh.size("dp_shard", "cp")
        share.backward()
        norm = global_norm(parameters, mesh)
        scale_or_zero_(parameters, clip_scale(norm, max_norm=1.0))
        optimizer.step()
        optimizer.zero_grad()
        mean = share.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.4f} grad norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
