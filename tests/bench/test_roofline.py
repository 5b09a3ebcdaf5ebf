"""What a rank's step multiplies, against the model's FLOPs."""

from typing import Any

import pytest
import torch

from dtron.bench import roofline as ceiling
from dtron.bench.roofline import matmuls
from dtron.config import RunConfig
from dtron.models import model_config
from dtron.models.flops import FlopsModel

LAYOUTS = [
    (1, {}),
    (4, {}),
    (4, {"tp": 2}),
    (4, {"cp": 4}),
    (8, {"pp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("ranks", "parallel"), LAYOUTS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_products_are_the_models_flops(ranks: int, parallel: dict, chunks: int) -> None:
    """Of a rank, on average: the whole model over the ranks. Norms are vectors, not products."""
    values = {
        "model": {"name": "qwen3", "size": "1.7b"},
        "train": {"global_batch": 8, "seq_len": 4096, "loss_chunks": chunks},
        "parallel": parallel,
    }
    config = RunConfig.of(values)
    model = model_config("qwen3", "1.7b", {})
    norms = model.n_layers * 2 * (model.dim + model.head_size) + model.dim
    multiplied = FlopsModel.of(model).matmul_params - norms
    found = sum(matmul.flops for matmul in matmuls(config, model, ranks))
    assert found == pytest.approx(6 * multiplied * 8 * 4096 / ranks)


def measured(monkeypatch: pytest.MonkeyPatch, **sections: dict[str, Any]) -> dict[str, float]:
    """Floors of a small run on a device that copies 1 GB a second."""
    monkeypatch.setattr(ceiling, "copy_rate", lambda _: 1e9)
    monkeypatch.setattr(ceiling, "seconds", lambda *_: 0.001)
    config = RunConfig.of({"train": {"global_batch": 1, "seq_len": 16}, **sections})
    facts = {"world_size": 1, "micro_batches": 1, "attention": "math"}
    facts |= {"parameter_bytes_per_rank": [4 * 10**6]}
    return ceiling.measure(config, facts, torch.device("cpu"))["floors"]


def test_the_optimizers_floor_is_that_of_its_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch)["optimizer"] == pytest.approx(28)
    narrow = measured(monkeypatch, optim={"moments": "bfloat16"})
    assert narrow["optimizer"] == pytest.approx(20)


def test_float8_products_have_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GEMM" in measured(monkeypatch)
    assert "GEMM" not in measured(monkeypatch, float8={"recipe": "rowwise"})
