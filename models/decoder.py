"""A decoder-only transformer: embedding, blocks, norm, head.

One module covers all families; a DecoderConfig selects the variant. It is unsharded and knows no
rank, mesh or process group: parallelism is applied from outside, by module name (FQN):

    embed, position_embed                              position_embed for learned positions
    type_embed, embed_norm                             with token types; with post_norm
    blocks.<i>.attn_norm, .attn.{wq,wk,wv,wo}          .attn.{q_norm,k_norm} with qk_norm
    blocks.<i>.{delta,mamba}                           in place of .attn (`gated_delta_net.py`,
                                                       `mamba.py`)
    blocks.<i>.attn.{wq,wq_a,q_a_norm,wq_b}            latent attention: wq, or the other three
    blocks.<i>.attn.{wkv_a,kv_a_norm,wkv_b,k_rope,wo}  and these (`latent.py`)
    blocks.<i>.ffn_norm, .ffn.{gate,up,down}           gate for gated activations
    blocks.<i>.{attn_post_norm,ffn_post_norm}          with sandwich_norms
    blocks.<i>.scale                                   with layer_scalars
    blocks.<i>.ffn.{router,experts,shared}             with experts (`moe.py`)
                                                       with layer_pattern only one of the two
                                                       halves: mixer or feed-forward layer
    norm, head                                         the projection to logits
    transform                                          before them, with post_norm
    mtp_embed                                          with mtp: shares the embedding's weight
    blocks.<n_layers + k>, .{token_norm,hidden_norm,merge,norm}    MTP block k: a block, plus these

The input may also be hidden states instead of tokens. A pipeline stage is a Decoder in which the
missing modules return their input (`parallelisms/pipeline/stages.py`). Between blocks the sequence
may be sharded over ranks: no module reads the sequence length from hidden states. Blocks of one
kind (`LayerKind`, with or without a window) differ only in their weights and take only tensors, so
that torch.compile compiles one graph per kind.

Multi-token prediction (MTP): with h the hidden states after the last norm and e the embedding of
the token k + 1 ahead, MTP block k = 0, 1, ... computes

    h <- norm(block(merge [token_norm(e), hidden_norm(h)]))

From h the head predicts the token k + 2 ahead. MTP runs only if `mtp_tokens` is given, never in
evaluation or generation. Its logits follow the logits of the next token.

Shapes: B sequences, T tokens, D = dim, V vocabulary, K = head_dim, P = mtp.
Sources: arXiv:1706.03762; pre-norm arXiv:2002.04745; initialisation GPT-2, arXiv:1909.08053;
multi-token prediction DeepSeek-V3, arXiv:2412.19437, section 2.2, and the order in which its
released weights take e and h.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dtron.errors import ConfigError
from dtron.models.attention import Attention, Backend, Mask
from dtron.models.config import DecoderConfig, LayerKind
from dtron.models.dropout import ATTENTION_OUTPUT, EMBEDDING, FFN_OUTPUT, Dropout, fold
from dtron.models.gated_delta_net import GatedDeltaNet
from dtron.models.latent import LatentAttention
from dtron.models.layers import ACTIVATIONS, FeedForward, Scalar, norm, soft_cap
from dtron.models.mamba import Mamba, init_core_parameter
from dtron.models.moe import MoE
from dtron.models.recurrent import document_starts
from dtron.models.rope import rope_table

INIT_STD = 0.02


class Block(nn.Module):
    """Pre-norm transformer block: x += attention(norm(x)), then x += feed_forward(norm(x)).

    With post-norms both sums are of the normalised outputs: x += post_norm(attention(norm(x))).
    With a scalar the second sum is multiplied by it.
    """

    ffn: FeedForward | MoE

    def __init__(self, config: DecoderConfig, backend: Backend, window: int = 0):
        super().__init__()
        self._build_mixer(config, backend, window)
        self._build_feed_forward(config)
        self.attn_post_norm = norm(config, config.dim) if config.sandwich_norms else None
        self.ffn_post_norm = norm(config, config.dim) if config.sandwich_norms else None
        self.scale = Scalar() if config.layer_scalars else None
        self.attn_drop = Dropout(config.dropout, ATTENTION_OUTPUT)
        self.ffn_drop = Dropout(config.dropout, FFN_OUTPUT)

    def _build_mixer(self, config: DecoderConfig, backend: Backend, window: int) -> None:
        self.attn_norm = norm(config, config.dim)
        attention = LatentAttention if config.kv_lora_rank else Attention
        self.attn = attention(config, backend, window)

    def _build_feed_forward(self, config: DecoderConfig) -> None:
        self.ffn_norm = norm(config, config.dim)
        self.ffn = FeedForward(config)

    def forward(
        self, x: Tensor, rope: Tensor | None, mask: Mask, dropout_keys: Tensor | None
    ) -> Tensor:
        """Apply the block: (B, T, D) -> (B, T, D).

        Args:
            x: (B, T, D).
            rope: float32 (B or 1, T, K) from `rope_table`; None with learned positions.
            mask: from the attention backend's `prepare`.
            dropout_keys: int64 (B, T) with this layer folded in; None without dropout.
        """
        x = self._mixed(x, rope, mask, dropout_keys)
        return self._add_ffn(x, self.feed_forward(x), dropout_keys)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Apply norm and feed-forward layer to each token: (B, T, D) -> (B, T, D).

        `recompute.ffn_chunks` replaces this method. Blocks with experts do not use it.
        """
        return self.ffn(self.ffn_norm(x))

    def _mixed(
        self, x: Tensor, rope: Tensor | None, mask: Mask, dropout_keys: Tensor | None
    ) -> Tensor:
        h = self.attn(self.attn_norm(x), rope, mask, dropout_keys)
        return self._add_attention(x, h, dropout_keys)

    def _add_attention(self, x: Tensor, h: Tensor, dropout_keys: Tensor | None) -> Tensor:
        h = h if self.attn_post_norm is None else self.attn_post_norm(h)
        return x + self.attn_drop(h, dropout_keys)

    def _add_ffn(self, x: Tensor, h: Tensor, dropout_keys: Tensor | None) -> Tensor:
        h = h if self.ffn_post_norm is None else self.ffn_post_norm(h)
        x = x + self.ffn_drop(h, dropout_keys)
        return x if self.scale is None else self.scale(x)


