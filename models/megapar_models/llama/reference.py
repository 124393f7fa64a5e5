"""Llama in plain PyTorch: what tests compare `model.py` with in every layout."""

import math

import torch
from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar_models.reference import Tensors, activate, attend, heads, linear, logits_of_layers
from megapar_models.rotary_options import RotaryModel


def logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary. Positions count from 0 in each sample."""
    x_bsh = tensors["embedding.weight"][tokens_bs]
    return logits_of_layers(model, tensors, x_bsh, norm=rms_norm, attention=attention, mlp=mlp)


def rms_norm(model: ModelConfig, tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """RMSNorm with weight."""
    return x / (x.pow(2).mean(-1, keepdim=True) + model.rms_norm_eps).sqrt() * tensors[f"{name}.weight"]


def _rope_frequency(model: RotaryModel, pair: int) -> float:
    """Radians per position of the pair (pair, pair + d/2)."""
    frequency = model.rope_theta ** (-2 * pair / model.head_dim)
    scaling = model.rope_scaling
    if scaling.rope_type == "default":
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    context = scaling.original_max_position_embeddings
    if scaling.rope_type == "yarn":
        first, last = _yarn_mixed_pairs(model)
        stretch = min(max((pair - first) / (last - first), 0.0), 1.0)
        return (1 - stretch) * frequency + stretch * frequency / scaling.factor
    assert scaling.rope_type == "llama3"
    if wavelength > context / scaling.low_freq_factor:
        return frequency / scaling.factor
    if wavelength < context / scaling.high_freq_factor:
        return frequency
    smooth = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn_mixed_pairs(model: RotaryModel) -> tuple[float, float]:
    """YaRN: the last pair with its frequency kept, and the first one with its frequency divided by the factor."""
    scaling = model.rope_scaling
    ends = []
    for turns in (scaling.beta_fast, scaling.beta_slow):
        # The pair whose wavelength is context / turns: 2 pi theta^(2 pair / d) = context / turns.
        wavelength = scaling.original_max_position_embeddings / turns
        ends.append(model.head_dim / 2 * math.log(wavelength / (2 * math.pi), model.rope_theta))
    first, last = ends
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.head_dim - 1)
    return first, last + (0.001 if first == last else 0)


def _attention_factor(model: RotaryModel) -> float:
    """YaRN: what cos and sin are multiplied by."""
    scaling = model.rope_scaling
    if scaling.rope_type != "yarn":
        return 1.0
    stretch = math.log(max(scaling.factor, 1.0)) / 10
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return (1 + scaling.mscale * stretch) / (1 + scaling.mscale_all_dim * stretch)
    return 1 + stretch


def _rotate(model: RotaryModel, x_bnsd: Tensor) -> Tensor:
    half = model.head_dim // 2
    frequencies = torch.tensor([_rope_frequency(model, pair) for pair in range(half)], dtype=torch.float64)
    angles = torch.arange(x_bnsd.shape[2], dtype=torch.float64)[:, None] * frequencies
    factor = _attention_factor(model)
    cos, sin = (factor * angles.cos()).to(x_bnsd), (factor * angles.sin()).to(x_bnsd)
    first, second = x_bnsd[..., :half], x_bnsd[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(model: RotaryModel, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    """Causal attention with rotary positions; with biases and norms of q and k if the model has them."""
    q, k, v = (heads(model, tensors, f"{name}.{letter}", x_bsh) for letter in "qkv")
    if f"{name}.q_norm.weight" in tensors:
        q = rms_norm(model, tensors, f"{name}.q_norm", q)
        k = rms_norm(model, tensors, f"{name}.k_norm", k)
    outputs = attend(_rotate(model, q), _rotate(model, k), v)
    return linear(tensors, f"{name}.o", outputs)


def mlp(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    """down(act(gate x) * up x)."""
    gate = activate(model, linear(tensors, f"{name}.gate", x_bsh))
    return linear(tensors, f"{name}.down", gate * linear(tensors, f"{name}.up", x_bsh))
