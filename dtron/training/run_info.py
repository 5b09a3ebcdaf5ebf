"""What a run says of itself when it starts: run.json, and lines of the log."""

import logging
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import dtron
from dtron.config import RunConfig
from dtron.models.flops import n_parameters
from dtron.parallelisms.apply import Applied
from dtron.parallelisms.context.attention import Context
from dtron.parallelisms.fsdp.sharding import DTYPES, Policy
from dtron.parallelisms.mesh import Mesh
from dtron.run.process import Place
from dtron.setup.float8_plan import Float8Plan
from dtron.setup.preflight import Checked

log = logging.getLogger("dtron")


@dataclass(frozen=True)
class RunFacts:
    """What was built of a run's config on these ranks."""

    config: RunConfig
    place: Place
    checked: Checked
    mesh: Mesh
    policy: Policy
    applied: Applied
    context: Context | None
    float8: Float8Plan | None

    def gather(
        self, parameters: Iterable[torch.Tensor], step: int, group: dist.ProcessGroup
    ) -> dict[str, Any]:
        """What run.json says; every rank of `group`, on the host, calls it.

        Args:
            parameters: those that are trained, on this rank.
            step: that training begins after.
        """
        config, applied, layout = self.config, self.applied, self.checked.layout
        waste = self.checked.train.waste()
        held: list[int] = [0] * self.place.world_size
        local = sum(p.to_local().nbytes for p in parameters)  # type: ignore[attr-defined]
        dist.all_gather_object(held, local, group=group)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        return {
            "dtron": dtron.__version__,
            "torch": torch.__version__,
            "device": device,
            "world_size": self.place.world_size,
            "mesh": self.mesh.degrees,
            "experts": self.mesh.expert_degrees if self.checked.model.n_experts else None,
            "micro_batches": config.micro_batches(self.place.world_size),
            "context": self._context(),
            "schedule": config.parallel.schedule if layout else None,
            "stages": [list(stage) for stage in layout.stages] if layout else None,
            "zero": config.parallel.zero,
            "reduce": "micro_batch" if self.policy.reduce_each_micro_batch else "step",
            "dtype": config.train.dtype,
            "parameters": n_parameters(self.checked.model),
            "attention": self.checked.attention.name,
            "packing": {"mode": config.data.packing, **(asdict(waste) if waste else {})},
            "recomputed_blocks": applied.recomputed_blocks,
            "compiled": list(applied.compiled),
            "float8": self._float8(),
            "fsdp_units": applied.units,
            "parameter_bytes_per_rank": held,
            "start_step": step,
        }

    def _context(self) -> dict[str, Any] | None:
        if self.context is None:
            return None
        layouts = self.context.layouts(self.mesh.size("cp")).items()
        inner = {name: shape.inner for name, shape in layouts if shape.inner > 1}
        return {"methods": list(self.context.methods), "all_to_all_ranks": inner}

    def _float8(self) -> dict[str, Any] | None:
        plan = self.float8
        if plan is None:
            return None
        why = plan.why_emulated(self.place.device, DTYPES[self.config.train.dtype])
        shown = {"recipe": plan.recipe.name, "emulated": why or False, "layers": list(plan.layers)}
        return {**shown, "experts": list(plan.experts)}

    def announce(self, facts: dict[str, Any]) -> None:
        """Tell of the run in the log, by what `gather` gave."""
        applied, train = self.applied, self.config.train
        wide = ", ".join(f"{axis} {n}" for axis, n in facts["mesh"].items() if n > 1)
        if facts["experts"]:
            apart = ("edp_shard", "ep", "etp")
            split = {axis: n for axis, n in facts["experts"].items() if axis in apart and n > 1}
            shown = ", ".join(f"{axis} {n}" for axis, n in split.items()) or "whole"
            wide += f"{'; ' if wide else ''}experts: {shown}"
            wide += ", their rows in float8" if self.config.float8.dispatch else ""
        if facts["context"]:
            wide += f", attention by {' and '.join(dict.fromkeys(facts['context']['methods']))}"
        log.info(
            "%s %s: %s parameters, %s attention, %s",
            self.config.model.name,
            self.config.model.size,
            f"{facts['parameters']:,}",
            facts["attention"],
            train.dtype,
        )
        log.info(
            "%d ranks on %s (%s), %d micro-batches of %d x %d tokens",
            facts["world_size"],
            facts["device"],
            wide or "no parallelism",
            facts["micro_batches"],
            train.micro_batch,
            train.seq_len,
        )
        compiled = f"{len(applied.compiled)} blocks and the loss" if applied.compiled else "nothing"
        log.info("compiled: %s; recomputed: %d blocks", compiled, applied.recomputed_blocks)
        if self.float8 is not None:
            self.float8.announce(self.place.device, DTYPES[train.dtype])
        waste = self.checked.train.waste() or "a stream, whose waste is not known in advance"
        log.info("packing %s: %s", self.config.data.packing, waste)
