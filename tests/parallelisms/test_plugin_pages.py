"""The code of README, docs/plug-in.md and docs/tutorial-model.md trains a model on two ranks."""

import re
from pathlib import Path
from typing import Any

import torch

from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    """A page's code in Python, without what starts and ends the process group."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [re.sub(r"^dist\.(init|destroy)_process_group\(\)$", "", c, flags=re.M) for c in code]


def losses(model: torch.nn.Module, dtype: torch.dtype) -> list[float]:
    """Of ten steps of AdamW on the same tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(64).view(4, 16)
    found = []
    for _ in range(10):
        logits = model(tokens)
        assert logits.dtype == dtype
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def run_pages() -> dict[str, Any]:
    names: dict[str, Any] = {}
    module, sharding = blocks("docs/tutorial-model.md")
    exec(module, names)
    readme: dict[str, Any] = {"MyModel": names["Model"]}
    exec(blocks("README.md")[0], readme)
    exec(sharding, names)
    tensor, pipe = blocks("docs/plug-in.md")
    script: dict[str, Any] = {}
    exec(tensor, script)
    exec(pipe, script)
    return {
        "README": losses(readme["model"], torch.bfloat16),
        "tutorial": losses(names["model"], torch.float32),
        "pipeline": script["mean"].item(),
    }


def test_the_code_of_the_pages_trains() -> None:
    ranks = run_ranks(2, run_pages)
    assert ranks[0]["README"] == ranks[1]["README"]
    for page in ("README", "tutorial"):
        assert ranks[0][page][-1] < 0.5 * ranks[0][page][0], page
    assert ranks[0]["pipeline"] < 4.0  # of 4.6 at the start
