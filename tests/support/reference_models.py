"""Loss and gradients of each model family's plain PyTorch version (its `Family.reference`): every layout must agree
with them."""

from collections.abc import Mapping, Sequence

import torch
from megapar_models.registry import find
from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar.declare.batch import MicroBatch

Tensors = Mapping[str, Tensor]


def logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary, without dropout."""
    reference = find(model.family).reference
    assert reference is not None, f"family {model.family} has no plain version"
    return reference(model, tensors, tokens_bs)


def loss(model: ModelConfig, tensors: Tensors, batch: MicroBatch, z_loss: float = 0.0) -> Tensor:
    """Sum over targets of weight * (cross entropy + z_loss * log-sum-exp^2)."""
    z = logits(model, tensors, batch.tokens_bs)
    normalizer = z.logsumexp(-1)
    picked = z.gather(-1, batch.targets_bs[..., None])[..., 0]
    losses = normalizer - picked + z_loss * normalizer**2
    return (losses * batch.weights_bs.to(z.dtype)).sum()


def loss_and_gradients(
    model: ModelConfig,
    tensors: Tensors,
    batches: Sequence[MicroBatch],
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    z_loss: float = 0.0,
) -> tuple[float, dict[str, Tensor]]:
    """The batches' scaled loss sum and its gradient in every tensor, computed in `dtype`."""
    leaves = {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in tensors.items()}
    total = torch.stack([loss(model, leaves, batch, z_loss) for batch in batches]).sum() * scale
    total.backward()
    return total.item(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
