"""Communication in float8: weights over data-parallel ranks, inputs over the ranks of tp.

Weights. FSDP2 lets a sharded tensor choose what is gathered: here its float8 values. All ranks know
the scales: one reduction after each update computes the scales of all weights. The gathered values
equal those that the layer would cast from weights gathered in float32.

    shard (float32) --scale--> float8 --all-gather, 1 byte per element--> weight of the matmul

The parameter stays a plain tensor, on which FSDP finds the hooks at its first use. One cast of the
weight has to serve both the output and the input's gradient: with two casts, as many bytes would be
sent as in bfloat16.

Inputs. Under sequence parallelism each rank holds a shard of the tokens. `GatherInput` casts the
shard with the scale of the whole input, gathers one byte per element, and passes the dequantised
values to the layers. The layers cast them with the same scale to the same float8 values, so that
nothing is rounded twice. The gradient is reduce-scattered in its own dtype.

gloo does not support float8 tensors, so float8 values are sent as uint8 views.

Source: torchao.float8.fsdp_utils; gathered weights are tensors of torchao's Float8TrainingTensor.
"""

import functools
import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.functional import pad

from dtron.errors import ConfigError
from dtron.float8.casting import Scaled, dequantize, largest, quantize
from dtron.float8.linear import Float8Linear
from dtron.float8.recipes import Cast
from dtron.float8.scales import scale_of
from dtron.kernels.float8 import cast_plain
from dtron.kernels.torch_internals import norms
from dtron.parallelisms.fsdp.torch_internals import sharded_tensor
from dtron.parallelisms.functional_collectives import all_gather, reduce_scatter, wait_tensor
from dtron.parallelisms.placement import Style


def require_torchao() -> None:
    """Raise ConfigError if torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "float8.all_gather = true needs torchao, a dependency of dtron that is not installed; "
            "run pip install torchao, or set float8.all_gather = false"
        )


class WeightGather:
    """All-gathers the weights of float8 layers in float8.

    Create it after the parameters are sharded and have storage. Call `refresh` before the first
    forward and after each update or load of weights.

    Args:
        layers: layers of this rank, with weights in shards of equal size; their recipe casts
            weights once (`Recipe.casts_weight_once`).
        fsdp_group: ranks that FSDP gathers from.
        scale_group: ranks that share the scales of weights or of their blocks.
    Raises:
        ConfigError: torchao is not installed.
    """

    def __init__(
        self,
        layers: Iterable[Float8Linear],
        fsdp_group: dist.ProcessGroup,
        scale_group: dist.ProcessGroup,
    ) -> None:
        require_torchao()
        self.group = scale_group
        self.shards = [_WeightShard(layer, fsdp_group) for layer in layers]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales of all weights, with one all-reduce over the group."""
        if not self.shards:
            return
        cast = self.shards[0].format
        if cast.whole:
            amax = torch.stack(norms([shard.local for shard in self.shards], math.inf))
            grids = [torch.Size([])] * len(self.shards)
        else:
            found = [shard.block_amax() for shard in self.shards]
            amax, grids = torch.cat([x.flatten() for x in found]), [x.shape for x in found]
        dist.all_reduce(amax, dist.ReduceOp.MAX, self.group)
        scales = scale_of(amax, cast).split([grid.numel() for grid in grids])
        for shard, scale, grid in zip(self.shards, scales, grids, strict=True):
            shard.check()
            shard.set_scale(scale.view(grid))  # () or (block rows, block columns)


