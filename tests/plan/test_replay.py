"""What the stream of computation takes, on steps small enough to be counted by hand."""

from collections import Counter
from pathlib import Path

import pytest

from dtron.config import RunConfig
from dtron.parallelisms.offload import SMALLEST, Offload
from dtron.plan import activations, compute_time, replay
from dtron.plan.allocator import Block, HolelessPool, Pool
from dtron.plan.hardware import hardware
from dtron.plan.memory import (
    _all_buffers,
    _on_other_streams,
    expandable,
    in_flight,
    memory,
    worst,
)
from dtron.plan.parameters import sizes, units
from dtron.plan.run_shape import Resolved
from tests.parallelisms.offloaded import CPU, LAYERS, ORDERS, batch, model_of

LLAMA = Path(__file__).parents[2] / "configs/llama3_8b.toml"
GIB = 2**30


def run(overrides: str, world: int) -> Resolved:
    return Resolved.of(RunConfig.load(LLAMA, overrides.split()), world)


def taken(overrides: str, world: int) -> int:
    return replay.reserved(run(overrides, world), 0)


def test_elements_of_a_unit_are_those_of_its_parameters() -> None:
    planned = run("parallel.tp=2", 4)
    for unit in units(planned, planned.stages[0]):
        listed = sizes(planned, unit.kind)
        assert sum(each.gathered for each in listed) == unit.gathered
        assert sum(each.shard for each in listed) == unit.shard


WIDE = (
    "model.name=gemma4 model.size=31b train.seq_len=8192 train.micro_batch=1 "
    "train.global_batch=2 compile.enable=false parallel.cp=2"
)


def test_heads_without_a_fused_kernel_hold_scores() -> None:
    """Of Gemma 4's 32 heads of 512, with context parallelism, in float32; and take their time."""
    planned, narrow = run(WIDE, 2), run(f"{WIDE} model.override.global_head_dim=128", 2)
    (unfused,) = {layer for layer in range(6) if planned.unfused(layer)}
    assert (unfused, narrow.unfused(5), run(WIDE[:-14], 2).unfused(5)) == (5, False, False)
    scores = 4 * 4 * 32 * 4096 * 4096
    assert activations.unfused_scores(planned, 5) == scores
    assert scores in replay._block(planned, 5)[1]
    both = (compute_time.layer(each, 5, hardware("h100")) for each in (planned, narrow))
    seconds = [work["attention"].sum for work in both]
    assert seconds[0] > 10 * seconds[1]


def test_attention_dropout_has_no_fused_kernel() -> None:
    """Its weights, in float32 of two tensors and whether each is kept, stay for the backward."""
    words = "model.name=gpt model.size=125m train.seq_len=1024 train.micro_batch=4 "
    words += "train.global_batch=4 recompute.mode=none compile.enable=true"
    plain, dropped = run(words, 1), run(f"{words} model.override.attention_dropout=0.1", 1)
    assert (plain.unfused(0), dropped.unfused(0), dropped.saves_weights(0)) == (False, True, True)
    more = sum(activations.tensors(dropped, 0)) - sum(activations.tensors(plain, 0))
    scores = 4 * 12 * 1024 * 1024
    assert 9 * scores < more < 9.5 * scores  # and queries, keys and values in float32
    assert activations.unfused_scores(dropped, 0) == 2 * 4 * scores
    seconds = [
        compute_time.layer(each, 0, hardware("h100"))["attention"] for each in (plain, dropped)
    ]
    assert seconds[1].sum > 10 * seconds[0].sum


def test_keys_and_values_are_copied_for_wide_heads() -> None:
    """torch's memory-efficient kernel has no grouped queries; FlexAttention has."""
    alone = WIDE.replace("parallel.cp=2", "recompute.mode=none")
    plain, masked = run(alone, 2), run(f"{alone} data.mask_documents=true", 2)
    more = sum(activations.tensors(plain, 5)) - sum(activations.tensors(masked, 5))
    assert more == 2 * 2 * (32 - 4) * 512 * plain.tokens


MIXTURE = (
    "model.name=deepseek_v3 model.size=16b train.seq_len=4096 optim.moments=bfloat16 "
    "parallel.ep=2 parallel.zero=3 train.global_batch=4 compile.enable="
)


