"""BERT: a bidirectional encoder with post-norm blocks, trained to restore masked tokens.

Learned positions, token types, LayerNorm, GELU, biases. The head is the masked-language-model head
of the paper: a linear layer, GELU and LayerNorm, then the embedding's weight and a bias per token.
Next-sentence prediction and the pooler are left out, as in RoBERTa. Dropout is off; BERT had 0.1
(`model.override.dropout`, `model.override.attention_dropout`).

Sources: arXiv:1810.04805, section 3 and appendix A.1; RoBERTa, arXiv:1907.11692.
"""

from collections.abc import Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import HuggingFace, KeyConverter, WeightName
from dtron.models.spec import ModelSpec


def _bert(
    dim: int, n_layers: int, n_heads: int, vocab_size: int = 30522, max_seq_len: int = 512
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        ffn_dim=4 * dim,
        activation="gelu_exact",
        norm="layernorm",
        norm_eps=1e-12,
        post_norm=True,
        bias=True,
        causal=False,
        positions="learned",
        max_seq_len=max_seq_len,
        token_types=2,
        tied=True,
    )


SIZES = {
    "debug": _bert(128, 4, 4, vocab_size=264),
    "110m": _bert(768, 12, 12),
    "340m": _bert(1024, 24, 16),
}

_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}


def _read_shape(given: Mapping[str, Any]) -> dict[str, Any]:
    activation = given.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act = {activation!r} is not supported by dtron's bert; it has "
            f"{', '.join(_ACTIVATIONS)}"
        )
    heads = given.get("num_attention_heads")
    return {"n_heads": heads, "n_kv_heads": heads, "activation": _ACTIVATIONS[activation]}


def _write_shape(config: DecoderConfig) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    activation = names.get(config.activation, config.activation)
    # By default transformers would give token 0 no gradient.
    padding = {"pad_token_id": None}
    return {"num_attention_heads": config.n_heads, "hidden_act": activation, **padding}


_LAYER = "bert.encoder.layer.*"
HF = HuggingFace(
    model_type="bert",
    architecture="BertForMaskedLM",
    names=(
        WeightName("embed", "bert.embeddings.word_embeddings"),
        WeightName("position_embed", "bert.embeddings.position_embeddings"),
        WeightName("type_embed", "bert.embeddings.token_type_embeddings"),
        WeightName("embed_norm", "bert.embeddings.LayerNorm"),
        WeightName("blocks.*.attn.wq", f"{_LAYER}.attention.self.query"),
        WeightName("blocks.*.attn.wk", f"{_LAYER}.attention.self.key"),
        WeightName("blocks.*.attn.wv", f"{_LAYER}.attention.self.value"),
        WeightName("blocks.*.attn.wo", f"{_LAYER}.attention.output.dense"),
        WeightName("blocks.*.attn_norm", f"{_LAYER}.attention.output.LayerNorm"),
        WeightName("blocks.*.ffn.up", f"{_LAYER}.intermediate.dense"),
        WeightName("blocks.*.ffn.down", f"{_LAYER}.output.dense"),
        WeightName("blocks.*.ffn_norm", f"{_LAYER}.output.LayerNorm"),
        WeightName("transform.dense", "cls.predictions.transform.dense"),
        WeightName("norm", "cls.predictions.transform.LayerNorm"),
        WeightName("head.bias", "cls.predictions.bias"),
        WeightName("head", "cls.predictions.decoder"),
    ),
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "ffn_dim",
        "max_position_embeddings": "max_seq_len",
        "type_vocab_size": "token_types",
        "layer_norm_eps": "norm_eps",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    base={
        "norm": "layernorm",
        "post_norm": True,
        "bias": True,
        "causal": False,
        "positions": "learned",
        "tied": True,
    },
    fixed={
        "tie_word_embeddings": (True,),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    defaults={
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
    converters=(
        KeyConverter(frozenset({"num_attention_heads", "hidden_act"}), _read_shape, _write_shape),
    ),
    ignored_keys=frozenset({"classifier_dropout", "gradient_checkpointing"}),
    older_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored_tensors=(
        "bert.pooler.dense.*",
        "bert.embeddings.position_ids",
        "cls.seq_relationship.*",
        "cls.predictions.decoder.bias",  # transformers replaces it by cls.predictions.bias
    ),
)

BERT = ModelSpec("bert", SIZES, head=("transform", "norm", "head"), hf=HF)
