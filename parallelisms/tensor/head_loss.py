"""Compute the loss inside the forward of the output head, while FSDP has gathered its weight.

A chunked loss (`dtron.training.loss.ChunkedLoss`) itself multiplies by the head's weight. FSDP
gathers the weight, and reduces its gradient, once per call of the head. So one call gets the labels
and returns the loss. Under tp each rank multiplies by its shard of the weight's rows. The gradient
of the hidden states is then partial. The head's placement rule all-reduces it, or, with sequence
parallelism reduce-scatters it to the rank's tokens.

The loss itself computes the weight's gradient; `split_backward.py` never defers it.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement

HeadLoss = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(hidden states (B, T, D), the rank's rows of the weight (V / tp, D), labels (B, T), None) -> (the
summed loss, a scalar; that of each sequence (B,), without gradient), equal on all tp ranks. With P
predictions per token (MTP): (hidden states (P B, T, D), the weight, labels (P B, T), loss weights
(P,)) -> (the weighted sum of the losses; the sum of each prediction of each sequence (P B,)). All
tensors are plain and local."""


def attach_loss(head: nn.Module, loss: HeadLoss) -> None:
    """Make a Linear without bias return losses if it is called with `labels`, in place.

    Without labels it still returns logits. Call it after tensor parallelism and deferral, before
    FSDP.
    """
    assert isinstance(head, nn.Linear), "the head is a Linear"
    assert head.bias is None, "a head with a loss has no bias"
    logits = head.forward

    def forward(
        x: Tensor, labels: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if labels is None:
            return logits(x)
        # x is replicated over tp; its gradient is partial, from the rank's rows of the weight
        hidden = _local(x, gradient=Partial())
        return loss(hidden, _local(head.weight), labels, weights)

    head.forward = forward  # type: ignore[method-assign]


def _local(tensor: Tensor, gradient: Placement | None = None) -> Tensor:
    """Return a tensor's local shard; `gradient`: the gradient's placement; None: the tensor's."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=None if gradient is None else [gradient])
