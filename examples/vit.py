"""A vision transformer of one's own over any mesh: nothing in the model knows of ranks.

torchrun --nproc-per-node 2 examples/vit.py --tp 2
torchrun --nproc-per-node 2 examples/vit.py --pp 2
torchrun --nproc-per-node 4 examples/vit.py --tp 2     # dp_shard takes the other 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.parallelisms import Mesh, Replicate, colwise, pipeline, prepare_input, replicate, rowwise

# -- parallel
PLACEMENTS = {
    ("blocks.*.attn", "blocks.*.mlp"): prepare_input(Replicate()),
    ("blocks.*.attn.[qkv]", "blocks.*.mlp.0"): colwise(),
    ("blocks.*.attn.out", "blocks.*.mlp.2"): rowwise(),
    ("blocks.*.norm?", "embed", "head"): replicate(),
}
STAGES = [["embed", "blocks.[01]"], ["blocks.[23]", "head"]]
# -- end


class Embed(nn.Module):
    """Images (B, 3, 16, 16) -> a class token and 16 patches of 4 x 4: (B, 17, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 64))
        self.position = nn.Parameter(torch.randn(1, 17, 64))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position


class Attention(nn.Module):
    """(B, T, D) -> (B, T, D); the number of heads follows from the width of q, whole or split."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 16)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(64), nn.LayerNorm(64), Attention()
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """The class token of (B, T, D) -> logits (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x[:, 0]))


class ViT(nn.Module):
    """Images (B, 3, 16, 16) -> logits (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Embed(), Head()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(images)))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the images of a micro-batch."""
    return F.cross_entropy(logits.float(), labels)


def main() -> None:
    """A few steps of telling which of ten textures an image has."""
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 1), ("pp", 1), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    # -- parallel
    mesh = Mesh(tp=args.tp, pp=args.pp)
    model = pipeline(ViT(), mesh, stages=STAGES, units="blocks.*", placements=PLACEMENTS)
    # -- end
    textures = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(mesh.rank("dp_shard"))  # other data on each data-parallel rank
    for step in range(args.steps):
        labels = torch.randint(10, (16,))
        images = textures[labels] + torch.randn(16, 3, 16, 16)
        images = images.to(mesh.device_type, torch.bfloat16)  # the dtype that the model computes in
        mean = model.step(images, labels.to(mesh.device_type), loss, micro_batches=4)
        norm = model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.4f} grad norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
