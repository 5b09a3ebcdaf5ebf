"""Matmul that writes or adds its result to a wider tensor: bfloat16 operands, a float32 sum.

A weight gradient that is summed over micro-batches is read and written by the matmul itself:

    separate    temporary = a b (bfloat16)    sum += temporary     2 + 2 + 8 bytes per element
    here        sum += a b                                             4 + 4 bytes per element

The result is not rounded to bfloat16 before it is added.

Source: gradient accumulation fusion of Megatron-LM; torch.addmm with `out_dtype`.
"""

import torch
from torch import Tensor


def multiply_into(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """Write a b to `total`, or add it, in place, without a temporary on CUDA.

    On a CPU the product is a temporary in the dtype of `total`, which is then added. So with
    operands of that dtype the sum equals that of separate operations bit by bit.

    Args:
        total: (M, P), of the operands' dtype, or float32 for bfloat16 and float16 operands.
        a: (M, S).
        b: (S, P), of a's dtype.
        add: add to `total` instead of overwriting it.
    """
    torch.ops.dtron.multiply_into(total, a, b, add)


# A separate operator, since torch 2.11 cannot trace addmm with out_dtype by fake tensors, and so
# that a trace on a CPU shows no temporary.
torch.library.define(
    "dtron::multiply_into", "(Tensor(a!) total, Tensor a, Tensor b, bool add) -> ()"
)


@torch.library.impl("dtron::multiply_into", "cpu")
def _multiply_on_cpu(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    product = a.to(total.dtype) @ b.to(total.dtype)
    if add:
        total.add_(product)
    else:
        total.copy_(product)


@torch.library.impl("dtron::multiply_into", "cuda")
def _multiply_on_cuda(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    beta = 1 if add else 0
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)


@torch.library.register_fake("dtron::multiply_into")
def _(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    pass
