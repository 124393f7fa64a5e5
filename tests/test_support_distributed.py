"""The harness of forked ranks reports what happened on them, and tells a hung rank from a slow one."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import huge_pages
from tests.support.distributed import apart, packed, run_ranks, unpacked


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


RESULTS = {
    "matrix": torch.arange(12.0).view(3, 4).t(),
    "half": torch.tensor([1.5, -torch.inf, torch.nan], dtype=torch.bfloat16),
    "flags": torch.tensor([[True, False]]),
    "number": torch.tensor(7),
    "nothing": torch.zeros(0, 3),
    "weight": torch.nn.Parameter(torch.ones(2)),
}


def test_tensors_arrive_with_their_bits_as_plain_ones() -> None:
    found, rest = unpacked(packed((RESULTS, ["a", 1])))
    assert (list(found), rest) == (list(RESULTS), ["a", 1])
    for name, tensor in RESULTS.items():
        assert (type(found[name]), found[name].requires_grad) == (torch.Tensor, False)
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].nan_to_num(), tensor.nan_to_num()), name


def in_huge_pages() -> tuple[bool, int]:
    """Whether all numbers are the same there, and how many KiB of huge pages this process has."""
    numbers = torch.arange(2**21)
    huge_pages.use_huge_pages()
    (line,) = [text for text in Path("/proc/self/smaps_rollup").read_text().splitlines() if "AnonHugePages" in text]
    return torch.equal(numbers, torch.arange(2**21)), int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells of huge pages")
def test_what_is_put_into_huge_pages_stays() -> None:
    same, size = apart(in_huge_pages)
    assert same
    if not size:
        pytest.skip("this system gives no huge pages")
    assert size >= 8192


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
