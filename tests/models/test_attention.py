"""The table of attention backends: which is chosen, which refuses and why, and CPU results."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dtron.config import Model
from dtron.errors import ConfigError
from dtron.models import model_config
from dtron.models.attention import (
    BACKENDS,
    AttentionNeeds,
    choose_backend,
    dense_gradient,
    math_attention,
)
from dtron.models.config import LayerKind
from tests.models.build import initialized, small_config, tokens, varied

CPU = {
    "device_type": "cpu",
    "dtype": torch.float32,
    "head_dim": 16,
    "documents": False,
    "dropout": False,
    "deterministic": False,
}


def heads(kv_heads: int, length: int = 33, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, n, 16) for n in (4, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def textbook(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, causal: bool = True
) -> Tensor:
    """One query at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            seen = torch.arange(t + 1 if causal else q.shape[1])
            if documents is not None:
                seen = seen[documents[b, seen] == documents[b, t]]
            for h in range(q.shape[2]):
                scores = k[b, seen, h // group].double() @ q[b, t, h].double() / 4
                out[b, t, h] = scores.softmax(0) @ v[b, seen, h // group].double()
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["sdpa", "math", "flex"])
def test_backend_equals_the_textbook(name, kv_heads, masked, causal):
    q, k, v = heads(kv_heads)
    documents = (torch.arange(33) // torch.tensor([[10], [7]])).int() if masked else None
    backend = BACKENDS[name]
    mask = backend.prepare(documents, torch.empty(2, 33, 64), causal)
    if name == "flex":  # CPU has its forward only
        q, k, v = q.detach(), k.detach(), v.detach()
    out = backend.run(q, k, v, mask, 0.25, causal)
    expected = textbook(q, k, v, documents, causal)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_sdpa_gradients_equal_those_of_math(kv_heads):
    gradients = []
    for name in ("sdpa", "math"):
        q, k, v = heads(kv_heads)
        BACKENDS[name].run(q, k, v, None, 0.25).square().sum().backward()
        gradients.append([q.grad, k.grad, v.grad])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_math_computes_in_float32_at_least():
    q, k, v = heads(2, dtype=torch.bfloat16)
    out = math_attention(q, k, v, None, 0.25)
    assert out.dtype == torch.bfloat16
    exact = math_attention(q.float(), k.float(), v.float(), None, 0.25)
    assert torch.equal(out, exact.bfloat16())
    assert math_attention(q.double(), k.double(), v.double(), None, 0.25).dtype == torch.float64


def test_masks():
    documents = torch.tensor([[0, 0, 1, 1, 1]]).int()
    mask = BACKENDS["math"].prepare(documents, documents)
    assert isinstance(mask, Tensor)
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert BACKENDS["sdpa"].prepare(None, documents) is None
    assert isinstance(BACKENDS["flex"].prepare(None, documents), BlockMask)
    with pytest.raises(ConfigError, match=r"does not support document masks .*use model.attention"):
        BACKENDS["cudnn"].prepare(documents, documents)


def test_names_are_those_of_the_run_config():
    field = Model.model_fields["attention"]
    assert list(field.annotation.__args__) == ["auto", *BACKENDS]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("need", "chosen"),
    [
        ({}, "sdpa"),
        ({"dtype": torch.bfloat16}, "sdpa"),
        ({"documents": True}, "sdpa"),
        ({"deterministic": True}, "sdpa"),
        ({"dropout": True}, "math"),
        ({"dropout": True, "documents": True}, "math"),
    ],
)
def test_auto_on_cpu(need, chosen):
    assert choose_backend("auto", AttentionNeeds(**{**CPU, **need})).name == chosen
    assert choose_backend(chosen, AttentionNeeds(**{**CPU, **need})).name == chosen


@pytest.mark.parametrize(
    ("name", "need", "message"),
    [
        ("flash", {}, "model.attention = flash needs a CUDA device; available here: auto, sdpa"),
        ("flex", {}, "model.attention = flex trains on CUDA devices only"),
        (
            "sdpa",
            {"dropout": True},
            "does not support attention dropout .*available here: auto, math",
        ),
        ("cudnn", {"documents": True}, "does not support document masks .*: auto, sdpa, math"),
        ("cudnn", {"deterministic": True}, "has no deterministic backward"),
        ("flashh", {}, "model.attention = flashh is not known; did you mean flash?"),
    ],
)
def test_refusals_name_reason_and_choices(name, need, message):
    with pytest.raises(ConfigError, match=message):
        choose_backend(name, AttentionNeeds(**{**CPU, **need}))


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: int, packages: set[str]) -> None:
    """Pretend to have a GPU and packages: which row is taken is arithmetic, no kernel runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr("dtron.models.attention._installed", packages.__contains__)


FA2, FA3, FA4 = "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute"


@pytest.mark.parametrize(
    ("capability", "packages", "need", "chosen"),
    [
        (9, {FA4, FA3}, {}, "fa4"),
        (9, {FA4}, {"deterministic": True}, "fa4"),
        (9, {FA3}, {}, "cudnn"),
        (9, {FA3}, {"deterministic": True}, "flash_attn"),
        (9, set(), {"head_dim": 256}, "cudnn"),
        (10, set(), {"head_dim": 256}, "flash"),
        (9, set(), {"deterministic": True}, "flash"),
        (9, {FA4}, {"documents": True}, "flex"),
        (9, {FA4}, {"dropout": True}, "math"),
        (9, {FA4}, {"dtype": torch.float32}, "sdpa"),
        (9, {FA4}, {"head_dim": 20}, "sdpa"),
        (9, {FA4}, {"context": ("ring",), "documents": True}, "fa4"),
        (9, set(), {"context": ("ring",)}, "cudnn"),
        (9, set(), {"context": ("all_gather",)}, "flash"),
        (9, set(), {"context": ("ulysses",), "documents": True}, "flash"),
        (9, set(), {"window": 128, "documents": True}, "flash"),
        (9, {FA4}, {"softcap": 30.0, "window": 128}, "fa4"),
        (9, set(), {"softcap": 30.0}, "math"),
        (9, set(), {"sinks": True}, "cudnn"),
        (8, {FA4, FA3, FA2}, {}, "flash_attn"),
        (8, {FA3}, {}, "flash"),
        (7, {FA2}, {}, "sdpa"),
        (10, {FA4}, {"head_dim": 192}, "flash"),
        (12, {FA4}, {"deterministic": True}, "flash"),
    ],
)
def test_auto_on_gpus(monkeypatch, capability, packages, need, chosen):
    on_gpu(monkeypatch, capability, packages)
    gpu = {**CPU, "device_type": "cuda", "dtype": torch.bfloat16, "head_dim": 128}
    assert choose_backend("auto", AttentionNeeds(**{**gpu, **need})).name == chosen


@pytest.mark.parametrize(
    ("name", "size", "others", "chosen"),
    [
        ("auto", "31b", {}, ("flash", "sdpa")),
        ("auto", "31b", {"documents": True}, ("flash", "flex")),
        ("flash", "31b", {"documents": True}, ("flash", "flex")),
        ("auto", "31b", {"context": ("ring",)}, ("flash", "math")),
        ("math", "31b", {}, ("math", "math")),
        ("auto", "debug", {}, ("flash", "cudnn")),
        ("flash", "debug", {"documents": True}, ("flash", "flash")),
        ("auto", "debug", {"context": ("ring",)}, ("flash", "cudnn")),
    ],
)
def test_layers_with_other_heads_have_a_backend_of_their_own(
    monkeypatch, name, size, others, chosen
):
    """FlashAttention does not support Gemma 4's heads of 512 in layers without a window."""
    on_gpu(monkeypatch, 9, set())
    needs = AttentionNeeds.of(model_config("gemma4", size), "cuda", torch.bfloat16, **others)
    backend = choose_backend(name, needs)
    assert (backend.name, backend.of_layer(LayerKind(full=True)).name) == chosen
    assert backend.of_layer(LayerKind()).name == backend.name


