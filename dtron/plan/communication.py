"""Collectives of a rank's step: kind, number, size, mesh axis and link.

Sizes are defined as in `dtron.run.collective_counter`: the larger of a rank's input and output.
tests/plan/test_communication.py compares some collectives with real runs; tests/plan/test_exact.py
compares the collectives of all axes with traces of the real code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtron.config import DEGREES, Degree
from dtron.kernels.float8_rows import wire_bytes
from dtron.lora.adapters import FACTORS
from dtron.lora.dora import MAGNITUDE
from dtron.models.config import DecoderConfig, LayerKind
from dtron.parallelisms.expert.hierarchical import room_of
from dtron.parallelisms.mesh import FSDP_AXES, LOSS_AXES, MICRO_AXES, TOKEN_AXES
from dtron.plan import activations, muon
from dtron.plan.hardware import Hardware
from dtron.plan.parameters import (
    Unit,
    gathered_bytes,
    held,
    parameters,
    sizes,
    split_by_unit,
    units,
)
from dtron.plan.run_shape import Resolved, Stage, expert_room, expert_rows


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size in a pipeline rank's step, with their number."""

    axis: str
    kind: str
    size: float
    """Bytes of each collective."""
    count: float
    purpose: str
    """fsdp, tp, cp, ep, pp, loss, or step (small, once per step)."""
    ranks: int
    inside: int
    """Number of the group's ranks in one NVLink domain."""

    @property
    def link(self) -> str:
        """The slowest link of the group: nvlink or network."""
        return "nvlink" if self.inside >= self.ranks else "network"

    def seconds(self, hardware: Hardware) -> float:
        """Total seconds of the `count` collectives, one after another."""
        return self.count * hardware.collective(self.kind, self.size, self.ranks, self.inside)


