"""Every model in every layout of 1, 2, 4 and 8 ranks equals one process, or is refused.

    pytest -m matrix tests/parallelisms/test_matrix.py

runs all of it and writes docs/parity.md. What is refused is known without running anything, so that
the default run compares it with the committed counts.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from dtron.config import Compile, CpMethod, Parallel, Recompute
from dtron.parallelisms.pipeline.schedules import SCHEDULES
from tests.parallelisms.parity import (
    DENSE,
    ENCODERS,
    FULL,
    MIXTURES,
    SINKHORN,
    SIZES,
    TOLERANCE,
    Batches,
    Case,
    run_batch,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"
WORLDS = (1, 2, 4, 8)
SEQUENCES = 16
WIDTHS: dict[str, dict[str, Any]] = {
    "llama": {"dim": 32, "n_heads": 8, "n_kv_heads": 4},
    "qwen3": {"dim": 32, "n_heads": 8, "n_kv_heads": 4},
    "gemma3": {"dim": 32, "n_heads": 8, "n_kv_heads": 4},
    "gemma4": {"dim": 32, "n_heads": 8, "n_kv_heads": 4, "global_head_dim": 16},
    "gpt": {"dim": 32, "n_heads": 8, "n_kv_heads": 8},
    "bert": {"dim": 32, "n_heads": 8, "n_kv_heads": 8},
    "t5": {"dim": 32, "n_heads": 8, "n_kv_heads": 8},
    "llava": {"dim": 32, "n_heads": 8, "n_kv_heads": 4},
}
HIERARCHICAL: dict[str, Any] = {"dispatcher": "hierarchical", "ep_inner": 2}
# What the whole matrix has to give: how many pass, and how many each rule refuses.
EXPECTED: dict[str, int] = {
    "passed": 3201,
    'recompute.mode = "selective" with compile.enable and parallel.ep x parallel.etp = 2: a partly'
    " recomputed block needs a graph without breaks, but this parallel.dispatcher breaks the graph,"
    " since the host reads how many tokens are sent; use parallel.dispatcher ="
    ' "symmetric_memory" inside a host, or "bounded_all_to_all", recompute.mode = "full", or'
    " compile.enable = false": 12,
    "parallel.ep = 2 x parallel.etp = 1 does not divide the 3 ranks of dp_shard x cp x tp; use"
    " parallel.ep = 1, 3": 6,
    **{
        f"parallel.sequence_parallel = false with parallel.tp = {tp} and experts: each tp rank"
        " routes its own shard of the tokens; use true": n
        for tp, n in ((2, 56), (4, 11), (8, 1))
    },
    "model.override.attention_dropout = 0.1 with parallel.cp = 4: no rank computes all"
    " attention weights; use 0.0": 9,
    'parallel.cp_method = "hierarchical" needs a parallel.cp that is a product of two numbers,'
    ' such as 4; 2 is not: use "ring" or "ulysses"': 142,
    "parallel.cp = 4 cuts train.seq_len = 12 into 2 x cp chunks; use a multiple of 8 such as 8": 9,
    "model.override.vocab_size = 67 is padded for parallel.tp = 2 and then sharded by"
    " width, but the 4 ranks of dp_shard x cp do not divide model.dim = 34; use a"
    " dp_shard x cp that does, or a vocab_size that tp divides": 8,
    "parallel.pp x parallel.stages_per_rank = 16 stages, but a model of 5 layers "
    "fills 1 to 7 (each layer, the embedding, the head)": 10,
    'parallel.reduce = "micro_batch" with parallel.zero = 1 would shard gradients, '
    "which is zero = 2; use parallel.zero = 2, or leave parallel.reduce out": 10,
    "parallel.sequence_parallel splits train.seq_len = 14 over parallel.tp = 4; use a"
    " multiple of 4 such as 12, or parallel.sequence_parallel = false": 9,
    "train.global_batch / (data-parallel ranks x train.micro_batch) = 8 micro-"
    "batches: parallel.schedule = 'DualPipeV' takes at least 2 x parallel.pp micro-"
    "batches (parallel.pp = 8); the nearest is 16": 10,
    "train.global_batch / (data-parallel ranks x train.micro_batch) = 9 micro-"
    "batches: parallel.schedule = 'Interleaved1F1B' takes a multiple of the number of "
    "rounds, max(1, micro-batches // parallel.pp) (parallel.pp = 4); the nearest is 8 "
    "or 10": 10,
    "train.global_batch = 16 is not a multiple of 8 data-parallel ranks x "
    "train.micro_batch = 4; use 32": 10,
    "parallel.cp = 4 does not divide the 2 key heads of gated delta nets on each rank; use 1, 2": 8,
    "parallel.cp = 8 does not divide the 4 key heads of gated delta nets on each rank; use"
    " 1, 2, 4": 8,
    "parallel.cp = 4 does not divide the 2 groups of Mamba-2 layers on each rank; use 1, 2": 8,
    "parallel.cp = 8 does not divide the 4 groups of Mamba-2 layers on each rank; use 1, 2, 4": 8,
    'data.mask_documents = True with data.objective = "span_corruption": spans are removed from'
    " sequences without padding and document masks; leave it out": 66,
    "parallel.sequence_parallel splits the 7 tokens of the encoder and the 13 of the decoder, of"
    " train.seq_len = 14, over parallel.tp = 4; use train.seq_len = 16, or"
    " parallel.sequence_parallel = false": 1,
    **{
        f"parallel.cp = {cp} with model.override.encoder_layers = 2: context parallelism has no"
        " position biases; use 1, and parallel.tp for long sequences": n
        for cp, n in ((2, 32), (4, 10), (8, 4))
    },
    "parallel.tp = 8 does not divide model.n_heads = 4; use 1, 2, 4": 3,
    "model.override.rope_fraction = 0.25 rotates 1 elements of a head, but rope rotates"
    " pairs; use a fraction that gives an even number": 1,
}


def layouts(world: int) -> Iterator[Parallel]:
    """Every layout of this many ranks, legal or not."""
    degrees = [n for n in WORLDS if n <= world]
    for pp, replicas, shards, tp in itertools.product(degrees, repeat=4):
        if pp * replicas * shards * tp != world:
            continue
        for whole_sequence in (False, True) if tp > 1 else (False,):
            for schedule in SCHEDULES if pp > 1 else ("1F1B",):
                yield Parallel(
                    pp=pp,
                    schedule=schedule,
                    dp_replicate=replicas,
                    dp_shard=shards,
                    tp=tp,
                    sequence_parallel=not whole_sequence,
                )


def in_grid(model: str, parallel: Parallel, **more: Any) -> Case:
    """A case with as many layers as the stages need, and two micro-batches a pipeline rank.

    Stages are not equally deep: 5 layers fill 2 and 4 of them, 7 fill 8, and 14 fill 16.
    """
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    stages = SCHEDULES[parallel.schedule].default_stages * parallel.pp
    n_layers = 5 if stages <= 4 else 7 if stages == 8 else 14
    settings: dict[str, Any] = {
        "sequences": SEQUENCES,
        "micro_batch": max(1, SEQUENCES // (2 * parallel.pp * data_ranks)),
        **more,
    }
    settings["override"] = {
        **WIDTHS.get(model, {}),
        "n_layers": n_layers,
        **more.get("override", {}),
    }
    world = parallel.pp * data_ranks * parallel.cp * parallel.tp
    return Case(model, world, parallel, **settings)


def in_samples(model: str) -> list[Case]:
    """Recomputation, compilation and the other settings, on layouts of all kinds."""

    def on(parallel: dict[str, Any], **more: Any) -> Case:
        return in_grid(model, Parallel(**{"dp_shard": 1, **parallel}), **more)

    layouts: list[dict[str, Any]] = [
        {"dp_shard": 2, "tp": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "dp_shard": 2, "schedule": "ZBVZeroBubble"},
        {"pp": 2, "tp": 2, "schedule": "InterleavedZeroBubble", "sequence_parallel": False},
    ]
    dropped = {"dropout": 0.1, "attention_dropout": 0.1}
    if "window" in SIZES[model]:  # no kernel has both
        dropped.pop("attention_dropout")
    everywhere: list[dict[str, Any]] = [
        {"recompute": Recompute(mode="full")},
        {"recompute": Recompute(mode="selective", every=2)},
        {"compile": Compile(enable=True, backend="aot_eager")},
        {"override": dropped},
        {"override": {"tied": True}},
        {"override": {"tied": False}},
        {"documents": True},
        {"dtype": "float64"},
    ]
    zero: list[dict[str, Any]] = [{"zero": 1}, {"zero": 2}, {"zero": 2, "reduce": "step"}]
    zero += [{"zero": 3, "reduce": "step"}, {"zero": 3, "prefetch": 2}]
    sharded: list[dict[str, Any]] = [
        {"dp_replicate": 2, "dp_shard": 2},
        {"pp": 2, "dp_shard": 2, "schedule": "DualPipeV"},
        {"pp": 2, "dp_replicate": 2, "schedule": "Interleaved1F1B"},
    ]
    deep = {"pp": 8, "schedule": "InterleavedZeroBubble"}
    return [
        *[on(layout, **more) for more in everywhere for layout in layouts],
        *[on({**layout, **keys}) for keys in zero for layout in sharded],
        on(layouts[3], compile=Compile(enable=True, backend="aot_eager"), recompute=FULL),
        on({"pp": 8}, micro_batch=2),
        on({**deep, "schedule": "DualPipeV"}, micro_batch=2),
        on({"pp": 4, "schedule": "Interleaved1F1B"}, sequences=9, micro_batch=1),
        on(deep, override={"n_layers": 5}),
        on({"dp_shard": 8}, micro_batch=4),
        on({"tp": 4}, seq_len=14),
        on({"tp": 4}, override={"n_kv_heads": 2}),
        on({"tp": 4, "sequence_parallel": False}, seq_len=14),
        on({"tp": 2, "dp_shard": 4}, override={"dim": 34, "head_dim": 4}),
        on({"dp_shard": 4, "zero": 1, "reduce": "micro_batch"}),
    ]


def in_contexts(model: str) -> list[Case]:
    """Context parallelism: every method on 2 and 4 ranks, with and without documents, with every
    other axis and with every schedule."""

    def on(parallel: dict[str, Any], **more: Any) -> Case:
        return in_grid(model, Parallel(**{"dp_shard": 1, **parallel}), **more)

    methods = [{"cp_method": method} for method in get_args(CpMethod)]
    beside: list[dict[str, Any]] = [{"cp": 2}, {"cp": 4}, *({"cp": 2, key: 2} for key in AXES)]
    beside += [{"cp": 2, "tp": 2, "sequence_parallel": False}, {"cp": 2, "tp": 2, "pp": 2}]
    beside += [{"cp": 4, "tp": 2}, {"cp": 2, "dp_shard": 2, "tp": 2}, {"cp": 8}]
    schedules = [{"pp": 2, "schedule": name} for name in SCHEDULES if name != "1F1B"]
    each: list[dict[str, Any]] = [{"cp": 2}, {"cp": 2, "tp": 2}]
    layout: dict[str, Any] = {"cp": 4, "cp_method": "hierarchical"}
    return [
        *[
            on({**degrees, **method}, documents=documents)
            for degrees, method in itertools.product(beside, methods)
            for documents in (False, True)
        ],
        *[
            on({**degrees, **schedule}, documents=True)
            for degrees, schedule in itertools.product(each, schedules)
        ],
        on(layout, recompute=FULL, documents=True),
        on(layout, recompute=Recompute(mode="selective"), documents=True),
        on(layout, compile=Compile(enable=True, backend="aot_eager"), documents=True),
        on(layout, override={"dropout": 0.1}, documents=True),
        on(layout, override={"tied": True}, dtype="float64", documents=True),
        on({**layout, "zero": 1}, documents=True),
        on(layout, seq_len=12),
        on(layout, override={"attention_dropout": 0.1}),
    ]


def in_experts(model: str) -> list[Case]:
    """Experts on other ranks: ep and etp over every other axis and schedule, and the settings that
    act on them."""

    def on(parallel: dict[str, Any], **more: Any) -> Case:
        return in_grid(model, Parallel(**{"dp_shard": 1, **parallel}), **more)

    layouts: list[dict[str, Any]] = [
        {"dp_shard": 2},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": False},
        {"dp_shard": 2, "ep": 2},
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 4, "ep": 4},
        {"dp_shard": 4, "ep": 2, "etp": 2},
        {"dp_shard": 2, "etp": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"tp": 2, "ep": 2},
        {"tp": 2, "etp": 2},
        {"tp": 2, "dp_shard": 2, "ep": 2},
        {"tp": 2, "dp_shard": 2, "ep": 4, "zero": 1},
        {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2},
        {"tp": 2, "dp_shard": 2, "etp": 2, "reduce_by": "all_to_all"},
        {"cp": 2, "cp_method": "all_gather", "ep": 2},
        {"cp": 2, "cp_method": "ulysses", "dp_shard": 2, "ep": 4},
        {"cp": 2, "cp_method": "all_gather", "tp": 2, "ep": 2},
        {"dp_shard": 3, "ep": 2},
        {"dp_shard": 4, "ep": 4, **HIERARCHICAL},
        {"tp": 2, "dp_shard": 2, "ep": 4, **HIERARCHICAL},
    ]
    pipelines = [{"pp": 2, "dp_shard": 2, "ep": 2, "schedule": name} for name in SCHEDULES]
    whole: dict[str, Any] = {"pp": 2, "cp": 2, "tp": 2, "cp_method": "all_gather", "ep": 4}
    eager = Compile(enable=True, backend="aot_eager")
    at: dict[str, Any] = {"dp_shard": 2, "ep": 2}
    settings: list[dict[str, Any]] = [
        {"recompute": FULL},
        {"recompute": Recompute(mode="selective")},
        {"compile": eager},
        {"compile": eager, "recompute": FULL},
        {"compile": eager, "recompute": Recompute(mode="selective")},
        {"override": {"balance": "global_batch", "balance_coefficient": 0.5}},
        {"override": {"capacity_factor": 1.0}},
        {"override": {"z_loss": 0.1, "jitter": 0.1}},
        {"override": SINKHORN},
        {"documents": True},
        {"dtype": "float64"},
    ]
    return [
        *map(on, layouts),
        *map(on, pipelines),
        on({**whole, "schedule": "ZBVZeroBubble"}),
        *[on(at, **more) for more in settings],
        *[on({"tp": 2, "ep": 2}, **more) for more in settings],
    ]


AXES = ("dp_replicate", "dp_shard", "tp", "pp")
ROWS = [*DENSE, *ENCODERS, "llava", "nemotron_h"]
"""Models of the tables of layouts."""
GRID = [in_grid(m, p) for w in WORLDS for p in layouts(w) for m in ROWS]
SAMPLES = [case for model in ROWS for case in in_samples(model)]
CONTEXTS = [case for model in ROWS for case in in_contexts(model)]
MIXED = [
    case
    for model in MIXTURES
    for case in in_experts(model)
    if model not in ROWS or case not in GRID  # a model of both has some layouts in both
]
CASES = [*GRID, *SAMPLES, *CONTEXTS, *MIXED]


@cache
def refusals() -> dict[str, str]:
    """The rule that refuses a case, by case."""
    return {str(case): refusal for case in CASES if (refusal := case.refusal())}


@cache
def batches() -> Batches:
    """Cases to run."""
    return Batches(case for case in CASES if str(case) not in refusals())


def test_every_case_is_another_one() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)
    assert len(GRID) == len(ROWS) * (1 + 11 + 44 + 114)


def test_what_is_refused() -> None:
    counts = Counter(refusals().values())
    assert {k: v for k, v in EXPECTED.items() if k != "passed"} == counts
    assert EXPECTED["passed"] == len(CASES) - counts.total()


def test_failure_is_told_of_its_case() -> None:
    """The others of the batch are run all the same."""
    good = Case("gpt", 2, sequences=2, steps=1)
    bad = replace(good, seq_len=17)  # longer than the model's positions
    first, second, third = run_batch([good, bad, good])
    assert not first.wrong(good)
    assert "train.seq_len = 17" in second.wrong(bad)[0]
    assert not third.wrong(good)


def test_tolerances_are_not_loosened() -> None:
    assert TOLERANCE == {"float32": 1e-5, "float64": 1e-10}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whether a case is refused takes seconds to find out: only where the matrix runs."""
    if "case" in metafunc.fixturenames:
        wanted = "matrix" in metafunc.config.option.markexpr
        if wanted and metafunc.config.option.outcomes:
            batches().folder = Path(metafunc.config.option.outcomes)
        metafunc.parametrize("case", batches().cases() if wanted else [], ids=str)


