"""Processes of their own to measure in: forked ranks with a process group."""

import json
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megapar.base.errors import MegaparError
from megapar.comm import collectives
from megapar.system import device


class BenchmarkError(MegaparError):
    """The numbers are worthless: contenders disagree, or a process failed."""


def run_ranks(world: int, target: str, body: Callable[[torch.device], Any], seconds: float | None = None) -> list[Any]:
    """`body(device)` on `world` forked processes with a process group; returns what each returned (JSON types), by
    rank.

    Raises BenchmarkError with the traceback of the first failed rank, or if a rank was killed, or if the ranks are not
    done after `seconds` (None: wait without end). Ranks still running are ended.
    """
    fork = multiprocessing.get_context("fork")
    end = math.inf if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=_rank_main, args=(body, rank, world, target, folder)) for rank in range(world)]
        for process in ranks:
            process.start()
        running = list(ranks)
        while running and all(process.exitcode in (None, 0) for process in ranks) and time.monotonic() < end:
            wait([process.sentinel for process in running], None if seconds is None else max(end - time.monotonic(), 0))
            running = [process for process in running if process.exitcode is None]
        codes = [process.exitcode for process in ranks]  # before the kills below
        for process in ranks:
            process.kill()
            process.join()
        for rank in range(world):
            error = Path(folder, f"error_{rank}")
            if error.exists():
                raise BenchmarkError(f"rank {rank} of {world} failed:\n{error.read_text()}")
        if lost := [code for code in codes if code]:
            raise BenchmarkError(f"a rank ended without a result, exit code {lost[0]}")
        if running:
            raise BenchmarkError(f"not done after {seconds} seconds, and ended")
        return [json.loads(Path(folder, f"result_{rank}").read_text()) for rank in range(world)]


def _rank_main(body: Callable[[torch.device], Any], rank: int, world: int, target: str, folder: str) -> None:
    try:
        chosen = device.choose(target, rank, world)
        device.prepare(chosen, threads=1, deterministic=False)
        if world > 1:
            store = dist.FileStore(f"{folder}/store", world)
            collectives.initialize(device.backend(chosen), rank, world, store=store, device=chosen)
        Path(folder, f"result_{rank}").write_text(json.dumps(body(chosen)))
        if world > 1:
            dist.barrier()
    except BaseException:
        Path(folder, f"error_{rank}").write_text(traceback.format_exc())
        os._exit(1)
    # No interpreter shutdown: fully_shard over gloo sometimes aborts in it, after all work is done.
    os._exit(0)


def synchronize(world: int, target: torch.device) -> None:
    """Wait for the device's work, and for the other ranks."""
    device.synchronize(target)
    if world > 1:
        dist.barrier()
