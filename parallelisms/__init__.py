"""Parallelism applied to plain modules from outside. Each file teaches one technique."""

if __name__ == "parallelisms":
    raise ImportError(
        "import dtron.parallelisms: the folder parallelisms/ is a package of dtron, "
        "not a top-level one"
    )

from dtron.parallelisms.apply import parallelize
from dtron.parallelisms.mesh import Mesh

__all__ = ["Mesh", "parallelize"]
