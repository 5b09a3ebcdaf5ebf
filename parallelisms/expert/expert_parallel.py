"""Expert parallelism: ranks hold different experts; tokens are dispatched to them and combined.

Every rank of dp_shard x cp x tp has different tokens (under tp by sequence parallelism). Experts
use separate mesh axes over the same ranks, edp_shard, ep and etp, of which etp is the innermost:

    ep          holds E / ep experts each, Shard(0) of the stacked matrices: rank r the experts
                r E / ep ... (r + 1) E / ep - 1
    etp         holds F / etp of the width of each expert: gate and up Shard(1), down Shard(2)
    edp_shard   shards the rest with FSDP; dp_replicate holds replicas, as of all parameters

so that the degrees of the dense part and of the experts are independent except for their product.
Routers, shared experts and all other modules are in the dense part.

`Experts` takes rows (token copies) sorted by expert and returns as many; where they come from does
not matter. So only the calls of the module that holds the experts are replaced:

    rows sorted by expert (M, D) --------------------------- results (M, D), of etp the sum
      | to rank (r, s) those of r's experts, for all s          ^
      v all-to-all over ep x etp                                | the same back
    rows by (sender, expert) -> sorted by expert -> experts -> by (sender, expert)

A row is sent to all etp ranks of its expert, each of which returns a partial sum. `AllToAll` first
exchanges counts, and the host reads them once per call, since it must know message sizes; then it
does one all-to-all for dispatch and one for combine, and the same in the backward. Nothing else
waits for the device, but because of that wait no compiled graph can hold these calls.
`symmetric_dispatch.py` has a dispatcher for ranks of one host whose host code never waits; graphs
hold it like any other operators.

A layer's `begin` issues `AllToAll`'s dispatch, its `finish` waits for it. Collectives run on a
separate stream, so that computation between the two calls overlaps with them. The backward has the
same order, since autograd runs the most recently created of the ready nodes first:

    forward     _IssueExchange: all-to-all   in between              _WaitExchange: wait backward
    _IssueExchange: wait         in between's gradients  _WaitExchange: all-to-all

With `float8`, tensors sent to experts (rows, and in the backward the gradients of results) are cast
to float8 before they are sent and back when they are received. Tensors sent back (results and the
gradients of rows) keep the dtype of computation, since they are summed.

Gradients: a rank's experts see all rows of the ranks of ep x etp; FSDP sums over the other ranks.
The loss is divided by the tokens of the whole step before the backward, so that nothing is divided
here, whatever the degrees.

Shapes: M rows, D width, F width of an expert, E experts, P = ep x etp ranks.
Sources: GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596; MoE parallel folding,
arXiv:2504.14960; Megatron-LM's token dispatchers.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtron.config import Compile, Recompute
from dtron.errors import ConfigError
from dtron.kernels.float8_rows import packed, unpacked
from dtron.kernels.permute import inverse_of, reordered
from dtron.parallelisms.expert.deepep import DeepEP
from dtron.parallelisms.expert.dispatcher import Compute, Dispatcher
from dtron.parallelisms.expert.symmetric_dispatch import SymmetricMemory
from dtron.parallelisms.functional_collectives import all_to_all, wait_tensor
from dtron.parallelisms.mesh import Mesh

WIDTHS = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": 1}
"""The dim that etp splits, by the parameter's name; for down_bias it is D: each rank adds its
columns to its partial sum."""


@dataclass(frozen=True)
class ExpertLayers:
    """Which modules of a model are experts, and how tokens are dispatched to them.

    Such a module has parameters that stack E experts along dim 0, an attribute `part`, a method
    `own(name)` through which it reads its parameters, and `forward(rows, offsets, tail) -> rows`,
    as described in `models/moe.py`. A model may instead call `begin(rows, offsets, tail)` and pass
    its result to `finish`, and compute what needs no rows in between. An optional attribute
    `activate`, an elementwise function of tensors, is compiled if the model is. If an attribute
    `multiply` is `grouped_matmul` and all matrices are multiplied by a method `product(name, x,
    offsets)`, schedules that split the backward also defer these weight gradients.
    """

    experts: str
    """Pattern of the modules with the stacked parameters."""
    dispatcher: "str | type[Dispatcher]" = "all_to_all"
    """A name of DISPATCHERS, or a dispatcher or its class."""
    widths: Mapping[str, int] = field(default_factory=lambda: WIDTHS)
    """The dim that etp splits, by the parameter's name."""
    capacity: float = 2.0
    """For dispatchers with bounded buffers: the maximum number of rows per rank, relative to even
    loads. Their experts get padding rows after the last expert's, without `tail` set: they must
    return results for these too, but those and their gradients are never read."""
    float8: bool = False
    """Send rows, and gradients of results, to experts in float8
    (`dtron/kernels/float8_rows.py`)."""


