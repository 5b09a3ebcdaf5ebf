"""Ranges of modules in traces."""

import pytest
import torch
from torch import nn

from dtron.run import profiler
from dtron.run.profiler import ModuleRanges


def test_ranges_of_a_failed_forward_end_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[str] = []

    class Mark:
        def __init__(self, name: str) -> None:
            self.name = name
            running.append(name)

        def end(self) -> None:
            running.remove(self.name)

    monkeypatch.setattr(profiler, "_Mark", Mark)
    model = nn.Sequential(nn.Linear(2, 2))
    ranges = ModuleRanges([model], compiled=False)
    with pytest.raises(RuntimeError):
        model(torch.ones(3))
    assert running
    ranges.begin_step()
    assert not running
    model(torch.ones(2))
    assert not running
