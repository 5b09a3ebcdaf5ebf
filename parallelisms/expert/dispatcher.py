"""The interface of dispatchers, which send rows to the ranks of their experts and back.

The rows of DISPATCHERS (`expert_parallel.py`) implement it, and so can a user's class, given as
`ExpertLayers.dispatcher`. Shapes: M rows of a rank, N received rows, D width, E experts.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Compute = Callable[[Tensor, Tensor], Tensor]
"""Local experts: (rows (N, D) sorted by expert, offsets int32 (E / ep,)) -> (N, D)."""


class Dispatcher(Protocol):
    """Sends rows to the ranks of their experts and returns the results; one object for all layers.

    Attributes:
        in_graphs: whether compiled graphs can hold `begin` and `finish`, which then neither wait
            for the host nor depend on sizes that it reads.
    """

    in_graphs: bool = False

    def __init__(
        self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float, float8: bool = False
    ) -> None: ...

    def layer(self, fqn: str, device: torch.device) -> Any:
        """Return a layer's argument for `begin`, by default its FQN; called once per layer, before
        any `begin`, in the same order on all ranks. In a graph it identifies the layer by tensors,
        so that layers can share the graph."""
        return fqn

    def begin(self, rows: Tensor, offsets: Tensor, layer: Any) -> Any:
        """Start to send rows (M, D), with offsets int32 (E,) of all experts; the result is passed
        to `finish`."""
        ...

    def finish(self, pending: Any, compute: Compute) -> Tensor:
        """Return the results of the rows given to `begin`, (M, D); zero after the last offset, NaN
        for dropped rows."""
        ...

    def check(self, device: torch.device) -> None:
        """Wait for the device and raise an error if rows were dropped; a collective. By default no
        row ever is.

        Raises:
            TrainingError: on all ranks, if any of them dropped rows.
        """
