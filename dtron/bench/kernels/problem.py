"""What a problem of `dtron bench kernels` is: a computation, its reference and its kernels.

To add a kernel of a problem, add a KernelRow; to add a computation, add a Problem to `problems.py`.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Inputs = Sequence[Any]
"""Arguments of a kernel: tensors, or lists of tensors."""
Shape = tuple[int, ...]
Figures = tuple[float, ...]
"""One number per part of a problem (`Problem.parts`)."""


def seeded(device: torch.device) -> torch.Generator:
    """Return a generator on the device with the seed 0."""
    return torch.Generator(device).manual_seed(0)


def normal(dtype: torch.dtype, device: torch.device, *shapes: Shape) -> list[Tensor]:
    """Draw normal values in float32 with a fixed seed, and cast them to `dtype`."""
    generator = seeded(device)
    return [torch.randn(x, generator=generator, device=device).to(dtype) for x in shapes]


def own_sum(total: Tensor, *operands: Tensor) -> Inputs:
    """Copy the first tensor, to which a kernel adds."""
    return total.clone(), *operands


def by_autograd(outputs: Tensors, *inputs: Tensor) -> Tensors:
    """Return the gradients of inputs that require grad; the last input is outputs[0]'s gradient."""
    wanted = [x for x in inputs if x.requires_grad]
    return torch.autograd.grad(outputs[0], wanted, inputs[-1], retain_graph=True)


@dataclass(frozen=True)
class KernelRow:
    """One implementation of a problem: its name, forward, and backward."""

    name: str
    forward: Callable[..., Tensors]
    """Inputs -> outputs."""
    backward: Callable[..., Tensors] | None = None
    """(outputs, *inputs) -> gradients; the last input is the gradient of outputs[0]. None: the
    problem has one part."""
    unavailable: Callable[[torch.device, torch.dtype, Shape], str | None] = lambda *_: None
    """(device, dtype, shape) -> why the kernel cannot run; None: it can."""
    inputs: Callable[..., Inputs] = lambda *drawn: drawn
    """Drawn inputs -> the kernel's inputs; tensors that the kernel writes to are copied."""

    def calls(self, drawn: Inputs) -> tuple[Inputs, Tensors, list[Callable[[], Tensors]]]:
        """Return (inputs, outputs of a first forward, one function per timed part)."""
        inputs, backward = self.inputs(*drawn), self.backward
        outputs = self.forward(*inputs)
        calls = [lambda: self.forward(*inputs)]
        if backward:
            calls.append(lambda: backward(outputs, *inputs))
        return inputs, outputs, calls


@dataclass(frozen=True)
class Problem:
    """A computation to benchmark, with its reference and the kernels to compare."""

    modules: tuple[str, ...]
    """Files of dtron/kernels with the timed kernels."""
    dims: str
    """Meaning of the numbers of a shape."""
    shapes: Mapping[str, Shape]
    """Default shape by device type."""
    draw: Callable[[Shape, torch.dtype, torch.device], Inputs]
    """Draws the inputs; the last one is the first output's gradient if there is a backward."""
    flops: Callable[[Shape], Figures]
    """Floating-point operations of each part."""
    n_bytes: Callable[..., Figures]
    """A kernel's inputs -> bytes that each part reads and writes."""
    rows: tuple[KernelRow, ...]
    reference: str = "formula"
    parts: tuple[str, ...] = ("forward", "backward")
    """Names of the timed parts: the forward, and the backward if there is one."""
    compared: int | None = 1
    """Number of outputs to compare; None: all."""
    dtype: torch.dtype | None = None
    """Dtype of the drawn tensors; None: that of --dtype."""


def needs_triton(device: torch.device, _dtype: torch.dtype, _shape: Shape) -> str | None:
    """Return why Triton kernels cannot run; None: they can."""
    if device.type != "cuda":
        return "needs a CUDA device"
    return None if importlib.util.find_spec("triton") else "needs the package triton"
