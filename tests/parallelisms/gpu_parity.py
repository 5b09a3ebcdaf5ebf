"""Parity over NCCL: which layouts of which models run on 1, 2 and 4 GPUs, and by which rule.

    float32    every tensor within the rule of `parity.py` of one process on one of these GPUs,
               with TF32 off
    bfloat16   errors against that float32 process at most 2 x those of one bfloat16 process of the
               same form, eager or compiled
    float8     gradients as far from float32 without float8, in dB, as those of one process that
               emulates the recipe, within 1 dB

Cases run on ranks that stay alive (`tests/gpu_ranks.py`), those of 1 and of 2 GPUs at the same
time, while this process computes the references. The same code runs on CPUs over gloo.
"""

import functools
import math
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtron.bench.measure import device_name
from dtron.bench.report import versions
from dtron.config import Compile, Float8, Parallel, Recompute
from dtron.float8 import RECIPES
from dtron.models import MODELS
from dtron.parallelisms import Mesh
from dtron.parallelisms.schedules import SCHEDULES
from tests.gpu_ranks import ranks_of
from tests.parallelisms.parity import (
    DECIBELS,
    DENSE,
    LIMITED,
    MTP,
    SIZES,
    Case,
    Outcome,
    compare,
    mesh_of,
    parallel_run,
    reference,
    signal_to_noise,
)

Keys = dict[str, Any]
WORLDS = (1, 2, 4)
MIXTURES = [name for name in MODELS if name not in DENSE]
BFLOAT16_FACTOR = 2.0
ROUNDING = 2.0**-8
"""Of one number to bfloat16: losses and norms of one process that are nearer are so by luck."""
EAGER_SECONDS, COMPILED_SECONDS = 60, 240
V = "ZBVZeroBubble"
FULL, SELECTIVE = Recompute(mode="full"), Recompute(mode="selective")
COMPILED = Compile(enable=True)


@dataclass(frozen=True)
class Row:
    """A line of a table: one layout, and its case for each model that has one."""

    label: str
    cases: Mapping[str, Case]


def row(
    world: int,
    parallel: Keys | None = None,
    models: Iterable[str] = MODELS,
    label: str = "",
    sizes: Mapping[str, Keys] | None = None,
    **keys: Any,
) -> Row:
    """Cases of one layout; models whose settings refuse it have none.

    Args:
        parallel: keys of [parallel]; dp_shard is 1 where it is not among them.
        label: default: the keys.
        sizes: fields of the models' configs; default: those of `parity.SIZES`, with 3 layers
            outside of pipelines.
        keys: of Case.
    """
    layout = Parallel(**{"dp_shard": 1, **(parallel or {})})
    cases = {}
    for model in models:
        override = {**(shallow(model, layout) if sizes is None else sizes[model])}
        if layout.cp > 1 and model == "gpt_oss":  # has windows, and all layers the same one
            override["full_attention_every"] = 0
        override |= keys.get("override", {})
        case = Case(model, world, layout, **{**keys, "override": override})
        if not case.refusal():
            cases[model] = case
    return Row(label or label_of(world, parallel or {}, keys), cases)


def shallow(model: str, parallel: Parallel) -> Keys:
    """A first, a middle and a last layer of each kind; in pipelines the layers of SIZES."""
    if parallel.pp > 1:
        return {}
    return {"n_layers": 3 + SIZES[model].get("first_dense_layers", 0)}


def label_of(world: int, parallel: Keys, keys: Keys) -> str:
    """Keys of the layout, and what else differs from the defaults."""
    shown = [f"{key} {value}" for key, value in parallel.items()]
    for key, value in keys.items():
        if key == "recompute":
            shown.append(f"recompute {value.mode}{' offloaded' if value.offload else ''}")
        elif key == "override":
            shown += [f"{name} {each}" for name, each in value.items()]
        elif key not in ("dtype", "compile", "float8", "sequences"):
            shown.append(f"{key} {value}")
    if keys.get("dtype") == "float64":
        shown.append("float64")
    return ", ".join(shown) or f"{world} GPU{'s' if world > 1 else ''}"


# -- float32: every model -------------------------------------------------------------------------

