"""What float8 communication sends, counted, and what is refused since it would send nothing."""

from typing import Any

import pytest

from dtron.config import Float8, Parallel, Recompute
from dtron.errors import ConfigError
from dtron.parallelisms import Mesh
from dtron.run.collective_counter import CollectiveCounter
from dtron.training.optim import build_optimizer
from dtron.training.step import TrainStep
from tests.harness import run_ranks
from tests.parallelisms.parity import Case, build_parallel, connect, float8, micro_batches

FLOAT = 4
# Elements of one block's linear layers, of 32 columns, 4 query and 2 key heads of 16, 64 neurons.
ATTENTION, FEED_FORWARD = 2 * 32 * 64 + 2 * 32 * 32, 3 * 32 * 64


def count_step(case: Case) -> dict[str, dict[str, dict[str, int]]]:
    """On one rank: collectives by axis of the second step, and of the update before it."""
    config, layout = case.resolved()
    mesh = Mesh(**case.config().degrees(case.world))
    applied, plan = build_parallel(case, config, layout, mesh), case.plan()
    optimizer = build_optimizer(applied.named_parameters(), case.config().optim)
    model = connect(case, applied, config, layout, mesh)
    refresh = plan.gather_weights(applied, mesh) if plan else None
    if refresh is not None:
        refresh()
    after = (lambda _taken: refresh()) if refresh is not None else None
    step = TrainStep(model, optimizer, 1.0, after_update=after)
    step(micro_batches(case, mesh, 0), 0, 0.1)
    with CollectiveCounter(mesh.group_names()) as counter:
        step(micro_batches(case, mesh, 1), 1, 0.1)
    return counter.table()


def counted(
    parallel: Parallel, recipe: str = "tensorwise", **settings: bool
) -> dict[str, dict[str, dict[str, int]]]:
    case = float8(recipe, 2, parallel, dtype="float32", sequences=2, float8=settings)
    return run_ranks(2, count_step, case)[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])  # here a weight is one block
def test_weights_travel_as_one_byte_an_element(recipe: str) -> None:
    """In forward and backward of the first block; the last one's is not freed between."""
    zero3 = Parallel(zero=3)
    plain, small = counted(zero3, recipe), counted(zero3, recipe, all_gather=True)
    of_plain, of_small = plain["dp_shard"]["all_gather"], small["dp_shard"]["all_gather"]
    assert of_plain["count"] == of_small["count"]
    gathered = 4 * (ATTENTION + FEED_FORWARD)  # two blocks, twice
    assert of_plain["bytes"] - of_small["bytes"] == (FLOAT - 1) * gathered
    # all scales by one reduction after the update
    reduced = small["dp_shard"]["all_reduce"]
    before = plain["dp_shard"].get("all_reduce", {"count": 0, "bytes": 0})
    assert reduced["count"] == before["count"] + 1
    assert reduced["bytes"] == before["bytes"] + 2 * 7 * FLOAT


def test_inputs_travel_as_one_byte_an_element() -> None:
    plain, small = counted(Parallel(tp=2)), counted(Parallel(tp=2), gather_inputs=True)
    of_plain, of_small = plain["tp"]["all_gather"], small["tp"]["all_gather"]
    assert of_plain["count"] == of_small["count"]
    gathered = 2 * 2 * 2 * 32 * 32  # blocks, inputs of each, sequences; tokens x width
    assert of_plain["bytes"] - of_small["bytes"] == (FLOAT - 1) * gathered
    assert plain["tp"]["reduce_scatter"] == small["tp"]["reduce_scatter"]


@pytest.mark.parametrize(
    ("parallel", "mode", "each", "numbers"),
    [
        # weights; inputs of wo and down; the others' gradients
        (Parallel(tp=2), "none", 7 + 2 + 5, 7 + 2 + 5),
        (Parallel(tp=2), "full", 2 * (7 + 2) + 5, 2 * (7 + 2) + 5),
        # weights, inputs and gradients, of layers that read one input at once
        (Parallel(tp=2, async_tp=True), "none", 4 + 4 + 4, 7 + 4 + 7),
        # inputs, of gate and up at once; gradients, those two at once
        (Parallel(cp=2), "none", 6 + 6, 6 + 7),
    ],
    ids=str,
)
def test_shared_scales_are_counted(parallel: Parallel, mode: Any, each: int, numbers: int) -> None:
    """All-reduces of scales, a layer and micro-batch; none by other recipes."""

    def reductions(recipe: str, parallel: Parallel) -> tuple[int, int]:
        kept = {"dtype": "float32", "sequences": 2, "recompute": Recompute(mode=mode)}
        table = run_ranks(2, count_step, float8(recipe, 2, parallel, **kept))[0]
        found = [calls["all_reduce"] for calls in table.values() if "all_reduce" in calls]
        return sum(calls["count"] for calls in found), sum(calls["bytes"] for calls in found)

    count, n_bytes = reductions("tensorwise", parallel)
    plain = parallel.model_copy(update={"async_tp": False})
    others, other_bytes = reductions("rowwise", plain)
    blocks_and_micro_batches = 2 * 2
    assert count - others == each * blocks_and_micro_batches
    assert n_bytes - other_bytes == FLOAT * numbers * blocks_and_micro_batches


@pytest.mark.parametrize(
    ("recipe", "parallel", "settings", "message"),
    [
        ("rowwise", {}, {"all_gather": True}, 'use "tensorwise" or "blockwise"'),
        ("rowwise_with_gw_hp", {}, {"all_gather": True}, "as many bytes as bfloat16"),
        ("blockwise", {"tp": 2}, {"gather_inputs": True}, 'use "tensorwise"'),
        ("tensorwise", {}, {"gather_inputs": True}, "no input is gathered"),
        (
            "tensorwise",
            {"tp": 2, "sequence_parallel": False},
            {"gather_inputs": True},
            "no input is gathered",
        ),
        (
            "tensorwise",
            {"tp": 2},
            {"gather_inputs": True, "filter": ["blocks.*.*.wo", "blocks.*.ffn.up"]},
            "float8.gather_inputs = true needs an attention or feed-forward with only",
        ),
        (
            "rowwise",
            {"tp": 2, "async_tp": True},
            {},
            "parallel.async_tp = True with float8.recipe = 'rowwise'",
        ),
        (
            "tensorwise",
            {"tp": 2, "async_tp": True},
            {"gather_inputs": True},
            "no effect with parallel.async_tp",
        ),
        ("rowwise", {}, {"filter": ["blocks.*.ffn.dwn"]}, "matches no linear layer"),
        ("", {}, {"output": True}, "float8.output = True has no effect without float8.recipe"),
    ],
)
def test_what_cannot_act_is_refused(
    recipe: str, parallel: dict, settings: dict, message: str
) -> None:
    override = {"dim": 32, "head_dim": 16, "ffn_dim": 64, "n_layers": 2}
    chosen = Float8(recipe=recipe, **settings)  # type: ignore[arg-type]
    case = Case("llama", 2, Parallel(**parallel), override=override, float8=chosen)
    assert message in case.refusal()


def test_parts_that_do_not_fit_are_refused() -> None:
    case = Case("llama", 4, Parallel(tp=4), override={"n_kv_heads": 4, "dim": 32, "head_dim": 8})
    case = Case(**{**vars(case), "float8": Float8(recipe="rowwise")})
    assert "parallel.tp = 4 leaves a rank 8 of the 32 rows of blocks.0.attn.wq" in case.refusal()
    with pytest.raises(ConfigError, match="multiple of 16 tokens per micro-batch, not 24"):
        float8("rowwise", 1, Parallel(), seq_len=24).resolved()