@pytest.mark.parametrize("name", ["auto", "math"])
def test_documents_reach_the_masks_of_both_kinds_of_layers(name):
    """As tables, made on the host, or as they are."""
    config = small_config("gemma4")
    backend = choose_backend(name, AttentionNeeds.of(config, "cpu", torch.float32, documents=True))
    assert backend.full is not None
    model = varied(initialized("gemma4", config, backend)).eval()
    x, documents = tokens(), (torch.arange(24) // 9).int().expand(2, -1)
    described = backend.described(documents)
    assert isinstance(described, dict)
    whole = model(x, documents=described)
    torch.testing.assert_close(whole, model(x, documents=documents), rtol=0, atol=0)
    alone = model(x[:, 9:18], positions=torch.arange(9, 18).unsqueeze(0))
    torch.testing.assert_close(whole[:, 9:18], alone)
    assert not torch.allclose(whole[:, 9:], model(x)[:, 9:])


def test_missing_packages_are_named(monkeypatch):
    on_gpu(monkeypatch, 9, set())
    need = AttentionNeeds("cuda", torch.bfloat16, 128)
    assert BACKENDS["fa4"].unavailable(need) == (
        "needs the package flash-attn-4 (pip install flash-attn-4)"
    )
    assert BACKENDS["flash_attn"].unavailable(need) == "needs the package flash-attn"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_with_gaps_is_made_dense(compiled: bool) -> None:
    """As of a part of a wider tensor, which cuDNN attention of torch 2.11 misread."""
    x = torch.randn(2, 5, 4, 8, requires_grad=True)
    scaled, seen = 2 * x, []
    scaled.register_hook(seen.append)
    make_dense = torch.compile(dense_gradient, backend="aot_eager") if compiled else dense_gradient
    wide = torch.randn(2, 5, 4, 12)
    make_dense(scaled).backward(wide[..., :8])
    assert seen[0].is_contiguous()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * wide[..., :8])
