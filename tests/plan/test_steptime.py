"""What a step takes beside its products: copies by FSDP, counted, and steps that were measured."""

from pathlib import Path

import pytest

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.parallelisms.pipeline.schedule_ops import Kind
from dtron.parallelisms.pipeline.schedules import order_of
from dtron.plan.communication import collectives
from dtron.plan.compute_time import attention_flops
from dtron.plan.hardware import hardware
from dtron.plan.memory import memory, worst
from dtron.plan.parameters import held
from dtron.plan.run_shape import Resolved
from dtron.plan.search import MARGIN, search
from dtron.plan.steptime import _added, _OverlapPhase, _paired, _phases, copied_bytes, predict

LLAMA = Path(__file__).parents[2] / "configs/llama3_8b.toml"
PP = "parallel.pp=2 parallel.zero=1 train.micro_batch=1 train.global_batch=16"
FOUR = "train.micro_batch=1 train.global_batch=8"


def run(overrides: str, world: int) -> Resolved:
    return Resolved.of(RunConfig.load(LLAMA, overrides.split()), world)


@pytest.mark.parametrize(
    ("overrides", "world", "each"),
    [
        # One rank: weights from float32 to bfloat16, gradients the other way.
        ("parallel.zero=2 train.global_batch=2", 1, (4 + 2) + (2 + 4)),
        # Out of a buffer, and into one, once; of four micro-batches each into one.
        ("parallel.zero=2 train.global_batch=4", 2, (2 + 2) + (2 + 4)),
        (f"parallel.zero=2 {FOUR}", 2, (2 + 2) + 4 * (2 + 4)),
        # Summed: cast, three times added, copied.
        (f"parallel.zero=1 {FOUR}", 2, (2 + 2) + (2 + 4) + 3 * (2 + 4 + 4) + (4 + 4)),
        ("parallel.zero=2 train.global_batch=4 parallel.reduce_by=all_to_all", 2, 4 + (2 + 2)),
    ],
)
def test_bytes_that_fsdp_copies(overrides: str, world: int, each: int) -> None:
    planned = run(overrides, world)
    assert copied_bytes(planned, 0) == each * sum(u.gathered for u in held(planned, 0))


MIXTURE = "model.name=deepseek_v3 model.size=16b train.seq_len=4096 train.micro_batch=1"
_PARTS = ("dense", "experts")


@pytest.mark.parametrize(
    ("overrides", "reduced", "kept"),
    [
        ("parallel.zero=2 train.global_batch=2", 2 + 4, 2 + 4),
        ("parallel.zero=2 train.global_batch=2 parallel.reduce_by=all_to_all", 2 + 2, 2 + 4),
        # Four micro-batches. Each is handed over: cast, then added to a float32 sum.
        ("parallel.zero=2 train.global_batch=8", 4 * (2 + 4), 4 * (2 + 4) + 3 * (4 + 4 + 4)),
        # The last is: what comes after the first is added as it is, and copied nowhere.
        (
            "parallel.zero=1 train.global_batch=8",
            (2 + 4) + 3 * (2 + 4 + 4) + (4 + 4),
            (2 + 4) + 3 * (2 + 4 + 4),
        ),
    ],
)
def test_gradients_of_experts_that_stay_are_cast_and_added(
    overrides: str, reduced: int, kept: int
) -> None:
    planned = run(f"{MIXTURE} parallel.ep=2 {overrides}", 2)
    dense, experts = (sum(getattr(u, key)[0] for u in held(planned, 0)) for key in _PARTS)
    assert experts > dense > 0
    assert copied_bytes(planned, 0) == dense * (2 + 2 + reduced) + experts * (4 + 2 + kept)


def test_sums_of_experts_that_stay_are_no_reduction() -> None:
    """They are beside nothing: a later backward's reductions are longer by sums of the others."""
    h200 = hardware("h200")
    planned = run(f"{MIXTURE} parallel.ep=2 parallel.zero=2 train.global_batch=4", 2)
    _, back, _, last = _sent(planned)
    dense = sum(u.dense[1] for u in held(planned, 0))
    assert last - back == pytest.approx(12 * dense / h200.copy)


