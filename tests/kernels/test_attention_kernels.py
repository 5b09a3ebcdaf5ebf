"""Kernels with a log-sum-exp: the reference against autograd, the others against the reference."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dtron.kernels.attention import KERNELS, Score
from dtron.models.attention import math_attention

gpu = pytest.mark.gpu
SCORES = {
    "causal": Score(0.3, True),
    "full": Score(0.3, False),
    "window": Score(0.3, True, window=5),
    "softcap": Score(0.3, True, softcap=1.5),
    "both": Score(0.3, True, window=9, softcap=1.5),
}
# Queries and keys of a segment: more keys than queries, equal, no queries, no keys, padding.
PAIRS = [(4, 9), (7, 7), (0, 3), (2, 0), (11, 13), (0, 0)]


def inputs(
    n_queries: int, n_keys: int, heads: int, size: int, dtype: torch.dtype, batch: int = 1
) -> list[Tensor]:
    """q, k, v and a gradient of the output; key/value heads are half as many."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n_queries, heads), (n_keys, heads // 2), (n_keys, heads // 2), (n_queries, heads)]
    return [
        torch.randn(batch, n, h, size, generator=generator, dtype=torch.float64).to(dtype)
        for n, h in shapes
    ]


def segments(parts: Sequence[tuple[int, int]] = PAIRS) -> Tensor:
    bounds = torch.tensor([[0, 0], *parts]).cumsum(0)
    return bounds.t().contiguous().int()


