"""How many collectives tensor parallelism takes, and how many bytes."""

from dataclasses import replace

import pytest
import torch

from dtron.config import Parallel
from dtron.models import MODELS
from dtron.parallelisms import Mesh
from dtron.parallelisms.gradients import local_part
from dtron.plan.communication import muon_collectives
from dtron.plan.run_shape import Resolved
from dtron.run.collective_counter import CollectiveCounter
from dtron.training.loss import VocabularyShard, sequence_losses
from dtron.training.optim import build_optimizer, update
from dtron.training.step import TrainStep, as_micro_batch
from tests.harness import run_ranks
from tests.parallelisms.parity import (
    DENSE,
    Case,
    build_parallel,
    connect,
    make_batch,
    mesh_of,
    micro_batches,
)

Counts = dict[str, dict[str, int]]
"""{collective: {"count": n, "bytes": n}} on the tp axis."""
FLOAT = 4


def count_layers(case: Case) -> dict[str, Counts]:
    """On one rank: collectives of forward, loss and backward of one micro-batch."""
    config, layout = case.resolved()
    mesh = mesh_of(case)
    applied = build_parallel(case, config, layout, mesh)
    batch = make_batch(case, range(2), 0)
    tokens, others = as_micro_batch(batch)
    with counter(mesh) as forward:
        logits = applied.parts[0](tokens, **others)
    with counter(mesh) as of_loss:
        shard = VocabularyShard(config.vocab_size, mesh.rank("tp"), mesh.group("tp"))
        total = sequence_losses(logits, batch.labels, shard).sum()
    with counter(mesh) as backward:
        total.backward()
    found = {"forward": forward, "loss": of_loss, "backward": backward}
    return {name: made.table().get("tp", {}) for name, made in found.items()}


def count_accumulation(case: Case, axis: str = "tp") -> Counts:
    """On one rank: collectives of a step until its gradients are complete."""
    config, layout = case.resolved()
    mesh = mesh_of(case)
    applied = build_parallel(case, config, layout, mesh)
    optimizer = build_optimizer(applied.named_parameters(), case.config().optim)
    model = connect(case, applied, config, layout, mesh)
    plan = case.plan()
    if plan is not None and (refresh := plan.gather_weights(applied, mesh)):
        refresh()
    step = TrainStep(model, optimizer, 1.0)
    with counter(mesh) as made:
        step.accumulate(micro_batches(case, mesh, 0), 0)
    return made.table().get(axis, {})


def split(model: str, sequences: int, whole_sequence: bool = False, **override: int) -> Case:
    """A case with tp = 2, and `sequences` micro-batches a rank. Experts, which tp ranks share, need
    others beside, or the two would have one group."""
    others = 1 if model in DENSE else 2
    parallel = Parallel(tp=2, dp_shard=others, sequence_parallel=not whole_sequence)
    sequences *= others
    return Case(model, 2 * others, parallel, override=override, sequences=sequences)


def counter(mesh: Mesh) -> CollectiveCounter:
    return CollectiveCounter(mesh.group_names())


X = 24
WHOLE = {"all_reduce": [X, X]}
SPLIT = {"all_gather": [X, X], "reduce_scatter": [X, X]}
LATENT = [16, 12, 4, X]  # of queries, of keys and values, the key of all heads; shared experts
# What a layer moves a token, forward and backward: the width of each collective. A router sees the
# tokens of its rank alone, and experts that are on every tp rank move none.
WIDTHS: dict[tuple[str, bool], tuple[dict[str, list[int]], ...]] = {
    **{(model, True): (WHOLE, WHOLE) for model in DENSE},
    **{(model, False): (SPLIT, SPLIT) for model in DENSE},
    **{
        (model, False): ({"all_gather": [X], "reduce_scatter": [X]},) * 2
        for model in ("mixtral", "qwen3_moe", "gpt_oss")
    },
    ("deepseek_v3", False): (
        {"all_gather": LATENT, "reduce_scatter": [X, X]},
        {"all_gather": [X, X], "reduce_scatter": LATENT},
    ),
}


@pytest.mark.parametrize(("model", "whole_sequence"), WIDTHS)
def test_activations_of_a_layer(model: str, whole_sequence: bool) -> None:
    """Few collectives each way, of the size of x or less, however long the rest of the model."""
    more = {"first_dense_layers": 1, "n_shared_experts": 1} if model == "deepseek_v3" else {}
    cases = [split(model, 2, whole_sequence, n_layers=n, **more) for n in (2, 5)]
    # In processes of their own: torch's caches give a second mesh the groups of an equal first one.
    few, many = (run_ranks(case.world, count_layers, case)[0] for case in cases)
    tokens = 2 * cases[0].seq_len
    for way, widths in zip(("forward", "backward"), WIDTHS[model, whole_sequence], strict=True):
        for name, of_many in many[way].items():
            of_few = few[way].get(name, {"count": 0, "bytes": 0})
            expected = widths.get(name, [])
            assert of_many["count"] - of_few["count"] == 3 * len(expected), (way, name)
            assert of_many["bytes"] - of_few["bytes"] == 3 * sum(expected) * tokens * FLOAT
        assert widths.keys() <= many[way].keys()


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_never_gathered(model: str) -> None:
    """The loss moves three numbers a token: the maximum, the sum and the label's logit."""
    override = {"first_dense_layers": 0, "ffn_dim": 0} if model == "deepseek_v3" else {}
    override |= {"encoder_layers": 1} if model == "t5" else {}
    n_layers = {"t5": 2, "nemotron_h": 4}.get(model, 1)  # one of each kind
    case = split(model, 2, False, n_layers=n_layers, **override)
    counts = run_ranks(case.world, count_layers, case)[0]
    numbers = 2 * case.seq_len
    assert counts["loss"] == {"all_reduce": {"count": 2, "bytes": 3 * numbers * FLOAT}}
    largest = max(numbers * 24, 67 * 24) * FLOAT  # hidden states; no gradient of a matrix either
    for way in ("forward", "backward"):
        for name, figures in counts[way].items():
            assert figures["bytes"] <= figures["count"] * largest, (way, name)


