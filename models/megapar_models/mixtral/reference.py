"""Mixtral in plain PyTorch: what tests compare `model.py` with in every layout."""

from torch import Tensor

from megapar_models.llama.reference import attention, mlp, rms_norm
from megapar_models.mixtral.model import MixtralModel
from megapar_models.reference import Tensors, logits_of_layers, mixture


def logits(model: MixtralModel, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary. Positions count from 0 in each sample."""
    x_bsh = tensors["embedding.weight"][tokens_bs]
    return logits_of_layers(model, tensors, x_bsh, norm=rms_norm, attention=attention, mlp=_experts)


def _experts(model: MixtralModel, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    return mixture(model, tensors, name, x_bsh, mlp)
