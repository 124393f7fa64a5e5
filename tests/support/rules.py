"""Compares models of layers by rules with a few lines of plain PyTorch: the loss and every gradient, in fp64."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from megapar_models import reference as plain
from megapar_models.reference import Tensors
from megapar_tools.verify import logical
from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar.config.options import KernelsConfig
from megapar.declare import context
from tests.support import tiny_models

attention_plainly = plain.attention


def check_against_plain(
    model: ModelConfig,
    logits: Callable[[ModelConfig, Tensors, Tensor], Tensor],
    loss_chunk: int = 0,
    starts: Tensor | None = None,
    length: int = 24,
    samples: int = 2,
) -> None:
    """`logits(model, tensors, tokens_bs)` are those of the whole vocabulary. No tensor is 0 or 1."""
    config = tiny_models.config(model)
    config = replace(config, kernels=KernelsConfig(loss_chunk=loss_chunk))
    batch = replace(tiny_models.batch(model, samples=samples, length=length), starts=starts)
    stage = tiny_models.build(config, context.single()).double()
    tensors = {name: x.double().requires_grad_() for name, x in tiny_models.random_tensors(model).items()}
    logical.fill([stage], {name: x.detach() for name, x in tensors.items()})
    loss = stage(None, batch)
    loss.backward()
    expected_logits = logits(config.model, tensors, batch.tokens_bs)
    losses = F.cross_entropy(expected_logits.flatten(0, 1), batch.targets_bs.flatten(), reduction="none")
    expected = (losses * batch.weights_bs.flatten().double()).sum()
    expected.backward()
    # Angles of rotary tables are fp32, and so are some sums of losses.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    found = gradients(stage)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.grad is not None, name
        scale = tensor.grad.abs().max().item()
        assert scale > 0, name
        difference = (found[name] - tensor.grad).abs().max().item()
        assert difference <= 1e-4 * scale, f"{name}: {difference} of {scale}"


def rotated(model: ModelConfig, x_bnsd: Tensor, width: int) -> Tensor:
    """The first `width` dimensions rotated, as if the head had no others."""
    narrow = replace(model, head_dim=width)
    return torch.cat((plain._rotate(narrow, x_bnsd[..., :width]), x_bnsd[..., width:]), dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, scale: float, cap: float) -> Tensor:
    """Attention with explicit scores, [b, s, n d]."""
    run = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(run, 1).transpose(-1, -2) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    probabilities = scores.softmax(-1)[..., : q.shape[2]]
    return (probabilities @ v.repeat_interleave(run, 1)).transpose(1, 2).flatten(2)


def gradients(stage: torch.nn.Module) -> dict[str, Tensor]:
    """The gradient of every logical tensor of a whole model."""
    found = {}
    for param in stage.parameters():
        for piece, first, last in param.spec.segments():
            assert param.grad is not None, piece.name
            found[piece.name] = param.grad.flatten()[first:last].view(piece.shape)
    return found
