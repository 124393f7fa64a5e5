"""Qwen3's mixtures in plain PyTorch: what tests compare `model.py` with in every layout."""

from torch import Tensor

from megapar_models.llama.reference import attention, mlp, rms_norm
from megapar_models.qwen3_moe.model import Qwen3MoeModel
from megapar_models.reference import Tensors, logits_of_layers, mixture


def logits(model: Qwen3MoeModel, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary. Positions count from 0 in each sample."""
    x_bsh = tensors["embedding.weight"][tokens_bs]
    return logits_of_layers(model, tensors, x_bsh, norm=rms_norm, attention=attention, mlp=_experts_or_mlp)


def _experts_or_mlp(model: Qwen3MoeModel, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    layer = int(name.split(".")[1])  # layers.N.mlp
    if layer in model.moe.mlp_only_layers:
        return mlp(model, tensors, name, x_bsh)
    return mixture(model, tensors, name, x_bsh, mlp)
