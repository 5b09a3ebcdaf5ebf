"""AdamW with moments in 8 bits, over shards.

A moment is stored as codes (uint8) of a dynamic map, with a float32 scale for each block of 256
elements of a row; the update is computed in float32. Maps, scales, rounding and formula are those
of torchao.optim.AdamW8bit, whose blocks may cross rows. Here they do not, so that codes (A, B) and
scales (A, B / 256) are sharded as the parameter, and loaded in any layout.

Source: 8-bit optimizers, arXiv:2110.02861.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim.quant_utils import (
    create_dynamic_map,
    dequant_with_qmap,
    quantize_8bit_with_qmap,
    scale_tensor,
)

from dtron.errors import ConfigError
from dtron.kernels.adamw import Counts
from dtron.parallelisms.gradients import as_dtensor, local_part
from dtron.setup.optim_groups import BLOCK, has_8bit_moments
from dtron.training.optim.adamw import MOMENTS, AdamW

_CHUNK = 2**25
"""Elements that are updated at once; a multiple of BLOCK."""


class AdamW8bit(AdamW):
    """AdamW whose moments of `is_quantized` parameters have 8 bits; others have float32 moments.

    Args:
        groups: parameter groups; rows of a shard are whole blocks (`check_blocks`).
    """

    def __init__(self, groups: list[dict], **settings: Any) -> None:
        super().__init__(groups, None, **settings)
        device = self.param_groups[0]["params"][0].device
        maps = [create_dynamic_map(signed) for signed in (True, False)]
        self._zero_codes = [values.index(0) for values in maps]
        self._maps = [torch.tensor(values, device=device) for values in maps]
        """Maps of both moments: codes -> values in [-1, 1] and [0, 1]."""
        self._compiled = torch.compile(_update_chunk, dynamic=True)
        self.register_load_state_dict_post_hook(_restore_codes)

    def _update_group(self, members: list[Tensor], group: dict, counts: Counts) -> None:
        if wide := [p for p in members if not is_quantized(p)]:
            super()._update_group(wide, group, counts)
        for p in members:
            if is_quantized(p):
                self._update_quantized(p, group)

    def _update_quantized(self, p: Tensor, group: dict) -> None:
        state, factor = self._quantized_state(p), self._factor(p)
        state["step"] += factor.isfinite()
        run = self._compiled if p.is_cuda else _update_chunk
        rate = torch.full((), group["lr"], device=p.device)  # a number would be compiled in
        beta1, beta2 = group["betas"]
        for chunk in _chunks(p, state):
            run(
                **chunk,
                first_map=self._maps[0],
                second_map=self._maps[1],
                step=state["step"],
                factor=factor,
                rate=rate,
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                decay=group["weight_decay"],
            )

    def _quantized_state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for name, zero in zip(MOMENTS, self._zero_codes, strict=True):
                state[f"{name}_codes"] = torch.full_like(p, zero, dtype=torch.uint8)
                state[f"{name}_scales"] = _zero_scales(p)
        return state


def is_quantized(p: Tensor) -> bool:
    """Whether the moments of a parameter have 8 bits; it does not depend on the layout."""
    return has_8bit_moments(p.shape)


def check_blocks(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ConfigError if the rows of a shard of a trained parameter are not whole blocks.

    Rules refuse such widths of tp and etp before the start; this also checks FSDP's shards.

    Args:
        named: (FQN, parameter) pairs.
    """
    for fqn, p in named:
        if not p.requires_grad or not is_quantized(p):
            continue
        width = local_part(p).shape[-1]
        if width % BLOCK:
            raise ConfigError(
                f'optim.name = "adamw8bit": rows of {fqn} have {width} elements on a rank, not a '
                f"multiple of {BLOCK}; use a smaller parallel.tp or parallel.etp, or another "
                "optim.name"
            )


def _zero_scales(p: Tensor) -> Tensor:
    """Return scales (..., B / 256) for a parameter (..., B), sharded as the parameter."""
    local = local_part(p)
    scales = torch.zeros(*local.shape[:-1], local.shape[-1] // BLOCK, device=local.device)
    if not isinstance(p, DTensor):
        return scales
    shape = torch.Size((*p.shape[:-1], p.shape[-1] // BLOCK))
    return as_dtensor(scales, p.device_mesh, p.placements, shape)


def _chunks(p: Tensor, state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield views of at most _CHUNK elements of a shard, as arguments of `_update_chunk`."""
    assert p.grad is not None, "it is a member of a step"
    whole = {"weight": local_part(p).view(-1), "gradient": local_part(p.grad).reshape(-1)}
    for argument, moment in zip(("first", "second"), MOMENTS, strict=True):
        for kind in ("codes", "scales"):
            whole[f"{argument}_{kind}"] = local_part(state[f"{moment}_{kind}"]).view(-1)
    for first in range(0, whole["weight"].numel(), _CHUNK):
        yield {
            name: _part(x, first // BLOCK, _CHUNK // BLOCK)
            if name.endswith("scales")
            else _part(x, first, _CHUNK)
            for name, x in whole.items()
        }


def _part(x: Tensor, first: int, n: int) -> Tensor:
    return x[first : first + n]


def _update_chunk(
    weight: Tensor,
    gradient: Tensor,
    first_codes: Tensor,
    first_scales: Tensor,
    second_codes: Tensor,
    second_scales: Tensor,
    first_map: Tensor,
    second_map: Tensor,
    step: Tensor,
    factor: Tensor,
    rate: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Update N elements in place; nothing changes if `factor`, that of gradients, is not finite.

    Args:
        weight, gradient: float32 (N,).
        first_codes, second_codes: uint8 (N,); their scales: float32 (N / 256,).
        step: count of updates, with this one.
        rate: learning rate, a scalar.
    """
    finite = factor.isfinite()
    g = torch.where(finite, gradient * factor, 0.0)
    m = dequant_with_qmap(first_codes, first_map, first_scales).lerp(g, 1 - beta1)
    v = dequant_with_qmap(second_codes, second_map, second_scales).lerp(g.square(), 1 - beta2)
    stored = [
        (m, first_map, first_codes, first_scales),
        (v, second_map, second_codes, second_scales),
    ]
    for moment, values, codes, scales in stored:
        scaled, new_scales = scale_tensor(moment, BLOCK)
        new_codes = quantize_8bit_with_qmap(scaled, values)
        codes.copy_(torch.where(finite, new_codes, codes))
        scales.copy_(torch.where(finite, new_scales, scales))
    count = step.clamp(min=1)
    change = (m / (1 - beta1**count)) / (v.sqrt() / (1 - beta2**count).sqrt() + eps)
    change = (change + decay * weight) * rate
    weight.sub_(torch.where(finite, change, 0.0))


def _restore_codes(optimizer: torch.optim.Optimizer) -> None:
    """Convert loaded codes to uint8; torch converts a loaded state to the parameter's dtype."""
    for state in optimizer.state.values():
        state.update({k: v.to(torch.uint8) for k, v in state.items() if k.endswith("_codes")})
