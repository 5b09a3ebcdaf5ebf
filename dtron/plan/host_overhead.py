"""Time that the host needs to issue a step.

A GPU computes what the host has queued, and idles if the host is slower. The host's time is counted
in calls. A call of a kind costs the same time for any size of its tensors:

    graph       a call of a compiled graph: in the forward, recomputation or backward; or a launch
                of the step's CUDA graph
    parameter   a DTensor parameter of such a call: torch's runtime unwraps it and wraps its
                gradient
    kernel      a kernel launched by a graph
    operation   an eager operation, or the backward of one
    collective  a collective that computation waits for, including the wait
    unit        an FSDP unit's hooks, forward and backward, with its gathers and Python code
    reduction   a reduction of a unit's gradients; without it, each parameter is an operation
    counts      a wait of the host for the number of tokens per expert
    update      the optimizer's update of one parameter

A block is one graph. If its experts' dispatcher cannot be in a graph, it is CUT graphs with ROUTED
eager operations between them. `recompute.mode = "full"`, and every mode of an eager block, repeats
the calls of the forward. KERNELS, ROUTING and ROUTED are counted in a trace of the 16B mixture and
scaled to other models by their number of matmuls. Copies between host and device, data, logging and
the pipeline executor are not counted. Times per call are in the rows of `dtron.plan.hardware`,
which says how they were measured.
"""

from collections.abc import Mapping

from dtron.models.chunks import CHUNK, SPAN
from dtron.models.config import LayerKind
from dtron.parallelisms.expert.dispatchers import in_graphs
from dtron.plan.communication import collectives
from dtron.plan.compute_time import in_chunks, matmuls, repeated
from dtron.plan.hardware import HOST
from dtron.plan.parameters import NOT_LAYERS, joined_units, parameters, sizes, units
from dtron.plan.run_shape import Resolved, Stage

CALLS = tuple(name for name, _ in HOST)
CUT = 4
"""Graphs of a block with experts on other ranks: before dispatch, overlapped with dispatch, the
experts' elementwise part, and after combine."""
ROUTED = (32, 18)
"""Eager operations between the graphs of such a block in (forward, backward): sorting, message
sizes, matmuls of experts."""
KERNELS = (3, 6)
"""Kernels of a graph per matmul, including the matmul, in (forward, backward)."""
SCAN = {"delta": (CHUNK, 6, 15), "mamba": (CHUNK * SPAN, 12, 24)}
"""A recurrent layer's scan over the sequence: tokens of an iteration, and its eager operations in
the forward and in the backward, which scans twice."""
ROUTING = 39
"""Kernels of a router's forward: scores, choice, loads, order of token copies."""


def host_seconds(run: Resolved, rank: int, prices: Mapping[str, float]) -> float:
    """Return the seconds that the host of a pipeline rank needs to issue a step.

    `prices`: seconds per call, by kind.
    """
    return sum(prices.get(name, 0.0) * count for name, count in calls(run, rank).items())


def calls(run: Resolved, rank: int) -> dict[str, float]:
    """Count the calls of each kind in a pipeline rank's step.

    A CUDA graph is one call, after which the optimizer follows.
    """
    found = _launched(run, rank)
    if run.config.compile.cuda_graphs == "off":
        return found
    return dict.fromkeys(CALLS, 0.0) | {"graph": 1.0, "update": found["update"]}


def _launched(run: Resolved, rank: int) -> dict[str, float]:
    m = run.micro_batches
    reduces = run.times_reduced
    found: dict[str, float] = dict.fromkeys(CALLS, 0.0)
    for stage in run.stages_of(rank):
        every = [unit.kind for unit in units(run, stage)]
        separate = sum(run.separate_experts and run.kind(i).experts for i in stage.layers)
        hooks = len(joined_units(run, stage))
        found["unit"] += m * (hooks + separate)
        for hooked, keeps in ((hooks, run.keeps_dense), (separate, run.keeps_experts)):
            found["reduction"] += 0 if keeps else reduces * hooked
        layers = [(run.kind(i), i) for i in stage.layers]
        others = [(kind, None) for kind in every if kind in NOT_LAYERS]
        listed = [each for kind, i in (*others, *layers) for each in sizes(run, kind, i)]
        held = [each for each in listed if each.trained]
        kept = [run.keeps_experts if each.separate else run.keeps_dense for each in held]
        # Each gradient that is not reduced is cast or summed.
        found["operation"] += reduces * sum(kept)
        found["update"] += len(held)
        for name, count in _of_stage(run, stage).items():
            found[name] += m * count
    sent = collectives(run, rank)
    waited = ("tp", "cp", "ep", "loss", "step")
    found["collective"] += sum(c.count for c in sent if c.purpose in waited)
    return found


def _of_stage(run: Resolved, stage: Stage) -> dict[str, float]:
    """Count the calls of each kind per micro-batch in a stage's blocks and loss."""
    found: dict[str, float] = dict.fromkeys(CALLS, 0.0)
    alike: dict[tuple[bool, LayerKind, bool], dict[str, float]] = {}
    for of, index in run.blocks(stage):
        kind = of is run, of.kind(index), of.recomputes(index)
        if kind not in alike:
            alike[kind] = _of_layer(of, index)
        for name, count in alike[kind].items():
            found[name] += count
    if stage.head and run.config.compile.enable:
        found["graph"] += 2 * (1 + run.model.mtp)
    return found


def _of_layer(run: Resolved, layer: int) -> dict[str, float]:
    mixture, compiled = run.kind(layer).experts, run.config.compile.enable
    separate = run.experts["ep"] * run.experts["etp"] > 1
    leaves = mixture and separate and not in_graphs(run.config.parallel.dispatcher)
    again = run.recomputes(layer) and (run.config.recompute.mode == "full" or not compiled)
    whole = run.recomputes_whole(layer)
    forwards = 2 if again and whole else 1
    inside = [p for p in matmuls(run, run.kind(layer)) if not (leaves and p.module == "experts")]
    forward, backward = (each * len(inside) for each in KERNELS)
    kernels = forwards * (forward + ROUTING * mixture) + backward
    if again and not whole:
        kernels += KERNELS[0] * len(repeated(run, layer))
    if (chunks := run.ffn_chunks(layer)) > 1:
        first = sum(p.module == "ffn" for p in inside)
        kernels += (chunks - 1) * first * (forwards * KERNELS[0] + KERNELS[1])
        kernels += chunks * KERNELS[0] * len(in_chunks(run, layer))
    found = {"operation": 0.0, "counts": 0.0}
    if run.kind(layer).recurrent and run.model.delta_kernel == "torch":
        tokens, once, reverse = SCAN[run.kind(layer).mixer]
        operations = (2 if again else 1) * once + reverse
        found["operation"] += -(-run.config.train.seq_len // tokens) * operations
    if leaves:
        found["operation"] += forwards * ROUTED[0] + ROUTED[1]
        found["counts"] = forwards
    if not compiled:
        return {**found, "operation": found["operation"] + kernels}
    found["kernel"] = kernels
    found["graph"] = (CUT if leaves else 1) * (forwards + 1)
    if run.tp > 1:
        held = parameters(run, run.kind(layer))
        found["parameter"] = (forwards + 1) * sum(not (leaves and p.expert) for p in held)
    return found
