"""{name: dispatcher class}, and checks whether a dispatcher can be in compiled graphs."""

from collections.abc import Iterable

from dtron.config import Compile, Recompute
from dtron.errors import ConfigError, nearest
from dtron.parallelisms.expert.all_to_all import AllToAll
from dtron.parallelisms.expert.bounded_all_to_all import BoundedAllToAll
from dtron.parallelisms.expert.deepep import DeepEP
from dtron.parallelisms.expert.dispatcher import Dispatcher
from dtron.parallelisms.expert.hierarchical import Hierarchical
from dtron.parallelisms.expert.symmetric_dispatch import SymmetricMemory

DISPATCHERS: dict[str, type[Dispatcher]] = {
    "all_to_all": AllToAll,
    "symmetric_memory": SymmetricMemory,
    "bounded_all_to_all": BoundedAllToAll,
    "hierarchical": Hierarchical,
    "deepep": DeepEP,
}


def dispatcher_class(kind: "str | type[Dispatcher]") -> "type[Dispatcher]":
    """Return the class of a dispatcher's name. Raises ConfigError: unknown name."""
    if not isinstance(kind, str):
        return kind
    if kind not in DISPATCHERS:
        raise ConfigError(
            f"dispatcher = {kind!r} is unknown{nearest(kind, DISPATCHERS)}; use one of "
            f"{', '.join(DISPATCHERS)}, or a class"
        )
    return DISPATCHERS[kind]


def in_graphs(kind: "str | type[Dispatcher] | Dispatcher") -> bool:
    """Whether a dispatcher's calls can be in compiled graphs."""
    return getattr(dispatcher_class(kind) if isinstance(kind, str) else kind, "in_graphs", False)


def refuse_half_compiled(
    recompute: Recompute, compile: Compile, ranks: int, kind: "str | type[Dispatcher]"
) -> None:
    """Raise ConfigError if torch.compile would silently leave blocks uncompiled.

    Args:
        ranks: ep x etp.
        kind: the dispatcher.
    Raises:
        ConfigError: compilation together with a partly recomputed block and a dispatcher that
            breaks the graph.
    """
    if ranks == 1 or in_graphs(kind):
        return
    if compile.enable and (recompute.mode in ("attention", "selective") or recompute.modules):
        key, fix = f'recompute.mode = "{recompute.mode}"', 'recompute.mode = "full"'
        if recompute.modules:
            key, fix = "recompute.modules", "no recompute.modules"
        raise ConfigError(
            f"{key} with compile.enable and parallel.ep x parallel.etp = {ranks}: a partly "
            "recomputed block needs a graph without breaks, but this parallel.dispatcher breaks "
            "the graph, since the host reads how many tokens are sent; use "
            'parallel.dispatcher = "symmetric_memory" inside a host, or "bounded_all_to_all", '
            f"{fix}, or compile.enable = false"
        )


def breaks_graph(block: str, experts: Iterable[str], dispatcher: Dispatcher | None) -> bool:
    """Whether a block (FQN) has experts (FQNs) whose dispatch cannot be in a compiled graph."""
    if dispatcher is None or in_graphs(dispatcher):
        return False
    return any(name.startswith(f"{block}.") for name in experts)