class _WeightShard:
    """A rank's shard of one weight, with FSDP2's hooks before and after its all-gather."""

    def __init__(self, layer: Float8Linear, fsdp_group: dist.ProcessGroup) -> None:
        assert isinstance(layer.weight, DTensor), "weights are sharded before they are gathered"
        self.weight, self.format = layer.weight, layer.recipe.output.right
        self.local: Any = sharded_tensor(layer.weight)
        self.local.fsdp_pre_all_gather = self.before
        self.local.fsdp_post_all_gather = self.after
        self.scale: Tensor | None = None
        """Scale of the whole gathered weight, a scalar, or scales of its blocks.

        The shape of the latter is (block rows, block columns).
        """
        self.n_ranks, rank = fsdp_group.size(), fsdp_group.rank()
        self.first_row = rank * len(self.local)
        """Index of the shard's first row in the gathered weight."""

    def set_scale(self, scale: Tensor) -> None:
        """Set the scale, from the second call on in place: a CUDA graph reads the same tensor."""
        if self.scale is None:
            self.scale = scale.clone()
        else:
            self.scale.copy_(scale)

    def check(self) -> None:
        """Check that FSDP gathers the tensor with the hooks.

        Without them, the all-gather would not be in float8.
        """
        assert sharded_tensor(self.weight) is self.local, "a float8 weight has been replaced"

    def block_amax(self) -> Tensor:
        """Return the largest magnitude of this rank's rows in each block of the gathered weight.

        The shape is (block rows, block columns). 0 for blocks without rows of this rank.
        """
        height = self.format.tile[0]
        of_rows = largest(self.local, self._row_cast)  # (rows, blocks along the columns)
        n_rows = len(of_rows)
        above, below = self.first_row % height, -(self.first_row + n_rows) % height
        of_blocks = pad(of_rows, (0, 0, above, below)).unflatten(0, (-1, height)).amax(1)
        amax = of_rows.new_zeros(-(-n_rows * self.n_ranks // height), of_rows.shape[1])
        amax[self.first_row // height :][: len(of_blocks)] = of_blocks
        return amax

    @property
    def _row_cast(self) -> Cast:
        """The cast with tiles of one row, as wide as a block."""
        return replace(self.format, tile=(1, self.format.tile[1]))

    @functools.cached_property
    def _block_of_row(self) -> Tensor:
        """Index of the block row that contains each row of this rank's shard, int64 (rows,)."""
        rows = torch.arange(len(self.local), device=self.local.device) + self.first_row
        return rows // self.format.tile[0]

    def before(self, _mesh: DeviceMesh) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Cast the shard to float8; return (tensors to gather, metadata for `after`)."""
        assert self.scale is not None, "scales are computed before weights are gathered"
        local = self.local.detach().contiguous()
        if self.format.whole:
            data = cast_plain(local, self.scale, self.format.dtype)
        else:
            data = quantize(local, self._row_cast, scale=self.scale[self._block_of_row]).data
        # torchao's tensor type takes scales of at most one dim.
        scale = self.scale if self.format.whole else self.scale.flatten()
        return (data.contiguous().view(torch.uint8),), (scale,)

    def after(
        self,
        outputs: tuple[Tensor],
        metadata: tuple[Tensor],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """Return (unsharded weight, as a float8 tensor that reports `dtype`; its inner tensors).

        With `out`, the weight of an earlier all-gather, only set its scale and return None.
        """
        from torchao.float8.float8_training_tensor import (
            Float8TrainingTensor,
            GemmInputRole,
            LinearMMConfig,
        )

        (data,), (scale,) = outputs, metadata
        if out is not None:  # FSDP has gathered into the storage of its data
            local: Any = sharded_tensor(out) if isinstance(out, DTensor) else out
            local._scale = scale
            return None
        weight = Float8TrainingTensor(
            data.view(self.format.dtype), scale, dtype, LinearMMConfig(), GemmInputRole.WEIGHT
        )
        return weight, (data,)


class GatherInput(Style):
    """Style that gathers a module's first argument in float8, instead of `prepare_input`.

    The module may use this argument only as the input of float8 layers split by rows.

    Args:
        cast: cast of the layers' input, with one scale for the whole input.
        groups: names of the process groups whose ranks hold other shards of the input.
    """

    covers_parameters = False

    def __init__(self, cast: Cast, groups: Sequence[str]) -> None:
        assert cast.whole, "a float8 all-gather of inputs needs a per-tensor scale"
        self.cast, self.groups = cast, tuple(groups)

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register a pre-forward hook that gathers the argument; see Style."""
        size, group = mesh.size(), mesh.get_group().group_name

        def gather(_module: nn.Module, args: tuple) -> tuple:
            whole = _Gather.apply(args[0], self.cast, self.groups, size, group)
            assert isinstance(whole, Tensor)
            return DTensor.from_local(whole, mesh, [Replicate()], run_check=False), *args[1:]

        for layer in module.modules():
            if isinstance(layer, Float8Linear):
                # The gradient stays a partial sum, which `_Gather` reduces.
                layer.input_gradient = Replicate()
        module.register_forward_pre_hook(gather)


@torch.compiler.allow_in_graph  # as in linear.py
class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cast: Cast, groups: tuple[str, ...], tp: int, group: str
    ) -> Tensor:
        """Gather x (B, T tokens / tp, D) over tp in float8 and dequantise the result: (B, T, D)."""
        ctx.tp, ctx.group = tp, group
        mine = quantize(x.flatten(0, 1), cast, groups)
        sent = mine.data.view(torch.uint8).view(x.shape).contiguous()
        parts = wait_tensor(all_gather(sent, tp, group))
        rows = parts.unflatten(0, (tp, -1)).transpose(0, 1).flatten(0, 2)
        whole = Scaled(rows.view(cast.dtype), mine.scale, cast)
        exact = torch.promote_types(x.dtype, torch.float32)
        return dequantize(whole, exact).to(x.dtype).view(x.shape[0], -1, x.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parts = grad.unflatten(1, (ctx.tp, -1)).transpose(0, 1).flatten(0, 1)
        return wait_tensor(reduce_scatter(parts, ctx.tp, ctx.group)), None, None, None, None