@pytest.mark.parametrize("mode", ["none", "selective", "attention", "full"])
@pytest.mark.parametrize(
    "model",
    [
        "",
        f"{MIXTURE}false parallel.dispatcher=all_to_all",
        *[f"{MIXTURE}{how} parallel.dispatcher=symmetric_memory" for how in ("true", "false")],
    ],
)
def test_tensors_of_a_layer_are_what_it_keeps(model: str, mode: str) -> None:
    planned = run(f"{model} recompute.mode={mode}", 2)
    for layer in (0, 1):
        kept = sum(activations.kept(planned, layer).values())
        assert sum(activations.tensors(planned, layer)) == pytest.approx(kept, abs=100)


def test_reserved_holds_what_peers_memory_gave() -> None:
    """Which selective recomputation keeps."""
    planned = run(f"{MIXTURE}true parallel.dispatcher=symmetric_memory recompute.mode=selective", 2)
    found = worst(memory(planned))
    assert found.reserved >= found.peak


def test_zero_3_copies_one_unit_out_at_a_time() -> None:
    """Beside the last unit, which stays; what is fetched ahead is of the gathers' stream."""
    few, many = (taken(f"parallel.zero={zero} recompute.mode=full", 4) for zero in (3, 2))
    planned = run("parallel.zero=3", 4)
    layer = 2 * units(planned, planned.stages[0])[1].gathered
    assert many - few == pytest.approx(31 * layer, rel=0.1)


def test_moments_are_cut_from_what_the_first_step_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the second step takes more, about as much as they do; the third takes nothing."""
    planned = run("", 4)
    own = 8 * sum(u.shard for u in units(planned, planned.stages[0]))
    found = []
    for steps in (1, 3, 4):
        monkeypatch.setattr(replay, "STEPS", steps)
        found.append(taken("", 4))
    first, third, fourth = found
    assert third - first == pytest.approx(own, rel=0.25)
    assert fourth == third


def test_what_was_sent_waits_through_the_next_forward() -> None:
    """Of two micro-batches, and where the second's loss is the largest moment."""
    each = "train.micro_batch=2 parallel.zero=3"
    one, two, three = (taken(f"{each} train.global_batch={n}", 4) for n in (8, 16, 24))
    planned = run("parallel.zero=3", 4)
    sent = 4 * units(planned, planned.stages[0])[0].gathered
    assert sent <= two - one < 2 * sent  # and no holes as large
    assert three == two


def test_pipelines_hold_what_is_in_flight() -> None:
    pipelined = "parallel.pp=2 parallel.zero=1 train.micro_batch=1"
    few, many = (taken(f"{pipelined} train.global_batch={n}", 4) for n in (2, 16))
    planned = run(f"{pipelined} train.global_batch=16", 4)
    first = planned.stages[0]
    kept = sum(sum(activations.kept(planned, layer).values()) for layer in first.layers)
    assert many - few > 0.8 * kept  # one micro-batch more, and sums of gradients


MOVED, PASSING = 7, 1000


