"""Runs a function on several real ranks: gloo processes forked here, or NCCL ranks with MEGAPAR_TEST_DEVICE=cuda."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megapar import comm


def _rank_main(body: Callable[..., Any], rank: int, world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        comm.initialize("gloo", rank, world, store=dist.FileStore(f"{folder}/store", world), timeout_seconds=60)
        result = body(*args)
        dist.barrier()
        torch.save(result, f"{folder}/result_{rank}.pt")
        comm.shutdown()
    except BaseException:
        Path(f"{folder}/error_{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def run_ranks(world: int, body: Callable[..., Any], *args: Any, timeout_seconds: float = 120) -> list[Any]:
    """`body(*args)` on `world` forked gloo ranks; returns what each rank returned (anything torch.save takes).

    Raises AssertionError with every failing rank's traceback, also when a rank dies or outlasts the time.
    """
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
        return [torch.load(f"{folder}/result_{r}.pt", weights_only=False) for r in range(world)]
