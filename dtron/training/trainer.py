"""The training loop: builds a run from its config and trains it step by step."""

import gc
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from rich.console import Console

from dtron.checkpoint.checkpointer import Checkpointer
from dtron.checkpoint.directory import abandon_after
from dtron.checkpoint.initial_weights import InitialWeights, load_initial
from dtron.checkpoint.locations import location_of
from dtron.checkpoint.metadata import CheckpointMetadata, write_metadata
from dtron.config import RunConfig
from dtron.config.learning_rate import learning_rate
from dtron.data import Batch, DocumentSource, Loader
from dtron.data.corpus.readers.custom import check_source
from dtron.data.mixture import Mixture
from dtron.data.sources import CONTENT
from dtron.data.stream import merged
from dtron.errors import CheckpointError, ConfigError, RankError, TrainingError, shorten
from dtron.faults.guards import Guards, modules_of
from dtron.faults.memory_table import MemoryRecorder
from dtron.faults.signals import StopSignal
from dtron.faults.spikes import Spike
from dtron.float8.statistics import Statistics
from dtron.io.filesystem import Location
from dtron.lora.adapters import flops_model
from dtron.models import model_spec
from dtron.parallelisms.mesh import BATCH_AXES
from dtron.run.attempts import Attempts
from dtron.run.collective_counter import CollectiveCounter
from dtron.run.directory import RunDir
from dtron.run.fault_handler import FaultHandler
from dtron.run.lock import RunLock
from dtron.run.metrics import MetricsWriter, Throughput
from dtron.run.process import (
    Place,
    host_group,
    new_host_group,
    seed_everything,
    set_timeouts,
    set_up_logging,
    use_compile_cache,
    warn_of_shared_store,
)
from dtron.run.profiler import ProfileWindow, phase
from dtron.run.rendezvous import Rendezvous, meet
from dtron.run.step_times import StepTimes
from dtron.run.trackers import Trackers, trackers_of
from dtron.setup.agreement import check_agreement_of_ranks, common_to_ranks
from dtron.setup.automatic import Automatic, without_choices
from dtron.setup.preflight import preflight
from dtron.setup.resume_checks import (
    model_metadata,
    resume_settings,
    resumed_warmup,
    schedule_settings,
)
from dtron.training.batches import RankBatches
from dtron.training.build import ModelBuilder, build_mesh, build_run
from dtron.training.callbacks import Callback
from dtron.training.evaluation import Evaluation
from dtron.training.optim.custom import OptimizerFactory, custom_optimizer, factory_name
from dtron.training.optim.offloaded import OffloadedAdamW
from dtron.training.rollback import Rollback
from dtron.training.run_info import RunInfo
from dtron.training.saves import BestLoss, Saving
from dtron.training.step import Repeats, StepResult
from dtron.training.step_log import StepLog

log = logging.getLogger("dtron")
Chooser = Callable[[RunConfig, Place, Rendezvous], Automatic]
_SIGNAL_SECONDS = 10**6
"""Time-out of the all-reduce in `LivenessCheck`; some ranks may start it a whole run later."""


def _check_types(config: object, callbacks: Sequence[object]) -> None:
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks has {shorten(repr(callback))}; give objects of a class that derives "
                "from dtron.Callback"
            )
    if isinstance(config, RunConfig):
        return
    made = "RunConfig.of(values)" if isinstance(config, dict) else "RunConfig.load(FILE)"
    raise ConfigError(
        f"Trainer takes a RunConfig, not {shorten(repr(config))}; write Trainer({made})"
    )


