"""Layouts equal one process over NCCL, 1, 2 and 4 ranks; writes docs/parity-gpu.md.

pytest -m gpu tests/parallelisms/test_parity_gpu.py
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu_ranks import RankError, most_ranks
from tests.parallelisms.gpu_cases import MIXTURES, TABLES, WORLDS, cases_of, name_of
from tests.parallelisms.gpu_parity import (
    HEAD,
    Runs,
    Verdict,
    alone,
    errors,
    hardware,
    judge,
    judged_by_one_process,
    limits,
    section,
    with_sections,
)
from tests.parallelisms.parity import Case, reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity-gpu.md"
FLOAT32, BFLOAT16, FLOAT8, COMPILED = (cases_of(table) for table in TABLES)
# The same code over gloo, where it runs by default: a case of each rule.
ON_CPUS = [
    "2-mixtral-dp_shard=2-ep=2-dispatcher=symmetric_memory",
    "2-gpt_oss-dp_shard=2-bfloat16",
    "1-llama-mxfp8-1=GPU",
]


@pytest.fixture(scope="session")
def verdicts() -> dict[str, Verdict]:
    """Of the cases that have run on GPUs, by case."""
    return {}


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The cases of all tests that were selected, queued in their order."""
    here = (item for item in request.session.items if item.path == Path(__file__))
    parameters = (item.callspec.params for item in here if hasattr(item, "callspec"))  # type: ignore[attr-defined]
    cases = [found["case"] for found in parameters if "case" in found]
    assert torch.get_float32_matmul_precision() == "highest", "no TF32 in references"
    runs = Runs("cuda")
    runs.submit(case for case in cases if case.world <= most_ranks())
    yield runs
    runs.close()


