"""Nothing that is read is unpickled, and no index leads out of its folder."""

import ast
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtron.checkpoint.metadata import CheckpointMetadata, read_metadata, write_metadata
from dtron.errors import CheckpointError, DtronError
from dtron.io.filesystem import plain_name
from dtron.models import from_hf
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.test_architecture import MODULES
from tests.training.test_trainer import fit, tiny


class Malicious:
    """What makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable, tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[Path], None]:
    """Writes a malicious pickle to a path."""

    def write(path: Path) -> None:
        path.write_bytes(pickle.dumps(Malicious(tmp_path / "harm")))

    return write


@pytest.fixture(autouse=True)
def _harmless(tmp_path: Path) -> Any:
    yield
    assert not (tmp_path / "harm").exists(), "a pickle was loaded"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    run_ranks(1, fit, tiny(run, train__steps=1))
    return run


def test_the_plant_does_harm_where_it_is_loaded(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    plant(tmp_path / "x")
    pickle.loads((tmp_path / "x").read_bytes())
    (tmp_path / "harm").rmdir()


def signed(folder: Path) -> None:
    """Make the checksums of a checkpoint those of its files, as who plants something would."""
    index = json.loads((folder / "index.json").read_text())
    for name, entry in index["files"].items():
        content = (folder / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "index.json").write_text(json.dumps(index))
    content = json.loads((folder / "dtron.json").read_text())
    content.pop("sha256")
    write_metadata(folder, CheckpointMetadata(**content))


def load(run: Path, tmp_path: Path) -> str:
    """Resume a checkpoint in a process of its own; what the run says."""
    config = tiny(tmp_path / "again", checkpoint__resume=str(run), train__steps=2)
    with pytest.raises(AssertionError) as error:
        run_ranks(1, fit, config)
    return str(error.value)


@pytest.mark.parametrize("torch_save", [False, True])
def test_a_pickle_in_place_of_a_checkpoints_tensors_is_refused(
    tmp_path: Path, trained: Path, plant: Callable[[Path], None], torch_save: bool
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    file = run / "checkpoints/step-1/rank-0.safetensors"
    if torch_save:
        torch.save({"model": Malicious(tmp_path / "harm")}, file)
    else:
        plant(file)
    signed(run / "checkpoints/step-1")
    message = load(run, tmp_path)
    assert "CheckpointError" in message
    assert "rank-0.safetensors cannot be read" in message


@pytest.mark.parametrize("name", ["index.json", "dtron.json"])
def test_a_pickle_in_place_of_what_a_checkpoint_says_is_refused(
    tmp_path: Path, trained: Path, plant: Callable[[Path], None], name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    plant(run / "checkpoints/step-1" / name)
    with pytest.raises(CheckpointError, match=name):
        Trainer(tiny(run, checkpoint__resume="latest", train__steps=2))


def test_pickles_beside_a_checkpoint_are_not_looked_at(
    tmp_path: Path, trained: Path, plant: Callable[[Path], None]
) -> None:
    """Such as torch.distributed.checkpoint's own format has."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for name in (".metadata", "__0_0.distcp", "rng.pt", "optimizer.bin"):
        plant(run / "checkpoints/step-1" / name)
    run_ranks(1, fit, tiny(run, checkpoint__resume="latest", train__steps=2))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", "a\\b", 7])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, trained: Path, name: Any) -> None:
    with pytest.raises(CheckpointError, match="outside of its folder"):
        plain_name(name, tmp_path)
    if not isinstance(name, str):
        return
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    folder = run / "checkpoints/step-1"
    metadata = read_metadata(folder)
    index = (
        (folder / "index.json").read_text().replace("rank-0.safetensors", json.dumps(name)[1:-1])
    )
    (folder / "index.json").write_text(index)
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match="outside of its folder"):
        Trainer(tiny(run, checkpoint__resume="latest", train__steps=2))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_pickles_of_a_hugging_face_folder_are_not_loaded(
    llama: Path, plant: Callable[[Path], None]
) -> None:
    for name in ("training_args.bin", "pytorch_model.bin", "optimizer.pt", "tokenizer.json"):
        plant(llama / name)
    (llama / "modeling_llama.py").write_text(f"import os; os.mkdir({str(llama.parent / 'harm')!r})")
    config = json.loads((llama / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    (llama / "config.json").write_text(json.dumps(config))
    from_hf(llama)
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        from_hf(llama)
    plant(llama / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        from_hf(llama)


@pytest.mark.parametrize("name", ["../model.safetensors", "/elsewhere/x.safetensors"])
def test_a_safetensors_index_does_not_lead_out_of_its_folder(llama: Path, name: str) -> None:
    (llama / "model.safetensors").rename(llama.parent / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": name}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        from_hf(llama)


def test_pickles_in_a_dataset_are_not_loaded(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    plant(tmp_path / "text.jsonl")
    with pytest.raises(DtronError, match=r"text\.jsonl"):
        Trainer(tiny(tmp_path / "run", data__paths=[str(tmp_path / "text.jsonl")]))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "In the beginning. " * 40}) + "\n")
    settings = {"data__paths": [str(tmp_path / "text.jsonl")], "data__validation_fraction": 0.0}
    settings |= {"train__eval_sequences": 0, "data__cache_dir": str(tmp_path / "cache")}
    Trainer(tiny(tmp_path / "run", **settings))
    (groups,) = (tmp_path / "cache").glob("*/groups.bin")
    before, objects = groups.read_bytes(), np.empty(2, dtype=object)
    objects[1] = Malicious(tmp_path / "harm")
    np.save(groups, objects, allow_pickle=True)
    Trainer(tiny(tmp_path / "run", **settings))  # the damaged index is built again
    assert groups.read_bytes() == before


def test_no_code_unpickles() -> None:
    """Of dtron's own; what torch sends between ranks is trusted, as docs/security.md says."""
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "dill", "joblib", "shelve", "marshal"}, module
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "eval", "exec"), f"{module}: {called}"
                given = {keyword.arg for keyword in node.keywords}
                assert not given & {"allow_pickle", "trust_remote_code"}, f"{module}: {called}"