def test_zero_3_copies_weights_of_all_but_the_last_unit_twice() -> None:
    planned = run("parallel.zero=3 train.global_batch=4", 2)
    *others, last = held(planned, 0)
    twice = sum(u.gathered for u in others)
    assert copied_bytes(planned, 0) == twice * (2 * 4 + 6) + last.gathered * (4 + 6)


def test_each_pass_has_its_own_gathers_and_reductions() -> None:
    """Under zero 3 every pass gathers, under zero 2 the first forward; backwards reduce, and from
    the second on add to the sums that are there. A backward casts and copies before it gathers."""
    h200, each = hardware("h200"), "train.micro_batch=1 train.global_batch=4"
    for zero in (2, 3):
        planned = run(f"parallel.zero={zero} {each}", 2)
        own = [c for c in collectives(planned, 0) if c.purpose == "fsdp"]
        gathers = sum(c.seconds(h200) for c in own if c.kind == "all_gather")
        sums = sum(c.seconds(h200) for c in own) - gathers
        shard = sum(u.shard for u in held(planned, 0))
        added, cast = 12 * shard / h200.copy, (6 + 4) * shard / h200.copy
        first, back, second, last = _sent(planned)
        assert last - back == pytest.approx(added)
        assert (first == second) == (zero == 3)
        if zero == 2:
            assert (first, second, back) == pytest.approx((gathers, 0, sums / 2))
        else:
            total = gathers + sums + added + 2 * cast
            assert first + back + second + last == pytest.approx(total)


def _sent(planned: Resolved) -> list[float]:
    """Seconds of collectives, and of what runs before and after them, by pass."""
    return [sum(each.sent.values()) for each in _phases(planned, 0, 1.0, hardware("h200"))]


def test_what_a_pass_is_too_short_for_is_not_covered_by_another() -> None:
    """Two passes of a second each, which gathers do not slow down nor are slowed down by: 0.5 s and
    1.5 s of communication are not 2 s beside 2 s."""
    free = hardware("h200", overlap=(("matmul", "all_gather", 1.0, 1.0),))

    def added(sent: float, worked: float) -> float:
        return _added(_OverlapPhase({"all_gather": sent}, {"matmul": worked}), free)

    assert added(0.5, 1.0) + added(1.5, 1.0) == pytest.approx(0.5)
    assert added(2.0, 2.0) == 0


def test_work_and_collectives_slow_each_other_down() -> None:
    """By hand. A second of products at half of their rate takes 2 s beside gathers at 0.8 of
    theirs, of which 1.6 s are done by then; a second of copies nothing and gathers nothing."""
    shares = (("matmul", "all_gather", 0.5, 0.8), ("matmul", "reduce_scatter", 0.8, 0.5))
    row = hardware("h200", overlap=(*shares, ("copy", "all_gather", 1.0, 1.0)))

    def added(work: dict[str, float], **sent: float) -> float:
        return _added(_OverlapPhase(sent, work), row)

    product = {"matmul": 1.0}
    assert added(product, all_gather=0.8) == pytest.approx(0.5)  # beside half of it
    assert added(product, all_gather=1.6) == pytest.approx(1.0)
    assert added(product, all_gather=2.6) == pytest.approx(1.0 + 1.0)  # a second alone
    # A reduction: 0.625 s in 1.25 s. One of each, of half: all is covered once.
    assert added(product, all_gather=0.8, reduce_scatter=0.3125) == pytest.approx(0.5 + 0.125)
    # Spread evenly over a mixture, of which the products alone get longer.
    assert added({"matmul": 1.0, "copy": 1.0}, all_gather=1.3) == pytest.approx(0.5)
    assert added({}, all_gather=1.3) == pytest.approx(1.3)


def test_rows_without_a_pair_are_refused() -> None:
    row = hardware("h200", overlap=(("matmul", "all_gather", 0.5, 0.8),))
    with pytest.raises(ConfigError, match="no rates for matmul overlapped with reduce_scatter"):
        _added(_OverlapPhase({"reduce_scatter": 1.0}, {"matmul": 1.0}), row)


