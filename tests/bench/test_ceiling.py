"""What a rank's step multiplies, against the model's FLOPs."""

import pytest

from dtron.bench.ceiling import products
from dtron.config import RunConfig
from dtron.flops import FlopsModel
from dtron.models import model_config

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
    found = sum(product.flops for product in products(config, model, ranks))
    assert found == pytest.approx(6 * multiplied * 8 * 4096 / ranks)