@pytest.mark.matrix
def test_equals_one_process(case: Case) -> None:
    wrong = batches().outcome(case).wrong(case)
    assert not wrong, "; ".join(wrong)


@pytest.mark.matrix
def test_document() -> None:
    """Written whatever came out: what fails is told there, too."""
    failed = [str(c) for c in batches().cases() if batches().outcome(c).wrong(c)]
    DOCUMENT.write_text(document(len(failed)))
    assert not failed
    assert EXPECTED["passed"] == len(batches().cases())


def document(n_failed: int) -> str:
    """docs/parity.md."""
    rules = Counter(refusals().values())
    letters = {rule: chr(ord("a") + i) for i, rule in enumerate(sorted(rules))}
    counts = {"passed": len(batches().cases()) - n_failed, "**failed**": n_failed}
    counts |= {f"**{letter}** {rule}": rules[rule] for rule, letter in letters.items()}
    lines = [HEAD.format(torch=torch.__version__.split("+")[0]), "| outcome | tuples |"]
    lines += ["| --- | --- |", *(f"| {what} | {n} |" for what, n in counts.items() if n)]
    lines += ["", "## Layouts", ""]
    lines += _table([*LAYOUT_COLUMNS, *ROWS], _layout_rows(letters))
    lines += ["", "## Other settings", "", SAMPLES_HEAD, ""]
    lines += _table(["ranks, settings", *ROWS], _sample_rows(in_samples, ROWS, letters))
    lines += ["", "## Context parallelism", "", CONTEXTS_HEAD, ""]
    lines += _table(["ranks, settings", *ROWS], _sample_rows(in_contexts, ROWS, letters))
    lines += ["", "## Experts", "", EXPERTS_HEAD, ""]
    lines += _table(["ranks, settings", *MIXTURES], _sample_rows(in_experts, MIXTURES, letters))
    return "\n".join(lines) + "\n"


