"""Cached plan of `torch.distributed.checkpoint` for saving: which rank writes which tensors.

A rank sends an empty plan if the names, shapes and dtypes of its tensors are the same as in the
previous save. The global plan is made again only if a rank sends a new plan.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem


class CachedSavePlanner(DefaultSavePlanner):
    """Plans the saves of one run and caches the plan.

    Attributes:
        staged: copies of local tensors, by name, to write instead of the tensors; None: write the
            tensors.
        n_global_plans: number of global plans made so far.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.staged: Mapping[str, Tensor] | None = None
        self.n_global_plans = 0
        self._local_plan: SavePlan | None = None
        self._all_plans: list[SavePlan] = []
        self._global_metadata: Metadata | None = None

    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan; if unchanged, an empty plan with usable=False."""
        plan = super().create_local_plan()
        if plan == self._local_plan:
            return SavePlan([], usable=False)
        self._local_plan = plan
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of each rank and the metadata.

        If no rank has sent a new plan, return `all_plans` and the cached metadata.
        """
        if self._global_metadata is not None and not any(plan.usable for plan in all_plans):
            return all_plans, self._global_metadata
        known = self._all_plans or all_plans
        self._all_plans = [p if p.usable else old for p, old in zip(all_plans, known, strict=True)]
        plans, self._global_metadata = super().create_global_plan(self._all_plans)
        self.n_global_plans += 1
        return plans, self._global_metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's final plan: `new_plan`, or the cached plan if `new_plan` is empty."""
        if new_plan.usable:
            self._final_plan = new_plan
        return self._final_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor to write."""
        if self.staged is not None:
            return self.staged[write_item.index.fqn]
        data = super().resolve_data(write_item)
        assert isinstance(data, Tensor), f"{write_item.index.fqn} is not a tensor"
        return data
