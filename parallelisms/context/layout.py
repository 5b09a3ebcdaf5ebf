"""Layout of the cp ranks for each context-parallel method."""

from dataclasses import dataclass

from dtron.config import CpMethod
from dtron.errors import ConfigError


@dataclass(frozen=True)
class ContextLayout:
    """The cp axis as `outer` blocks of `inner` ranks.

    The `inner` ranks of a block exchange heads by an all-to-all; keys of the `outer` blocks are
    gathered, or sent around a ring.
    """

    outer: int
    inner: int
    gathers: bool
    causal: bool = True
    """Whether a query sees only keys up to its own, or all keys of its document."""
    windows: tuple[int, ...] = ()
    """Windows of the layers with this layout; in a ring, each needs its own document tables."""

    @property
    def rings(self) -> bool:
        """Whether keys are sent around a ring."""
        return self.outer > 1 and not self.gathers


def table_names(method: CpMethod, window: int) -> tuple[str, str]:
    """Return the names of the tables for a window of a ring: on the device, and on the host."""
    return f"{method}, window {window}", f"{method}, window {window}, on host"


def layout_of(method: CpMethod, cp: int, inner: int = 0) -> ContextLayout:
    """Return a method's layout of cp ranks.

    Args:
        inner: all-to-all ranks of the hierarchical method; 0: the largest proper divisor of cp.

    Raises:
        ConfigError: `inner` is no proper divisor of cp, or cp has no proper divisor but 1.
    """
    if method != "hierarchical":
        return (
            ContextLayout(1, cp, False)
            if method == "ulysses"
            else ContextLayout(cp, 1, method == "all_gather")
        )
    legal = [n for n in range(2, cp) if cp % n == 0]
    if not legal:
        raise ConfigError(
            f'parallel.cp_method = "hierarchical" needs a parallel.cp that is a product of two '
            f'numbers, such as 4; {cp} is not: use "ring" or "ulysses"'
        )
    if inner and inner not in legal:
        raise ConfigError(
            f"parallel.cp_inner = {inner} is no proper divisor of parallel.cp = {cp}; use "
            f"{', '.join(map(str, legal))}"
        )
    return ContextLayout(cp // (inner or legal[-1]), inner or legal[-1], False)
