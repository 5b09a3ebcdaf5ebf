"""Bytes that the planner tells are those that real ranks hold."""

import math
from pathlib import Path

import pytest

from dtron.config import Optim, Parallel, RunConfig
from dtron.models import MODELS
from dtron.models.config import LayerKind
from dtron.plan import activations
from dtron.plan.hardware import hardware
from dtron.plan.memory import expandable, memory, offloaded, offloaded_by_host, worst
from dtron.plan.parameters import held, joined_units
from dtron.plan.run_shape import Resolved, shortened
from dtron.plan.steptime import predict
from dtron.training.optim import build_optimizer
from dtron.training.step import TrainStep
from tests.harness import run_ranks
from tests.parallelisms.parity import (
    OPTIMIZERS,
    Case,
    build_parallel,
    connect,
    mesh_of,
    micro_batches,
)

CASES = [
    Case("llama", 4, Parallel(tp=2, dp_shard=2)),
    Case("gpt", 4, Parallel(tp=2, pp=2, zero=1)),
    Case("qwen3", 2, Parallel(dp_shard=2, zero=2), override={"tied": True}),
    Case("mixtral", 4, Parallel(tp=2, ep=2, dp_shard=2), optimizer="muon"),
    Case("deepseek_v3", 4, Parallel(pp=2, dp_shard=2, ep=2, schedule="Interleaved1F1B")),
    Case("deepseek_v3", 4, Parallel(pp=2, tp=2, ep=2), override={"mtp": 1}),
]


def optim(case: Case) -> Optim:
    """AdamW, or Muon, which has one moment of each hidden matrix."""
    return OPTIMIZERS["muon"] if case.optimizer == "muon" else Optim()


def state_bytes(case: Case) -> tuple[int, int, int, int]:
    """Of this rank after a step's backward and an update: its pp rank, and bytes of parameters,
    gradients and moments."""
    config, layout = case.resolved()
    mesh = mesh_of(case)
    applied = build_parallel(case, config, layout, mesh)
    named = dict(applied.named_parameters())  # a tied weight of two stages of a rank comes once
    hidden = MODELS[case.model].is_hidden_matrix
    optimizer = build_optimizer(named.items(), optim(case), hidden)
    model = connect(case, applied, config, layout, mesh)
    step = TrainStep(model, optimizer, 1.0)
    step.accumulate(micro_batches(case, mesh, 0, config.mtp), 0)
    gradients = sum(p.grad.to_local().nbytes for p in named.values())  # type: ignore[union-attr]
    optimizer.step()
    moments = sum(
        value.to_local().nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "to_local")
    )
    held = sum(p.to_local().nbytes for p in named.values())  # type: ignore[attr-defined]
    return mesh.rank("pp"), held, gradients, moments


@pytest.mark.parametrize("case", CASES, ids=str)
def test_model_state_of_real_ranks(case: Case) -> None:
    """To the byte, of the first rank of each stage: others' shards are smaller by their padding."""
    config = case.config().model_copy(update={"optim": optim(case)})
    planned = memory(Resolved.of(config, case.world))
    found = run_ranks(case.world, state_bytes, case)
    for rank in planned:
        held = max(each[1:] for each in found if each[0] == rank.rank)
        assert held[0] == rank.classes["parameters"]
        assert held[1] == rank.classes["parameters"]  # shards of gradients, once reduced
        assert held[2] == rank.classes["optimizer"]


def test_moments_in_host_memory_are_counted_there() -> None:
    """And the update takes as long as their copies, which it overlaps with each other."""
    h200 = hardware("h200")
    bytes_of = 2 * 4.0 * 8.03e9 / 2  # two moments of half of Llama-3-8B
    resident, half, all_ = (
        Resolved.of(RunConfig.load(LLAMA, ["parallel.zero=3", f"optim.offload={part}"]), 2)
        for part in (0, 0.5, 1)
    )
    plans = [worst(memory(run)) for run in (resident, half, all_)]
    for run, plan, part in zip((resident, half, all_), plans, (0, 0.5, 1), strict=True):
        assert offloaded(run) == pytest.approx(part * bytes_of, rel=0.03)
        assert plan.classes["optimizer"] == pytest.approx((1 - part) * bytes_of, rel=0.03, abs=1e8)
        assert plans[0].peak - plan.peak == pytest.approx(offloaded(run))
        assert plans[0].reserved - plan.reserved >= offloaded(run)
    assert offloaded_by_host(all_, h200) == 2 * offloaded(all_)
    update = predict(all_, h200).parts["update"]
    assert update == pytest.approx(offloaded(all_) / h200.host_link, rel=0.02)
    assert update > 3 * predict(resident, h200).parts["update"]


