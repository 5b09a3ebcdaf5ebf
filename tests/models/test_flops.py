"""Operations a token against hand-computed numbers, and the closed-form parameter count."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dtron.data import Batch
from dtron.models import BACKENDS, MODELS, build_model, model_config
from dtron.models.flops import (
    FlopsModel,
    attended_by_layers,
    flops_per_token,
    image_flops,
    n_active_parameters,
    n_parameters,
    peak_flops,
)
from dtron.plan.report import parameters
from dtron.training.batches import attended_length
from tests.models.build import small_config

SIZES = [(name, size) for name, spec in MODELS.items() for size in spec.sizes]


def test_llama_8b_at_8192():
    """6 * (8.0303e9 - 128256 * 4096) = 45.03e9; 12 * 32 * 32 * 128 * 8192 = 12.88e9."""
    model = FlopsModel.of(model_config("llama", "8b"))
    assert model.matmul_params == 8_030_261_248 - 525_336_576
    assert flops_per_token(model, 8192, "full") == pytest.approx(57.91e9, rel=1e-3)
    assert flops_per_token(model, 8192, "causal") == pytest.approx(51.47e9, rel=1e-3)


def test_packed_documents_count_their_own_lengths():
    model = FlopsModel.of(model_config("llama", "8b"))
    lengths = [1000, 3000, 4192]
    attended = sum(n * n for n in lengths) / sum(lengths)
    attention = 12 * 32 * 32 * 128 * attended
    assert flops_per_token(model, attended, "full") == 6 * model.matmul_params + attention


def test_heads_of_two_widths():
    """DeepSeek-V3's attention: 128 heads, queries and keys of 192, values of 128."""
    model = FlopsModel(0, 61, n_heads=128, qk_head_dim=192, v_head_dim=128)
    assert flops_per_token(model, 4096, "full") == 6 * 61 * 128 * (192 + 128) * 4096
    assert flops_per_token(model, 4096, "causal") == 3 * 61 * 128 * (192 + 128) * 4096


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_parameters_are_those_of_the_model(name, size):
    assert_counted(name, {}, size)


@pytest.mark.parametrize(
    "override",
    [
        {"norm": "layernorm", "qk_norm": True},
        {"bias": True, "activation": "relu2"},
        {"positions": "learned", "head_dim": 24, "tied": True},
        {"bias": True, "activation": "geglu", "n_kv_heads": 1},
    ],
)
def test_parameters_of_other_ingredients(override):
    assert_counted("llama", override, "debug")


def assert_counted(name: str, override: dict, size: str) -> None:
    config = model_config(name, size, override)
    with torch.device("meta"):
        model = build_model(name, config, BACKENDS["math"])
    sizes = {fqn: parameter.numel() for fqn, parameter in model.named_parameters()}
    assert n_parameters(config) == sum(sizes.values())
    experts = sum(size for fqn, size in sizes.items() if ".experts." in fqn)
    idle = experts * (1 - config.experts_per_token / config.n_experts) if experts else 0
    images = sum(n for fqn, n in sizes.items() if fqn.startswith(("vision.", "projector.")))
    active = sum(sizes.values()) - config.lookup_params - idle - images
    active += config.mtp * sizes["embed.weight"]
    if not config.encoder_layers:  # test_encoder_decoder.py
        assert FlopsModel.of(config).matmul_params == active


@pytest.mark.parametrize(
    ("name", "size", "billions"),  # as the releases say, rounded
    [
        ("mixtral", "8x7b", 12.9),
        ("mixtral", "8x22b", 39),
        ("qwen3_moe", "30b-a3b", 3.3),
        ("qwen3_moe", "235b-a22b", 22),
        ("deepseek_v3", "236b", 21),
        ("deepseek_v3", "671b", 37),
    ],
)
def test_active_parameters_are_as_published(name, size, billions):
    config = model_config(name, size).model_copy(update={"mtp": 0})
    active = FlopsModel.of(config).matmul_params + config.lookup_params
    assert active / 1e9 == pytest.approx(billions, rel=0.02)


