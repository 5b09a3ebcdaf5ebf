"""The gated delta rule by chunks equals the recurrence, and documents are independent."""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as metadata_version
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.models import BACKENDS, model_config
from dtron.models.chunks import CHUNK
from dtron.models.delta_rule import DELTA_KERNELS, torch_delta_rule
from dtron.models.recurrent import causal_convolution, document_starts
from dtron.setup import versions
from dtron.setup.rules import MachineCandidate, all_broken
from tests.models.build import initialized, small_config, tokens, varied

B, G, R, K, V = 2, 2, 2, 3, 5
"""Sequences, key heads, value heads of each, widths of their heads."""


def by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None
) -> Tensor:
    """The recurrence of the module's docstring, token by token."""
    q, k = q.repeat_interleave(R, 2), k.repeat_interleave(R, 2)
    state, outs = torch.zeros(B, G * R, K, V, dtype=v.dtype), []
    for t in range(v.shape[1]):
        if starts is not None:
            state = state * ~starts[:, t].view(B, 1, 1, 1)
        state = state * g[:, t].exp()[..., None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * (v[:, t] - held)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1)


def inputs(
    length: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(B, length, *shape, dtype=torch.float64, generator=generator)

    g, beta = -drawn(G * R).abs(), drawn(G * R).sigmoid()
    made = (drawn(G, K), F.normalize(drawn(G, K), dim=-1), drawn(G * R, V), g, beta)
    q, k, v, g, beta = (x.to(dtype).requires_grad_() for x in made)
    return q, k, v, g, beta


def starts_at(length: int, *tokens: int) -> Tensor:
    """The first sequence has documents at these tokens, the second at other ones."""
    starts = torch.zeros(B, length, dtype=torch.bool)
    starts[0, [0, *tokens]] = starts[1, [0, *(t // 2 for t in tokens)]] = True
    return starts


CASES = [
    (5, None),
    (CHUNK, None),
    (2 * CHUNK + 7, None),
    # a document within a chunk, one that fills a chunk, one of one token, one over two chunks
    (3 * CHUNK + 9, (3, CHUNK, 2 * CHUNK, 2 * CHUNK + 1)),
    (2 * CHUNK, (CHUNK - 1, CHUNK, CHUNK + 1)),
]


@pytest.mark.parametrize(("length", "documents"), CASES)
def test_chunks_equal_the_recurrence(length: int, documents: tuple[int, ...] | None) -> None:
    starts = None if documents is None else starts_at(length, *documents)
    given = inputs(length)
    found, wanted = torch_delta_rule(*given, starts), by_token(*given, starts)
    assert (found - wanted).norm() <= 1e-12 * wanted.norm()
    direction = torch.randn_like(wanted)
    grads = [torch.autograd.grad(out, given, direction) for out in (found, wanted)]
    for name, one, other in zip(("q", "k", "v", "g", "beta"), *grads, strict=True):
        assert (one - other).norm() <= 1e-11 * other.norm(), name


def test_convolution_is_torchs_and_stays_in_documents() -> None:
    x, weight = torch.randn(B, 9, 3, 4), torch.randn(3, 4, 4)
    whole = F.conv1d(x.flatten(2).mT, weight.view(12, 1, 4), padding=3, groups=12)[..., :9]
    torch.testing.assert_close(causal_convolution(x, weight, None), whole.mT.unflatten(2, (3, 4)))
    starts = torch.zeros(B, 9, dtype=torch.bool)
    starts[:, [0, 4, 5]] = True
    parts = [causal_convolution(part, weight, None) for part in x.split([4, 1, 4], dim=1)]
    torch.testing.assert_close(causal_convolution(x, weight, starts), torch.cat(parts, 1))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("length", [2, 9])
def test_gradients_of_the_convolution_stay_in_documents(width: int, length: int) -> None:
    x = torch.randn(B, length, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, width, dtype=torch.float64, requires_grad=True)
    starts = torch.zeros(B, length, dtype=torch.bool)
    starts[0, 0] = starts[0, length // 2] = starts[1, length - 1] = True

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return causal_convolution(x, weight, starts)

    assert torch.autograd.gradcheck(convolve, (x, weight))
    assert torch.autograd.gradcheck(lambda *args: causal_convolution(*args, None), (x, weight))  # type: ignore[call-arg]
    of_late = torch.autograd.grad(convolve(x, weight)[0, length // 2 :].sum(), x)[0]
    assert not of_late[0, : length // 2].any()


def test_the_convolution_adds_in_float32() -> None:
    """As torch's: the only roundings to bfloat16 are those of the results."""
    x = torch.randn(B, 100, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, 4, dtype=torch.bfloat16, requires_grad=True)
    direction = torch.randn(B, 100, 8)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted, found = causal_convolution(*exact, None), causal_convolution(x, weight, None)  # type: ignore[call-arg]
    grads = torch.autograd.grad(wanted, exact, direction.bfloat16().double())
    for one, other in zip(
        (found, *torch.autograd.grad(found, (x, weight), direction.bfloat16())),
        (wanted, *grads),
        strict=True,
    ):
        assert torch.equal(one, other.float().bfloat16())


@pytest.mark.parametrize("documents", [False, True])
def test_the_convolution_saves_its_inputs_only(documents: bool) -> None:
    x = torch.randn(B, 9, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    starts = starts_at(9, 4) if documents else None
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        causal_convolution(x, weight, starts)
    given = [t for t in (x, weight, starts) if t is not None]
    assert saved == {t.untyped_storage().data_ptr() for t in given}


def test_small_decays_after_a_large_one() -> None:
    """A document that begins with a forgotten token loses no digits of the decays after it."""
    q, k, v, g, beta = inputs(CHUNK, torch.float32)
    g = (-0.01 * torch.rand(B, CHUNK, G * R)).index_fill(1, torch.tensor([1]), -3000.0)
    given = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
    exact = [x.detach().double().requires_grad_() for x in given]
    found, wanted = torch_delta_rule(*given, None), by_token(*exact, None)  # type: ignore[call-arg]
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()
    direction = torch.randn_like(wanted)
    grads = torch.autograd.grad(found, given, direction.float())
    for name, one, other in zip(
        ("q", "k", "v", "g", "beta"),
        grads,
        torch.autograd.grad(wanted, exact, direction),
        strict=True,
    ):
        assert (one - other).norm() <= 1e-5 * other.norm(), name


@pytest.mark.parametrize("described", [False, True])
def test_packed_documents_equal_separate_ones(described: bool) -> None:
    model = varied(initialized("qwen3_5", small_config("qwen3_5")))
    x, sizes = tokens(batch=1, length=24), [5, 1, 18]
    positions = torch.cat([torch.arange(n) for n in sizes]).unsqueeze(0)
    documents = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(sizes))[None]
    starts = document_starts({} if described else documents, positions)
    assert starts is not None
    assert torch.equal(starts, positions == 0)
    together = model(x, positions, documents)
    apart = torch.cat([model(part) for part in x.split(sizes, dim=1)], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(x), apart, atol=1e-3)


class LikeFla(torch.autograd.Function):
    """The signature of flash-linear-attention's function: concatenated documents and bounds."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *given, bounds = inputs
        starts = None
        if bounds is not None:
            starts = torch.zeros(given[2].shape[:2], dtype=torch.bool)
            starts[0, bounds[:-1]] = True
        ctx.save_for_backward(*given, starts)
        return DELTA_KERNELS["torch"](*given, starts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = torch.ops.dtron.gated_delta_rule_backward(grads[0], *ctx.saved_tensors)
        return *found, None


@pytest.fixture
def fla_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Install a package `fla` that computes by `torch_delta_rule`; return its calls."""
    calls: list[dict[str, Any]] = []

    def chunk_gated_delta_rule(
        *inputs: Tensor, scale: float, cu_seqlens: Tensor | None
    ) -> tuple[Any, None]:
        v, g = inputs[2:4]
        calls.append({"scale": scale, "bounds": cu_seqlens, "shape": tuple(v.shape), "g": g.dtype})
        return LikeFla.apply(*inputs, cu_seqlens), None

    module: Any = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def gradients(rule: Callable[..., Tensor], given: Any, starts: Tensor | None) -> list[Tensor]:
    """Return output and gradients of a weighted sum of it."""
    out = rule(*given, starts)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return [out, *torch.autograd.grad((out * weights.view_as(out)).sum(), given)]


def test_the_kernels_of_fla_get_its_arguments(fla_calls: list[dict[str, Any]]) -> None:
    """flash-linear-attention takes concatenated documents, log decays and bounds."""
    given, rule = inputs(20, torch.float32), DELTA_KERNELS["fla"]
    starts = starts_at(20, 4, 10)
    wanted = gradients(torch_delta_rule, given, starts)
    torch.testing.assert_close(gradients(rule, given, starts), wanted)
    seen = fla_calls[-1]
    assert seen["bounds"].tolist() == [0, 4, 10, 20, 22, 25, 40]
    assert (seen["scale"], seen["shape"], seen["g"]) == (1.0, (1, 40, G * R, V), torch.float32)
    rule(*given, starts)
    assert fla_calls[-1]["bounds"] is seen["bounds"], "the host waits in each layer"
    alone = gradients(torch_delta_rule, given, None)
    torch.testing.assert_close(gradients(rule, given, None), alone)
    assert (fla_calls[-1]["bounds"], fla_calls[-1]["shape"]) == (None, (2, 20, G * R, V))
    q, k, v, g, beta = (x.detach().bfloat16().requires_grad_() for x in given)
    narrow = gradients(rule, (q, k, v, g, beta), starts)
    assert {x.dtype for x in narrow} == {torch.bfloat16}
    for found, exact in zip(narrow, wanted, strict=True):
        assert torch.linalg.norm(found.float() - exact) < 0.03 * torch.linalg.norm(exact)


def test_a_model_with_fla_compiles_whole(fla_calls: list[dict[str, Any]]) -> None:
    small = small_config("qwen3_5", delta_kernel="fla", n_layers=2, full_attention_every=2)
    model = varied(initialized("qwen3_5", small))
    x = tokens(batch=1, length=24)
    wanted, calls = model(x), len(fla_calls)
    found = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert len(fla_calls) == 2 * calls > 0


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [None, (70, 130)])
def test_fla_on_a_gpu_equals_the_rule(documents: tuple[int, ...] | None) -> None:
    if not versions.has_fla():
        pytest.skip("needs flash-linear-attention")
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(2, 200, *shape, device="cuda", generator=generator)

    q, k = (F.normalize(drawn(2, 64), dim=-1) for _ in range(2))
    made = (q, k, drawn(4, 64), -drawn(4).abs(), drawn(4).sigmoid())
    given = [x.bfloat16().requires_grad_() for x in made]
    starts = None if documents is None else starts_at(200, *documents).cuda()
    exact = [x.detach().float().requires_grad_() for x in given]
    found = gradients(DELTA_KERNELS["fla"], given, starts)
    for mine, wanted in zip(found, gradients(torch_delta_rule, exact, starts), strict=True):
        assert torch.linalg.norm(mine.float() - wanted) < 0.02 * torch.linalg.norm(wanted)


@pytest.mark.parametrize("found", ["", "0.4.2", "0.5.0", "1.0"])
def test_fla_is_refused_where_it_cannot_run(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier kernels read values of several heads for each key head in the wrong places."""

    def version(name: str) -> str:
        if name == "fla-core" and not found:
            raise PackageNotFoundError(name)
        return found or metadata_version(name)

    monkeypatch.setattr(versions, "installed", version)
    override = {"delta_kernel": "fla"}
    config = RunConfig.of({"model": {"name": "qwen3_5", "override": override}})
    refused = 'model.override.delta_kernel = "fla" needs '
    on_cpu = list(all_broken(MachineCandidate(config, 1)))
    assert f'{refused}GPUs; this machine has none; use "torch"' in on_cpu
    on_gpu = list(all_broken(MachineCandidate(config, 1, torch.device("cuda"))))
    text = f"{refused}the package flash-linear-attention 0.5 or later"
    assert any(each.startswith(text) for each in on_gpu) == (found in ("", "0.4.2"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"delta_value_heads": 12}, "delta_value_heads = 12 conflicts with delta_key_heads = 8; use a"),
    ({"delta_key_dim": 0}, "delta_key_dim = 0 conflicts with"),
    ({"full_attention_every": 0}, "full_attention_every = 0 conflicts with"),
    ({"full_attention_every": 1}, "leaves no layer with a gated delta net"),
    ({"full_attention_every": 9}, "use 2 to n_layers = 8"),
    ({"window": 4}, "window = 4 conflicts with delta_key_heads = 8; use 0"),
    ({"bias": True}, "bias = True conflicts with"),
    ({"rope_fraction": 0.03}, "rotates 0 elements"),
    ({"delta_key_heads": 0}, "delta_value_heads = 16 has no effect with delta_key_heads = 0"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_what_is_refused(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_config("qwen3_5", "debug", override)
    assert message in str(caught.value)


def test_layers_alternate() -> None:
    model = initialized("qwen3_5", model_config("qwen3_5", "debug"), BACKENDS["math"])
    kinds: list[Callable[..., Any]] = [type(block) for block in model.blocks.values()]
    assert [kind.__name__ for kind in kinds] == [*["DeltaBlock"] * 3, "Block"] * 2
