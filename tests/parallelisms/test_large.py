"""A layout of DeepSeek-V3 for 1,024 GPUs is legal, and its ranks hold what they should: built on
meta tensors, with process groups that communicate nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.models import MODELS, build_model
from dtron.models.attention import BACKENDS
from dtron.models.flops import n_parameters
from dtron.parallelisms import Mesh, apply
from dtron.parallelisms.apply import Applied, Passes, apply_passes
from dtron.parallelisms.expert.expert_parallel import ExpertLayers
from dtron.setup.rules import check_layout
from tests.harness import run_ranks
from tests.plan.test_feasibility import WIDE

CONFIG = Path(__file__).parents[2] / "configs/deepseek_v3.toml"
WORLD = 1024


def build_rank(rank: int) -> dict[str, Any]:
    """What one of the ranks holds."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    apply.materialize = apply.initialize = lambda *_args: None  # parameters stay on meta
    config = RunConfig.load(CONFIG, WIDE)
    model_config, layout = check_layout(config, WORLD)
    mesh = Mesh(**config.degrees(WORLD), ep=config.parallel.ep, etp=config.parallel.etp)
    spec = MODELS[config.model.name]
    with torch.device("meta"):
        model = build_model(config.model.name, model_config, BACKENDS["math"])
    passes = Passes(
        units=spec.units(model_config),
        blocks="blocks.*",
        placements=spec.placements(model_config, True),
        parallel=config.parallel,
        recompute=config.recompute,
        init=(0, lambda *_args: None),
        vocabulary=spec.vocabulary(model_config),
        layout=layout,
        replicas="step",
        experts=ExpertLayers(spec.experts),
    )
    found = _facts(apply_passes(model, mesh, passes))
    return {"mesh": mesh.degrees, "experts": mesh.expert_degrees, **found}


def _facts(applied: Applied) -> dict[str, Any]:
    shapes, layouts, held, whole = {}, {}, 0, 0
    for name, parameter in applied.named_parameters():
        local: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
        held, whole = held + local.numel(), whole + parameter.numel()
        shapes[name], layouts[name] = tuple(local.shape), parameter.placements  # type: ignore[attr-defined]
    stages = sorted(applied.parts)
    return {"stages": stages, "shapes": shapes, "layouts": layouts, "held": held, "whole": whole}


def test_ranks_of_deepseek_v3_on_1024() -> None:
    """Ranks of the first and of the last pipeline rank; every stage is on one of the sixteen."""
    inner = WORLD // 16
    first, last = (run_ranks(1, build_rank, pp * inner + 5)[0] for pp in (0, 15))
    dense = {"pp": 16, "dp_replicate": 1, "dp_shard": 32, "cp": 1, "tp": 2}
    assert first["mesh"] == dense
    apart = {"pp": 16, "dp_replicate": 1, "edp_shard": 1, "ep": 64, "etp": 1}
    assert first["experts"] == apart
    assert (first["stages"], last["stages"]) == ([0, 16, 32, 48], [15, 31, 47, 63])
    up = "blocks.15.ffn.experts.up"
    assert first["shapes"][up] == (256 // 64, 2048, 7168)
    assert first["layouts"][up][1:] == (Shard(0), Replicate())
    assert first["shapes"]["blocks.15.attn.wo.weight"] == (7168 // 32, 128 * 128 // 2)
    assert "head.weight" in last["shapes"]
    assert "embed.weight" in first["shapes"]


def test_sixteen_pipeline_ranks_hold_the_model() -> None:
    config = RunConfig.load(CONFIG, WIDE)
    model, layout = check_layout(config, WORLD)
    assert layout is not None
    assert len(layout.stages) == 64
    named = [name for stage in layout.stages for name in stage if name.startswith("blocks.")]
    assert sorted(named) == sorted(f"blocks.{i}" for i in range(62))
    assert layout.stages[62] == ()
    assert round(n_parameters(model) / 1e9, 2) == 682.64


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("etp", 2, "parallel.ep = 64 x parallel.etp = 2 does not divide the 64 ranks"),
        ("pp_layout", "", "fills 1 to 63"),
        ("ep", 24, "parallel.ep = 24"),
    ],
)
def test_what_the_sources_say_is_refused(key: str, value: Any, message: str) -> None:
    """Experts split as tp by default would take 2,048 ranks; 64 stages need an empty one."""
    config = RunConfig.load(CONFIG, WIDE)
    parallel = config.parallel.model_copy(update={key: value})
    with pytest.raises(ConfigError) as error:
        check_layout(config.model_copy(update={"parallel": parallel}), WORLD)
    assert message in str(error.value)
