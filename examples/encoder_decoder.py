"""An encoder–decoder over any mesh, its encoder and decoder on different pipeline stages.

torchrun --nproc-per-node 2 examples/encoder_decoder.py --pp 2
torchrun --nproc-per-node 4 examples/encoder_decoder.py --pp 2 --tp 2

The task is to copy a text in reverse, which needs cross attention. From stage to stage travel the
decoder's hidden states and the encoder's output, as a tuple.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.parallelisms import Mesh, Replicate, colwise, pipeline, prepare_input, replicate, rowwise

# -- parallel
BLOCKS = ("encoder.*", "decoder.*")
ATTENTION = ("encoder.*.attn", "decoder.*.attn", "decoder.*.cross")
PLACEMENTS = {
    ("encoder.*.mlp", "decoder.*.mlp"): prepare_input(Replicate()),
    tuple(f"{name}.[qkv]" for name in ATTENTION): colwise(),
    tuple(f"{name}.out" for name in ATTENTION): rowwise(),
    ("encoder.*.mlp.0", "decoder.*.mlp.0"): colwise(),
    ("encoder.*.mlp.2", "decoder.*.mlp.2"): rowwise(),
    ("*.*.norm?", "embed", "begin", "head"): replicate(),
}
STAGES = [["embed", "encoder.*"], ["begin", "decoder.*", "head"]]
# -- end
D, V, T = 64, 64, 16


class Embed(nn.Module):
    """Tokens int64 (B, T) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(T, D)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)


class Attention(nn.Module):
    """Queries from x (B, T, D), keys and values from y (B, S, D) -> (B, T, D)."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.causal = causal

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inputs = ((self.q, x), (self.k, y), (self.v, y))
        q, k, v = (w(z).unflatten(-1, (-1, 16)).transpose(1, 2) for w, z in inputs)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(out.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """(B, S, D) -> (B, S, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(D), nn.LayerNorm(D), Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attn(h, h)
        return x + self.mlp(self.norm2(x))


class Begin(nn.Module):
    """Encoder's output, decoder's tokens int64 (B, T) -> (hidden states (B, T, D), the output)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = Embed(), nn.LayerNorm(D)

    def forward(self, encoded: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(tokens), self.norm(encoded)


class DecoderBlock(nn.Module):
    """(Hidden states (B, T, D), encoder's output (B, S, D)) -> the same, new hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(D) for _ in range(3))
        self.attn, self.cross = Attention(causal=True), Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, encoded = state
        h = self.norm1(x)
        x = x + self.attn(h, h)
        x = x + self.cross(self.norm2(x), encoded)
        return x + self.mlp(self.norm3(x)), encoded


class Head(nn.Module):
    """(Hidden states (B, T, D), encoder's output) -> logits (B, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        return self.out(self.norm(state[0]))


class EncoderDecoder(nn.Module):
    """Tokens of encoder and decoder, int64 (B, S) and (B, T) -> logits (B, T, V)."""

    def __init__(self, n_layers: int = 2) -> None:
        super().__init__()
        self.embed, self.begin, self.head = Embed(), Begin(), Head()
        self.encoder = nn.ModuleList(EncoderBlock() for _ in range(n_layers))
        self.decoder = nn.ModuleList(DecoderBlock() for _ in range(n_layers))

    def forward(self, x: Tensor, decoder_tokens: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.encoder:
            x = block(x)
        state = self.begin(x, decoder_tokens)
        for block in self.decoder:
            state = block(state)
        return self.head(state)


def batch(step: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the encoder, tokens of the decoder and labels, int64 (rows, T)."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, V, (rows, T), generator=generator)
    labels = tokens.flip(1)
    return tokens, F.pad(labels, (1, 0))[:, :-1], labels


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    mesh = Mesh(tp=given.tp, pp=given.pp, device_type="cuda" if gpu else "cpu")
    placements = PLACEMENTS if given.tp > 1 else None
    model = pipeline(
        EncoderDecoder(), mesh, stages=STAGES, units=BLOCKS, placements=placements, dtype="float32"
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.0)
    for step in range(given.steps):
        rows = [x.chunk(mesh.size("dp_shard"))[mesh.rank("dp_shard")] for x in batch(step, 64)]
        tokens, before, labels = (x.to(mesh.device_type) for x in rows)
        mean = model.step(tokens, labels, loss, micro_batches=4, decoder_tokens=before)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1} loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
