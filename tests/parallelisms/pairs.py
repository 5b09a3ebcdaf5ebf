"""Cases in which any two features of docs/combinations.md meet that no other test has together.

    python -m tests.parallelisms.pairs

adds them to pairs.txt, a case a line: the names of its features. It is needed when test_pairs.py
says that a pair is missing. A line whose features are refused by now is deleted by hand before.
"""

import itertools
import random
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from dtron.config import Compile, Float8, Lora, Parallel, Recompute
from dtron.errors import ConfigError
from dtron.setup.rules import ModelCandidate
from tests.parallelisms.parity import EAGER, Case
from tests.setup.combinations import (
    DEGREES,
    FEATURES,
    SIZES_OF,
    Feature,
    Tested,
    sections_of,
    settings_of,
)

LIST = Path(__file__).with_name("pairs.txt")
MOST_RANKS, MOST_COMPILED, MOST_FEATURES = 8, 4, 12
"""Of a case; MOST_COMPILED ranks where blocks are compiled, which each rank does."""
BY_NAME = {feature.name: feature for feature in FEATURES}
ON_GPUS = {"ep deepep"}
"""Features without an implementation for CPUs."""
UPDATES = {"muon", "lion"}
"""Features of the update, which a case shows only where parameters are compared."""


def case_of(names: Collection[str]) -> Case | None:
    """Return the case on the fewest ranks that has these features; None if each is refused."""
    features = [BY_NAME[name] for name in names]
    settings = settings_of(features)
    if settings is None:
        return None
    least = _least_degrees(settings)
    spread = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (2, 4))
    for (replicas, shards), n_micro_batches in itertools.product(spread, (4, 1)):
        degrees = {**least, "dp_replicate": replicas, "dp_shard": shards}
        world = replicas * shards * least["pp"] * least["cp"] * least["tp"]
        if world <= MOST_RANKS:
            case = _case(settings, degrees, world, n_micro_batches)
            if _has(case, features):
                return case
    return None


def compares_tensors(names: Collection[str]) -> bool:
    """Whether the case of these features compares tensors, and not the noise of float8 alone."""
    settings = settings_of([BY_NAME[name] for name in names])
    assert settings is not None
    return _case(settings, _least_degrees(settings), 1, 1).rounds_alike


def _least_degrees(settings: dict[str, Any]) -> dict[str, int]:
    return {axis: settings.get(f"parallel.{axis}", 1) for axis in DEGREES}


def _case(
    settings: dict[str, Any], degrees: dict[str, int], world: int, n_micro_batches: int
) -> Case:
    sections = sections_of(settings)
    model = sections.get("model", {}).get("name", "llama")
    parallel = {**sections.get("parallel", {}), **degrees}
    if parallel.get("dispatcher") == "hierarchical":
        parallel["ep_inner"] = 1  # each rank is a host
    scaled = sections.get("float8", {})
    steps = 2
    if scaled.get("scaling") == "delayed":
        scaled, steps = {**scaled, "amax_history": 2}, 4
    return Case(
        model,
        world,
        Parallel(**parallel),
        Recompute(**sections.get("recompute", {})),
        EAGER if "compile" in sections else Compile(),
        {**SIZES_OF[model], **sections.get("model.override", {})},
        dtype="float64",
        sequences=n_micro_batches * degrees["dp_replicate"] * degrees["dp_shard"],
        loss_chunks=sections.get("train", {}).get("loss_chunks", 1),
        seq_len=16 * max(2, degrees["cp"]),
        documents=sections.get("data", {}).get("mask_documents", False),
        steps=steps,
        optimizer=sections.get("optim", {}).get("name", "sgd"),
        float8=Float8(**scaled),
        lora=Lora(**sections.get("lora", {})),
    )


def _has(case: Case, features: Collection[Feature]) -> bool:
    """Whether a case is legal, all features act in it, and those of the update can be seen."""
    if UPDATES.intersection(each.name for each in features) and not case.rounds_alike:
        return False
    try:
        run = ModelCandidate(case.config(), case.world)
        return not case.refusal() and all(each.acts_in(run) for each in features)
    except ConfigError:
        return False


LINES = tuple(LIST.read_text(encoding="utf-8").splitlines())


def case_of_line(line: str) -> Case:
    """Return the case of a line of pairs.txt."""
    case = case_of(line.split(", "))
    assert case is not None, f"{line}: refused; delete it, run python -m tests.parallelisms.pairs"
    return case


def covering(missing: set[tuple[str, str]]) -> Iterator[set[str]]:
    """Yield sets of features in which all these pairs meet, as few as a greedy choice finds."""
    order = random.Random(0)
    if impossible := [pair for pair in sorted(missing) if case_of(pair) is None]:
        raise SystemExit(f"no case has {impossible}")
    while missing:
        first = order.choice(sorted(missing))
        names = set(first)
        rest = set(BY_NAME) - names - ON_GPUS
        while rest and len(names) < MOST_FEATURES:
            gain = {each: len(_shown({*names, each}) & missing) for each in sorted(rest)}
            best = max(sorted(rest), key=lambda each: gain[each])
            if gain[best] <= len(_shown(names) & missing):
                break
            rest.remove(best)
            case = case_of(sorted({*names, best}))
            if case and not (case.compile.enable and case.world > MOST_COMPILED):
                names.add(best)
        missing -= _shown(names)
        yield names


def _shown(names: Collection[str]) -> set[tuple[str, str]]:
    """Return the pairs of which the case of these features would see that they are wrong."""
    order = {name: i for i, name in enumerate(BY_NAME)}
    if settings_of([BY_NAME[name] for name in names]) is None:
        return set()
    test = Tested("", set(names), compares_tensors(names))
    pairs = itertools.combinations(sorted(names, key=order.__getitem__), 2)
    return {pair for pair in pairs if test.shows(set(pair))}


if __name__ == "__main__":
    from tests.setup.combinations import cells

    missing = {pair for pair, (kind, _) in cells().items() if kind == "legal"}
    sets = list(covering({pair for pair in missing if not ON_GPUS.intersection(pair)}))
    with LIST.open("a", encoding="utf-8") as file:
        for names in sets:
            file.write(", ".join(name for name in BY_NAME if name in names) + "\n")
