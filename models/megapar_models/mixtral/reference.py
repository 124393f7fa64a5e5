"""Mixtral in plain PyTorch: what tests compare `model.py` with in every layout."""

from torch import Tensor

from megapar.config.options import ModelConfig
from megapar_models.llama.reference import attention, mlp, rms_norm
from megapar_models.reference import Tensors, logits_of_layers, mixture


def logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary. Positions count from 0 in each sample."""
    x_bsh = tensors["embedding.weight"][tokens_bs]
    return logits_of_layers(model, tensors, x_bsh, norm=rms_norm, attention=attention, mlp=_experts)


def _experts(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    return mixture(model, tensors, name, x_bsh, mlp)
