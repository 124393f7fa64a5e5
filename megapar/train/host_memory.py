"""Whether the hosts of a run have the memory that optimizer.offload and train.offload take."""

import socket
from collections import defaultdict
from collections.abc import Sequence

from megapar.base.errors import ConfigError
from megapar.comm import collectives
from megapar.config.options import Config
from megapar.data_parallel.layout import FlatLayout
from megapar.declare.context import ParallelContext
from megapar.optimizer import table
from megapar.system.host_memory import available_bytes

Need = tuple[str, int, int | None]
"""A rank's host, the bytes that the rank will take of its memory, and those that are available there."""


def optimizer_bytes(config: Config, layout: FlatLayout) -> int:
    """Bytes of host memory taken by the optimizers of a rank."""
    found = [
        table.find(updates.optimizer).planned_nbytes(
            layout.shards_of(updates), layout.dtype_of(updates), config.optimizer
        )
        for updates in layout.updates()
    ]
    return sum(nbytes[True] for nbytes in found)


def check(config: Config, layout: FlatLayout, ctx: ParallelContext, inputs: int = 0) -> None:
    """Raise ConfigError on every rank if a host has less memory than its ranks take. A collective.

    `inputs` are the bytes that inputs of layers take for this rank (`megapar_tools.plan.memory.host_bytes_of_inputs`).
    """
    shares = {"optimizer.offload": config.optimizer.offload, "train.offload": config.train.offload}
    given = {name: share for name, share in shares.items() if share}
    if not given:
        return
    mine: Need = (socket.gethostname(), optimizer_bytes(config, layout) + inputs, available_bytes())
    missing = too_small([tuple(need) for need in collectives.gather_json(mine, ctx.world, ctx.device)])
    if missing:
        values = ", ".join(f"{name}={share:g}" for name, share in given.items())
        raise ConfigError(f"{values}: {missing}; lower {' or '.join(given)}")


def too_small(needs: Sequence[Need]) -> str:
    """The first host with less memory than its ranks take, in words; "" if there is none."""
    of_host: dict[str, list[Need]] = defaultdict(list)
    for need in needs:
        of_host[need[0]].append(need)
    for host, ranks in of_host.items():
        wanted = sum(nbytes for _, nbytes, _ in ranks)
        available = min((free for _, _, free in ranks if free is not None), default=wanted)
        if wanted > available:
            gib = f"{wanted / 2**30:,.1f} GiB of host memory, and {available / 2**30:,.1f} GiB are available"
            return f"the {len(ranks)} rank(s) of {host} take {gib}"
    return ""
