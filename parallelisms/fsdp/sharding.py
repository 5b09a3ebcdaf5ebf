"""Data parallelism: FSDP2 over dp_shard (x cp), all-reduce over dp_replicate, ZeRO 1 to 3.

Each FSDP unit (a block, the embedding, norm + head) is one parameter group: FSDP gathers it before
its forward and backward, and reduce-scatters its gradients after its backward. The ZeRO stages
differ only in what is unsharded during a step and in when gradients are reduced (N parameters, d
ranks, bfloat16 compute):

    zero  sharded                    unsharded during a step    reduce under accumulation
    3     weights, moments, grads    one unit's weights, grads  every micro-batch (default)
    2     weights, moments, grads    2N bytes of weights        every micro-batch (default)
    1     weights, moments           2N weights, 4N gradients   once per step

The shards are the fp32 master weights (4N/d bytes); gathering casts them to the compute dtype.
Gradients are *summed*: the loss is already divided by the global number of tokens, so FSDP's
division is turned off here.

Parameters that FSDP does not shard (one GPU, only tp or pp, experts on one rank) are in FSDP units
too, for the dtype casts, but their gradients are not reduced (`torch_internals.bypass_reduction`).
Frozen ones in the compute dtype need no cast: FSDP ignores them, since it would copy them.

Sources: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277; torch.distributed.fsdp.fully_shard.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from dtron.config import Parallel
from dtron.parallelisms.expert.expert_parallel import fsdp_dim
from dtron.parallelisms.expert.peer_memory import CopyEngine
from dtron.parallelisms.fsdp.custom_collectives import AllToAllSum, CopiedAllGather
from dtron.parallelisms.fsdp.torch_internals import bypass_reduction, forward_hooks_on
from dtron.parallelisms.mesh import FSDP_AXES, Mesh

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Policy:
    """When FSDP frees parameters and reduces gradients, resolved from the [parallel] section."""

    reshard_after_forward: bool
    """Free parameters after each forward."""
    keep_gathered: bool
    """Keep parameters gathered until the last backward of the step."""
    reduce_each_micro_batch: bool
    """Reduce gradients in each micro-batch instead of once per step."""

    @classmethod
    def of(cls, parallel: Parallel, mesh: Mesh) -> "Policy":
        """Return the policy that `parallel.zero` and `parallel.reduce` define on this mesh."""
        return cls.resolve(parallel, mesh.size(*FSDP_AXES) > 1)

    @classmethod
    def resolve(cls, parallel: Parallel, sharded: bool) -> "Policy":
        """Return the policy that `parallel.zero` and `parallel.reduce` define.

        Without sharding, each rank keeps all parameters, so none are freed.
        """
        return cls(
            reshard_after_forward=parallel.zero == 3 and sharded,
            keep_gathered=parallel.zero < 3 or not sharded,
            reduce_each_micro_batch=not parallel.reduces_once(sharded),
        )


def shard(
    model: nn.Module,
    mesh: Mesh,
    groups: Sequence[Sequence[nn.Module]],
    parallel: Parallel,
    dtype: torch.dtype,
    by_columns: Collection[nn.Parameter] = (),
    keep_last: bool = True,
    experts: Collection[nn.Module] = (),
) -> None:
    """Apply FSDP2 to every group of modules and then to the root, in place.

    Args:
        groups: modules of each FSDP unit, in the order of their forward.
        dtype: compute dtype of gathered parameters; sharded parameters keep their dtype.
        by_columns: parameters to shard along dim 1 instead of dim 0.
        keep_last: do not free the last unit after its forward, since its backward follows directly;
            false for pipeline stages.
        experts: modules that are sharded over edp_shard; they are gathered with the module of a
            group that contains them, otherwise with the root.
    """
    policy = Policy.of(parallel, mesh)
    stored = {p.dtype for p in model.parameters()}  # a stage may have no parameters
    precision = MixedPrecisionPolicy(
        param_dtype=None if stored <= {dtype} else dtype,
        reduce_dtype=None if torch.float64 in stored else DTYPES[parallel.reduce_dtype],
        cast_forward_inputs=False,  # the embedding casts activations; rotary tables stay float32
    )
    device_mesh = _data_mesh(mesh)
    columns, kept = {id(p) for p in by_columns}, _kept(model, device_mesh, dtype)

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if id(parameter) in columns else None

    order: list[list[nn.Module]] = []
    not_prefetched: list[list[nn.Module]] = []
    for group in groups:
        reshard = policy.reshard_after_forward and not (keep_last and group is groups[-1])
        modules = list(group) if len(group) > 1 else group[0]
        inside = [(m, block) for block in group for m in block.modules() if m in experts]
        for module, block in inside:
            _shard_experts(module, block, mesh, reshard, precision, dtype)
        if not getattr(group[0], "in_training_alone", False):
            order.append([group[0], *(module for module, _ in inside)])
        else:  # a forward that skips a prefetched unit would leave stale weights for the next one
            not_prefetched.append([group[0], *(module for module, _ in inside)])
        fully_shard(
            modules,  # type: ignore[arg-type]
            mesh=device_mesh,
            reshard_after_forward=reshard,
            mp_policy=precision,
            shard_placement_fn=placement,
            ignored_params=kept,
        )
    for module in experts:
        if not isinstance(module, FSDPModule):  # in no group: gathered with the root
            _shard_experts(module, model, mesh, False, precision, dtype)
    fully_shard(
        model,
        mesh=device_mesh,
        reshard_after_forward=False,
        mp_policy=precision,
        shard_placement_fn=placement,
        ignored_params=kept,
    )
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    _communicate([m for m in sharded if m not in experts], device_mesh, parallel, dtype)
    if experts:  # else `sharing_experts` would create the expert mesh
        expert_units = [m for m in sharded if m in experts]
        _communicate(expert_units, mesh.sharing_experts(), parallel, dtype)
    _prefetch(order, parallel.prefetch)
    for unit in not_prefetched:
        _prefetch([unit], 0)


def _shard_experts(
    module: nn.Module,
    block: nn.Module,
    mesh: Mesh,
    reshard: bool,
    precision: MixedPrecisionPolicy,
    dtype: torch.dtype,
) -> None:
    """Shard experts over edp_shard; the forward of their block gathers and frees them.

    The experts' own forward cannot: it may run inside a compiled or selectively recomputed block,
    which cannot contain FSDP's communication.
    """
    ranks = mesh.expert_degrees["edp_shard"]
    with forward_hooks_on(block, module):
        fully_shard(
            module,
            mesh=mesh.sharing_experts(),
            ignored_params=_kept(module, mesh.sharing_experts(), dtype),
            reshard_after_forward=reshard and ranks > 1,
            mp_policy=precision,
            shard_placement_fn=lambda parameter: Shard(fsdp_dim(parameter, ranks)),
        )


def _kept(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> set[nn.Parameter]:
    """Return the parameters that FSDP leaves as they are: frozen ones on one rank, in `dtype`.

    One rank has nothing to gather or cast, but FSDP would copy them all the same.
    """
    if mesh.size(mesh.ndim - 1) > 1:
        return set()
    return {p for p in module.parameters() if not p.requires_grad and p.dtype == dtype}


def _data_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the mesh for FSDP: (fsdp,), or (dp_replicate, fsdp) with replicas."""
    if mesh.size("dp_replicate") == 1:
        return mesh.flat(*FSDP_AXES)
    return mesh.replicated(*FSDP_AXES)


