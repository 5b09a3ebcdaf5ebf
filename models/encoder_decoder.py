"""An encoder, and a decoder that attends to the encoder's output: T5's architecture.

    encoder tokens (B, S) -> embed -> blocks 0 ... E - 1 -> norm -> encoded (B, S, D)
    tokens (B, T) -> embed -> blocks E ... with attention to `encoded` -> norm -> head -> (B, T, V)

Blocks, embedding, norm and head are those of a decoder (`decoder.py`), and have its module names.
Additional ones:

    encoder_bias, decoder_bias                          relative position biases, of all layers
    blocks.<E-1>.norm                                   norm of the encoder's output
    blocks.<i>.cross_norm, .cross.{wq,kv.wk,kv.wv,wo}   attention to `encoded`, in the decoder

Attention of the encoder is between all its tokens, that of the decoder causal. Each head adds to
its scores a bias that depends on key position - query position: distances are grouped in buckets,
exact up to a quarter (decoder: half) of them, then logarithmic. All layers of a stack share its
biases.

A pipeline stage receives and returns four tensors: hidden states of the encoder (its output, once
it is complete) and of the decoder, and the two tables of biases (buckets, H). So encoder and
decoder layers may be on any stages, and gradients of the tables return to the first stage, which
owns them.

Shapes: B sequences, S tokens of the encoder, T tokens of the decoder, D width, H heads, V
vocabulary, E encoder layers.
Sources: arXiv:1706.03762; T5, arXiv:1910.10683; relative positions arXiv:1803.02155; buckets:
T5Attention of transformers.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.models.attention import Attention, Backend, Mask
from dtron.models.config import DecoderConfig, LayerKind
from dtron.models.decoder import Block, Decoder
from dtron.models.dropout import CROSS_OUTPUT, Dropout, fold
from dtron.models.layers import norm


def relative_buckets(
    n_queries: int,
    n_keys: int,
    n_buckets: int,
    distance: int,
    causal: bool,
    device: torch.device | None = None,
) -> Tensor:
    """Return the bucket of each query and key: int64 (T, S).

    The queries are at the positions of the last T keys.

    Args:
        n_buckets: number of buckets; without `causal`, half of them are for later keys.
        distance: all distances from this one on are in one bucket.
    """
    keys = torch.arange(n_keys, device=device)
    ahead = keys.unsqueeze(0) - keys[n_keys - n_queries :].unsqueeze(1)
    first = torch.zeros_like(ahead)
    if not causal:
        n_buckets //= 2
        first = (ahead > 0) * n_buckets
    away = ahead.neg().clamp(min=0) if causal else ahead.abs()
    exact = n_buckets // 2
    logs = torch.log(away.float() / exact) / math.log(distance / exact) * (n_buckets - exact)
    far = exact + logs.clamp(min=0).long()
    return first + torch.where(away < exact, away, far.clamp(max=n_buckets - 1))


def relative_bias(
    table: Tensor, n_queries: int, n_keys: int, distance: int, causal: bool
) -> Tensor:
    """Return what is added to attention scores: (1, H, T, S), with `causal` -inf for later keys.

    Args:
        table: (buckets, H), the bias of each head.
        n_queries, n_keys, distance: arguments of `relative_buckets`.
    """
    index = relative_buckets(n_queries, n_keys, len(table), distance, causal, table.device)
    bias = F.embedding(index, table).permute(2, 0, 1)
    if causal:
        later = torch.ones(index.shape, dtype=torch.bool, device=index.device)
        bias = bias.masked_fill(later.triu(n_keys - n_queries + 1), float("-inf"))
    return bias.unsqueeze(0).contiguous()


class EncodedHeads(nn.Module):
    """Keys and values of an encoder's output: (B, S, D) -> two times (B, S, G, K)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.head_size = config.head_size
        width = config.n_kv_heads * config.head_size
        self.wk = nn.Linear(config.dim, width, bias=config.bias)
        self.wv = nn.Linear(config.dim, width, bias=config.bias)

    def forward(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (w(encoded).unflatten(-1, (-1, self.head_size)) for w in (self.wk, self.wv))
        return k, v


class CrossAttention(Attention):
    """Attention of (B, T, D) to all tokens of an encoder (B, S, D): -> (B, T, D).

    Its `forward` takes the encoder's output in place of `rope`.
    """

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__(config, backend)
        self.core.causal = False

    def _build_projections(self, config: DecoderConfig) -> None:
        self.head_size, width = config.head_size, config.n_heads * config.head_size
        self.wq = nn.Linear(config.dim, width, bias=config.bias)
        self.kv = EncodedHeads(config)
        self.wo = nn.Linear(width, config.dim, bias=config.bias)

    def heads(  # type: ignore[override]
        self, x: Tensor, encoded: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project: x (B, T, D), encoded (B, S, D) -> q (B, T, H, K), k and v (B, S, G, K)."""
        return self.wq(x).unflatten(-1, (-1, self.head_size)), *self.kv(encoded)


class NormedBlock(Block):
    """The encoder's last block, whose output is normalised."""

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__(config, backend)
        self.norm = norm(config, config.dim)

    def forward(self, *args: Any) -> Tensor:
        """Apply block and norm: (B, S, D) -> (B, S, D); arguments as in `Block.forward`."""
        return self.norm(super().forward(*args))


class CrossBlock(Block):
    """Block of the decoder: self-attention, attention to the encoder's output, feed-forward."""

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__(config, backend)
        self.cross_norm = norm(config, config.dim)
        self.cross = CrossAttention(config, backend)
        self.cross_drop = Dropout(config.dropout, CROSS_OUTPUT)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rope: None,
        mask: Mask,
        dropout_keys: Tensor | None,
        encoded: Tensor,
    ) -> Tensor:
        """Apply the block: (B, T, D) -> (B, T, D).

        Args:
            x, rope, mask, dropout_keys: arguments of `Block.forward`.
            encoded: (B, S, D), output of the encoder.
        """
        x = self._mixed(x, rope, mask, dropout_keys)
        others = None if dropout_keys is None else fold(dropout_keys, CROSS_OUTPUT)
        h = self.cross(self.cross_norm(x), encoded, None, others)
        x = x + self.cross_drop(h, dropout_keys)
        return self._add_ffn(x, self.feed_forward(x), dropout_keys)


BLOCKS: dict[LayerKind, type[Block]] = {
    LayerKind(encoder=True): Block,
    LayerKind(encoder=True, normed=True): NormedBlock,
    LayerKind(cross=True): CrossBlock,
}


class EncoderDecoder(Decoder):
    """Encoder-decoder transformer; see the module's docstring."""

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__(config, backend)
        self.encoder_bias = nn.Embedding(config.relative_buckets, config.n_heads)
        self.decoder_bias = nn.Embedding(config.relative_buckets, config.n_heads)

    def _build_blocks(self, config: DecoderConfig, backend: Backend) -> nn.ModuleDict:
        kinds = enumerate(config.layer_kinds)
        return nn.ModuleDict({str(i): BLOCKS[kind](config, backend) for i, kind in kinds})

    def forward(  # type: ignore[override]
        self,
        x: Tensor | tuple[Tensor, ...],
        positions: Tensor | None = None,
        documents: None = None,
        dropout_keys: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        encoder_tokens: Tensor | None = None,
        encoded: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Predict the next token of the decoder at every position.

        Args:
            x: the decoder's tokens int64 (B, T), beginning with a start token; in a later pipeline
                stage what the stage before it returned.
            positions: (1, T) or (B, T), whose shape gives T; None: that of x, allowed for tokens
                only.
            documents: None; documents are not masked.
            dropout_keys: int64 (B, T) from `dropout.token_keys`; used in training with dropout.
            labels: int64 (B, T), passed to a head that computes the loss (`train.loss_chunks`).
            encoder_tokens: int64 (B, S), what the encoder reads; required in every stage.
            encoded: (B, S, D), a result of `encode` in place of encoder_tokens.
        Returns:
            Logits (B, T, V), or with labels the head's losses, as of `Decoder.forward`. Stages
            without the head return four tensors: see the module's docstring.
        """
        assert documents is None, "documents are not masked"
        n_tokens = x.shape[1] if isinstance(x, Tensor) else 0
        n_tokens = n_tokens if positions is None else positions.shape[1]
        if not isinstance(x, Tensor):
            hidden, out, encoder_table, decoder_table = x
        else:
            if encoded is None:
                assert encoder_tokens is not None, "the encoder needs tokens"
                keys = self._encoder_keys(dropout_keys, encoder_tokens)
                hidden = self._embed_tokens(encoder_tokens, keys)
            else:
                hidden = encoded
            out = self._embed_tokens(x, dropout_keys)
            # After both embeddings: FSDP frees a unit once all of its modules have run.
            encoder_table, decoder_table = self._tables(hidden.device)
        if encoded is None:
            assert encoder_tokens is not None, "every stage needs the encoder's tokens"
            hidden = self._encode(hidden, encoder_table, encoder_tokens, dropout_keys)
        first = self.config.encoder_layers
        decoder = range(first, self.config.n_layers)
        bias = self._bias(decoder, decoder_table, n_tokens, causal=True)
        for layer in decoder:
            keys = self._layer_keys(dropout_keys, layer)
            out = self.blocks[str(layer)](out, None, bias, keys, hidden)
        if not isinstance(self.head, nn.Linear):
            return hidden, out, encoder_table, decoder_table
        out = self.norm(out)
        if self.config.tied:  # T5 v1.0
            out = out * self.config.dim**-0.5
        return self.head(out) if labels is None else self.head(out, labels=labels)

    def encode(self, tokens: Tensor) -> Tensor:
        """Return the encoder's output for tokens int64 (B, S), without dropout: (B, S, D)."""
        encoder_table, _ = self._tables(tokens.device)
        return self._encode(self._embed_tokens(tokens, None), encoder_table, tokens, None)

    def _encode(
        self, x: Tensor, table: Tensor, tokens: Tensor, dropout_keys: Tensor | None
    ) -> Tensor:
        """Apply the encoder's blocks of this stage: (B, S, D) -> (B, S, D)."""
        layers, keys = range(self.config.encoder_layers), self._encoder_keys(dropout_keys, tokens)
        bias = self._bias(layers, table, tokens.shape[1], causal=False)
        for layer in layers:
            x = self.blocks[str(layer)](x, None, bias, self._layer_keys(keys, layer))
        return x

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        every = torch.arange(self.config.relative_buckets, device=device)
        return self.encoder_bias(every), self.decoder_bias(every)

    def _embed_tokens(self, tokens: Tensor, keys: Tensor | None) -> Tensor:
        return self.embed_drop(self.embed(tokens), self._layer_keys(keys, -1))

    def _encoder_keys(self, keys: Tensor | None, tokens: Tensor) -> Tensor | None:
        """Return dropout keys (B, S) of the encoder's tokens, which differ from the decoder's."""
        if keys is None:
            return None
        return fold(keys[:, :1], torch.arange(tokens.shape[1], device=keys.device))

    def _bias(self, layers: range, table: Tensor, n_tokens: int, causal: bool) -> Tensor | None:
        """Return the biases of self-attention; None: this stage has none of the layers."""
        if not any(isinstance(self.blocks[str(layer)], Block) for layer in layers):
            return None
        return relative_bias(table, n_tokens, n_tokens, self.config.relative_distance, causal)


@torch.no_grad()
def greedy(
    model: EncoderDecoder,
    encoder_tokens: Tensor,
    n_tokens: int,
    end: int | None = None,
    start: int = 0,
) -> Tensor:
    """Return the most likely token after each other: int64 (B, at most n_tokens).

    The encoder runs once.

    Args:
        model: unsharded, in evaluation mode.
        encoder_tokens: int64 (B, S).
        end: token after which a sequence is complete; further tokens repeat it. None: no such
            token.
        start: the decoder's first token, by default T5's padding token.
    """
    encoded = model.encode(encoder_tokens)
    found = encoder_tokens.new_full((len(encoder_tokens), 1), start)
    done = torch.zeros_like(found[:, 0], dtype=torch.bool)
    for _ in range(n_tokens):
        logits = model(found, encoded=encoded)
        assert isinstance(logits, Tensor), "the model is whole"
        token = logits[:, -1].argmax(-1)
        if end is not None:
            token = torch.where(done, end, token)
            done |= token == end
        found = torch.cat([found, token.unsqueeze(1)], dim=1)
        if bool(done.all()):
            break
    return found[:, 1:]
