"""The plan of a run as one JSON object: legality, memory, communication, time and cost."""

from collections.abc import Iterator
from typing import Any

from dtron.config import RunConfig
from dtron.lora.adapters import n_adapter_parameters
from dtron.models import model_spec
from dtron.models.contract import counted_as_decoder
from dtron.models.flops import images_that_fit, n_active_parameters, n_parameters
from dtron.plan.communication import collectives
from dtron.plan.feasibility import check, unchecked
from dtron.plan.hardware import Hardware
from dtron.plan.memory import RankMemory, expandable, fits, memory, offloaded_by_host, worst
from dtron.plan.run_shape import Resolved
from dtron.plan.steptime import predict, why_no_time
from dtron.setup.rules import host_warnings

KEYS = ("parallel", "memory", "time", "flops", "communication", "cost")


def plan(
    config: RunConfig, world_size: int, hardware: Hardware, tokens: float = 0.0
) -> dict[str, Any]:
    """Return the plan of a run as a dict.

    Its keys are legal, reasons, nearest, hardware, unchecked, warnings, no_time, and those in KEYS.

    Values of KEYS are None if the run is not legal. The values of `time` and `cost` are also None
    if `no_time` is not empty.

    Args:
        tokens: number of training tokens, for the cost; 0: train.tokens, or those of train.steps.
    """
    legality = check(config, world_size, hardware)
    found: dict[str, Any] = {
        "legal": legality.legal,
        "reasons": list(legality.reasons),
        "nearest": list(legality.nearest),
        "hardware": hardware.name,
        "unchecked": list(unchecked(config)),
        "warnings": [],
        "no_time": "",
        **dict.fromkeys(KEYS),
    }
    if not legality.legal:
        return found
    run = Resolved.of(config, world_size)
    found["warnings"] = [
        *host_warnings(config, world_size, hardware.domain),
        *counted_as_decoder(config.model.name, model_spec(config.model.name)),
        *_assumed_images(run),
    ]
    found["parallel"] = run.parallel()
    found["memory"] = memory_json(run, memory(run), hardware)
    found["flops"] = {f"{name}_per_token": value for name, value in run.flops().items()}
    found["communication"] = communication_json(run, hardware)
    found["no_time"] = why_no_time(config, hardware)
    if not found["no_time"]:
        time = predict(run, hardware)
        found["time"] = time.as_json()
        found["cost"] = cost(run, time.step, tokens)
    return found


def _assumed_images(run: Resolved) -> Iterator[str]:
    if run.model.vision_layers:
        seq_len = run.config.train.seq_len
        yield (
            f"model.name = {run.config.model.name}: the plan has as many images as fit, "
            f"{images_that_fit(run.model, seq_len)} of {run.model.image_tokens} tokens in each "
            f"sequence of {seq_len}; fewer images need less time and memory"
        )


def memory_json(run: Resolved, ranks: tuple[RankMemory, ...], hardware: Hardware) -> dict[str, Any]:
    """Return the memory of all pipeline ranks in bytes.

    `worst_rank` is the rank that reserves the most.
    """
    most = worst(ranks)
    limit = hardware.room
    return {
        "parameters": n_parameters(run.model),
        "adapters": n_adapter_parameters(run.config.model.name, run.model, run.config.lora),
        "active_parameters": n_active_parameters(run.model),
        "parameters_per_rank": sum(each.elements for each in ranks) / len(ranks),
        "state_per_rank": sum(each.state for each in ranks) / len(ranks),
        "worst_rank": most.rank,
        "peak": most.peak,
        "reserved": most.reserved,
        "symmetric": most.symmetric,
        "expandable": expandable(run, most.rank),
        "limit": limit,
        "host": offloaded_by_host(run, hardware),
        "host_limit": hardware.host_memory * 19 / 20,
        "fits": fits(run, ranks, hardware),
        "ranks": [each.as_json() for each in ranks],
    }


def communication_json(run: Resolved, hardware: Hardware) -> list[dict[str, Any]]:
    """Return the collectives of the first pipeline rank's step.

    Collectives are summed by purpose, axis, kind and link.
    """
    together: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in collectives(run, 0, hardware.domain):
        shared = {name: getattr(each, name) for name in ("purpose", "axis", "kind", "link")}
        sums = {"ranks": each.ranks, "count": 0.0, "bytes": 0.0, "seconds": 0.0}
        into = together.setdefault(tuple(shared.values()), shared | sums)
        into["count"] += each.count
        into["bytes"] += each.count * each.size
        into["seconds"] += each.seconds(hardware)
    return list(together.values())


def cost(run: Resolved, step: float, tokens: float) -> dict[str, float]:
    """Return the steps, days and GPU-hours of training on `tokens` tokens.

    Restarts and validation are not counted.
    """
    train = run.config.train
    tokens = tokens or float(train.tokens or train.steps * run.tokens_per_step)
    steps = tokens / run.tokens_per_step
    hours = steps * step / 3600
    return {
        "tokens": tokens,
        "steps": steps,
        "days": hours / 24,
        "gpu_hours": hours * run.world_size,
    }