VARIED: Keys = {"window": 5, "softcap": 1.0, "sinks": True}
TIED_DROPPED: Keys = {"tied": True, "dropout": 0.1, "attention_dropout": 0.1}
EXCHANGED: Keys = {"reduce_by": "all_to_all"}
COPIED: Keys = {"copy_engines": True}
EP2: Keys = {"dp_shard": 2, "ep": 2}
SYMMETRIC: Keys = {"dispatcher": "symmetric_memory"}
METHODS = ("ring", "all_gather", "ulysses")
OFFLOADED = Recompute(mode="selective", offload=True)

FLOAT32: dict[int, list[Row]] = {
    1: [
        row(1),
        row(1, recompute=FULL),
        row(1, recompute=SELECTIVE, documents=True),
    ],
    2: [
        row(2, {"dp_shard": 2}),
        row(2, {"dp_shard": 2, "zero": 2}),
        row(2, {"dp_shard": 2, "zero": 1}),
        row(2, {"dp_replicate": 2}),
        row(2, {"tp": 2}),
        *[row(2, {"cp": 2, "cp_method": method}) for method in METHODS],
        *[row(2, {"pp": 2, "schedule": name}) for name in ("1F1B", "Interleaved1F1B", V)],
        row(2, EP2, MIXTURES),
        row(2, {**EP2, **SYMMETRIC}, MIXTURES),
        row(2, {"tp": 2, "ep": 2}, MIXTURES),
        row(2, {"dp_shard": 2, "etp": 2}, MIXTURES),
        row(2, {"dp_shard": 2, "etp": 2, **SYMMETRIC}, ["mixtral"]),
        row(2, {"tp": 2}, dtype="float64"),
        # settings, on one model each
        *[
            row(2, {"pp": 2, "schedule": name}, ["llama"])
            for name in SCHEDULES
            if name not in ("1F1B", "Interleaved1F1B", V)
        ],
        row(2, {"tp": 2, "sequence_parallel": False}, ["llama"]),
        row(2, {"tp": 2, "async_tp": True}, ["llama"]),
        row(2, {"dp_shard": 2, "zero": 2, **EXCHANGED}, ["qwen3"]),
        row(2, {"dp_shard": 2, **COPIED}, ["llama"]),
        row(2, {"dp_shard": 2, "zero": 2, **COPIED, **EXCHANGED}, ["qwen3"]),
        row(2, {**EP2, **COPIED, **EXCHANGED}, ["mixtral"]),
        row(2, {"tp": 2}, ["llama"], loss_chunks=5),
        row(2, {"dp_shard": 2}, ["llama"], recompute=FULL),
        row(2, {"dp_shard": 2}, ["llama"], recompute=OFFLOADED),
        row(2, {"pp": 2, "schedule": "1F1B"}, ["qwen3"], recompute=OFFLOADED),
        row(2, {"cp": 2, "cp_method": "ring"}, ["qwen3"], documents=True),
        row(
            2,
            {"cp": 2, "cp_method": "ulysses"},
            ["llama"],
            "cp 2, cp_method ulysses, documents, window, softcap, sinks",
            override=VARIED,
            documents=True,
        ),
        row(
            2,
            {"pp": 2, "schedule": V},
            ["gpt"],
            f"pp 2, schedule {V}, tied, dropout",
            override=TIED_DROPPED,
        ),
        row(2, EP2, ["mixtral"], override=LIMITED),
        row(2, {"pp": 2, "schedule": V}, ["deepseek_v3"], override=MTP, sequences=4),
    ],
    4: [
        row(4, {"dp_replicate": 2, "dp_shard": 2}),
        row(4, {"dp_shard": 2, "tp": 2}),
        row(4, {"dp_shard": 2, "cp": 2, "cp_method": "all_gather"}),
        row(4, {"cp": 2, "cp_method": "all_gather", "tp": 2}),
        row(4, {"cp": 4, "cp_method": "hierarchical"}),
        row(4, {"pp": 2, "schedule": "1F1B", "dp_shard": 2}),
        row(4, {"pp": 2, "schedule": V, "tp": 2}),
        row(4, {"pp": 2, "schedule": V, "cp": 2, "cp_method": "all_gather"}),
        row(4, {"dp_shard": 4, "ep": 2}, MIXTURES),
        row(4, {"dp_shard": 4, "ep": 4, **SYMMETRIC}, MIXTURES),
        row(4, {"dp_shard": 4, "ep": 2, "etp": 2}, MIXTURES),
        row(4, {"tp": 2, "dp_shard": 2, "ep": 2, **SYMMETRIC}, MIXTURES),
        row(4, {"pp": 2, "schedule": V, "dp_shard": 2, "ep": 2}, MIXTURES),
        row(4, {"cp": 2, "cp_method": "all_gather", "tp": 2, "ep": 2}, MIXTURES),
    ],
}

