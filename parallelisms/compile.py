"""torch.compile, block by block: all blocks share one compiled graph, so that start-up stays short.

The graph must be whole (`fullgraph`): a break would be silent and slow. Only experts on other ranks
break it, since the host has to know how many rows to send. FSDP's hooks stay outside, around the
block.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from dtron.config import Compile


def compile_blocks(
    blocks: Mapping[str, nn.Module],
    options: Compile,
    inductor_options: Mapping[str, Any] | None = None,
    forward_only: bool = False,
    broken: Collection[str] = (),
) -> list[str]:
    """Compile each block in place, for static shapes.

    Args:
        inductor_options: options of the inductor backend; no other backend has them.
        broken: FQNs of blocks that wait for the host, at which their graph breaks.
        forward_only: compile the block's `forward`, which may then be wrapped, not its call.
    Returns:
        FQNs of what was compiled, for the log.
    """
    if not options.enable:
        return []
    chosen = dict(inductor_options or {}) if options.backend == "inductor" else {}
    settings: dict[str, Any] = {"backend": options.backend, "options": chosen or None}
    for name, block in blocks.items():
        settings["fullgraph"] = name not in broken
        if forward_only:
            block.forward = torch.compile(block.forward, dynamic=False, **settings)
        else:
            block.compile(dynamic=False, **settings)
    return list(blocks)
