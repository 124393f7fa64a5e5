"""Runs a function on several real ranks: forked processes, over gloo on the CPU.

In the lane `-m gpus` (tests/run.sh --gpus) ranks have a GPU each and use NCCL; a test whose world is larger than the
machine's number of GPUs then says so and counts as skipped.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # checkpoint() imports it when first used: once here rather than in every forked rank
import torch.distributed as dist

from megapar import comm, device

ON_GPUS = os.environ.get("MEGAPAR_TEST_LANE") == "gpus"  # set by tests/conftest.py


def rank_device(rank: int) -> torch.device:
    """Where a test's tensors live on this rank."""
    return torch.device("cuda", rank) if ON_GPUS else torch.device("cpu")


def _rank_main(body: Callable[..., Any], rank: int, world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        mine = rank_device(rank)
        if ON_GPUS:
            torch.cuda.set_device(mine)
        store = dist.FileStore(f"{folder}/store", world)
        comm.initialize(device.backend(mine), rank, world, store=store, timeout_seconds=60, device=mine)
        result = body(*args)
        dist.barrier()
        torch.save(result, f"{folder}/result_{rank}.pt")
        comm.shutdown()
    except BaseException:
        Path(f"{folder}/error_{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def run_ranks(world: int, body: Callable[..., Any], *args: Any, timeout_seconds: float = 120) -> list[Any]:
    """`body(*args)` on `world` forked ranks; returns what each rank returned (anything torch.save takes), on the CPU.

    Raises AssertionError with every failing rank's traceback, also when a rank dies or outlasts the time.
    """
    if os.environ.get("MEGAPAR_TEST_LANE") == "gpu":
        raise AssertionError("forked ranks do not belong to the lane -m gpu: mark the test gpus")
    if ON_GPUS and world > torch.cuda.device_count():
        pytest.skip(f"not run: needs {world} GPUs, this machine has {torch.cuda.device_count()}")
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=_rank_main, args=(body, r, world, folder, args)) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout_seconds)
        hung = [r for r, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        errors = [f"rank {p.name[6:]}:\n{p.read_text()}" for p in sorted(Path(folder).glob("error_*"))]
        dead = [r for r, process in enumerate(ranks) if process.exitcode not in (0, None) and r not in hung]
        if errors or hung or dead:
            raise AssertionError("\n".join([*errors, f"hung ranks {hung}, failed ranks {dead}"]))
        return [torch.load(f"{folder}/result_{r}.pt", weights_only=False, map_location="cpu") for r in range(world)]
