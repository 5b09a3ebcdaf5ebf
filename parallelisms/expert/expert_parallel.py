"""Expert parallelism: ranks hold different experts, and tokens travel to theirs and back.

Every rank of dp_shard x cp x tp has tokens of its own (under tp by sequence parallelism). Experts
see these ranks by axes of their own, edp_shard, ep and etp, of which etp is the innermost:

    ep          holds E / ep experts each, Shard(0) of the stacked matrices: rank r the experts
                r E / ep ... (r + 1) E / ep - 1
    etp         holds F / etp of the width of each expert: gate and up Shard(1), down Shard(2)
    edp_shard   shares what is left as FSDP does, dp_replicate holds copies as of all else

so that degrees of the dense part and of the experts have nothing to do with each other but their
product. Routers, shared experts and all other modules stay in the dense part.

`Experts` gets rows sorted by expert and gives back as many; it neither knows nor cares where they
came from. Hence the calls of the module that holds the experts are all that is replaced:

    rows sorted by expert (M, D) --------------------------- results (M, D), of etp the sum
      | to rank (r, s) those of r's experts, for all s          ^
      v all-to-all over ep x etp                                | the same back
    rows by (sender, expert) -> sorted by expert -> experts -> by (sender, expert)

A row goes to all etp ranks of its expert, each of which gives a part of a sum. A call of
`AllToAll` costs an all-to-all of counts, of which the host reads the sums, once, since sizes of
messages are the host's; then one each way, and one each way in the backward. Nothing else waits for
the device. Hence no compiled graph holds these calls. `symmetric_dispatch.py` has a dispatcher for
ranks of one host that waits for nothing, which graphs hold as any other operators.

Of `AllToAll` a layer's `begin` issues the first all-to-all of rows, its `finish` waits for it.
Collectives run on a stream of their own, so that order is all that is needed for what a model
computes in between to run beside them. The backward has the same order by autograd's rule that of
the nodes that are ready the latest made comes first:

    forward     _IssueExchange: all-to-all     in between                 _WaitExchange: wait
    backward    _IssueExchange: wait           in between's gradients     _WaitExchange: all-to-all back

With `float8` what goes to experts is in float8 on the wire, rows and in the backward the gradients
of results: cast before it is sent, and back where it has arrived. What comes from them, results and
the gradients of rows, travels in the dtype of computation, since it is summed.

Gradients: a rank's experts see the rows of all ranks of ep x etp, whole; FSDP sums over the rest.
The loss is divided by the tokens of the whole step before the backward, so that there is nothing to
divide by here, whatever the degrees are.

Shapes: M rows, D width, F width of an expert, E experts, P = ep x etp ranks.
Sources: GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596; MoE parallel folding,
arXiv:2504.14960; Megatron-LM's token dispatchers.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
from dtron.parallelisms.expert.symmetric_dispatch import SymmetricMemory
from dtron.parallelisms.functional_collectives import all_to_all, wait_tensor
from dtron.parallelisms.mesh import Mesh

WIDTHS = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": 1}
"""The dim that etp splits, by the parameter's name; of down_bias it is D, whose columns each rank
adds to its part of the sum."""


@dataclass(frozen=True)
class ExpertLayers:
    """Which modules of a model are experts, and how tokens get to them.

    Such a module has parameters of E experts each along dim 0, an attribute `part`, and
    a method `own(name)` by which it gets at them, and `forward(rows, offsets, tail) -> rows`, as
    `models/moe.py` says. A model may call `begin(rows, offsets, tail)` and `finish` of what that
    gave instead, and compute in between what needs no rows. An attribute `activate`, if there is
    one, is compiled where the model is: a function of tensors, element by element. If an attribute
    `multiply` is `grouped_matmul`, and a method `product(name, x, offsets)` multiplies by all of
    its matrices, schedules that split the backward put these weight gradients off too.
    """

    experts: str
    """Pattern of the modules with the stacked parameters."""
    dispatcher: "str | type[Dispatcher]" = "all_to_all"
    """A row of DISPATCHERS, or one of its kind."""
    widths: Mapping[str, int] = field(default_factory=lambda: WIDTHS)
    """The dim that etp splits, by the parameter's name."""
    capacity: float = 2.0
    """Of dispatchers whose buffers are bounded: rows that a rank takes at most, over those of even
    loads. Such hand rows to experts that follow those of the last one without saying so by `tail`:
    as many results are needed, of which nobody reads those, nor their gradients."""
    float8: bool = False
    """Rows, and gradients of results, travel to experts in float8
    (`dtron/kernels/float8_rows.py`)."""


Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows (N, D) sorted by expert, offsets int32 (E / ep,)) -> (N, D)."""


class Dispatcher(Protocol):
    """Brings rows to the ranks of their experts and the results back; one for all layers.

    Attributes:
        in_graphs: compiled graphs can hold `begin` and `finish`, which neither wait for the host
            nor need sizes that it learns. A class without it says no.
    """

    in_graphs: bool

    def __init__(
        self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float, float8: bool = False
    ) -> None: ...

    def layer(self, fqn: str, device: torch.device) -> Any:
        """What `begin` is handed for a layer; asked for once, before any call, in the same order
        on all ranks. In graphs that all layers share it tells them apart by tensors."""
        ...

    def begin(self, rows: Tensor, offsets: Tensor, layer: Any) -> Any:
        """Set rows off, (M, D), with offsets int32 (E,) of all experts; what it returns is for
        `finish`."""
        ...

    def finish(self, pending: Any, compute: Compute) -> Tensor:
        """Results of the rows that `begin` was given, (M, D); zero after the last offset, NaN where
        a row was lost."""
        ...

    def check(self, device: torch.device) -> None:
        """Wait for the device and raise if rows were lost; called by all ranks together.

        Raises:
            TrainingError: on all ranks, if any has lost some.
        """
        ...


@dataclass
class _Exchange:
    """An all-to-all of rows, (M, D) -> (N, D), and the one of their gradients back."""

    received: list[int]
    sent: list[int]
    """N and M by rank."""
    group: str
    float8: tuple[bool, bool]
    """Whether rows are in float8 on the wire, and whether their gradients are."""
    width: int
    """D."""
    returning: Tensor | None = None
    """Gradients (M, D) from the backward of `_WaitExchange` to that of `_IssueExchange`; autograd would want them
    to have the shape of what they are gradients of."""


@dataclass  # not frozen: torch 2.11 compiles anew for other sizes of what a frozen one holds
class _InFlight:
    """Rows on their way to experts of this rank. Compiled code hands it on and reads nothing."""

    arriving: Tensor
    """(N, D), by (sender, expert); not to be read before it is waited for."""
    exchange: _Exchange
    counts: Tensor
    """int64 (P, E / ep), rows of each sender for each expert."""
    n_rows: int
    """Of those that `begin` was given; some may have stayed here."""


class AllToAll:
    """One all-to-all there and one back, after one of counts that the host waits for.

    Args:
        group: of ep x etp ranks, etp being the innermost.
        capacity: not needed, buffers are as large as what comes.
        float8: what goes to experts is in float8 on the wire, rows and results' gradients.
    """

    in_graphs = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        ep: int,
        etp: int,
        capacity: float = math.inf,
        float8: bool = False,
    ) -> None:
        self.group, self.ep, self.etp, self.float8 = group, ep, etp, float8

    def layer(self, fqn: str, device: torch.device) -> str:
        """See Dispatcher."""
        return fqn

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

    def check(self, device: torch.device) -> None:
        """See Dispatcher; nothing is ever lost."""

    def _issue(self, rows: Tensor, exchange: _Exchange) -> Tensor:
        return _IssueExchange.apply(rows, exchange)

    def read(self, sizes: Tensor, _n_rows: int) -> list[list[int]]:
        """Rows to and from each rank, int64 (2, P): the one place where the host waits for the
        device."""
        return sizes.tolist()

    def _copies(self, rows: Tensor, sent: list[int]) -> Tensor:
        """Rows of each ep rank, once for each of its etp ranks."""
        if self.etp == 1:
            return rows
        parts = rows.split(sent[:: self.etp])
        return torch.cat([part for part in parts for _ in range(self.etp)])

    def _sum_partials(self, rows: Tensor, sent: list[int]) -> Tensor:
        """The parts that etp ranks gave back, summed."""
        if self.etp == 1:
            return rows
        parts = rows.split(sent)
        wholes = [parts[i : i + self.etp] for i in range(0, len(parts), self.etp)]
        return torch.cat([torch.stack(whole).sum(0) for whole in wholes])


class _IssueExchange(torch.autograd.Function):
    """Rows (M, D) set off; (N, D) that `_WaitExchange` alone may read. Its backward waits for what that of
    `_WaitExchange` sent."""

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
    """Rows that have arrived, (N, D) -> (N, D). In its backward their gradients set off."""

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
            )  # kept so until `_IssueExchange` has waited, which reads nothing of it
        return rows.new_empty(()).expand(ctx.shape), None  # of the float8 rows' shape


def _issued(rows: Tensor, received: list[int], sent: list[int], group: str, float8: bool) -> Tensor:
    """An all-to-all of rows, for `_arrived`. Those in float8 are bytes that have the rows' dtype:
    autograd hands on no others."""
    if not float8:
        return _start_all_to_all(rows, received, sent, group)
    return _start_all_to_all(packed(rows), received, sent, group).view(rows.dtype)


def _arrived(rows: Tensor, width: int, float8: bool) -> Tensor:
    """(N, D) of `_issued`, waited for."""
    arrived = wait_tensor(rows)
    return unpacked(arrived.view(torch.uint8), width, rows.dtype) if float8 else arrived


def _start_all_to_all(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """An all-to-all that is not waited for; until then the process group keeps what it reads."""
    return all_to_all(rows, received, sent, group)


DISPATCHERS: dict[str, type[Dispatcher]] = {
    "all_to_all": AllToAll,
    "symmetric_memory": SymmetricMemory,
    "deepep": DeepEP,
}


def _by_expert(counts: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """How rows that came by (sender, expert) are sorted by expert, and back.

    Args:
        counts: int64 (P, E_r), rows of each.
        n_rows: their sum, which the host knows.
    Returns:
        order and its inverse, int64 (n_rows,).
    """
    n_senders, n_experts = counts.shape
    experts = torch.arange(n_experts, device=counts.device).repeat(n_senders)
    order = experts.repeat_interleave(counts.flatten(), output_size=n_rows).argsort(stable=True)
    return order, inverse_of(order)


def on_separate_mesh(mesh: Mesh) -> bool:
    """Whether experts are on another mesh than the rest: they are split, or tp ranks share them."""
    return mesh.size("tp") > 1 or mesh.expert_degrees["ep"] * mesh.expert_degrees["etp"] > 1


def in_graphs(kind: "str | type[Dispatcher] | Dispatcher") -> bool:
    """Whether compiled graphs can hold what a dispatcher does."""
    return getattr(DISPATCHERS[kind] if isinstance(kind, str) else kind, "in_graphs", False)


def refuse_half_compiled(
    recompute: Recompute, compile: Compile, ranks: int, kind: "str | type[Dispatcher]"
) -> None:
    """Refuse blocks that would be left uncompiled without a word.

    Args:
        ranks: ep x etp.
        kind: the dispatcher.
    Raises:
        ConfigError: experts on other ranks that no graph can hold, compile, and recomputation that
            keeps some results.
    """
    if ranks == 1 or in_graphs(kind):
        return
    if compile.enable and recompute.mode in ("attention", "selective"):
        raise ConfigError(
            f'recompute.mode = "{recompute.mode}" with compile.enable and parallel.ep x '
            f"parallel.etp = {ranks}: a block of which some results are kept compiles whole or not "
            "at all, and experts on other ranks break it where the host reads how many rows "
            'travel; use parallel.dispatcher = "symmetric_memory" inside a host, '
            'recompute.mode = "full", or compile.enable = false'
        )


def breaks_graph(block: str, experts: Iterable[str], dispatcher: Dispatcher | None) -> bool:
    """Whether a block, by its FQN, has experts to which tokens travel outside of any graph."""
    if dispatcher is None or in_graphs(dispatcher):
        return False
    return any(name.startswith(f"{block}.") for name in experts)


def make_dispatcher(layers: ExpertLayers, mesh: Mesh) -> Dispatcher | None:
    """What brings rows to the experts of all layers and stages, made by all ranks together; None
    where no row leaves its rank."""
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
    """Split experts over ep and etp and route their rows there, in place.

    Args:
        modules: experts by FQN.
        dispatcher: of `make_dispatcher`.
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
            # Left out of compiled graphs where it waits for the host.
            setattr(module, name, call if held else torch.compiler.disable(call))


