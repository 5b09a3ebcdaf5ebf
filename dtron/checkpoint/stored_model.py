"""A parallel model's tensors under the names by which checkpoints store them.

Stored names are those of the whole model, and stored tensors have no padding, so that any layout of
ranks and stages can read them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from dtron.checkpoint.save import first_cause
from dtron.errors import CheckpointError
from dtron.io.filesystem import Location
from dtron.parallelisms.apply import Applied
from dtron.parallelisms.gradients import as_dtensor

Held = dict[str, dict[str, Any]]
"""This rank's tensors: kind ("model", "optimizer") -> key in torch's state dict -> tensor."""


class StoredModel:
    """Tensors of this rank's stages, and their names in checkpoints.

    Attributes:
        module: the stages of this rank.
        names: names in checkpoints by the FQN in `module`; both stages of a tied weight have one.
    """

    def __init__(self, applied: Applied) -> None:
        self.module = nn.ModuleDict({str(stage): part for stage, part in applied.parts.items()})
        self.names = {
            f"{stage}.{fqn}": applied.names[fqn]
            for stage, part in applied.parts.items()
            for fqn, _ in part.named_parameters(remove_duplicate=False)
        }
        self.names |= {  # biases of routers are buffers and saved too
            f"{stage}.{fqn}": fqn
            for stage, part in applied.parts.items()
            for fqn, _ in part.named_buffers()
        }
        self._rows = applied.padded_rows

    def load_weights(
        self,
        reader: dcp.StorageReader,
        where: Location,
        group: dist.ProcessGroup,
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Load weights only, in place; all ranks call it together.

        Args:
            reader: a reader of tensors by their names in checkpoints.
            where: path of the weights, for error messages.
            group: CPU process group of all ranks.
            wanted: whether to load the tensor with this name; others stay as they are.
        Raises:
            CheckpointError: a tensor is missing, cannot be read, or has the wrong shape.
        """
        held: Held = {"model": get_model_state_dict(self.module)}
        views = self.views(held)["model"]
        state = {"model": {name: view for name, view in views.items() if wanted(name)}}
        try:
            dcp.load(state, storage_reader=reader, process_group=group)
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{where} cannot be loaded: {first_cause(error)}") from error
        self.fill_copies(held)
        set_model_state_dict(self.module, held["model"])

    def views(self, held: Held) -> Held:
        """Return tensors by kind and stored name, as views without padding; tied weights once."""
        model: dict[str, Any] = {}
        for fqn, value in held["model"].items():
            name = self.names[fqn]
            model.setdefault(name, self._unpadded(name, value))
        optimizer: dict[str, Any] = {}
        for key, value in held.get("optimizer", {}).items():
            kind, fqn, slot = _split_key(key)
            if kind == "state":
                name = self.names[fqn]
                optimizer.setdefault(f"state.{name}.{slot}", self._unpadded(name, value))
        return {"model": model, "optimizer": optimizer}

    def _unpadded(self, name: str, value: Any) -> Any:
        """Return a view of a tensor without its padding rows, which the last TP ranks hold."""
        if name not in self._rows or not isinstance(value, DTensor) or value.dim() == 0:
            return value
        local, rows = value.to_local(), self._rows[name]
        axes = zip(value.device_mesh.get_coordinate() or (), value.placements, strict=True)
        first = sum(rank * len(local) for rank, placement in axes if placement.is_shard(0))
        size = torch.Size((rows, *value.shape[1:]))
        own = local[: max(0, rows - first)]
        return as_dtensor(own, value.device_mesh, value.placements, size)

    @torch.no_grad()
    def fill_copies(self, held: Held) -> None:
        """Copy a loaded tied weight to the second of its stages, if this rank holds both stages."""
        for values in held.values():
            first: dict[tuple[str, str, str], Any] = {}
            for key, value in values.items():
                kind, fqn, slot = _split_key(key) if key not in self.names else ("", key, "")
                read = first.setdefault((kind, self.names[fqn], slot), value)
                if isinstance(value, torch.Tensor) and read is not value:
                    value.copy_(read)


def _split_key(key: str) -> tuple[str, str, str]:
    """Split `state.0.embed.weight.exp_avg` into kind, FQN and slot."""
    kind, rest = key.split(".", 1)
    return kind, *rest.rsplit(".", 1)  # type: ignore[return-value]
