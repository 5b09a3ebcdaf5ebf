"""The policy of `recompute.mode = "auto"`: the fastest that fits in memory, by predictions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dtron.config import RunConfig
from dtron.setup.rules import ModelCandidate, all_broken

_SHARES = (0.25, 0.5, 0.75)
"""Values of `recompute.first` to try, as fractions of the blocks."""


def policies(n_blocks: int) -> Iterator[dict[str, Any]]:
    """Yield the values of [recompute] to try, roughly from the fastest."""
    first = [{"first": n} for n in sorted({int(n_blocks * x) for x in _SHARES} - {0})]
    for offload in (False, True):
        yield {"mode": "none", "offload": offload}
        for mode in ("selective", "attention", "full"):
            for blocks in (*first, {"every": 2}, {}):
                yield {"mode": mode, "offload": offload, **blocks}


def choose_policy(
    run: ModelCandidate,
    limit: float,
    used: Callable[[RunConfig], float],
    seconds: Callable[[RunConfig], float],
) -> tuple[dict[str, Any], str]:
    """Choose the policy of a run with `recompute.mode = "auto"`.

    Args:
        limit: maximum of `used`.
        used: predicts the used fraction of memory, of the GPU or the host; inf: unknown.
        seconds: predicts the seconds of a step; inf: unknown.

    Returns:
        (keys of [recompute] that differ from their defaults and `mode`, reason for the log). If no
        policy fits, that of the least memory; if memory is unknown, `none`.
    """
    broken, found = set(all_broken(run)), []
    for policy in policies(run.model.n_layers + run.model.mtp):
        config = run.config.changed(recompute=policy)
        if set(all_broken(replace(run, config=config))) <= broken:
            found.append((seconds(config), config, policy))
    shares = []
    for _, config, policy in sorted(found, key=lambda each: each[0]):
        shares.append((used(config), policy))
        if shares[-1][0] <= limit:
            reason = f"the fastest policy that fits: {shares[-1][0]:.0%} of memory, as predicted"
            return _set(policy), reason
    share, policy = min(shares, key=lambda each: each[0], default=(float("inf"), {}))
    if share == float("inf"):
        return {"mode": "none"}, "the memory of the run is unknown"
    return _set(policy), f"no policy fits; this one needs the least memory, {share:.0%}"


def _set(policy: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in policy.items() if value is not False}
