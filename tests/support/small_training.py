"""A model of three small layers and its training state, for tests of checkpoints."""

from typing import Any

import torch
from megapar_models.build import build_stages
from megapar_models.registry import validate

from megapar.config.options import Config, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.declare.random import initialize
from megapar.launch.grid import grid_of
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.trainer import assemble
from tests.support import tiny_models

SAMPLES = 4  # of a global batch
LENGTH = 8  # of a sample, in tokens
MODEL = tiny_models.small("llama", 12, 3, 20, num_key_value_heads=1, head_dim=4, tie_word_embeddings=True)


MODEL_CONFIG = {"hidden_size": 12, "num_hidden_layers": 3}


def make_config(precision: str = "fp32", zero_stage: int = 1, shard_ranks: int = 0, **parallel: Any) -> Config:
    bucket_mb = 0.0 if zero_stage >= 2 else 1 / 1024
    config = Config(
        model=MODEL,
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(global_batch_size=SAMPLES, seq_length=LENGTH, precision=precision),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=1e-2, zero_stage=zero_stage, shard_ranks=shard_ranks, bucket_mb=bucket_mb),  # type: ignore[arg-type]
    )
    return validate(config, config.parallel.tp * config.parallel.pp * max(config.parallel.dp, 1))


def make_state(config: Config, seed: int = 1) -> TrainState:
    ctx = context.create(grid_of(config))
    stages = build_stages(config, ctx)
    initialize(stages.values(), seed)
    return assemble(config, ctx, stages)


def step(state: TrainState) -> None:
    """Train on samples decided by the step number."""
    ctx = state.ctx
    tokens = torch.randint(131, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(state.step))
    batches = []
    for sample in range(ctx.dp.rank, SAMPLES, ctx.dp.size):
        row = tokens[sample : sample + 1]
        ids = torch.tensor([state.consumed_samples + sample])
        batches.append(MicroBatch.of_samples(row[:, :-1], row[:, 1:], torch.rand(1, LENGTH), ids))
    train_step(state, batches)
