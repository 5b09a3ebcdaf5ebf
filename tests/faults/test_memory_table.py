"""Tables of who holds memory: bytes that autograd keeps, of a run, and next to its plan."""

import gc
import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtron.cli import commands
from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.faults.memory_table import (
    CLASSES,
    MemoryTable,
    SavedTensors,
    read_table,
    write_snapshot,
)
from dtron.plan import activations
from dtron.plan.memory_page import page
from dtron.plan.run_shape import Resolved
from tests.harness import run_ranks
from tests.training.test_trainer import fit, tiny


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_saved_tensors_are_counted_by_module_and_until_the_backward() -> None:
    """Without weights, each storage once; also without Python's search for cycles."""
    blocks = nn.Sequential(Block(), Block())
    saved = SavedTensors({m: name for name, m in blocks.named_modules() if name})
    gc.disable()
    try:
        for _ in range(2):
            with saved.recording():
                blocks(torch.randn(4, 8)).square().sum().backward()
    finally:
        gc.enable()
    # The input of each `up`, the result of relu, which is the input of `down` as well, and of the
    # loss its input. A micro-batch is over before the next one begins.
    wide, narrow = 4 * 32 * 4, 4 * 8 * 4
    assert saved.at_peak == {"0.up": narrow, "0": wide, "1.up": narrow, "1": wide, "loss": narrow}
    assert saved.now.total() == 0


def test_a_storage_counts_until_its_last_saved_tensor_is_freed() -> None:
    saved = SavedTensors({})
    x = torch.ones(8, requires_grad=True).exp()  # exp saves its result, outside of `recording`
    with saved.recording():
        first, second = x.square(), x.square()
    assert saved.now.total() == x.nbytes
    del first
    assert saved.now.total() == x.nbytes
    del second
    assert saved.now.total() == 0


def test_a_step_is_recorded_and_shown_next_to_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = tiny(run, metrics__memory_snapshot=2, parallel__pp=2, train__steps=2)
    run_ranks(2, fit, config)
    tables = [read_table(run / f"memory/rank-{rank}.json") for rank in range(2)]
    config = RunConfig.load(run / "config.toml")
    shape = Resolved.of(config, 2)
    drawn = tmp_path / "memory.html"
    assert commands(["memory", str(run), "--page", str(drawn)]) == 0
    printed = capsys.readouterr().out
    shown = drawn.read_text(encoding="utf-8")
    assert shown.count("<svg") == 2
    assert "planned" in shown
    assert "blocks.0.attn.wq.weight" in shown
    for table, planned in zip(tables, shape.stages, strict=True):
        totals = table.totals
        assert totals["parameters"] == totals["gradients"] > 0
        assert totals["optimizer"] == pytest.approx(2 * totals["parameters"], rel=0.01)
        blocks = sum(n for fqn, n in table.classes["activations"].items() if "blocks." in fqn)
        kept = sum(sum(activations.kept(shape, layer).values()) for layer in planned.layers)
        flying = 2 - table.pp_rank  # micro-batches of 1F1B
        # factors of norms, which the plan leaves out, count in a model of this width
        assert blocks == pytest.approx(flying * kept, rel=0.2)
        assert f"memory of rank {table.rank}, step 2; then as planned" in printed
    assert commands(["memory", str(tmp_path)]) == 1
    assert "has no tables; set metrics.memory_snapshot" in capsys.readouterr().err


class Page(HTMLParser):
    """Names of all elements, and the text of each chart's titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onload"}


def test_a_page_of_hostile_names_is_only_text() -> None:
    """Names in a table are anyone's who can write to the run; nothing is loaded from elsewhere."""
    bad = '"><script src=x>alert(1)</script>&'
    classes = {name: {f"blocks.0.{bad}": 3 * 2**30} for name in CLASSES}
    table = MemoryTable(bad, 0, 0, 1, {**classes, bad: {bad: 1}}, peak=2**36, reserved=2**36)
    text = page(bad, [(table, {"parameters": 2.0**31, bad: 1.0})])
    assert "script" not in Page(text).elements
    assert bad not in text
    assert escape(bad) in text
    widths = [float(n) for n in re.findall(r'width="([\d.]+)" height="21" fill="#3d7fd0"', text)]
    # A class of the same colour in both bars, to one scale.
    assert widths[0] / widths[1] == pytest.approx(1.5, rel=0.01)
    assert page("empty", [(MemoryTable("step 1", 0, 0, 1, {}), {})])


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_has_its_blocks(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    held = torch.ones(2**20, device="cuda")
    write_snapshot(tmp_path / "allocator-0.json")
    segments = json.loads((tmp_path / "allocator-0.json").read_text())["segments"]
    blocks = [block for segment in segments for block in segment["blocks"]]
    assert any(block["size"] >= held.nbytes for block in blocks)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    for text in ("{", '{"when": 1}'):
        (tmp_path / "rank-0.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"rank-0\.json: .*; remove it"):
            read_table(tmp_path / "rank-0.json")
