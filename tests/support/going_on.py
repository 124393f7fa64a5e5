"""Training that begins in another framework and goes on here, or the other way round, on the same tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megapar_models.build import build_stages
from megapar_models.registry import validate
from torch import Tensor

from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.model_options import ModelConfig
from megapar.config.options import CheckpointConfig, Config, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.launch.grid import grid_of
from megapar.step.step import train_step
from megapar.train.saver import Saver
from megapar.train.trainer import start
from tests.support.distributed import run_ranks

ADAMW = OptimizerConfig(lr=1e-2, schedule="constant", betas=(0.9, 0.95), weight_decay=0.1, clip_grad=0.0)


def config_of(
    model: ModelConfig, samples: int, length: int, decay: float = 0.1, name: str = "adamw", **parallel: Any
) -> Config:
    """Options of a run in fp32 by AdamW or Muon with a constant rate, validated for its ranks."""
    config = Config(
        model=model,
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(steps=99, global_batch_size=samples, seq_length=length),
        optimizer=replace(ADAMW, weight_decay=decay, name=name),
    )
    ranks = config.parallel.tp * config.parallel.pp * max(1, config.parallel.dp)
    return validate(config, ranks)


def go_on(
    config: Config, checkpoint: Path | None, run_dir: Path, steps: int, tokens_of: Callable[[int], Tensor]
) -> tuple[list[float], Path]:
    """Train `steps` steps from a native checkpoint, or from random weights. Returns the losses and a new checkpoint.

    `tokens_of` returns the tokens [samples, length + 1] of a step, counted from 0. Runs ranks of their own.
    """
    found = run_ranks(grid_of(config).world_size, _train, config, checkpoint, run_dir, steps, tokens_of)
    return found[0]


def _train(
    config: Config, checkpoint: Path | None, run_dir: Path, steps: int, tokens_of: Callable[[int], Tensor]
) -> tuple[list[float], Path]:
    resume = "none" if checkpoint is None else str(checkpoint)
    config = replace(config, run_dir=str(run_dir), checkpoint=CheckpointConfig(resume=resume))
    ctx = context.create(grid_of(config))
    run_dir.mkdir(parents=True, exist_ok=True)
    state, _ = start(config, ctx, build_stages(config, ctx))
    losses = []
    for _ in range(steps):
        tokens = tokens_of(state.step)
        batches = []
        for sample in range(ctx.dp.rank, len(tokens), ctx.dp.size):
            row = tokens[sample : sample + 1]
            ids = torch.tensor([state.consumed_samples + sample])
            batches.append(MicroBatch.of_samples(row[:, :-1], row[:, 1:], torch.ones(1, row.shape[1] - 1), ids))
        losses.append(train_step(state, batches).loss)
    with Saver(state, run_dir) as saver:
        (path, *_) = saver.save(state)
    return losses, path


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of a native checkpoint by their logical names."""
    manifest = read_manifest(checkpoint)
    with Reader(checkpoint, manifest) as reader:
        return {
            name.removeprefix("main."): reader.tensor(name) for name in manifest.tensors if name.startswith("main.")
        }
