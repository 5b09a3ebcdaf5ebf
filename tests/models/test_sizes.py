"""Every size builds on the meta device and has the published number of parameters."""

import pytest
import torch

from dtron.models import BACKENDS, MODELS, build_model

# Parameters in units of 10^9: model cards and configurations released for Llama, Qwen3 and the
# mixtures of experts (DeepSeek-V3 without biases: 671.0264 of its main model and 11.6101 of its
# prediction of a second token, which shares embedding and head; Qwen3.5 without vision and without
# its second token: parameters of Qwen3_5ForCausalLM; Gemma 3 without vision); BertForMaskedLM, base
# and large, uncased; for
# GPT-3 and Megatron-LM the rounded names, hence the tolerance; Megatron-LM's 1.7b is 1.754
# (24 * 12 * 2048**2 and two embeddings of 131072 * 2048), a name cut short.
PUBLISHED = {
    ("llama", "1b"): 1.2358,
    ("llama", "3b"): 3.2127,
    ("llama", "8b"): 8.0303,
    ("llama", "70b"): 70.5537,
    ("llama", "405b"): 405.8534,
    ("qwen3", "0.6b"): 0.5960,
    ("qwen3", "1.7b"): 1.7206,
    ("qwen3", "4b"): 4.0225,
    ("qwen3", "8b"): 8.1907,
    ("qwen3", "14b"): 14.7683,
    ("qwen3", "32b"): 32.7621,
    ("qwen3_5", "0.8b"): 0.7524,
    ("qwen3_5", "4b"): 4.2058,
    ("qwen3_5", "9b"): 8.9538,
    ("qwen3_5", "27b"): 26.8960,
    ("gemma3", "270m"): 0.2681,
    ("gemma3", "1b"): 0.9999,
    ("gemma3", "4b"): 3.8803,
    ("gemma3", "12b"): 11.7660,
    ("gemma3", "27b"): 27.0093,
    ("gemma4", "31b"): 30.6973,
    ("bert", "110m"): 0.1095,
    ("bert", "340m"): 0.3352,
    ("t5", "small"): 0.0770,
    ("t5", "base"): 0.2476,
    ("t5", "large"): 0.7832,
    ("t5", "xl"): 2.8498,
    ("t5", "xxl"): 11.1353,
    ("t5", "small-v1.0"): 0.0605,
    ("mixtral", "8x7b"): 46.7028,
    ("mixtral", "8x22b"): 140.6206,
    ("qwen3_moe", "30b-a3b"): 30.5321,
    ("qwen3_moe", "235b-a22b"): 235.0936,
    ("qwen3_5_moe", "35b-a3b"): 34.6606,
    ("qwen3_5_moe", "122b-a10b"): 122.1115,
    ("qwen3_5_moe", "397b-a17b"): 396.3464,
    ("deepseek_v3", "16b"): 15.7065,
    ("deepseek_v3", "16b-a3b"): 15.9601,
    ("deepseek_v3", "236b"): 235.7414,
    ("deepseek_v3", "671b"): 682.6365,
    ("nemotron_h", "8b"): 8.1009,
    ("nemotron_h", "9b"): 8.8882,
    ("nemotron_h", "30b-a3b"): 31.5779,
    ("llava", "0.6b"): 0.6837,
    ("llava", "8b"): 8.6252,
    ("gpt_oss", "20b"): 20.9148,
    ("gpt_oss", "120b"): 116.8292,
}
ROUNDED = {
    ("gpt", "125m"): 0.125,
    ("gpt", "350m"): 0.356,
    ("gpt", "760m"): 0.760,
    ("gpt", "1.3b"): 1.3,
    ("gpt", "2.7b"): 2.65,
    ("gpt", "6.7b"): 6.7,
    ("gpt", "13b"): 13.0,
    ("gpt", "175b"): 174.6,
    ("gpt", "1.7b"): 1.754,
    ("gpt", "7.1b"): 7.1,
    ("gpt", "16b"): 16.0,
}
ALL = [(name, size) for name, spec in MODELS.items() for size in spec.sizes]


def count(name: str, size: str) -> int:
    with torch.device("meta"):
        model = build_model(name, MODELS[name].sizes[size], BACKENDS["math"])
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    assert all(".ffn.router." in name for name in buffers)
    assert not any(b.is_meta for b in buffers.values()), "values would be lost on the meta device"
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "size"), ALL)
def test_parameters_are_as_published(name: str, size: str):
    billions = count(name, size) / 1e9
    if size == "debug":
        assert billions < 0.002
    elif (name, size) in PUBLISHED:
        assert billions == pytest.approx(PUBLISHED[name, size], abs=1e-4)
    else:
        assert billions == pytest.approx(ROUNDED[name, size], rel=0.02)


def test_quickstart_model_has_a_million_parameters():
    assert count("llama", "debug") == 1_052_800


def test_units_cover_what_the_model_has():
    for name, spec in MODELS.items():
        for size, config in spec.sizes.items():
            units = spec.units(config)
            assert "blocks.*" in units, (name, size)
            own = [unit for unit in units if unit != "vision.blocks.*"]
            assert (own == ["blocks.*"]) == config.tied
