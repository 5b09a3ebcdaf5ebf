"""The loss inside the head's call, where FSDP has gathered the head's weight.

A loss that multiplies by the head itself, some tokens at a time
(`dtron.training.loss.ChunkedLoss`), needs the whole weight. Under FSDP it is there while the head's
module is called, and each further call would gather it, and reduce its gradient, once more: so
labels go into the head, and the loss comes out. Under tp each rank multiplies by its own rows; the
gradient of the hidden states is a part of a sum, which the head's placement reduces, to the rank's
tokens under sequence parallelism.

The weight's gradient comes with the loss, so there is none to defer (`split_backward.py`).
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement

HeadLoss = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor | tuple[Tensor, Tensor]]
"""(hidden states (B, T, D), the rank's rows of the weight (V / tp, D), labels (B, T), None), plain
local tensors -> the summed loss, a scalar that is the same on all tp ranks. Of P predictions: (P B,
T, D), the same weight, (P B, T), their weights (P,) -> the weighted sum, and their sums (P,)."""


def attach_loss(head: nn.Module, loss: HeadLoss) -> None:
    """Make a Linear without bias give the summed loss where it is called with `labels`, in place.

    Without labels it gives logits, as before. After tensor parallelism and deferral, before FSDP.
    """
    assert isinstance(head, nn.Linear), "the head is a Linear"
    assert head.bias is None, "a head with a loss has no bias"
    logits = head.forward

    def forward(
        x: Tensor, labels: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if labels is None:
            return logits(x)
        # whole on each tp rank, while the gradient by the rank's own columns is a part of a sum
        hidden = _local(x, gradient=Partial())
        return loss(hidden, _local(head.weight), labels, weights)

    head.forward = forward  # type: ignore[method-assign]


def _local(tensor: Tensor, gradient: Placement | None = None) -> Tensor:
    """The local part of a tensor, whose gradient comes in the tensor's own placement or another."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=None if gradient is None else [gradient])