# -- bfloat16: widths that every kernel takes -----------------------------------------------------

WIDE: Keys = {
    **{"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128},
    **{"vocab_size": 128, "n_layers": 4},
}
# Experts in turn: of scores that rounding decides between, others would be chosen.
WIDE_EXPERTS: Keys = {**WIDE, "ffn_dim": 0, "expert_dim": 32, "force_balance": True}
LATENT: Keys = {
    **{"n_kv_heads": 4, "ffn_dim": 128, "first_dense_layers": 1, "head_dim": 0},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "nope_head_dim": 16, "rope_head_dim": 8},
    **{"v_head_dim": 16},
}
WIDTHS: dict[str, Keys] = {
    "llama": WIDE,
    "qwen3": WIDE,
    "gpt": {**WIDE, "n_kv_heads": 4, "max_seq_len": 64},
    "mixtral": WIDE_EXPERTS,
    "qwen3_moe": WIDE_EXPERTS,
    "deepseek_v3": {**WIDE_EXPERTS, **LATENT},
    "gpt_oss": {**WIDE_EXPERTS, "window": 20},
}


def narrow(world: int, parallel: Keys, models: Iterable[str] = MODELS, **keys: Any) -> Row:
    """A row in bfloat16."""
    given = {"dtype": "bfloat16", "seq_len": 64, "sequences": 4, **keys}
    label = label_of(world, parallel, {})
    return row(world, parallel, models, label, WIDTHS, **given)


BFLOAT16: dict[int, list[Row]] = {
    2: [
        narrow(2, {"dp_shard": 2}),
        narrow(2, {"tp": 2}),
        narrow(2, {"cp": 2, "cp_method": "ring"}),
        narrow(2, {"cp": 2, "cp_method": "all_gather"}),
        narrow(2, {"pp": 2, "schedule": V}),
        narrow(2, EP2, MIXTURES),
        narrow(2, {**EP2, **SYMMETRIC}, MIXTURES),
    ],
    4: [
        narrow(4, {"dp_shard": 2, "tp": 2}),
        narrow(4, {"pp": 2, "schedule": V, "tp": 2}),
        narrow(4, {"tp": 2, "dp_shard": 2, "ep": 2, **SYMMETRIC}, MIXTURES),
    ],
}
BFLOAT16_COMPILED: dict[int, list[Row]] = {
    2: [
        narrow(2, {"dp_shard": 2}, compile=COMPILED),
        narrow(2, {"tp": 2}, ["llama"], compile=COMPILED),
        narrow(2, {"cp": 2, "cp_method": "ring"}, ["llama"], compile=COMPILED),
        narrow(2, {"pp": 2, "schedule": V}, ["llama"], compile=COMPILED),
        narrow(2, EP2, ["mixtral"], compile=COMPILED),
        narrow(2, {**EP2, **SYMMETRIC}, ["mixtral"], compile=COMPILED),
    ],
}

# -- float8: every recipe -------------------------------------------------------------------------

BLOCKS: Keys = {**WIDE, "dim": 256, "n_kv_heads": 4, "head_dim": 64, "ffn_dim": 512}
"""Multiples of 128 on each of two ranks."""


def eight(world: int, recipe: str, parallel: Keys, model: str = "llama", **float8: Any) -> Row:
    """A row in bfloat16 with float8."""
    sizes = BLOCKS if recipe == "blockwise" else WIDTHS[model]
    settings = Float8(recipe=recipe, **float8)  # type: ignore[arg-type]
    label = f"{recipe}: {label_of(world, parallel, float8)}"
    keys: Keys = {"dtype": "bfloat16", "sequences": 4, "float8": settings}
    keys["seq_len"] = 256 if recipe == "blockwise" else 64
    return row(world, parallel, [model], label, {model: {**sizes, "n_layers": 2}}, **keys)


