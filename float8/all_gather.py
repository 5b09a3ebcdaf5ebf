"""Communication in float8: weights over data-parallel ranks, inputs over the ranks of tp.

Weights. FSDP2 lets a sharded tensor say what is gathered of it: here its float8 numbers, by a scale
that all ranks know, since one reduction after each update gives the scales of all weights. What is
gathered is what the layer multiplies by: the numbers are those that it would have cast itself.

    shard (float32) --scale--> float8 --all-gather, 1 byte an element--> weight of the product

The parameter itself stays a plain tensor; hooks are attached to it, which FSDP looks for when it is
first used.

Inputs. Under sequence parallelism each rank holds a part of the tokens. `GatherInput` casts it by
the scale of the whole input, gathers one byte an element, and hands the layers what the float8
numbers stand for. They cast it by the same scale to the same numbers, so that nothing is rounded
twice. Its gradient is summed and split in its own dtype.

gloo moves no float8 tensors: all that travels is viewed as uint8.

Source: torchao.float8.fsdp_utils, of whose tensor type the gathered weights are.
"""

import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from dtron.errors import ConfigError
from dtron.float8.casting import Scaled, dequantize, quantize, scale_of
from dtron.float8.linear import Float8Linear
from dtron.float8.recipes import Cast
from dtron.kernels.float8 import cast_plain
from dtron.kernels.torch_internals import norms
from dtron.parallelisms.fsdp.torch_internals import sharded_tensor
from dtron.parallelisms.functional_collectives import all_gather, reduce_scatter, wait_tensor
from dtron.parallelisms.placement import Style


def require_torchao() -> None:
    """Raises ConfigError where torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "float8.all_gather = true needs torchao, a dependency of dtron that is not installed; "
            "run pip install torchao, or set float8.all_gather = false"
        )


class WeightGather:
    """Gathers the weights of float8 layers in float8.

    Made once the parameters are sharded and have storage, before the first forward. `refresh` is
    due before that and after each update or loading of weights.

    Args:
        layers: of one rank, with sharded weights, each shard of equal size.
        group: all ranks that hold parts of the same weights.
    Raises:
        ConfigError: torchao is not installed.
    """

    def __init__(self, layers: Iterable[Float8Linear], group: dist.ProcessGroup) -> None:
        require_torchao()
        self.group = group
        self.shards = [_WeightShard(layer) for layer in layers]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales of all weights, with one all-reduce over the group."""
        if not self.shards:
            return
        locals_ = [shard.local for shard in self.shards]
        amax = torch.stack(norms(locals_, math.inf))
        dist.all_reduce(amax, dist.ReduceOp.MAX, self.group)
        scales = scale_of(amax, self.shards[0].format)
        for shard, scale in zip(self.shards, scales, strict=True):
            shard.check()
            shard.scale = scale


class _WeightShard:
    """What FSDP2 gathers of one weight; see `torch.distributed.fsdp.fully_shard`."""

    def __init__(self, layer: Float8Linear) -> None:
        assert isinstance(layer.weight, DTensor), "weights are sharded before they are gathered"
        self.weight, self.format = layer.weight, layer.recipe.output.right
        self.local: Any = sharded_tensor(layer.weight)
        self.local.fsdp_pre_all_gather = self.before
        self.local.fsdp_post_all_gather = self.after
        self.scale: Tensor | None = None

    def check(self) -> None:
        """The hooks are on the tensor that FSDP gathers; it would else gather float32."""
        assert sharded_tensor(self.weight) is self.local, "a float8 weight has been replaced"

    def before(self, _mesh: DeviceMesh) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """(what is gathered, what the other side is to know)."""
        assert self.scale is not None, "scales are computed before weights are gathered"
        data = cast_plain(self.local.detach().contiguous(), self.scale, self.format.dtype)
        return (data.view(torch.uint8),), (self.scale,)

    def after(
        self,
        outputs: tuple[Tensor],
        metadata: tuple[Tensor],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The whole weight, as a tensor that looks like one of `dtype`, and what it holds."""
        from torchao.float8.float8_training_tensor import (
            Float8TrainingTensor,
            GemmInputRole,
            LinearMMConfig,
        )

        (data,), (scale,) = outputs, metadata
        if out is not None:  # it has the same storage as before
            local: Any = sharded_tensor(out) if isinstance(out, DTensor) else out
            local._scale = scale
            return None
        weight = Float8TrainingTensor(
            data.view(self.format.dtype), scale, dtype, LinearMMConfig(), GemmInputRole.WEIGHT
        )
        return weight, (data,)


class GatherInput(Style):
    """In place of a `prepare_input` row: gathers a module's first argument in float8.

    The module must use it as the input of float8 layers split by rows only.

    Args:
        cast: of the layers' input; one scale for all of it.
        groups: names of the process groups whose ranks hold other parts of the input.
    """

    covers_parameters = False

    def __init__(self, cast: Cast, groups: Sequence[str]) -> None:
        assert cast.whole, "parts of an input have its scale only if there is one"
        self.cast, self.groups = cast, tuple(groups)

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See Style."""
        size, group = mesh.size(), mesh.get_group().group_name

        def gather(_module: nn.Module, args: tuple) -> tuple:
            whole = _Gather.apply(args[0], self.cast, self.groups, size, group)
            assert isinstance(whole, Tensor)
            return DTensor.from_local(whole, mesh, [Replicate()], run_check=False), *args[1:]

        for layer in module.modules():
            if isinstance(layer, Float8Linear):
                # A part of a sum, which passes as it is to `_Gather`, where it is summed up.
                layer.input_gradient = Replicate()
        module.register_forward_pre_hook(gather)


@torch.compiler.allow_in_graph  # as in linear.py
class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cast: Cast, groups: tuple[str, ...], tp: int, group: str
    ) -> Tensor:
        """(B, T / tp, D) -> (B, T, D)."""
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
