"""Adapters of one module: what they compute, save and cost."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dtron.config import Lora, RunConfig
from dtron.lora.adapters import (
    adapters,
    attach,
    factors,
    flops_model,
    initializer,
    merged,
    n_adapter_parameters,
    train_from,
)
from dtron.models import BACKENDS, MODELS, build_model
from dtron.models.flops import flops_per_token
from dtron.parallelisms.initialize import initialize
from tests.models.build import small_config

LORA = Lora(rank=8, alpha=4.0)


def adapted(name: str, settings: Lora = LORA, fresh: bool = False) -> nn.Module:
    """A small model with adapters, B of which are zero only where they are `fresh`."""
    config, spec = small_config(name), MODELS[name]
    model = build_model(name, config, BACKENDS["math"])
    attach(model, spec, settings)

    def fill(fqn: str, full: Tensor, generator: torch.Generator) -> None:
        spec.init_parameter(config, fqn, full, generator)

    initialize(model, 0, initializer(fill) if fresh else fill)
    return model


def tokens(n: int = 32) -> Tensor:
    return torch.randint(97, (2, n), generator=torch.Generator().manual_seed(0))


def plain(name: str, model: nn.Module) -> nn.Module:
    """The same weights without adapters."""
    made = build_model(name, small_config(name), BACKENDS["math"])
    made.load_state_dict(model.state_dict(), strict=False)
    return made


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_merged_weights_give_equal_logits(name: str) -> None:
    model = adapted(name)
    whole = plain(name, model)
    for each in adapters(name, small_config(name), LORA):
        weight = whole.get_parameter(each.weight)
        a, b = (model.get_parameter(fqn) for fqn in factors(each.weight))
        weight.data = merged(weight.data, a.data, b.data, LORA.scale)
    with torch.no_grad():
        logits = model(tokens())
        torch.testing.assert_close(logits, whole(tokens()), rtol=1e-4, atol=1e-6)
        assert not torch.allclose(logits, plain(name, model)(tokens()), rtol=1e-3)


def test_training_begins_as_the_frozen_model() -> None:
    model = adapted("qwen3_moe", fresh=True)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), plain("qwen3_moe", model)(tokens()))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trained)
    count = sum(model.get_parameter(name).numel() for name in trained)
    assert count == n_adapter_parameters("qwen3_moe", small_config("qwen3_moe"), LORA)


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (("blocks.*.attn.w[qv]",), {"wq", "wv"}),
        (("blocks.*.ffn.experts.down",), {"down"}),
        (("blocks.1.ffn",), {"gate", "up", "down"}),
        ((), {"wq", "wk", "wv", "wo", "gate", "up", "down"}),
    ],
)
def test_patterns_select_layers_and_matrices_of_experts(modules: tuple, names: set[str]) -> None:
    settings = Lora(rank=8, modules=modules)
    found = adapters("mixtral", small_config("mixtral"), settings)
    assert {each.name.rpartition(".")[2] for each in found} == names
    model = adapted("mixtral", settings)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {fqn for each in found for fqn in factors(each.weight)}


def test_the_backward_keeps_the_input_once() -> None:
    """Neither the layer's output nor a copy of x: x, the narrow A x, and the three weights."""
    model = adapted("llama")
    layer = model.get_submodule("blocks.0.ffn.up")
    x = torch.randn(2, 16, 64, requires_grad=True)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    narrow = 2 * 16 * LORA.rank
    weights = sum(p.numel() for p in layer.parameters())
    assert sum(saved.values()) == 4 * (x.numel() + narrow + weights)


@pytest.mark.parametrize("modules", [(), ("blocks.*.attn",)])
def test_flops_are_those_of_a_step(modules: tuple) -> None:
    """Of matmuls alone: the model counts norms as if they were matmuls, 4 FLOPs a parameter."""
    settings = Lora(rank=8, modules=modules)
    config, model = small_config("llama"), adapted("llama", settings)
    train_from("embed", [model])
    with FlopCounterMode(display=False) as counter:
        model(tokens()).sum().backward()
    sizes = flops_model(RunConfig(lora=settings), config)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    wanted = flops_per_token(sizes, 32, "full") - 4 * norms
    assert counter.get_total_flops() == pytest.approx(wanted * tokens().numel(), rel=1e-6)
