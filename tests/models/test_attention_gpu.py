"""Every attention backend that is available on this GPU against the float64 reference.

Run with `pytest -m gpu tests/models/test_attention_gpu.py -rs`; skipped rows say why.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dtron.models.attention import (
    BACKENDS,
    AttentionCore,
    AttentionNeeds,
    choose_backend,
    math_attention,
)
from tests.models.build import initialized, small_config, tokens, varied

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}
ODD = 515  # tokens: no multiple of any tile
BOUND = 1e-2
SHAPES = [(heads, head_dim) for heads in HEADS for head_dim in (64, 128)]


def calls(names: Iterable[str]) -> list[Any]:
    """(backend, heads, head_dim, compiled): eagerly all shapes, compiled one of them; flex, which
    compiles in any case, that one."""
    found, one = [], ("gqa", 128)
    for name in names:
        found += [(name, *shape, False) for shape in ([one] if name == "flex" else SHAPES)]
        found.append((name, *one, True))
    return [pytest.param(*each, id=_id(*each)) for each in found]


def _id(name: str, heads: str, head_dim: int, compiled: bool) -> str:
    return f"{name}-{heads}-{head_dim}-{'compiled' if compiled else 'eager'}"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def make(heads: str, head_dim: int, length: int = ODD) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    n, n_kv = HEADS[heads]
    return tuple(
        torch.randn(2, length, h, head_dim, generator=generator, device="cuda").bfloat16()
        for h in (n, n_kv, n_kv, n)
    )


def documents(length: int = ODD) -> Tensor:
    ends = torch.tensor([[100, 101, 400], [7, 256, 300]], device="cuda")
    index = torch.arange(length, device="cuda")
    return (index >= ends.unsqueeze(2)).sum(1).int()


def run(attend, inputs: tuple[Tensor, ...], mask) -> list[Tensor]:
    """out, dq, dk, dv."""
    q, k, v, grad = inputs
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, mask, q.shape[-1] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]


def exact_results(inputs: tuple[Tensor, ...], masked: Tensor | None) -> list[Tensor]:
    mask = BACKENDS["math"].prepare(masked, inputs[0])
    return run(math_attention, tuple(x.double() for x in inputs), mask)


def available(name: str, head_dim: int, deterministic: bool = False):
    backend = BACKENDS[name]
    reason = backend.unavailable(
        AttentionNeeds("cuda", torch.bfloat16, head_dim, deterministic=deterministic)
    )
    if reason is not None:
        pytest.skip(f"{name} {reason}")
    return backend


@pytest.mark.parametrize(("name", "heads", "head_dim", "compiled"), calls(BACKENDS))
def test_causal(name, heads, head_dim, compiled):
    backend, inputs = available(name, head_dim), make(heads, head_dim)
    exact = exact_results(inputs, None)
    flash = errors(run(BACKENDS["flash"].run, inputs, None), exact)
    attend = torch.compile(backend.run, fullgraph=True) if compiled else backend.run
    found = run(attend, inputs, backend.prepare(None, inputs[0]))
    assert [x.shape for x in found] == [x.shape for x in exact]
    measured = errors(found, exact)
    assert max(measured) < BOUND, measured
    assert all(a <= 2 * b for a, b in zip(measured, flash, strict=True)), (measured, flash)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [row.name for row in BACKENDS.values() if row.narrow_values])
def test_values_narrower_than_keys(name, compiled):
    backend = available(name, 192)
    q, k, v, grad = make("mha", 192)
    inputs = (q, k, v[..., :128], grad[..., :128])  # views, as latent attention gives them
    exact = exact_results(inputs, None)
    attend = torch.compile(backend.run, fullgraph=True) if compiled else backend.run
    found = run(attend, inputs, backend.prepare(None, inputs[0]))
    assert [x.shape for x in found] == [x.shape for x in exact]
    assert max(errors(found, exact)) < BOUND


@pytest.mark.parametrize(
    ("name", "heads", "head_dim", "compiled"),
    calls(row.name for row in BACKENDS.values() if row.documents),
)
def test_documents(name, heads, head_dim, compiled):
    backend, inputs = available(name, head_dim), make(heads, head_dim)
    exact = exact_results(inputs, documents())
    core = AttentionCore(backend, small_config("llama", head_dim=head_dim))
    if compiled:
        core.compile(fullgraph=True)
    mask = backend.prepare(documents(), inputs[0])
    measured = errors(run(lambda q, k, v, mask, _scale: core(q, k, v, mask), inputs, mask), exact)
    assert max(measured) < BOUND, measured


@pytest.mark.parametrize(
    ("name", "heads"),
    [(name, heads) for name in BACKENDS for heads in (["gqa"] if name == "flex" else HEADS)],
)
def test_deterministic_mode_repeats_every_bit(name, heads, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    backend, inputs = available(name, 128, deterministic=True), make(heads, 128, length=4096)
    torch.use_deterministic_algorithms(True)
    try:
        mask = backend.prepare(None, inputs[0])
        first, second = run(backend.run, inputs, mask), run(backend.run, inputs, mask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_float32_is_left_to_torch():
    inputs = tuple(x.float() for x in make("gqa", 64))
    backend = choose_backend("auto", AttentionNeeds("cuda", torch.float32, 64))
    assert backend.name == "sdpa"
    assert max(errors(run(backend.run, inputs, None), exact_results(inputs, None))) < 1e-5


BY_INDUCTOR = {("cudnn", False), ("flex", True), ("sdpa", True)}
"""Backend and whether there are documents; of the others it is seen that they are one graph."""


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        *[(name, False) for name in BACKENDS if name != "flex"],
        *[(row.name, True) for row in BACKENDS.values() if row.documents],
    ],
)
def test_blocks_compile_once_whatever_the_documents(name, masked):
    backend = available(name, 64)
    config = small_config("llama", n_layers=3, head_dim=64, n_heads=4)
    model = varied(initialized("llama", config, backend)).cuda().bfloat16()
    x = tokens(length=ODD).cuda()

    def step(shift: int) -> Tensor:
        model.zero_grad()
        ids = (documents() + documents().roll(shift)).cummax(1).values.int() if masked else None
        loss = F.cross_entropy(model(x, documents=ids).flatten(0, 1).float(), x.flatten())
        loss.backward()
        return torch.stack(
            [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
        )

    expected = [step(0), step(50)]
    by_inductor = (name, masked) in BY_INDUCTOR
    counter = CompileCounterWithBackend("inductor" if by_inductor else "aot_eager")
    for block in model.blocks.values():
        block.compile(backend=counter, fullgraph=True)
    found = [step(0), step(50)]
    assert counter.frame_count == 1, "one compilation for all blocks and all documents"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=1e-3)