FLOAT8: dict[int, list[Row]] = {
    1: [eight(1, recipe, {}) for recipe in RECIPES],
    2: [
        *[eight(2, recipe, {"dp_shard": 2}) for recipe in RECIPES],
        *[eight(2, recipe, {"tp": 2}) for recipe in RECIPES],
        eight(2, "tensorwise", {"cp": 2, "cp_method": "all_gather"}),
        eight(2, "tensorwise", {"dp_shard": 2}, all_gather=True),
        eight(2, "tensorwise", {"tp": 2}, gather_inputs=True),
        eight(2, "tensorwise", {"tp": 2, "async_tp": True}),
        eight(2, "tensorwise", {"tp": 2}, scaling="delayed", amax_history=2),
        eight(2, "rowwise", EP2, "mixtral", experts=True),
        eight(2, "rowwise", {**EP2, **SYMMETRIC}, "mixtral", experts=True, dispatch=True),
    ],
}

TABLES: dict[str, dict[int, list[Row]]] = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "float8": FLOAT8,
    "bfloat16, compiled": BFLOAT16_COMPILED,
}
"""In the order in which they run."""


def cases_of(table: str, worlds: Iterable[int] = WORLDS) -> list[Case]:
    """All cases of a table, those of fewer ranks first."""
    rows = [each for world in worlds for each in TABLES[table].get(world, [])]
    return [case for each in rows for case in each.cases.values()]


@functools.cache
def _labels() -> dict[str, str]:
    of_worlds = [rows for worlds in TABLES.values() for rows in worlds.values()]
    return {
        str(case): each.label for rows in of_worlds for each in rows for case in each.cases.values()
    }


def name_of(case: Case) -> str:
    """Of a test: ranks, model, layout and form."""
    label = _labels()[str(case)].replace(", ", "-").replace(": ", "-").replace(" ", "=")
    form = "" if case.float8.recipe or case.dtype != "bfloat16" else "-bfloat16"
    form += "-compiled" if case.compile.enable else ""
    return f"{case.world}-{case.model}-{label}{form}"


# -- running --------------------------------------------------------------------------------------


def run_case(case: Case) -> dict[str, Any]:
    """On one rank: `parallel_run`, and the seconds that it took."""
    begin = time.perf_counter()
    mesh = _mesh_of(case)
    found = parallel_run(case, mesh)
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()
    return {**found, "seconds": time.perf_counter() - begin}


_MESHES: dict[tuple[int, ...], Mesh] = {}


def _mesh_of(case: Case) -> Mesh:
    """One for all cases of the same degrees, so that communicators are made once."""
    degrees = case.config().degrees(case.world)
    key = (*degrees.values(), case.parallel.ep, case.parallel.etp)
    if key not in _MESHES:
        _MESHES[key] = mesh_of(case)
    return _MESHES[key]


