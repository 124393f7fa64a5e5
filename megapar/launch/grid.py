"""The rank grid that a run's options ask for."""

from collections.abc import Callable
from functools import partial

from megapar.config.options import Config
from megapar.context import ParallelContext
from megapar.pipeline.schedules import embedding_ranks


def with_grid(make: Callable[..., ParallelContext], config: Config) -> Callable[..., ParallelContext]:
    """`make`, which is `context.create` or `context.planned`, with the arguments that the options `parallel` decide.

    `config` must be validated. A run and its plan both come here, so that they have the same grid.
    """
    parallel = config.parallel
    experts = {}
    if config.model.moe.num_experts:
        experts = {"ep": parallel.ep, "etp": parallel.etp}
    return partial(
        make,
        tp=parallel.tp,
        cp=parallel.cp,
        dp=parallel.dp,
        pp=parallel.pp,
        order=parallel.order,
        tied=embedding_ranks(parallel),
        shard_ranks=config.optimizer.shard_ranks,
        **experts,
    )
