"""Parallelism for plain nn.Modules, applied from outside the model; one technique per file."""

if __name__ == "parallelisms":
    raise ImportError("parallelisms/ is not a top-level package; use import dtron.parallelisms")

from dtron.parallelisms.apply import ParallelPlan
from dtron.parallelisms.context.apply import Context
from dtron.parallelisms.context.attention import ContextAttention
from dtron.parallelisms.context.split import Split
from dtron.parallelisms.expert.expert_parallel import ExpertLayers
from dtron.parallelisms.fsdp.sharding import Policy, begin_micro_batch
from dtron.parallelisms.gradients import (
    clip_scale,
    global_norm,
    reduce_replicas,
    scale_or_zero_,
)
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.placement import (
    Replicate,
    Shard,
    colwise,
    experts,
    heads,
    prepare_input,
    prepare_output,
    replicate,
    rowwise,
    sequence,
    whole_heads,
    whole_input,
)
from dtron.parallelisms.plugin import PipelinedModel, parallelize, pipeline

__all__ = [
    "Context",
    "ContextAttention",
    "ExpertLayers",
    "Mesh",
    "ParallelPlan",
    "PipelinedModel",
    "Policy",
    "Replicate",
    "Shard",
    "Split",
    "begin_micro_batch",
    "clip_scale",
    "colwise",
    "experts",
    "global_norm",
    "heads",
    "parallelize",
    "pipeline",
    "prepare_input",
    "prepare_output",
    "reduce_replicas",
    "replicate",
    "rowwise",
    "scale_or_zero_",
    "sequence",
    "whole_heads",
    "whole_input",
]
