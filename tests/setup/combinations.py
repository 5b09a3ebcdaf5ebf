"""Which features can be combined: writes docs/combinations.md from the rules and the parity tests.

    python -m tests.setup.combinations

Two features are put into one small run, by the rules of a start. Where it is legal, the cell names
a test that trains with both and compares with one process, if there is one.
"""

import itertools
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from dtron.config import RunConfig
from dtron.setup.rules import ModelCandidate, all_broken

DOCUMENT = Path(__file__).parents[2] / "docs" / "combinations.md"
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
NUMBERS = {f"parallel.{axis}" for axis in (*DEGREES, "ep", "etp", "defer_head")}
NUMBERS |= {"train.loss_chunks", "lora.rank"}
"""Keys of which any value above their default is the feature."""


@dataclass(frozen=True)
class Feature:
    """What is combined."""

    name: str
    keys: Mapping[str, Any]
    """Its settings."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """What it needs to act; the other feature may set these otherwise."""

    def acts_in(self, run: ModelCandidate) -> bool:
        """Whether a run has it."""
        return all(
            _is_set(run, key, value) if key in self.keys else _is_set(run, key)
            for key, value in {**self.needs, **self.keys}.items()
        )


def _is_set(run: ModelCandidate, key: str, value: Any = None) -> bool:
    section, name = key.rsplit(".", 1)
    if section == "model.override":
        return bool(getattr(run.model, name))
    found = getattr(getattr(run.config, section), name)
    if key in NUMBERS:
        found = run.degrees[name] if name in DEGREES else found
        return found > (name != "defer_head")
    return bool(found) if value is None else found == value


def _parallel(**keys: Any) -> dict[str, Any]:
    return {f"parallel.{key}": value for key, value in keys.items()}


TP, CP, PP, SHARDS = _parallel(tp=2), _parallel(cp=2), _parallel(pp=2), _parallel(dp_shard=2)
MIXTURE = {"model.name": "mixtral"}
EXPERTS = {**MIXTURE, **_parallel(ep=2, dp_shard=4)}
LATENT = {"model.name": "deepseek_v3"}
SCALED = {"float8.recipe": "tensorwise"}
SCHEDULES = "GPipe 1F1B Interleaved1F1B ZBVZeroBubble DualPipeV"
FEATURES = [
    *(Feature(f"{axis}", _parallel(**{axis: 2})) for axis in ("dp_replicate", "dp_shard", "tp")),
    Feature("tp without sequence_parallel", _parallel(sequence_parallel=False), TP),
    Feature("async_tp", _parallel(async_tp=True), TP),
    *(Feature(f"cp {m}", _parallel(cp_method=m), CP) for m in ("ring", "all_gather", "ulysses")),
    Feature("cp hierarchical", _parallel(cp_method="hierarchical"), _parallel(cp=4)),
    *(Feature(f"pp {name}", _parallel(schedule=name), PP) for name in SCHEDULES.split()),
    Feature("defer_head", _parallel(defer_head=1), PP),
    Feature("ep", _parallel(ep=2), {**MIXTURE, **_parallel(dp_shard=4)}),
    Feature("etp", _parallel(etp=2), {**MIXTURE, **_parallel(dp_shard=4)}),
    *(
        Feature(f"ep {name}", _parallel(dispatcher=name), EXPERTS)
        for name in ("symmetric_memory", "bounded_all_to_all", "hierarchical", "deepep")
    ),
    *(Feature(f"zero {stage}", _parallel(zero=stage), SHARDS) for stage in (1, 2)),
    Feature("reduce_dtype bfloat16", _parallel(reduce_dtype="bfloat16"), SHARDS),
    Feature("reduce_by all_to_all", _parallel(reduce_by="all_to_all"), SHARDS),
    Feature("copy_engines", _parallel(copy_engines=True), SHARDS),
    Feature(
        "blocks_per_unit",
        _parallel(blocks_per_unit=2),
        {**SHARDS, "model.override.n_layers": 8},
    ),
    Feature(
        "accumulate_in_matmul",
        _parallel(accumulate_in_matmul=True),
        {**_parallel(dp_shard=2, zero=1), "train.global_batch": 32},
    ),
    Feature(
        "overlap_micro_batches",
        _parallel(overlap_micro_batches=True),
        {**EXPERTS, **_parallel(zero=1), "train.global_batch": 32},
    ),
    *(Feature(f"recompute {m}", {"recompute.mode": m}) for m in ("full", "attention", "selective")),
    Feature("recompute.modules", {"recompute.mode": "full", "recompute.modules": ["attn"]}),
    Feature("recompute.offload", {"recompute.offload": True}),
    Feature("compile", {"compile.enable": True}),
    Feature("loss_chunks", {"train.loss_chunks": 2}),
    Feature("mask_documents", {"data.mask_documents": True}),
    Feature("sliding window", {"model.override.window": 8}),
    Feature("attention_dropout", {"model.override.attention_dropout": 0.1}),
    Feature("tied weights", {"model.override.tied": True}),
    Feature("experts", {"model.override.n_experts": 8}, MIXTURE),
    Feature("latent attention", {"model.override.kv_lora_rank": 32}, LATENT),
    Feature("mtp", {"model.override.mtp": 1}, LATENT),
    *(Feature(f"float8 {r}", {"float8.recipe": r}) for r in ("tensorwise", "rowwise", "blockwise")),
    Feature("float8 delayed", {"float8.scaling": "delayed"}, SCALED),
    *(
        Feature(f"float8.{key}", {f"float8.{key}": True}, {**SCALED, **needs})
        for key, needs in {
            **{"output": {}, "all_gather": SHARDS, "gather_inputs": TP, "experts": MIXTURE}
        }.items()
    ),
    Feature("float8.dispatch", {"float8.dispatch": True}, EXPERTS),
    Feature("LoRA", {"lora.rank": 8}),
    *(Feature(name, {"optim.name": name}) for name in ("muon", "lion")),
]
SIZES: dict[str, Any] = {
    **{"n_layers": 4, "vocab_size": 128, "dim": 64, "n_heads": 4, "n_kv_heads": 4},
    **{"head_dim": 16, "ffn_dim": 128},
}
MIXED = {"n_experts": 8, "expert_dim": 64, "ffn_dim": 0}
SIZES_OF: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mixtral": {**SIZES, **MIXED},
    "deepseek_v3": {
        **{**SIZES, **MIXED, "ffn_dim": 128, "head_dim": 0, "q_lora_rank": 32, "kv_lora_rank": 32},
        **{"nope_head_dim": 16, "rope_head_dim": 16, "v_head_dim": 16, "mtp": 0},
    },
}


def settings_of(features: Iterable[Feature]) -> dict[str, Any] | None:
    """Settings by key with which all these act; None where two are values of one key."""
    keys: dict[str, Any] = {}
    needs: dict[str, Any] = {}
    for feature in features:
        if any(keys.get(key, value) != value for key, value in feature.keys.items()):
            return None
        keys |= feature.keys
        for key, value in feature.needs.items():  # more ranks; of models, the one that has all
            larger = max if isinstance(value, int) else min
            needs[key] = larger(value, needs.get(key, value))
    return {**needs, **keys}


def sections_of(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by section; those of `model.override` are a section of their own."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, name = key.rsplit(".", 1)
        sections.setdefault(section, {})[name] = value
    return sections


def run_of(a: Feature, b: Feature) -> ModelCandidate | None:
    """A run with both, on as few ranks as they need; None where they are values of one key."""
    settings = settings_of((a, b))
    if settings is None:
        return None
    sections = sections_of(settings)
    override = sections.pop("model.override", {})
    name = sections.setdefault("model", {}).setdefault("name", "llama")
    sections["model"]["override"] = {**SIZES_OF[name], **override}
    parallel = sections.setdefault("parallel", {})
    parallel.setdefault("dp_shard", 1)
    degrees = [parallel.get(axis, 1) for axis in DEGREES]
    world = degrees[0] * degrees[1] * degrees[2] * degrees[3] * degrees[4]
    micro_batches = 4 if parallel.get("pp", 1) > 1 else 1
    batch = micro_batches * degrees[1] * degrees[2]
    sections["train"] = {"seq_len": 64, "global_batch": batch, **sections.get("train", {})}
    return ModelCandidate(RunConfig.of(sections), world)


class Tested(NamedTuple):
    """A test against one process."""

    name: str
    features: set[str]
    tensors: bool
    """Whether tensors are compared, and not the noise of float8 over all gradients alone, in which
    one wrong tensor is not seen."""

    def shows(self, pair: set[str]) -> bool:
        """Whether the test would see that a pair gives wrong results."""
        return pair <= self.features and (self.tensors or any("float8" in name for name in pair))


def tested() -> Iterator[Tested]:
    """The default run's first, then those with most features, at last those of pairs.txt."""
    from tests.lora import test_lora_layouts
    from tests.parallelisms import pairs, test_matrix, test_parity  # which choose cases for seconds

    named = {}
    for test, cases in {
        "test_special_case_equals_one_process": test_parity.SHALLOW,
        "test_float8_equals_one_process": test_parity.FLOAT8,
        "test_settings_together_equal_one_process": test_parity.PAIRED,
        "test_layouts_equal_one_process": test_lora_layouts.CASES,
        "test_equals_one_process": [case for case in test_matrix.CASES if not case.refusal()],
    }.items():
        named |= {f"{test}[{case}]": case for case in reversed(cases)}
    found = []
    for test, case in named.items():
        run = ModelCandidate(case.config(), case.world)
        acting = {each.name for each in FEATURES if each.acts_in(run)}
        if len(acting) > 1:
            matrix = test.startswith("test_equals")
            taken = (str(case) in test_parity.DEFAULT, str(case) in test_parity.SELECTED)
            order = (*(not each for each in taken), matrix, -len(acting), test)
            found.append((order, Tested(test, acting, case.rounds_alike)))
    yield from (test for _, test in sorted(found, key=lambda each: each[0]))
    for line in pairs.LINES:
        features = set(line.split(", "))
        name = f"test_pairs_equal_one_process[{line}]"
        yield Tested(name, features, pairs.compares_tensors(features))


