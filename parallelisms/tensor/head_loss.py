"""The loss inside the head's call, where FSDP has gathered the head's weight.

A chunked loss (`dtron.training.loss.ChunkedLoss`) multiplies with the head's weight itself. FSDP
gathers the weight, and reduces its gradient, once per call of the head's module: so labels go into
one call, which returns the loss. Under tp each rank multiplies with its own rows; the gradient of
the hidden states is partial, and the head's placement reduces it, under sequence parallelism to the
rank's tokens.

The loss computes the weight's gradient, so none is deferred (`split_backward.py`).
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
    """Make a Linear without bias return the summed loss if it is called with `labels`, in place.

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
        # replicated over tp, with a partial gradient from the rank's own rows of the weight
        hidden = _local(x, gradient=Partial())
        return loss(hidden, _local(head.weight), labels, weights)

    head.forward = forward  # type: ignore[method-assign]


def _local(tensor: Tensor, gradient: Placement | None = None) -> Tensor:
    """The local shard of a tensor; `gradient` is the placement of its gradient, if not its own."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=None if gradient is None else [gradient])
