"""Starts ranks on this machine, and joins the world that they, torchrun or Slurm make up."""

import logging
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import ProcessExitedException, start_processes

from megapar import comm, context, device, rendezvous
from megapar.config import Config, flatten
from megapar.context import ParallelContext


def _rank_main(rank: int, nproc: int, folder: str, main: Callable[[device.Environment], None]) -> None:
    main(
        device.Environment(
            rank=rank,
            world_size=nproc,
            local_rank=rank,
            local_world_size=nproc,
            meeting=f"file://{folder}/store",
            launcher="local",
            cores=max(1, device.usable_cores() // nproc),
        )
    )


def start_local_ranks(main: Callable[[device.Environment], None], nproc: int) -> int:
    """Run `main` on `nproc` forked ranks of this machine; returns the exit code of the first that failed, or 0.

    Forking shares the imported torch, so eight ranks start in a second. It must happen before CUDA is used and while
    this process has one thread: hence torch.multiprocessing and a file for the ranks to meet at, not torchrun's agent,
    which serves a store and so forks among threads, and whose ranks now and then hung before their first collective.
    """
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(_rank_main, (nproc, folder, main), nproc, start_method="fork")
        except ProcessExitedException as failure:
            if failure.signal_name is None:
                return failure.exit_code
            rank, pid = failure.error_index, failure.error_pid
            print(
                f"CommunicationError: rank {rank} (process {pid}) was ended by {failure.signal_name}", file=sys.stderr
            )
            return 6
    return 0


def join(config: Config, env: device.Environment) -> ParallelContext:
    """Prepare this process, meet the other ranks, and make the rank grid. A collective over all ranks of `env`.

    Raises ConfigError on every rank, before any collective, if ranks disagree on options, code, torch's version or the
    kind of device, or if two share a GPU; CommunicationError if some do not come.
    """
    chosen = device.choose(config.launch.device, env.local_rank, env.local_world_size, own_gpus=env.launched)
    device.choose_kernels(config.kernels.backend, chosen)  # raises, if it does, before the first collective
    device.prepare(chosen, threads=config.launch.threads, cores=env.cores, deterministic=config.train.deterministic)
    timeout = config.launch.timeout_seconds
    if env.world_size > 1:
        store = comm.connect(
            env.meeting,
            env.rank,
            env.world_size,
            serves_store=env.serves_store,
            attempt=env.attempt,
            timeout_seconds=timeout,
        )
        member = rendezvous.this_member(env.rank, str(chosen), device.gpu_id(chosen))
        rendezvous.meet(store, member, env.world_size, what_ranks_share(config, chosen.type), timeout)
        comm.initialize(
            device.backend(chosen), env.rank, env.world_size, store=store, timeout_seconds=timeout, device=chosen
        )
    parallel = config.parallel
    return context.create(
        tp=parallel.tp,
        dp=parallel.dp,
        pp=parallel.pp,
        order=parallel.order,
        device=chosen,
        timeout_seconds=timeout,
    )


def what_ranks_share(config: Config, device_type: str) -> dict[str, Any]:
    """All that must be equal on every rank, as JSON types: options, code, versions, and what kind of device is used.

    How a process starts may differ between nodes: how many ranks it has, their threads, the name of the device.
    """
    local = ("launch.nproc", "launch.device", "launch.threads")
    options = {path: value for path, value in flatten(config).items() if path not in local}
    versions = {"torch's version": torch.__version__}
    return {**options, **versions, **rendezvous.hashes_of_our_files(), "the device": device_type}


def leave(ctx: ParallelContext) -> None:
    """End a run that succeeded: wait for all ranks, then free the process groups.

    Without the wait, rank 0 could take the store away while others still use it. After a failure nobody waits: the
    process ends, and its launcher ends the others.
    """
    comm.barrier(ctx.world)
    comm.shutdown()