LAYOUT_COLUMNS = ["ranks", "pp", "dp_replicate", "dp_shard", "tp", "sequence", "schedule"]
HEAD = """# Parity

Every model in every layout of 1, 2, 4 and 8 ranks over pp, dp_replicate, dp_shard and tp, with and
without sequence parallelism and with every pipeline schedule, against plain PyTorch in one process:
loss, every parameter's gradient, gradient norm before clipping, and parameters after two steps of
SGD in which clipping acts. `tests/parallelisms/test_reference.py` compares that process with
transformers. Written by

    pytest -m matrix tests/parallelisms/test_matrix.py

with torch {torch} on CPUs (gloo). A number is the largest deviation of a tuple: over all tensors,
||g - g_ref|| / max(||g_ref||, 1e-3 ||all g_ref|| / sqrt(n)), and over losses and norms the relative
error. It passes up to 1e-5 in float32 and up to 1e-10 in float64. A letter is the rule that refuses
the tuple before any process starts. Any other outcome fails the test, as do other counts than
these. [Parity on GPUs](parity-gpu.md) has what has run there; [what can be
combined](combinations.md) has any two features.
"""
SAMPLES_HEAD = """Recomputation, compilation, ZeRO stages and the rest, on some of the layouts; what
a name leaves out is the default."""
CONTEXTS_HEAD = """Sequences over cp ranks, by every method, with packed documents and without; the
method is ring where a name does not say."""

