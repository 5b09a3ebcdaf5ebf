"""`model.name` of a model outside of dtron: MODULE:NAME, or an entry point of a package."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dtron.checkpoint.convert import from_hf_folder, to_hf_folder
from dtron.checkpoint.dcp_storage import ShardReader
from dtron.checkpoint.initial_weights import fill_from_initial
from dtron.config import RunConfig
from dtron.errors import CheckpointError, ConfigError
from dtron.io.user_code import registered
from dtron.models import BACKENDS, build_model, from_hf, model_config, model_spec
from dtron.plan.command import main as plan_command
from dtron.plan.parameters import parts
from dtron.run.process import Place
from dtron.setup.preflight import preflight
from dtron.setup.rules import ModelCandidate, all_broken, check_layout
from examples.my_model.model import SPEC, MyModel
from tests.harness import run_ranks
from tests.test_architecture import ROOT
from tests.training.test_trainer import fit, rows, tiny

NAME = "examples.my_model.model:SPEC"
HERE = "tests.models.test_custom"
CONFIG = str(ROOT / "examples/my_model/config.toml")
ONE_RANK = Place(rank=0, local_rank=0, world_size=1)


class OtherNames(MyModel):
    """The template with other module names."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layers, self.tokens = self.blocks, self.embed
        del self.blocks, self.embed


