"""Mamba-2 by chunks equals the recurrence, documents are independent, layers follow the pattern."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dtron.errors import ConfigError
from dtron.models import BACKENDS, chunks, model_config
from dtron.models.chunks import CHUNK
from dtron.models.recurrent import causal_convolution
from dtron.models.state_space import state_space
from tests.models.build import initialized, small_config, tokens, varied

B, G, R, K, P = 2, 2, 3, 4, 5
"""Sequences, groups, heads of each, widths of state and head."""
NAMES = ("x", "dt", "g", "b", "c", "d")


def by_token(
    x: Tensor, dt: Tensor, g: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None
) -> Tensor:
    """The recurrence of the module's docstring, token by token."""
    state, outs = torch.zeros(B, G, R, K, P, dtype=x.dtype), []
    for t in range(x.shape[1]):
        if starts is not None:
            state = state * ~starts[:, t].view(B, 1, 1, 1, 1)
        written = torch.einsum("bgk,bgrp->bgrkp", b[:, t], dt[:, t, ..., None] * x[:, t])
        state = state * g[:, t].exp()[..., None, None] + written
        outs.append(torch.einsum("bgrkp,bgk->bgrp", state, c[:, t]) + d[..., None] * x[:, t])
    return torch.stack(outs, 1)


def inputs(length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    heads, states = (B, length, G, R), (B, length, G, K)
    dt, g = drawn(*heads).exp(), -drawn(*heads).abs()
    made = (drawn(*heads, P), dt, g, drawn(*states), drawn(*states), drawn(G, R))
    return tuple(each.detach().requires_grad_() for each in made)


@pytest.mark.parametrize(
    ("length", "documents"),
    [
        (5, None),
        (2 * CHUNK + 7, None),
        # a document within a chunk, one that fills a chunk, one of one token, one over two chunks
        (3 * CHUNK + 9, (3, CHUNK, 2 * CHUNK, 2 * CHUNK + 1)),
    ],
)
@pytest.mark.parametrize("span", [2, chunks.SPAN])
def test_chunks_equal_the_recurrence(
    length: int, documents: tuple[int, ...] | None, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "SPAN", span)
    starts = None
    if documents is not None:  # the second sequence has other documents
        starts = torch.zeros(B, length, dtype=torch.bool)
        starts[0, [0, *documents]] = starts[1, [0, *(t // 2 for t in documents)]] = True
    given = inputs(length)
    found, wanted = state_space(*given, starts), by_token(*given, starts)  # type: ignore[call-arg]
    assert (found - wanted).norm() <= 1e-12 * wanted.norm()
    direction = torch.randn_like(wanted)
    grads = [torch.autograd.grad(out, given, direction) for out in (found, wanted)]
    for name, one, other in zip(NAMES, *grads, strict=True):
        assert (one - other).norm() <= 1e-11 * other.norm(), name


def test_gradients_of_the_convolution_with_bias() -> None:
    x = torch.randn(B, 9, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    starts = torch.zeros(B, 9, dtype=torch.bool)
    starts[0, 0] = starts[0, 4] = True

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return causal_convolution(x, weight, starts, bias)

    assert torch.autograd.gradcheck(convolve, (x, weight, bias))
    torch.testing.assert_close(
        convolve(x, weight, bias), causal_convolution(x, weight, starts) + bias
    )


def test_packed_documents_equal_separate_ones() -> None:
    model = varied(initialized("nemotron_h", small_config("nemotron_h"))).eval()
    x, sizes = tokens(batch=1, length=24), [5, 1, 18]
    positions = torch.cat([torch.arange(n) for n in sizes]).unsqueeze(0)
    documents = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(sizes))[None]
    together = model(x, positions, documents)
    separate = torch.cat([model(part) for part in x.split(sizes, dim=1)], dim=1)
    torch.testing.assert_close(together, separate, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(x), separate, atol=1e-3)


def test_layers_follow_the_pattern() -> None:
    config = model_config("nemotron_h", "debug", {"n_layers": 9})
    model = initialized("nemotron_h", config, BACKENDS["math"])
    kinds: list[Callable[..., Any]] = [type(block) for block in model.blocks.values()]
    wanted = "MambaLayer ExpertLayer AttentionLayer FeedForwardLayer MambaLayer ExpertLayer "
    wanted += "MambaLayer FeedForwardLayer MambaLayer"
    assert [kind.__name__ for kind in kinds] == wanted.split()
    assert (config.n_expert_layers, config.n_dense_layers, config.n_layers_of("mamba")) == (2, 2, 4)
    core = model.get_submodule("blocks.0.mamba.core")
    steps = torch.nn.functional.softplus(core.dt_bias)  # type: ignore[arg-type]
    assert 0.00099 < steps.min() < steps.max() < 0.101
    assert 0 <= core.a_log.min() < core.a_log.max() <= 2.78  # type: ignore[operator]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layer_pattern": "MX"}, "layer_pattern"),
    ({"layer_pattern": "ME-"}, 'layer_pattern = "ME-" has no attention (*) in the first 8 layers'),
    ({"layer_pattern": "ME*"}, "ffn_dim = 256 conflicts with"),
    ({"layer_pattern": "M*-"}, "n_experts = 16 conflicts with"),
    ({"layer_pattern": "E*-"}, "mamba_heads = 16 conflicts with"),
    ({"ffn_dim": 0}, "ffn_dim = 0 conflicts with"),
    ({"mamba_state_dim": 0}, "mamba_state_dim = 0 conflicts with"),
    ({"mamba_groups": 5}, "mamba_groups = 5 does not divide mamba_heads = 16; use a divisor"),
    ({"layer_pattern": "E*-"}, "mamba_dt_min = 0.001 conflicts with"),
    ({"layer_pattern": "E*-", "mamba_conv": 3}, "mamba_conv = 3 conflicts with"),
    ({"mtp": 1}, "mtp = 1 conflicts with"),
    ({"window": 4}, "window = 4 conflicts with"),
    ({"bias": True}, "bias = True conflicts with"),
    ({"first_dense_layers": 2}, "first_dense_layers = 2 conflicts with"),
    ({"layer_pattern": ""}, "mamba_heads = 16 has no effect with layer_pattern"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_what_is_refused(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_config("nemotron_h", "debug", override)
    assert message in str(caught.value)