def _communicate(
    modules: Sequence[FSDPModule], mesh: DeviceMesh, parallel: Parallel, dtype: torch.dtype
) -> None:
    """Set the collectives of FSDP units that are sharded over the mesh's last dim."""
    for module in modules:
        if mesh.size() == 1:
            bypass_reduction(module)
        else:
            _sum_gradients(module)
    if not modules or mesh.size(mesh.ndim - 1) == 1:
        return
    if parallel.copy_engines:
        engine = _engine(mesh)
        for module in modules:
            module.set_custom_all_gather(CopiedAllGather(engine))  # type: ignore[arg-type]
    if parallel.reduce_by == "all_to_all":
        # A second engine, since all-gathers and reduce-scatters overlap.
        engine = _engine(mesh) if parallel.copy_engines else None
        for module in modules:
            module.set_custom_reduce_scatter(AllToAllSum(dtype, engine))  # type: ignore[arg-type]


def _engine(mesh: DeviceMesh) -> CopyEngine:
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return CopyEngine(mesh.get_group(mesh.ndim - 1), device)


def _sum_gradients(module: FSDPModule) -> None:
    # gloo has no scaled sum; a forced SUM with factor 1 does not divide, on any backend.
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


def _prefetch(order: Sequence[Sequence[nn.Module]], depth: int) -> None:
    """Prefetch the next `depth` FSDP units while one computes, in forward and backward.

    Args:
        order: FSDP units in the order of the forward, each followed by the units gathered with it.
    """
    # A frozen embedding has no backward, which would free it again.
    frozen = not any(p.requires_grad for unit in order[:1] for m in unit for p in m.parameters())
    for i, (module, *others) in enumerate(order):
        assert isinstance(module, FSDPModule), "units are sharded before prefetch is set"
        ahead = [m for unit in order[i + 1 : i + 1 + depth] for m in unit]
        behind = [m for unit in reversed(order[max(frozen, i - depth) : i]) for m in unit]
        module.set_modules_to_forward_prefetch(ahead)  # type: ignore[arg-type]
        # An empty list would turn on FSDP's default, which under accumulation gathers the last unit
        # of the previous micro-batch. Prefetching the unit itself, already gathered, is free.
        module.set_modules_to_backward_prefetch(behind or [module])  # type: ignore[arg-type]
        for other in others:
            other.set_modules_to_backward_prefetch([other])  # type: ignore[operator]


def begin_micro_batch(model: FSDPModule, policy: Policy, last: bool) -> None:
    """Set what the next backward does: reduce or accumulate gradients, free or keep parameters.

    With replicas, gradients are reduce-scattered according to the policy, but all-reduced over
    dp_replicate only in the last micro-batch. (Pipeline stages that split the backward into I and W
    use `torch_internals.reduce_gradients` instead.)
    """
    model.set_requires_gradient_sync(last or policy.reduce_each_micro_batch)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or not policy.keep_gathered)
    model.set_is_last_backward(last)


def free_gathered(model: nn.Module) -> None:
    """Free gathered parameters, for example after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
