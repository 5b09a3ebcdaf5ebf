"""GPT: learned positions, LayerNorm, GELU, biases; the sizes of GPT-3 and of Megatron-LM.

GELU is the tanh approximation, as in GPT-2 and GPT-3. All layers have dense attention; GPT-3
alternates dense and sparse layers. Dropout is off; GPT-2 had 0.1 (`model.override.dropout`).

Sources: 125m to 175b: GPT-3, arXiv:2005.14165, table 2.1, except that 1.3b has 16 heads of 128
(the paper's 24 heads of 128 do not give its width of 2048). 1.7b, 7.1b and 16b, untied: the
weak-scaling benchmark of Megatron-LM (github.com/NVIDIA/Megatron-LM, README).
"""

from collections.abc import Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import HuggingFace, KeyConverter, RowOrder, WeightName
from dtron.models.spec import ModelSpec


def _gpt(
    dim: int,
    n_layers: int,
    n_heads: int,
    vocab_size: int = 50257,
    max_seq_len: int = 2048,
    tied: bool = True,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        ffn_dim=4 * dim,
        activation="gelu",
        norm="layernorm",
        norm_eps=1e-5,
        bias=True,
        positions="learned",
        max_seq_len=max_seq_len,
        tied=tied,
    )


def _megatron(dim: int, n_layers: int, n_heads: int) -> DecoderConfig:
    return _gpt(dim, n_layers, n_heads, vocab_size=131072, max_seq_len=4096, tied=False)


SIZES = {
    "debug": _gpt(128, 8, 8, vocab_size=264, max_seq_len=512),
    "125m": _gpt(768, 12, 12),
    "350m": _gpt(1024, 24, 16),
    "760m": _gpt(1536, 24, 16),
    "1.3b": _gpt(2048, 24, 16),
    "2.7b": _gpt(2560, 32, 32),
    "6.7b": _gpt(4096, 32, 32),
    "13b": _gpt(5120, 40, 40),
    "175b": _gpt(12288, 96, 96),
    "1.7b": _megatron(2048, 24, 16),
    "7.1b": _megatron(4096, 30, 32),
    "16b": _megatron(6144, 32, 48),
}


def _third(i: int) -> RowOrder:
    """Return a RowOrder: the rows of third i of a matrix that stacks queries, keys and values."""
    return lambda config, n_rows: range(i * n_rows, (i + 1) * n_rows)


def _read_shape(given: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = given.get("n_head"), given.get("n_embd", 0)
    return {"n_heads": heads, "n_kv_heads": heads, "ffn_dim": given.get("n_inner") or 4 * width}


def _write_shape(config: DecoderConfig) -> dict[str, Any]:
    return {"n_head": config.n_heads, "n_inner": config.ffn_dim}


def _read_dropout(given: Mapping[str, Any]) -> dict[str, Any]:
    added, embedded = given.get("resid_pdrop", 0.1), given.get("embd_pdrop", 0.1)
    if added != embedded:
        raise CheckpointError(
            f"resid_pdrop = {added} with embd_pdrop = {embedded} is not supported; dtron's gpt has "
            "one dropout probability"
        )
    return {"dropout": added, "attention_dropout": given.get("attn_pdrop", 0.1)}


def _write_dropout(config: DecoderConfig) -> dict[str, Any]:
    added = {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout}
    return {**added, "attn_pdrop": config.attention_dropout}


HF = HuggingFace(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names=(
        WeightName("embed", "transformer.wte"),
        WeightName("position_embed", "transformer.wpe"),
        WeightName("norm", "transformer.ln_f"),
        WeightName("head", "lm_head"),
        WeightName("blocks.*.attn_norm", "transformer.h.*.ln_1"),
        *(
            WeightName(f"blocks.*.attn.{w}", "transformer.h.*.attn.c_attn", True, _third(i))
            for i, w in enumerate(("wq", "wk", "wv"))
        ),
        WeightName("blocks.*.attn.wo", "transformer.h.*.attn.c_proj", transposed=True),
        WeightName("blocks.*.ffn_norm", "transformer.h.*.ln_2"),
        WeightName("blocks.*.ffn.up", "transformer.h.*.mlp.c_fc", transposed=True),
        WeightName("blocks.*.ffn.down", "transformer.h.*.mlp.c_proj", transposed=True),
    ),
    fields={
        "vocab_size": "vocab_size",
        "n_positions": "max_seq_len",
        "n_embd": "dim",
        "n_layer": "n_layers",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tied",
    },
    base={"activation": "gelu", "norm": "layernorm", "bias": True, "positions": "learned"},
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    defaults={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "n_positions": 1024},
    converters=(
        KeyConverter(frozenset({"n_head", "n_inner"}), _read_shape, _write_shape),
        KeyConverter(
            frozenset({"resid_pdrop", "embd_pdrop", "attn_pdrop"}), _read_dropout, _write_dropout
        ),
    ),
    ignored_keys=frozenset(
        {
            "n_ctx",
            "gradient_checkpointing",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
    prefix="transformer.",
    ignored_tensors=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)

GPT = ModelSpec("gpt", SIZES, hf=HF)
