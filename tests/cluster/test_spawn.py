"""Ranks of one process group on this machine."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from unirl.cluster.spawn import RankError, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), float(value)


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such thing")
    dist.barrier()


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang() -> None:
    time.sleep(60)


def test_results_come_back_by_rank():
    assert run_ranks(_sum_of_ranks, 2, 10) == [(0, 21.0), (1, 21.0)]


@pytest.mark.parametrize(
    ("function", "timeout_s", "message"),
    [
        (_fail_on_rank_one, 60, "rank 1 of 2: .*ValueError: no such thing"),
        (_die_on_rank_one, 60, r"rank 1 of 2: the process died \(exit code -9\)"),
        (_hang, 5, "rank 0, 1 of 2 not done after 5 s"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_rank_that_fails_is_named(function, timeout_s, message):
    with pytest.raises(RankError, match=f"(?s){message}"):
        run_ranks(function, 2, timeout_s=timeout_s)