@cache
def cells() -> dict[tuple[str, str], tuple[str, str]]:
    """(kind, what it names) by two features: ("test", its name), ("rule", its message), ("legal",
    "") without such a test, or ("same key", "")."""
    cases, found = list(tested()), {}
    with mock.patch("dtron.setup.float8_plan.require_torchao"):  # whether it is installed or not
        for a, b in itertools.combinations(FEATURES, 2):
            both = {a.name, b.name}
            test = next((case.name for case in cases if case.shows(both)), "")
            run = run_of(a, b)
            if run is None:
                assert not test, f"{both}: {test}"
                cell = ("same key", "")
            elif test:  # maybe of a size or with a third setting that the run lacks
                cell = ("test", test)
            else:
                messages = list(dict.fromkeys(all_broken(run)))
                cell = ("rule", "; ".join(messages)) if messages else ("legal", "")
            found[a.name, b.name] = cell
    return found


def document() -> str:
    """docs/combinations.md."""
    found = cells()
    tests = list(dict.fromkeys(what for kind, what in found.values() if kind == "test"))
    rules = list(dict.fromkeys(what for kind, what in found.values() if kind == "rule"))
    pairs = itertools.product(("", *string.ascii_lowercase), string.ascii_lowercase)
    marks = {("rule", rule): f"**{a}{b}**" for rule, (a, b) in zip(rules, pairs, strict=False)}
    marks |= {("test", test): str(number) for number, test in enumerate(tests, 1)}
    marks |= {("legal", ""): "GPU", ("same key", ""): ""}
    columns = range(1, len(FEATURES))
    lines = [HEAD.format(**counts(found)), f"| | {' | '.join(map(str, columns))} |"]
    lines.append(f"|{' --- |' * (len(columns) + 1)}")
    for number, b in enumerate(FEATURES, 1):
        row = [marks[found[a.name, b.name]] for a in FEATURES[: number - 1]]
        lines.append(
            f"| {number} {b.name} | {' | '.join([*row, *[''] * (len(columns) - len(row))])} |"
        )
    lines += ["", "## Rules", "", "| | message of a start |", "| --- | --- |"]
    lines += [f"| {marks['rule', rule]} | {rule} |" for rule in rules]
    lines += ["", "## Tests", "", TESTS, "", "| | test |", "| --- | --- |"]
    lines += [f"| {number} | `{test}` |" for number, test in enumerate(tests, 1)]
    return "\n".join(lines) + "\n"


