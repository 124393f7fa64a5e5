"""GPT-2 in plain PyTorch, without dropout: what tests compare `model.py` with in every layout."""

from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar_models.reference import Tensors, activate, attend, heads, linear, logits_of_layers


def logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary. Positions count from 0 in each sample."""
    x_bsh = tensors["embedding.weight"][tokens_bs] + tensors["positions.weight"][: tokens_bs.shape[1]]
    return logits_of_layers(model, tensors, x_bsh, norm=_layer_norm, attention=_attention, mlp=_mlp)


def _layer_norm(model: ModelConfig, tensors: Tensors, name: str, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + model.rms_norm_eps).sqrt() * tensors[f"{name}.weight"]
    return x + tensors[f"{name}.bias"]


def _attention(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    q, k, v = (heads(model, tensors, f"{name}.{letter}", x_bsh) for letter in "qkv")
    return linear(tensors, f"{name}.o", attend(q, k, v))


def _mlp(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    return linear(tensors, f"{name}.down", activate(model, linear(tensors, f"{name}.up", x_bsh)))
