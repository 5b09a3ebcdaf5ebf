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
        in_graphs: whether `begin` and `finish` can be in a compiled graph: the host waits for
            nothing and reads no sizes.
    """

    in_graphs: bool = False

    def __init__(
        self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float, float8: bool = False
    ) -> None: ...

    def layer(self, fqn: str, device: torch.device) -> Any:
        """Return the `layer` argument of `begin` for one layer, by default its FQN.

        Called once per layer before any `begin`, in the same order on all ranks. In graphs it has
        tensors instead of constants, so that layers can share a graph.
        """
        return fqn

    def begin(self, rows: Tensor, offsets: Tensor, layer: Any) -> Any:
        """Issue the dispatch of rows (M, D); the result is passed to `finish`.

        `offsets` are int32 (E,), of all experts.
        """
        ...

    def finish(self, pending: Any, compute: Compute) -> Tensor:
        """Compute and combine: return the results (M, D) of the rows given to `begin`.

        They are zero after the last offset, NaN for dropped rows.
        """
        ...

    def check(self, device: torch.device) -> None:
        """Wait for the device and raise an error if rows were dropped; a collective. By default no
        row ever is.

        Raises:
            TrainingError: on all ranks, if any of them dropped rows.
        """
