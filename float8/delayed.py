"""Delayed scaling: scales of inputs and gradients from earlier steps.

    scale = largest float8 / max |x| over the last H steps

Values larger than in these steps saturate. max |x| of a step is the maximum over its micro-batches
and over all ranks that hold shards of the operand or of the batch, so that every layout has the
same scales. Scales of weights are computed from their values, once after each update. One reduction
per step serves all scales of all layers.

Until each operand has been recorded once, at least in the first step, all scales are current
scales, computed from the values. Skipped steps and magnitudes that are zero or not finite are not
recorded. As long as an operand has only been zero, the run keeps current scales, and the host waits
for the device once per step.

Each layer reports its magnitudes as the gradient of a leaf tensor (linear.py). That gradient is
computed once per backward, so that recomputation does not record twice and evaluation, without a
backward, records nothing. Compiled graphs change once, when delayed scales replace current scales.

Source: arXiv:2209.05433; arXiv:2310.18313, and Transformer Engine's DelayedScaling.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtron.float8.linear import Delayed, Float8Linear
from dtron.float8.scales import scale_of
from dtron.kernels.torch_internals import norms


class DelayedScales:
    """Delayed scales of the float8 layers of a rank's stages.

    Create it when the weights have storage. Call `update` after creation, after each update of the
    weights, and after loading.

    Args:
        layers: layers by FQN, in the same order on all ranks of the group. All layers have one
            recipe, with per-tensor scales.
        length: H, number of steps in the history.
        group: all ranks that have these layers; None: only this process has them.
    """

    def __init__(
        self, layers: Mapping[str, Float8Linear], length: int, group: dist.ProcessGroup | None
    ) -> None:
        self.group, self.layers = group, list(layers.values())
        device = self.layers[0].weight.device if self.layers else None
        self.seen = torch.zeros(len(layers), 2, device=device)
        self.histories = torch.zeros(len(layers), length, 2, device=device)
        """Largest magnitudes of input and gradient, newest first; 0: not recorded yet."""
        self.state = dict(zip(layers, self.histories.unbind(0), strict=True))
        """The histories by FQN, float32 (H, 2), as saved in checkpoints."""
        self.table = torch.ones(len(layers), 3, device=device)
        """Scales of input, weight and gradient, float32 (layers, 3)."""
        self.scales = self.table.unbind(0)
        self.complete = False
        for layer, seen in zip(self.layers, self.seen.unbind(0), strict=True):
            assert layer.recipe.shares_scales, "delayed scaling needs per-tensor scales"
            leaf = torch.zeros(2, device=device, requires_grad=True)
            leaf.register_post_accumulate_grad_hook(self._recorder(seen))
            layer.delayed = Delayed(leaf)

    @torch.no_grad()
    def update(self, taken: Tensor | None = None) -> bool:
        """Record the magnitudes of the previous step, if any, and compute all scales.

        Args:
            taken: bool scalar, whether the step changed the weights. None: histories or weights may
                have been loaded; a step since the last call, if any, changed the weights.
        Returns:
            Whether layers use delayed scales from now on and did not before, or the reverse.
        """
        if not self.layers:
            return False
        weights = torch.stack(norms(self._weights(), math.inf))  # float64 stays, as in casting
        shown = torch.cat([self.seen, weights[:, None]], 1)
        shown = torch.where(shown.isfinite(), shown, 0)
        if taken is not None:
            shown[:, :2] *= taken
        if self.group is not None:
            dist.all_reduce(shown, dist.ReduceOp.MAX, self.group)
        self._remember(shown[:, :2])
        before = self.complete
        if taken is None or not self.complete:  # complete histories stay so, unless loaded anew
            self.complete = bool((self.histories > 0).any(1).all().item())
        if self.complete:
            self._compute(self.histories.amax(1), shown[:, 2])
        for layer, own in zip(self.layers, self.scales, strict=True):
            assert layer.delayed is not None
            layer.delayed.scales = own if self.complete else None
        return self.complete != before

    def _remember(self, newest: Tensor) -> None:
        """Add a step's magnitudes, float32 (layers, 2), to the histories.

        An operand with magnitude 0, as in a skipped step or without a step, keeps its history.
        """
        moved = torch.cat([newest[:, None], self.histories[:, :-1]], 1)
        self.histories.copy_(torch.where((newest > 0)[:, None], moved, self.histories))
        self.seen.zero_()

    def _compute(self, largest: Tensor, weights: Tensor) -> None:
        recipe = self.layers[0].recipe
        casts = (recipe.output.left, recipe.output.right, recipe.grad_input.left)
        amax = (largest[:, 0], weights, largest[:, 1])
        scales = torch.stack([scale_of(a, c) for a, c in zip(amax, casts, strict=True)], 1)
        known = torch.stack(amax, 1) > 0
        self.table.copy_(torch.where(known, scales, 1))

    def _weights(self) -> list[Tensor]:
        """Return this rank's shard of each weight; one zero for an empty shard."""
        parts = [layer.weight for layer in self.layers]
        local = [w.to_local() if isinstance(w, DTensor) else w for w in parts]
        return [w.detach() if w.numel() else w.new_zeros(1) for w in local]

    def _recorder(self, seen: Tensor) -> Callable[[Tensor], None]:
        def record(leaf: Tensor) -> None:
            assert leaf.grad is not None
            torch.maximum(seen, leaf.grad, out=seen)
            leaf.grad = None

        return record
