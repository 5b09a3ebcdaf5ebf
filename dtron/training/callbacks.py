"""Functions of a user that the trainer calls during a run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dtron.io.filesystem import Location

if TYPE_CHECKING:
    from dtron.training.trainer import Trainer


class Callback:
    """Base class: `Trainer(config, callbacks=[MyCallback()])`; every method does nothing.

    An error that a method raises ends the run.
    """

    def after_step(self, trainer: "Trainer") -> None:
        """Called on all ranks after each step, `trainer.step`; the device may still compute it.

        Steps that are rolled back are left out. Its time is part of the next step's.
        """

    def after_eval(self, trainer: "Trainer", losses: Mapping[str, float]) -> None:
        """Called on all ranks with `validation_loss` and `validation_loss/NAME`, equal on all."""

    def after_save(self, trainer: "Trainer", checkpoint: Location) -> None:
        """Called on rank 0 with the folder of each complete checkpoint in the durable location.

        With `checkpoint.mode = "async"`, called after the step in which the save has ended.
        """
