"""`model(tokens, labels=labels).loss` of transformers, with head and loss in chunks.

A model of transformers computes logits of all tokens, and passes them to `loss_function`. Here the
head gets the labels and returns the summed loss of its chunks (`parallelisms/tensor/head_loss.py`),
and `loss_function` divides it. The logits of all tokens are never in memory.
"""

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

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
        ConfigError: the model has another loss. In a forward with labels: the model changes logits
            after its head, or logits_to_keep or ignore_index is set.
    """
    name, parameters = type(model).__name__, inspect.signature(model.forward)
    if model.loss_function is not ForCausalLMLoss:
        raise ConfigError(
            f"{name} has the loss function {model.loss_function.__name__}, not ForCausalLMLoss of "
            "transformers; use loss_chunks=1"
        )
    call: dict[str, Any] = {}

    def take(_: nn.Module, args: Any, values: dict[str, Any]) -> None:
        call.clear()  # of a forward that failed
        values = {**parameters.bind_partial(*args).arguments, **values}
        if values.get("labels") is None:
            return
        kept = values.get("logits_to_keep", 0)
        if isinstance(kept, Tensor) or kept:
            raise ConfigError("logits_to_keep with labels: use loss_chunks=1, or leave it out")
        after = values.get("shift_labels")
        call["labels"] = shifted(values["labels"]) if after is None else after

    def give(_: nn.Module, args: Any, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**values, **call}

    def note(_: nn.Module, args: Any, out: Any) -> Any:
        if "labels" not in call:
            return out
        call["out"] = out[0]  # of (sum, sum of each sequence)
        return call["out"]

    def divided(
        logits: Tensor,
        labels: Any = None,
        vocab_size: Any = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORE,
        **_: Any,
    ) -> Tensor:
        if logits is not call.pop("out", None):
            raise ConfigError(
                f"{name} changes its logits after the head, such as by a soft cap; use "
                "loss_chunks=1"
            )
        if ignore_index != IGNORE:
            raise ConfigError(f"ignore_index = {ignore_index}; use {IGNORE}, or loss_chunks=1")
        shift_labels = call.pop("labels")
        if num_items_in_batch is None:
            return logits / count_labels(shift_labels)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(logits.device)
        return logits / num_items_in_batch

    model.register_forward_pre_hook(take, with_kwargs=True)
    head.register_forward_pre_hook(give, with_kwargs=True)
    head.register_forward_hook(note)
    model.loss_function = divided


def shifted(labels: Tensor) -> Tensor:
    """Return the label of each token, the token after it: (B, T) -> (B, T), -100 at the end."""
    return F.pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()
