"""A damaged checkpoint is found and named, and the newest good one is taken."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtron.checkpoint.metadata import read_metadata, write_metadata
from dtron.errors import CheckpointError
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training.test_trainer import fit, losses, tiny


def missing(folder: Path) -> None:
    (folder / "rank-1.safetensors").unlink()


def truncated(folder: Path) -> None:
    file = folder / "rank-1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def flipped(folder: Path) -> None:
    file = folder / "rank-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def index_gone(folder: Path) -> None:
    (folder / "index.json").unlink()


def index_changed(folder: Path) -> None:
    file = folder / "index.json"
    file.write_text(file.read_text().replace('"shape":[264,32]', '"shape":[32,264]', 1))


def facts_changed(folder: Path) -> None:
    file = folder / "dtron.json"
    file.write_text(file.read_text().replace('"step": 4', '"step": 5'))


def facts_cut(folder: Path) -> None:
    file = folder / "dtron.json"
    file.write_text(file.read_text()[:40])


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (missing, "rank-1.safetensors is missing"),
    (truncated, "rank-1.safetensors has "),
    (index_gone, "index.json"),
    (index_changed, "dtron.json or index.json is corrupt"),
    (facts_changed, "dtron.json or index.json is corrupt"),
    (facts_cut, "dtron.json cannot be read"),
]


def fit_and_listen(config: Any) -> tuple[list[str], str | None]:
    """The warnings of a run, and what it raises."""
    messages: list[str] = []
    log = logging.getLogger("dtron")
    log.addFilter(lambda record: messages.append(record.getMessage()) or True)
    try:
        log.setLevel(logging.INFO)
        Trainer(config).fit()
    except CheckpointError as error:
        return messages, str(error)
    return messages, None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints after 2, 4 and 6."""
    run = tmp_path_factory.mktemp("runs") / "run"
    run_ranks(2, fit, tiny(run, checkpoint__interval=2, checkpoint__keep=0))
    return run


@pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=lambda v: getattr(v, "__name__", ""))
def test_what_names_and_sizes_tell_is_found_before_anything_starts(
    tmp_path: Path,
    trained: Path,
    reports: list[str],
    damage: Callable[[Path], None],
    named: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "checkpoints/step-6")
    damage(run / "checkpoints/step-4")
    at = str(run / "checkpoints/step-4")
    # asked for by name it is refused, with the one to take instead
    with pytest.raises(CheckpointError, match=rf"step-4.*{named}.*resume = .*step-2"):
        Trainer(tiny(tmp_path / "other", checkpoint__resume=at))
    # `latest` takes the one before
    metadata = Trainer(tiny(run, checkpoint__resume="latest")).resume.metadata
    assert metadata is not None
    assert metadata.step == 2
    assert any(named in message and "step-4" in message for message in reports), reports


def test_a_corrupt_file_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, trained: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "checkpoints/step-6")
    flipped(run / "checkpoints/step-4")
    named = "rank-1.safetensors is corrupt: its SHA-256 differs"
    at = str(run / "checkpoints/step-4")
    _, error = run_ranks(2, fit_and_listen, tiny(tmp_path / "other", checkpoint__resume=at))[0]
    assert error is not None
    assert "step-4" in error
    assert named in error
    assert "step-2" in error
    found = run_ranks(2, fit_and_listen, tiny(run, checkpoint__resume="latest"))
    assert [error for _, error in found] == [None, None]
    reports = found[0][0]
    assert any(named in message and "step-4" in message for message in reports), reports
    assert any(message.startswith("resumed from") and "step-2" in message for message in reports)
    assert losses(run) == losses(trained)


def test_no_good_checkpoint_at_all_is_an_error_and_not_a_fresh_start(
    tmp_path: Path, trained: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for step, damage in ((2, flipped), (4, flipped), (6, missing)):
        damage(run / f"checkpoints/step-{step}")
    config = tiny(run, checkpoint__resume="latest", train__steps=8)
    for _, error in run_ranks(2, fit_and_listen, config):
        assert error is not None
        assert "no good checkpoint is left" in error
    assert len(losses(run)) == 6  # nothing was set aside or written over


def test_sizes_alone_are_compared_without_verify(tmp_path: Path, trained: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    flipped(run / "checkpoints/step-6")
    settings = {"checkpoint__resume": "latest", "checkpoint__verify": False, "train__steps": 7}
    (reports, error), _ = run_ranks(2, fit_and_listen, tiny(run, **settings))
    assert error is None
    assert any(message.startswith("resumed from") and "step-6" in message for message in reports)


def lacks(tensors: dict[str, Any]) -> None:
    del tensors["model.norm.weight"]


def of_another_dtype(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"]["dtype"] = "BF16"


def of_another_shape(tensors: dict[str, Any]) -> None:
    entry = tensors["model.norm.weight"]
    entry["shape"] = [16]
    entry["parts"] = [[[0], [16], entry["parts"][0][2]]]


def in_other_parts(tensors: dict[str, Any]) -> None:
    """All in one file, which holds a half."""
    entry = tensors["model.norm.weight"]
    entry["parts"] = [[[0], entry["shape"], entry["parts"][0][2]]]


@pytest.mark.parametrize("change", [lacks, of_another_dtype, of_another_shape, in_other_parts])
def test_a_tensor_that_is_not_there_as_it_should_be_is_named(
    tmp_path: Path, trained: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Of a checkpoint whose checksums are right, as one that another program has written."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    folder = run / "checkpoints/step-6"
    metadata = read_metadata(folder)
    index = json.loads((folder / "index.json").read_text())
    change(index["tensors"])
    (folder / "index.json").write_text(json.dumps(index))
    write_metadata(folder, metadata)
    config = tiny(tmp_path / "x", checkpoint__resume=str(folder), train__steps=8)
    for _, error in run_ranks(2, fit_and_listen, config):
        assert error is not None
        assert "model.norm.weight" in error