CONFIGS = Path(__file__).parents[2] / "configs"
LLAMA = CONFIGS / "llama3_8b.toml"
TP = "parallel.tp=2 parallel.zero=2 train.micro_batch=2 train.global_batch=8"
BLOCKS = "model.override.n_layers=8 train.global_batch=2"
PP = "parallel.pp=2 parallel.zero=1 train.micro_batch=1 train.global_batch=16"
DRAWN = "train.seq_len=8192 train.micro_batch=2 train.global_batch=8"
QWEN = "model.name=qwen3 train.seq_len=4096 train.micro_batch=1"
COPIES = "parallel.reduce_by=all_to_all parallel.copy_engines=true"
MEASURED = [
    ("parallel.zero=3", 4, 114.6, 0.03),
    ("", 4, 128.3, 0.03),
    (PP, 4, 97.4, 0.03),
    (PP + " parallel.schedule=Interleaved1F1B", 4, 105.0, 0.03),
    (BLOCKS + " recompute.mode=full parallel.zero=3", 1, 49.6, 0.03),
    (TP, 4, 90.1, 0.10),
    (
        f"{DRAWN} parallel.tp=2 parallel.zero=1 train.micro_batch=1 recompute.mode=full",
        2,
        73.6,
        0.03,
    ),
    (DRAWN + " parallel.cp=2 parallel.zero=2 recompute.mode=selective", 2, 110.9, 0.03),
    (QWEN + " parallel.tp=2 parallel.zero=1 train.global_batch=4", 2, 83.5, 0.03),
    (QWEN + " parallel.zero=2 train.global_batch=8", 2, 107.1, 0.03),
    (PP + " parallel.schedule=ZBVZeroBubble", 4, 108.3, 0.03),
    (
        QWEN + " parallel.zero=3 train.micro_batch=2 train.global_batch=16 optim.moments=bfloat16",
        4,
        71.8,
        0.05,
    ),
    (f"{DRAWN} parallel.zero=1 recompute.mode=attention {COPIES}", 4, 63.9, 0.05),
    (
        f"{DRAWN} parallel.zero=2 train.micro_batch=1 train.global_batch=4 {COPIES}",
        4,
        85.8,
        0.05,
    ),
    (COPIES, 4, 123.9, 0.05),
    (f"train.micro_batch=1 train.global_batch=2 {COPIES}", 2, 117.6, 0.05),
]
"""Overrides, GPUs, GiB that the allocator had reserved (benchmarks/RESULTS.md, those of DRAWN and
QWEN benchmarks/plan_measured.json, the first two of COPIES benchmarks/PLANNING.md), allowed error.
"""


@pytest.mark.parametrize(("overrides", "world", "gib", "allowed"), MEASURED)
def test_reserved_memory_of_runs_that_were_measured(
    overrides: str, world: int, gib: float, allowed: float
) -> None:
    run = Resolved.of(RunConfig.load(LLAMA, overrides.split()), world)
    assert math.isclose(worst(memory(run)).by_allocator / 2**30, gib, rel_tol=allowed)


EXPERTS = (
    "train.seq_len=4096 train.dtype=bfloat16 optim.moments=bfloat16 compile.enable=true "
    "model.override.force_balance=true"
)
WHOLE = (
    f"{EXPERTS} parallel.dispatcher=symmetric_memory parallel.ep=2 parallel.ep_capacity=1.05 "
    "train.loss_chunks=4 parallel.zero=2 recompute.mode=selective model.override.n_layers=27"
)
GROWING = [
    ("llama3_8b", BLOCKS, 1, 62.5),
    ("gpt_1.7b", "", 1, 87.7),
    (
        "deepseek_v3_debug",
        f"{EXPERTS} model.size=16b model.override.n_layers=12 parallel.pp=2 train.micro_batch=2 "
        "train.global_batch=8 parallel.schedule=ZBVZeroBubble",
        2,
        59.5,
    ),
    (
        "deepseek_v3_debug",
        f"{WHOLE} model.size=16b train.micro_batch=4 train.global_batch=8",
        2,
        132.1,
    ),
    (
        "deepseek_v3_debug",
        f"{WHOLE} model.size=16b train.micro_batch=3 train.global_batch=6",
        2,
        118.2,
    ),
    (
        "deepseek_v3_debug",
        f"{WHOLE} model.size=16b-a3b train.micro_batch=3 train.global_batch=6",
        2,
        122.0,
    ),
]
"""Configs, overrides, GPUs and GiB that the first rank's allocator had reserved by the rules of
`expandable_segments:True` (benchmarks/PLANNING.md)."""