@dataclass
class _Exchange:
    """An all-to-all of rows, (M, D) -> (N, D), and the all-to-all of their gradients back."""

    received: list[int]
    sent: list[int]
    """Numbers of rows by rank that add up to N and M."""
    group: str
    float8: tuple[bool, bool]
    """Whether rows are sent in float8, and whether their gradients are."""
    width: int
    """D."""
    returning: Tensor | None = None
    """Gradients (M, D), passed from `_WaitExchange`'s backward to `_IssueExchange`'s: autograd
    requires gradients to have the shape of their tensors."""


@dataclass  # not frozen: torch 2.11 recompiles when sizes in a frozen dataclass change
class _InFlight:
    """Rows being sent to this rank's experts. Compiled code passes it on without reading it."""

    arriving: Tensor
    """(N, D), sorted by (sender, expert); valid only after the wait."""
    exchange: _Exchange
    counts: Tensor
    """int64 (P, E / ep), number of rows of each sender for each expert."""
    n_rows: int
    """Number of rows given to `begin`, including those after the last offset, which are not
    sent."""


class AllToAll(Dispatcher):
    """Dispatcher by all-to-all: one for dispatch and one for combine, after one of counts that the
    host reads.

    Args:
        group: of ep x etp ranks, etp being the innermost.
        capacity: ignored, buffers have the size of the received rows.
        float8: send rows and gradients of results in float8.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ep: int,
        etp: int,
        capacity: float = math.inf,
        float8: bool = False,
    ) -> None:
        self.group, self.ep, self.etp, self.float8 = group, ep, etp, float8

    def begin(self, rows: Tensor, offsets: Tensor, layer: str = "") -> _InFlight:
        """See Dispatcher."""
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        mine = counts.long().view(self.ep, 1, -1).expand(-1, self.etp, -1).flatten(0, 1)  # (P, E_r)
        each = [1] * len(mine)
        theirs = wait_tensor(_start_all_to_all(mine, each, each, self.group.group_name))
        sent, received = self.read(torch.stack([mine.sum(1), theirs.sum(1)]), len(rows))
        cast, width = (self.float8, False), rows.shape[1]
        exchange = _Exchange(received, sent, self.group.group_name, cast, width)
        leaving = self._copies(rows[: sum(sent) // self.etp], sent)
        return _InFlight(self._issue(leaving, exchange), exchange, theirs, len(rows))

    def finish(self, pending: _InFlight, compute: Compute) -> Tensor:
        """See Dispatcher."""
        there, counts = pending.exchange, pending.counts
        order, inverse = _by_expert(counts, sum(there.received))
        arrived = _WaitExchange.apply(pending.arriving, there)
        results = compute(reordered(arrived, order, inverse), counts.sum(0).cumsum(0).int())
        cast = (False, self.float8)
        back = _Exchange(there.sent, there.received, there.group, cast, there.width)
        returning = self._issue(reordered(results, inverse, order), back)
        out = self._sum_partials(_WaitExchange.apply(returning, back), there.sent)
        return F.pad(out, (0, 0, 0, pending.n_rows - len(out)))

    def _issue(self, rows: Tensor, exchange: _Exchange) -> Tensor:
        return _IssueExchange.apply(rows, exchange)

    def read(self, sizes: Tensor, _n_rows: int) -> list[list[int]]:
        """Read the numbers of rows to and from each rank, int64 (2, P); the only wait of the host
        for the device."""
        return sizes.tolist()

    def _copies(self, rows: Tensor, sent: list[int]) -> Tensor:
        """Repeat the rows of each ep rank for each of its etp ranks."""
        if self.etp == 1:
            return rows
        parts = rows.split(sent[:: self.etp])
        return torch.cat([part for part in parts for _ in range(self.etp)])

    def _sum_partials(self, rows: Tensor, sent: list[int]) -> Tensor:
        """Sum the partial results of etp ranks."""
        if self.etp == 1:
            return rows
        parts = rows.split(sent)
        wholes = [parts[i : i + self.etp] for i in range(0, len(parts), self.etp)]
        return torch.cat([torch.stack(whole).sum(0) for whole in wholes])


class _IssueExchange(torch.autograd.Function):
    """Start to send rows (M, D) -> (N, D), which only `_WaitExchange` may read. The backward waits
    for the gradients that `_WaitExchange`'s backward sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = there = exchange
        return _issued(rows, there.received, there.sent, there.group, there.float8[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        there = ctx.exchange
        returning, there.returning = there.returning, None
        return _arrived(returning, there.width, there.float8[1]), None


class _WaitExchange(torch.autograd.Function):
    """Wait for received rows, (N, D) -> (N, D). The backward starts to send their gradients."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, arriving.shape
        return _arrived(arriving, exchange.width, exchange.float8[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        there, rows = ctx.exchange, gradients[0]
        there.returning = _issued(rows, there.sent, there.received, there.group, there.float8[1])
        if rows.shape == ctx.shape:
            return (
                rows,
                None,
            )  # a placeholder until `_IssueExchange` has waited
        return rows.new_empty(()).expand(ctx.shape), None  # a placeholder of the float8 rows' shape


def _issued(rows: Tensor, received: list[int], sent: list[int], group: str, float8: bool) -> Tensor:
    """Issue an all-to-all of rows, for `_arrived`. Float8 bytes are viewed as the rows' dtype, as
    autograd requires."""
    if not float8:
        return _start_all_to_all(rows, received, sent, group)
    return _start_all_to_all(packed(rows), received, sent, group).view(rows.dtype)


def _arrived(rows: Tensor, width: int, float8: bool) -> Tensor:
    """Wait for the result of `_issued`: (N, D)."""
    arrived = wait_tensor(rows)
    return unpacked(arrived.view(torch.uint8), width, rows.dtype) if float8 else arrived


def _start_all_to_all(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """Issue an all-to-all without waiting; until the wait the process group keeps its input
    alive."""
    return all_to_all(rows, received, sent, group)


DISPATCHERS: dict[str, type[Dispatcher]] = {
    "all_to_all": AllToAll,
    "symmetric_memory": SymmetricMemory,
    "deepep": DeepEP,
}


def _by_expert(counts: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Permutation that sorts rows from (sender, expert) to expert order, and its inverse.

    Args:
        counts: int64 (P, E_r), number of rows of each.
        n_rows: their sum, known on the host.
    Returns:
        order and its inverse, int64 (n_rows,).
    """
    n_senders, n_experts = counts.shape
    experts = torch.arange(n_experts, device=counts.device).repeat(n_senders)
    order = experts.repeat_interleave(counts.flatten(), output_size=n_rows).argsort(stable=True)
    return order, inverse_of(order)


def on_separate_mesh(mesh: Mesh) -> bool:
    """Whether experts are on a separate mesh: they are split, or FSDP shards them over tp ranks."""
    return mesh.size("tp") > 1 or mesh.expert_degrees["ep"] * mesh.expert_degrees["etp"] > 1


def in_graphs(kind: "str | type[Dispatcher] | Dispatcher") -> bool:
    """Whether compiled graphs can hold a dispatcher's calls."""
    return getattr(DISPATCHERS[kind] if isinstance(kind, str) else kind, "in_graphs", False)


def refuse_half_compiled(
    recompute: Recompute, compile: Compile, ranks: int, kind: "str | type[Dispatcher]"
) -> None:
    """Raise ConfigError if blocks would silently stay uncompiled.

    Args:
        ranks: ep x etp.
        kind: the dispatcher.
    Raises:
        ConfigError: compilation, recomputation that keeps some results, and a dispatcher that no
            graph can hold.
    """
    if ranks == 1 or in_graphs(kind):
        return
    if compile.enable and recompute.mode in ("attention", "selective"):
        raise ConfigError(
            f'recompute.mode = "{recompute.mode}" with compile.enable and parallel.ep x '
            f"parallel.etp = {ranks}: a block that keeps some results compiles whole or not "
            "at all, and experts on other ranks break it where the host reads how many tokens "
            'are sent; use parallel.dispatcher = "symmetric_memory" inside a host, '
            'recompute.mode = "full", or compile.enable = false'
        )


def breaks_graph(block: str, experts: Iterable[str], dispatcher: Dispatcher | None) -> bool:
    """Whether a block, given by FQN, has experts whose dispatch cannot be in a graph."""
    if dispatcher is None or in_graphs(dispatcher):
        return False
    return any(name.startswith(f"{block}.") for name in experts)


def make_dispatcher(layers: ExpertLayers, mesh: Mesh) -> Dispatcher | None:
    """Make the dispatcher of all layers and stages, a collective; None: no row leaves its rank."""
    ep, etp = mesh.expert_degrees["ep"], mesh.expert_degrees["etp"]
    if ep * etp == 1:
        return None
    kind = layers.dispatcher
    kind = DISPATCHERS[kind] if isinstance(kind, str) else kind
    return kind(mesh.expert_group(), ep, etp, layers.capacity, layers.float8)


def apply_experts(
    modules: Mapping[str, nn.Module],
    layers: ExpertLayers,
    mesh: Mesh,
    dispatcher: Dispatcher | None,
) -> None:
    """Split experts over ep and etp and dispatch their rows, in place.

    Args:
        modules: experts by FQN.
        dispatcher: from `make_dispatcher`.
    Raises:
        ConfigError: ep does not divide the experts, or etp their width, or `widths` lacks a
            parameter.
    """
    if dispatcher is None:
        return
    axes, etp = mesh.experts["ep", "etp"], mesh.expert_degrees["etp"]
    for fqn, module in modules.items():
        _split(fqn, module, layers.widths, axes)
        module.part = (mesh.experts.get_local_rank("etp"), etp)  # type: ignore[assignment]
        module.own = functools.partial(_local, module)  # type: ignore[assignment]
        held = in_graphs(dispatcher)
        layer = dispatcher.layer(fqn, torch.device(mesh.device_type))
        elsewhere = _ShardedExperts(module.forward, dispatcher, layer)
        for name in ("begin", "finish", "forward"):
            call = getattr(elsewhere, name)
            # Kept out of compiled graphs if the host waits in it.
            setattr(module, name, call if held else torch.compiler.disable(call))


class _ShardedExperts:
    """Replacement of the calls of a module of experts whose parameters are split over ranks."""

    def __init__(self, compute: Callable[..., Tensor], dispatcher: Dispatcher, layer: Any) -> None:
        self.compute, self.dispatcher, self.layer = compute, dispatcher, layer

    def begin(self, rows: Tensor, offsets: Tensor, tail: bool = True) -> Any:
        """Replace `begin` of the experts; rows after the last expert's are not sent, so that there
        is no tail."""
        return self.dispatcher.begin(rows, offsets, self.layer)

    def finish(self, pending: Any) -> Tensor:
        return self.dispatcher.finish(pending, self._local)

    def forward(self, rows: Tensor, offsets: Tensor, tail: bool = True) -> Tensor:
        return self.finish(self.begin(rows, offsets, tail))

    def _local(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return self.compute(rows, offsets, tail=False)


def _local(module: nn.Module, name: str) -> Tensor | None:
    parameter = getattr(module, name)
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def fsdp_dim(parameter: Tensor, ranks: int) -> int:
    """Return the dim along which edp_shard shards a parameter; see shared_dim."""
    placements = getattr(parameter, "placements", ())
    taken = {placement.dim for placement in placements if placement.is_shard()}
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return shared_dim(local.shape, taken, ranks)


def shared_dim(sizes: Sequence[int], taken: Collection[int], ranks: int) -> int:
    """Return the dim along which FSDP shards a tensor that ep and etp have already split.

    Dim 0 if possible, since gathered chunks are then contiguous, else a dim that ep and etp do not
    split: torch shards a dim unevenly only if it is the first and not split otherwise.

    Args:
        sizes: shape of the rank's part.
        taken: dims that are already split.
    Raises:
        ConfigError: the number of ranks divides no dim.
    """
    if 0 not in taken or sizes[0] % ranks == 0:
        return 0
    dims = sorted(range(1, len(sizes)), key=lambda dim: dim in taken)
    fitting = [dim for dim in dims if sizes[dim] % ranks == 0]
    if not fitting:
        raise ConfigError(
            f"parallel.ep and parallel.etp leave {ranks} ranks to shard each part of the "
            f"experts, and {ranks} divides no dim of {tuple(sizes)}; use a larger parallel.ep"
        )
    return fitting[0]


def _split(fqn: str, module: nn.Module, widths: Mapping[str, int], axes: DeviceMesh) -> None:
    """Make parameters DTensors over (ep, etp). An FSDP unit gathers a rank's part of each, which is
    what `forward` sees."""
    ep, etp = axes.size(0), axes.size(1)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name not in widths:
            raise ConfigError(
                f"{fqn}.{name} is a parameter of experts, but ExpertLayers.widths does not say "
                f"which of its dims etp splits; it has {', '.join(widths)}"
            )
        dim = widths[name]
        if parameter.shape[0] % ep:
            raise ConfigError(
                f"parallel.ep = {ep} does not divide the {parameter.shape[0]} experts of {fqn}"
            )
        if parameter.shape[dim] % etp:
            raise ConfigError(
                f"parallel.etp = {etp} does not divide the {parameter.shape[dim]} columns of "
                f"{fqn}.{name}"
            )
        placements = [Shard(0), Shard(dim) if etp > 1 else Replicate()]
        # Ranks hold equal or no weights yet: each takes its own part, without communication.
        split = distribute_tensor(parameter.data, axes, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, parameter.requires_grad))
