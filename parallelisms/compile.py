"""torch.compile, block by block: all blocks share one compiled graph, so that start-up stays short.

The graph must be whole (`fullgraph`): a break would be silent and slow. FSDP's hooks stay outside,
around the block.
"""

from collections.abc import Mapping

from torch import nn

from dtron.config import Compile


def compile_blocks(blocks: Mapping[str, nn.Module], options: Compile) -> list[str]:
    """Compile each block in place, for static shapes.

    Returns:
        FQNs of what was compiled, for the log.
    """
    if not options.enable:
        return []
    for block in blocks.values():
        block.compile(backend=options.backend, fullgraph=True, dynamic=False)
    return list(blocks)