class _Counted(HolelessPool):
    """Counts what of offloaded blocks is there while one computes."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.seen = 0, list[int]()

    def take(self, nbytes: int, kind: str = "") -> Block:
        self.there += nbytes == MOVED
        return super().take(nbytes, kind)

    def give(self, block: Block) -> None:
        if block.nbytes == PASSING:
            self.seen.append(self.there)
        self.there -= block.nbytes == MOVED
        super().give(block)


def _replayed_blocks(order: str) -> list[int]:
    """Offloaded blocks on the device while each computes, and after each pass."""
    planned = run("recompute.mode=full recompute.offload=true", 4)
    pool = _Counted()
    steps = replay._Replay(planned, 0, pool)  # type: ignore[arg-type]
    unit = replay._UnitMemory([], [], [], [MOVED], [], PASSING, [PASSING] * 2, False)
    steps.stages, steps.hidden = {0: [unit] * LAYERS}, 0
    found = []
    for action in order.split():
        pool.seen.clear()
        is_forward, n = action[0] == "F", int(action[1:])
        if is_forward:
            steps._forward(0, n)
        else:
            steps._backward(0, n, last=False)
        found += pool.seen[:: 2 if is_forward else 3]  # passing tensors
        found.append(pool.there)
    return found


def _real_blocks(order: str) -> list[int]:
    """The same of a model whose blocks are offloaded."""
    offload = Offload(CPU, smallest=1)
    model, calls, found, losses = model_of("full", offload), [], [], {}
    add = offload._add

    def note(call) -> None:
        calls.append(call)
        add(call)

    def count(*_: object) -> None:
        every = calls if offload._current is None else [*calls, offload._current]
        there = [any(s.memory is not None for s in c.storages.values()) for c in every]
        found.append(sum(there))

    offload._add = note  # type: ignore[method-assign]
    for block in model.blocks.values():  # in the forward, and where it is computed again
        block.get_submodule("attn_norm").register_forward_hook(count)
    for action in order.split():
        n = int(action[1:])
        if action[0] == "F":
            losses[n] = model(batch(n)).mean()
        else:
            losses.pop(n).backward()
        count()
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_offloaded_blocks_are_there_when_those_of_a_real_model_are(order: str) -> None:
    assert _replayed_blocks(order) == _real_blocks(order)


def test_what_stays_of_an_offloaded_layer() -> None:
    """Small tensors, and the input of a stage behind the first, of which the schedule holds one a
    micro-batch."""
    keys = "parallel.pp=2 parallel.zero=1 train.micro_batch=1 recompute.offload=true"
    planned = run(keys, 4)
    small = [size for size in activations.tensors(planned, 0) if size < SMALLEST]
    for stage in planned.stages:
        layers = [unit for unit in replay._listed(planned, stage) if unit.widest]
        for place, (unit, layer) in enumerate(zip(layers, stage.layers, strict=True)):
            whole = activations.tensors(planned, layer)
            assert sorted(unit.kept + unit.moved) == sorted(whole)
            held = [whole[0]] if stage.index and place == 0 else []
            assert sorted(unit.kept) == sorted(small + held)
    assert small


def _passing(overrides: str, world: int = 1) -> tuple[int, int, Resolved]:
    """Bytes that the last layer's forward makes and lets go, its largest tensor's, and the run."""
    planned = run(f"recompute.mode=full {overrides}", world)
    unit = [unit for unit in replay._listed(planned, planned.stages[0]) if unit.widest][-1]
    return sum(unit.passing), unit.widest, planned


def test_a_compiled_block_makes_all_before_full_recomputation_frees_it() -> None:
    """One graph gives all that a block without recomputation keeps. Of eager blocks, and of those
    that are cut where rows leave for their experts, two tensors are counted."""
    made, widest, planned = _passing("")
    whole, kept = (sum(activations.tensors(planned, 0, every)) for every in (True, False))
    assert made == whole - kept > 4 * widest
    made, widest, _ = _passing("compile.enable=false")
    assert made == 2 * widest
    experts = "model.name=deepseek_v3 model.size=16b parallel.ep=2"
    made, widest, _ = _passing(experts, 2)
    assert made == 2 * widest
    made, widest, _ = _passing(experts + " parallel.dispatcher=symmetric_memory", 2)
    assert made > 4 * widest


def test_live_bytes_are_those_of_a_run_on_a_gpu() -> None:
    """Allocated at most until the gradients of the first step's loss were there, by the allocator's
    history on an H200: 24.735 GiB with the weights. The replay lets the logits go later, when the
    head's gradient is there too, 1 GiB more."""
    keys = "model.override.n_layers=8 train.global_batch=2 recompute.mode=full parallel.zero=3"
    planned = run(keys, 1)
    steps = replay._Replay(planned, 0, HolelessPool())
    steps.take_weights()
    steps._forward(0, 0)
    loss = steps.pool._now + sum(steps.logits)  # type: ignore[union-attr]
    assert loss / GIB == pytest.approx(24.735, rel=0.01)


def test_the_order_of_frees_decides_what_is_reserved() -> None:
    """By hand, in MiB, all above 10: segments are as large as their first tensor.

        take 40, 60         segments of 40 and 60, reserved 100
        give 40, then 60    both are free, and do not join: they are segments of their own
        take 30             the smallest block that holds it is 40; 10 are left of it
        take 60             the other segment: reserved 100
    or  give 60 alone, take 30: cut from 60, 30 are left
        give 40             free 30 and 40
        take 60             no free block holds it: a segment of 60, reserved 160
    """
    mib = 2**20
    first = Pool()
    small, large = first.take(40 * mib), first.take(60 * mib)
    for block in (small, large):
        first.give(block)
    first.take(30 * mib)
    first.take(60 * mib)
    assert first.reserved == 100 * mib
    second = Pool()
    small, large = second.take(40 * mib), second.take(60 * mib)
    second.give(large)
    second.take(30 * mib)
    second.give(small)
    second.take(60 * mib)
    assert second.reserved == 160 * mib


