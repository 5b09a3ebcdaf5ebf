"""The dtype of an optimizer's moments."""

import torch

EMA = "ema"
"""Name of the average of a parameter in its state; it keeps the dtype of the parameter."""


def keep_dtype(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Keep moments in `dtype` when a state is loaded; None: torch's rule.

    torch converts loaded moments to the dtype of their parameter.
    """

    def convert(loaded: torch.optim.Optimizer) -> None:
        for state in loaded.state.values():
            state.update({k: v.to(dtype) for k, v in state.items() if k not in ("step", EMA)})

    if dtype is not None:
        optimizer.register_load_state_dict_post_hook(convert)
