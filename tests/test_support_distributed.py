"""The harness of forked ranks reports what happened on them, and tells a hung rank from a slow one."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks


def rank_and_world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.zeros(1))


def end_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def work_for_seconds(seconds: float) -> int:
    end = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < end:
        rounds += 1
    return rounds


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(3, rank_and_world) == [(0, 3), (1, 3), (2, 3)]


def test_a_rank_that_fails_is_told_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1:\nTraceback .*ValueError: planted"):
        run_ranks(2, fail_on_rank_1)


def test_a_rank_that_ends_without_a_result_is_named() -> None:
    with pytest.raises(AssertionError, match=r"failed ranks \[.*1.*\]"):
        run_ranks(2, end_on_rank_1)


def test_ranks_that_wait_without_work_are_hung() -> None:
    with pytest.raises(AssertionError, match=r"hung ranks \[0, 1\]"):
        run_ranks(2, sleep_on_rank_1, idle_seconds=1)


def test_ranks_that_work_are_slow_and_not_hung() -> None:
    """A machine several times slower fails no test."""
    assert all(run_ranks(2, work_for_seconds, 2.0, idle_seconds=1))
