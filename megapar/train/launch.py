"""Starts ranks on this machine through torch's elastic launcher, and joins the world that a launcher made."""

import logging
import signal
import sys
import uuid
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megapar import comm, context, device
from megapar.config import Config
from megapar.context import ParallelContext


def start_local_ranks(main: Callable[[], None], nproc: int) -> int:
    """Run `main` on `nproc` forked ranks of this machine; returns the exit code of the first that failed, or 0.

    Forking shares the imported torch, so eight ranks start in a second. It must happen before CUDA is used.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def one_rank() -> None:
        # Forked ranks inherit the launcher's handler, which raises; a rank that is told to end has nothing to say.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        main()

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    try:
        elastic_launch(launch, one_rank)()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"CommunicationError: rank {rank} (process {failure.pid}) was ended by {name}", file=sys.stderr)
            return 6
        return failure.exitcode
    return 0


def join(config: Config, env: device.Environment) -> ParallelContext:
    """Prepare this process and make the rank grid. A collective over all ranks that `env` tells of."""
    where = device.choose(config.launch.device, env.local_rank, env.local_world_size)
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
