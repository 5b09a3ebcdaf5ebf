"""Interface of dispatchers, which send rows (token copies) to the ranks of their experts.

The classes in `dispatchers.py` implement it, and so can a user's class, passed as
`ExpertLayers.dispatcher`. Shapes: M rows of a rank, N received rows, D width, E experts.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.kernels.permute import Copies

Compute = Callable[[Tensor, Tensor], Tensor]
"""Local experts: (rows (N, D) sorted by expert, offsets int32 (E / ep,)) -> (N, D)."""


class Dispatcher(Protocol):
    """Sends rows to the ranks of their experts and returns the results; one object for all layers.

    Attributes:
        group: ep x etp ranks, etp innermost.
        in_graphs: whether `begin` and `finish` can be in a compiled graph. If true, the host must
            neither wait nor read sizes in them.
        takes_tokens: whether `begin` takes tokens (N, D) instead of their copies (M, D), and
            `finish` returns each token's weighted sum of results, (N, D) in the dtype of the
            weights.
    """

    in_graphs: bool = False
    takes_tokens: bool = False
    group: dist.ProcessGroup

    def __init__(
        self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float, float8: bool = False
    ) -> None: ...

    def layer(self, fqn: str, device: torch.device) -> Any:
        """Return the `layer` argument of `begin` for one layer, by default its FQN.

        Called once per layer before any `begin`, in the same order on all ranks. With `in_graphs`,
        return tensors instead of constants, so that layers can share a graph.
        """
        return fqn

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Use another process group of the same ranks in later calls of `begin`.

        With overlapped micro-batches (`pipeline/block_overlap.py`), one of two groups is used in
        turn: rows of both micro-batches may be in flight. A recomputation uses the group of its
        micro-batch.
        """
        self.group = group

    def begin(self, rows: Tensor, offsets: Tensor, layer: Any, copies: Copies | None = None) -> Any:
        """Issue the dispatch of rows (M, D), sorted by expert; the result is passed to `finish`.

        `offsets` int32 (E,) are the ends of all experts' rows. `copies` is passed only with
        `takes_tokens`.
        """
        ...

    def finish(self, pending: Any, compute: Compute) -> Tensor:
        """Compute and combine: return the results (M, D) of the rows given to `begin`.

        Results of rows after the last offset are zero, results of dropped rows NaN.
        """
        ...

    def dropped(self, device: torch.device) -> Tensor | None:
        """Return whether this rank dropped rows since the latest `grow`; the host does not wait.

        Returns:
            bool scalar on the device; None, the default: this dispatcher never drops rows.
        """
        return None

    def grow(self, device: torch.device) -> str:
        """Wait for the device; if any rank dropped rows, raise the capacity. A collective.

        Returns:
            A message with the rows that were dropped and the new capacity, equal on all ranks;
            empty: no rank dropped rows.
        Raises:
            TrainingError: on all ranks, if rows were dropped for another reason than their number.
        """
        return ""
