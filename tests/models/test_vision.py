"""LLaVA: a vision encoder before a decoder, compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtron.config import RunConfig
from dtron.errors import CheckpointError, ConfigError
from dtron.models import BACKENDS, MODELS, from_hf, model_config, to_hf
from dtron.models.vision import VisionDecoder, VisionEncoder
from dtron.setup.rules import ModelCandidate, all_broken
from tests.models.build import initialized, small_config, tokens

TEXT = {
    **{"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97},
}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 18, "patch_size": 4},
}
CASES = [
    ("Llama", {}, {"vision_use_head": False}),
    ("Qwen3", {"tie_word_embeddings": True}, {}),
]


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def reference(transformers: Any, text: str, settings: dict[str, Any], more: Any) -> Any:
    """A random LLaVA of transformers; norms and biases are not 1 and 0."""
    config = transformers.LlavaConfig(
        text_config=getattr(transformers, f"{text}Config")(**TEXT, **settings),
        vision_config=transformers.SiglipVisionConfig(**VISION, **more),
        image_token_index=96,
        image_seq_length=16,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences with an image each: tokens, images, index."""
    x = tokens(length=24) % 96
    index = torch.full((2, 24, 2), -1)
    for row, first in enumerate((3, 7)):
        x[row, first : first + 16] = 96
        index[row, first : first + 16, 0] = row
        index[row, first : first + 16, 1] = torch.arange(16)
    return x, torch.randn(2, 3, 18, 18), index


@pytest.mark.parametrize(("text", "settings", "more"), CASES, ids=["llama", "qwen3"])
def test_logits_gradients_and_files_equal_those_of_transformers(
    transformers: Any, tmp_path: Path, text: str, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    theirs = reference(transformers, text, settings, more)
    theirs.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf", attention="math")
    x, images, index = inputs()
    found = ours(x, images=images, image_index=index)
    wanted = theirs(input_ids=x, pixel_values=images).logits
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    to_hf(ours, tmp_path / "back", name="llava")
    back = type(theirs).from_pretrained(tmp_path / "back")
    unread = ("vision_tower.post_layernorm", "vision_tower.head")
    for key, value in theirs.state_dict().items():
        if not any(part in key for part in unread):
            assert torch.equal(back.state_dict()[key], value), key
    direction = torch.randn_like(found)
    (found * direction).sum().backward()
    (wanted * direction).sum().backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    to_hf(ours, tmp_path / "gradients", name="llava")
    written = dict(type(theirs).from_pretrained(tmp_path / "gradients").named_parameters())
    for key, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            gap = (written[key] - parameter.grad).norm()
            assert gap <= 1e-5 * parameter.grad.norm() + 1e-6, key


def test_the_encoder_is_siglips(transformers: Any, tmp_path: Path) -> None:
    """Its output before the last norm, of 8-bit images and of normalised ones."""
    theirs = reference(transformers, "Llama", {}, {"vision_use_head": False})
    theirs.save_pretrained(tmp_path)
    encoder = from_hf(tmp_path).vision
    assert isinstance(encoder, VisionEncoder)
    images = torch.randint(256, (2, 3, 18, 18), dtype=torch.uint8)
    tower = theirs.model.vision_tower
    normalised = (images / 255 - 0.5) / 0.5
    wanted = tower(normalised, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(encoder(images), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vision_feature_layer", -2, "vision_feature_layer = -2 is not supported"),
        ("vision_config", {"model_type": "clip_vision_model"}, "model_type = 'clip_vision_model'"),
        ("text_config", {"model_type": "gemma"}, "text_config.model_type = 'gemma'"),
        ("text_config", None, "text_config, the config of a part of the model, is missing"),
    ],
)
def test_other_parts_are_refused(key: str, value: Any, message: str) -> None:
    hf = MODELS["llava"].hf
    assert hf is not None
    written = hf.write(MODELS["llava"].sizes["debug"])
    with pytest.raises(CheckpointError, match=message):
        hf.read({**written, key: value}, "config.json")


def test_the_encoder_does_not_use_the_backend() -> None:
    """A decoder's backend may need a mask, or not support the encoder's heads."""
    model = initialized("llava", small_config("llava"), BACKENDS["flex"])
    same = initialized("llava", small_config("llava"))
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(model.vision(images), same.vision(images))  # type: ignore[operator]


def test_images_change_logits_after_them_only() -> None:
    model = initialized("llava", small_config("llava"))
    assert isinstance(model, VisionDecoder)
    x, _, index = inputs()
    one, other = (torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8) for _ in range(2))
    found, changed = (model(x, images=images, image_index=index) for images in (one, other))
    assert torch.equal(found[0, :3], changed[0, :3])
    assert not torch.allclose(found[0, 3], changed[0, 3])
    blank = torch.full_like(index, -1)
    assert torch.equal(model(x, images=one, image_index=blank), model(x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_heads": 3}, "vision_dim = 64 conflicts with vision_layers = 2; use a multiple"),
        ({"vision_ffn_dim": 0}, "vision_ffn_dim = 0 conflicts"),
        ({"mtp": 1}, "mtp = 1 conflicts with vision_layers = 2; use 0, since it embeds"),
        ({"vision_patch_size": 33}, "at most vision_image_size = 32"),
        ({"image_token": 264}, "an id below vocab_size"),
        ({"vision_layers": 0}, "vision_dim = 64 has no effect with vision_layers = 0"),
    ],
)
def test_impossible_encoders_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config("llava", "debug", changes)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "llama"}, 'model.name = llama has no vision encoder; use model.name = "llava"'),
        ({"image_size": 16}, "data.image_size = 16 differs from the model's 32; use 32"),
        ({"image_tokens": 4}, "data.image_tokens = 4 differs from the model's 16; use 16"),
        ({"tp": 8}, "parallel.tp = 8 does not divide model.vision_heads = 4"),
        ({"tp": 2, "encoder_tp": 4}, "parallel.encoder_tp = 4 is neither 1 nor parallel.tp = 2"),
        ({"name": "llama", "tp": 2, "encoder_tp": 2}, "parallel.encoder_tp = 2 has no effect"),
        ({"filter": ["projector.up"]}, "float8.filter names projector.up, a layer of the encoder"),
    ],
)
def test_settings_of_images_fit_the_model(keys: dict[str, Any], message: str) -> None:
    images = {"image_size": 32, "image_tokens": 16, "image_token": 255}
    images |= {key: value for key, value in keys.items() if key in images}
    tp = keys.get("tp", 1)
    config = RunConfig.of(
        {
            "model": {"name": keys.get("name", "llava")},
            "parallel": {"tp": tp, "encoder_tp": keys.get("encoder_tp", tp)},
            "data": {"format": "image_text", "packing": "best_fit", **images},
            "float8": {"recipe": "rowwise", "filter": keys["filter"]} if "filter" in keys else {},
        }
    )
    found = list(all_broken(ModelCandidate(config, tp)))
    assert any(message in each for each in found), found
