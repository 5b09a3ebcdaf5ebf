"""An encoder on a mesh of its own: cp and tp ranks encode different inputs.

The cp x tp ranks of a micro-batch have the same inputs, such as images. Each encodes a part:

    inputs (N, ...) -> slice (N / ranks, ...) -> encoder (N / ranks, P, D) -> all-gather (N, P, D)

If ranks does not divide N, zeros are appended that no token reads. The encoder's parameters are
whole on every tp rank, so that its layers need no communication over tp, and any number of heads
is legal. With `encoder_tp` = tp, the encoder is split over tp as the decoder is, and inputs only
over cp.

Gradients. Over cp, and over tp with sequence parallelism, each rank reads the outputs for its own
tokens: the backward of the all-gather is a reduce-scatter. Over tp without sequence parallelism,
all ranks compute the same gradient, and each takes that of its own inputs. Then each rank has the
gradients of its own inputs, so that those of parameters are partial sums: over cp FSDP sums them,
over tp `gradients.reduce_replicas` does, once per step.

Source: vLLM's data parallelism of encoders inside tp (`mm_encoder_tp_mode = "data"`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from dtron.config import Degree, Parallel
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.placement import Encoder, change_argument, sequence
from dtron.parallelisms.tensor.tensor_parallel import Placements, PrepareArgument


def replicated(placements: Placements, encoder: Encoder) -> Placements:
    """Return placements that replicate the encoder over tp, with partial gradients."""
    decoder = {
        pattern: row
        for pattern, row in placements.items()
        if pattern.partition(".")[0] not in encoder.modules
    }
    reader: Any = decoder[encoder.reader]
    return {
        **decoder,
        **dict.fromkeys(encoder.modules, sequence()),
        encoder.reader: replace(reader, partial=()),  # the all-gather sums its gradients
    }


def split_inputs(
    modules: Mapping[str, nn.Module],
    encoder: Encoder,
    mesh: Mesh,
    parallel: Parallel,
) -> None:
    """Make each cp and tp rank encode a part of the inputs, in place.

    Args:
        modules: modules of the stage by FQN; without the encoder's, nothing is changed.
        parallel: only `encoder_tp` and `sequence_parallel` are used.
    """
    axes: tuple[Degree, ...] = ("cp",) if parallel.encoder_tp > 1 else ("cp", "tp")
    ranks, rank = mesh.size(*axes), mesh.rank(*axes)
    if encoder.modules[0] not in modules or ranks == 1:
        return

    def own(_module: nn.Module, inputs: Tensor) -> Tensor:
        if missing := -len(inputs) % ranks:
            inputs = torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])])
        return inputs.chunk(ranks)[rank]

    change_argument(modules[encoder.modules[0]], 0, own)
    for axis in reversed(axes):
        if mesh.size(axis) > 1:
            own_tokens = axis == "cp" or parallel.sequence_parallel
            gradient = Partial() if own_tokens else Replicate()
            group, device = mesh.group(axis), mesh.device_type
            ranks_of_axis = DeviceMesh.from_group(group, device, mesh_dim_names=(axis,))
            gather = PrepareArgument(1, Shard(0), Replicate(), gradient)
            gather.apply(modules[encoder.reader], ranks_of_axis)
