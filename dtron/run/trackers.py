"""Trackers: where rows of metrics go besides metrics.jsonl and the console.

    tensorboard   RUN/tensorboard
    wandb         Weights & Biases: project $WANDB_PROJECT (default dtron), RUN/wandb
    mlflow        MLflow: the server or database of $MLFLOW_TRACKING_URI, or RUN/mlflow.db
    MODULE:NAME   a custom function that opens a tracker

Only rank 0 opens trackers. Each one has a thread, so that a service that does not answer delays
neither a step nor the end of the run. A tracker that fails or falls behind is given up with a
warning. A run that resumes continues the run of the tracking service: the id of that run is in
RUN/wandb-id or RUN/mlflow-id.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from dtron.config import RunConfig
from dtron.errors import ConfigError, nearest
from dtron.io.filesystem import write_atomically
from dtron.io.untrusted import MB, read_text
from dtron.io.user_code import import_object

log = logging.getLogger("dtron")
Metrics = Mapping[str, float | int]
_MLFLOW_PARAMS, _MLFLOW_CHARACTERS = 100, 6000
"""Most parameters in a request to MLflow, and characters of a value."""
_SECONDS = 60
"""Time limit of a service at the start and at the end of a run."""
_MOST_ROWS = 10_000
"""Rows that wait for a tracker at most."""

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
    """Receives the rows of metrics of a run, on rank 0, in a thread of its own."""

    def row(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step, by name; all values are finite numbers."""
        ...

    def close(self, failed: bool) -> None:
        """Write what is pending; the run has ended, by an error if `failed`."""
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

    def close(self, failed: bool) -> None:
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
            settings=wandb.Settings(
                init_timeout=_SECONDS, login_timeout=_SECONDS, finish_timeout=_SECONDS
            ),
        )
        self._run.define_metric("*", step_metric="step")  # repeated steps may be logged again

    def row(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        self._run.log({"step": step, **metrics})

    def close(self, failed: bool) -> None:
        """Send what is pending."""
        self._run.finish(exit_code=int(failed))


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
            return self._client.create_run(experiment, run_name=run.resolve().name).info.run_id

        path = run / "mlflow-id"
        self._id = id_of_run(path, begin)
        try:
            self._client.update_run(self._id, status="RUNNING")
        except mlflow.MlflowException:  # of another server, or deleted
            path.unlink()
            self._id = id_of_run(path, begin)
        known = self._client.get_run(self._id).data.params
        params = [
            Param(f"{section}.{key}", str(value)[:_MLFLOW_CHARACTERS])
            for section, keys in config.model_dump(mode="json").items()
            for key, value in keys.items()
            if f"{section}.{key}" not in known  # MLflow's parameters do not change
        ]
        for i in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[i : i + _MLFLOW_PARAMS])

    def row(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = time.time_ns() // 10**6
        found = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=found)

    def close(self, failed: bool) -> None:
        """Note that the run has ended."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, tuple[OpenTracker, tuple[str, ...]]] = {
    "tensorboard": (TensorBoard, ("tensorboard",)),
    "wandb": (WeightsAndBiases, ("wandb",)),
    "mlflow": (MLflow, ("mlflow", "sqlalchemy", "alembic")),
}
"""Name -> function that opens the tracker, and the modules that it needs."""


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
            _custom(name)
        elif name not in TRACKERS:
            raise ConfigError(
                f"metrics.trackers: {name!r} is unknown{nearest(name, TRACKERS)}; use "
                f"{', '.join(TRACKERS)}, or MODULE:NAME for a custom function"
            )
        elif lacking := [x for x in TRACKERS[name][1] if importlib.util.find_spec(x) is None]:
            extra = "tensorboard" if name == "tensorboard" else "'dtron[trackers]'"
            raise ConfigError(
                f"metrics.trackers: {name!r} needs {', '.join(lacking)}; pip install {extra}"
            )


def _custom(name: str) -> OpenTracker:
    found = import_object(f"metrics.trackers: {name!r}", name)
    if not callable(found):
        raise ConfigError(f"metrics.trackers: {name!r} is not a function")
    return cast(OpenTracker, found)


class Trackers:
    """All trackers of a run; none on ranks other than 0.

    Args:
        names: from `trackers_of`.
        config: the run's settings.
        run: run directory.
        first: step of the checkpoint that the run resumes from, or 0.
    """

    def __init__(self, names: Iterable[str], config: RunConfig, run: Path, first: int) -> None:
        self._threads = [_TrackerThread(name, config, run, first) for name in names]

    @property
    def names(self) -> Sequence[str]:
        """Names of the trackers that have not failed."""
        return [each.name for each in self._threads if not each.failed]

    def row(self, row: Mapping[str, float | int | None]) -> None:
        """Log one row: `step`, and metrics by name; None is left out."""
        metrics = {
            name: value
            for name, value in row.items()
            if name not in ("step", "batch") and value is not None
        }
        for each in self._threads:
            each.put((int(row["step"] or 0), metrics))

    def close(self, failed: bool = False) -> None:
        """Close all trackers; wait at most _SECONDS for each.

        Args:
            failed: whether the run ends by an error.
        """
        for each in self._threads:
            each.end(failed)


class _TrackerThread:
    """Runs one tracker in a thread."""

    def __init__(self, name: str, config: RunConfig, run: Path, first: int) -> None:
        self.name, self.failed = name, False
        self._rows: queue.Queue[tuple[int, Metrics] | bool] = queue.Queue(_MOST_ROWS)
        opener = _custom(name) if ":" in name else TRACKERS[name][0]
        work = (opener, config, run, first)
        self._thread = threading.Thread(target=self._work, args=work, daemon=True)
        self._thread.start()

    def put(self, row: "tuple[int, Metrics] | bool") -> None:
        """Hand over a row, or whether the run has failed at its end."""
        if self.failed:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._give_up(f"it is {_MOST_ROWS} rows behind")

    def end(self, failed: bool) -> None:
        """Close the tracker."""
        self.put(failed)
        self._thread.join(0 if self.failed else _SECONDS)
        if self._thread.is_alive():
            self._give_up(f"it has not ended after {_SECONDS} s")

    def _work(self, opener: OpenTracker, config: RunConfig, run: Path, first: int) -> None:
        tracker: Tracker | None = None
        try:
            tracker = opener(config, run, first)
            while not isinstance(row := self._rows.get(), bool):
                tracker.row(*row)
            tracker.close(row)
        except Exception as error:
            self._give_up(error)
            if tracker is not None:
                with contextlib.suppress(Exception):
                    tracker.close(True)

    def _give_up(self, why: object) -> None:
        if not self.failed:
            self.failed = True
            log.warning("%s: logging stops: %s; training continues", self.name, why)


def tag_of(name: str) -> str:
    """Return the TensorBoard tag of a metric: `loss/validation_loss`; default group `other`."""
    for equal in (True, False):
        for group, names in _GROUPS:
            if any(name == each if equal else name.startswith(each) for each in names):
                return f"{group}/{name}"
    return f"other/{name}"
