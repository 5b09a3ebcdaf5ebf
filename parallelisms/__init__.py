"""Parallelism applied to plain modules from outside. Each file teaches one technique."""

if __name__ == "parallelisms":
    raise ImportError(
        "import dtron.parallelisms: the folder parallelisms/ is a package of dtron, "
        "not a top-level one"
    )

from dtron.parallelisms.apply import parallelize
from dtron.parallelisms.fsdp import Policy, begin_micro_batch
from dtron.parallelisms.gradients import clip_scale, global_norm, reduce_replicas
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.placement import (
    colwise,
    heads,
    prepare_input,
    prepare_output,
    replicate,
    rowwise,
    sequence,
)

__all__ = [
    "Mesh",
    "Policy",
    "begin_micro_batch",
    "clip_scale",
    "colwise",
    "global_norm",
    "heads",
    "parallelize",
    "prepare_input",
    "prepare_output",
    "reduce_replicas",
    "replicate",
    "rowwise",
    "sequence",
]
