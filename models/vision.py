"""A vision encoder (ViT) before a decoder: tokens of images take the place of placeholder tokens.

    images -> patches -> blocks -> projector -> (N, P, D) --place_images--> hidden states (B, T, D)

The encoder is SigLIP's vision tower without its last norm, as LLaVA uses it: pre-norm blocks with
LayerNorm, biases and attention between all patches of an image. Its blocks have the module names of
a decoder's blocks, below `vision`:

    vision.{patch_embed,position_embed}, vision.blocks.<i>     encoder
    projector.{up,down}                                        from the encoder's width to D
    place_images                                               no parameters
    embed, blocks, norm, head                                  the decoder (`decoder.py`)

Shapes: N images of a micro-batch, S pixels per side, P tokens per image, E width of the encoder, B
sequences, T tokens, D width of the decoder.
Sources: ViT arXiv:2010.11929; SigLIP arXiv:2303.15343; LLaVA arXiv:2304.08485 and 2310.03744.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.models.attention import Attention, Backend
from dtron.models.config import DecoderConfig
from dtron.models.decoder import Block, Decoder
from dtron.models.layers import norm

CHANNELS = 3


def encoder_config(config: DecoderConfig) -> DecoderConfig:
    """Return the config of the encoder's blocks, whose fields have the names of a decoder's."""
    return DecoderConfig(
        vocab_size=1,
        dim=config.vision_dim,
        n_layers=config.vision_layers,
        n_heads=config.vision_heads,
        n_kv_heads=config.vision_heads,
        ffn_dim=config.vision_ffn_dim,
        activation="gelu",
        norm="layernorm",
        norm_eps=1e-6,
        norm_zero_centered=config.norm_zero_centered,
        bias=True,
        causal=False,
        positions="learned",
        max_seq_len=config.image_tokens,
    )


class FullAttentionCore(nn.Module):
    """Attention between all tokens of an image, without a mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_unused: Any) -> Tensor:
        """Compute attention: q, k, v (N, P, H, K) -> (N, P, H, K)."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class VisionAttention(Attention):
    """Multi-head attention between all tokens of an image: (N, P, E) -> (N, P, E)."""

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__(config, backend)
        self.core = FullAttentionCore()  # type: ignore[assignment]


class VisionBlock(Block):
    """Block of the encoder: (N, P, E) -> (N, P, E)."""

    def _build_mixer(self, config: DecoderConfig, backend: Backend, window: int) -> None:
        self.attn_norm = norm(config, config.dim)
        self.attn = VisionAttention(config, backend)


class VisionEncoder(nn.Module):
    """ViT: images to tokens; see the module's docstring."""

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__()
        encoder, patch = encoder_config(config), config.vision_patch_size
        self.patch_embed = nn.Conv2d(CHANNELS, encoder.dim, patch, stride=patch)
        self.position_embed = nn.Embedding(config.image_tokens, encoder.dim)
        self.blocks = nn.ModuleDict(
            {str(layer): VisionBlock(encoder, backend) for layer in range(encoder.n_layers)}
        )

    def forward(self, images: Tensor) -> Tensor:
        """Encode images: (N, 3, S, S) -> (N, P, E).

        Args:
            images: uint8, or floats that are normalised to [-1, 1].
        """
        dtype = self.patch_embed.weight.dtype
        if not images.is_floating_point():
            images = images.to(torch.float32) / 127.5 - 1
        x = self.patch_embed(images.to(dtype)).flatten(2).transpose(1, 2)
        x = x + self.position_embed(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x, None, None, None)
        return x


class Projector(nn.Module):
    """Two-layer MLP from the encoder's width to the decoder's: (N, P, E) -> (N, P, D)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.up = nn.Linear(config.vision_dim, config.dim)
        self.down = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class PlaceImages(nn.Module):
    """Replaces hidden states of placeholder tokens by tokens of images."""

    def forward(self, x: Tensor, images: Tensor, index: Tensor) -> Tensor:
        """Return x with image tokens in place of placeholders: (B, T, D) -> (B, T, D).

        Args:
            x: (B, T, D), embeddings of tokens.
            images: (N, P, D).
            index: int64 (B, T, 2), (image, index among its P tokens) of each token; (-1, -1): text.
        """
        image, token = index.clamp(min=0).unbind(-1)
        return torch.where(index[..., :1] >= 0, images[image, token].to(x.dtype), x)


class VisionDecoder(Decoder):
    """A Decoder that also reads images; see the module's docstring."""

    def __init__(self, config: DecoderConfig, backend: Backend):
        super().__init__(config, backend)
        self.vision = VisionEncoder(config, backend)
        self.projector = Projector(config)
        self.place_images = PlaceImages()

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        *,
        images: Tensor | None = None,
        image_index: Tensor | None = None,
        **others: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Predict the next token at every position.

        Args:
            x, positions, documents, dropout_keys, others: arguments of `Decoder.forward`.
            images: uint8 or normalised floats (N, 3, S, S); None: no images. Used by the first
                pipeline stage only.
            image_index: int64 (B, T, 2), see `PlaceImages`; required with images.
        """
        if images is not None and not x.is_floating_point():
            assert image_index is not None, "images need the index of their tokens"
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            x = self._embed(x, positions, dropout_keys, None)
            x = self.place_images(x, self.projector(self.vision(images)), image_index)
        return super().forward(x, positions, documents, dropout_keys, **others)
