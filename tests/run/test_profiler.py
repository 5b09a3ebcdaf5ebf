"""Ranges of modules in traces."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from dtron.run import profiler
from dtron.run.profiler import ModuleRanges, ProfileWindow, phase


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ranges that have begun and not ended."""
    names: list[str] = []

    class Mark:
        def __init__(self, name: str) -> None:
            self.name = name
            names.append(name)

        def end(self) -> None:
            names.remove(self.name)

    monkeypatch.setattr(profiler, "_Mark", Mark)
    return names


def test_the_last_backward_ends_before_the_optimizer(
    running: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(OrderedDict(head=nn.Linear(2, 2)))
    monkeypatch.setattr(ProfileWindow, "ranges", ModuleRanges([model], compiled=False))
    with phase("forward_backward"):
        model(torch.ones(2)).sum().backward()
        assert running[-1] == "head backward, micro-batch 0"
    with phase("optimizer"):
        assert running == ["dtron::optimizer"]
    assert not running


def test_ranges_of_a_failed_forward_end_with_the_next_step(running: list[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    ranges = ModuleRanges([model], compiled=False)
    with pytest.raises(RuntimeError):
        model(torch.ones(3))
    assert running
    ranges.begin_step()
    assert not running
    model(torch.ones(2))
    assert not running
