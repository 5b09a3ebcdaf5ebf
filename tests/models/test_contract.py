"""A family with its own module is checked before ranks meet, and what it ignores cannot be set."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtron.config import RunConfig
from dtron.config.schema import Model
from dtron.errors import ConfigError
from dtron.models import MODELS, DecoderConfig, ModelSpec
from dtron.models.contract import check_family
from dtron.models.decoder import Decoder
from dtron.parallelisms.placement import colwise, replicate, rowwise
from dtron.plan.command import main as plan_command
from dtron.run.process import Place
from dtron.setup.preflight import preflight
from dtron.setup.rules import check_layout
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training.test_trainer import losses, tiny

SIZE = DecoderConfig(vocab_size=264, dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=32)


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(x))


class Mine(nn.Module):
    """Tokens are mixed with nothing: enough to be built, split and trained."""

    def __init__(self, config: DecoderConfig, _backend: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleDict({str(i): Layer(config.dim) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        x = self.embed(x) if not x.is_floating_point() else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))


MINE = ModelSpec(
    "mine",
    {"debug": SIZE},
    build=Mine,
    units=lambda config: ("embed", "blocks.*", ("norm", "head")),
    placements=lambda config, sequence_parallel: {},
    reads={"vocab_size", "dim", "n_layers"},
)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    monkeypatch.setitem(MODELS, "mine", MINE)
    return MINE


def without(name: str) -> type[Mine]:
    class Lacking(Mine):
        def __init__(self, config: DecoderConfig, backend: object) -> None:
            super().__init__(config, backend)
            delattr(self, name)

    return Lacking


class Short(Mine):
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Buffered(Mine):
    def __init__(self, config: DecoderConfig, backend: object) -> None:
        super().__init__(config, backend)
        self.register_buffer("table", torch.zeros(2))


class Narrow(Mine):
    def __init__(self, config: DecoderConfig, backend: object) -> None:
        super().__init__(config.model_copy(update={"vocab_size": 7}), backend)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"name": "other"}, 'name = "other" differs from its key; use ModelSpec("mine", ...)'),
    ({"reads": None}, "reads is not set; name the fields of DecoderConfig"),
    ({"reads": {"dim", "width"}}, "reads has unknown names, width; use fields of DecoderConfig"),
    ({"build": lambda config, backend: 3}, "build returns a int; return an nn.Module"),
    ({"build": without("norm")}, "no module norm, which ModelSpec.head names; the model has embed"),
    ({"build": without("embed")}, "no module embed, which ModelSpec.embedding names"),
    ({"layer": "layers.{}"}, "no module layers.0 and 1 more, which ModelSpec.layer names"),
    ({"build": Short}, "forward does not take documents, dropout_keys"),
    ({"build": Buffered}, "buffer table loses its values"),
    ({"build": Narrow}, "embed.weight has 7 rows, and vocab_size = 264"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_what_is_missing_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_family("mine", replace(MINE, **changes), SIZE)
    assert message in str(error.value)


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        check_family("mine", replace(MINE, reads=None, build=without("head")), SIZE)
    assert str(error.value).count("\n  - ") == 3  # head is of the vocabulary too


def test_families_here_fit() -> None:
    check_family("mine", MINE, SIZE)
    for name, spec in MODELS.items():
        check_family(name, spec, spec.sizes["debug"])
        assert isinstance(spec.build, type)
        assert issubclass(spec.build, Decoder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"mask_documents": True}}, "data.mask_documents = True has no effect"),
        ({"model": {"override": {"dropout": 0.1}}}, "model.override.dropout = 0.1 has no effect"),
        ({"model": {"override": {"activation": "gelu"}}}, "model.override.activation = 'gelu'"),
        ({"model": {"override": {"rope_theta": 5.0}}}, "model.override.rope_theta = 5.0"),
        ({"model": {"attention": "math"}}, "model.attention = 'math' has no effect"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_settings_that_it_ignores_are_refused(changes: dict[str, Any], message: str) -> None:
    section, values = next(iter(changes.items()))
    base = {"model": {"name": "mine", "size": "debug"}, "data": {"paths": ["x.txt"]}}
    config = RunConfig.of({**base, section: {**base.get(section, {}), **values}})
    with pytest.raises(ConfigError) as error:
        check_layout(config, 1)
    assert message in str(error.value)
    assert "whose ModelSpec.reads does not name" in str(error.value)


@pytest.mark.usefixtures("mine")
def test_a_family_trains_plans_and_is_refused_up_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text " * 400)
    text = f"""
    [run]
    dir = "{tmp_path}/run"
    [model]
    name = "mine"
    [model.override]
    n_layers = 3
    [train]
    steps = 2
    seq_len = 16
    global_batch = 2
    dtype = "float32"
    eval_sequences = 0
    [data]
    paths = ["{tmp_path}/a.txt"]
    cache_dir = "{tmp_path}/cache"
    [metrics]
    tensorboard = false
    log_interval = 1
    """
    path = tmp_path / "run.toml"
    path.write_text(text)
    config = RunConfig.load(path)
    Trainer(config).fit()
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]
    assert "counted as those of a Decoder" in capsys.readouterr().out
    assert plan_command(["--config", str(path), "--world-size", "1"]) == 0
    assert "warning: model.name = mine builds its own module" in capsys.readouterr().out
    monkeypatch.setitem(MODELS, "mine", replace(MINE, build=without("head")))
    with pytest.raises(ConfigError, match="no module head"):
        preflight(config, Place(rank=0, local_rank=0, world_size=1))
    with pytest.raises(ConfigError, match="no module head"):
        plan_command(["--config", str(path), "--world-size", "1"])


class TwoMatrices(Layer):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.down = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class MineWithTwo(Mine):
    def __init__(self, config: DecoderConfig, backend: object) -> None:
        super().__init__(config, backend)
        for name in self.blocks:
            self.blocks[name] = TwoMatrices(config.dim)


SPLIT = replace(
    MINE,
    build=MineWithTwo,
    placements=lambda config, sequence_parallel: {
        "embed": replicate(),
        "blocks.*.up": colwise(),
        "blocks.*.down": rowwise(),
        "norm": replicate(),
        "head": colwise(),
    },
)
LAYOUTS: list[dict[str, Any]] = [
    {"parallel__tp": 2},
    {"parallel__pp": 2},
    {"parallel__tp": 2, "parallel__pp": 2},
]


def fit_family(config: RunConfig) -> None:
    MODELS["mine"] = SPLIT
    Trainer(config).fit()


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp 2", "pp 2", "tp 2 x pp 2"])
@pytest.mark.usefixtures("mine")
def test_a_family_trains_in_layouts_as_in_one_process(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    model = {"model": Model(name="mine", size="debug")}
    one, many = (tiny(tmp_path / name, **keys) for name, keys in (("one", {}), ("many", layout)))
    run_ranks(1, fit_family, one.model_copy(update=model))
    run_ranks(math.prod(layout.values()), fit_family, many.model_copy(update=model))
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