def test_a_backward_frees_what_it_read_before_it_sends() -> None:
    """A step of two made-up units, by hand, in MiB. A tensor takes the smallest free block that
    holds it, or a segment of its own size.

        forward, first unit     weights 16, passing 24 and 24, kept 32: four segments      96
        second unit             weights 16 find a 24 that has passed (8 are left), passing 24 finds
                                the other; one segment of 24 and one of 32, kept           152
        loss                    logits 40 and 40; gradient 12 finds 24, 12 are left        232
        second unit's backward  again 20 finds 24; 24, 24, 24 find none; nor does the weights'
                                gradient, 16; the input's, 12, finds 12                    320
                                Then go logits, 20, 24, 24, 24, kept 32, gradient 12, weights 16;
                                what is sent, 32, finds the 32 that was kept
        first unit's backward   finds all                                                  320

    Were what is sent made before the others go, it would take 32 more, 352.
    """
    mib = 2**20
    pool = Pool()
    steps = replay._Replay(run("", 2), 0, pool)
    steps.stages = {
        0: [
            replay._UnitMemory(
                groups=[replay._ParameterGroup([[16 * mib]], [False], 32 * mib, shared=True)],
                shards=[],
                kept=[32 * mib],
                moved=[],
                again=[20 * mib],
                widest=24 * mib,
                passing=[24 * mib] * 2,
                stays=False,
            )
            for _ in range(2)
        ]
    }
    steps.hidden, steps.logits = 12 * mib, [40 * mib] * 2
    steps._forward(0, 0)
    assert pool.reserved == 152 * mib
    steps._backward(0, 0, last=True)
    assert pool.reserved == 320 * mib


def _steps(groups: list[replay._ParameterGroup], pool: HolelessPool) -> replay._Replay:
    """Of a model of one unit, which makes nothing but weights and their gradients."""
    steps = replay._Replay(run("parallel.zero=3", 2), 0, pool)  # type: ignore[arg-type]
    steps.stages = {0: [replay._UnitMemory(groups, [], [], [], [], 0, [], False)]}
    steps.hidden, steps.logits = 0, []
    return steps


def test_experts_that_are_apart_are_sent_before_the_rest_of_their_block() -> None:
    """Weights of 1 and 8 and as large gradients; the experts' 16 go before the others' 2 are made,
    with their weights and gradients."""
    dense = replay._ParameterGroup([[1 << 20]], [False], 2 << 20, shared=True)
    experts = replay._ParameterGroup([[8 << 20]], [False], 16 << 20, shared=True)
    pool = HolelessPool()
    steps = _steps([dense, experts], pool)
    steps._forward(0, 0)
    steps._backward(0, 0, last=True)
    assert pool.reserved == (1 + 1 + 8 + 16) << 20  # 10 of gradients, the experts' weights gone
    assert steps.pending is not None
    assert steps.pending.nbytes == 2 << 20


def test_experts_that_no_ranks_share_stay_until_the_backward() -> None:
    """As `fsdp._shard_experts` has it: the dense part, of 1, is freed."""
    dense = replay._ParameterGroup([[1 << 20]], [False], 0, shared=True)
    experts = replay._ParameterGroup([[8 << 20]], [False], 0, shared=False)
    steps = _steps([dense, experts], HolelessPool())
    steps.stages[0][0].stays = False
    steps._forward(0, 0)
    assert [bool(group.out) for group in (dense, experts)] == [False, True]
    steps._backward(0, 0, last=False)
    assert not experts.out


def test_experts_of_one_rank_keep_their_gradients() -> None:
    """Weights of 8 and as large gradients, cast to 16, which stay to the end of the step; those of
    the second micro-batch are cast too, then added."""
    experts = replay._ParameterGroup([[8 << 20]], [False], 99 << 20, shared=False, alone=True)
    pool = HolelessPool()
    steps = _steps([experts], pool)
    steps._forward(0, 0)
    steps._backward(0, 0, last=False)
    assert pool.reserved == (8 + 16) << 20
    assert [block.nbytes for block in experts.summed] == [16 << 20]
    steps._forward(0, 1)
    steps._backward(0, 1, last=True)
    assert pool.reserved == (16 + 8 + 16) << 20
    assert steps.pending is None


def test_kept_gradients_go_after_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the first step's moments are made beside them."""
    experts = replay._ParameterGroup([[8 << 20]], [False], 0, shared=False, alone=True)
    pool = HolelessPool()
    steps = _steps([experts], pool)
    steps.step()
    assert experts.summed
    assert not experts.out
    steps.drop_gradients()
    assert not experts.summed
    most = pool.reserved
    steps.step()
    assert pool.reserved == most
    called: list[str] = []
    for name in ("step", "take_moments", "drop_gradients"):
        monkeypatch.setattr(replay._Replay, name, lambda *_, name=name: called.append(name))
    taken("", 1)
    assert called == ["step", "take_moments", "drop_gradients", *["step", "drop_gradients"] * 2]