def test_a_mixture_of_work_is_that_of_the_model() -> None:
    """Experts' products are grouped, in a backward two for each of a forward; the sums are the
    seconds of the pass."""
    planned = run(f"{MIXTURE} parallel.zero=3 train.global_batch=2", 2)
    forward, backward = (each.work for each in _phases(planned, 0, 1.0, hardware("h200")))
    assert set(forward) == {"matmul", "grouped_matmul", "attention", "copy"}
    assert backward["grouped_matmul"] == pytest.approx(2 * forward["grouped_matmul"], rel=0.05)
    assert sum(backward.values()) < 1 < sum(backward.values()) + sum(forward.values())


def test_what_is_shared_by_columns_is_copied_twice() -> None:
    """Put together after a gather, taken apart before each reduction."""
    words = f"parallel.tp=2 parallel.zero=2 model.size=debug model.override.vocab_size=255 {FOUR}"
    planned = run(words, 4)
    own = list(held(planned, 0))
    plain = ((2 + 2) + 4 * (2 + 4)) * sum(u.gathered for u in own)
    columns = sum(u.columns for u in own)
    assert columns > 0
    assert copied_bytes(planned, 0) == plain + (2 + 2 + 4 * (2 + 2)) * columns


def test_wide_heads_take_what_was_measured() -> None:
    """4 sequences of 4,096 tokens, 16 heads of 192 with values of 128, and so padded
    (benchmarks/RESULTS.md); as the rest of the row, of 8,192 tokens and cuDNN."""
    h200, pairs = hardware("h200"), 4 * 16 * 4096 * 4096
    for values, measured in ((128, 0.597e-3 + 2.037e-3), (192, 0.778e-3 + 3.391e-3)):
        flops = float(pairs * (192 + values))
        both = h200.attend(flops, False, 192, values) + h200.attend(2 * flops, True, 192, values)
        assert both == pytest.approx(measured, rel=0.06)


def test_context_parallelism_pads_values() -> None:
    words = "model.name=deepseek_v3 model.size=16b train.seq_len=4096 train.global_batch=4"
    whole, halves = (
        attention_flops(run(f"{words} parallel.cp={cp} parallel.cp_method=ring", 2), 0)
        for cp in (1, 2)
    )
    assert halves / whole == (192 + 192) / (192 + 128) / 2


@pytest.mark.parametrize(
    ("overrides", "world", "seconds"),
    [
        ("", 4, 1.515),
        ("parallel.zero=3", 4, 1.541),
        (PP, 4, 3.320),
        (f"{PP} parallel.schedule=Interleaved1F1B", 4, 3.216),
        (f"{PP} parallel.schedule=ZBVZeroBubble", 4, 3.071),
        ("model.override.n_layers=8 train.global_batch=2", 1, 0.453),
    ],
)
def test_steps_that_were_measured(overrides: str, world: int, seconds: float) -> None:
    """benchmarks/RESULTS.md."""
    assert predict(run(overrides, world), hardware("h200")).step == pytest.approx(seconds, rel=0.04)


MIXTURE_OF = "train.seq_len=4096 parallel.ep=4 parallel.zero=2 optim.moments=bfloat16 model.name"


@pytest.mark.parametrize(
    ("overrides", "world", "milliseconds"),
    [
        ("model.size=1b train.seq_len=4096 train.global_batch=2", 1, 10.0),
        ("model.size=1b train.seq_len=4096 train.global_batch=2 optim.name=lion", 1, 7.6),
        ("model.size=1b train.seq_len=4096 train.global_batch=2 optim.name=adamw8bit", 1, 43.5),
        ("", 4, 16.4),
        (f"{MIXTURE_OF}=deepseek_v3 model.size=16b", 4, 24),
        (f"{MIXTURE_OF}=qwen3_moe model.size=30b-a3b", 4, 46),
        (f"{MIXTURE_OF}=gpt_oss model.size=20b", 4, 32),
    ],
)
def test_updates_that_were_measured(overrides: str, world: int, milliseconds: float) -> None:
    """Norm and update of a profiled step (benchmarks/RESULTS.md)."""
    found = predict(run(overrides, world), hardware("h200")).parts["update"]
    assert 1e3 * found == pytest.approx(milliseconds, rel=0.03)


PAIRED = (
    "model.name=deepseek_v3 model.size=16b model.override.n_layers=8 train.seq_len=4096 "
    "model.override.force_balance=true train.micro_batch=2 train.global_batch=16 "
    "optim.moments=bfloat16 train.loss_chunks=4 parallel.dispatcher=bounded_all_to_all "
    "parallel.ep_capacity=1.05"
)
IN_PAIRS = f"{PAIRED} parallel.ep=2 parallel.zero=2 parallel.reduce=step"
SLOW = 22e9
"""Bytes per second through the host's memory, with which the step without pairs is as measured."""


