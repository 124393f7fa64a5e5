"""A Llama for benchmarks of single options: the model, its state on a rank, and random tokens for it."""

import torch
from megapar_models.build import build_stages
from megapar_models.families.llama import LlamaModel

from megapar.config.options import Config
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.declare.random import initialize
from megapar.launch.grid import grid_of
from megapar.step.state import TrainState
from megapar.train.trainer import assemble


def small_llama(width: int, layers: int, length: int) -> LlamaModel:
    """`width` is a multiple of 128: two query heads of 64 share a key/value head. Samples have `length` tokens."""
    return LlamaModel(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=4096,
        max_position_embeddings=length,
    )


def make_state(config: Config, device: torch.device = torch.device("cpu")) -> TrainState:  # noqa: B008 (immutable)
    """The state of this rank. Its weights follow from train.seed alone."""
    ctx = context.create(grid_of(config), device=device) if config.parallel.dp > 1 else context.single(device)
    stages = build_stages(config, ctx)
    initialize(stages.values(), config.train.seed)
    return assemble(config, ctx, stages)


def make_batch(config: Config) -> MicroBatch:
    """A micro-batch of random tokens, the same each time."""
    samples, length = config.train.micro_batch_size, config.train.seq_length
    generator = torch.Generator().manual_seed(1)
    tokens_bs = torch.randint(config.model.vocab_size, (samples, length + 1), generator=generator)
    inputs_bs, targets_bs = tokens_bs[:, :-1].clone(), tokens_bs[:, 1:].clone()
    return MicroBatch.of_samples(inputs_bs, targets_bs, torch.ones(samples, length), torch.arange(samples))
