"""How many collectives tensor parallelism takes, and how many bytes."""

from dataclasses import replace

import pytest

from dtron.collectives import CollectiveCounter
from dtron.config import Parallel
from dtron.loss import VocabularyShard, cross_entropy_sum
from dtron.models import MODELS
from dtron.optim import build_optimizer
from dtron.parallelisms import Mesh
from dtron.parallelisms.apply import build_execution
from dtron.parallelisms.fsdp import Policy
from dtron.step import TrainStep, as_micro_batch
from tests.harness import run_ranks
from tests.parallelisms.parity import Case, build_loss, build_parallel, make_batch, micro_batches

Counts = dict[str, dict[str, int]]
"""{collective: {"count": n, "bytes": n}} on the tp axis."""
FLOAT = 4


def count_layers(case: Case) -> dict[str, Counts]:
    """On one rank: collectives of forward, loss and backward of one micro-batch."""
    config, layout = case.resolved()
    mesh = Mesh(tp=2)
    applied = build_parallel(case, config, layout, mesh)
    batch = make_batch(case, range(case.sequences), 0)
    tokens, others = as_micro_batch(batch)
    with counter(mesh) as forward:
        logits = applied.parts[0](tokens, **others)
    with counter(mesh) as of_loss:
        shard = VocabularyShard(config.vocab_size, mesh.rank("tp"), mesh.group("tp"))
        total = cross_entropy_sum(logits, batch.labels, shard)
    with counter(mesh) as backward:
        total.backward()
    found = {"forward": forward, "loss": of_loss, "backward": backward}
    return {name: made.table().get("tp", {}) for name, made in found.items()}


def count_accumulation(case: Case, axis: str = "tp") -> Counts:
    """On one rank: collectives of a step until its gradients are complete."""
    config, layout = case.resolved()
    mesh = Mesh(**case.config().degrees(case.world))
    applied = build_parallel(case, config, layout, mesh)
    optimizer = build_optimizer([p for _, p in applied.named_parameters()], case.config().optim)
    execution = build_execution(applied, layout, mesh, Policy.of(case.parallel, mesh))
    step = TrainStep(execution, applied, mesh, optimizer, build_loss(case, config, mesh), 1.0, None)
    with counter(mesh) as made:
        step.accumulate(micro_batches(case, mesh, 0), 0)
    return made.table().get(axis, {})


def counter(mesh: Mesh) -> CollectiveCounter:
    return CollectiveCounter(mesh.group_names())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_activations_of_a_layer(model: str, sequence_parallel: bool) -> None:
    """Two collectives each way, of the size of x, however long the rest of the model."""
    parallel = Parallel(tp=2, sequence_parallel=sequence_parallel)
    case = Case(model, 2, parallel, sequences=2)
    shallow, deep = ({**case.override, "n_layers": n} for n in (2, 5))
    few = run_ranks(2, count_layers, Case(model, 2, parallel, override=shallow, sequences=2))[0]
    many = run_ranks(2, count_layers, Case(model, 2, parallel, override=deep, sequences=2))[0]
    expected = {"all_gather": 2, "reduce_scatter": 2} if sequence_parallel else {"all_reduce": 2}
    size = 2 * case.seq_len * 24 * FLOAT
    for way in ("forward", "backward"):
        for name, of_many in many[way].items():
            of_few = few[way].get(name, {"count": 0, "bytes": 0})
            assert of_many["count"] - of_few["count"] == 3 * expected.get(name, 0), (way, name)
            assert of_many["bytes"] - of_few["bytes"] == 3 * expected.get(name, 0) * size
        assert expected.keys() <= many[way].keys()


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_never_gathered(model: str) -> None:
    """The loss moves three numbers a token: the maximum, the sum and the label's logit."""
    case = Case(model, 2, Parallel(tp=2), sequences=2, override={"n_layers": 1})
    counts = run_ranks(2, count_layers, case)[0]
    numbers = 2 * case.seq_len
    assert counts["loss"] == {"all_reduce": {"count": 2, "bytes": 3 * numbers * FLOAT}}
    largest = max(numbers * 24, 67 * 24) * FLOAT  # hidden states; no gradient of a matrix either
    for way in ("forward", "backward"):
        for name, figures in counts[way].items():
            assert figures["bytes"] <= figures["count"] * largest, (way, name)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_of_replicated_parameters_are_reduced_once(
    model: str, sequence_parallel: bool
) -> None:
    """One all-reduce a step, however many micro-batches; none where each rank has the whole."""
    counts: list[dict[str, int]] = []
    for n in (1, 2, 4):
        parallel = Parallel(tp=2, sequence_parallel=sequence_parallel)
        case = Case(model, 2, parallel, sequences=n, override={"n_layers": 2})
        found = run_ranks(2, count_accumulation, case)[0]
        counts.append({name: figures["count"] for name, figures in found.items()})
    # Without sequence parallelism only QK norms see a part: that of the rank's heads.
    once = int(sequence_parallel or model == "qwen3")
    for name, one in counts[0].items():
        extra = once if name == "all_reduce" else 0
        assert [each[name] - extra for each in counts] == [n * (one - extra) for n in (1, 2, 4)]


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
