"""The rank grid for a run's options."""

from megapar.base.grid import Grid
from megapar.config.options import Config
from megapar.optimizer import table
from megapar.pipeline.schedules import embedding_ranks


def grid_of(config: Config) -> Grid:
    """Return the grid of a run and of its plan. `config` must be validated.

    The schedule says which ranks hold copies of the embedding, and the optimizers whether ranks join matrices.
    """
    parallel = config.parallel
    model = config.model
    has_experts = model.num_experts > 0
    last_uses_embedding = model.tie_word_embeddings or model.embeds_on_last_stage
    optimizers = (config.optimizer.name, *model.optimizers_of_layers)
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
        planes=any(table.find(name).JOINS_MATRICES for name in optimizers),
    )
