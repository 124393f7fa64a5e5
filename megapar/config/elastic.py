"""Fits the number of replicas to the ranks that have come (launch.min_dp)."""

from dataclasses import replace

from megapar.base.errors import ConfigError
from megapar.config.files import Resolved
from megapar.config.messages import problem

SOURCE = "the ranks that came"


def fitted(resolved: Resolved, world_size: int) -> Resolved:
    """The options for `world_size` ranks: with launch.min_dp, as many replicas as these ranks make.

    The global batch stays: replicas run different numbers of micro-batches if need be. Raises ConfigError if the ranks
    make fewer replicas than launch.min_dp. Numbers that cannot be cut into replicas are left to `validate`.
    """
    config = resolved.config
    parallel = config.parallel
    least = config.launch.min_dp
    replica = parallel.tp * parallel.cp * parallel.pp
    dp = world_size // replica
    if not least or world_size % replica or dp in (0, parallel.dp):
        return resolved
    if dp < least:
        text = f"{world_size} ranks make {dp} replicas of {replica}; start more ranks, or lower launch.min_dp"
        raise ConfigError(problem(config, "launch.min_dp", text))
    if dp > parallel.dp > 0:
        return resolved
    launch = replace(config.launch, nproc=world_size if config.launch.nproc else 0)
    changed = replace(config, parallel=replace(parallel, dp=dp), launch=launch)
    return Resolved(changed, {**resolved.sources, "parallel.dp": SOURCE})