def run_on_gpus(
    case: Case,
    runs: Runs,
    verdicts: dict[str, Verdict],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Judge a case, and log what it took."""
    if most_ranks() < case.world:
        pytest.skip(f"needs {case.world} GPUs")
    verdict = verdicts[str(case)] = judge(case, runs)
    with capsys.disabled():
        print(f"\n{name_of(case)}: {verdict}", end=" ", flush=True)
    assert not verdict.wrong, "\n".join(verdict.wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FLOAT32, ids=name_of)
def test_float32_equals_one_process(case, runs, verdicts, capsys) -> None:
    run_on_gpus(case, runs, verdicts, capsys)


@pytest.mark.gpu
@pytest.mark.parametrize("case", BFLOAT16, ids=name_of)
def test_bfloat16_is_as_exact_as_one_process(case, runs, verdicts, capsys) -> None:
    run_on_gpus(case, runs, verdicts, capsys)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FLOAT8, ids=name_of)
def test_float8_is_as_exact_as_one_process(case, runs, verdicts, capsys) -> None:
    run_on_gpus(case, runs, verdicts, capsys)


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPILED, ids=name_of)
def test_compiled_bfloat16_is_as_exact_as_one_process(case, runs, verdicts, capsys) -> None:
    run_on_gpus(case, runs, verdicts, capsys)


@pytest.mark.gpu
def test_document(verdicts: dict[str, Verdict]) -> None:
    """Written whatever the cases' outcome: failed ones are marked."""
    ran = {
        world
        for world in WORLDS
        if all(str(case) in verdicts for table in TABLES for case in cases_of(table, [world]))
    }
    if not ran:
        pytest.skip("not all cases of any number of GPUs ran")
    old = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    new = {world: section(world, verdicts, hardware(world)) for world in ran}
    DOCUMENT.write_text(with_sections(old, new))


@pytest.fixture(scope="module")
def cpu_runs() -> Iterator[Runs]:
    runs = Runs("cpu")
    yield runs
    runs.close()


@pytest.mark.parametrize("name", ON_CPUS)
def test_the_same_code_on_cpus(name: str, cpu_runs: Runs) -> None:
    (case,) = (c for cases in (FLOAT32, BFLOAT16, FLOAT8) for c in cases if name_of(c) == name)
    verdict = judge(case, cpu_runs)
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert verdict.seconds > 0


def test_every_case_has_a_name_and_settings_allow_it() -> None:
    cases = [*FLOAT32, *BFLOAT16, *FLOAT8, *COMPILED]
    assert (
        len({name_of(case) for case in cases}) == len({str(case) for case in cases}) == len(cases)
    )
    assert not [name_of(case) for case in cases if case.refusal()]
    assert not [name_of(case) for case in cases if case.world not in WORLDS]
    models = {case.model for case in COMPILED}
    for table in (FLOAT32, BFLOAT16):
        assert {case.model for case in table} == models  # all of them
    pairs = {(case.model, case.parallel.dispatcher) for case in BFLOAT16 if case.parallel.ep > 1}
    dispatchers = ("all_to_all", "symmetric_memory", "hierarchical")
    assert pairs == {(m, d) for m in MIXTURES for d in dispatchers}


class Planted:
    """Runs whose ranks all have the reference's results, but for what a test changes."""

    device_type = "cpu"

    def __init__(self, factor: float, of_one: float) -> None:
        self.factor, self.of_one = factor, of_one

    def result(self, case: Case) -> list[dict]:
        """Gradients off by a share, one process's by another."""
        wanted = reference(Case("llama", steps=1, dtype="float32", sequences=2, override={}))
        off = self.of_one if case == alone(case) else self.factor
        changed = {name: grad * (1 + off) for name, grad in wanted["gradients"].items()}
        return [{**wanted, "gradients": changed, "seconds": 1.0, "offloaded": 0}]


@pytest.mark.parametrize(
    ("dtype", "factor", "passes"),
    [
        ("float32", 9e-6, True),
        ("float32", 1.1e-5, False),
        ("float32", math.nan, False),
        ("bfloat16", 1.9e-2, True),
        ("bfloat16", 2.1e-2, False),
        ("bfloat16", math.nan, False),
    ],
)
def test_bounds(dtype: str, factor: float, passes: bool) -> None:
    case = Case("llama", 2, steps=1, dtype=dtype, sequences=2, override={})
    verdict = judge(case, Planted(factor, 1e-2))  # type: ignore[arg-type]
    assert bool(verdict.wrong) != passes


def test_limits_of_bfloat16() -> None:
    base = {"gradient": 0.01, "parameter": 1e-4, "loss": 1e-6, "norm": 0.1, "loads": 0.0}
    assert limits(base) == {
        "gradient": 0.02,
        "parameter": 2e-4,
        "loss": 2**-7,
        "norm": 0.2,
        "loads": 0.0,
    }
    wanted = reference(Case("llama", steps=1, sequences=2))
    one_wrong = {**wanted, "gradients": {**wanted["gradients"]}}
    name = min(wanted["gradients"], key=lambda name: wanted["gradients"][name].norm())
    one_wrong["gradients"][name] = 2 * wanted["gradients"][name]
    n = len(wanted["gradients"])
    found = errors([one_wrong], wanted)
    assert found["gradient"] == pytest.approx(n**-0.5)  # not lost among larger tensors
    assert found["parameter"] == found["loss"] == 0


def test_failures_are_verdicts() -> None:
    class Broken:
        device_type = "cpu"

        def result(self, case: Case) -> list[dict]:
            raise RankError("rank 1:\nno memory")

    verdict = judge(FLOAT32[0], Broken())  # type: ignore[arg-type]
    assert "no memory" in verdict.wrong[0]


def test_sections_of_the_document_are_kept() -> None:
    some = Verdict(3.2e-7, seconds=0.5)
    verdicts = {str(case): some for case in FLOAT32}
    verdicts |= {str(case): Verdict(0.021, 0.02, 0.5) for case in [*BFLOAT16, *COMPILED]}
    verdicts |= {str(case): Verdict(17.2, 17.4, 0.5) for case in FLOAT8}
    verdicts[str(FLOAT32[0])] = Verdict(wrong=["off"])
    one, two = (section(world, verdicts, f"{world} x fast") for world in (1, 2))
    assert "| 1 GPU | **failed** | 3e-7 |" in one
    assert "1 x fast" in one
    assert "1 failed" in one
    assert "| one process, error | 2e-2 |" in two
    assert "| dp_shard 2 | 1.05 |" in two
    assert "| tensorwise: tp 2 | llama | 17.2 | 17.4 | emulated |" in two
    text = with_sections("", {2: two})
    assert text.startswith(HEAD)
    assert "## 1 rank\n" not in text
    text = with_sections(text, {1: one})
    assert text.index("## 1 rank\n") < text.index("## 2 ranks\n")
    assert with_sections(text, {2: two}) == text
    assert all(judged_by_one_process(case) for case in BFLOAT16)