class Runs:
    """Results of cases, which run in the order of their submission; each number of ranks has a
    queue of its own.

    Args:
        device_type: "cuda" or "cpu".
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._queues: dict[int, ThreadPoolExecutor] = {}
        self._futures: dict[str, Future[list[dict[str, Any]]]] = {}

    def submit(self, cases: Iterable[Case]) -> None:
        """Queue cases, and those of one process that they are judged by."""
        for case in cases:
            for each in (case, alone(case)) if judged_by_one_process(case) else (case,):
                self._submit(each)

    def result(self, case: Case) -> list[dict[str, Any]]:
        """By rank; waits for it.

        Raises:
            RankError: a rank failed.
        """
        self.submit([case])
        return self._futures[str(case)].result()

    def close(self) -> None:
        """Drop what is still queued."""
        for queue in self._queues.values():
            queue.shutdown(wait=True, cancel_futures=True)

    def _submit(self, case: Case) -> None:
        if str(case) in self._futures:
            return
        if case.world not in self._queues:
            self._queues[case.world] = ThreadPoolExecutor(1)
        ranks = ranks_of(case.world, self.device_type)
        seconds = COMPILED_SECONDS if case.compile.enable else EAGER_SECONDS
        call = functools.partial(ranks.call, run_case, case, seconds=seconds)
        self._futures[str(case)] = self._queues[case.world].submit(call)


def alone(case: Case) -> Case:
    """The same on one rank, eager or compiled as the case."""
    return replace(case, world=1, parallel=Parallel())


def judged_by_one_process(case: Case) -> bool:
    """Whether the bound is a multiple of the error of one process."""
    return case.dtype == "bfloat16" and not case.float8.recipe


# -- judging --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    found: float = math.nan
    """float32: the largest deviation. bfloat16: the error of gradients. float8: dB."""
    base: float = math.nan
    """bfloat16 and float8: the same of one process."""
    seconds: float = math.nan
    """Of the first rank."""
    wrong: list[str] = field(default_factory=list)
    """What is out of bounds, or a traceback; empty where the case passes."""

    def __str__(self) -> str:
        word = "failed" if self.wrong else "passed"
        base = "" if math.isnan(self.base) else f", one process {self.base:.3g}"
        return f"{word} in {self.seconds:.2f} s: {self.found:.3g}{base}"


def judge(case: Case, runs: Runs) -> Verdict:
    """Compare a case with one process, by the rule of its dtype."""
    try:
        ranks = runs.result(case)
        rule = _judge_float8 if case.float8.recipe else _RULES[case.dtype]
        verdict = rule(case, ranks, runs)
        return replace(verdict, seconds=ranks[0]["seconds"])
    except Exception:
        return Verdict(wrong=[traceback.format_exc()])


def _judge_wide(case: Case, ranks: list[dict[str, Any]], runs: Runs) -> Verdict:
    """float32 and float64: the rule of `parity.py`."""
    outcome = Outcome(compare(ranks, reference(case, runs.device_type)))
    wrong = outcome.wrong(case)
    if case.recompute.offload and not any(rank["offloaded"] for rank in ranks):
        wrong = [*wrong, "nothing was offloaded"]
    return Verdict(outcome.worst, wrong=wrong)


def _judge_bfloat16(case: Case, ranks: list[dict[str, Any]], runs: Runs) -> Verdict:
    found = errors(ranks, reference(_in_float32(case), runs.device_type))
    one = alone(case)
    base = errors(runs.result(one), reference(_in_float32(one), runs.device_type))
    wrong = [
        f"{kind}: {found[kind]:.3e}, more than {limit:.3e}"
        for kind, limit in limits(base).items()
        if not found[kind] <= limit
    ]
    return Verdict(found["gradient"], base["gradient"], wrong=wrong)


def _judge_float8(case: Case, ranks: list[dict[str, Any]], runs: Runs) -> Verdict:
    emulated, device_type = _in_float32(case), runs.device_type
    exact = reference(replace(emulated, float8=Float8()), device_type)["gradients"]
    base = signal_to_noise(exact, reference(emulated, device_type)["gradients"])
    found = [signal_to_noise(exact, rank["gradients"]) for rank in ranks]
    worst = max(found, key=lambda decibels: abs(decibels - base))
    wrong = [] if abs(worst - base) <= DECIBELS else [f"{worst:.2f} dB, one process {base:.2f} dB"]
    why = why_emulated(case, device_type)
    if why and device_type == "cuda" and _has_kernels(case.float8.recipe):
        wrong.append(f"emulated: {why}")
    return Verdict(worst, base, wrong=wrong)


_RULES = {
    "float32": _judge_wide,
    "float64": _judge_wide,
    "bfloat16": _judge_bfloat16,
}


def _in_float32(case: Case) -> Case:
    return replace(case, dtype="float32")


def errors(ranks: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, float]:
    """Against a float32 reference: of gradients and parameters the root mean square over tensors of
    the deviations of `parity.py`, of losses and norms the largest."""
    kinds: dict[str, list[float]] = {}
    for name, deviation in compare(ranks, wanted).items():
        kinds.setdefault(name.split()[0], []).append(deviation)
    means = ("gradient", "parameter")
    return {k: math.hypot(*v) / len(v) ** 0.5 if k in means else max(v) for k, v in kinds.items()}


def limits(base: Mapping[str, float]) -> dict[str, float]:
    """How large `errors` may be, given those of one process. Loads of experts are equal."""
    scalars = {"loss": ROUNDING, "norm": ROUNDING}
    return {
        kind: 0.0 if kind == "loads" else BFLOAT16_FACTOR * max(error, scalars.get(kind, 0.0))
        for kind, error in base.items()
    }


def why_emulated(case: Case, device_type: str) -> str:
    """Why the products of the case's float8 layers are emulated; empty where they are not."""
    plan = case.plan()
    assert plan is not None, "the case has a float8 recipe"
    return plan.why_emulated(torch.device(device_type), torch.bfloat16)


def _has_kernels(recipe: str) -> bool:
    return RECIPES[recipe].kernel != "none" and torch.cuda.get_device_capability() == (9, 0)


# -- docs/parity-gpu.md ---------------------------------------------------------------------------

