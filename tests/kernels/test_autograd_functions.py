"""Autograd functions that torch.compile traces: compiled gradients are those of eager mode.

Torch 2.11 traces all results of a forward as outputs. If two of them are one tensor, as in
`y.to(y.dtype)`, the gradient of the real output is zero.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dtron.kernels.permute import collected, repeated, summed
from dtron.models.gated_delta_net import causal_convolution
from dtron.models.router import AddedLoss
from dtron.parallelisms.expert.bounded_all_to_all import select

ORDER = torch.tensor([2, -1, 0])  # its own inverse; nothing reads or writes the middle
TOKENS = torch.arange(12.0).view(3, 4) + 1
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "repeated": lambda x: repeated(x, ORDER, ORDER, 1),
    "collected": lambda x: collected(x, ORDER, ORDER, 1, torch.float32),
    "summed": lambda x: summed(x, x[:, :1].float(), ORDER, ORDER),
    "added loss": lambda x: AddedLoss.apply(x, x.square().sum(), torch.tensor(2.0)),
    "select": lambda x: select(x, ORDER, ORDER),
    "convolution": lambda x: causal_convolution(x.unsqueeze(0), x[:, :2].new_ones(4, 2), None),
    "ends in a no-op": lambda x: _EndsInNoOp.apply(x),
}


class _EndsInNoOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (3 * x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 3 * gradients[0]


class _Results(TorchFunctionMode):
    """Collects the results of all calls of torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.of_calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of_calls.append(func(*args, **(kwargs or {})))
        return self.of_calls[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_one_call_returns_the_output(name: str, dtype: torch.dtype) -> None:
    """On any version of torch; for a forward that ends in a no-op, two calls do."""
    x = TOKENS.to(dtype).requires_grad_()
    with _Results() as results:
        output = FUNCTIONS[name](x)
    found = sum(result is output for result in results.of_calls)
    assert found <= 1 if name != "ends in a no-op" else found == 2


@pytest.mark.parametrize("name", list(FUNCTIONS)[:-1])
def test_compiled_gradients_are_eager_ones(name: str) -> None:
    def squares(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x).square().sum()

    compiled = torch.compile(squares, backend="aot_eager")
    found, expected = (
        torch.autograd.grad(function(x), x)[0]
        for function in (compiled, squares)
        for x in [TOKENS.clone().requires_grad_()]
    )
    assert expected.count_nonzero()
    torch.testing.assert_close(found, expected)


def forwards() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Forwards of all autograd functions of the packages, with file and class."""
    root = Path(__file__).parents[2]
    folders = ("dtron", "models", "parallelisms", "float8")
    for path in (path for folder in folders for path in (root / folder).rglob("*.py")):
        for made in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            bases = made.bases if isinstance(made, ast.ClassDef) else []
            if any(ast.unparse(base).endswith("autograd.Function") for base in bases):
                assert isinstance(made, ast.ClassDef)
                for method in made.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "forward":
                        yield f"{path.relative_to(root)}: {made.name}", method


def test_no_forward_ends_in_a_cast() -> None:
    """A cast to the dtype that a tensor has returns the tensor itself."""
    found = list(forwards())
    assert len(found) > 20
    casts = [
        name
        for name, forward in found
        for each in ast.walk(forward)
        if isinstance(each, ast.Return)
        and isinstance(each.value, ast.Call)
        and isinstance(each.value.func, ast.Attribute)
        and each.value.func.attr in ("to", "float", "contiguous", "type_as")
    ]
    assert not casts