def group(run: Resolved, axes: Sequence[str], domain: int) -> tuple[int, int]:
    """Return the size of a group over adjacent mesh axes: (ranks, ranks in one NVLink domain).

    A domain has `domain` GPUs.
    """
    stride = 1
    for axis in reversed(DEGREES):
        if axis in axes:
            break
        stride *= run.degrees[axis]
    ranks = 1
    for axis in axes:
        ranks *= run.degrees[axis]  # type: ignore[index]
    return ranks, max(1, min(ranks, domain // stride))


def expert_group(run: Resolved, axis: str, domain: int) -> tuple[int, int]:
    """Return the size of a group of the expert mesh: (ranks, ranks in one NVLink domain).

    axis "ep": ep x etp ranks, which exchange token copies; "edp_shard": ranks that shard experts.
    """
    ep_etp = run.experts["ep"] * run.experts["etp"]
    if axis == "ep":
        return ep_etp, min(ep_etp, domain)
    ranks = run.experts["edp_shard"]
    return ranks, max(1, min(ranks, domain // ep_etp))


def ranks_per_host(run: Resolved, domain: int) -> int:
    """Return the number of ep x etp ranks in a host, for the dispatcher "hierarchical"."""
    inner = run.config.parallel.ep_inner * run.experts["etp"]
    return inner or expert_group(run, "ep", domain)[1]


def sharing(run: Resolved, domain: int) -> Iterator[tuple[str, int, int]]:
    """Yield what FSDP shards over which ranks: (what, ranks, ranks in one domain).

    `what` is "parameters" or "experts"; a domain has `domain` GPUs.
    """
    yield "parameters", *group(run, FSDP_AXES, domain)
    if run.model.n_experts and run.separate_experts:
        yield "experts", *expert_group(run, "edp_shard", domain)


def collectives(run: Resolved, rank: int, domain: int = 8) -> list[Collective]:
    """List the collectives of a pipeline rank's step.

    Args:
        domain: number of GPUs per NVLink domain.
    """
    found: list[Collective] = []
    for stage in run.stages_of(rank):
        found += _fsdp(run, stage, domain)
        found += activation_collectives(run, stage, domain)
        found += _pipeline(run, stage, domain)
    found += _step(run, rank, domain)
    found += muon_collectives(run, rank, domain)
    return [c for c in found if c.ranks > 1 and c.count and c.size]


def activation_collectives(run: Resolved, stage: Stage, domain: int) -> list[Collective]:
    """List the collectives that a stage's computation waits for: those of tp, cp and ep."""
    found = list(_tensor(run, stage, domain)) if run.tp > 1 else []
    found += _context(run, stage, domain) if run.degrees["cp"] > 1 else []
    found += _experts(run, stage, domain)
    if stage.embedding and run.encoder is not None:
        found += _encoder(run, run.encoder, domain)
    return [c for c in found if c.ranks > 1 and c.count and c.size]


def _fsdp(run: Resolved, stage: Stage, domain: int) -> Iterator[Collective]:
    listed = units(run, stage)
    joined = list(split_by_unit(run, stage, listed))
    by_all_to_all = run.config.parallel.reduce_by == "all_to_all"
    for place, blocks in enumerate(joined):
        times = gathers(run, blocks[0], place == len(joined) - 1)
        for axis, shard, sent, (ranks, inside) in _shared(run, blocks, domain):
            padded = shard * ranks  # elements with a gradient
            yield Collective(axis, "all_gather", sent * ranks, times, "fsdp", ranks, inside)
            kind = "all_to_all" if by_all_to_all else "reduce_scatter"
            size = padded * (run.element if by_all_to_all else run.reduce_element)
            yield Collective(axis, kind, size, run.times_reduced, "fsdp", ranks, inside)
            copies, near = group(run, ("dp_replicate",), domain)
            size = shard * run.reduce_element
            yield Collective("dp_replicate", "all_reduce", size, 1, "fsdp", copies, near)


def gathers(run: Resolved, unit: Unit, last: bool) -> int:
    """Return the number of all-gathers of a unit per step.

    The number is 1 if weights stay gathered for the step; else 2 per micro-batch, but 1 per
    micro-batch for the root unit, a frozen embedding and, without a pipeline, for the last unit.
    """
    if run.policy.keep_gathered:
        return 1
    if unit.kind == "embedding" and run.frozen:
        return run.micro_batches
    stays = unit.name == "root" or (run.layout is None and last)
    return run.micro_batches * (1 if stays else 2)


def _name(run: Resolved, axes: Sequence[Degree]) -> str:
    return "+".join(axis for axis in axes if run.degrees[axis] > 1)


def _shared(
    run: Resolved, blocks: Sequence[Unit], domain: int
) -> Iterator[tuple[str, int, int, tuple[int, int]]]:
    """Yield (axis, elements of a shard that have a gradient, bytes of the shard in an all-gather,
    result of `group`).

    One item is for the dense part of an FSDP unit, and one for each block's experts on a separate
    mesh.
    """
    each = sum(blocks[1:], blocks[0])
    (_, dense), _ = gathered_bytes(run, each)
    (_, trained), _ = each.gradients
    yield _name(run, FSDP_AXES), trained, dense, group(run, ("dp_shard", "cp"), domain)
    for block in blocks:
        if block.experts_gathered:
            (_, experts), (_, trained) = gathered_bytes(run, block)[1], block.gradients[1]
            yield "edp_shard", trained, experts, expert_group(run, "edp_shard", domain)


def _tensor(run: Resolved, stage: Stage, domain: int) -> Iterator[Collective]:
    ranks, inside = group(run, ("tp",), domain)
    m, split, model = run.micro_batches, run.between > 1, run.model
    token = run.tokens * run.element
    # Selective recomputation keeps matmul results, so it repeats no collective fused with a matmul.
    repeats = not (run.config.parallel.async_tp and run.config.recompute.mode == "selective")

    def made(kind: str, width: float, count: float) -> Collective:
        return Collective("tp", kind, width * token, count * m, "tp", ranks, inside)

    def both(kind: LayerKind, layers: Sequence[int], again: int) -> Iterator[Collective]:
        """Yield the collectives that gather inputs and reduce outputs in forward and backward.

        Those of the backward mirror those of the forward. `again`: number of layers whose backward
        recomputes all matmuls, except the last if no gradient needs its result.
        """
        times = len(layers)
        widths_in, widths_out = _widths(run, kind)
        size_in, size_out = (_share_gathered(run, layers, names) for names in _ends(kind))
        # Attention's output; also that of a feed-forward layer which a post-norm or scalar reads,
        # and with experts, which are combined after them, that of shared experts.
        chunks = run.ffn_chunks(layers[0])  # the last input and output are the feed-forward's
        last = kind.experts or (chunks == 1 and _reads_last(model))
        repeated = widths_out if last else widths_out[:1] if kind.mixer and kind.ffn else []
        if not split:
            yield made("all_reduce", model.dim, times * 2 * len(widths_out) + again * len(repeated))
            return
        again_in_chunks = _again_in_chunks(run, again)
        for place, width in enumerate(widths_in, 1 - len(widths_in)):
            n = 1 if place else chunks
            more = again if n == 1 else n * times + again_in_chunks
            yield made("all_gather", width * size_in / n, n * times + more)
            yield made("reduce_scatter", width / n, n * times)
        for place, width in enumerate(widths_out, 1 - len(widths_out)):
            n = 1 if place else chunks
            yield made("reduce_scatter", width / n, n * times)
            yield made("all_gather", width * size_out / n, n * times)
        for width in repeated:
            yield made("reduce_scatter", width, again)
        yield made("reduce_scatter", model.dim / chunks, again_in_chunks)

    yield from _shared_heads(run, stage, domain)
    for kind, size, count in _adapters(run, stage, repeats):
        yield Collective("tp", kind, size, count * m, "tp", ranks, inside)
    for kind in dict.fromkeys(run.kind(i) for i in stage.layers):
        layers = [i for i in stage.layers if run.kind(i) == kind]
        yield from both(kind, layers, sum(run.recomputes_whole(i) for i in layers) * repeats)
    name, other = ("reduce_scatter", "all_gather") if split else ("all_reduce", "")
    if stage.embedding:
        yield made(name, model.dim, 1)
        trained = not run.frozen  # a frozen embedding needs no gradient of its output
        yield made(other, model.dim, 1 if other and trained else 0)
    if stage.head:
        predictions = 1 + model.mtp  # the head takes those of all at once
        yield made(name, model.dim * predictions, 1)
        yield made(other, model.dim * predictions, 1 if other else 0)
        yield made(name, model.dim * model.mtp, 1)  # embeddings for MTP
        yield made(other, model.dim * model.mtp, 1 if other and not run.frozen else 0)
        rounds = 2 * run.config.train.loss_chunks
        size = 6 * run.tokens * 4 / rounds / 2  # float32: per token a maximum, then two sums
        yield Collective("tp", "all_reduce", size, rounds * m * predictions, "loss", ranks, inside)


def _encoder(run: Resolved, encoder: Resolved, domain: int) -> Iterator[Collective]:
    """Yield the collectives inside the encoder, and those that gather its outputs."""
    m, size = run.micro_batches, float(encoder.tokens * run.model.dim * run.element)
    axes: tuple[tuple[Degree, bool], ...] = (("tp", run.between > 1), ("cp", True))
    if encoder.tp > 1:
        layers = tuple(range(run.model.vision_layers))
        yield from _tensor(encoder, Stage(0, 0, False, layers, False), domain)
        ranks, inside = group(run, ("tp",), domain)
        # The projector's output; the gradient of its input, and that of partly read outputs.
        yield Collective("tp", "all_reduce", size, m, "tp", ranks, inside)
        backward = (activations.boundary(encoder), size if run.between > 1 else 0.0)
        for n_bytes in backward if not run.frozen else ():
            yield Collective("tp", "all_reduce", n_bytes, m, "tp", ranks, inside)
    for axis, partial in axes[encoder.tp > 1 :]:
        ranks, inside = group(run, (axis,), domain)
        size *= ranks
        for kind in ("all_gather", "reduce_scatter")[: 1 + (partial and not run.frozen)]:
            yield Collective(axis, kind, size, m, axis, ranks, inside)


def _again_in_chunks(run: Resolved, blocks: int) -> int:
    """Return how many feed-forwards of a chunk the recomputation of `blocks` blocks computes.

    It stops before the last chunk, which is computed by its own recomputation only, unless the
    block reads the last one's output. A compiled backward computes each chunk once for both.
    """
    config, chunks = run.config, run.config.recompute.ffn_chunks
    if chunks == 1:
        return 0
    if config.compile.enable:
        return blocks * chunks if config.recompute.mode == "full" else 0
    return blocks * (chunks if _reads_last(run.model) else chunks - 1)


def _reads_last(model: DecoderConfig) -> bool:
    """Whether a block's backward reads the output of its feed-forward layer, recomputed."""
    return model.sandwich_norms or model.layer_scalars


def _shared_heads(run: Resolved, stage: Stage, domain: int) -> Iterator[Collective]:
    """Yield the all-gathers of key/value heads that several tp ranks share.

    Also yield the reduce-scatters of the gradients of these heads.
    """
    of_kind: dict[LayerKind, list[int]] = {}
    for layer in stage.layers:
        of_kind.setdefault(run.kind(layer), []).append(layer)
    for kind, layers in of_kind.items():
        model = run.model.of_layer(kind)
        n_heads = model.n_kv_heads
        if kind.mixer != "attention" or model.kv_lora_rank or run.tp <= n_heads:
            continue
        ranks = run.tp // n_heads
        axis = "tp" if n_heads == 1 else "tp_inner"
        size = float(model.head_size * run.tokens * run.element)
        again = sum(run.recomputes(i, "attn") for i in layers)
        for name, times in (("all_gather", again), ("reduce_scatter", 0)):
            count = (len(layers) + times) * run.micro_batches * (1 if model.keys_as_values else 2)
            yield Collective(axis, name, size, count, "tp", ranks, min(ranks, domain))


def _adapters(run: Resolved, stage: Stage, repeats: bool) -> Iterator[tuple[str, float, float]]:
    """Yield (kind, bytes, number) of the collectives over tp of adapters in each micro-batch.

    With DoRA, the norms of rows of each matrix whose columns tp splits, and with async TP the
    product of A and the input.

    Args:
        repeats: whether a recomputed layer repeats collectives of its matmuls.
    """
    narrow = float(run.config.lora.rank * run.tokens * run.element)
    for layer in stage.layers:
        listed = parameters(run, run.kind(layer), layer)
        splits = {each.name.removesuffix(".weight"): each.split for each in listed}
        for each in listed:
            module, _, name = each.name.rpartition(".")
            again = run.recomputes(layer, module.partition(".")[0])
            if name == MAGNITUDE and splits[module] == 1:
                yield "all_reduce", each.shape[0] * max(4.0, run.element), 1 + again
            if name == FACTORS[0] and run.config.parallel.async_tp and splits[module] is not None:
                ahead, back = ("all_gather", "reduce_scatter")[:: -1 if splits[module] else 1]
                yield ahead, narrow, 1 + (again and repeats)
                yield back, narrow, 1


def _ends(kind: LayerKind) -> tuple[list[str], list[str]]:
    """Return the modules of a block that gather over tp: (modules that gather their input, modules
    that gather the gradient of their output)."""
    mixer = kind.mixer.replace("attention", "attn")
    inward, outward = ([mixer], [f"{mixer}.wo"]) if mixer else ([], [])
    return ([*inward, "ffn"], [*outward, "ffn.down"]) if kind.ffn else (inward, outward)


def _share_gathered(run: Resolved, layers: Sequence[int], names: Sequence[str]) -> float:
    """Return the bytes that the modules `names` of `layers` gather over tp, as a fraction.

    The fraction is relative to the bytes that these modules gather without float8.
    """
    small = run.float8.communicated if run.float8 else frozenset()
    found = [f"blocks.{i}.{name}" in small for i in layers for name in names]
    return sum(1 / run.element if one else 1.0 for one in found) / len(found)


def _widths(run: Resolved, kind: LayerKind) -> tuple[list[int], list[int]]:
    """Return (gathered, reduced): elements per token of each collective over tp.

    Only collectives in a layer's forward count.
    """
    model = run.model
    inward, outward = ([model.dim], [model.dim]) if kind.mixer else ([], [])
    if kind.mixer and model.kv_lora_rank:
        inward = [model.q_lora_rank or model.dim, model.kv_lora_rank, model.rope_head_dim]
    if kind.ffn == "dense" or (kind.experts and model.n_shared_experts):
        return [*inward, model.dim], [*outward, model.dim]
    return inward, outward


def _context(run: Resolved, stage: Stage, domain: int) -> Iterator[Collective]:
    """Yield the collectives of context parallelism.

    They exchange keys and values; those of Ulysses also exchange queries and outputs. Gradients of
    keys and values are float32, except in the all-to-alls of Ulysses.
    """
    cp = run.degrees["cp"]
    ranks, inside = group(run, ("cp",), domain)
    m = run.micro_batches
    for layer in stage.layers:
        model = run.model.of_layer(run.kind(layer))
        kv = 2 * model.local_kv_heads(run.tp) * model.head_size * run.tokens
        q = 2 * model.n_heads * model.head_size // run.tp * run.tokens
        if (mixer := run.kind(layer).mixer) != "attention":
            again = int(run.recomputes(layer, mixer))
            for width in _exchanged(model, mixer):
                size = float(width // run.tp * run.tokens * run.element)
                yield Collective("cp", "all_to_all", size, (2 + again) * m, "cp", ranks, inside)
            continue
        shape = run.context(layer)
        again = int(run.recomputes(layer, "attn"))
        times = 2 if again and run.config.recompute.mode == "full" else 1
        if shape.inner > 1:
            # Recompute modes that keep attention's output still repeat the all-to-alls.
            near = min(shape.inner, inside)
            for width in (q / 2 + kv, q / 2):  # queries, keys and values; attention's output
                size, count = float(width * run.element), (2 + again) * m
                yield Collective("cp", "all_to_all", size, count, "cp", shape.inner, near)
        if run.exchanges_halos(layer):
            size = kv / run.tokens * run.halo(layer) / shape.inner
            near = max(1, inside // shape.inner)
            for width, count in ((run.element, times + 1), (4, 1)):
                each = float(size * width)
                yield Collective("cp", "all_to_all", each, count * m, "cp", shape.outer, near)
        elif shape.rings:
            hops = shape.outer - 1
            yield Collective(
                "cp", "send", kv * run.element, (times + 1) * hops * m, "cp", ranks, inside
            )
            yield Collective("cp", "send", kv * 4.0, shape.outer * m, "cp", ranks, inside)
        elif shape.gathers:
            size = float(kv * run.element * cp)
            yield Collective("cp", "all_gather", size, (times + 1) * m, "cp", ranks, inside)
            size = float(kv * 4 * cp)
            yield Collective("cp", "reduce_scatter", size, m, "cp", ranks, inside)


def _exchanged(model: DecoderConfig, mixer: str) -> tuple[int, ...]:
    """Return the elements per token of inputs and outputs of a recurrent layer's states."""
    if mixer == "delta":
        heads, outputs = model.delta_value_heads, model.delta_value_heads * model.delta_value_dim
        return model.delta_channels + 2 * heads, outputs
    heads, outputs = model.mamba_heads, model.mamba_heads * model.mamba_head_dim
    return (model.mamba_channels + heads, outputs) if mixer else ()


def _experts(run: Resolved, stage: Stage, domain: int) -> Iterator[Collective]:
    """Yield the collectives of expert parallelism in forward and backward.

    These are the exchange of token counts, dispatch and combine.
    """
    layers = [i for i in stage.layers if run.kind(i).experts]
    again = sum(run.recomputes_whole(i) for i in layers)
    ranks, inside = expert_group(run, "ep", domain)
    rows, dim = expert_rows(run), run.model.dim
    count = (2 * len(layers) + again) * run.micro_batches
    times = (len(layers) + again) * run.micro_batches
    name = "+".join(axis for axis in ("ep", "etp") if run.experts[axis] > 1)
    element = dim * run.element
    if run.config.parallel.dispatcher == "hierarchical":
        name, ranks = "ep_inner", ranks_per_host(run, domain)
        inside = min(ranks, inside)
        yield from _between_hosts(run, ranks, count, times)
    fixed = run.config.parallel.dispatcher == "bounded_all_to_all"
    padded = expert_room(run) / run.experts["etp"] if fixed else 1.0
    for row in (wire_bytes(dim) if run.config.float8.dispatch else element, element):
        yield Collective(name, "all_to_all", float(rows * row) * padded, count, "ep", ranks, inside)
    sizes = 8.0 * run.model.n_experts * run.experts["etp"]  # int64: number of tokens to receive
    yield Collective(name, "all_to_all", sizes, times, "ep", ranks, inside)
    yield from _balance(run, times, domain)


def _between_hosts(run: Resolved, inside: int, count: int, times: int) -> Iterator[Collective]:
    """Yield the all-to-alls of tokens between hosts, of the dispatcher "hierarchical".

    Args:
        inside: ranks per host.
        count, times: calls in forward, backward and recomputation; without backward.
    """
    k = run.model.experts_per_token
    hosts = run.experts["ep"] * run.experts["etp"] // inside
    n_tokens = -(-run.tokens // run.between)
    room = room_of(n_tokens, k, hosts, run.config.parallel.ep_capacity)
    tokens = float(hosts * min(n_tokens, room))
    weights, experts = 4 * k, 4 * k  # float32, int32
    sent = ((run.model.dim * run.element, 2 * count), (weights, count), (experts, times))
    for size, calls in sent:
        yield Collective("ep_outer", "all_to_all", tokens * size, calls, "ep", hosts, 1)


def _balance(run: Resolved, times: int, domain: int) -> Iterator[Collective]:
    """Yield the all-reduces of router losses.

    They sum expert loads over ranks and, with padding, the numbers of tokens over which the z-loss
    is averaged.
    """
    padded = run.config.data.packing != "cut"
    if not (run.model.balance_coefficient or (padded and run.model.z_loss)):
        return
    whole = run.model.balance == "global_batch"
    rows = 1 if whole else run.config.train.micro_batch
    axes = TOKEN_AXES if whole else MICRO_AXES
    ranks, inside = group(run, axes, domain)
    size = 8.0 * rows * (run.model.n_experts + padded)
    yield Collective(_name(run, axes), "all_reduce", size, times, "step", ranks, inside)


def _pipeline(run: Resolved, stage: Stage, domain: int) -> Iterator[Collective]:
    """Yield the sends of a pipeline stage to stages on other ranks.

    Hidden states are sent to the next stage, gradients to the previous stage.
    """
    ranks, inside = group(run, ("pp",), domain)
    for other in (stage.index - 1, stage.index + 1):
        if 0 <= other < len(run.stages) and run.stages[other].rank != stage.rank:
            size = activations.boundary(run)
            yield Collective("pp", "send", size, run.micro_batches, "pp", ranks, inside)


def _step(run: Resolved, rank: int, domain: int) -> Iterator[Collective]:
    """Yield the collectives that run once per step.

    They exchange the number of labels, partial gradients of tp ranks, gradients of tied weights,
    the gradient norm, whether experts dropped tokens, and expert loads for router biases.
    """
    found: list[tuple[Sequence[Degree], str, float]] = [
        (LOSS_AXES, "all_reduce", 8.0 * (1 + run.model.mtp)),
        (("tp",), "all_reduce", 4.0 * sum(u.partial_shard for u in held(run, rank))),
        (("pp",), "send", _tied(run, rank)),
        (DEGREES, "all_reduce", 4.0),
    ]
    if run.config.parallel.bounded and run.experts["ep"] * run.experts["etp"] > 1:
        found.append((DEGREES, "all_reduce", 8.0))
    layers = [i for stage in run.stages_of(rank) for i in stage.layers if run.kind(i).experts]
    if layers:
        found.append((TOKEN_AXES, "all_reduce", 8.0 * len(layers) * run.model.n_experts))
    for axes, kind, size in found:
        ranks, inside = group(run, axes, domain)
        yield Collective(_name(run, axes), kind, size, 1, "step", ranks, inside)
    etp, size = run.experts["etp"], 4.0 * sum(u.partial_experts_shard for u in held(run, rank))
    yield Collective("etp", "all_reduce", size, 1, "step", etp, min(etp, domain))


def muon_collectives(run: Resolved, rank: int, domain: int) -> Iterator[Collective]:
    """Yield the exchanges of Muon's update: shards to the owners of matrices, and back."""
    names = {"fsdp": FSDP_AXES, "tp": ("tp",), "dp_replicate": ("dp_replicate",)}
    for batch in muon.batches(run, rank):
        size = 2.0 * batch.elements / batch.calls
        for axis, ranks in batch.axes.items():
            if axis in names:
                inside, name = group(run, names[axis], domain)[1], _name(run, names[axis])
            else:
                name = axis
                inside = expert_group(run, axis, domain)[1] if axis != "etp" else min(ranks, domain)
            kind, times = ("all_gather", 1) if axis == "dp_replicate" else ("all_to_all", 2)
            yield Collective(name, kind, size, times * batch.calls, "step", ranks, inside)


def _tied(run: Resolved, rank: int) -> float:
    """Bytes of gradients that a rank exchanges for weights that two stages hold.

    Such a weight is that of the token embedding, which a tied head or multi-token prediction reads.
    """
    if not (run.model.tied or run.model.mtp) or run.frozen:
        return 0.0
    holders = {stage.rank for stage in run.stages if stage.embedding or stage.head}
    if rank not in holders or len(holders) == 1:
        return 0.0
    listed = zip(parameters(run, "embedding"), sizes(run, "embedding"), strict=True)
    return sum(4.0 * each.shard for parameter, each in listed if parameter.name == "embed.weight")