class PostNormBlock(Block):
    """Post-norm transformer block: x = norm(x + attention(x)), then norm(x + feed_forward(x))."""

    def forward(
        self, x: Tensor, rope: Tensor | None, mask: Mask, dropout_keys: Tensor | None
    ) -> Tensor:
        """Apply the block: (B, T, D) -> (B, T, D); arguments as in `Block.forward`."""
        h = self.attn_drop(self.attn(x, rope, mask, dropout_keys), dropout_keys)
        x = self.attn_norm(x + h)
        return self.ffn_norm(x + self.ffn_drop(self.feed_forward(x), dropout_keys))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward layer to each token: (B, T, D) -> (B, T, D)."""
        return self.ffn(x)


class HeadTransform(nn.Module):
    """Linear layer and activation before the norm and the head of a masked language model."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.dim, config.dim)
        self.activation = ACTIVATIONS[config.activation].function

    def forward(self, x: Tensor) -> Tensor:
        """Transform hidden states: (B, T, D) -> (B, T, D)."""
        return self.activation(self.dense(x))


class RecurrentBlock(Block):
    """Block with a recurrent layer in place of attention.

    Its `forward` takes `starts` and `order`, arguments of the layer's forward, in place of `rope`
    and `mask`.
    """

    def _recurrent(self) -> nn.Module:
        raise NotImplementedError

    def _mixed(  # type: ignore[override]
        self, x: Tensor, starts: Tensor | None, order: Tensor | None, dropout_keys: Tensor | None
    ) -> Tensor:
        h = self._recurrent()(self.attn_norm(x), starts, order)
        return self._add_attention(x, h, dropout_keys)


class DeltaBlock(RecurrentBlock):
    """Block with a gated delta net in place of attention."""

    def _build_mixer(self, config: DecoderConfig, backend: Backend, window: int) -> None:
        self.attn_norm = norm(config, config.dim)
        self.delta = GatedDeltaNet(config)

    def _recurrent(self) -> nn.Module:
        return self.delta


