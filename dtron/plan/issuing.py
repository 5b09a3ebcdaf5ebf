"""How long the host needs to issue a step, and what `dtron plan calibrate` measures for it.

A GPU computes what the host has queued; where its work is shorter than the host's, it waits. The
host's work is counted in calls, each of which has a price that does not depend on sizes:

    graph       a call of a compiled graph and of its backward
    parameter   of a graph, each that is a DTensor: torch's runtime takes it apart, and puts its
                gradient together
    operation   an eager operation that is differentiated; a kernel of a graph is half of one
    unit        the hooks of a FSDP unit, forward and backward, with its collectives
    collective  one of a graph and the wait for it

A block is one graph. Where rows of experts leave the rank it is CUT graphs, with ROUTED eager
operations between them, and `recompute.mode = "full"` calls all of them once more. CUT is a count
of a real step; ROUTED and KERNELS are estimates, not counted. Prices are of the processor's time,
measured by a few calls in a row on any machine; no GPU is needed. What the optimizer and the loss
issue is left out.

It is a lower bound: calls in a row, of graphs with little in them, take less than those of a step
(docs/planning.md has a layout that it does not explain).
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from dtron.plan.communication import collectives
from dtron.plan.parameters import elements, units
from dtron.plan.resolved import Resolved
from dtron.plan.work import products

CUT = 4
"""Graphs of a block with experts on other ranks: before rows leave, beside them, what experts
compute element by element, and after rows are back."""
ROUTED = 30
"""Eager operations of such a block, an estimate: sorting, sizes of messages, experts' products."""
KERNELS = 2
"""Kernels of a graph for each of its products, which are among them; an estimate."""
_WIDTH, _RUNS, _WARM = 8, 30, 5


def host_seconds(run: Resolved, rank: int, prices: Mapping[str, float]) -> float:
    """Processor time of a pipeline rank's step."""
    return sum(prices.get(name, 0.0) * count for name, count in calls(run, rank).items())


def calls(run: Resolved, rank: int) -> dict[str, float]:
    """How many calls of each kind a step of a pipeline rank has."""
    m = run.micro_batches
    found: dict[str, float] = dict.fromkeys(PRICES, 0.0)
    for stage in run.stages_of(rank):
        listed = units(run, stage)
        found["unit"] += m * len(listed)
        for layer in stage.layers:
            for name, count in _of_layer(run, layer).items():
                found[name] += m * count
    sent = collectives(run, rank)
    found["collective"] += sum(c.count for c in sent if c.purpose in ("tp", "cp", "ep", "loss"))
    return found


def _of_layer(run: Resolved, layer: int) -> dict[str, float]:
    mixture = run.has_experts(layer)
    apart = run.experts["ep"] * run.experts["etp"] > 1
    again = run.recomputes(layer) and run.config.recompute.mode == "full"
    cut = mixture and apart
    kernels = KERNELS * len(products(run, run.kind(layer))) * (4 if again else 3)
    found = {"unit": float(mixture and run.experts_apart), "operation": kernels / 2}
    if not run.config.compile.enable:
        return {**found, "operation": float(kernels)}
    times = 1.5 if cut and again else 1.0
    found["graph"] = times * (CUT if cut else 1)
    found["operation"] += times * ROUTED if cut else 0.0
    if run.tp > 1:
        found["parameter"] = times * len(elements(run, run.kind(layer)))
    return found


# -- prices ----------------------------------------------------------------------------------------


class _Products(nn.Module):
    """Parameters in one graph."""

    def __init__(self, count: int, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        every = [torch.ones(_WIDTH) for _ in range(count)]
        if mesh is not None:
            every = [distribute_tensor(each, mesh, [Replicate()]) for each in every]
        self.weights = nn.ParameterList(nn.Parameter(each) for each in every)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


def _there_and_back(module: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def call() -> None:
        y: Any = module(x)
        (y.to_local() if hasattr(y, "to_local") else y).sum().backward()

    return call


def _processor(call: Callable[[], Any]) -> float:
    """Median of the processor's time of a call: what it waits for is not the host's work."""
    found = []
    for _ in range(_WARM + _RUNS):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return sorted(found[_WARM:])[_RUNS // 2]


def _slope(make: Callable[[int], Callable[[], Any]], few: int, many: int) -> float:
    """Of one more."""
    return max(0.0, _processor(make(many)) - _processor(make(few))) / (many - few)


def _graph(mesh: DeviceMesh, count: int, sharded: bool) -> Callable[[], None]:
    torch._dynamo.reset()
    x = torch.ones(_WIDTH)
    if sharded:
        x = distribute_tensor(x, mesh, [Replicate()])
    module = torch.compile(_Products(count, mesh if sharded else None), backend="aot_eager")
    return _there_and_back(module, x.requires_grad_())


def _operations(count: int) -> Callable[[], None]:
    x = torch.ones(_WIDTH, requires_grad=True)

    def chain(y: Tensor) -> Tensor:
        for _ in range(count):
            y = y * 2
        return y

    return _there_and_back(chain, x)


def _units(mesh: DeviceMesh, count: int) -> Callable[[], None]:
    module = nn.Sequential(*(_Products(8) for _ in range(count)))
    for block in module:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return _there_and_back(module, torch.ones(_WIDTH, requires_grad=True))


def _plain(count: int) -> Callable[[], None]:
    module = nn.Sequential(*(_Products(8) for _ in range(count)))
    return _there_and_back(module, torch.ones(_WIDTH, requires_grad=True))


def measure_host(mesh: DeviceMesh) -> dict[str, float]:
    """Prices by name, on a CPU mesh of one rank's own."""
    x = torch.ones(_WIDTH)
    plain = _slope(functools.partial(_graph, mesh, sharded=False), 1, 11)
    apart = _slope(functools.partial(_graph, mesh, sharded=True), 1, 11)
    unit = _slope(functools.partial(_units, mesh), 1, 11) - _slope(_plain, 1, 11)
    operation = _slope(_operations, 1, 101)

    def exchange() -> None:
        funcol.wait_tensor(funcol.all_reduce(x, "sum", mesh))

    return {
        "graph": max(0.0, _processor(_graph(mesh, 1, False)) - plain),
        "parameter": max(0.0, apart - plain),
        "operation": operation,
        "unit": max(0.0, unit),
        "collective": _processor(exchange),
    }


PRICES = ("graph", "parameter", "operation", "unit", "collective")
