"""Parity over NCCL: how the cases of gpu_cases.py run, and by which rule they are judged.

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
from dtron.config import Float8, Parallel
from dtron.float8 import RECIPES
from dtron.models import MODELS
from dtron.parallelisms import Mesh
from tests.gpu_ranks import ranks_of
from tests.parallelisms.gpu_cases import TABLES, WORLDS, Row, cases_of
from tests.parallelisms.parity import (
    DECIBELS,
    Case,
    Outcome,
    all_gradients,
    compare,
    mesh_of,
    parallel_run,
    reference,
    signal_to_noise,
)

BFLOAT16_FACTOR = 2.0
ROUNDING = 2.0**-8
"""Of one number to bfloat16: losses and norms of one process that are nearer are so by luck."""
EAGER_SECONDS, COMPILED_SECONDS = 60, 240

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
    found = [signal_to_noise(exact, gradients) for gradients in all_gradients(ranks)]
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
    # One process's error of a single number may be near 0 by chance.
    kinds = ("loss", "sources", "norm", "validation", "balance", "z")
    scalars: dict[str, float] = dict.fromkeys(kinds, ROUNDING)
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

Layouts of 1, 2 and 4 ranks over NCCL against one process on one of their GPUs. A run of

    pytest -m gpu tests/parallelisms/test_parity_gpu.py

writes the section of each number of ranks whose cases all ran. With NCCL 2.30 or newer and
`NCCL_MULTI_RANK_GPU_ENABLE=1` in the environment ranks share GPUs, so that one GPU is enough:
kernels and collectives are the same, but nothing crosses links between GPUs. Models are small,
layouts are those that [parity](parity.md) compares on CPUs, two steps of SGD with clipping each.

- **float32** and float64: TF32 is off. A number is the largest deviation of a case: over gradients,
  and parameters after two steps, ||g - g_ref|| / max(||g_ref||, 1e-3 ||all g_ref|| / sqrt(n)), and
  over losses and norms the relative error. It passes up to 1e-5 (float64: 1e-10); loads of experts
  are equal.
- **bfloat16**: the reference is one process in float32. A number is the error of the layout's
  gradients, as a multiple of that of one bfloat16 process, which is in the first line: eager
  against eager, compiled against compiled. The error is the root mean square of the tensors'
  deviations. It passes up to 2, and so do parameters; losses, of validation and routers too, and
  norms pass up to twice the larger of one process's error and 2^-8.
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
    return f"{world} rank{'s' if world > 1 else ''}"


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


def hardware(world: int) -> str:
    """Names and versions of what cases of that many ranks ran on."""
    known = versions()
    names = [
        f"{name} {known[name]}" for name in ("torch", "cuda", "nccl", "triton") if name in known
    ]
    device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    gpus = min(world, torch.cuda.device_count() or world)
    shared = f" that {world} ranks share" if gpus < world else ""
    return f"{gpus} x {device}{shared}, {', '.join(names)}"


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
