"""Everything that is known of a run before it starts, as one object."""

from typing import Any

from dtron.config import RunConfig
from dtron.flops import n_parameters
from dtron.plan.legality import check
from dtron.plan.memory import RankMemory, memory, worst
from dtron.plan.resolved import Resolved


def plan(config: RunConfig, world_size: int) -> dict[str, Any]:
    """{legal, reasons, nearest, parallel, memory, time, flops}; of an illegal run the first three
    alone have something in them."""
    legality = check(config, world_size)
    found: dict[str, Any] = {
        "legal": legality.legal,
        "reasons": list(legality.reasons),
        "nearest": list(legality.nearest),
        "parallel": None,
        "memory": None,
        "time": None,
        "flops": None,
    }
    if not legality.legal:
        return found
    run = Resolved.of(config, world_size)
    ranks = memory(run)
    found["parallel"] = run.parallel()
    found["memory"] = memory_json(run, ranks)
    found["flops"] = {f"{name}_per_token": value for name, value in run.flops().items()}
    return found


def memory_json(run: Resolved, ranks: tuple[RankMemory, ...]) -> dict[str, Any]:
    """Of all pipeline ranks, and of the one that holds most."""
    most = worst(ranks)
    return {
        "parameters": n_parameters(run.model),
        "parameters_per_rank": sum(each.elements for each in ranks) / len(ranks),
        "state_per_rank": sum(each.state for each in ranks) / len(ranks),
        "worst_rank": most.rank,
        "peak": most.peak,
        "reserved": most.reserved,
        "ranks": [each.as_json() for each in ranks],
    }
