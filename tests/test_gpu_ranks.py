"""Ranks that stay alive over calls: what a failure, a death and a hang leave, on CPUs."""

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.gpu_ranks import RankError, Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2, "cpu")
    yield ranks
    ranks.close()


def summed(value: int) -> tuple[int, int]:
    """(process, the sum over ranks)."""
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return os.getpid(), int(total)


def failing(ranks: tuple[int, ...]) -> None:
    assert dist.get_rank() not in ranks, f"rank {dist.get_rank()} fails"
    dist.barrier()


def dying() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def hanging() -> None:
    time.sleep(60 if dist.get_rank() else 0)


def test_processes_serve_several_calls(ranks: Ranks) -> None:
    first, second = ranks.call(summed, 1), ranks.call(summed, 2)
    assert [total for _, total in first + second] == [3, 3, 5, 5]
    assert [process for process, _ in first] == [process for process, _ in second]


def test_a_failure_of_all_ranks_leaves_them_alive(ranks: Ranks) -> None:
    starts = ranks.starts
    with pytest.raises(RankError, match=r"rank 0:\n(.|\n)*rank 0 fails(.|\n)*rank 1 fails"):
        ranks.call(failing, (0, 1))
    assert ranks.call(summed, 0)[0][1] == 1
    assert ranks.starts == max(starts, 1)


def test_ranks_that_wait_for_one_that_failed_are_replaced(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu_ranks._GRACE_SECONDS", 1)
    with pytest.raises(RankError, match="rank 1 fails"):
        ranks.call(failing, (1,))
    assert ranks.call(summed, 0)[0][1] == 1
    with pytest.raises(RankError, match="exit code 3"):
        ranks.call(dying)
    assert ranks.call(summed, 0)[0][1] == 1


def test_hangs_show_the_stack_and_do_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu_ranks._MOST_HANGS", 0)
    ranks = Ranks(2, "cpu")
    try:
        with pytest.raises(RankError, match=r"no answer in (.|\n)* in hanging"):
            ranks.call(hanging, seconds=1)
        with pytest.raises(RankError, match="not run: 1 earlier calls of 2 ranks hung"):
            ranks.call(summed, 0)
    finally:
        ranks.close()