@pytest.mark.parametrize(
    ("rate", "off", "on"), [(280e9, 0.5106, 0.5050), (SLOW, 1.065, 0.8802)], ids=["NVLink", "slow"]
)
def test_micro_batches_at_once_that_were_measured(rate: float, off: float, on: float) -> None:
    """Two H200 (benchmarks/RESULTS.md); both rows set the two constants."""
    row = hardware("h200", nvlink=rate)
    plans = [run(f"{IN_PAIRS} parallel.overlap_micro_batches={x}", 2) for x in ("false", "true")]
    times = [predict(each, row).step for each in plans]
    assert times == pytest.approx([off, on], rel=0.04)
    assert times[0] / times[1] == pytest.approx(off / on, rel=0.01)
    assert (times[0] / times[1] > 1 + MARGIN) == (rate == SLOW)
    found = [worst(memory(each)).reserved / 2**30 for each in plans]
    assert found == pytest.approx([47.7, 62.2], rel=0.03)


def test_a_search_overlaps_over_slow_links_only() -> None:
    config = RunConfig.load(LLAMA, PAIRED.split())
    for rate, overlaps in ((280e9, False), (SLOW, True)):
        best, *_ = search(config, 2, hardware("h200", nvlink=rate), most=1, processes=1).best
        assert best.run.config.parallel.overlap_micro_batches == overlaps


def test_pairs_of_a_pipeline_are_counted() -> None:
    """Of a long step too, of which the planner simulates the first micro-batches."""
    words = f"{PAIRED} parallel.ep=2 parallel.pp=2 parallel.zero=1 train.global_batch=64"
    words += " parallel.schedule=DualPipeV parallel.overlap_micro_batches=true"
    planned = run(words, 4)
    order = order_of("DualPipeV", 2, 2, planned.micro_batches, overlap=True)
    forwards = sum(each.kind is Kind.FORWARD for each in planned.order[0])
    assert forwards == 2 * 8 < 2 * planned.micro_batches  # shortened
    for rank in range(2):
        pairs = sum(each.overlapped for each in order[rank])
        assert _paired(planned, rank) == pytest.approx(pairs / 32)
    assert _paired(run(f"{PAIRED} parallel.ep=2", 2), 0) == 0


IMAGES = "model.size=8b train.seq_len=4096 train.micro_batch=1 train.global_batch=16"


@pytest.mark.parametrize("encoder_tp", [0, 1, 2])
def test_an_encoder_takes_the_time_of_its_flops(encoder_tp: int) -> None:
    """Next to the same decoder without it, at a fifth of the peak or more."""
    h200 = hardware("h200")
    layout = "parallel.tp=2" if encoder_tp else ""
    text = run(f"model.name=qwen3 {IMAGES} {layout}", 8)
    layout += f" parallel.encoder_tp={encoder_tp}" if encoder_tp else ""
    images = run(f"model.name=llava {IMAGES} {layout}", 8)
    both, decoder = (predict(each, h200) for each in (images, text))
    more = (images.flops()["causal"] - text.flops()["causal"]) * images.tokens_per_step / 8
    added = both.parts["compute"] - decoder.parts["compute"]
    assert 1 < added / (more / h200.peak) < 5
    if encoder_tp:
        assert both.parts["tp"] > decoder.parts["tp"]


def test_stages_are_balanced_with_the_encoder() -> None:
    """729 tokens of an image: its encoder takes as long as several layers of the decoder."""
    stages = run(f"model.name=llava {IMAGES} parallel.pp=4 parallel.zero=1", 8).stages
    first, second, *_ = (len(stage.layers) for stage in stages)
    assert first < second


def test_sequences_shorter_than_an_image() -> None:
    """They have a part of one, which the encoder encodes whole."""
    short = run(f"model.name=llava {IMAGES} train.seq_len=512", 8)
    assert short.encoder is not None
    assert short.encoder.tokens == 729
    assert predict(short, hardware("h200")).parts["compute"] > 0
    assert worst(memory(short)).reserved > 0
