"""Initial weights that are the same in every layout.

Each parameter is drawn unsharded from a generator seeded by (seed, FQN) and then sharded, one
parameter at a time. DTensor's own random numbers differ between layouts and are wrong on CPUs.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dtron.errors import ConfigError

Initializer = Callable[[str, Tensor, torch.Generator], None]
"""Function (FQN, unsharded plain tensor, generator) that fills the tensor in place."""


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model built on the meta device real, uninitialised storage; tied weights stay tied.

    Raises:
        ConfigError: the model has a buffer on the meta device.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"buffer {name} is on the meta device, where its values are lost; compute it in "
                "forward, or build the model on a real device"
            )
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((module, name))
    buffers = {name: buffer.to(device, copy=True) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():  # to_empty has lost their values
        buffer.copy_(buffers[name])
    for (first, name), *others in tied.values():
        for module, other_name in others:
            setattr(module, other_name, getattr(first, name))


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    fill: Initializer,
    names: Mapping[str, str] | None = None,
    rows: Mapping[str, int] | None = None,
) -> None:
    """Draw every parameter of `model`, plain or DTensor, from (seed, its name).

    Args:
        names: {FQN in `model`: name in the whole model} of parameters; by default the FQN.
        rows: {name of a padded parameter: its number of rows without padding}; padding is zero.
    """
    for fqn, parameter in model.named_parameters():
        name = (names or {}).get(fqn, fqn)
        generator = torch.Generator(parameter.device).manual_seed(_seed_of(seed, name))
        # Frozen weights may be narrower than trained ones, but are drawn alike.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        full = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        fill(name, full[: (rows or {}).get(name)], generator)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: all ranks drew the same tensor, and each keeps its shard
            full = distribute_tensor(
                full, parameter.device_mesh, parameter.placements, src_data_rank=None
            ).to_local()
            parameter = parameter.to_local()  # DTensor needs half a second to dispatch a copy_
        parameter.copy_(full)


@torch.no_grad()
def broadcast_from_first_rank(model: nn.Module, device: torch.device) -> None:
    """Broadcast parameters and buffers of an unsharded model from rank 0, one tensor at a time.

    Raises:
        ConfigError: a parameter is on the meta device, so it has no values.
    """
    for fqn, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(f"{fqn} is on the meta device; pass init=(seed, initializer)")
    for tensor in [*model.parameters(), *model.buffers()]:
        on_device = tensor.detach().to(device, copy=True)
        dist.broadcast(on_device, src=0)
        tensor.copy_(on_device)


def _seed_of(seed: int, fqn: str) -> int:
    digest = hashlib.sha256(f"{seed}/{fqn}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
