"""From a configuration to this rank's pipeline stages, and to the model's size and FLOPs by its ParamSpecs."""

from collections.abc import Sequence

import torch

from megapar.config import ModelConfig
from megapar.context import ParallelContext, single
from megapar.params import Piece, spec_of
from megapar.recompute import Recompute
from megapar.tensor_parallel.layers import Sharding
from megapar_models.gpt import GPTStage
from megapar_models.llama import LlamaStage
from megapar_models.stage import Blueprint, Stage

FAMILIES: dict[str, type[Stage]] = {"gpt": GPTStage, "llama": LlamaStage}


def build_stages(
    model: ModelConfig,
    ctx: ParallelContext,
    layers: Sequence[range],
    *,
    seed: int,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute | None = None,
    device: torch.device | None = None,
) -> dict[int, Stage]:
    """This rank's stages by global stage number, uninitialised. `layers` holds every stage's layers; stage s sits on
    pipeline rank s % pp. `device` defaults to the context's; "meta" builds shapes alone."""
    blueprint = Blueprint(
        model,
        Sharding(ctx.tp, sequence_parallel, dtype, device or ctx.device),
        recompute or Recompute(),
        seed,
        tie_stages=model.tie_word_embeddings and ctx.pp.size > 1,
    )
    family, count = FAMILIES[model.family], len(layers)
    stages: dict[int, Stage] = {}
    for number in range(ctx.pp.rank, count, ctx.pp.size):
        tied = None
        if model.tie_word_embeddings and ctx.pp.size == 1 and 0 < number == count - 1:
            embedding = stages[0].embedding
            assert embedding is not None
            tied = embedding.weight
        stages[number] = family(blueprint, layers[number], first=number == 0, last=number == count - 1, tied=tied)
    return stages


def logical_tensors(model: ModelConfig) -> dict[str, Piece]:
    """Every logical tensor of the model by name, a tied embedding once."""
    context = single(torch.device("meta"))
    stage = build_stages(model, context, [range(model.num_hidden_layers)], seed=0)[0]
    pieces = (piece for param in stage.parameters() for piece in spec_of(param).pieces)
    return {piece.name: piece for piece in pieces}


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model: the true vocabulary, tied embeddings once."""
    return sum(torch.Size(piece.shape).numel() for piece in logical_tensors(model).values())


def flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """FLOPs of forward and backward for one token: 6 for each weight of a matrix multiplication (the head's included,
    the lookup not) and 6 s (heads * head_dim) a layer for causal attention, whose s^2 scores count half. As
    Megatron-LM counts.
    """
    pieces = logical_tensors(model)
    matrices = sum(
        torch.Size(piece.shape).numel()
        for name, piece in pieces.items()
        if len(piece.shape) == 2 and name not in ("embedding.weight", "positions.weight")
    )
    if model.tie_word_embeddings:
        matrices += model.vocab_size * model.hidden_size
    attention = seq_length * model.num_attention_heads * model.head_dim * model.num_hidden_layers
    return 6 * (matrices + attention)


def layer_costs(model: ModelConfig, seq_length: int) -> tuple[float, float, float]:
    """Relative time of (one layer, the embedding, norm and head with loss), in FLOPs per token; a lookup is nearly
    free."""
    pieces = logical_tensors(model)
    layer = sum(torch.Size(p.shape).numel() for name, p in pieces.items() if name.startswith("layers.0."))
    attention = seq_length * model.num_attention_heads * model.head_dim
    return 6.0 * (layer + attention), 6.0 * model.hidden_size, 6.0 * model.vocab_size * model.hidden_size