@pytest.mark.parametrize(("config", "overrides", "world", "gib"), GROWING)
def test_memory_of_segments_that_grow(config: str, overrides: str, world: int, gib: float) -> None:
    run = Resolved.of(RunConfig.load(CONFIGS / f"{config}.toml", overrides.split()), world)
    assert math.isclose(expandable(run, 0) / 2**30, gib, rel_tol=0.03)


def test_what_peers_read_is_memory_of_a_rank_and_spares_time() -> None:
    """A share of the largest unit, norm and head, and all of its gradients, of which then the
    allocator has no copy to send."""
    head = 2 * (128256 * 4096 + 4096)
    messages = {}
    for copies in ("false", "true"):
        overrides = f"parallel.reduce_by=all_to_all parallel.copy_engines={copies}"
        run = Resolved.of(RunConfig.load(LLAMA, overrides.split()), 4)
        messages[copies] = run, worst(memory(run)).classes, predict(run, hardware("h200"))
    (own, plain, slower), (other, copied, faster) = messages["false"], messages["true"]
    assert copied["buffers"] - plain["buffers"] == head + head // 4
    for run in (own, other):
        rank = worst(memory(run))
        assert rank.reserved - rank.by_allocator == rank.symmetric == rank.classes["buffers"]
    assert (own.sent_element, other.sent_element) == (2, 0)
    assert 0.9 * slower.step < faster.step < slower.step


