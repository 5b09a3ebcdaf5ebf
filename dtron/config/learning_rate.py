"""Learning rate schedules: pure functions of the step number and the `schedule` section.

Sources: WSD, arXiv:2404.06395; inverse square root, arXiv:1706.03762.
"""

import math
from collections.abc import Callable

from dtron.config.schema import Schedule


def _constant(_step: int, _steps: int, _warmup: int, _options: Schedule) -> float:
    return 1.0


def _linear(step: int, steps: int, warmup: int, options: Schedule) -> float:
    return 1.0 - (1.0 - options.min_ratio) * _progress(step, steps, warmup)


def _cosine(step: int, steps: int, warmup: int, options: Schedule) -> float:
    fall = (1.0 - math.cos(math.pi * _progress(step, steps, warmup))) / 2
    return 1.0 - (1.0 - options.min_ratio) * fall


def _wsd(step: int, steps: int, _warmup: int, options: Schedule) -> float:
    length = round(options.decay * steps)
    done = step + 1 - (steps - length)
    return 1.0 if done <= 0 else 1.0 - (1.0 - options.min_ratio) * done / length


def _inverse_sqrt(step: int, _steps: int, warmup: int, _options: Schedule) -> float:
    return math.sqrt(max(1, warmup) / (step + 1))


def _exponential(step: int, steps: int, warmup: int, options: Schedule) -> float:
    return options.min_ratio ** (1.0 - _progress(step, steps, warmup))


SCHEDULES: dict[str, Callable[[int, int, int, Schedule], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "exponential": _exponential,
}


def warmup_steps(steps: int, options: Schedule) -> int:
    """Return the number of warm-up steps of a run of `steps` steps."""
    return round(options.warmup * steps)


def learning_rate(
    step: int, steps: int, peak: float, options: Schedule, warmup: int | None = None
) -> float:
    """Return the learning rate of update `step` (0-based) of `steps`.

    The rate rises linearly to `peak` in the warm-up and then follows SCHEDULES[options.name];
    linear and cosine reach min_ratio * peak at the last step; exponential rises from there.

    Args:
        warmup: number of warm-up steps; None: `warmup_steps` computes it.
    """
    warmup = warmup_steps(steps, options) if warmup is None else warmup
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * SCHEDULES[options.name](step, steps, warmup, options)


def _progress(step: int, steps: int, warmup: int) -> float:
    return (step - warmup) / max(1, steps - 1 - warmup)