class _ShardedExperts:
    """The calls of experts of which this rank has a part."""

    def __init__(self, compute: Callable[..., Tensor], dispatcher: Dispatcher, layer: Any) -> None:
        self.compute, self.dispatcher, self.layer = compute, dispatcher, layer

    def begin(self, rows: Tensor, offsets: Tensor, tail: bool = True) -> Any:
        """As the experts' own; rows after the last expert's stay here, so that there is no tail."""
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
    """Along which dim `ranks` of edp_shard share a parameter; see shared_dim."""
    placements = getattr(parameter, "placements", ())
    taken = {placement.dim for placement in placements if placement.is_shard()}
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return shared_dim(local.shape, taken, ranks)


def shared_dim(sizes: Sequence[int], taken: Collection[int], ranks: int) -> int:
    """Along which dim ranks share a tensor of which they have a part already.

    The first where that works, since what is gathered is in one piece then, else one that ep and
    etp leave whole: torch shards a dim unevenly only if it is the first and nothing else splits it.

    Args:
        sizes: of the part.
        taken: dims that are split already.
    Raises:
        ConfigError: the ranks divide no dim.
    """
    if 0 not in taken or sizes[0] % ranks == 0:
        return 0
    dims = sorted(range(1, len(sizes)), key=lambda dim: dim in taken)
    fitting = [dim for dim in dims if sizes[dim] % ranks == 0]
    if not fitting:
        raise ConfigError(
            f"parallel.ep and parallel.etp leave {ranks} ranks that share each part of the "
            f"experts, and these divide no dim of {tuple(sizes)}; use a larger parallel.ep"
        )
    return fitting[0]


def _split(fqn: str, module: nn.Module, widths: Mapping[str, int], axes: DeviceMesh) -> None:
    """Make parameters DTensors over (ep, etp). What a FSDP unit gathers is a rank's part of one,
    which is all that `forward` sees."""
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
        # Ranks hold equal weights, or none yet: each cuts its own part, without communication.
        split = distribute_tensor(parameter.data, axes, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, parameter.requires_grad))