HEAD = """# Parity on GPUs

Layouts of 1, 2 and 4 GPUs over NCCL against one process on one of them. A run of

    pytest -m gpu tests/parallelisms/test_parity_gpu.py

writes the section of each number of GPUs whose cases all ran. Models are small, layouts are those
that [parity](parity.md) compares on CPUs, two steps of SGD with clipping each.

- **float32** and float64: TF32 is off. A number is the largest deviation of a case: over gradients,
  and parameters after two steps, ||g - g_ref|| / max(||g_ref||, 1e-3 ||all g_ref|| / sqrt(n)), and
  over losses and norms the relative error. It passes up to 1e-5 (float64: 1e-10); loads of experts
  are equal.
- **bfloat16**: the reference is one process in float32. A number is the error of the layout's
  gradients, as a multiple of that of one bfloat16 process, which is in the first line: eager
  against eager, compiled against compiled. The error is the root mean square of the tensors'
  deviations. It passes up to 2, and so do parameters; losses and norms pass up to twice the larger
  of one process's error and 2^-8.
- **float8**: signal-to-noise ratio of the gradients in dB, against float32 without float8. It
  passes within 1 dB of one process that emulates the recipe in float32.

Empty cells have no case: the settings refuse it, or one model stands for all.
"""


def section(world: int, verdicts: Mapping[str, Verdict], hardware: str) -> str:
    """The tables of one number of ranks.

    Args:
        verdicts: by case.
        hardware: names and versions.
    """
    own = [str(case) for table in TABLES for case in cases_of(table, [world])]
    failed = [name for name in own if verdicts[name].wrong]
    lines = [f"## {title(world)}", "", f"{hardware}. {len(own)} cases, {len(failed)} failed."]
    for table, worlds in TABLES.items():
        if rows := worlds.get(world):
            lines += ["", f"### {table}", "", *_TABLES.get(table, _by_model)(table, rows, verdicts)]
    return "\n".join(lines) + "\n"


def title(world: int) -> str:
    """Of a section."""
    return f"{world} GPU{'s' if world > 1 else ''}"


def with_sections(text: str, sections: Mapping[int, str]) -> str:
    """The document, its other sections as they are.

    Args:
        text: the document, or empty.
        sections: by number of ranks.
    """
    kept = {part.split("\n")[0]: f"## {part}" for part in text.split("\n## ")[1:]}
    parts = {title(world): kept.get(title(world), "") for world in WORLDS}
    parts |= {title(world): part for world, part in sections.items()}
    return "\n".join([HEAD, *(part.rstrip("\n") + "\n" for part in parts.values() if part)])


def hardware(n_gpus: int) -> str:
    """Names and versions of what cases ran on."""
    known = versions()
    names = [
        f"{name} {known[name]}" for name in ("torch", "cuda", "nccl", "triton") if name in known
    ]
    device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return f"{n_gpus} x {device}, {', '.join(names)}"


def _by_model(table: str, rows: list[Row], verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    yield f"| layout | {' | '.join(MODELS)} |"
    yield f"|{' --- |' * (1 + len(MODELS))}"
    if table.startswith("bfloat16"):
        bases = {m: verdicts[str(case)].base for m, case in rows[0].cases.items()}
        yield _line("one process, error", [_short(bases.get(m, math.nan)) for m in MODELS])
    for each in rows:
        found = [verdicts[str(each.cases[m])] if m in each.cases else None for m in MODELS]
        yield _line(each.label, [_cell(v) for v in found])


def _by_recipe(table: str, rows: list[Row], verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    yield "| recipe, layout | model | dB | one process, dB | products |"
    yield f"|{' --- |' * 5}"
    for each in rows:
        for model, case in each.cases.items():
            verdict = verdicts[str(case)]
            emulated = why_emulated(case, "cuda" if torch.cuda.is_available() else "cpu")
            cells = [model, "**failed**" if verdict.wrong else f"{verdict.found:.1f}"]
            cells += [f"{verdict.base:.1f}", "emulated" if emulated else "kernels"]
            yield _line(each.label, cells)


_TABLES = {"float8": _by_recipe}


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.wrong:
        return "**failed**"
    return (
        _short(verdict.found) if math.isnan(verdict.base) else f"{verdict.found / verdict.base:.2f}"
    )


def _short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


def _line(label: str, cells: Iterable[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |"