EXPERTS_HEAD = """Experts on other ranks than their tokens, and experts and latent attention under
tp. Routed counts have to be equal, too."""


def _layout_rows(letters: dict[str, str]) -> Iterator[list[str]]:
    for first in range(0, len(GRID), len(ROWS)):
        cases = GRID[first : first + len(ROWS)]
        p = cases[0].parallel
        sequence = "-" if p.tp == 1 else "split" if p.sequence_parallel else "whole"
        degrees = [cases[0].world, p.pp, p.dp_replicate, p.dp_shard, p.tp]
        schedule = p.schedule if p.pp > 1 else "-"
        yield [*map(str, degrees), sequence, schedule, *[_shown(c, letters) for c in cases]]


def _sample_rows(
    make: Callable[[str], list[Case]], models: Sequence[str], letters: dict[str, str]
) -> Iterator[list[str]]:
    for cases in zip(*map(make, models), strict=True):
        first = cases[0]
        widths = "".join(f"-{key}={value}" for key, value in WIDTHS.get(first.model, {}).items())
        name = str(first).removeprefix(f"{first.model}-").replace(widths, "")
        yield [name.replace("-", " "), *[_shown(case, letters) for case in cases]]


def _shown(case: Case, letters: dict[str, str]) -> str:
    if str(case) in refusals():
        return f"**{letters[refusals()[str(case)]]}**"
    outcome = batches().outcome(case)
    if outcome.wrong(case):
        return "**failed**"
    return f"{outcome.worst:.0e}".replace("e-0", "e-")


def _table(columns: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
