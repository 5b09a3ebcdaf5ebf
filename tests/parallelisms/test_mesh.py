"""Meshes are objects: several live in one process; views, rank order and group options."""

import pytest
import torch
import torch.distributed as dist

from dtron.errors import ConfigError
from dtron.parallelisms import Mesh
from tests.harness import run_ranks


def two_meshes() -> tuple[dict, dict, list[int], list[int]]:
    wide, deep = Mesh(tp=2), Mesh(pp=2, dp_shard=1, tp=2, ep=2)
    ranks = torch.tensor([float(dist.get_rank())])
    sums = []
    for mesh, axis in ((wide, "tp"), (wide, "dp_shard"), (deep, "pp"), (deep, "tp")):
        total = ranks.clone()
        dist.all_reduce(total, group=mesh.group(axis))  # type: ignore[arg-type]
        sums.append(int(total))
    experts = ranks.clone()
    dist.all_reduce(experts, group=deep.experts.get_group("ep"))
    return wide.degrees, deep.degrees, [*sums, int(experts)], [wide.rank("tp"), deep.rank("pp")]


def test_several_meshes_and_views_in_one_process() -> None:
    results = run_ranks(4, two_meshes)
    for rank, (wide, deep, sums, places) in enumerate(results):
        assert (wide["dp_shard"], wide["tp"], deep["pp"], deep["tp"]) == (2, 2, 2, 2)
        neighbour, across = rank ^ 1, rank ^ 2  # tp is innermost
        expected = [rank + neighbour, rank + across, rank + across, rank + neighbour]
        assert sums == [*expected, rank + neighbour]
        assert places == [rank % 2, rank // 2]


def backends() -> str:
    mesh = Mesh(tp=2, options={"tp": "gloo"})
    if not dist.is_nccl_available():
        with pytest.raises(ConfigError, match="NCCL"):
            Mesh(tp=2, high_priority=["tp"])
    return dist.get_backend(mesh.group("tp"))


def test_an_axis_has_its_own_backend() -> None:
    assert run_ranks(2, backends) == ["gloo", "gloo"]
