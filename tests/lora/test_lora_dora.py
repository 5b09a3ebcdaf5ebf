"""DoRA: what an adapted layer computes, its gradients, and merged weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dtron.config import Lora
from dtron.lora.adapters import adapters, factors, merged
from dtron.lora.dora import MAGNITUDE, rescaled, start_magnitudes
from tests.lora.test_lora_adapters import adapted, plain, tokens
from tests.models.build import small_config

DORA = Lora(rank=4, alpha=8.0, dora=True)


def reference(layer: Any, x: Tensor) -> Tensor:
    """y = m / |V| (V x) + bias, with V built and |V| constant, as in the paper."""
    whole = layer.weight + DORA.scale * layer.lora_b @ layer.lora_a
    ratio = layer.lora_magnitude / whole.norm(dim=1).detach()
    out = ratio * (x @ whole.t())
    return out if layer.bias is None else out + layer.bias


@pytest.mark.parametrize("name", ["llama", "gpt"])  # gpt has biases
def test_a_layer_and_its_gradients_are_those_of_the_paper(name: str) -> None:
    layer: Any = adapted(name, DORA).get_submodule("blocks.0.ffn.down").double()
    layer.lora_magnitude.data.uniform_(0.5, 1.5)
    x = torch.randn(3, 5, layer.weight.shape[1], dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    assert len(inputs) == 4
    for found, wanted in zip(
        (layer(x), *torch.autograd.grad(layer(x).sin().sum(), inputs)),
        (reference(layer, x), *torch.autograd.grad(reference(layer, x).sin().sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_training_begins_as_the_frozen_model_and_merges(name: str) -> None:
    settings = DORA.model_copy(update={"modules": ("blocks.*.attn",)})
    model = adapted(name, settings, fresh=True)
    start_magnitudes([model])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), plain(name, model)(tokens()))
        for fqn, parameter in model.named_parameters():
            if "lora_" in fqn:
                parameter.add_(0.1 * torch.randn_like(parameter))
        whole = plain(name, model)
        for each in adapters(name, small_config(name), settings):
            weight = whole.get_parameter(each.weight)
            a, b, m = (model.get_parameter(fqn) for fqn in (*factors(each.weight), each.magnitude))
            weight.copy_(rescaled(merged(weight, a, b, settings.scale), m))
        logits = model(tokens())
        torch.testing.assert_close(logits, whole(tokens()), rtol=1e-4, atol=1e-6)
        assert not torch.allclose(logits, plain(name, model)(tokens()), rtol=1e-2)
    assert sum(name.endswith(MAGNITUDE) for name, _ in model.named_parameters()) > 4


def test_a_row_of_zeros_is_merged_as_zeros() -> None:
    assert rescaled(torch.zeros(2, 3), torch.ones(2)).tolist() == [[0.0] * 3] * 2