LATER = {
    *("accumulate_in_matmul", "blocks_per_unit", "ep bounded_all_to_all", "ep hierarchical"),
    *("LoRA", "lion", "muon", "overlap_micro_batches", "recompute.modules"),
}
"""Features that the first version of the page did not have."""


def counts(found: Mapping[tuple[str, str], tuple[str, str]]) -> dict[str, int]:
    """Count pairs of different keys, refused ones, and those of features of the first version."""
    kinds = {pair: kind for pair, (kind, _) in found.items() if kind != "same key"}
    refused = [pair for pair, kind in kinds.items() if kind == "rule"]
    first = [pair for pair in refused if not LATER.intersection(pair)]
    return {"pairs": len(kinds), "refused": len(refused), "first": len(first)}


HEAD = """# What can be combined

Any two features of training in a small run. A **letter** is the rule that refuses them before any
process starts. A number is a test that trains with both and compares with one process; `GPU` is a
legal pair that needs GPUs. Float8 whose scales depend on the layout is compared by the noise of all
gradients, in which a wrong tensor can hide: such a test counts only for pairs with float8. Empty
cells are two values of one key, or above the diagonal. Some rules depend on sizes: `dtron plan`
checks those of your run. Written from the rules of a start by

    python -m tests.setup.combinations

{refused} of {pairs} pairs are refused. Of the pairs of the 46 features that this page had at first
(2026-11-24), 71 were refused; {first} are now. Legal pairs can form a refused triple:
`recompute.mode = "attention"` or `"selective"`, `compile.enable`, and a dispatcher that breaks
graphs ([experts](expert-parallel.md)).
"""
TESTS = """`test_equals_one_process` is in `tests/parallelisms/test_matrix.py`
([parity](parity.md)), `test_pairs_equal_one_process` in `tests/parallelisms/test_pairs.py`,
`test_layouts_equal_one_process` in `tests/lora/test_lora_layouts.py`, the others are in
`tests/parallelisms/test_parity.py`. A name has the model, the ranks, and the settings
that are not at their default."""

if __name__ == "__main__":
    DOCUMENT.write_text(document())
