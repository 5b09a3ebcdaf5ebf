"""LLaVA: SigLIP's vision tower and a projector before a decoder of Llama or Qwen3.

Equal to LlavaForConditionalGeneration of transformers with `vision_feature_layer = -1` and
`vision_feature_select_strategy = "full"`, which reads neither the tower's last norm nor its pooling
head: import skips these tensors, and export writes none.

Sources: the configuration classes of transformers; sizes of the towers: google/siglip-base-patch16-
224 and siglip-so400m-patch14-384; of the decoders: Qwen3, arXiv:2505.09388, whose vocabulary has
<|image_pad|>.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import LLAMA_IGNORED_TENSORS, HuggingFace, KeyConverter, WeightName
from dtron.models.llama import LLAMA
from dtron.models.qwen3 import QWEN3
from dtron.models.spec import (
    ModelSpec,
    Row,
    Unit,
    colwise,
    decoder_placements,
    decoder_units,
    embedding_modules,
    prepare_input,
    replicate,
    rowwise,
    sequence,
)
from dtron.models.vision import VisionDecoder, encoder_config
from dtron.parallelisms.placement import Encoder, Replicate

IMAGE_PAD = 151655
"""Id of <|image_pad|> in Qwen3's vocabulary."""
_SO400M = {
    **{"vision_layers": 27, "vision_dim": 1152, "vision_heads": 16, "vision_ffn_dim": 4304},
    **{"vision_image_size": 384, "vision_patch_size": 14, "image_token": IMAGE_PAD},
}
_BASE = {
    **{"vision_layers": 12, "vision_dim": 768, "vision_heads": 12, "vision_ffn_dim": 3072},
    **{"vision_image_size": 224, "vision_patch_size": 16, "image_token": IMAGE_PAD},
}
_TINY = {
    **{"vision_layers": 2, "vision_dim": 64, "vision_heads": 4, "vision_ffn_dim": 128},
    **{"vision_image_size": 32, "vision_patch_size": 8, "image_token": 255},
}

SIZES = {
    "debug": LLAMA.sizes["debug"].model_copy(update=_TINY),
    "0.6b": QWEN3.sizes["0.6b"].model_copy(update=_BASE),
    "8b": QWEN3.sizes["8b"].model_copy(update=_SO400M),
}


def llava_placements(config: DecoderConfig, sequence_parallel: bool) -> dict[str, Row]:
    """Return the tp placements of decoder, encoder and projector, all split over tp.

    The encoder has no sequence parallelism: all tp ranks have all images. With sequence parallelism
    of the decoder each rank places the tokens of its own shard of the sequence, so that the
    gradient of the images' tokens is a partial sum. (With `parallel.encoder_tp` = 1 other rows
    replicate the encoder: `parallelisms/tensor/encoder.py`.)
    """
    encoder = decoder_placements(encoder_config(config), sequence_parallel=False)
    own_tokens = sequence(split=(2,), partial=(1,)) if sequence_parallel else replicate()
    return {
        **decoder_placements(config, sequence_parallel),
        **{f"vision.{name}": row for name, row in encoder.items() if name.startswith("blocks.")},
        "vision.patch_embed": replicate(),
        "vision.position_embed": replicate(),
        "projector": prepare_input(Replicate()),
        "projector.up": colwise(),
        "projector.down": rowwise(),
        "place_images": own_tokens,
    }


def llava_units(config: DecoderConfig) -> tuple[Unit, ...]:
    """Return the FSDP units: the encoder's blocks and those of a Decoder.

    The root unit has the embeddings of patches and the projector, which are small.
    """
    return ("vision.blocks.*", *decoder_units(config))


def llava_embedding(config: DecoderConfig) -> tuple[str, ...]:
    """Return the modules of the first pipeline stage in addition to its layers."""
    return (*embedding_modules(config), "vision", "projector", "place_images")


_TEXTS = {spec.hf.model_type: spec.hf for spec in (LLAMA, QWEN3) if spec.hf is not None}
_NO_VISION = {
    name: field.default
    for name, field in DecoderConfig.model_fields.items()
    if name.startswith("vision_") or name == "image_token"
}
_VISION_FIELDS = {
    "num_hidden_layers": ("vision_layers", 12),
    "hidden_size": ("vision_dim", 768),
    "num_attention_heads": ("vision_heads", 12),
    "intermediate_size": ("vision_ffn_dim", 3072),
    "image_size": ("vision_image_size", 224),
    "patch_size": ("vision_patch_size", 16),
}
"""Key of vision_config -> (field of DecoderConfig, default in transformers)."""
_VISION_FIXED = {
    "model_type": "siglip_vision_model",
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "num_channels": 3,
    "attention_dropout": 0.0,
}