def test_images_are_counted_as_they_are_computed() -> None:
    """By torch's count of the forward's operators, which leaves out norms, biases and sums."""
    config = model_config("llava", "debug")
    model = build_model("llava", config, BACKENDS["math"])
    images, x = torch.zeros(3, 3, 32, 32), torch.full((1, 48), config.image_token)
    index = torch.stack([torch.arange(48) // 16, torch.arange(48) % 16], -1).unsqueeze(0)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as both:
            model(x, images=images, image_index=index)
        with FlopCounterMode(display=False) as text:
            model(x)
    seen = both.get_total_flops() - text.get_total_flops()
    small = sum(p.numel() for name, p in model.named_parameters() if _is_vector_of_vision(name, p))
    assert 3 * (image_flops(config) - 2 * config.image_tokens * small) == seen
    sizes = FlopsModel.of(config)
    more = flops_per_token(sizes, 48, "causal", 1 / 16) - flops_per_token(sizes, 48, "causal")
    assert more * 48 == pytest.approx(9 * image_flops(config))


def _is_vector_of_vision(name: str, parameter: torch.Tensor) -> bool:
    return name.startswith(("vision.", "projector.")) and parameter.dim() == 1


def test_latent_heads_are_counted_as_wide_as_they_are():
    model = FlopsModel.of(model_config("deepseek_v3", "671b"))
    assert (model.n_layers, model.n_heads) == (61 + 1, 128)
    assert (model.qk_head_dim, model.v_head_dim) == (192, 128)


def test_parameters_of_other_mixtures():
    shared = {"n_shared_experts": 2, "shared_gate": True, "bias": True}
    assert_counted("qwen3_moe", shared, "debug")
    assert_counted("deepseek_v3", {"q_lora_rank": 0, "bias": True, "tied": True}, "debug")
    assert_counted("deepseek_v3", {"mtp": 2, "norm": "layernorm", "tied": True}, "debug")
    assert_counted("qwen3_5_moe", {"mtp": 1}, "debug")
    assert_counted("qwen3_5", {"mtp": 1}, "debug")
    assert_counted("nemotron_h", {"mamba_conv": 3, "qk_norm": True}, "debug")
    assert_counted("gpt_oss", {"activation": "relu2", "norm": "layernorm"}, "debug")


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("cpu", None),
    ],
)
def test_peak(device, peak):
    assert peak_flops(device) == peak


def test_windows_of_a_part_of_the_layers_are_counted():
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.zeros(1, dtype=torch.int64), None, None)
    windowed = (1 + 7 * 3) / 8  # 2 p + 1 pairs of a token that sees p before it
    for window, every, expected in ((2, 0, windowed), (2, 2, (windowed + 8) / 2), (9, 0, 8)):
        config = small_config("gemma3", n_layers=4, window=window, full_attention_every=every)
        assert attended_length([batch, batch], config) == expected
        assert attended_by_layers(8, config) == expected
    config = small_config("gemma4", window=2)  # heads of 16 and 32
    assert attended_length([batch], config) == pytest.approx((windowed + 2 * 8) / 3)
    assert attended_by_layers(8, config) == pytest.approx((windowed + 2 * 8) / 3)
    sizes, heads = FlopsModel.of(config), config.n_heads
    attention = 6 * heads * 2 * (16 * windowed + 32 * 8)
    assert flops_per_token(sizes, attended_by_layers(8, config), "full") == pytest.approx(
        6 * sizes.matmul_params + attention
    )


def test_active_parameters_of_a_mixture() -> None:
    """DeepSeek-V3's report: 671 B, of which a token meets 37 B."""
    mixture = model_config("deepseek_v3", "671b", {"mtp": 0})
    shown = parameters(
        {
            "parameters": n_parameters(mixture),
            "active_parameters": n_active_parameters(mixture),
        }
    )
    assert shown == "671.03 B parameters, 37.55 B active"
    dense = model_config("llama", "8b")
    assert n_active_parameters(dense) == n_parameters(dense)
