"""Expert parallelism: ranks have different experts; tokens are dispatched to them and combined.

Every rank of dp_shard x cp x tp has different tokens (with tp, by sequence parallelism). Experts
use separate mesh axes over the same ranks: edp_shard, ep and etp, of which etp is innermost.

    ep          each rank has E / ep experts, Shard(0) of the stacked matrices: rank r has experts
                r E / ep ... (r + 1) E / ep - 1
    etp         each rank has F / etp of each expert's width: gate and up Shard(1), down Shard(2)
    edp_shard   FSDP shards these parts; dp_replicate has replicas, as for all parameters

So the degrees of the dense part and of the experts are independent except for their product.
Routers, shared experts and all other modules are in the dense part.

`Experts` maps rows (token copies, sorted by expert) to as many results. Only the calls of this
module are replaced:

    rows sorted by expert (M, D) --------------------------- results (M, D), summed over etp
      | dispatch: rows of r's experts to ranks (r, s),          ^
      v all s; an all-to-all over ep x etp                      | combine: the inverse all-to-all
    rows by (sender, expert) -> sorted by expert -> experts -> by (sender, expert)

A row is sent to all etp ranks of its expert, each of which returns a partial sum. `AllToAll` first
exchanges counts, which the host reads once per call to know message sizes; then it does one
all-to-all for dispatch and one for combine, and the same in the backward. Because the host waits
for the counts, these calls cannot be in a compiled graph. `symmetric_dispatch.py` has a dispatcher
for ranks of one host without host waits, which can.

`begin` issues the dispatch of `AllToAll`, `finish` waits for it. Collectives run on a separate
stream, so that computation between the two calls overlaps with them. The backward has the reverse
order, since autograd runs the most recently created of the ready nodes first:

    forward    _IssueExchange: all-to-all   computation between   _WaitExchange: wait
    backward   _WaitExchange: all-to-all    its gradients         _IssueExchange: wait

With `float8`, tensors sent to experts (rows, and in the backward gradients of results) are sent in
float8. Tensors sent back (results, and gradients of rows) keep the compute dtype, since they are
summed.

Gradients: a rank's experts get all rows of the ranks of ep x etp; FSDP sums over the other ranks.
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
"""Parameter name -> the dim that etp shards. For down_bias it is D: each rank adds its columns to
its partial sum."""


@dataclass(frozen=True)
class ExpertLayers:
    """Which modules of a model are experts, and how tokens are dispatched to them.

    Such a module has parameters that stack E experts along dim 0, an attribute `part`, a method
    `own(name)` that returns a parameter, and `forward(rows, offsets, tail) -> rows`, as described
    in `models/moe.py`. A model may instead call `begin(rows, offsets, tail)` and pass its result to
    `finish`; computation between the calls overlaps with the dispatch. An optional attribute
    `activate`, an elementwise function of tensors, is compiled if the model is. If an attribute
    `multiply` is `grouped_matmul` and all matrices are multiplied by a method `product(name, x,
    offsets)`, schedules that split the backward also defer these weight gradients.
    """

    experts: str
    """Pattern of the modules with the stacked parameters."""
    dispatcher: "str | type[Dispatcher]" = "all_to_all"
    """A name of DISPATCHERS, or a dispatcher class."""
    widths: Mapping[str, int] = field(default_factory=lambda: WIDTHS)
    """Parameter name -> the dim that etp shards."""
    capacity: float = 2.0
    """For dispatchers with bounded buffers: maximum number of rows per rank, relative to even
    loads. Experts get padding rows after the last offset, with `tail` false: they must return rows
    for them too, which are never read, like their gradients."""
    float8: bool = False
    """Send rows, and gradients of results, to experts in float8
    (`dtron/kernels/float8_rows.py`)."""


@dataclass
class _Exchange:
    """An all-to-all of rows, (M, D) -> (N, D), and the inverse one of their gradients."""

    received: list[int]
    sent: list[int]
    """Numbers of rows by rank; their sums are N and M."""
    group: str
    float8: tuple[bool, bool]
    """Whether rows are sent in float8, and whether their gradients are."""
    width: int
    """D."""
    pending_gradients: Tensor | None = None
    """Pending gradients (M, D), passed from `_WaitExchange`'s backward to `_IssueExchange`'s here,
    since autograd requires gradients to have the shape of their tensors."""


@dataclass  # not frozen: torch 2.11 recompiles when sizes in a frozen dataclass change
class _InFlight:
    """A pending dispatch. Compiled code passes it on without reading it."""

    placeholder: Tensor
    """(N, D), rows by (sender, expert); valid only after the wait."""
    exchange: _Exchange
    counts: Tensor
    """int64 (P, E / ep), number of rows from each sender for each local expert."""
    n_rows: int
    """Number of rows given to `begin`; those after the last offset are not sent."""


class AllToAll(Dispatcher):
    """Dispatcher by all-to-all: one each for counts, dispatch and combine; the host reads counts.

    Args:
        group: ep x etp ranks, etp innermost.
        capacity: ignored; buffers have the size of the received rows.
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
        counts = offsets.diff(prepend=offsets.new_zeros(1)).long()
        to_send = counts.view(self.ep, 1, -1).expand(-1, self.etp, -1).flatten(0, 1)  # (P, E_r)
        each = [1] * len(to_send)
        to_receive = wait_tensor(_start_all_to_all(to_send, each, each, self.group.group_name))
        sent, received = self.read(torch.stack([to_send.sum(1), to_receive.sum(1)]), len(rows))
        cast, width = (self.float8, False), rows.shape[1]
        exchange = _Exchange(received, sent, self.group.group_name, cast, width)
        copies = self._repeat(rows[: sum(sent) // self.etp], sent)
        return _InFlight(self._issue(copies, exchange), exchange, to_receive, len(rows))

    def finish(self, pending: _InFlight, compute: Compute) -> Tensor:
        """See Dispatcher."""
        dispatch, counts = pending.exchange, pending.counts
        order, inverse = _by_expert(counts, sum(dispatch.received))
        rows = _WaitExchange.apply(pending.placeholder, dispatch)
        results = compute(reordered(rows, order, inverse), counts.sum(0).cumsum(0).int())
        cast = (False, self.float8)
        combine = _Exchange(dispatch.sent, dispatch.received, dispatch.group, cast, dispatch.width)
        combined = self._issue(reordered(results, inverse, order), combine)
        out = self._sum_partials(_WaitExchange.apply(combined, combine), dispatch.sent)
        return F.pad(out, (0, 0, 0, pending.n_rows - len(out)))

    def _issue(self, rows: Tensor, exchange: _Exchange) -> Tensor:
        return _IssueExchange.apply(rows, exchange)

    def read(self, sizes: Tensor, _n_rows: int) -> list[list[int]]:
        """Read the numbers of rows to and from each rank, int64 (2, P); the host waits here."""
        return sizes.tolist()

    def _repeat(self, rows: Tensor, sent: list[int]) -> Tensor:
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
        partials = [parts[i : i + self.etp] for i in range(0, len(parts), self.etp)]
        return torch.cat([torch.stack(each).sum(0) for each in partials])


class _IssueExchange(torch.autograd.Function):
    """Issue an all-to-all of rows (M, D) -> (N, D); only `_WaitExchange` may read the result.

    The backward waits for the gradients that `_WaitExchange`'s backward sent.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = e = exchange
        return _issue_rows(rows, e.received, e.sent, e.group, e.float8[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        e = ctx.exchange
        pending, e.pending_gradients = e.pending_gradients, None
        return _wait_rows(pending, e.width, e.float8[1]), None


class _WaitExchange(torch.autograd.Function):
    """Wait for received rows, (N, D) -> (N, D). The backward issues the all-to-all of gradients."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, placeholder.shape
        return _wait_rows(placeholder, exchange.width, exchange.float8[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        e, rows = ctx.exchange, gradients[0]
        e.pending_gradients = _issue_rows(rows, e.sent, e.received, e.group, e.float8[1])
        if rows.shape == ctx.shape:  # what is returned is not read: `_IssueExchange` waits
            return rows, None
        return rows.new_empty(()).expand(ctx.shape), None  # float8 rows have another shape


def _issue_rows(
    rows: Tensor, received: list[int], sent: list[int], group: str, float8: bool
) -> Tensor:
    """Issue an all-to-all of rows; `_wait_rows` returns its result.

    Float8 bytes are viewed as the rows' dtype, as autograd requires.
    """
    if not float8:
        return _start_all_to_all(rows, received, sent, group)
    return _start_all_to_all(packed(rows), received, sent, group).view(rows.dtype)


def _wait_rows(rows: Tensor, width: int, float8: bool) -> Tensor:
    """Wait for the result of `_issue_rows`: (N, D)."""
    received = wait_tensor(rows)
    return unpacked(received.view(torch.uint8), width, rows.dtype) if float8 else received


def _start_all_to_all(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """Issue an all-to-all; the process group keeps the input alive until the wait."""
    return all_to_all(rows, received, sent, group)


DISPATCHERS: dict[str, type[Dispatcher]] = {
    "all_to_all": AllToAll,
    "symmetric_memory": SymmetricMemory,
    "deepep": DeepEP,
}


def _by_expert(counts: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation that sorts rows by (sender, expert) by expert, and its inverse.

    Args:
        counts: int64 (P, E_r), number of rows of each (sender, expert).
        n_rows: their sum, known on the host.
    Returns:
        order and its inverse, int64 (n_rows,).
    """
    n_senders, n_experts = counts.shape
    experts = torch.arange(n_experts, device=counts.device).repeat(n_senders)
    order = experts.repeat_interleave(counts.flatten(), output_size=n_rows).argsort(stable=True)
    return order, inverse_of(order)


def on_separate_mesh(mesh: Mesh) -> bool:
    """Whether experts use a separate mesh: with ep or etp, or if FSDP shards them over tp ranks."""
    return mesh.size("tp") > 1 or mesh.expert_degrees["ep"] * mesh.expert_degrees["etp"] > 1


def in_graphs(kind: "str | type[Dispatcher] | Dispatcher") -> bool:
    """Whether a dispatcher's calls can be in compiled graphs."""
    return getattr(DISPATCHERS[kind] if isinstance(kind, str) else kind, "in_graphs", False)


def refuse_half_compiled(
    recompute: Recompute, compile: Compile, ranks: int, kind: "str | type[Dispatcher]"
) -> None:
    """Raise if blocks would silently not be compiled.

    Args:
        ranks: ep x etp.
        kind: the dispatcher.
    Raises:
        ConfigError: compilation with selective recomputation and a dispatcher that cannot be in a
            graph.
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
    """Whether a block (FQN) has experts (FQNs) whose dispatch cannot be in a compiled graph."""
    if dispatcher is None or in_graphs(dispatcher):
        return False
    return any(name.startswith(f"{block}.") for name in experts)


def make_dispatcher(layers: ExpertLayers, mesh: Mesh) -> Dispatcher | None:
    """Make the dispatcher of all layers and stages; a collective. None if ep x etp = 1."""
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
    """Shard experts over ep and etp, and make their calls dispatch rows, in place.

    Args:
        modules: expert modules by FQN.
        dispatcher: result of `make_dispatcher`.
    Raises:
        ConfigError: ep does not divide the number of experts, or etp their width, or `widths` lacks
            a parameter.
    """
    if dispatcher is None:
        return
    axes, etp = mesh.experts["ep", "etp"], mesh.expert_degrees["etp"]
    for fqn, module in modules.items():
        _split(fqn, module, layers.widths, axes)
        module.part = (mesh.experts.get_local_rank("etp"), etp)  # type: ignore[assignment]
        module.own = functools.partial(_local_parameter, module)  # type: ignore[assignment]
        layer = dispatcher.layer(fqn, torch.device(mesh.device_type))
        sharded = _ShardedExperts(module.forward, dispatcher, layer)
        for name in ("begin", "finish", "forward"):
            call = getattr(sharded, name)
            setattr(module, name, call if in_graphs(dispatcher) else torch.compiler.disable(call))


class _ShardedExperts:
    """Calls that replace those of an expert module whose parameters are sharded over ranks."""

    def __init__(self, compute: Callable[..., Tensor], dispatcher: Dispatcher, layer: Any) -> None:
        self.compute, self.dispatcher, self.layer = compute, dispatcher, layer

    def begin(self, rows: Tensor, offsets: Tensor, tail: bool = True) -> Any:
        """Issue the dispatch; rows after the last offset are not sent, so `tail` is not used."""
        return self.dispatcher.begin(rows, offsets, self.layer)

    def finish(self, pending: Any) -> Tensor:
        return self.dispatcher.finish(pending, self._compute_local)

    def forward(self, rows: Tensor, offsets: Tensor, tail: bool = True) -> Tensor:
        return self.finish(self.begin(rows, offsets, tail))

    def _compute_local(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return self.compute(rows, offsets, tail=False)


def _local_parameter(module: nn.Module, name: str) -> Tensor | None:
    parameter = getattr(module, name)
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def fsdp_dim(parameter: Tensor, ranks: int) -> int:
    """Return the dim along which edp_shard shards a parameter; see `shared_dim`."""
    placements = getattr(parameter, "placements", ())
    taken = {placement.dim for placement in placements if placement.is_shard()}
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return shared_dim(local.shape, taken, ranks)


def shared_dim(sizes: Sequence[int], taken: Collection[int], ranks: int) -> int:
    """Return the dim along which FSDP shards a tensor that ep and etp have already sharded.

    Dim 0 if possible, since gathered chunks are then contiguous; else preferably a dim that ep and
    etp do not shard. torch shards a dim unevenly only if it is dim 0 and not sharded otherwise.

    Args:
        sizes: shape of the local tensor.
        taken: dims that ep and etp shard.
        ranks: number of FSDP ranks.
    Raises:
        ConfigError: `ranks` divides no dim.
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
    """Replace parameters by DTensors over (ep, etp); FSDP gathers local parts for `forward`."""
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
        # All ranks have equal weights or none yet, so no communication is needed.
        split = distribute_tensor(parameter.data, axes, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, parameter.requires_grad))