@pytest.mark.parametrize("n", [1, 4])
def test_experts_of_several_blocks_are_sent_block_by_block(n: int) -> None:
    """Shared memory holds a shard and the gradients of the largest dense part, which has n blocks,
    and of one block's experts, in bfloat16."""
    keys = f"model.name=mixtral model.size=8x7b model.override.n_layers=4 parallel.ep=2 {COPIES}"
    overrides = f"{keys} parallel.blocks_per_unit={n}"
    run = Resolved.of(RunConfig.load(LLAMA, overrides.split()), 4)
    (stage,) = run.stages
    dense = max(sum(unit.dense) for unit in joined_units(run, stage))
    experts = 4 * 3 * 4096 * 14336
    assert worst(memory(run)).symmetric == 2 * (dense + experts + experts // 2)


@pytest.mark.parametrize(
    ("dispatcher", "shared"), [("symmetric_memory", 2), ("bounded_all_to_all", 0)]
)
@pytest.mark.parametrize(("ep", "etp", "capacity", "room"), [(4, 1, 2.0, 2), (2, 2, 1.5, 3)])
def test_bounded_buffers_of_experts(
    ep: int, etp: int, capacity: float, room: int, dispatcher: str, shared: int
) -> None:
    """Rows that experts keep have that much room, an etp-th of their hidden columns is a rank's,
    and peers read twice as many, if they read any."""
    model = "model.name=deepseek_v3 model.size=16b model.override.n_layers=2 compile.enable=true"
    layout = f"parallel.ep={ep} parallel.etp={etp} recompute.mode=none"
    bounded = f"parallel.dispatcher={dispatcher} parallel.ep_capacity={capacity}"
    plain, pulled = (
        Resolved.of(RunConfig.load(LLAMA, f"{model} {layout} {more}".split()), 4)
        for more in ("", bounded)
    )
    rows, width, expert = plain.tokens * 6, plain.model.dim, plain.model.expert_dim
    before, after = (worst(memory(run)) for run in (plain, pulled))
    assert after.classes["buffers"] - before.classes["buffers"] == shared * room * rows * width * 2
    kept = _kept(plain) + (room - etp) * rows * (width + 3 * expert / etp) * 2
    assert _kept(pulled) == kept


def test_a_relay_keeps_results_in_a_buffer() -> None:
    """Besides what symmetric memory keeps: results of as many copies as `ep_capacity` allows."""
    model = "model.name=deepseek_v3 model.size=16b model.override.n_layers=2 compile.enable=true"
    layout = "parallel.ep=4 recompute.mode=none parallel.ep_capacity=2.0 parallel.dispatcher="
    pulled, relayed = (
        Resolved.of(RunConfig.load(LLAMA, f"{model} {layout}{name}".split()), 4)
        for name in ("symmetric_memory", "hierarchical parallel.ep_inner=2")
    )
    buffers = [worst(memory(run)).classes["buffers"] for run in (pulled, relayed)]
    assert buffers[0] == buffers[1]
    assert _kept(relayed) - _kept(pulled) == pulled.tokens * 6 * pulled.model.dim * 2


def _kept(run: Resolved) -> float:
    """Bytes that experts keep, of the one layer that has some."""
    return activations.kept(run, 1)["experts"]


def test_float8_keeps_casts_and_gathers_bytes() -> None:
    """Of 8B: an input of matmuls is a byte an element, attention's output is kept as well, and the
    hidden state of the feed-forward is not."""
    words = "recompute.mode=none train.micro_batch=1 train.global_batch=4 parallel.zero=2"
    eight = f"{words} float8.recipe=tensorwise float8.all_gather=true"
    plain, cast = (Resolved.of(RunConfig.load(LLAMA, w.split()), 4) for w in (words, eight))
    model, before, after = plain.model, *(worst(memory(run)) for run in (plain, cast))
    layer = sum(activations.kept(plain, 0).values()) - sum(activations.kept(cast, 0).values())
    assert layer == plain.tokens * (2 * model.dim + 2 * model.ffn_dim - model.dim)
    of_blocks = sum(u.gathered for u in held(plain, 0) if u.kind == LayerKind())
    norms = 2 * model.dim * model.n_layers
    assert before.classes["gathered"] - after.classes["gathered"] == of_blocks - norms
    assert before.classes["parameters"] == after.classes["parameters"]


def test_selective_recomputation_keeps_what_matmuls_gather() -> None:
    """Under async TP: two inputs of all tokens; of wo's result the rank's own tokens are kept."""
    words = "recompute.mode=selective parallel.tp=2 train.micro_batch=1 train.global_batch=2"
    plain, overlapped = (
        Resolved.of(RunConfig.load(LLAMA, f"{words} parallel.async_tp={on}".split()), 4)
        for on in ("false", "true")
    )
    more = sum(activations.kept(overlapped, 0).values()) - sum(activations.kept(plain, 0).values())
    assert more == (2 - 1 / 2) * plain.tokens * plain.model.dim * 2


def test_selective_recomputation_keeps_rows_that_were_pulled() -> None:
    model = "model.name=deepseek_v3 model.size=16b model.override.n_layers=2 compile.enable=false"
    plain, pulled = (
        Resolved.of(RunConfig.load(LLAMA, f"{model} recompute.mode=selective {more}".split()), 4)
        for more in ("parallel.ep=4", "parallel.ep=4 parallel.dispatcher=symmetric_memory")
    )
    before, after = _kept(plain), _kept(pulled)
    rows, width, expert = plain.tokens * 6, plain.model.dim, plain.model.expert_dim
    assert before == rows * (width + 2 * expert) * 2  # results, gate and up
    # Room for gate and up, for what came, and for what the last product gave.
    assert after == before + rows * 2 * expert * 2 + 2 * (2 * rows * width * 2)


def test_a_shortened_step_has_as_much_in_flight() -> None:
    overrides = "parallel.pp=4 parallel.schedule=Interleaved1F1B train.micro_batch=1"
    long = RunConfig.load(LLAMA, [*overrides.split(), "train.global_batch=64"])
    short = shortened(long, 4)
    assert (long.micro_batches(4), short.micro_batches(4)) == (64, 16)
    flying = [
        [rank.in_flight for rank in memory(Resolved(config, 4, *_whole(config)))]
        for config in (long, short)
    ]
    assert flying[0] == flying[1]


def _whole(config: RunConfig):
    run = Resolved.of(config, 4)
    return run.model, run.layout, run.float8
