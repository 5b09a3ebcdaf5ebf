"""`model(tokens, labels=labels).loss` of transformers, with head and loss in chunks.

A model of transformers computes logits of all tokens, and passes them to `loss_function`. Here the
head gets the labels and returns the summed loss of its chunks (`parallelisms/tensor/head_loss.py`),
and `loss_function` divides it. The logits of all tokens are never in memory.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dtron.errors import ConfigError
from dtron.training.loss import IGNORE, count_labels


def give_labels_to_head(model: Any, head: nn.Module) -> None:
    """Make the model pass its labels to the head, in place.

    The model's outputs then have `loss`, the mean over all labels of the call or their sum over
    `num_items_in_batch`, and the summed loss in the place of `logits`. Without labels they are as
    before.

    Args:
        model: a PreTrainedModel with a causal language-modelling loss.
        head: its output embedding, to which `attach_loss` gives the argument `labels`.
    Raises:
        ConfigError: in a forward with labels: the model changes logits after its head.
    """
    call: dict[str, Any] = {}

    def take(_: nn.Module, args: Any, values: dict[str, Any]) -> None:
        call.clear()  # of a forward that failed
        if values.get("shift_labels") is not None:
            call["labels"] = values["shift_labels"]
        elif values.get("labels") is not None:
            call["labels"] = shifted(values["labels"])

    def give(_: nn.Module, args: Any, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**values, **call}

    def note(_: nn.Module, args: Any, out: Any) -> Tensor:
        call["out"] = out[0] if isinstance(out, tuple) else out  # (sum, sum of each sequence)
        return call["out"]

    def divided(
        logits: Tensor,
        labels: Any = None,
        vocab_size: Any = None,
        num_items_in_batch: Tensor | float | None = None,
        **_: Any,
    ) -> Tensor:
        if logits is not call["out"]:
            raise ConfigError(
                f"{type(model).__name__} changes its logits after the head, such as by a soft cap; "
                "use loss_chunks=1"
            )
        return logits / (
            count_labels(call["labels"]) if num_items_in_batch is None else num_items_in_batch
        )

    model.register_forward_pre_hook(take, with_kwargs=True)
    head.register_forward_pre_hook(give, with_kwargs=True)
    head.register_forward_hook(note)
    model.loss_function = divided


def shifted(labels: Tensor) -> Tensor:
    """Return the label of each token, the token after it: (B, T) -> (B, T), -100 at the end."""
    return F.pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()
