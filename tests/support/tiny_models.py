"""Models of a few thousand weights, their batches and random weights, for comparisons of gradients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megapar_models.build import build_stages
from megapar_models.counts import WholeModel
from megapar_models.registry import find, validate
from megapar_models.stage import Stage
from megapar_tools.verify import logical
from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar.config.options import NO_ADAPTER, AdapterConfig, Config, ParallelConfig, TrainConfig
from megapar.declare.batch import MicroBatch
from megapar.declare.context import ParallelContext

LENGTH = 48  # beyond what rope_scaling calls the original context in some tests


def small(family: str, hidden_size: int, layers: int, intermediate_size: int, **changes: Any) -> Any:
    """Four heads, and a prime vocabulary size, of the class of the family's options."""
    base = find(family).options(
        family=family,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=intermediate_size,
        vocab_size=131,
    )
    return replace(base, **changes)


def model(family: str, **changes: Any) -> Any:
    """Two layers of sizes other than powers of two; an eps large enough to matter."""
    base = small(family, 48, 2, 88, max_position_embeddings=LENGTH + 2, rms_norm_eps=1e-3)
    return replace(base, **changes)


def config(model: ModelConfig, tp: int = 1, sequence_parallel: bool = False, **train: Any) -> Config:
    """Validated, for `tp` ranks; `train` are TrainConfig's fields."""
    parallel = ParallelConfig(tp=tp, sequence_parallel=sequence_parallel)
    return validate(Config(model=model, parallel=parallel, train=TrainConfig(seq_length=LENGTH, **train)), tp)


def batch(model: ModelConfig, seed: int = 0, samples: int = 2, length: int = LENGTH) -> MicroBatch:
    """Random tokens; every target has its own weight, a few weigh nothing."""
    generator = torch.Generator().manual_seed(seed)
    tokens_bs = torch.randint(model.vocab_size, (samples, length + 1), generator=generator)
    weights_bs = 0.1 + torch.rand(samples, length, generator=generator)
    weights_bs[0, 3:5] = 0.0
    weights_bs[-1, 7] = 0.0
    return MicroBatch.of_samples(tokens_bs[:, :-1], tokens_bs[:, 1:], weights_bs, torch.arange(samples) + 1000 * seed)


def joined(batches: Sequence[MicroBatch]) -> MicroBatch:
    """One micro-batch of all samples."""
    names = ["tokens_bs", "targets_bs", "weights_bs", "sample_ids_b"]
    return MicroBatch.of_samples(*(torch.cat([getattr(batch, name) for batch in batches]) for name in names))


def random_tensors(model: ModelConfig, seed: int = 0, adapter: AdapterConfig = NO_ADAPTER) -> dict[str, Tensor]:
    """Every logical tensor, N(0, 0.1); norms' weights around 1. Nothing is zero, so no gradient hides."""
    generator = torch.Generator().manual_seed(seed)
    pieces = WholeModel(model, adapter).tensors()
    tensors = {name: torch.randn(piece.shape, generator=generator) * 0.1 for name, piece in pieces.items()}
    return {name: tensor + name.endswith("norm.weight") for name, tensor in tensors.items()}


def build(config: Config, ctx: ParallelContext, seed: int = 0) -> Stage:
    """The whole model in one stage, with `random_tensors` as weights."""
    (stage,) = build_stages(config, ctx).values()
    logical.fill([stage], random_tensors(config.model, seed, config.adapter))
    return stage
