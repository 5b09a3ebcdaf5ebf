"""Training on a prepared folder in an object store over HTTP, whose requests fail.

The proxy of tests/checkpoints/object_store.py fails between the ranks and moto's server.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtron.config import Data, RunConfig
from dtron.data.corpus.documents import files_corpus
from dtron.data.corpus.prepare import prepare_folder
from dtron.data.tokenizer import ByteTokenizer
from dtron.errors import DataError
from dtron.io.filesystem import location
from dtron.training.trainer import Trainer
from tests.checkpoints.object_store import BUCKET, ObjectStore, Request, as_rank, object_store
from tests.harness import run_ranks
from tests.training.test_trainer import fit, losses, tiny

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
URL = f"s3://{BUCKET}/prepared"
STEPS = 12


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    """With the embedded corpus prepared from its own file there."""
    with object_store() as store, pytest.MonkeyPatch.context() as patch:
        for key, value in store.environment.items():
            patch.setenv(key, value)
        s3fs.S3FileSystem.clear_instance_cache()  # of a store of another file's tests
        patch.setattr("dtron.data.corpus.documents.TASK_BYTES", 300_000)
        (location(f"s3://{BUCKET}/kjv.jsonl.gz")).copy_from(Path("assets/kjv.jsonl.gz"))  # type: ignore[union-attr]
        data = Data.model_validate({"paths": [f"s3://{BUCKET}/kjv.jsonl.gz"]})
        store.fault = once_each()
        prepare_folder(files_corpus(data), ByteTokenizer(), location(URL), 1, False)
        yield store
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run on the file of the disk."""
    run = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(2, fit, tiny(run, train__steps=STEPS, **SAME))
    return losses(run)


SAME = {"schedule__name": "constant"}


def remote(run: Path, **changes: Any) -> RunConfig:
    """A run on the folder in the store, with a cache of its own."""
    keys = {
        "data__source": "prepared",
        "data__paths": [URL],
        "data__cache_dir": str(run.parent / "cache"),
        "train__steps": STEPS,
        **SAME,
    }
    return tiny(run, **{**keys, **changes})


def once_each() -> Any:
    """Every request fails the first time that it comes, in one of several ways."""
    seen: set[str] = set()
    acts = itertools.cycle(("cut", "lose", "slow down", "internal error", "truncate", "halve"))

    def fault(request: Request) -> str:
        name = f"{request.client} {request.method} {request.path}"
        if name in seen:
            return ""
        seen.add(name)
        return next(acts)

    return fault


def test_losses_equal_those_of_the_file_when_requests_fail(
    tmp_path: Path, store: ObjectStore, expected: list[float]
) -> None:
    """The run ends in the middle, and resumes on one rank."""
    store.fault = once_each()
    keys = {"checkpoint__interval": 5, "checkpoint__resume": "latest"}
    run_ranks(2, as_rank, fit, store.environment, remote(tmp_path / "run", train__steps=5, **keys))
    store.fault = once_each()
    run_ranks(1, as_rank, fit, store.environment, remote(tmp_path / "run", **keys))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


def test_ranks_fetch_their_own_sequences_alone(tmp_path: Path, store: ObjectStore) -> None:
    store.fault = lambda request: ""
    store.requests.clear()
    config = remote(tmp_path / "run", train__steps=3, data__fetch_ahead=0, train__eval_sequences=0)
    run_ranks(2, as_rank, fit, store.environment, config)
    read = [each.client for each in store.requests if ".tokens" in each.path]
    assert set(read) == {"rank-0", "rank-1"}
    sequences = 3 * config.train.global_batch
    assert len(read) < 1.5 * sequences  # of about one document each; all on both would be twice


def fit_until_it_fails(config: RunConfig) -> tuple[str, float, int]:
    """What ends a run, the seconds that it took, and its steps."""
    begin = time.monotonic()
    trainer = Trainer(config)
    try:
        trainer.fit()
    except DataError as error:
        return str(error), time.monotonic() - begin, trainer.step
    return "", time.monotonic() - begin, trainer.step


@pytest.mark.parametrize("fault", ["hang", "slow down"])
def test_a_store_that_is_gone_ends_the_run_after_what_was_fetched(
    tmp_path: Path, store: ObjectStore, fault: str
) -> None:
    """From some request on, nothing is answered; the store is named."""
    answered = [0]

    def act(request: Request) -> str:
        if ".tokens" not in request.path:
            return ""
        answered[0] += 1
        return fault if answered[0] > 60 else ""

    store.fault = act
    changes = {"train__steps": 1000, "data__store_seconds": 3, "train__eval_sequences": 0}
    config = remote(tmp_path / "run", **changes)
    found = run_ranks(1, as_rank, fit_until_it_fails, store.environment, config)
    message, seconds, steps = found[0]
    assert URL in message
    assert "requests have failed for" in message
    assert "check the store" in message
    assert seconds < 60
    assert steps > 1