def _part(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(part := given.get(key), dict):
        raise CheckpointError(f"{key}, the config of a part of the model, is missing")
    return dict(part)


def _read_text(given: Mapping[str, Any]) -> dict[str, Any]:
    text = _part(given, "text_config")
    if (kind := text.get("model_type", "llama")) not in _TEXTS:
        raise CheckpointError(
            f"text_config.model_type = {kind!r} is not supported; dtron's llava has "
            f"{' or '.join(_TEXTS)}"
        )
    if (tied := given.get("tie_word_embeddings")) is not None:
        text["tie_word_embeddings"] = tied or text.get("tie_word_embeddings", False)
    return _TEXTS[kind].read(text, "text_config").model_dump()


def _write_text(config: DecoderConfig) -> dict[str, Any]:
    kind = "qwen3" if config.qk_norm else "llama"
    text = _TEXTS[kind].write(config.model_copy(update=_NO_VISION))
    return {"text_config": text, "tie_word_embeddings": config.tied}


def _read_vision(given: Mapping[str, Any]) -> dict[str, Any]:
    vision = _part(given, "vision_config")
    for key, value in _VISION_FIXED.items():
        if (found := vision.get(key, value)) != value:
            raise CheckpointError(
                f"vision_config.{key} = {found!r} is not supported; dtron's encoder has {value!r}"
            )
    fields = {name: vision.get(key, default) for key, (name, default) in _VISION_FIELDS.items()}
    token = given.get("image_token_index", given.get("image_token_id"))
    if token is None:
        raise CheckpointError("image_token_index is missing")
    return {**fields, "image_token": token}


def _write_vision(config: DecoderConfig) -> dict[str, Any]:
    sizes = {key: getattr(config, name) for key, (name, _) in _VISION_FIELDS.items()}
    return {
        "vision_config": {**_VISION_FIXED, **sizes, "vision_use_head": False},
        "image_token_index": config.image_token,
        "image_seq_length": config.image_tokens,
    }


_VISION_KEYS = {"vision_config", "image_token_index", "image_token_id", "image_seq_length"}
_LAYER = "vision_tower.encoder.layers.*"

HF = HuggingFace(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    names=(
        *(replace(n, theirs=f"language_model.{n.theirs}") for n in _TEXTS["qwen3"].names),
        WeightName("vision.patch_embed", "vision_tower.embeddings.patch_embedding"),
        WeightName("vision.position_embed", "vision_tower.embeddings.position_embedding"),
        WeightName("vision.blocks.*.attn_norm", f"{_LAYER}.layer_norm1"),
        WeightName("vision.blocks.*.attn.wq", f"{_LAYER}.self_attn.q_proj"),
        WeightName("vision.blocks.*.attn.wk", f"{_LAYER}.self_attn.k_proj"),
        WeightName("vision.blocks.*.attn.wv", f"{_LAYER}.self_attn.v_proj"),
        WeightName("vision.blocks.*.attn.wo", f"{_LAYER}.self_attn.out_proj"),
        WeightName("vision.blocks.*.ffn_norm", f"{_LAYER}.layer_norm2"),
        WeightName("vision.blocks.*.ffn.up", f"{_LAYER}.mlp.fc1"),
        WeightName("vision.blocks.*.ffn.down", f"{_LAYER}.mlp.fc2"),
        WeightName("projector.up", "multi_modal_projector.linear_1"),
        WeightName("projector.down", "multi_modal_projector.linear_2"),
    ),
    fields={},
    base={},
    fixed={
        "projector_hidden_act": ("gelu",),
        "multimodal_projector_bias": (True,),
        "vision_feature_layer": (-1,),
        "vision_feature_select_strategy": ("full",),
    },
    converters=(
        KeyConverter(frozenset({"text_config", "tie_word_embeddings"}), _read_text, _write_text),
        KeyConverter(frozenset(_VISION_KEYS), _read_vision, _write_vision),
    ),
    ignored_tensors=(
        *(f"language_model.{name}" for name in LLAMA_IGNORED_TENSORS),
        "vision_tower.post_layernorm.*",
        *(f"vision_tower.head{'.*' * depth}" for depth in (1, 2, 3)),
    ),
    aliases={
        "model.vision_tower.": "vision_tower.",
        "vision_tower.vision_model.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    },
)

LLAVA = ModelSpec(
    "llava",
    SIZES,
    build=VisionDecoder,
    units=llava_units,
    placements=llava_placements,
    embedding=llava_embedding,
    encoder=Encoder(("vision", "projector"), "vision.blocks.*", "place_images"),
    hf=HF,
)
