"""torch.compile per block: all blocks share one compiled graph, so that start-up stays short.

Blocks compile with `fullgraph`, since a graph break would be silent and slow. Exception: in blocks
with a dispatcher that reads numbers of tokens on the host (`Dispatcher.in_graphs` is false), the
graph breaks at the dispatcher, and the experts' elementwise operations are compiled separately.
FSDP's hooks wrap the compiled block.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtron.config import Compile


def compile_blocks(
    blocks: Mapping[str, nn.Module],
    options: Compile,
    inductor_options: Mapping[str, Any] | None = None,
    forward_only: bool = False,
    broken: Collection[str] = (),
    dynamic: Collection[str] = (),
) -> list[str]:
    """Compile each block in place, for static shapes.

    Args:
        inductor_options: options of the inductor backend; other backends ignore them.
        broken: FQNs of blocks whose graph breaks at a dispatcher.
        dynamic: FQNs of blocks to compile for dynamic shapes.
        forward_only: compile `block.forward`, which can then be wrapped, instead of `__call__`.
    Returns:
        FQNs of the compiled modules, for the log.
    """
    if not options.enable:
        return []
    settings = _settings(options, inductor_options)
    for name, block in blocks.items():
        settings |= {"fullgraph": name not in broken, "dynamic": name in dynamic}
        if forward_only:
            block.forward = torch.compile(block.forward, **settings)
        else:
            block.compile(**settings)
    return list(blocks)


def compile_activations(experts: Iterable[nn.Module], options: Compile) -> None:
    """Compile the elementwise `activate` of experts in place, for dynamic numbers of tokens.

    `activate` is then one kernel in the forward and one in the backward.
    """
    for module in experts if options.enable else ():
        if hasattr(module, "activate"):
            module.activate = _compile_dynamic(module.activate, options)  # type: ignore[assignment]


def _compile_dynamic(function: Callable[..., Tensor], options: Compile) -> Callable[..., Tensor]:
    compiled = torch.compile(function, dynamic=True, fullgraph=True, **_settings(options))

    def call(*tensors: Tensor) -> Tensor:
        # A size of 0 or 1 would recompile in the middle of a run, while other ranks wait.
        return compiled(*tensors) if len(tensors[0]) > 1 else function(*tensors)

    return call


def _settings(
    options: Compile, inductor_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    chosen = dict(inductor_options or {}) if options.backend == "inductor" else {}
    return {"backend": options.backend, "options": chosen or None}