SAME = SPEC
OTHER_NAMES = replace(
    SPEC,
    build=OtherNames,
    layer="layers.{}",
    embedding=lambda c: ("tokens",),
    vocabulary=lambda c: (),
)
NO_SIZES = replace(SPEC, sizes={})
NO_CORE = replace(SPEC, reads=SPEC.reads - {"attention", "labels"} if SPEC.reads else None)
NOT_A_SPEC = {"debug": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the template on one process."""
    run = tmp_path_factory.mktemp("custom") / "run"
    run_ranks(1, fit, tiny(run, model__name=NAME))
    return run


LAYOUTS: list[dict[str, Any]] = [
    {"parallel__tp": 2},
    {"parallel__pp": 2},
    {"parallel__cp": 2},
    {"parallel__tp": 2, "parallel__sequence_parallel": False, "train__loss_chunks": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp", "pp", "cp", "tp, loss in chunks"])
def test_the_template_trains_in_layouts_as_in_one_process(
    trained: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    run_ranks(2, fit, tiny(tmp_path / "run", model__name=NAME, **layout))
    for figure in ("loss", "grad_norm", "validation_loss"):
        one, many = (
            [row[figure] for row in rows(run) if figure in row]
            for run in (trained, tmp_path / "run")
        )
        assert many == pytest.approx(one, rel=1e-5), figure


def test_the_config_of_the_template_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world-size", "4", "parallel.tp=2", "parallel.pp=2"]
    assert plan_command(["--config", CONFIG, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["parameters"] == pytest.approx(count(NAME), rel=0.01)


def count(name: str) -> int:
    with torch.device("meta"):
        model = build_model(name, model_config(name, "debug"), BACKENDS["math"])
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_plan_counts_modules_of_any_name() -> None:
    config = model_config(NAME, "debug")
    want, found = (parts(name, config, 1) for name in (NAME, f"{HERE}:OTHER_NAMES"))
    assert {part: len(parameters) for part, parameters in found.items()} == {
        part: len(parameters) for part, parameters in want.items()
    }


# -- names -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory that is not on sys.path; its modules are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_in_the_working_directory(folder: Path) -> None:
    (folder / "own").mkdir()
    (folder / "own/net.py").write_text(f"from {HERE} import SAME as MINE\n")
    spec = model_spec("own.net:MINE")
    assert spec == replace(SPEC, name="own.net:MINE")


BROKEN = {
    "no_such.net:SPEC": ": there is no module no_such; install its package, or start in the folder",
    "broken:SPEC": ": the import of broken raised ZeroDivisionError: division by zero (",
    "lacks:SPEC": ": the import of lacks raised ModuleNotFoundError: No module named 'no_such' (",
    "calls:SPEC": ": the import of calls raised ValidationError: 6 validation errors for Decoder",
    "exits:SPEC": ": the import of exits raised SystemExit: 3 (",
    f"{HERE}:SAMES": f": module {HERE} has no attribute 'SAMES'; did you mean SAME?",
    f"{HERE}:NOT_A_SPEC": " is a dict, not a ModelSpec; name a dtron.models.ModelSpec of the",
    f"{HERE}:NO_SIZES": ": ModelSpec.sizes needs at least one size, each a DecoderConfig; use",
    "net:": " is not MODULE:NAME; write it as my_package.my_module:NAME",
    "../net.py:SPEC": " is not MODULE:NAME; write it as my_package.my_module:NAME",
    "lama": " is not known; did you mean llama?",
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_is_one_sentence(folder: Path, name: str) -> None:
    (folder / "broken.py").write_text("open('imports', 'a').write('x')\n1 / 0\n")
    (folder / "lacks.py").write_text("import no_such\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    calls = "from dtron.models import DecoderConfig\n\nDecoderConfig(activation='none')\n"
    (folder / "calls.py").write_text(calls)
    found = list(all_broken(ModelCandidate(RunConfig.of({"model": {"name": name}}), 1)))
    assert len(found) == 1
    assert found[0].startswith(f"model.name = {name}{BROKEN[name]}")
    for file, line in (("broken", 2), ("lacks", 1), ("calls", 3)):  # not a line of what they call
        if name == f"{file}:SPEC":
            assert f"/{file}.py, line {line}); fix the module" in found[0]
    if name == "broken:SPEC":
        assert (folder / "imports").read_text() == "x"  # imported once, not by every rule


@pytest.fixture
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that registers the template under two names, one of them dtron's."""
    metadata = folder / "site/fancy_models-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy-models\nVersion: 1.0\n")
    entries = f"[dtron.models]\nfancy = {NAME}\nllama = {NAME}\nbad = {HERE}:NOT_A_SPEC\n"
    (metadata / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(folder / "site")
    registered.cache_clear()
    yield folder
    registered.cache_clear()


def test_a_package_registers_a_short_name(installed: Path) -> None:
    assert model_spec("fancy") == replace(SPEC, name="fancy")
    model, _ = check_layout(RunConfig.of({"model": {"name": "fancy"}}), 1)
    assert model == SPEC.sizes["debug"]
    for name, message in {
        "llama": "llama is a model of dtron and of package fancy-models; use model.name = "
        f'"{NAME}", or uninstall',
        "fanci": "fanci is not known; did you mean fancy?",
        "bad": f"bad (entry point {HERE}:NOT_A_SPEC of package fancy-models) is a dict, not a",
    }.items():
        with pytest.raises(ConfigError) as error:
            model_spec(name)
        assert str(error.value).startswith(f"model.name = {message}")


def test_settings_that_need_its_attention_or_head_are_refused() -> None:
    keys = {"parallel": {"cp": 2}, "train": {"loss_chunks": 2}}
    with pytest.raises(ConfigError) as error:
        check_layout(RunConfig.of({"model": {"name": f"{HERE}:NO_CORE"}, **keys}), 2)
    assert "parallel.cp = 2 has no effect on model.name" in str(error.value)
    assert "train.loss_chunks = 2 has no effect on model.name" in str(error.value)


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_run_resumes_under_its_name_only(trained: Path) -> None:
    resumed = tiny(trained, model__name=NAME, train__steps=8, checkpoint__resume="latest")
    assert preflight(resumed, ONE_RANK).resume.metadata.step == 6  # type: ignore[union-attr]
    renamed = resumed.changed(model={"name": f"{HERE}:SAME"})
    with pytest.raises(CheckpointError, match=f"of another model .name: '{NAME}', not '{HERE}:SAM"):
        preflight(renamed, ONE_RANK)


def convert_both_ways(checkpoint: Path, out: Path) -> None:
    to_hf_folder(checkpoint, out / "hf", name=NAME)
    from_hf_folder(out / "hf", out / "back", name=NAME)


def test_weights_are_exported_and_imported(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints/step-6"
    run_ranks(1, convert_both_ways, checkpoint, tmp_path)
    before, after = ShardReader(checkpoint), ShardReader(tmp_path / "back")
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert len(exported) == 3 + 2 * 7
    loaded = from_hf(tmp_path / "hf", name=NAME).state_dict()
    for name, tensor in exported.items():
        whole = tuple(slice(0, n) for n in tensor.shape)
        assert torch.equal(tensor, before.region(f"model.{name}", whole))
        assert torch.equal(tensor, after.region(f"model.{name}", whole))
        assert torch.equal(tensor, loaded[name])
    keys = {"model__name": NAME, "checkpoint__allow_data_change": True}
    for initial in (tmp_path / "hf", tmp_path / "back"):
        config = tiny(tmp_path / "run", checkpoint__initial=str(initial), **keys)
        found = preflight(config, ONE_RANK).resume.initial
        assert found is not None
        assert found.name == NAME


def test_a_checkpoint_does_not_choose_which_code_runs(trained: Path, tmp_path: Path) -> None:
    """Its model is imported only if the user names it too."""
    checkpoint = trained / "checkpoints/step-6"
    values = {"model": {"size": "initial"}, "checkpoint": {"initial": str(trained)}}
    with pytest.raises(ConfigError, match=f"code runs only if you name it; set model.name={NAME}"):
        fill_from_initial(values)
    values["model"]["name"] = NAME
    assert fill_from_initial(values)["model"]["override"]["dim"] == 32
    with pytest.raises(ConfigError, match=f"code runs only if you name it; add --model {NAME}"):
        to_hf_folder(checkpoint, tmp_path / "out")
