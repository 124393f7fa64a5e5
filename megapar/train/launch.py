"""Starts ranks on this machine, and joins the world that they, torchrun or Slurm make up."""

import logging
import sys
import tempfile
from collections.abc import Callable

from torch.multiprocessing import ProcessExitedException, start_processes

from megapar import comm, context, device
from megapar.config import Config
from megapar.context import ParallelContext


def _rank_main(rank: int, nproc: int, folder: str, main: Callable[[device.Environment], None]) -> None:
    main(device.Environment(rank, nproc, rank, nproc, f"file://{folder}/store"))


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
    """Prepare this process and make the rank grid. A collective over all ranks that `env` tells of."""
    where = device.choose(config.launch.device, env.local_rank, env.local_world_size)
    device.choose_kernels(config.kernels.backend, where)  # raises, if it does, before the first collective
    device.prepare(
        where,
        threads=config.launch.threads,
        local_world_size=env.local_world_size,
        deterministic=config.train.deterministic,
    )
    if env.world_size > 1:
        comm.initialize(
            device.backend(where),
            env.rank,
            env.world_size,
            init_method=env.init_method,
            timeout_seconds=config.launch.timeout_seconds,
        )
    parallel = config.parallel
    return context.create(
        tp=parallel.tp,
        dp=parallel.dp,
        pp=parallel.pp,
        order=parallel.order,
        device=where,
        timeout_seconds=config.launch.timeout_seconds,
    )