@pytest.mark.parametrize(("model", "whole_sequence"), WIDTHS)
def test_gradients_of_replicated_parameters_are_reduced_once(
    model: str, whole_sequence: bool
) -> None:
    """One all-reduce a step, however many micro-batches; none where each rank has the whole."""
    more = {"first_dense_layers": 1} if model == "deepseek_v3" else {}
    cases = [split(model, n, whole_sequence, n_layers=2, **more) for n in (1, 3)]
    found = [run_ranks(case.world, count_accumulation, case)[0] for case in cases]
    counts = [{name: figures["count"] for name, figures in each.items()} for each in found]
    # Without sequence parallelism only QK norms see a part: that of the rank's heads.
    once = int(not whole_sequence or model == "qwen3")
    for name, one in counts[0].items():
        extra = once if name == "all_reduce" else 0
        assert [each[name] - extra for each in counts] == [one - extra, 3 * (one - extra)]


def test_chunks_of_the_loss_share_one_gather_and_one_reduction() -> None:
    """Two rounds of all-reduce a chunk; hidden states and weights travel as they do at once."""
    for parallel, axis in ((Parallel(tp=2), "tp"), (Parallel(dp_shard=2), "dp_shard")):
        case = Case("llama", 2, parallel, sequences=2)
        at_once = run_ranks(2, count_accumulation, case, axis)[0]
        chunked = run_ranks(2, count_accumulation, replace(case, loss_chunks=4), axis)[0]
        micro_batches = 2 if axis == "tp" else 1
        more = {"all_reduce": 2 * 3 * micro_batches} if axis == "tp" else {}
        assert chunked.keys() == at_once.keys()
        for name, figures in chunked.items():
            assert figures["count"] == at_once[name]["count"] + more.get(name, 0), name
            assert figures["bytes"] == at_once[name]["bytes"], name


def count_update(case: Case) -> tuple[dict[str, Counts], int]:
    """On one rank: collectives of Muon's update by axis, and elements of this rank's matrices."""
    config, layout = case.resolved()
    mesh = mesh_of(case)
    applied = build_parallel(case, config, layout, mesh)
    hidden = MODELS[case.model].is_hidden_matrix
    named = list(applied.named_parameters())
    optimizer = build_optimizer(named, case.config().optim, hidden)
    for _, p in named:
        p.grad = torch.ones_like(p)
    with counter(mesh) as made:
        update(optimizer, torch.tensor(1.0), 0.1)
    return made.table(), sum(local_part(p).numel() for n, p in named if hidden(n, p.dim()))


@pytest.mark.parametrize(
    ("parallel", "calls"),
    [
        # batches of equal matrices: wq and wo, wk and wv, gate and up, down; tp splits wq otherwise
        (Parallel(dp_shard=2), {"dp_shard": ("all_to_all", 2 * 4, 2)}),
        (
            Parallel(dp_shard=2, tp=2),
            {"dp_shard": ("all_to_all", 2 * 5, 2), "tp": ("all_to_all", 2 * 5, 2)},
        ),
        (Parallel(dp_replicate=2, dp_shard=1), {"dp_replicate": ("all_gather", 4, 1)}),
    ],
    ids=["fsdp", "fsdp and tp", "replicas"],
)
def test_muon_sends_shards_once_to_the_owners_and_once_back(
    parallel: Parallel, calls: dict[str, tuple[str, int, int]]
) -> None:
    """In bfloat16; of the axes that share a matrix, each does so."""
    world = parallel.dp_replicate * parallel.dp_shard * parallel.tp
    case = Case("llama", world, parallel, override={"n_layers": 4}, optimizer="muon")
    for found, elements in run_ranks(world, count_update, case):
        assert found == {
            axis: {name: {"count": count, "bytes": times * 2 * elements}}
            for axis, (name, count, times) in calls.items()
        }
        planned: dict[str, Counts] = {}
        for each in muon_collectives(Resolved.of(case.config(), world), 0, 8):
            of_axis = planned.setdefault(each.axis, {})
            total = of_axis.setdefault(each.kind, {"count": 0, "bytes": 0})
            total["count"] += int(each.count)
            total["bytes"] += int(each.count * each.size)
        assert planned == found
