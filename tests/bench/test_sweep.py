"""Axes of a sweep."""

import pytest

from dtron.bench.sweep import points, split_values
from dtron.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,4", ["1", "2", "4"]),
        ("1, 2", ["1", "2"]),
        ("[1,2]", ["[1,2]"]),
        ("[3,5],[4,4]", ["[3,5]", "[4,4]"]),
        ('[["a","b"],["c"]],""', ['[["a","b"],["c"]]', '""']),
        ('"x,y",z', ['"x,y"', "z"]),
        ("'x,y'", ["'x,y'"]),
        ("{a=1,b=2}", ["{a=1,b=2}"]),
        ("Ett|L", ["Ett|L"]),
        ("", [""]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_separate(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize("text", ["[1,2", "1,[2", '"a', "1,,2", "1,"])
def test_what_is_not_closed_or_empty_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        split_values(text)


def test_points_are_the_product_in_order() -> None:
    found = points(["parallel.tp=1,2", "train.micro_batch=3", "compile.enable=true,false"])
    assert [point.overrides for point in found] == [
        ["parallel.tp=1", "train.micro_batch=3", "compile.enable=true"],
        ["parallel.tp=1", "train.micro_batch=3", "compile.enable=false"],
        ["parallel.tp=2", "train.micro_batch=3", "compile.enable=true"],
        ["parallel.tp=2", "train.micro_batch=3", "compile.enable=false"],
    ]
    assert found[1].label == "parallel.tp=1 compile.enable=false"
    assert [point.label for point in points([])] == ["as given"]


def test_environment_is_an_axis_and_no_override() -> None:
    first, second = points(["env.NCCL_MAX_CTAS=4,8", "parallel.zero=2"])
    assert (first.overrides, first.environment) == (["parallel.zero=2"], {"NCCL_MAX_CTAS": "4"})
    assert second.label == "env.NCCL_MAX_CTAS=8"


MALFORMED = [
    ["parallel.tp"],
    ["tp=1"],
    ["env.=1"],
    [".tp=1"],
    ["parallel.tp=1", "parallel.tp=2"],
    ["parallel.tp=1,2,1"],
]


@pytest.mark.parametrize("axes", MALFORMED)
def test_malformed_axes_are_refused(axes: list[str]) -> None:
    with pytest.raises(ConfigError):
        points(axes)