class ExpertBlock(Block):
    """Block with a mixture of experts as feed-forward layer.

    It returns the router's counts and losses for the caller to record: the block itself may run
    twice under recomputation, but they must be recorded once.
    """

    def _build_feed_forward(self, config: DecoderConfig) -> None:
        self.ffn_norm = norm(config, config.dim)
        self.ffn = MoE(config)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rope: Tensor | None,
        mask: Mask,
        dropout_keys: Tensor | None,
        loads: Tensor | None = None,
        order: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the block: (B, T, D) -> (B, T, D); also return the router's counts and losses.

        Args:
            x, rope, mask, dropout_keys: arguments of `Block.forward`.
            loads: result of `Router.loads`.
            order: index of each token in its sequence, on all ranks; see `MoE.dispatch`.
            real: bool (B, T), False for padding; None: no padding.
        """
        x = self._mixed(x, rope, mask, dropout_keys)
        ffn = self.ffn
        assert isinstance(ffn, MoE)
        rows, offsets, state = ffn.dispatch(self.ffn_norm(x), dropout_keys, loads, order, real)
        pending = ffn.experts.begin(rows, offsets, state.tail, state.copies)
        shared_output = ffn.shared_output(state.x)
        h, counts, losses = ffn.combine(ffn.experts.finish(pending), shared_output, state)
        return self._add_ffn(x, h, dropout_keys), counts, losses


class DeltaExpertBlock(DeltaBlock, ExpertBlock):
    """Block with a gated delta net and a mixture of experts."""


class AttentionLayer(Block):
    """Block without a feed-forward layer: x += attention(norm(x))."""

    def _build_feed_forward(self, config: DecoderConfig) -> None:
        pass

    def forward(
        self, x: Tensor, rope: Tensor | None, mask: Mask, dropout_keys: Tensor | None
    ) -> Tensor:
        """Apply the block: (B, T, D) -> (B, T, D); arguments as in `Block.forward`."""
        return self._mixed(x, rope, mask, dropout_keys)


class MambaLayer(AttentionLayer, RecurrentBlock):
    """Block with Mamba-2 in place of attention, and without a feed-forward layer."""

    def _build_mixer(self, config: DecoderConfig, backend: Backend, window: int) -> None:
        self.attn_norm = norm(config, config.dim)
        self.mamba = Mamba(config)

    def _recurrent(self) -> nn.Module:
        return self.mamba


class FeedForwardLayer(Block):
    """Block without attention: x += feed_forward(norm(x))."""

    def _build_mixer(self, config: DecoderConfig, backend: Backend, window: int) -> None:
        pass

    def _mixed(
        self, x: Tensor, rope: Tensor | None, mask: Mask, dropout_keys: Tensor | None
    ) -> Tensor:
        return x


class ExpertLayer(FeedForwardLayer, ExpertBlock):
    """Block with a mixture of experts, and without attention."""


class MTPBlock(Block):
    """Block of multi-token prediction; see the module's docstring.

    Attributes:
        in_training_alone: marks blocks that evaluation and generation skip.
    """

    in_training_alone = True

    def __init__(self, config: DecoderConfig, backend: Backend, window: int):
        super().__init__(config, backend, window)
        self.token_norm = norm(config, config.dim)
        self.hidden_norm = norm(config, config.dim)
        self.merge = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.norm = norm(config, config.dim)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rope: Tensor | None,
        mask: Mask,
        dropout_keys: Tensor | None,
        ahead: Tensor,
        *routed: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Merge x and `ahead`, apply the block, then normalise.

        Args:
            x: (B, T, D), normalised.
            rope, mask, dropout_keys: arguments of `Block.forward`.
            ahead: (B, T, D), embeddings of the tokens k + 1 ahead, for MTP block k.
            routed: with experts, the further arguments of `ExpertBlock.forward`.
        """
        x = self.merge(torch.cat([self.token_norm(ahead), self.hidden_norm(x)], dim=-1))
        out: Any = super().forward(x, rope, mask, dropout_keys, *routed)
        if isinstance(out, Tensor):
            return self.norm(out)
        x, counts, losses = out
        return self.norm(x), counts, losses


class MTPExpertBlock(MTPBlock, ExpertBlock):
    """Block of multi-token prediction with a mixture of experts."""


BLOCKS: dict[LayerKind, type[Block]] = {
    LayerKind(): Block,
    LayerKind("delta"): DeltaBlock,
    LayerKind(ffn="experts"): ExpertBlock,
    LayerKind("delta", "experts"): DeltaExpertBlock,
    LayerKind("attention", ""): AttentionLayer,
    LayerKind("mamba", ""): MambaLayer,
    LayerKind("", "dense"): FeedForwardLayer,
    LayerKind("", "experts"): ExpertLayer,
    LayerKind(mtp=True): MTPBlock,
    LayerKind(ffn="experts", mtp=True): MTPExpertBlock,
}