SPLIT = "parallel.pp=2 parallel.schedule=ZBVZeroBubble train.micro_batch=1 train.global_batch=4"


def _split_steps(**sizes: list[int]) -> tuple[replay._Replay, replay._ParameterGroup, HolelessPool]:
    """Of a stage of one unit of weights 10 and an embedding of 4, hidden states of none."""
    pool = HolelessPool()
    steps = replay._Replay(run(SPLIT, 2), 0, pool)  # type: ignore[arg-type]
    block, embedding = (replay._ParameterGroup([[n]], [False], 2 * n, shared=True) for n in (10, 4))
    unit = replay._UnitMemory(
        [block],
        [],
        again=sizes.pop("again", []),
        moved=[],
        widest=0,
        passing=[],
        stays=False,
        defers_weights=True,
        **sizes,  # type: ignore[arg-type]
    )
    rest = replay._UnitMemory([embedding], [], [], [], [], 0, [], stays=False)
    steps.stages, steps.hidden, steps.logits = {0: [rest, unit]}, 0, []
    return steps, block, pool


def test_a_backward_in_two_parts_by_hand() -> None:
    """Weights 14 stay. The forward keeps 100, and 40 that products read: 154.

        I    computes 7 and 5 again, the second read: 166; then 100 and 7 go, and gradients of
             results, 30, stay: 89. The embedding's gradient, 4, is made and cast to 8: 97
        W    makes the block's gradient, 10, beside them; 75 go, then sums of 20 are made of it
    reduce   sends 20 of 20, then 8 of 8
    """
    steps, block, pool = _split_steps(kept=[100], read=[40], again=[7], read_again=[5], queued=[30])
    steps._forward(0, 0)
    assert pool._now == 14 + 140
    steps._backward(0, 0, last=False, defers_weights=True)
    assert pool.reserved == 14 + 140 + 12
    assert pool._now == 14 + 40 + 5 + 30 + 8
    assert not block.summed
    pool.reserved = 0
    steps._weight(0, 0)
    assert pool.reserved == 14 + 75 + 8 + 10
    assert pool._now == 14 + 8 + 20
    assert [each.nbytes for each in block.summed] == [20]
    pool.reserved = 0
    steps._reduce_stage(0, last=False)
    assert pool.reserved == 14 + 8 + 20 + 20
    steps._free([steps.pending])  # type: ignore[list-item]
    assert pool._now == 14
    steps._reduce_stage(0, last=True)
    assert not block.out


def test_sums_of_parts_are_made_once() -> None:
    steps, _, pool = _split_steps(kept=[100], read=[40], queued=[30])
    for i in range(2):
        steps._forward(0, i)
        steps._backward(0, i, last=False, defers_weights=True)
        steps._weight(0, i)
        assert pool._now == 14 + 8 + 20


def test_a_whole_backward_of_a_stage_that_splits_others_leaves_reductions() -> None:
    steps, block, pool = _split_steps(kept=[100], read=[40], queued=[30])
    steps._forward(0, 0)
    steps._backward(0, 0, last=True)
    assert [each.nbytes for each in block.summed] == [20]
    assert block.out
    assert steps.pending is None
    assert pool._now == 14 + 8 + 20


def test_experts_of_one_rank_are_handed_over_where_reductions_are_apart() -> None:
    """Of each micro-batch sums are made anew, and added to what was handed over."""
    steps, block, pool = _split_steps(kept=[], queued=[30])
    block.alone = True
    for i in range(2):
        steps._forward(0, i)
        steps._backward(0, i, last=False, defers_weights=True)
        steps._weight(0, i)
        steps._reduce_stage(0, last=False)
        assert [each.nbytes for each in block.given] == [20]
        assert not block.summed
    steps.drop_gradients()
    steps._free([steps.pending])  # type: ignore[list-item]
    assert pool._now == 14


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_of_a_unit_stays_until_w(mode: str) -> None:
    """Nothing is kept or computed again twice; embeddings put nothing off."""
    planned = run(f"{SPLIT} recompute.mode={mode}", 2)
    for stage in planned.stages:
        for unit, each in zip(replay._listed(planned, stage), units(planned, stage), strict=True):
            assert unit.defers_weights == (each.kind != "embedding")
            if unit.widest:
                layer = stage.layers[0]
                reads, gradients = activations.deferred(planned, layer)
                assert sorted(unit.read + unit.read_again) == sorted(reads)
                assert unit.queued == gradients
                kept = activations.tensors(planned, layer)
                assert sorted(unit.kept + unit.read) == sorted(kept)
                whole = Counter(activations.tensors(planned, layer, whole=True))
                again = (whole - Counter(kept)).elements()
                assert sorted(unit.again + unit.read_again) == sorted(again)
            if each.kind == "head":
                assert len(unit.kept) == len(unit.read) == len(unit.queued) == 1


