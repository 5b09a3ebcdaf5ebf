"""Products by the GPU's kernel: what it demands of its operands, and what it gives."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtron.float8 import RECIPES, Float8Linear, ScaleGroups
from dtron.float8.casting import quantize
from dtron.float8.products import (
    multiply_blocks,
    product,
    scales_of_lines,
    scales_of_squares,
    why_emulated,
)
from dtron.float8.recipes import E4M3, E5M2
from tests.float8.test_recipes import example, gradients

KERNELS = [name for name, recipe in RECIPES.items() if recipe.kernel == "scaled_mm"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RULES_ARE_CHECKED = pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="from 2.14 on torch checks operands of a GPU only there"
)


def skip_what_this_cpu_lacks() -> None:
    """torch 2.11 has scaled_mm on GPUs only."""
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no scaled_mm on CPUs")


class Demands(TorchDispatchMode):
    """Checks calls of scaled_mm by what cuBLASLt demands, of which a CPU is less strict."""

    def __init__(self) -> None:
        super().__init__()
        self.fast: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.dtron.float8_product.default:
            a, b, scale_a, scale_b, _, fast = args
            (m, s), (p, _) = a.shape, b.shape
            assert (a.stride(), b.stride()) == ((s, 1), (s, 1))  # b is transposed: column-major
            assert s % 16 == p % 16 == 0
            assert not a.dtype == b.dtype == E5M2
            for scale in (scale_a, scale_b):
                assert scale.dtype == torch.float32
                assert scale.is_contiguous()
            assert (scale_a.shape, scale_b.shape) in (((1, 1), (1, 1)), ((m, 1), (1, p)))
            self.fast.append(fast)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_give_what_emulation_gives(name: str, device: str) -> None:
    """Rounded operands are the same, sums are not in the same order."""
    if device == "cpu":
        skip_what_this_cpu_lacks()
    recipe = RECIPES[name]
    linear, x, grad = example(torch.bfloat16)
    linear, x, grad = linear.to(device), x.to(device), grad.to(device)
    wanted = gradients(Float8Linear.of(linear, recipe, True, ScaleGroups()), linear, x, grad)
    layer = Float8Linear.of(linear, recipe, False, ScaleGroups())
    with Demands() as demands:
        found = gradients(layer, linear, x, grad)
    products = (recipe.output, recipe.grad_input, recipe.grad_weight)
    assert demands.fast == [p.fast_accumulation for p in products if p is not None]
    for mine, other in zip(found, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - other).float().norm() <= 2**-7 * other.float().norm()


@pytest.mark.parametrize("name", KERNELS)
def test_any_number_of_tokens_has_an_output(name: str) -> None:
    """As sampling needs; only the gradient of the weight sums over tokens."""
    skip_what_this_cpu_lacks()
    of = RECIPES[name].output
    torch.manual_seed(0)
    x, weight = torch.randn(7, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    operands = quantize(x, of.left), quantize(weight, of.right)
    with Demands():
        found = product(*operands, torch.bfloat16, emulate=False, fast_accumulation=True)
    wanted = product(*operands, torch.bfloat16, emulate=True, fast_accumulation=True)
    assert found.allclose(wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "why"),
    [
        ("tensorwise", (9, 0), torch.bfloat16, ""),
        ("tensorwise", (8, 0), torch.bfloat16, "a GPU has no float8 instructions"),
        ("rowwise", (9, 0), torch.float32, "the kernels return bfloat16, not float32"),
        ("blockwise", (9, 0), torch.bfloat16, ""),
        ("blockwise", (10, 0), torch.bfloat16, "blockwise has no kernel for a GPU"),
        ("mxfp8", (10, 0), torch.bfloat16, "mxfp8 has no kernel for a GPU"),
    ],
)
def test_what_no_kernel_computes_is_emulated(
    name: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert why_emulated(RECIPES[name], torch.device("cuda"), dtype) == why


def test_blocks_that_do_not_divide_a_layer_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    given = (RECIPES["blockwise"], torch.device("cuda"), torch.bfloat16)
    assert why_emulated(*given, [(256, 128, 384)]) == ""
    assert why_emulated(*given, [(256, 128, 384), (256, 128, 192)]).endswith("256 x 128 x 192")
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert why_emulated(*given, []).endswith("torch was built with 12.6")
    monkeypatch.setattr("torch.version.cuda", None)  # as a build for ROCm has it
    assert why_emulated(*given, []).endswith("torch was built without CUDA")


def test_scales_lie_as_the_kernel_reads_them() -> None:
    scale = torch.rand(256, 5)
    lines, squares = scales_of_lines(scale), scales_of_squares(scale)
    assert torch.equal(lines, scale)
    assert lines.stride() == (1, 256)
    assert torch.equal(squares[:5], scale.t())
    assert squares[5:].count_nonzero() == 0
    assert (squares.shape, squares.stride()) == ((8, 256), (1, 8))


@RULES_ARE_CHECKED
@pytest.mark.parametrize("rows", [256, 7])
@pytest.mark.parametrize(("columns", "blocks"), [(384, 3), (384, 384), (128, 1)])
@pytest.mark.parametrize("sum_over", [640, 128])
def test_blocks_obey_the_rules_of_torch(
    rows: int, columns: int, blocks: int, sum_over: int
) -> None:
    """Shapes and strides of a GPU's call, which torch checks without one."""
    with FakeTensorMode():
        a, b = (torch.empty(n, sum_over, dtype=E4M3, device="cuda") for n in (rows, columns))
        scale_a, scale_b = (torch.empty(n, sum_over // 128, device="cuda") for n in (rows, blocks))
        out = multiply_blocks(a, b, scale_a, scale_b, torch.bfloat16)
        assert (out.shape, out.dtype) == ((rows, columns), torch.bfloat16)
        bad = scale_b.new_empty(blocks + 1, sum_over // 128)
        with pytest.raises(RuntimeError, match="scale b must have shape"):
            multiply_blocks(a, b, scale_a, bad, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [256, 7])
def test_blocks_give_what_emulation_gives(tokens: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuBLAS multiplies blocks of 128 on Hopper")
    torch.manual_seed(0)
    linear = torch.nn.Linear(640, 384, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, tokens, 640, device="cuda").bfloat16()
    grad = torch.randn(2, tokens, 384, device="cuda").bfloat16() * 1e-4
    results = []
    for emulate in (True, False):
        layer = Float8Linear.of(linear, RECIPES["blockwise"], emulate, ScaleGroups())
        if tokens % 128:  # an output alone, as for sampling
            with torch.no_grad():
                results.append([layer(x)])
        else:
            results.append(gradients(layer, linear, x, grad))
    for mine, other in zip(*results, strict=True):
        assert (mine - other).float().norm() <= 2**-7 * other.float().norm()