class Decoder(nn.Module):
    """Decoder-only transformer; see the module's docstring for its module names.

    Weights are uninitialised: `init_parameter` fills them by name once they are on a device.
    """

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__()
        self.config = config
        self.backend = backend
        learned = config.positions == "learned"
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.position_embed: nn.Embedding | None = (
            nn.Embedding(config.max_seq_len, config.dim) if learned else None
        )
        self.type_embed: nn.Embedding | None = None
        if config.token_types:
            self.type_embed = nn.Embedding(config.token_types, config.dim)
        self.embed_norm = norm(config, config.dim) if config.post_norm else None
        self.embed_drop = Dropout(config.dropout, EMBEDDING)
        self.blocks = self._build_blocks(config, backend)
        self.transform = HeadTransform(config) if config.post_norm else None
        self.norm = norm(config, config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=config.post_norm)
        if config.tied:
            self.head.weight = self.embed.weight
        if config.mtp:
            self.mtp_embed = nn.Embedding(config.vocab_size, config.dim)
            self.mtp_embed.weight = self.embed.weight

    def _build_blocks(self, config: DecoderConfig, backend: Backend) -> nn.ModuleDict:
        windows = (*config.windows, *[config.window] * config.mtp)
        blocks = {**BLOCKS, LayerKind(): PostNormBlock} if config.post_norm else BLOCKS
        return nn.ModuleDict(
            {
                str(layer): blocks[kind._replace(full=False)](
                    config.of_layer(kind), backend.of_layer(kind), window
                )
                for layer, (kind, window) in enumerate(
                    zip(config.layer_kinds, windows, strict=True)
                )
            }
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        labels: Tensor | None = None,
        mtp_tokens: Tensor | None = None,
        order: Tensor | None = None,
        real: Tensor | None = None,
        loss_weights: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Predict the next token, or without a causal mask the token itself, at every position.

        Args:
            x: tokens int64 (B, T), or hidden states (B, T, D) in a later pipeline stage.
            positions: int64 (B, T) or (1, T); None: 0 ... T - 1, allowed for tokens only.
            documents: int32 (B, T), equal within a document; None: one document per sequence.
            dropout_keys: int64 (B, T) from `dropout.token_keys`; used in training with dropout.
            labels: int64 (B, T), passed to a head that computes the loss (`train.loss_chunks`);
                with `mtp_tokens` (B, T, 1 + P).
            mtp_tokens: int64 (B, T, P), the tokens 1, 2, ... P ahead; None: skip MTP.
            order: index of each token in its sequence, on all ranks that share the micro-batch
                (see `MoE.dispatch`); used if experts have a capacity, and by recurrent layers with
                context parallelism.
            real: bool (B, T), False for padding; None: no padding. Used by models with experts.
            loss_weights: (1 + P,), passed to a head that computes the losses of all predictions.
            token_types: int64 (B, T), of models with token types; None: 0 for all tokens.
        Returns:
            Logits (B, T, V) in the dtype of computation, or with labels the head's losses: (their
            sum, the sum of each sequence (B,)). With `mtp_tokens`, a tuple of 1 + P logits; or with
            labels (the weighted sum of the losses, the sum of each prediction of each sequence
            ((1 + P) B,)). Stages without the head return hidden states (B, T, D).
        """
        if positions is None:
            assert not x.is_floating_point(), "a later stage needs positions"
            positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        mask, full_mask = self.backend.masks(documents, positions, self.config.causal)
        if not x.is_floating_point():
            x = self._embed(x, positions, dropout_keys, token_types)
        rope, local_rope = self._rope_tables(positions)
        starts = self._starts(documents, positions)
        routed = (order if self.config.capacity_factor else None, real)
        predictions, windows = [], self.config.windows
        for layer, block in self.blocks.items():
            keys = self._layer_keys(dropout_keys, int(layer))
            if isinstance(block, MTPBlock):
                predictions.append((block, keys))
            elif isinstance(block, RecurrentBlock):
                x = self._through(block, routed, x, starts, order, keys)
            elif int(layer) < self.config.n_layers:  # not the place of another stage's MTP block
                inputs = (local_rope, mask) if windows[int(layer)] else (rope, full_mask)
                x = self._through(block, routed, x, *inputs, keys)
        x = self.norm(x if self.transform is None else self.transform(x))
        if mtp_tokens is None or not predictions:
            return self._logits(x) if labels is None else self.head(x, labels=labels)
        # Call embedding and head once each: under sharding every call gathers the weight.
        ahead = self._scaled(self.mtp_embed(mtp_tokens.movedim(-1, 0).flatten(0, 1)))
        table = local_rope if self.config.window else rope
        hidden = [x]
        for (block, keys), e in zip(predictions, ahead.chunk(len(predictions)), strict=True):
            hidden.append(self._through(block, routed, hidden[-1], table, mask, keys, e))
        if labels is None:
            return self._logits(torch.cat(hidden)).chunk(len(hidden))
        labels = labels.movedim(-1, 0).flatten(0, 1)
        return self.head(torch.cat(hidden), labels=labels, weights=loss_weights)

    def _through(
        self, block: nn.Module, routed: tuple[Tensor | None, Tensor | None], *inputs: Any
    ) -> Tensor:
        """Apply a block. One with experts also gets loads and `routed`, and is recorded."""
        if not isinstance(block, ExpertBlock):
            return block(*inputs)
        assert isinstance(block.ffn, MoE)
        router = block.ffn.router
        x, counts, losses = block(*inputs, router.loads(), *routed)
        if self.training and torch.is_grad_enabled():
            router.record(counts, losses)
        return x

    def _starts(self, documents: Tensor | None, positions: Tensor) -> Tensor | None:
        """Return the starts of documents, for recurrent layers."""
        return document_starts(documents, positions) if self.config.has_recurrent_layers else None

    def _rope_tables(self, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the rotary tables of layers without and with a window; None: no rotation."""
        if self.config.positions != "rope":
            return None, None
        rope = rope_table(self.config.full_rope, positions)
        local = self.config.local_rope
        return rope, rope if local is None else rope_table(local, positions)

    def _logits(self, x: Tensor) -> Tensor:
        out, cap = self.head(x), self.config.logit_softcap
        # A stage without the head returns hidden states, which have no cap.
        return soft_cap(out, cap) if cap and isinstance(self.head, nn.Linear) else out

    def _scaled(self, embeddings: Tensor) -> Tensor:
        if not self.config.scale_embeddings:
            return embeddings
        return embeddings * torch.tensor(self.config.dim**0.5, dtype=embeddings.dtype)

    def _embed(
        self, tokens: Tensor, positions: Tensor, keys: Tensor | None, types: Tensor | None
    ) -> Tensor:
        x = self._scaled(self.embed(tokens))
        if self.type_embed is not None:
            x = x + self.type_embed(torch.zeros_like(tokens) if types is None else types)
        if self.position_embed is not None:
            if tokens.shape[1] > self.config.max_seq_len:
                raise ConfigError(
                    f"model.override.max_seq_len = {self.config.max_seq_len} is less than the "
                    f"sequence length of {tokens.shape[1]} tokens; use {tokens.shape[1]} or more"
                )
            x = x + self.position_embed(positions)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return self.embed_drop(x, self._layer_keys(keys, -1))

    def _layer_keys(self, keys: Tensor | None, layer: int) -> Tensor | None:
        """Return the dropout keys of one layer (-1: the embedding); None without dropout."""
        if not self.training or not self.config.draws:
            return None
        assert keys is not None, "a model with dropout or jitter needs dropout_keys in training"
        return fold(keys, layer + 1)


