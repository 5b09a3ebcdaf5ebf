"""The pictures of expert shards and dispatch match a run, and those of the docs are up to date."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from dtron.parallelisms import Mesh
from dtron.parallelisms.draw.dispatch import TokenCopy, dispatch, main, random_choices, views
from dtron.parallelisms.expert.all_to_all import AllToAll
from tests.harness import run_ranks

DOCS = Path(__file__).parents[3] / "docs" / "experts"
PICTURES = {
    "mesh": ["--dp-shard", "4", "--tp", "2", "--ep", "2", "--etp", "2"],
    "rows": ["--dp-shard", "4", "--ep", "4"],
}


def place() -> tuple[list[int], list[int]]:
    """On one rank: its index on the axes of the dense part, and on those of the experts."""
    mesh = Mesh(cp=2, tp=2, ep=2, etp=2)
    dense = [mesh.rank(axis) for axis in ("dp_shard", "cp", "tp")]
    return dense, [mesh.experts.get_local_rank(axis) for axis in ("edp_shard", "ep", "etp")]


def test_ranks_are_those_of_a_mesh() -> None:
    found = views({"dp_shard": 2, "cp": 2, "tp": 2}, ep=2, etp=2)
    for rank, (dense, experts) in enumerate(run_ranks(8, place)):
        assert list(found.place(rank, experts=False)) == dense
        assert list(found.place(rank, experts=True)) == experts


def dispatched(rows: list[list[TokenCopy]], n_experts: int) -> tuple[list, list]:
    """On one rank: token copies that the experts receive, and that are combined."""
    mine = torch.tensor(rows[dist.get_rank()], dtype=torch.float32).requires_grad_()
    counts = torch.bincount(mine[:, 2].long(), minlength=n_experts)
    seen = []

    def compute(arrived: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        seen.extend(map(tuple, arrived.long().tolist()))
        assert int(ends[-1]) == len(arrived)
        return arrived

    group = dist.group.WORLD
    assert group is not None
    dispatcher = AllToAll(group, dist.get_world_size(), 1)
    back = dispatcher.finish(dispatcher.begin(mine, counts.cumsum(0).int()), compute)
    return seen, list(map(tuple, back.long().tolist()))


def test_token_copies_are_those_that_experts_receive() -> None:
    found = dispatch(random_choices(4, 8, tokens=5, top_k=2), 8)
    for rank, (seen, back) in enumerate(run_ranks(4, dispatched, found.sent, 8)):
        assert seen == found.by_expert[rank]
        assert back == found.sent[rank]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / f"{name}.svg"
    assert main([*PICTURES[name], f"--{name}", str(out)]) == 0
    ElementTree.parse(out)
    assert (DOCS / f"{name}.svg").read_text() == out.read_text()
    assert "rank 3" in capsys.readouterr().out


def test_degrees_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dp-shard", "4", "--ep", "3"]) == 2
    assert "does not divide the 4 ranks" in capsys.readouterr().err
    assert main(["--dp-shard", "4", "--ep", "4", "--experts", "6"]) == 2
    assert main(["--rows", "rows.svg", "--tokens", "0"]) == 2
    assert main(["--rows", "rows.svg", "--top-k", "9"]) == 2
    assert "--ep 4 does not divide --experts 6" in capsys.readouterr().err