def test_a_head_that_is_put_off_keeps_no_block() -> None:
    """From I to W the head's input and its logits' gradient stay; micro-batches are as many in
    flight as without."""
    base = "parallel.pp=2 parallel.zero=1 train.micro_batch=1 train.global_batch=16"
    plain, late = (run(f"{base} parallel.defer_head={n}", 2) for n in (0, 4))
    assert in_flight(late, 1) == in_flight(plain, 1)
    head = replay._listed(late, late.stages[1])[-1]
    held = 4 * (activations.logits_gradient(late) + int(activations.boundary(late)))
    assert sum(head.queued + head.read) * 4 == held
    few, many = (replay.least(each, 1) for each in (plain, late))
    assert 0 < many - few < 2 * held


def test_order_of_actions_has_reductions_where_backwards_are_split() -> None:
    split = list(replay._actions(run(SPLIT, 2), 0))
    whole = list(replay._actions(run("parallel.pp=2 train.global_batch=8", 4), 0))
    assert {kind.value for kind, *_ in split} == {"F", "I", "W", "REDUCE_GRAD"}
    assert {kind.value for kind, *_ in whole} == {"F", "B"}


def test_expandable_segments_leave_fewer_holes() -> None:
    """Two ranks with experts of their own, 14 layers; the holes are 6 GiB of 81.6 by default."""
    planned = run(f"{MIXTURE}true parallel.dispatcher=symmetric_memory recompute.mode=none", 2)
    found = worst(memory(planned))
    grown = expandable(planned, found.rank)
    bound = replay.least(planned, 0) + _on_other_streams(planned, 0)
    assert bound <= grown < found.reserved
    assert grown < 1.02 * bound


def test_gradients_of_kept_experts_are_of_the_stream_of_computation() -> None:
    """By ep = 2 of two ranks each has its experts alone; by ep = 2 of four, two share them."""
    alone, shared = (run(f"{MIXTURE}true train.global_batch=8", world) for world in (2, 4))
    assert (alone.keeps_experts, shared.keeps_experts) == (True, False)
    own = units(alone, alone.stages[0])
    dense = sum(unit.shard - unit.experts_shard for unit in own)
    assert _on_other_streams(alone, 0) == 4 * dense + _all_buffers(alone, 0)
    assert sum(unit.experts_shard for unit in own) > 10 * dense


def test_what_is_shared_by_columns_is_copied_once_more() -> None:
    """Out of a gather beside what it came as, and before it is sent beside the others."""
    group = replay._ParameterGroup([[8 << 20, 2 << 20]], [True, False], 0, shared=True)
    pool = HolelessPool()
    steps = _steps([group], pool)
    steps._forward(0, 0)
    assert pool.reserved == (8 + 8 + 2) << 20
    pool = HolelessPool()
    steps = _steps([group], pool)
    steps._reduce([(group, [pool.take(8 << 20), pool.take(2 << 20)])], last=True)
    assert pool.reserved == (8 + 2 + 8) << 20


def test_which_parameters_are_shared_by_columns() -> None:
    """A padded vocabulary under tp; of experts, those whose number the ranks do not divide."""
    words = "parallel.tp=2 model.name=llama model.size=debug model.override.vocab_size=255"
    planned = run(words, 4)
    embedding, *blocks, head = (unit.columns > 0 for unit in units(planned, planned.stages[0]))
    assert (embedding, any(blocks), head) == (True, False, True)
    words = "model.name=deepseek_v3 model.size=16b train.seq_len=4096 train.global_batch=32"
    for experts, ep, by_columns in ((64, 2, False), (8, 2, True), (8, 1, False)):
        planned = run(f"{words} parallel.ep={ep} model.override.n_experts={experts}", 16)
        mixture = units(planned, planned.stages[0])[2]
        assert (mixture.columns > 0) == by_columns, (experts, ep)
