"""An upcycled mixture computes what its dense model does, and has what a mixture has."""

from typing import Any

import pytest
import torch

from dtron.errors import ConfigError
from dtron.models.config import DecoderConfig
from dtron.models.upcycle import upcycle
from tests.models.build import SMALL, initialized, small_config, tokens, varied

EXPERTS: dict[str, Any] = {"n_experts": 4, "experts_per_token": 2, "renormalize": True}


def configs(dense: dict[str, Any], experts: dict[str, Any]) -> tuple[DecoderConfig, DecoderConfig]:
    first = small_config("llama", **dense)
    given = {"expert_dim": first.ffn_dim, "ffn_dim": 0, **EXPERTS, **experts}
    return first, first.model_copy(update=given)


@pytest.mark.parametrize(
    ("dense", "experts"),
    [
        ({}, {}),
        ({"bias": True, "activation": "gelu"}, {"router": "sigmoid", "bias_speed": 0.1}),
        ({"tied": True}, {"router": "topk_softmax", "renormalize": False}),
        ({}, {"first_dense_layers": 1, "ffn_dim": SMALL["ffn_dim"]}),
    ],
)
def test_same_logits(dense: dict[str, Any], experts: dict[str, Any]) -> None:
    first, second = configs(dense, experts)
    model, mixture = varied(initialized("llama", first)), initialized("llama", second)
    weights = upcycle(model.state_dict(), first, second, torch.Generator().manual_seed(1))
    mixture.load_state_dict(weights)  # strict: neither more nor less
    routers = [name for name in weights if name.endswith("router.weight")]
    assert len(routers) == second.n_expert_layers
    assert len({weights[name].sum().item() for name in routers}) == len(routers)
    torch.testing.assert_close(mixture(tokens()), model(tokens()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"expert_dim": 8}, "expert_dim = 8 differs from the dense model's ffn_dim"),
        ({"renormalize": False}, "weights that do not sum to 1"),
        (
            {"n_shared_experts": 1},
            "n_shared_experts = 1 of the mixture differs from the dense model's",
        ),
        ({"capacity_factor": 1.0}, "capacity_factor = 1.0 of the mixture"),
        ({"n_experts": 0}, "needs the config of a dense model and one with experts"),
    ],
)
def test_what_would_not_compute_the_same_is_refused(experts: dict[str, Any], message: str) -> None:
    first, second = configs({}, experts)
    with pytest.raises(ConfigError) as error:
        upcycle({}, first, second, torch.Generator())
    assert message in str(error.value)
