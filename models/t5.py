"""T5: an encoder-decoder that restores spans of text, v1.1 and v1.0.

v1.1 (also the architecture of Flan-T5): gated GELU, head of its own. v1.0: ReLU, and the head uses
the embedding's weight, after a scaling by dim^-0.5 (`tied`). Both: RMSNorm before each layer, no
biases, attention scores q k^T without a factor, relative position biases. Dropout is off; T5 v1.0
and fine-tuning have 0.1 (`model.override.dropout`).

Sources: arXiv:1910.10683; v1.1: google-research/text-to-text-transfer-transformer,
released_checkpoints.md; initialisation of queries: SelfAttention of mesh_tensorflow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.decoder import init_parameter
from dtron.models.encoder_decoder import EncoderDecoder
from dtron.models.hf import HuggingFace, KeyConverter, WeightName
from dtron.models.layers import ACTIVATIONS
from dtron.models.spec import ModelSpec


def _t5(
    dim: int, layers: int, n_heads: int, ffn_dim: int, vocab_size: int = 32128, **others: Any
) -> DecoderConfig:
    """Return a config with as many layers in the encoder as in the decoder."""
    return DecoderConfig(
        vocab_size=vocab_size,
        dim=dim,
        n_layers=2 * layers,
        encoder_layers=layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        ffn_dim=ffn_dim,
        norm_eps=1e-6,
        positions="relative",
        query_pre_attn_scalar=1,
        **{"activation": "geglu", "head_dim": 64, **others},
    )


SIZES = {
    "debug": _t5(128, 2, 4, 256, vocab_size=320, head_dim=32),
    "small": _t5(512, 8, 6, 1024),
    "base": _t5(768, 12, 12, 2048),
    "large": _t5(1024, 24, 16, 2816),
    "xl": _t5(2048, 24, 32, 5120),
    "xxl": _t5(4096, 24, 64, 10240),
    "small-v1.0": _t5(512, 6, 8, 2048, activation="relu", tied=True),
}


@torch.no_grad()
def init_t5(config: DecoderConfig, fqn: str, full: Tensor, generator: torch.Generator) -> None:
    """Initialise one unsharded parameter as `init_parameter`; queries smaller by sqrt(head_dim).

    That takes the place of the factor on attention scores, which T5 does not have.
    """
    init_parameter(config, fqn, full, generator)
    if fqn.endswith(".wq.weight"):
        full.mul_(config.head_size**-0.5)


_ACTIVATIONS = {"gated-gelu": "geglu", "relu": "relu", "gated-silu": "swiglu"}


def _read_layers(given: Mapping[str, Any]) -> dict[str, Any]:
    if (encoder := given.get("num_layers")) is None:
        raise CheckpointError("num_layers is missing")
    decoder = given.get("num_decoder_layers") or encoder
    return {"encoder_layers": encoder, "n_layers": encoder + decoder}


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    encoder = config.encoder_layers
    return {"num_layers": encoder, "num_decoder_layers": config.n_layers - encoder}


def _read_version(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read activation and tying: transformers 5 always writes tie_word_embeddings = true."""
    activation = given.get("feed_forward_proj", "relu")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"feed_forward_proj = {activation!r} is not supported by dtron's t5; it has "
            f"{', '.join(_ACTIVATIONS)}"
        )
    tied = given.get("scale_decoder_outputs", given.get("tie_word_embeddings", True))
    return {"activation": _ACTIVATIONS[activation], "tied": tied}


def _write_version(config: DecoderConfig) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    return {
        "feed_forward_proj": names.get(config.activation, config.activation),
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.tied,
        "decoder_start_token_id": 0,
    }


def _layers(stack: str, gated: bool | None = None) -> Callable[[DecoderConfig], range]:
    """Return the layers of a stack; with `gated`, none in models of the other kind."""

    def of(config: DecoderConfig) -> range:
        if gated is not None and gated != ACTIVATIONS[config.activation].gated:
            return range(0)
        first = config.encoder_layers
        return range(first) if stack == "encoder" else range(first, config.n_layers)

    return of


def _stack(stack: str, sublayers: Sequence[str]) -> Iterator[WeightName]:
    """Yield the names of a stack's layers.

    Args:
        sublayers: dtron's names of the sublayers, in the order of transformers.
    """
    theirs = {
        "attn": ("SelfAttention", {"wq": "q", "wk": "k", "wv": "v", "wo": "o"}),
        "cross": ("EncDecAttention", {"wq": "q", "kv.wk": "k", "kv.wv": "v", "wo": "o"}),
        "ffn": ("DenseReluDense", {"gate": "wi_0", "down": "wo"}),
    }
    for i, ours in enumerate(sublayers):
        at, (module, weights) = f"{stack}.block.*.layer.{i}", theirs[ours]
        yield WeightName(f"blocks.*.{ours}_norm", f"{at}.layer_norm", layers=_layers(stack))
        for name, its in weights.items():
            yield WeightName(
                f"blocks.*.{ours}.{name}", f"{at}.{module}.{its}", layers=_layers(stack)
            )
        for gated, its in ((True, "wi_1"), (False, "wi")) if ours == "ffn" else ():
            layers = _layers(stack, gated)
            yield WeightName("blocks.*.ffn.up", f"{at}.{module}.{its}", layers=layers)


_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"

HF = HuggingFace(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    names=(
        WeightName("embed", "shared"),
        WeightName("encoder_bias", f"encoder.{_BIAS}"),
        WeightName("decoder_bias", f"decoder.{_BIAS}"),
        *_stack("encoder", ("attn", "ffn")),
        WeightName("blocks.*.norm", "encoder.final_layer_norm"),
        *_stack("decoder", ("attn", "cross", "ffn")),
        WeightName("norm", "decoder.final_layer_norm"),
        WeightName("head", "lm_head"),
    ),
    fields={
        "vocab_size": "vocab_size",
        "d_model": "dim",
        "d_kv": "head_dim",
        "d_ff": "ffn_dim",
        "num_heads": "n_heads",
        "relative_attention_num_buckets": "relative_buckets",
        "relative_attention_max_distance": "relative_distance",
        "layer_norm_epsilon": "norm_eps",
        "dropout_rate": "dropout",
    },
    base={"norm": "rmsnorm", "positions": "relative", "query_pre_attn_scalar": 1},
    fixed={"is_encoder_decoder": (True,), "is_decoder": (False,)},
    defaults={
        "d_kv": 64,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.1,
    },
    converters=(
        KeyConverter(frozenset({"num_layers", "num_decoder_layers"}), _read_layers, _write_layers),
        KeyConverter(
            frozenset({"feed_forward_proj", "tie_word_embeddings", "scale_decoder_outputs"}),
            _read_version,
            _write_version,
        ),
        KeyConverter(
            frozenset(), lambda given: {"n_kv_heads": given.get("num_heads")}, lambda config: {}
        ),
    ),
    ignored_keys=frozenset(
        {"n_positions", "classifier_dropout", "initializer_factor", "output_past"}
        | {"dense_act_fn", "is_gated_act"}  # follow from feed_forward_proj
    ),
    ignored_tensors=(
        "encoder.embed_tokens.weight",  # transformers replaces both by shared.weight
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ),
)

T5 = ModelSpec("t5", SIZES, build=EncoderDecoder, init_parameter=init_t5, hf=HF)