class Trainer:
    """Trains one run; every rank creates a Trainer.

        Trainer(RunConfig.load("configs/quickstart.toml")).fit()

    Args:
        config: settings. Automatic keys without a value get their default, or `choose` sets them.
        choose: chooses automatic keys after the rendezvous (`dtron.plan.automatic.at_start`).
        callbacks: called in order after steps, validations and saves.
        data: documents in place of those of `data.source`, on all ranks the same: see
            `dtron.data.DocumentSource`.
        optimizer: function of named parameters and the section [optim], which makes the optimizer
            in place of `optim.name`, which becomes its module and name, also in config.toml.
    Raises:
        DtronError: the config cannot run here; raised before the process group exists.
    """

    def __init__(
        self,
        config: RunConfig,
        choose: Chooser | None = None,
        callbacks: Sequence[Callback] = (),
        data: DocumentSource | None = None,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        _check_types(config, callbacks)
        if data is not None:
            check_source(data)
            config = config.model_copy(update={"data": config.data.of_documents(data)})
        if optimizer is not None:
            named = config.optim.model_copy(update={"name": factory_name(optimizer)})
            config = config.model_copy(update={"optim": named})
        model_spec(config.model.name)  # raises its error before ranks wait for each other
        self.optimizer = optimizer or custom_optimizer(config.optim.name)
        self.fitted, self.callbacks = False, callbacks
        self._saved: SimpleQueue[Location] = SimpleQueue()
        """Complete checkpoints for which `after_save` has not been called yet."""
        self._stop: StopSignal | None = None
        self.place = Place.of_environment()
        self.console = Console()
        set_up_logging(self.place, self.console)
        self.rundir = RunDir(config.run.dir)
        self.attempts = Attempts(self.rundir.path, self.place)
        warn_of_shared_store(self.place)
        self.faults = FaultHandler(config, self.place, self.attempts, self.rundir.hangs)
        with self.faults.watching("rendezvous"):
            self.rendezvous = meet(self.place, config.parallel.timeout_seconds)
        self.attempts.met(self.rendezvous.token)
        own = (config, self.place, self.rendezvous)
        self.automatic = choose(*own) if choose else without_choices(config)
        self.config = config = self.automatic.config
        if line := self.automatic.line():
            log.info("%s", line)
        self.lock = RunLock(self.rundir.path, self.rendezvous, config.run.wait_seconds)
        try:
            use_compile_cache(config.compile.cache_dir)
            found = preflight(config, self.place, self.rendezvous)
            self.attempts.mark("prepared")
            self.model_setup, self.data_setup, self.resume, self.config = found
            config = self.config  # with the steps of `train.epochs`
            metadata = self.resume.metadata
            self.attempts.begin(metadata.step if metadata else 0, config.faults.max_attempts)
        except BaseException:
            self.lock.release(started=False)
            raise

    def fit(self) -> None:
        """Train to the last step or until a signal, with saves and validations; then sample text.

        Raises:
            TrainingError: too many steps in a row had non-finite gradients; or `fit` was called
                before.
        """
        if self.fitted:
            raise TrainingError("fit() was called twice; make a new Trainer(config) for each call")
        self.fitted = True
        if self.resume.is_finished(self.config.train):
            log.info("the run is finished: %s", self.resume.end(self.config.train))
            self.attempts.finish()
            self.lock.release()
            self.rendezvous.close()
            return
        try:
            with self.faults.watching("start"), self.faults.process_group(self.rendezvous) as stop:
                self._build_and_train(stop)
            self.attempts.finish()
        finally:
            self.lock.release()
            self.rendezvous.close()

    def stop(self) -> None:
        """End the run after this step or the next, saved, as SIGTERM does; for callbacks.

        It is enough if one rank calls it. The run may be resumed.
        """
        assert self._stop is not None, "stop() is called while fit() trains"
        self._stop.request()

    def _build_and_train(self, stop: StopSignal) -> None:
        self._stop = stop
        self._build()
        self.guards.begin(self.step)
        self.attempts.mark("loaded")
        gc.disable()  # `_one_step` collects garbage, at the same step on all ranks
        failed = True
        try:
            self._train(stop)
            failed = False
        except CheckpointError:  # on all ranks: a save failed
            stop.end()
            raise
        except TrainingError:  # on all ranks; wait for an asynchronous save
            with self.guards.saving(self.step):
                self.saving.try_wait()
            stop.end()  # on all ranks, so that no rank waits in a collective of `StopSignal`
            raise
        finally:
            gc.enable()
            self.guards.end()
            self.batches.loader.close(seconds=5)  # a store may be silent for longer
            self.writer.close(failed)

    # -- building ---------------------------------------------------------------------------

    def _build(self) -> None:
        config, place = self.config, self.place
        seed_everything(config.train.seed, config.debug.deterministic)
        self.host_group = host_group(config.parallel.timeout_seconds)
        common = common_to_ranks(config, self.model_setup.config, self.data_setup.identity)
        check_agreement_of_ranks(common, self.host_group)
        with self.faults.paused():
            self.resume = self.resume.agree(config, self.model_setup.config, self.host_group)
        mesh = build_mesh(config, place.world_size, place.device.type)
        setup = self.model_setup.measured(config, place, self.host_group)
        builder = ModelBuilder(config, setup, mesh)
        self.model = model = builder.build()
        self.guards = Guards(
            config.faults, self.faults.watchdog, model.applied, mesh, place.device, self.host_group
        )
        self.run = build_run(config, setup, model, self.guards.spikes, factory=self.optimizer)
        self.repeats = Repeats(self.run.step, place.device, self._compiling)
        loader = Loader(
            self.data_setup.train,
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            dp_rank=mesh.rank(*BATCH_AXES),
            dp_size=mesh.size(*BATCH_AXES),
            ahead=config.data.steps_ahead,
            objective=self.data_setup.objective,
        )
        self.batches = RankBatches(loader, mesh, builder.context, setup, config.metrics.batch_hash)
        data = self.data_setup
        self.evaluation = Evaluation(
            config, model, self.batches, data.tokenizer, data.validation, self._capacity_raised
        )
        self.checkpointer = Checkpointer(
            self.resume.locations,
            model.applied,
            self.run.optimizer,
            config.checkpoint,
            self.run.scales.state if self.run.scales else None,
            self._committed,
        )
        self.saving = Saving(self.checkpointer, self._metadata)
        early = config.checkpoint.best, config.train.stop_after
        self.best = BestLoss(*early, self.host_group)
        self.contents: dict[str, int | str] = {}  # of sources of a mixture that were left out too
        self.rollback = Rollback(config.faults, self.resume.locations, self.checkpointer)
        set_timeouts(mesh.groups(), config.parallel.timeout_seconds)
        self.attempts.mark("built")
        with self.faults.paused():
            self._load()
        self._refresh_weights()
        info = RunInfo(config, place, self.data_setup, builder, model, self.automatic.chosen)
        self._open_run(info)
        self.faults.built(modules_of(model.applied), lambda: self.step)

    def _compiling(self) -> None:
        self.guards.compiling(self.step)

    def _capacity_raised(self) -> None:
        """Discard what holds the experts' former capacity, after an evaluation raised it."""
        if self.run.step.graph is not None:
            self.run.step.graph.discard()
        self._compiling()

    def _committed(self, checkpoint: Location) -> None:
        self.rundir.note_checkpoint(checkpoint)
        self._saved.put(checkpoint)  # this may be another thread, with a limit of time

    def _call_after_saves(self) -> None:
        while not self._saved.empty():
            checkpoint = self._saved.get()
            for callback in self.callbacks:
                callback.after_save(self, checkpoint)

    def _refresh_weights(self) -> None:
        """Update state that depends on weights, after weights were initialized or loaded."""
        if self.run.step.after_update is not None:
            self.run.step.after_update(None)

    def _load(self) -> None:
        """Resume from a checkpoint or load initial weights, if the run has either."""
        config, begun = self.config, time.monotonic()
        self.step = self.tokens = 0
        self.warmup = resumed_warmup(config, None)
        if self.resume.checkpoint is None:
            if config.checkpoint.resume:
                where = self.resume.locations[-1].folder
                log.info("no checkpoint in %s yet: starting from step 0", where)
            if initial := self.resume.initial:
                self._load_weights(initial)
                log.info("loaded weights of %s in %.1f s", initial.path, time.monotonic() - begun)
            return
        model, group = self.model_setup.config, self.checkpointer.group
        self.resume = self.resume.verify(config, model, group)
        checkpoint, metadata = self.resume.checkpoint, self.resume.metadata
        assert checkpoint is not None, "verify returns a checkpoint or raises"
        assert metadata is not None, "its metadata was read"
        self.checkpointer.load(checkpoint)
        self.batches.loader.load_state_dict(metadata.data, metadata.step)
        self.contents = {k: v for k, v in metadata.data.items() if k.startswith(f"{CONTENT}:")}
        self.step, self.tokens = metadata.step, metadata.tokens
        self.warmup = resumed_warmup(config, metadata)
        self.run.step.skipped += metadata.skipped
        self.run.step.skipped_in_a_row += metadata.skipped_in_a_row
        self._load_guards(metadata)
        self.best.load_state_dict(metadata.best)
        log.info("resumed from %s in %.1f s", checkpoint, time.monotonic() - begun)

    def _load_weights(self, initial: InitialWeights) -> None:
        verify, saver = self.config.checkpoint.verify, self.checkpointer
        load_initial(initial, saver.stored, verify, self.host_group, saver.group)

    def _load_guards(self, metadata: CheckpointMetadata) -> None:
        before = metadata.faults.get("rollbacks", 0)
        self.rollback.n_rollbacks = max(self.rollback.n_rollbacks, before)
        if self.guards.spikes is not None:
            self.guards.spikes.load_state_dict(metadata.faults.get("spikes", {}))

    def _open_run(self, info: RunInfo) -> None:
        config = self.config
        first = self.place.rank == 0
        checkpoint, metadata = self.resume.checkpoint, self.resume.metadata
        own = location_of(self.resume.locations, checkpoint) is not None
        if first:
            text = config.to_toml(self.automatic.chosen)
            self.rundir.open(text, metadata.step if own and metadata else None)
            for folder in self.resume.folders:
                abandon_after(folder, self.step if own else 0)
            self.rundir.note_begun(self.place.job)
        self.info = info.gather(self.run.step.parameters, self.step, self.host_group)
        hosts = [""] * self.place.world_size
        dist.all_gather_object(hosts, platform.node(), group=self.host_group)
        if first:
            self.attempts.note_hosts(hosts)
            self.rundir.write_run_json(self.info)
        names = trackers_of(config) if first else []
        self.writer = MetricsWriter(
            self.rundir.metrics,
            Trackers(names, config, self.rundir.path, self.step),
            self.console,
            config.train.steps,
            start_step=self.step,
            active=first,
        )
        flops = flops_model(config, self.model_setup.config)
        self.throughput = Throughput(flops, self.place.world_size)
        source = self.data_setup.train
        names = tuple(source.sources) if isinstance(source, Mixture) else ()
        self.step_log = StepLog(
            config, self.run, self.batches, self.throughput, self.host_group, names
        )
        parts, compiled = self.model.applied.parts.values(), config.compile.enable
        self.profile = ProfileWindow(config.metrics, self.rundir.trace, parts, compiled)
        self.memory = MemoryRecorder(
            config.metrics.memory_snapshot,
            self.rundir.memory,
            self.model.applied,
            self.run.optimizer,
            self.place.device,
            (self.place.rank, self.model.mesh.rank("pp"), self.place.world_size),
        )
        self.faults.out_of_memory = self.memory.failed
        self.times = StepTimes(self.place.device) if config.metrics.step_times else None
        info.announce(self.info)

    # -- running ----------------------------------------------------------------------------

    def _train(self, stop: StopSignal) -> None:
        config = self.config
        saved = self._durable_step(self.resume.checkpoint)
        self.throughput.restart()
        if self.times is not None:
            self.times.begin()
        stopped = stop.begin(self.host_group, new_host_group(_SIGNAL_SECONDS))
        while self.step < config.train.steps and not stopped and not self.best.stops:
            if self.checkpointer.failed:
                with self.guards.saving(self.step):
                    self.saving.report_failed(stop)
            if stop.agreed():
                break
            self._one_step()
            if (spike := self.guards.after_step(self.step)) is not None:
                with self.guards.saving(self.step):
                    saved = self._durable_step(self._roll_back(spike))
                continue
            for callback in self.callbacks:
                callback.after_step(self)
            best = self.best.step == self.step
            if (best or self.checkpointer.due(self.step)) and self._save(best):
                durable = best or self.checkpointer.is_durable_step(self.step)
                saved = self.step if durable else saved
            self._call_after_saves()
        finished = self.step == config.train.steps or self.best.stops
        self._repeat_dropped()
        with self.guards.saving(self.step):
            if not self.saving.try_wait():  # raises errors of an asynchronous save
                saved = -1
            due = config.checkpoint.last or self.checkpointer.is_durable_step(self.step)
            if saved != self.step and (due or not finished):
                self.saving.begin(durable=True)  # a second signal does not interrupt it
            self.checkpointer.wait()  # raises errors of that save
        self._call_after_saves()
        stop.end()
        self._write_times()
        if finished:
            self._finish()
        elif stop.launcher_lost:  # after exit status 0, torchrun on other hosts would end the run
            raise RankError(
                f"torchrun has ended on a host; all ranks have saved step {self.step} and stop, so "
                "that torchrun on the other hosts restarts them"
            )
        if self.place.rank == 0:
            self.rundir.forget_begun()
        log.info("run directory: %s", self.rundir.path)

    def _durable_step(self, checkpoint: Location | None) -> int:
        """Return the current step if its checkpoint is in the durable location; else -1."""
        return -1 if location_of(self.resume.locations[:-1], checkpoint) else self.step

    def _write_times(self) -> None:
        if self.times is None:
            return
        gathered = self.times.gather(self.host_group, self.info["start_step"])
        if self.place.rank == 0:
            self.rundir.write_steps_json(gathered)

    def _one_step(self) -> None:
        config = self.config
        number = self.step + 1
        self.step_log.accuracy = {}
        self.profile.before(number)
        recording = self.memory.recording(number)
        with phase("step"), self.guards.sampling(number), recording:
            result, lr, *work = self._next_update()
        self.step = number
        self.step_log.recovery |= self.attempts.stepped()
        if self.times is not None:
            self.times.mark(*work)
        step_tokens = config.train.global_batch * config.train.seq_len
        self.tokens += step_tokens
        self.throughput.add(step_tokens, *work)
        final = number == config.train.steps
        self.profile.after(number, final)
        self.writer.step(number)
        interval = config.train.eval_interval
        validates = final or bool(interval and number % interval == 0)
        if validates or number % config.metrics.log_interval == 0:
            self._log(result, lr, validates)
        elif self.repeats.full:
            self._repeat_dropped()
        if number % config.train.gc_interval == 0:
            gc.collect(1)

    def _next_update(self) -> tuple[StepResult, float, float, float]:
        """Train on the next global batch.

        Returns:
            Result, learning rate, attended length: 2 * (mean number of keys per query) - 1, and
            images per token.
        """
        config, number, first = self.config, self.step + 1, self.step == self.info["start_step"]
        batches, attended, images = self.batches.next_step()
        self.guards.data_loaded(number)
        lr = learning_rate(
            self.step, config.train.steps, config.optim.lr, config.schedule, self.warmup
        )
        float8, compute = self.run.setup.float8, self.guards.compute(number)
        if compute is not None:  # computes gradients twice, so collectives are not counted
            self._repeat_dropped()
            result = self.run.step(batches, self.step, lr, compute)
        elif config.debug.collectives and first:
            result = self._counted(batches, lr)
        elif float8 is not None and float8.reports(number):
            statistics = float8.statistics(self.model.applied, self.place.device)
            result = self._measured(statistics, batches, lr)
        else:
            result = self.run.step(batches, self.step, lr)
        self.repeats.keep(batches, self.step, lr, compute)
        if first:
            self._after_first_step()
        return result, lr, attended, images

    def _after_first_step(self) -> None:
        """Reserve host memory for asynchronous saves; log host memory of offloaded tensors."""
        self.checkpointer.reserve()
        offload = self.model.applied.offload
        if offload is not None:
            log.info(
                "activation offloading: %.1f GiB of pinned host memory per rank",
                offload.pool.reserved / 2**30,
            )
        if isinstance(optimizer := self.run.optimizer, OffloadedAdamW):
            log.info(
                "optimizer offloading: %.1f GiB of pinned host memory per rank",
                optimizer.pool.reserved / 2**30,
            )

    def _counted(self, batches: list[Batch], lr: float) -> StepResult:
        with CollectiveCounter(self.model.mesh.group_names()) as counter:
            result = self.run.step(batches, self.step, lr)
        self.info["collectives"] = counter.table()
        if self.place.rank == 0:
            self.rundir.write_run_json(self.info)
        return result

    def _measured(self, statistics: Statistics, batches: list[Batch], lr: float) -> StepResult:
        with statistics.measuring():
            result = self.run.step(batches, self.step, lr)
        self.step_log.accuracy = statistics.read()
        return result

    def _repeat_dropped(self) -> StepResult | None:
        """Repeat steps in which experts dropped tokens; return the latest step's new result."""
        result = self.repeats.run()
        if result is not None:
            self.step_log.accuracy = {}  # of the float8 casts of a skipped step
        return result

    def _log(self, result: StepResult, lr: float, validates: bool) -> None:
        """Write the metrics of this step. Waits for the device."""
        result = self._repeat_dropped() or result
        row = self.step_log.row(self.step, self.tokens, result, lr)
        losses = self.evaluation.losses() if validates else {}
        row |= losses
        self.writer.row(row)
        if losses:
            self.best.observe(losses, self.step)
            if self.best.stops:
                best = self.best.metric, self.best.loss, self.best.step
                log.info("early stop: the best %s is %.4f, of step %d (train.stop_after)", *best)
            for callback in self.callbacks:
                callback.after_eval(self, losses)
            self.throughput.restart()
            self.guards.compiling(self.step)  # if the validation has raised the experts' capacity
        self.step_log.check_skipped(row)

    def _save(self, durable: bool) -> bool:
        self._repeat_dropped()
        with self.guards.saving(self.step):
            saved = self.saving.try_begin(durable)
        self.throughput.restart()
        return saved

    def _metadata(self) -> CheckpointMetadata:
        """Return the metadata for a checkpoint of this step."""
        return CheckpointMetadata(
            step=self.step,
            tokens=self.tokens,
            skipped=int(self.run.step.skipped),
            skipped_in_a_row=int(self.run.step.skipped_in_a_row),
            settings=resume_settings(self.config),
            world_size=self.place.world_size,
            model=model_metadata(self.config, self.model_setup.config),
            data=self._data_state(),
            faults=self._guard_state(),
            schedule=schedule_settings(self.config, self.warmup),
            best=self.best.state_dict(),
            automatic={key: row["value"] for key, row in self.automatic.chosen.items()},
        )

    def _guard_state(self) -> dict[str, Any]:
        spikes = self.guards.spikes
        if spikes is None:
            return {}
        return {"rollbacks": self.rollback.n_rollbacks, "spikes": spikes.state_dict()}

    def _data_state(self) -> dict[str, int | str]:
        """Return the loader's position and the data's identity; with a stream, a collective."""
        own = self.data_setup.identity
        state = {**self.contents, **self.batches.loader.state_dict(), **own}
        if not self.config.data.hf_streaming:
            return state
        states = [state] * self.place.world_size
        dist.all_gather_object(states, state, group=self.host_group)
        return merged(states)

    def _roll_back(self, spike: Spike) -> Location:
        """Load and return a checkpoint from before a spike. Raises: as `Rollback.load`."""
        self.repeats.discard()
        self.saving.try_wait()
        checkpoint, metadata = self.rollback.load(spike, self.step)
        self.step, self.tokens = metadata.step, metadata.tokens
        self.run.step.skipped_in_a_row.zero_()
        self._load_guards(metadata)
        self.best.load_state_dict(metadata.best)
        self._refresh_weights()
        if isinstance(self.data_setup.train, Mixture):  # its stages begin at steps
            loader = self.batches.loader
            loader.load_state_dict(loader.state_dict(), self.step)
            self.data_setup.train.warn_of_end(self.config.train.steps - self.step)
        metadata = replace(metadata, data=self._data_state())
        self.checkpointer.saver.run_on_first(lambda: self._skip_batches(checkpoint, metadata))
        self.throughput.restart()
        return checkpoint

    def _skip_batches(self, checkpoint: Location, metadata: CheckpointMetadata) -> None:
        """On rank 0: record in the checkpoint that runs that resume from it skip these batches.

        Invalidate newer checkpoints.
        """
        write_metadata(checkpoint, replace(metadata, faults=self._guard_state()))
        for location in self.resume.locations:
            abandon_after(location.folder, self.step)

    def _finish(self) -> None:
        if self.config.train.sample_tokens:
            log.info("sample: %s", self.evaluation.sample())
        if "tensorboard" in self.writer.trackers.names:
            log.info("TensorBoard: tensorboard --logdir %s", self.rundir.tensorboard)
