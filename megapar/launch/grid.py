"""The rank grid for a run's options."""

from megapar.base.grid import Grid
from megapar.config.options import Config
from megapar.pipeline.schedules import embedding_ranks


def grid_of(config: Config) -> Grid:
    """The grid of a run and of its plan. `config` must be validated."""
    parallel = config.parallel
    model = config.model
    has_experts = model.num_experts > 0
    last_uses_embedding = model.tie_word_embeddings or model.embeds_on_last_stage
    return Grid(
        tp=parallel.tp,
        cp=parallel.cp,
        dp=parallel.dp,
        pp=parallel.pp,
        ep=parallel.ep if has_experts else 0,
        etp=parallel.etp if has_experts else 1,
        order=parallel.order,
        shard_ranks=config.optimizer.shard_ranks,
        tied=embedding_ranks(parallel) if last_uses_embedding else (),
        planes=config.optimizer.name == "muon",
    )
