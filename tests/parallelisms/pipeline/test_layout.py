"""Layers on stages: balanced, counted out, and in Megatron-LM's grammar."""

from itertools import groupby, product

import pytest

from dtron.errors import ConfigError
from dtron.parallelisms.pipeline.layout import Stage, parse_layout, split_layers
from dtron.parallelisms.pipeline.schedules import stage_ranks


def counts(stages: list[Stage]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def heaviest(layers: tuple[int, ...] | list[int], head: float) -> float:
    return max(*layers[:-1], layers[-1] + head, 0)


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "head", "expected"),
    [
        (32, 4, 1, [8, 8, 8, 8]),
        (30, 4, 1, [7, 8, 8, 7]),
        (31, 4, 1, [8, 8, 8, 7]),
        (30, 4, 0, [7, 7, 8, 8]),
        (30, 4, 2.6, [8, 8, 8, 6]),
        (5, 1, 1, [5]),
        (4, 6, 1, [0, 1, 1, 1, 1, 0]),
        (0, 2, 1, [0, 0]),
    ],
)
def test_split(n_layers: int, n_stages: int, head: float, expected: list[int]) -> None:
    stages = split_layers(n_layers, n_stages, head)
    assert counts(stages) == expected
    assert [i for stage in stages for i in stage.layers] == list(range(n_layers))
    assert [stage.embedding for stage in stages] == [True] + [False] * (n_stages - 1)
    assert [stage.head for stage in stages] == [False] * (n_stages - 1) + [True]


@pytest.mark.parametrize("head", [0, 1, 2.6])
def test_split_is_optimal(head: float) -> None:
    """Against every split in which no stage of the middle is empty."""
    for n_layers, n_stages in product(range(1, 8), range(1, 5)):
        if n_stages > n_layers + 2:
            continue
        possible = [
            split
            for split in product(range(n_layers + 1), repeat=n_stages)
            if sum(split) == n_layers and all(split[1:-1])
        ]
        best = min(heaviest(split, head) for split in possible)
        found = counts(split_layers(n_layers, n_stages, head))
        assert tuple(found) in possible
        assert heaviest(found, head) == pytest.approx(best)


def test_split_refuses_more_stages_than_can_be_filled() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pp x .* = 7 stages, .* fills 1 to 6"):
        split_layers(4, 7)
    with pytest.raises(ConfigError, match="= 0 stages"):
        split_layers(4, 0)
    with pytest.raises(ConfigError, match="use 0 or more"):
        split_layers(4, 2, head_weight=-1)


def test_megatrons_example() -> None:
    """DeepSeek-V3 on 16 ranks with 2 stages each: the table of Megatron-LM's documentation."""
    stages = parse_layout("Et*3|(tt|)*29,m|L", 61, 32, n_prediction_layers=1)
    ranks = stage_ranks("loop", 16, 2)

    def messages(stage: Stage) -> str:
        parts = [("embedding", stage.embedding), ("mtp", stage.prediction_layers)]
        parts += [(f"{len(stage.layers)} decoder", len(stage.layers)), ("loss", stage.head)]
        return " + ".join(name for name, held in parts if held)

    rows = [
        [messages(stage) for stage, holder in zip(stages, ranks, strict=True) if holder == rank]
        for rank in range(16)
    ]
    table = [(len(list(same)), row) for row, same in groupby(rows)]
    assert table == [
        (1, ["embedding + 3 decoder", "2 decoder"]),
        (13, ["2 decoder", "2 decoder"]),
        (1, ["2 decoder", "mtp"]),
        (1, ["2 decoder", "loss"]),
    ]
    assert [i for stage in stages for i in stage.layers] == list(range(61))
    assert str(stages[0]) == "embedding + layers 0-2"
    assert str(stages[-2]) == "1 x prediction layer"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("Ett|tt|ttL", [2, 2, 2]),
        ("E t*2, | t*2 | t*2 L", [2, 2, 2]),
        ("E(tt|)*2ttL", [2, 2, 2]),
        ("E(t*2|)*3L", [2, 2, 2, 0]),
        ("E|(tt|)*3,L", [0, 2, 2, 2, 0]),
        ("E||t*6|L", [0, 0, 6, 0]),
        ("E|*2t*6|L", [0, 0, 6, 0]),
        ("E((t|)*2t)*2|L*1", [1, 1, 2, 1, 1, 0]),
        ([1, 2, 3], [1, 2, 3]),
        ((0, 6, 0), [0, 6, 0]),
    ],
)
def test_layouts(layout: str | list[int], expected: list[int]) -> None:
    stages = parse_layout(layout, 6, len(expected))
    assert counts(stages) == expected
    assert stages[0].embedding
    assert stages[-1].head


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ett|tL", "has 2 stages, but parallel.pp x parallel.stages_per_rank is 3"),
        ("Et|t|L", r"has 2 layers \(t\), but the model has 3"),
        ("tE|t|tL", r"character 2: E \(embedding\) must occur once, as the first letter"),
        ("Et|Et|tL", r"character 4: E \(embedding\) must occur once"),
        ("t|t|tL", r"has no E \(embedding\); write it first"),
        ("Et|t|Lt", r"character 6: L \(head\) must occur once, as the last letter"),
        ("Et|t|t", r"has no L \(head\)"),
        ("", r"has no E"),
        ("Et|x|L", r"character 4: 'x' is unknown; use E \(embedding\), t \(layer\)"),
        ("Et|(t|tL", r"character 4: this \( is not closed"),
        ("Et|t)|tL", r"character 5: unmatched \)"),
        ("Et*|t|tL", r"character 3: \* is followed by no number"),
        ("Et*0|t|tL", r"character 3: \* is followed by 0"),
        ("Et*999999999999|t|tL", r"character 3: .*; use a number from 1 to 6$"),
        ("E*2t|t|tL", r"character 1: E \(embedding\) must occur once"),
        ("Ett|t|m,L", r"character 7: m: this model has no multi-token-prediction layers"),
        ([1, 2], "has 2 stages, but"),
        ([1, 2, 3], "has 6 layers, but the model has 3"),
        ([1, -1, 3], "stage 1 has -1 layers; give a whole number"),
        ([1, True, 1], "stage 1 has True layers"),
    ],
)
def test_layouts_that_are_refused(layout: str | list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pp_layout = ") as error:
        parse_layout(layout, 3, 3)
    assert error.match(message)


def test_prediction_layers() -> None:
    assert [s.prediction_layers for s in parse_layout("Et|t|m*2L", 2, 3, 2)] == [0, 0, 2]
    with pytest.raises(ConfigError, match=r"has 1 multi-token-prediction layers \(m\), .* has 2"):
        parse_layout("Et|t|mL", 2, 3, 2)
    with pytest.raises(ConfigError, match="character 5: this t comes after an m"):
        parse_layout("Et|mt|L", 2, 3, 1)
