"""The training loop: builds what the config says and runs it step by step."""

import contextlib
import functools
import gc
import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from dtron.checkpoint.checkpointer import Checkpointer
from dtron.checkpoint.directory import (
    Facts,
    abandon_after,
    agree,
    check_agreement,
    check_content,
    share,
    write_facts,
)
from dtron.checkpoint.locations import owner
from dtron.config import RunConfig
from dtron.config.learning_rate import learning_rate
from dtron.data import Batch, Loader, validation_batches
from dtron.data.batch_hash import BITS, fingerprint
from dtron.errors import CheckpointError, DtronError, PeerError, RankError, TrainingError
from dtron.faults.failure import FirstFailure, is_of_lost_peer
from dtron.faults.guards import Guards, modules_of
from dtron.faults.memory import MemoryInUse, is_out_of_memory
from dtron.faults.signals import StopSignal
from dtron.faults.spikes import Spike
from dtron.faults.watchdog import Watchdog
from dtron.float8.statistics import Statistics
from dtron.io.filesystem import Location
from dtron.models.flops import FlopsModel
from dtron.parallelisms.apply import apply_passes, build_execution
from dtron.parallelisms.fsdp.sharding import DTYPES, Policy
from dtron.parallelisms.mesh import BATCH_AXES, LOSS_AXES, SHARE_AXES, Mesh
from dtron.run.attempts import LOST_PEER, Attempts
from dtron.run.collective_counter import CollectiveCounter
from dtron.run.directory import RunDir
from dtron.run.lock import RunLock
from dtron.run.metrics import MetricsWriter, Throughput, peak_memory_gib
from dtron.run.process import (
    Place,
    host_group,
    new_host_group,
    process_group,
    seed_everything,
    set_timeouts,
    set_up_logging,
    warn_of_shared_store,
)
from dtron.run.profiler import ProfileWindow, phase
from dtron.run.rendezvous import meet
from dtron.run.step_times import StepTimes
from dtron.setup.agreement import check_agreement_of_ranks, common_to_ranks
from dtron.setup.preflight import (
    checked_facts,
    kept_warmup,
    model_facts,
    preflight,
    resume_settings,
    schedule_settings,
)
from dtron.training.build import Assembly
from dtron.training.expert_balancing import Routing
from dtron.training.generate import next_logits, sample_text
from dtron.training.optim import build_optimizer
from dtron.training.run_info import RunFacts
from dtron.training.saves import Saving, before_step, verified
from dtron.training.step import (
    StepResult,
    TrainStep,
    evaluate,
    share_of,
)

log = logging.getLogger("dtron")
_HOURS = 10**6
"""More seconds than it takes until all ranks have heard of a signal."""


