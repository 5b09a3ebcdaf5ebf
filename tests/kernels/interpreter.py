"""Triton kernels without a GPU."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Of a kernel from its formula, by the dtype of moments: a last bit. Triton's interpreter stores
bfloat16 rounded towards zero."""
UPDATES = [(dtype, scale) for dtype in LIMITS for scale in (0.5, torch.nan)]
"""(dtype of moments, factor of the gradient) of an optimizer's update."""
_NOT_A_SCALAR = "only 0-dimensional arrays can be converted to Python scalars"


def relative_difference(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> float:
    """The largest over pairs of tensors, relative to the size of the second one."""
    pairs = [(x.float(), y.float()) for x, y in zip(xs, ys, strict=True)]
    # Zeros stay where an update is skipped.
    return max(float((x - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs)


def numbers_of(module: str) -> list[float]:
    """What `python -m module` prints under Triton's interpreter, which a process has from its start
    or not at all; skips the test where Triton is not installed, or its interpreter has no loops."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "__index__" in done.stderr and _NOT_A_SCALAR in done.stderr:
        pytest.skip(
            f"the interpreter of Triton {version('triton')} makes a loop's bounds int() of arrays "
            f"of one element, which NumPy {version('numpy')} refuses: NumPy before 2.4 does not, "
            "nor does Triton 3.9"
        )
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def accesses_of(
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, int],
    odd: set[str],
    warps: int,
) -> Counter[str]:
    """How often what Triton compiles for Hopper, which needs no GPU, has each instruction that
    reads or writes memory, such as `ld.global.v4.b32`.

    Args:
        pointers: types of arguments by name, as Triton writes them; others are int32.
        constants: values of those that are compiled in.
        odd: arguments that are not multiples of 16.
    """
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    types = {**pointers, **dict.fromkeys(constants, "constexpr")}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    even = set(signature) - odd - set(constants)
    divisible = [["tt.divisibility", 16]]
    source = compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=dict(constants),
        attrs={(i,): divisible for i, name in enumerate(signature) if name in even},
    )
    made = compiler.compile(source, target=target, options={"num_warps": warps})
    return Counter(re.findall(r"(?:ld|st)\.global[.\w]*", made.asm["ptx"]))
