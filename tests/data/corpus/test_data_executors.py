"""Steps of a pipeline on many machines; datatrove's own executors where it is installed."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from dtron.config import Data
from dtron.data.corpus import executors
from dtron.data.corpus.documents import files_corpus
from dtron.data.corpus.executors import FinishFolder, TokenizeTasks, prepare_on
from dtron.data.corpus.prepare import prepare_folder, start_folder
from dtron.data.tokenizer import ByteTokenizer
from dtron.errors import ConfigError, DataError


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> Data:
    """A corpus of several tasks."""
    monkeypatch.setattr("dtron.data.corpus.documents.TASK_BYTES", 600)
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Data.model_validate({"paths": [str(path)]})


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.iterdir() if path.suffix in (".tokens", ".documents")]
    return {path.name: path.read_bytes() for path in files}


def test_ranks_write_the_shards_of_one_machine(data: Data, tmp_path: Path) -> None:
    """Whatever their number; a rank that runs again does nothing, one that is missing is named."""
    corpus, tokenizer = files_corpus(data), ByteTokenizer()
    here, out = tmp_path / "here", tmp_path / "out"
    prepare_folder(corpus, tokenizer, here, 1, False)
    start_folder(corpus, tokenizer, out, False)
    section = data.model_dump(mode="json")
    tokenize, finish = pickle.loads(  # as they travel to other machines
        pickle.dumps(
            (
                TokenizeTasks(section, corpus.tasks, str(out), False),
                FinishFolder(section, str(out)),
            )
        )
    )
    assert len(corpus.tasks) > 2
    tokenize(None, rank=0, world_size=2)
    with pytest.raises(DataError, match=r"shard 00001 is missing; look at .*datatrove"):
        finish(None)
    written = (out / "00000.tokens").stat().st_mtime_ns
    for rank in range(3):
        tokenize(None, rank=rank, world_size=3)
    finish(None)
    assert (out / "00000.tokens").stat().st_mtime_ns == written
    assert content(out) == content(here)
    assert (out / "corpus.json").read_text() == (here / "corpus.json").read_text()


def test_what_an_executor_needs_is_named(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, tokenizer = files_corpus(data), ByteTokenizer()
    monkeypatch.setitem(sys.modules, "datatrove.executor", None)
    with pytest.raises(ConfigError, match=r"--on ray needs datatrove .*pip install"):
        prepare_on("ray", corpus, tokenizer, tmp_path / "a", False, None, [])
    with pytest.raises(ConfigError, match="--on-option partition is not KEY=VALUE"):
        prepare_on("slurm", corpus, tokenizer, tmp_path / "b", False, None, ["partition"])


def test_a_scheduler_that_refuses_a_job_is_named(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*arguments: object) -> None:
        raise subprocess.CalledProcessError(1, ["sbatch", "job"])

    monkeypatch.setitem(executors.EXECUTORS, "slurm", refusing)
    with pytest.raises(ConfigError, match=r"--on slurm: sbatch .* exit status 1, see above; check"):
        prepare_on("slurm", files_corpus(data), ByteTokenizer(), tmp_path / "a", False, None, [])


def test_errors_can_be_skipped_once_shards_are_finished(
    data: Data, tmp_path: Path, texts: list[str]
) -> None:
    """And the bytes are those of a folder that was begun so; the reverse is refused."""
    lines = [json.dumps({"text": text}) for text in texts]
    Path(data.paths[0]).write_text("\n".join([*lines[:-1], "no JSON", lines[-1]]))
    corpus, tokenizer, out = files_corpus(data), ByteTokenizer(), tmp_path / "out"
    with pytest.raises(DataError, match="not JSON"):
        prepare_folder(corpus, tokenizer, out, 1, False)
    written = (out / "00000.tokens").stat().st_mtime_ns
    prepare_folder(corpus, tokenizer, out, 1, True)
    assert (out / "00000.tokens").stat().st_mtime_ns == written
    prepare_folder(corpus, tokenizer, tmp_path / "whole", 1, True)
    assert content(out) == content(tmp_path / "whole")
    with pytest.raises(DataError, match="was begun with another --on-error"):
        prepare_folder(corpus, tokenizer, out, 1, False)


def test_arguments_of_an_executor_are_checked(data: Data, tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    corpus, tokenizer = files_corpus(data), ByteTokenizer()
    with pytest.raises(ConfigError, match="needs a partition; add --on-option partition=NAME"):
        prepare_on("slurm", corpus, tokenizer, tmp_path / "c", False, None, [])
    options = ["partition=main", "colour=red"]
    with pytest.raises(ConfigError, match=r"--on-option: .*'colour'"):
        prepare_on("slurm", corpus, tokenizer, tmp_path / "d", False, None, options)


def test_a_ray_cluster_writes_what_one_machine_does(data: Data, tmp_path: Path) -> None:
    """Of three nodes with one CPU each."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("datatrove")
    from ray.cluster_utils import Cluster

    corpus, tokenizer = files_corpus(data), ByteTokenizer()
    here, out = tmp_path / "here", tmp_path / "out"
    prepare_folder(corpus, tokenizer, here, 1, False)
    node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=10**8)
        ray.init(address=cluster.address, log_to_driver=False)
        prepare_on("ray", corpus, tokenizer, out, False, None, [])
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert content(out) == content(here)
    assert (out / "corpus.json").read_text() == (here / "corpus.json").read_text()