def plain(
    q: Tensor, k: Tensor, v: Tensor, score: Score, parts: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, one segment after the other, by softmax."""
    outs, sums, first_query, first_key = [], [], 0, 0
    for n_queries, n_keys in parts:
        own = q[:, first_query : first_query + n_queries]
        keys, values = (
            x[:, first_key : first_key + n_keys].repeat_interleave(2, 2) for x in (k, v)
        )
        first_query, first_key = first_query + n_queries, first_key + n_keys
        scores = torch.einsum("bthk,bshk->bhts", own, keys) * score.scale
        if score.softcap:
            scores = score.softcap * (scores / score.softcap).tanh()
        before = torch.arange(n_keys) - (torch.arange(n_queries)[:, None] + n_keys - n_queries)
        hidden = before > 0 if score.causal else torch.zeros_like(before, dtype=torch.bool)
        if score.window:
            hidden = hidden | (before <= -score.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("bhts,bshk->bthk", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs, dim=1), torch.cat(sums, dim=-1)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", SCORES)
def test_math_equals_autograd(name: str, packed: bool) -> None:
    parts = PAIRS if packed else [(6, 10)]
    n_queries, n_keys = (sum(part[i] for part in parts) for i in (0, 1))
    *tensors, grad = inputs(n_queries, n_keys, 4, 8, torch.float64, batch=1 if packed else 2)
    leaves = [x.clone().requires_grad_() for x in tensors]
    check_math(tensors, grad, leaves, SCORES[name], parts, packed)


def check_math(
    tensors: list[Tensor],
    grad: Tensor,
    leaves: list[Tensor],
    score: Score,
    parts: list[tuple[int, int]],
    packed: bool,
) -> None:
    """Output, log-sum-exp and gradients."""
    q, k, v = leaves
    wanted, wanted_lse = plain(q, k, v, score, parts)
    wanted.backward(grad)
    bounds = segments(parts) if packed else None
    out, lse = KERNELS["math"].forward(*tensors, bounds, score)
    assert torch.allclose(out, wanted, atol=1e-12)
    assert torch.allclose(lse, wanted_lse, atol=1e-12)
    found = KERNELS["math"].backward(grad, *tensors, out, lse, bounds, score)
    for gradient, leaf in zip(found, leaves, strict=True):
        assert torch.allclose(gradient, leaf.grad, atol=1e-12)  # type: ignore[arg-type]


def drawn_runs(seed: int, most: int, packed: bool) -> tuple[Score, list[tuple[int, int]]]:
    """A window, and queries with as many keys before them as it reaches, or fewer where a document
    begins, as halo exchange puts them together."""
    draw = random.Random(seed)
    window = draw.randint(1, most)
    queries = [draw.randint(1, most) for _ in range(draw.randint(2, 6) if packed else 1)]
    parts = [(n, n + draw.randint(0, window - 1)) for n in queries]
    return Score(0.3, True, window, draw.choice([0.0, 1.5])), parts


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("seed", range(12))
def test_runs_of_keys_before_queries(seed: int, packed: bool) -> None:
    score, parts = drawn_runs(seed, 17, packed)
    n_queries, n_keys = (sum(part[i] for part in parts) for i in (0, 1))
    *tensors, grad = inputs(n_queries, n_keys, 4, 8, torch.float64, batch=1 if packed else 2)
    leaves = [x.clone().requires_grad_() for x in tensors]
    check_math(tensors, grad, leaves, score, parts, packed)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_values_may_be_narrower_than_keys(packed: bool) -> None:
    q, k, v, grad = inputs(13, 13, 4, 8, torch.float64)
    v, grad = v[..., :5].clone(), grad[..., :5]
    bounds = torch.tensor([[0, 6, 13], [0, 6, 13]]).int() if packed else None
    sink = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]

    def attend(values: Tensor) -> Tensor:
        return torch.ops.dtron.attention(q, k, values, sink, bounds, *settings)[0]

    settings = ("math", 0.3, 4, 0.0, True)
    torch.library.opcheck(torch.ops.dtron.attention, (q, k, v, sink, bounds, *settings))
    wide = attend(torch.nn.functional.pad(v, (0, 3)))[..., :5]
    narrow = attend(v)
    torch.testing.assert_close(narrow, wide, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(narrow, leaves, grad),
        torch.autograd.grad(wide, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_queries_without_keys_give_zeros() -> None:
    bounds = torch.tensor([[0, 3, 5], [0, 0, 4]], dtype=torch.int32)
    *tensors, grad = inputs(5, 4, 4, 8, torch.float32)
    score = Score(0.3, False)
    out, lse = KERNELS["math"].forward(*tensors, bounds, score)
    assert (out[:, :3] == 0).all()
    assert (lse[..., :3] == -torch.inf).all()
    assert lse[..., 3:].isfinite().all()
    found = KERNELS["math"].backward(grad, *tensors, out, lse, bounds, score)
    assert all(gradient.isfinite().all() for gradient in found)
    assert (found[0][:, :3] == 0).all()


@gpu
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "math"])
def test_kernels_equal_math(name: str, score: str, packed: bool) -> None:
    parts = PAIRS if packed else [(192, 192)]
    check_kernel(name, SCORES[score], parts, packed)


@gpu
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "math"])
def test_kernels_equal_math_on_runs_of_keys_before_queries(
    name: str, seed: int, packed: bool
) -> None:
    check_kernel(name, *drawn_runs(seed, 300, packed), packed)


def check_kernel(name: str, chosen: Score, parts: list[tuple[int, int]], packed: bool) -> None:
    """bfloat16 against float32 of the same numbers."""
    kernel = KERNELS[name]
    lacks = [
        packed and not kernel.segments,
        chosen.window and not kernel.window,
        chosen.softcap and not kernel.softcap,
    ]
    if any(lacks):
        return
    if name == "fa4":
        pytest.importorskip("flash_attn.cute")
    n_queries, n_keys = (sum(part[i] for part in parts) for i in (0, 1))
    tensors = [x.cuda() for x in inputs(n_queries, n_keys, 8, 64, torch.bfloat16)]
    *tensors, grad = tensors
    bounds = segments(parts).cuda() if packed else None
    wide = [x.float() for x in tensors]
    wanted, wanted_lse = KERNELS["math"].forward(*wide, bounds, chosen)
    out, lse = kernel.forward(*tensors, bounds, chosen)
    finite = wanted_lse.isfinite()
    assert (lse.isfinite() == finite).all()
    assert torch.allclose(lse[finite], wanted_lse[finite], atol=2e-2)
    assert (out.float() - wanted).norm() < 1e-2 * wanted.norm()
    expected = KERNELS["math"].backward(grad.float(), *wide, wanted, wanted_lse, bounds, chosen)
    found = kernel.backward(grad, *tensors, out, lse, bounds, chosen)
    for gradient, want in zip(found, expected, strict=True):
        assert (gradient.float() - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_attention_without_a_causal_mask(packed: bool) -> None:
    """Gradients included; one process of the operator and torch's own attention."""
    q, k, v, grad = inputs(13, 13, 4, 8, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bounds = torch.tensor([[0, 6, 13], [0, 6, 13]]).int() if packed else None
    parts = (slice(0, 6), slice(6, 13)) if packed else (slice(0, 13),)
    out = torch.ops.dtron.attention(q, k, v, None, bounds, "math", 0.3, 0, 0.0, False)[0]
    wanted = [math_attention(q[:, i], k[:, i], v[:, i], None, 0.3, causal=False) for i in parts]
    torch.testing.assert_close(out, torch.cat(wanted, 1), rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(out, leaves, grad)
    due = torch.autograd.grad(torch.cat(wanted, 1), leaves, grad)
    torch.testing.assert_close(found, due, rtol=1e-10, atol=1e-12)
