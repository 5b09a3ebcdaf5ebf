"""torch.compile, block by block: all blocks share one compiled graph, so that start-up stays short.

The graph must be whole (`fullgraph`): a break would be silent and slow. FSDP's hooks stay outside,
around the block.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtron.config import Compile


def compile_blocks(
    blocks: Mapping[str, nn.Module],
    options: Compile,
    inductor_options: Mapping[str, Any] | None = None,
    forward_only: bool = False,
) -> list[str]:
    """Compile each block in place, for static shapes.

    Args:
        inductor_options: options of the inductor backend; no other backend has them.
        forward_only: compile the block's `forward`, which may then be wrapped, not its call.
    Returns:
        FQNs of what was compiled, for the log.
    """
    if not options.enable:
        return []
    chosen = dict(inductor_options or {}) if options.backend == "inductor" else {}
    settings: dict[str, Any] = {"backend": options.backend, "options": chosen or None}
    for block in blocks.values():
        if forward_only:
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, **settings)
        else:
            block.compile(fullgraph=True, dynamic=False, **settings)
    return list(blocks)
