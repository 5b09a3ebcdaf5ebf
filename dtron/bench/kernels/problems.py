"""The problems of `dtron bench kernels`, by name."""

from dtron.bench.kernels import attention, experts, float8, updates
from dtron.bench.kernels.problem import Problem

PROBLEMS: dict[str, Problem] = {
    "attention": attention.ATTENTION,
    "adamw": updates.ADAMW,
    "lion": updates.LION,
    "muon": updates.MUON,
    "sums": updates.SUMS,
    "gradient sums": updates.GRADIENT_SUMS,
    "float8 cast": float8.CAST,
    "float8 gated": float8.GATED,
    "permute": experts.PERMUTE,
    "peers": experts.PEERS,
    "float8 rows": float8.ROWS,
    "float8 peers": experts.FLOAT8_PEERS,
    "experts": experts.EXPERTS,
    "expert gradient sums": experts.GRADIENT_SUMS,
}
