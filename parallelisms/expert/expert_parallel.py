"""Expert parallelism: each rank has some of the experts; tokens are dispatched and combined.

Every rank of dp_shard x cp x tp has different tokens (with tp, by sequence parallelism). Experts
use separate mesh axes over the same ranks: edp_shard, ep and etp, of which etp is innermost.

    ep          each rank has E / ep experts, Shard(0) of the stacked matrices: rank r has experts
                r E / ep ... (r + 1) E / ep - 1
    etp         each rank has F / etp of each expert's width: gate and up Shard(1), down Shard(2)
    edp_shard   FSDP shards these shards further; dp_replicate has replicas, as for all parameters

So expert degrees may differ from dense degrees; only their products over all axes are equal.
Routers, shared experts and all other modules are in the dense part.

`Experts` computes a result for each row (token copy; rows are sorted by expert). Only the methods
of `Experts` are replaced:

    rows sorted by expert (M, D) --------------------------- results (M, D), summed over etp
      | dispatch: rows of r's experts to ranks (r, s),          ^
      v all s; an all-to-all over ep x etp                      | combine: the inverse all-to-all
    rows by (sender, expert) -> sorted by expert -> experts -> by (sender, expert)

A dispatcher (`dispatchers.py`) sends a row to all etp ranks of its expert, each of which returns a
partial sum.

With `float8`, tensors sent to experts (rows, and in the backward gradients of results) are sent in
float8. Tensors sent back (results, and gradients of rows) keep the compute dtype, since they are
summed.

Gradients: a rank's experts get all rows of its ep x etp ranks; FSDP sums over the other ranks.
The loss is divided by the tokens of the whole step before the backward, so gradients are not
divided here.

Shapes: M rows, D width, F width of an expert, E experts, P = ep x etp ranks.
Sources: GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596; MoE parallel folding,
arXiv:2504.14960; Megatron-LM's token dispatchers.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtron.errors import ConfigError
from dtron.kernels.permute import Copies
from dtron.parallelisms.expert.dispatcher import Dispatcher
from dtron.parallelisms.expert.dispatchers import dispatcher_class, in_graphs
from dtron.parallelisms.expert.hierarchical import Hierarchical
from dtron.parallelisms.gradients import local_part
from dtron.parallelisms.mesh import Mesh

WIDTHS: Mapping[str, int | None] = {
    **{"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": 1},
    **{"gate_lora_a": None, "up_lora_a": None, "down_lora_a": 2},
    **{"gate_lora_b": 1, "up_lora_b": 1, "down_lora_b": None},
}
"""{parameter name: the dim that etp shards}. down_bias is sharded along D: each rank adds its shard
of the bias to its partial sum. None: the factor of an adapter that is replicated over etp; its
gradient is a partial sum."""


@dataclass(frozen=True)
class ExpertLayers:
    """Which modules of a model are experts, and how tokens are dispatched to them.

    An expert module has parameters that stack E experts along dim 0, an attribute `part`, a method
    `own(name)` that returns a parameter, and `forward(rows, offsets, tail) -> rows`, as described
    in `models/moe.py`. A model may instead call `begin(rows, offsets, tail)` and pass its result to
    `finish`; computation between the calls overlaps with the dispatch. An optional attribute
    `activate`, an elementwise function of tensors, is compiled if the model is. Schedules that
    split the backward, `overlap_micro_batches` and `accumulate_in_matmul` compute the experts'
    weight gradients outside of autograd, if the attribute `multiply` is `grouped_matmul` and a
    method `product(name, x, offsets)` computes all matmuls. Expert parallelism sets the module's
    attribute `local_forward`.
    """

    experts: str
    """Pattern of the modules with the stacked parameters."""
    dispatcher: "str | type[Dispatcher]" = "all_to_all"
    """A name of DISPATCHERS, or a dispatcher class."""
    widths: Mapping[str, int | None] = field(default_factory=lambda: WIDTHS)
    """{parameter name: the dim that etp shards; None: replicated, with partial gradients}"""
    capacity: float = 2.0
    """For dispatchers with bounded buffers: maximum number of rows per rank, as a multiple of the
    number with even loads. Experts then get padding rows after the last offset, with `tail` false,
    and must return a result for each padding row. These results and their gradients are never
    read."""
    float8: bool = False
    """Send rows, and gradients of results, to experts in float8
    (`dtron/kernels/float8_rows.py`)."""
    inner: int = 0
    """For the dispatcher "hierarchical": number of neighbouring ep ranks in a host; 0: those with
    equal host names. Expert modules then need an argument `copies` of `begin`, as in
    `models/moe.py`."""


def on_separate_mesh(mesh: Mesh) -> bool:
    """Whether experts use a separate mesh: if ep, etp or tp is more than 1.

    With tp > 1, the expert axes also cover the tp ranks.
    """
    return mesh.size("tp") > 1 or mesh.expert_degrees["ep"] * mesh.expert_degrees["etp"] > 1


def make_dispatcher(layers: ExpertLayers, mesh: Mesh) -> Dispatcher | None:
    """Create one dispatcher for all layers and stages; a collective. None if ep x etp = 1."""
    ep, etp = mesh.expert_degrees["ep"], mesh.expert_degrees["etp"]
    if ep * etp == 1:
        return None
    kind = dispatcher_class(layers.dispatcher)
    settings = (mesh.expert_group(), ep, etp, layers.capacity, layers.float8)
    if isinstance(kind, type) and issubclass(kind, Hierarchical):
        return kind(*settings, inner=layers.inner, split=mesh.expert_hosts)
    return kind(*settings)


def apply_experts(
    modules: Mapping[str, nn.Module],
    layers: ExpertLayers,
    mesh: Mesh,
    dispatcher: Dispatcher | None,
) -> None:
    """Shard experts over ep and etp, and make their calls dispatch rows, in place.

    Args:
        modules: expert modules by FQN.
        dispatcher: result of `make_dispatcher`.
    Raises:
        ConfigError: ep does not divide the number of experts, etp does not divide their width, or
            `widths` lacks a parameter.
    """
    if dispatcher is None:
        return
    axes, etp = mesh.experts["ep", "etp"], mesh.expert_degrees["etp"]
    for fqn, module in modules.items():
        _split(fqn, module, layers.widths, axes)
        module.part = (mesh.experts.get_local_rank("etp"), etp)  # type: ignore[assignment]
        module.own = functools.partial(_local_parameter, module)  # type: ignore[assignment]
        layer = dispatcher.layer(fqn, torch.device(mesh.device_type))
        module.local_forward = module.forward  # type: ignore[assignment]
        module.takes_tokens = dispatcher.takes_tokens  # type: ignore[assignment]
        sharded = _ShardedExperts(module, dispatcher, layer)
        for name in ("begin", "finish", "forward"):
            call = getattr(sharded, name)
            setattr(module, name, call if in_graphs(dispatcher) else torch.compiler.disable(call))


class _ShardedExperts:
    """The methods `begin`, `finish` and `forward` of an expert module that is sharded over ranks.

    The module's `local_forward` is its original forward, for the rows that this rank received.
    """

    def __init__(self, module: nn.Module, dispatcher: Dispatcher, layer: Any) -> None:
        self.module, self.dispatcher, self.layer = module, dispatcher, layer

    def begin(
        self, rows: Tensor, offsets: Tensor, tail: bool = True, copies: Copies | None = None
    ) -> Any:
        """Issue the dispatch; rows after the last offset are not sent, so `tail` is not used."""
        if not self.dispatcher.takes_tokens:
            return self.dispatcher.begin(rows, offsets, self.layer)
        if copies is None:
            raise ConfigError(
                "this parallel.dispatcher sums the results of each token: pass the experts' "
                "`begin` tokens and `copies`, as in models/moe.py, or use another dispatcher"
            )
        return self.dispatcher.begin(rows, offsets, self.layer, copies)

    def finish(self, pending: Any) -> Tensor:
        return self.dispatcher.finish(pending, self._compute_local)

    def forward(self, rows: Tensor, offsets: Tensor, tail: bool = True) -> Tensor:
        return self.finish(self.begin(rows, offsets, tail))

    def _compute_local(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return self.module.local_forward(rows, offsets, tail=False)  # type: ignore[operator]


def _local_parameter(module: nn.Module, name: str) -> Tensor | None:
    return local_part(getattr(module, name))


def fsdp_dim(parameter: Tensor, ranks: int) -> int:
    """Return the dim along which edp_shard shards a parameter; see `shared_dim`."""
    placements = getattr(parameter, "placements", ())
    taken = {placement.dim for placement in placements if placement.is_shard()}
    return shared_dim(local_part(parameter).shape, taken, ranks)


def shared_dim(sizes: Sequence[int], taken: Collection[int], ranks: int) -> int:
    """Return the dim along which FSDP shards a tensor that ep and etp have already sharded.

    Prefer dim 0, since gathered chunks are then contiguous; then a dim that ep and etp do not
    shard. `ranks` must divide the dim, except dim 0 if neither ep nor etp shards it.

    Args:
        sizes: shape of the local tensor.
        taken: dims that ep and etp shard.
        ranks: number of FSDP ranks.
    Raises:
        ConfigError: no dim fits.
    """
    if 0 not in taken or sizes[0] % ranks == 0:
        return 0
    dims = sorted(range(1, len(sizes)), key=lambda dim: dim in taken)
    fitting = [dim for dim in dims if sizes[dim] % ranks == 0]
    if not fitting:
        raise ConfigError(
            f"parallel.ep and parallel.etp leave {ranks} ranks to shard a rank's experts, but "
            f"{ranks} divides no dim of {tuple(sizes)}; use a larger parallel.ep"
        )
    return fitting[0]


def partial_over_etp(modules: Mapping[str, nn.Module], layers: ExpertLayers) -> Iterator[str]:
    """Yield FQNs of experts' parameters that are replicated over etp, with partial gradients."""
    for fqn, module in modules.items():
        for name, _ in module.named_parameters(recurse=False):
            if layers.widths.get(name, 0) is None:
                yield f"{fqn}.{name}"


def _split(fqn: str, module: nn.Module, widths: Mapping[str, int | None], axes: DeviceMesh) -> None:
    """Replace parameters by DTensors over (ep, etp); FSDP gathers local shards for `forward`."""
    ep, etp = axes.size(0), axes.size(1)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name not in widths:
            raise ConfigError(
                f"{fqn}.{name} is a parameter of experts, but ExpertLayers.widths has only "
                f"{', '.join(widths)}; add {name!r} with the dim that etp shards"
            )
        dim = widths[name]
        if parameter.shape[0] % ep:
            raise ConfigError(
                f"parallel.ep = {ep} does not divide the {parameter.shape[0]} experts of {fqn}; "
                "use a divisor"
            )
        if dim is not None and parameter.shape[dim] % etp:
            raise ConfigError(
                f"parallel.etp = {etp} does not divide dim {dim}, of size {parameter.shape[dim]}, "
                f"of {fqn}.{name}; use a divisor"
            )
        placements = [Shard(0), Replicate() if dim is None or etp == 1 else Shard(dim)]
        # All ranks have equal or no initial weights, so no communication is needed.
        split = distribute_tensor(parameter.data, axes, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, parameter.requires_grad))
