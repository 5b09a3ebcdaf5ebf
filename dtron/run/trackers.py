"""Trackers: where rows of metrics go besides metrics.jsonl and the console.

    tensorboard   RUN/tensorboard
    wandb         Weights & Biases: project $WANDB_PROJECT (default dtron), RUN/wandb
    mlflow        MLflow: the server or database of $MLFLOW_TRACKING_URI, or RUN/mlflow.db
    MODULE:NAME   a function of one's own that opens a tracker

Only rank 0 opens trackers. A run that resumes continues the run of the tracking service: the id of
that run is in RUN/wandb-id or RUN/mlflow-id. A tracker that fails is closed with a warning, and
training continues.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from dtron.config import RunConfig
from dtron.errors import ConfigError, nearest
from dtron.io.filesystem import write_atomically
from dtron.io.untrusted import MB, read_text

log = logging.getLogger("dtron")
Metrics = Mapping[str, float | int]
_MLFLOW_PARAMS, _MLFLOW_CHARACTERS = 100, 6000
"""Most parameters in a request to MLflow, and characters of a value."""

_GROUPS = (
    ("loss", ("loss", "validation_loss", "mtp_loss")),
    ("experts", ("balance_loss", "z_loss", "max_expert_load")),
    ("optim", ("grad_norm", "lr", "skipped")),
    ("speed", ("tokens_per_second", "mfu", "seconds", "recovery")),
    ("memory", ("memory_gib",)),
    ("data", ("tokens", "padding", "data_seconds")),
    ("float8", ("float8",)),
)
"""(group of TensorBoard, prefixes of its metrics); an exact match precedes a prefix."""


class Tracker(Protocol):
    """Receives the rows of metrics of a run, on rank 0."""

    def row(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step, by name; all values are finite numbers."""
        ...

    def close(self) -> None:
        """Write what is pending; the run has ended."""
        ...


OpenTracker = Callable[[RunConfig, Path, int], Tracker]
"""(config, run directory, step of the checkpoint that the run resumes from, or 0) -> tracker."""


class TensorBoard:
    """Logs to RUN/tensorboard; a run that resumes purges the scalars of later steps."""

    def __init__(self, config: RunConfig, run: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow, and rank 0 alone needs it

        self._board = SummaryWriter(run / "tensorboard", purge_step=first + 1)
        self._board.add_text("config", f"```\n{config.to_toml()}\n```", first)

    def row(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        for name, value in metrics.items():
            self._board.add_scalar(tag_of(name), value, step)

    def close(self) -> None:
        """Write what is pending."""
        self._board.close()


class WeightsAndBiases:
    """Logs to Weights & Biases; $WANDB_MODE=offline writes files that `wandb sync` sends later."""

    def __init__(self, config: RunConfig, run: Path, first: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dtron"),
            name=os.environ.get("WANDB_NAME", run.resolve().name),
            id=id_of_run(run / "wandb-id", lambda: uuid.uuid4().hex),
            dir=run,
            config=config.model_dump(mode="json"),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")  # repeated steps may be logged again

    def row(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Send what is pending."""
        self._run.finish()


class MLflow:
    """Logs to MLflow, with the keys of the config as parameters."""

    def __init__(self, config: RunConfig, run: Path, first: int) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.resolve()}/mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dtron")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)

        def begin() -> str:
            created = self._client.create_run(experiment, run_name=run.resolve().name)
            params = [
                Param(f"{section}.{key}", str(value)[:_MLFLOW_CHARACTERS])
                for section, keys in config.model_dump(mode="json").items()
                for key, value in keys.items()
            ]
            for i in range(0, len(params), _MLFLOW_PARAMS):
                some = params[i : i + _MLFLOW_PARAMS]
                self._client.log_batch(created.info.run_id, params=some)
            return created.info.run_id

        self._id = id_of_run(run / "mlflow-id", begin)
        self._client.update_run(self._id, status="RUNNING")

    def row(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = time.time_ns() // 10**6
        found = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=found)

    def close(self) -> None:
        """Note that the run has ended."""
        self._client.set_terminated(self._id)


TRACKERS: dict[str, tuple[OpenTracker, str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}
"""Name -> function that opens the tracker, and the module that it needs."""


def id_of_run(path: Path, begin: Callable[[], str]) -> str:
    """Return the id in a file; if there is no such file, that of a new run, which is written."""
    with contextlib.suppress(OSError, ValueError):
        return read_text(path, MB).strip()
    name = begin()
    write_atomically(path, name + "\n", synced=False)
    return name


def trackers_of(config: RunConfig) -> list[str]:
    """Return the names of a run's trackers, each once."""
    first = ["tensorboard"] if config.metrics.tensorboard else []
    return list(dict.fromkeys([*first, *config.metrics.trackers]))


def check_trackers(config: RunConfig) -> None:
    """Raise ConfigError if a tracker is unknown, or if its package is not installed."""
    for name in trackers_of(config):
        if ":" in name:
            _own(name)
        elif name not in TRACKERS:
            raise ConfigError(
                f"metrics.trackers: {name!r} is unknown{nearest(name, TRACKERS)}; use "
                f"{', '.join(TRACKERS)}, or MODULE:NAME for a function of your own"
            )
        elif importlib.util.find_spec(TRACKERS[name][1]) is None:
            raise ConfigError(
                f"metrics.trackers: {name!r} needs a package; pip install 'dtron[trackers]'"
            )


def _own(name: str) -> OpenTracker:
    """Import MODULE:NAME; modules in the working directory are found too."""
    module, _, attribute = name.partition(":")
    try:
        with _working_directory_on_path():
            found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"metrics.trackers: {name!r}: {error}") from None
    if not callable(found):
        raise ConfigError(f"metrics.trackers: {name!r} is not a function")
    return cast(OpenTracker, found)


@contextlib.contextmanager
def _working_directory_on_path() -> Iterator[None]:
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


class Trackers:
    """All trackers of a run; without effect on ranks other than 0.

    Args:
        names: from `trackers_of`.
        config: the run's settings.
        run: run directory.
        first: step of the checkpoint that the run resumes from, or 0.
    """

    def __init__(self, names: Iterable[str], config: RunConfig, run: Path, first: int) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._or_none(name):
                opener = _own(name) if ":" in name else TRACKERS[name][0]
                self._open[name] = opener(config, run, first)

    @property
    def names(self) -> Sequence[str]:
        """Names of the trackers that have not failed."""
        return list(self._open)

    def row(self, row: Mapping[str, float | int | None]) -> None:
        """Log one row: `step`, and metrics by name; values that are not finite are left out."""
        metrics = {
            name: value
            for name, value in row.items()
            if name not in ("step", "batch") and value is not None
        }
        for name, tracker in list(self._open.items()):
            with self._or_none(name):
                tracker.row(int(row["step"] or 0), metrics)

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._open.items()):
            with self._or_none(name):
                tracker.close()

    @contextlib.contextmanager
    def _or_none(self, name: str) -> Iterator[None]:
        """Give a tracker up after an error in this context, also of a thread of the tracker."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            log.warning("%s: logging stops: %s; training continues", name, error)


def tag_of(name: str) -> str:
    """Return the TensorBoard tag of a metric: `loss/validation_loss`; default group `other`."""
    for equal in (True, False):
        for group, names in _GROUPS:
            if any(name == each if equal else name.startswith(each) for each in names):
                return f"{group}/{name}"
    return f"other/{name}"