@torch.no_grad()
def init_parameter(
    config: DecoderConfig, fqn: str, full: Tensor, generator: torch.Generator
) -> None:
    """Initialise one unsharded parameter in place, from FQN, config and generator only.

    Matrices and embeddings are normal with standard deviation 0.02, divided by sqrt(2 * n_layers)
    for matrices that write to the residual stream (wo, down), so that its variance does not grow
    with depth (GPT-2; not with post_norm, where norms follow). Norms start at gamma = 1, biases at
    0. With layer_pattern only one matrix per layer writes to the residual stream. The stacked
    matrices of experts are drawn as one tensor.

    Args:
        config: config of the model.
        fqn: FQN of the parameter.
        full: the unsharded parameter, a plain tensor of any floating dtype and device.
        generator: on the tensor's device.
    """
    *path, kind = fqn.split(".")
    name = path[-1] if kind in ("weight", "bias") else kind  # experts: parameters, not modules
    if path[-2:] == ["mamba", "core"]:
        init_core_parameter(config, kind, full, generator)
    elif kind in ("gamma", "dt_bias"):
        full.fill_(1.0)
    elif kind == "a_log":  # decay rates of a gated delta net, as in transformers
        full.uniform_(0.01, 16, generator=generator).log_()
    elif kind.endswith("bias"):
        full.zero_()
    elif name.endswith("norm"):
        full.fill_(0.0 if config.norm_zero_centered else 1.0)
    elif name in ("wo", "down") and not config.post_norm:
        sums = config.n_layers * (1 if config.layer_pattern else 2)
        full.normal_(0.0, INIT_STD / math.sqrt(sums), generator=generator)
    else:
        full.normal_(0.0, INIT_STD, generator=generator)
