"""Builds this rank's pipeline stages from a configuration, and counts a model's parameters and FLOPs."""

import torch

from megapar.config import Config, ModelConfig
from megapar.context import ParallelContext, single
from megapar.device import choose_kernels
from megapar.linear import MatrixProducts
from megapar.params import Piece, spec_of
from megapar.pipeline.partition import explicit, partition
from megapar.pipeline.schedules import embedding_ranks, placement
from megapar.precision import model_dtype
from megapar.recompute import Recompute
from megapar.tensor_parallel.layers import Sharding
from megapar_models.registry import find
from megapar_models.stage import Blueprint, Stage


def build_stages(config: Config, ctx: ParallelContext) -> dict[int, Stage]:
    """Build this rank's stages on the context's device, uninitialized; returns them by global stage number.

    The schedule decides which rank has which stage. `config` must be validated. With a context on the meta device the
    stages have shapes and no memory.
    """
    model = config.model
    first_rank, last_rank = embedding_ranks(config.parallel)
    kernels = choose_kernels(config.kernels.backend, ctx.device)
    sharding = Sharding(
        ctx.tp,
        ctx.grad,
        config.parallel.sequence_parallel,
        model_dtype(config.train.precision),
        ctx.device,
        MatrixProducts(kernels.weight_gradient),
    )
    blueprint = Blueprint(
        model,
        sharding,
        Recompute(config.train.recompute, config.train.recompute_every),
        config.train.seed,
        tied=ctx.ends if model.tie_word_embeddings and first_rank != last_rank else None,
        kernels=kernels,
        z_loss=config.train.z_loss,
        loss_chunk=config.kernels.loss_chunk,
    )
    layers = stage_layers(config)
    stages: dict[int, Stage] = {}
    for number, rank in enumerate(placement(config.parallel.schedule, ctx.pp.size, config.parallel.vpp)):
        if rank != ctx.pp.rank:
            continue
        # If one rank has the first and the last stage, both use one parameter for the tied embedding. Otherwise the
        # last stage makes a copy, and the axis `tied` of the blueprint sums the gradients of both.
        tied = None
        if model.tie_word_embeddings and first_rank == last_rank and 0 < number == len(layers) - 1:
            tied = stages[0].embedding_weight()
        stages[number] = find(model.family).stage(
            blueprint, layers[number], first=number == 0, last=number == len(layers) - 1, tied=tied
        )
    return stages


def stage_layers(config: Config) -> list[range]:
    """The layers of each of the pp * vpp stages: those of `parallel.partition`, or a split that balances the cost.

    The cost is in FLOPs per token. Head and loss count on the last stage. The embedding's lookup is nearly free.
    """
    model = config.model
    parallel = config.parallel
    num_stages = parallel.pp * parallel.vpp
    if parallel.partition:
        return explicit(parallel.partition, model.num_hidden_layers, num_stages)
    numel = {name: torch.Size(piece.shape).numel() for name, piece in logical_tensors(model).items()}
    layer = sum(n for name, n in numel.items() if name.startswith("layers.0."))
    scores = config.train.seq_length * model.num_attention_heads * model.head_dim
    costs = [float(layer + scores)] * model.num_hidden_layers
    return partition(costs, float(model.hidden_size), float(model.vocab_size * model.hidden_size), num_stages)


def logical_tensors(model: ModelConfig) -> dict[str, Piece]:
    """Every logical tensor of the model by name. A tied embedding is listed once."""
    # Built on the meta device, so that no count of parameters is written down a second time.
    alone = single()
    sharding = Sharding(alone.tp, alone.grad, False, torch.float32, torch.device("meta"))
    blueprint = Blueprint(model, sharding, Recompute(), seed=0)
    stage = find(model.family).stage(blueprint, range(model.num_hidden_layers), first=True, last=True)
    return {piece.name: piece for param in stage.parameters() for piece in spec_of(param).pieces}


def parameter_count(model: ModelConfig) -> int:
    """The number of parameters of the whole model, without padding of the vocabulary. A tied embedding counts once."""
    return sum(torch.Size(piece.shape).numel() for piece in logical_tensors(model).values())


def flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """The FLOPs of forward and backward for one token.

    Each weight of a matrix product counts 6: those of the head do, those of the embedding's lookup do not. Causal
    attention counts 6 * s * heads * head_dim for each layer, because half of its s^2 scores are computed. As in
    Megatron-LM, attention counts over the whole sample, also if data.documents=apart computes less.
    """
    matrices = sum(
        torch.Size(piece.shape).numel()
        for name, piece in logical_tensors(model).items()
        if len(piece.shape) == 2 and name not in ("embedding.weight", "positions.weight", "head.weight")
    )
    # Added by hand: a tied head is listed as the embedding, which is left out above.
    head = model.vocab_size * model.hidden_size
    scores = seq_length * model.num_attention_heads * model.head_dim * model.num_hidden_layers
    return 6 * (matrices + head + scores)