class Trainer:
    """One run of one rank.

        Trainer(RunConfig.load("configs/quickstart.toml")).fit()

    Raises:
        DtronError: the config cannot run here; no process group has been started.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.place = Place.of_environment()
        self.console = Console()
        set_up_logging(self.place, self.console)
        self.rundir = RunDir(config.run.dir)
        self.attempts = Attempts(self.rundir.path, self.place)
        warn_of_shared_store(self.place)
        with self._watching("rendezvous"):
            self.rendezvous = meet(self.place, config.parallel.timeout_seconds)
        self.attempts.met(self.rendezvous.token)
        self.lock = RunLock(self.rundir.path, self.rendezvous, config.run.wait_seconds)
        try:
            self.checked = preflight(config, self.place, self.rendezvous)
            facts = self.checked.facts
            self.attempts.begin(facts.step if facts else 0, config.faults.max_attempts)
        except BaseException:
            self.lock.release(started=False)
            raise

    def fit(self) -> None:
        """Train to the last step, or until a signal; saves, validates and samples on the way.

        Raises:
            TrainingError: too many steps in a row had gradients that were not finite.
        """
        if self.checked.finished:
            steps, where = self.config.train.steps, self.checked.checkpoint
            log.info("the run is finished: %s has all %d steps; nothing is done", where, steps)
            self.attempts.finish()
            self.lock.release()
            self.rendezvous.close()
            return
        self.modules: dict[nn.Module, str] = {}
        self.memory = MemoryInUse(self.place.local_world_size)
        failure = FirstFailure(self.place.rank, self.place.world_size, self.rendezvous.token)
        try:
            with self._watching("start"):
                self._run(failure)
            self.attempts.finish()
        finally:
            self.lock.release()
            self.rendezvous.close()

    def _run(self, failure: FirstFailure) -> None:
        timeout, store = self.config.parallel.timeout_seconds, self.rendezvous.store
        stop = StopSignal(self.config.faults.stop_seconds, failure, self._note_signal)
        try:
            with stop, process_group(self.place, timeout, store):
                self._build_and_train(stop)
        except DtronError as error:
            self.attempts.record_end(str(error))
            raise
        except Exception as error:
            explained = self._explained(error, failure, stop)
            lost = isinstance(explained, PeerError)
            line = str(explained or error).partition("\n")[0]
            self.attempts.record_end(LOST_PEER if lost else f"{type(error).__name__}: {line}")
            if explained is not None:
                raise explained from error
            raise

    def _note_signal(self) -> None:
        """torchrun's, once another rank has failed; a run that it stops in order takes it back."""
        self.attempts.record_end(LOST_PEER)

    @contextlib.contextmanager
    def _watching(self, phase: str) -> Iterator[None]:
        """What does not end is reported from here on."""
        self.watchdog = self._watchdog(phase)
        try:
            yield
        finally:
            if self.watchdog is not None:
                self.watchdog.end()

    def _watchdog(self, phase: str) -> Watchdog | None:
        faults, place = self.config.faults, self.place
        seconds = faults.watched_seconds(self.config.parallel.timeout_seconds)
        if not seconds:
            return None
        record, hangs = self.attempts.record_end, self.rundir.hangs
        watchdog = Watchdog(seconds, hangs, place.rank, place.world_size, record)
        watchdog.begin(phase)
        return watchdog

    def _unwatched(self) -> contextlib.AbstractContextManager[None]:
        """For reading checkpoints, which may take hours and has time-outs of its own."""
        return self.watchdog.paused() if self.watchdog is not None else contextlib.nullcontext()

    def _build_and_train(self, stop: StopSignal) -> None:
        self._build()
        self.guards.begin(self.step)
        self.attempts.mark("built")
        gc.disable()  # collections come at the same step on all ranks
        try:
            self._train(stop)
        except CheckpointError:  # all ranks raise it: the last save could not be written
            stop.end()
            raise
        except TrainingError:  # all ranks raise it: what they began to save is completed
            with self.guards.saving(self.step):
                self.saving.try_wait()
            stop.end()  # together: ranks that leave while others ask of signals end in abort()
            raise
        finally:
            gc.enable()
            self.guards.end()
            self.writer.close()

    def _explained(
        self, error: Exception, failure: FirstFailure, stop: StopSignal
    ) -> TrainingError | None:
        """What to raise for an error of this rank, which may follow from another rank's; None: the
        error itself."""
        if failure.reported_by_peer():
            return PeerError("another rank has failed", stop.terminated)
        if not is_out_of_memory(error):
            if self.watchdog is not None:
                self.watchdog.timed_out(error)
            if self.modules and is_of_lost_peer(error):  # before, addresses may be wrong
                log.error("rank %d lost another rank: %s", self.place.rank, error)
                return PeerError("lost another rank", stop.terminated)
            return None
        if not failure.claim():
            return PeerError("another rank has failed", stop.terminated)
        where = f"step {self.step + 1}" if self.modules else "building the model"
        return self.memory.explain(error, f"rank {self.place.rank}, {where}", self.modules)

    # -- building ---------------------------------------------------------------------------

    def _build(self) -> None:
        config = self.config
        seed_everything(config.train.seed, config.debug.deterministic)
        self.host_group = host_group(config.parallel.timeout_seconds)
        common = common_to_ranks(config, self.checked.model, self.checked.data)
        check_agreement_of_ranks(common, self.host_group)
        with self._unwatched():
            self._agree_on_checkpoint()
        degrees = config.degrees(self.place.world_size)
        self.mesh = Mesh(
            **degrees,
            ep=config.parallel.ep,
            etp=config.parallel.etp,
            device_type=self.place.device.type,
            high_priority=config.parallel.high_priority,
        )
        self.policy = Policy.of(config.parallel, self.mesh)
        self.float8 = self.checked.float8
        if self.float8 is not None:
            dtype = DTYPES[config.train.dtype]
            self.float8 = self.float8.measured(self.place.device, dtype, self.host_group)
        checked = self.checked
        assembly = Assembly(
            config, checked.model, checked.attention, checked.layout, self.float8, self.mesh
        )
        self.context = assembly.context
        self.applied = apply_passes(assembly.build(), self.mesh, assembly.passes())
        self.optimizer = build_optimizer(self.applied.named_parameters(), config.optim)
        self._build_data()
        self.loss = assembly.loss(self.applied)
        self.execution = build_execution(self.applied, self.checked.layout, self.mesh, self.policy)
        self.routing = Routing.of(
            self.applied, self.mesh, config.micro_batches(self.place.world_size)
        )
        self.scales = self.float8.delay_scales(self.applied, self.mesh) if self.float8 else None
        self.guards = Guards(
            config.faults,
            self.watchdog,
            self.applied,
            self.mesh,
            self.place.device,
            self.host_group,
        )
        self.train_step = TrainStep(
            self.execution,
            self.applied,
            self.mesh,
            self.optimizer,
            self.loss,
            config.train.max_grad_norm,
            config.train.seed if self.checked.model.draws else None,
            self._after_update(),
            guard=self.guards.spikes,
            further_weight=self.checked.model.mtp_coefficient,
        )
        self.checkpointer = Checkpointer(
            self.checked.tiers,
            self.applied,
            self.optimizer,
            config.checkpoint,
            self.scales.state if self.scales else None,
            self.rundir.note_checkpoint,
        )
        self.saving = Saving(self.checkpointer, self._save_facts)
        for axes in (LOSS_AXES, SHARE_AXES, BATCH_AXES):
            self.mesh.group(*axes)  # made now, to get the time-out and a name too
        set_timeouts(self.mesh.groups(), config.parallel.timeout_seconds)
        with self._unwatched():
            self._resume()
        if self.train_step.after_update is not None:
            taken = torch.ones((), dtype=torch.bool, device=self.place.device)
            self.train_step.after_update(taken)  # of the weights that were drawn or loaded
        self._open_run()
        self.modules = modules_of(self.applied)

    def _agree_on_checkpoint(self) -> None:
        """All ranks resume the same state, each from a tier where it sees it."""
        checked, config = self.checked, self.config
        if checked.by_rank_0 and checked.checkpoint is not None:
            shared = share(checked.checkpoint, self.host_group)
            self.checked = replace(checked, checkpoint=shared)
            return
        if checked.resume != "latest" or len(checked.tiers) == 1:
            check_agreement(checked.checkpoint, self.host_group)
            return
        folders = [tier.folder for tier in checked.tiers]
        found = agree(checked.checkpoint, folders, self.host_group)
        facts = checked_facts(config, checked.model, found) if found else None
        self.checked = replace(checked, checkpoint=found, facts=facts)

    def _after_update(self) -> Callable[[torch.Tensor], None] | None:
        plan, routing, scales = self.float8, self.routing, self.scales
        refresh = plan.gather_weights(self.applied, self.mesh) if plan else None

        def act(taken: torch.Tensor) -> None:
            if routing is not None:
                routing.after_update(taken)
            if refresh is not None:
                refresh()
            if scales is not None:
                scales.update(taken)

        return act if routing or refresh or scales else None

    def _build_data(self) -> None:
        config = self.config
        self.loader = Loader(
            self.checked.train,
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            dp_rank=self.mesh.rank(*BATCH_AXES),
            dp_size=self.mesh.size(*BATCH_AXES),
        )

    def _resume(self) -> None:
        self.step = self.tokens = self.rollbacks = 0
        self.warmup = kept_warmup(self.config, None)
        checked, begun = self.checked, time.monotonic()
        if checked.checkpoint is None or checked.facts is None:
            if self.config.checkpoint.resume:
                log.info("no checkpoint in %s yet: starting afresh", checked.tiers[-1].folder)
            if initial := checked.initial:
                check_agreement(initial.path, self.host_group)
                if self.config.checkpoint.verify and initial.folder is None:
                    check_content(initial.path, self.checkpointer.group)
                self.checkpointer.load_weights(initial.reader(), initial.path)
                log.info("weights of %s in %.1f s", initial.path, time.monotonic() - begun)
            return
        checkpoint, facts = verified(self.config, checked, self.checkpointer.group)
        self.checked = replace(checked, checkpoint=checkpoint, facts=facts)
        self.checkpointer.load(checkpoint)
        self.loader.load_state_dict(facts.data)
        self.step, self.tokens = facts.step, facts.tokens
        self.warmup = kept_warmup(self.config, facts)
        self.train_step.skipped += facts.skipped
        self.train_step.skipped_in_a_row += facts.skipped_in_a_row
        self._resume_guards(facts)
        log.info("resumed from %s in %.1f s", checkpoint, time.monotonic() - begun)

    def _resume_guards(self, facts: Facts) -> None:
        self.rollbacks = max(self.rollbacks, facts.faults.get("rollbacks", 0))
        if self.guards.spikes is not None:
            self.guards.spikes.load_state_dict(facts.faults.get("spikes", {}))

    def _open_run(self) -> None:
        config = self.config
        first = self.place.rank == 0
        checkpoint, facts = self.checked.checkpoint, self.checked.facts
        own = owner(self.checked.tiers, checkpoint) is not None
        if first:
            self.rundir.open(config.to_toml(), facts.step if own and facts else None)
            for folder in self.checked.folders:
                abandon_after(folder, self.step if own else 0)
            self.rundir.begun.write_text(self.place.job)
        said = RunFacts(
            config,
            self.place,
            self.checked,
            self.mesh,
            self.policy,
            self.applied,
            self.context,
            self.float8,
        )
        self.facts = said.gather(self.train_step.parameters, self.step, self.host_group)
        hosts = [""] * self.place.world_size
        dist.all_gather_object(hosts, platform.node(), group=self.host_group)
        if first:
            self.attempts.note_hosts(hosts)
            self.rundir.write_run_json(self.facts)
        self.writer = MetricsWriter(
            self.rundir.metrics,
            self.rundir.tensorboard if config.metrics.tensorboard else None,
            self.console,
            config.train.steps,
            start_step=self.step,
            active=first,
        )
        flops = FlopsModel.of(self.checked.model)
        self.throughput = Throughput(flops, self.place.world_size)
        self.padding = self.padded_of = self.batch_hash = 0
        self.recovery: dict[str, float] = {}
        self.profile = ProfileWindow(config.metrics, self.rundir.trace)
        self.times = StepTimes(self.place.device) if config.metrics.step_times else None
        said.announce(self.facts)

    # -- running ----------------------------------------------------------------------------

    def _train(self, stop: StopSignal) -> None:
        config = self.config
        saved = self._durable_step(self.checked.checkpoint)
        self.throughput.restart()
        if self.times is not None:
            self.times.begin()
        stopped = stop.begin(self.host_group, new_host_group(_HOURS))
        while self.step < config.train.steps and not stopped:
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
            if self.checkpointer.due(self.step) and self._save():
                saved = self.step if self.checkpointer.lasts(self.step) else saved
        finished = self.step == config.train.steps
        with self.guards.saving(self.step):
            if not self.saving.try_wait():  # a failure beside training ends it here
                saved = -1
            due = config.checkpoint.last or self.checkpointer.lasts(self.step)
            if saved != self.step and (due or not finished):
                self.saving.begin(durable=True)  # a second signal does not interrupt it
            self.checkpointer.wait()  # nothing comes after it that could save what it did not
        stop.end()
        self._write_times()
        if finished:
            self._finish()
        elif stop.launcher_lost:  # exit status 0 would end the run for torchrun of other hosts
            raise RankError(
                f"torchrun has ended on a host; all ranks have saved step {self.step} and stop, "
                "for torchrun of the other hosts to start them again"
            )
        if self.place.rank == 0:
            self.rundir.begun.unlink(missing_ok=True)
        log.info("run directory: %s", self.rundir.path)

    def _durable_step(self, checkpoint: Location | None) -> int:
        """The step that the run is at, if it needs no saving; else -1."""
        return -1 if owner(self.checked.tiers[:-1], checkpoint) else self.step

    def _write_times(self) -> None:
        if self.times is None:
            return
        gathered = self.times.gather(self.host_group, self.facts["start_step"])
        if self.place.rank == 0:
            self.rundir.write_steps_json(gathered)

    def _one_step(self) -> None:
        config = self.config
        number = self.step + 1
        self.accuracy: dict[str, float] = {}
        self.profile.before(number)
        with phase("step"), self.guards.sampling(number):
            result, lr, attended = self._next_update()
        self.step = number
        self.recovery |= self.attempts.recovered()
        if self.times is not None:
            self.times.mark(attended)
        step_tokens = config.train.global_batch * config.train.seq_len
        self.tokens += step_tokens
        self.throughput.add(step_tokens, attended)
        final = number == config.train.steps
        self.profile.after(number, final)
        self.writer.step(number)
        interval = config.train.eval_interval
        validates = final or bool(interval and number % interval == 0)
        if validates or number % config.metrics.log_interval == 0:
            self._log(result, lr, validates)
        if number % config.train.gc_interval == 0:
            gc.collect(1)

    def _next_update(self) -> tuple[StepResult, float, float]:
        """Train on the next global batch; its result, learning rate and mean attended length."""
        config = self.config
        batches = self.loader.step()
        attended = _attended(batches, self.checked.model.windows)
        self.padding += sum(batch.padding for batch in batches)
        self.padded_of += sum(batch.tokens.numel() for batch in batches)
        if config.metrics.batch_hash:
            self.batch_hash += fingerprint(batches)
        batches = [self._on_device(batch, self.checked.model.mtp) for batch in batches]
        self.guards.data_is_there(self.step + 1)
        steps, peak = config.train.steps, config.optim.lr
        lr = learning_rate(self.step, steps, peak, config.schedule, self.warmup)
        float8, compute = self.float8, self.guards.compute(self.step + 1)
        if compute is not None:  # twice, which counts and statistics would count twice
            result = self.train_step(batches, self.step, lr, compute)
        elif config.debug.collectives and self.step == self.facts["start_step"]:
            result = self._counted(batches, lr)
        elif float8 is not None and float8.reports(self.step + 1):
            result = self._measured(float8.statistics(self.applied, self.place.device), batches, lr)
        else:
            result = self.train_step(batches, self.step, lr)
        if self.step == self.facts["start_step"]:
            self._after_first_step()
        return result, lr, attended

    def _after_first_step(self) -> None:
        """Tell of what the first step has reserved, and reserve what saves will need."""
        self.checkpointer.reserve()
        offload = self.applied.offload
        if offload is not None:
            log.info("offload: %.1f GiB of host memory a rank", offload.pool.reserved / 2**30)

    def _on_device(self, batch: Batch, further: int = 0) -> Batch:
        part = share_of(batch, self.mesh, self.context, further)
        described = self.checked.attention.described(part.documents)
        # Only routers need to know which tokens are padding; custom models need not take `real`.
        pieces = part.pieces if self.checked.model.n_experts else None
        return replace(part, documents=described, pieces=pieces).to(self.place.device)

    def _counted(self, batches: list[Batch], lr: float) -> StepResult:
        with CollectiveCounter(self.mesh.group_names()) as counter:
            result = self.train_step(batches, self.step, lr)
        self.facts["collectives"] = counter.table()
        if self.place.rank == 0:
            self.rundir.write_run_json(self.facts)
        return result

    def _measured(self, statistics: Statistics, batches: list[Batch], lr: float) -> StepResult:
        with statistics.measuring():
            result = self.train_step(batches, self.step, lr)
        self.accuracy = statistics.read()
        return result

    def _log(self, result: StepResult, lr: float, validates: bool) -> None:
        """Write the row of this step: here the device is waited for."""
        loss = self._over_ranks(result.loss)
        figures = {"loss": loss, "grad_norm": result.grad_norm.item(), "lr": lr}
        row = {"step": self.step, **figures, "tokens": self.tokens, **self.throughput.read()}
        row["memory_gib"] = self._most(peak_memory_gib())
        if skipped := int(self.train_step.skipped):
            row["skipped"] = skipped
        row |= self.accuracy | self.recovery
        self.recovery = {}
        if self.routing is not None:
            row |= self.routing.read()
        if self.config.metrics.batch_hash:
            row["batch"] = self._batch_hash()
        if self.checked.model.mtp:
            row["mtp_loss"] = self._over_ranks(result.further_loss)
        if self.config.data.packing != "cut":
            row["padding"] = self._padding_share()
        if validates and (validation_loss := self._validate()) is not None:
            row["validation_loss"] = validation_loss
        self.writer.row(row)
        if self.applied.dispatcher is not None:
            self.applied.dispatcher.check(self.place.device)
        in_a_row = int(self.train_step.most_in_a_row)
        if in_a_row >= self.config.train.max_skipped:
            raise TrainingError(
                f"the gradients of {in_a_row} steps in a row, by step {self.step}, were not finite "
                f"(train.max_skipped = {self.config.train.max_skipped}); lower optim.lr or resume "
                "from an earlier checkpoint"
            )

    def _batch_hash(self) -> int:
        """Of all ranks' sequences since the last row."""
        counted = self.mesh.rank("pp", "cp", "tp") == 0  # the others have the same sequences
        own = (self.batch_hash if counted else 0) % 2**BITS
        total = torch.tensor([own])
        dist.all_reduce(total, group=self.host_group)
        self.batch_hash = 0
        return int(total) % 2**BITS

    def _over_ranks(self, share: torch.Tensor) -> float:
        total = share.clone()
        dist.all_reduce(total, group=self.mesh.group(*SHARE_AXES))
        return total.item()

    def _most(self, value: float) -> float:
        """The largest of all ranks' values: pipeline ranks differ in memory."""
        most = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.host_group)
        return most.item()

    def _padding_share(self) -> float:
        """Share of padding among all ranks' tokens since the last row."""
        counts = torch.tensor(
            [self.padding, self.padded_of], dtype=torch.float64, device=self.place.device
        )
        dist.all_reduce(counts, group=self.mesh.group(*BATCH_AXES))
        self.padding = self.padded_of = 0
        return (counts[0] / counts[1]).item()

    def _validate(self) -> float | None:
        """Loss on the held-out split; None where there is none."""
        config = self.config
        if self.checked.validation is None or not config.train.eval_sequences:
            return None
        batches = validation_batches(
            self.checked.validation,
            sequences=config.train.eval_sequences,
            micro_batch=config.train.micro_batch,
            dp_rank=self.mesh.rank(*BATCH_AXES),
            dp_size=self.mesh.size(*BATCH_AXES),
        )
        on_device = [self._on_device(batch) for batch in batches]
        loss = evaluate(self.execution, self.applied, self.mesh, on_device, self.loss)
        self.throughput.restart()
        mean = loss.item()
        self.guards.alive(self.step)
        return mean

    def _save(self) -> bool:
        with self.guards.saving(self.step):
            saved = self.saving.try_begin()
        self.throughput.restart()
        return saved

    def _save_facts(self) -> Facts:
        return Facts(
            step=self.step,
            tokens=self.tokens,
            skipped=int(self.train_step.skipped),
            skipped_in_a_row=int(self.train_step.skipped_in_a_row),
            settings=resume_settings(self.config),
            world_size=self.place.world_size,
            model=model_facts(self.config, self.checked.model),
            data={**self.loader.state_dict(), **self.checked.data},
            faults=self._guard_facts(),
            schedule=schedule_settings(self.config, self.warmup),
        )

    def _guard_facts(self) -> dict[str, Any]:
        spikes = self.guards.spikes
        return {"rollbacks": self.rollbacks, "spikes": spikes.state_dict()} if spikes else {}

    def _roll_back(self, spike: Spike) -> Location:
        """Go back to a checkpoint from before a spike and give it. The data goes on where it is, so
        that all batches since that checkpoint are left out.

        Raises:
            TrainingError: no good checkpoint is old enough, or this was done too often; on all
                ranks.
        """
        faults = self.config.faults
        self.saving.try_wait()
        if self.rollbacks >= faults.max_rollbacks:
            raise TrainingError(
                f"{spike}, after {self.rollbacks} rollbacks (faults.max_rollbacks); lower optim.lr"
            )
        try:
            checkpoint, facts = before_step(
                self.checked.tiers,
                spike.step - faults.rollback_steps + 1,
                self.checkpointer.group,
            )
        except CheckpointError as error:
            raise TrainingError(f"{spike}, and there is nothing to go back to: {error}") from error
        left_out = range(facts.step + 1, self.step + 1)
        self.rollbacks += 1
        self.checkpointer.load(checkpoint)
        self.step, self.tokens = facts.step, facts.tokens
        self.train_step.skipped_in_a_row.zero_()
        self._resume_guards(facts)
        if self.train_step.after_update is not None:
            taken = torch.ones((), dtype=torch.bool, device=self.place.device)
            self.train_step.after_update(taken)
        self.checkpointer.saver.first(lambda: self._forget_after(checkpoint, facts))
        self.throughput.restart()
        log.warning(
            "rolled back to %s; the batches of steps %d to %d are left out",
            checkpoint,
            left_out[0],
            left_out[-1],
        )
        return checkpoint

    def _forget_after(self, checkpoint: Location, facts: Facts) -> None:
        """On the first rank: what resumes from the checkpoint leaves the same batches out."""
        data, faults = self.loader.state_dict(), self._guard_facts()
        write_facts(checkpoint, replace(facts, data=data, faults=faults))
        for tier in self.checked.tiers:
            abandon_after(tier.folder, self.step)

    def _finish(self) -> None:
        train = self.config.train
        if train.sample_tokens:
            with self.applied.evaluating():
                text = self._sample()
            if self.applied.dispatcher is not None:
                self.applied.dispatcher.check(self.place.device)
            log.info("sample: %s", text)
        if self.config.metrics.tensorboard:
            log.info("TensorBoard: tensorboard --logdir %s", self.rundir.tensorboard)

    def _sample(self) -> str:
        train, vocabulary = self.config.train, self.checked.model.vocab_size
        return sample_text(
            functools.partial(next_logits, self.execution, self._on_device, self.mesh, vocabulary),
            self.checked.tokenizer,
            prompt=train.sample_prompt,
            n_tokens=train.sample_tokens,
            batch_shape=(train.micro_batch, train.seq_len),
            device=self.place.device,
            seed=train.seed,
        )


def _attended(batches: list[Batch], windows: Sequence[int]) -> float:
    """Mean over layers and tokens of the length that attention runs over: sum(L^2) / sum(L), less
    what the layers' windows leave out."""
    # A document of length L adds the sum over p < L of (2p + 1) = L^2; p + 1 keys are seen.
    places = [_places(batch) for batch in batches]
    total = 0.0
    for window, layers in Counter(windows).items():
        seen = [(p + 1).clamp(max=window) if window else p + 1 for p in places]
        mean = sum((2 * keys.double() - 1).mean().item() for keys in seen) / len(batches)
        total += mean * layers
    return total / len(windows)


def _places(batch: Batch) -> torch.Tensor:
    return torch.arange(batch.tokens.shape[1]) if batch.positions is None else batch.positions
