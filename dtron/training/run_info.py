"""Metadata of a run: run.json and the first log lines."""

import logging
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import dtron
from dtron.config import RunConfig
from dtron.data.mixture import Mixture
from dtron.errors import counted
from dtron.lora.adapters import adapters, n_adapter_parameters
from dtron.models.flops import n_parameters
from dtron.parallelisms.fsdp.sharding import DTYPES, Policy
from dtron.run.process import Place
from dtron.setup.preflight import DataSetup
from dtron.training.build import ModelBuilder
from dtron.training.step import ParallelModel

log = logging.getLogger("dtron")


@dataclass(frozen=True)
class RunInfo:
    """Collects and logs the metadata of a run, once its model is built."""

    config: RunConfig
    place: Place
    data: DataSetup
    builder: ModelBuilder
    model: ParallelModel
    automatic: dict[str, dict[str, Any]]
    """`Automatic.chosen`."""

    def gather(
        self, parameters: Iterable[torch.Tensor], step: int, group: dist.ProcessGroup
    ) -> dict[str, Any]:
        """Return the content of run.json; all ranks call it together.

        Args:
            parameters: this rank's parameters that are trained.
            step: step of the checkpoint from which training continues, or 0.
            group: process group of all ranks for CPU tensors.
        """
        config, setup = self.config, self.builder.setup
        applied, mesh, layout = self.model.applied, self.model.mesh, setup.layout
        policy = Policy.of(config.parallel, mesh)
        waste = self.data.train.waste()
        parameter_bytes: list[int] = [0] * self.place.world_size
        local = sum(p.to_local().nbytes for p in parameters)  # type: ignore[attr-defined]
        dist.all_gather_object(parameter_bytes, local, group=group)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        return {
            "dtron": dtron.__version__,
            "torch": torch.__version__,
            "device": device,
            "world_size": self.place.world_size,
            "automatic": self.automatic,
            "mesh": mesh.degrees,
            "experts": mesh.expert_degrees if setup.config.n_experts else None,
            "micro_batches": config.micro_batches(self.place.world_size),
            "context": self._context(),
            "schedule": config.parallel.schedule if layout else None,
            "stages": [list(stage) for stage in layout.stages] if layout else None,
            "zero": config.parallel.zero,
            "reduce": "micro_batch" if policy.reduce_each_micro_batch else "step",
            "dtype": config.train.dtype,
            "optimizer": config.optim.name,
            "parameters": n_parameters(setup.config),
            "adapters": self._adapters(),
            "attention": setup.attention.names,
            "packing": {"mode": config.data.packing, **(asdict(waste) if waste else {})},
            "recomputed_blocks": applied.recomputed_blocks,
            "compiled": list(applied.compiled),
            "float8": self._float8(),
            "fsdp_units": applied.units,
            "parameter_bytes_per_rank": parameter_bytes,
            "start_step": step,
        }

    def _context(self) -> dict[str, Any] | None:
        context = self.builder.context
        if context is None:
            return None
        layouts = context.layouts(self.model.mesh.size("cp")).items()
        inner = {name: shape.inner for name, shape in layouts if shape.inner > 1}
        return {"methods": list(context.methods), "all_to_all_ranks": inner}

    def _adapters(self) -> dict[str, Any] | None:
        lora, name, model = self.config.lora, self.config.model.name, self.builder.setup.config
        if not lora.rank:
            return None
        found = [each.name for each in adapters(name, model, lora)]
        total = n_adapter_parameters(name, model, lora)
        return {"rank": lora.rank, "parameters": total, "matrices": found}

    def _float8(self) -> dict[str, Any] | None:
        plan = self.builder.setup.float8
        if plan is None:
            return None
        why = plan.why_emulated(self.place.device, DTYPES[self.config.train.dtype])
        shown = {"recipe": plan.recipe.name, "emulated": why or False, "layers": list(plan.layers)}
        return {**shown, "experts": list(plan.experts)}

    def announce(self, info: dict[str, Any]) -> None:
        """Log the first lines of a run, from the result of `gather`."""
        applied, train = self.model.applied, self.config.train
        wide = ", ".join(f"{axis} {n}" for axis, n in info["mesh"].items() if n > 1)
        if info["experts"]:
            separate = ("edp_shard", "ep", "etp")
            split = {axis: n for axis, n in info["experts"].items() if axis in separate and n > 1}
            shown = ", ".join(f"{axis} {n}" for axis, n in split.items()) or "not sharded"
            wide += f"{'; ' if wide else ''}experts: {shown}"
            wide += ", dispatched in float8" if self.config.float8.dispatch else ""
        if info["context"]:
            wide += f", cp methods {' and '.join(dict.fromkeys(info['context']['methods']))}"
        log.info(
            "%s %s: %s parameters, %s attention, %s",
            self.config.model.name,
            self.config.model.size,
            f"{info['parameters']:,}",
            info["attention"],
            train.dtype,
        )
        log.info(
            "%s on %s (%s), %s of %d x %d tokens",
            counted(info["world_size"], "rank"),
            info["device"],
            wide or "no parallelism",
            counted(info["micro_batches"], "micro-batch", "micro-batches"),
            train.micro_batch,
            train.seq_len,
        )
        compiled = "nothing"
        if applied.compiled:
            compiled = f"{counted(len(applied.compiled), 'block')} and the loss"
        recomputed = counted(applied.recomputed_blocks, "block")
        log.info("compiled: %s; recomputed: %s", compiled, recomputed)
        if lora := info["adapters"]:
            log.info(
                "%s: %s, rank %d on %s",
                "DoRA" if self.config.lora.dora else "LoRA",
                counted(lora["parameters"], "trained parameter"),
                lora["rank"],
                counted(len(lora["matrices"]), "matrix", "matrices"),
            )
        if (float8 := self.builder.setup.float8) is not None:
            float8.announce(self.place.device, DTYPES[train.dtype])
        waste = self.data.train.waste() or "padding of a stream is not known in advance"
        log.info("packing %s: %s", self.config.data.packing, waste)
        if isinstance(self.data.train, Mixture):
            left = train.steps - info["start_step"]
            steps = counted(left, "step")
            log.info("mixture of the next %s: %s", steps, self.data.train.summary(left))
