"""A template for a model outside of dtron: a decoder as a plain nn.Module, and its ModelSpec.

The block is PaLM's (arXiv:2204.02311): x + attention(norm(x)) + feed_forward(norm(x)). No module
knows a rank; `placements` says how weights split over parallel.tp. Shapes: B sequences, T tokens,
D = dim, H heads, K = head_size, V = vocab_size.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from dtron.models import Backend, DecoderConfig, ModelSpec
from dtron.models.attention import AttentionCore, Mask
from dtron.models.hf import HuggingFace, WeightName
from dtron.models.rope import apply_rope, rope_table
from dtron.parallelisms.placement import (
    Replicate,
    Row,
    Shard,
    colwise,
    prepare_input,
    replicate,
    rowwise,
    sequence,
)

FIELDS = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "rope_theta")


class Attention(nn.Module):
    """Causal attention with rotary positions, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__()
        self.head_size, kv = config.head_size, config.n_kv_heads * config.head_size
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_size, bias=False)
        self.wk = nn.Linear(config.dim, kv, bias=False)
        self.wv = nn.Linear(config.dim, kv, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_size, config.dim, bias=False)
        self.core = AttentionCore(backend, config)  # replaced under parallel.cp

    def forward(self, x: Tensor, rope: Tensor, mask: Mask) -> Tensor:
        # -1: under tp, the projections return this rank's heads, (B, T, H / tp, K).
        q, k, v = (w(x).unflatten(-1, (-1, self.head_size)) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.core(apply_rope(q, rope), apply_rope(k, rope), v, mask).flatten(-2))


class FeedForward(nn.Module):
    """down(relu(up(x))^2), (B, T, D) -> (B, T, D)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attn, self.ffn = Attention(config, backend), FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor, mask: Mask) -> Tensor:
        h = self.norm(x)
        return x + self.attn(h, rope, mask) + self.ffn(h)


class MyModel(nn.Module):
    """Tokens int64 (B, T), or hidden states (B, T, D) in a later pipeline stage -> (B, T, V)."""

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__()
        self.config, self.backend = config, backend
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Mask = None,
        dropout_keys: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        rope, mask = rope_table(self.config, positions), self.backend.prepare(documents, positions)
        x = x if x.is_floating_point() else self.embed(x)
        for block in self.blocks:
            x = block(x, rope, mask)
        x = self.norm(x)
        return self.head(x) if labels is None else self.head(x, labels=labels)


def placements(config: DecoderConfig, sequence_parallel: bool) -> dict[str, Row]:
    """Split heads, hidden units and vocabulary over tp, and tokens between the blocks."""
    between = Shard(1) if sequence_parallel else Replicate()
    norm = sequence() if sequence_parallel else replicate()
    return {
        "embed": rowwise(output=between),
        "blocks.*.norm": norm,
        "blocks.*.attn": prepare_input(between),  # gathers the tokens
        "blocks.*.attn.w[qkv]": colwise(),
        "blocks.*.attn.wo": rowwise(output=between),
        "blocks.*.ffn": prepare_input(between),
        "blocks.*.ffn.up": colwise(),
        "blocks.*.ffn.down": rowwise(output=between),
        "norm": norm,
        "head": colwise(inputs=between),
    }


def size(dim: int, n_layers: int, n_heads: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=264,  # the byte tokenizer needs 257
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads // 2,
        ffn_dim=4 * dim,
        activation="relu2",
    )


WEIGHTS = ["embed", "norm", "head", "blocks.*.norm", "blocks.*.ffn.up", "blocks.*.ffn.down"]
WEIGHTS += [f"blocks.*.attn.{name}" for name in ("wq", "wk", "wv", "wo")]
SPEC = ModelSpec(
    "my_model",
    {"debug": size(64, 4, 4), "small": size(512, 8, 8)},
    build=MyModel,
    reads={*FIELDS, "documents", "attention", "labels"},
    placements=placements,
    hf=HuggingFace(  # for dtron convert: names in files, here equal to those of the module
        "my_model",
        "MyModel",
        [WeightName(name, name) for name in WEIGHTS],
        fields={name: name for name in FIELDS},
        base={"activation": "relu2"},
    ),
)
