"""A layer: a mixer of tokens and an MLP, each a branch of the residual stream. `LayerKind` says what both are."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megapar.activations import recompute
from megapar.config.model_options import ModelConfig
from megapar.config.plugins import named
from megapar_models.attention import Attention
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.latent_attention import LatentAttention
from megapar_models.layer_kind import LayerKind
from megapar_models.mlp import DenseMLP, PlainMLP
from megapar_models.moe import MixtureOfExperts
from megapar_models.norms import NoNorm, Norm

# A mixer and an MLP are made as CLASS(number, kind, model, factory), and map x_sbh and a ForwardContext to x_sbh.
MIXERS: Mapping[str, type] = {"attention": Attention, "latent": LatentAttention}
MLPS: Mapping[str, type] = {"dense": DenseMLP, "plain": PlainMLP, "mixture": MixtureOfExperts}


class Layer(nn.Module):
    """h = x + attention(norm(x)), then h + mlp(norm(h)).

    Each norm may stand before its branch, behind it, or both (`LayerKind.norms`). Behind a branch it normalizes what
    is added to the residual stream. The mixer is called attention whatever it is.

    Parallel branches (`LayerKind.parallel`) both read x, as in GPT-J and PaLM (arXiv 2204.02311):
    x + attention(norm(x)) + mlp(norm(x)).
    """

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        name = f"layers.{number}"
        self.parallel = kind.parallel
        self.multiplier = kind.residual_multiplier

        def norm(module: str, placement: str) -> Norm:
            if kind.norms not in (placement, "both"):
                return NoNorm()
            return factory.norm(f"{name}.{module}", model.hidden_size, kind.norm)

        mixer = named(f"the mixer of layer {number}", kind.mixer, MIXERS, type)
        mlp = named(f"the MLP of layer {number}", kind.mlp, MLPS, type)
        self.attention_norm = norm("attention_norm", "before")
        self.attention: nn.Module = mixer(number, kind, model, factory)
        self.attention_output_norm = norm("attention_output_norm", "after")
        self.mlp_norm = NoNorm() if kind.parallel == "one_norm" else norm("mlp_norm", "before")
        self.mlp: nn.Module = mlp(number, kind, model, factory)
        self.mlp_output_norm = norm("mlp_output_norm", "after")

    def forward(
        self, x_sbh: Tensor, context: ForwardContext, branch_sbh: Tensor | None = None, *, adds: bool = True
    ) -> Any:
        """The hidden states after the layer. Without `adds` their two summands: h, and the last branch's output.

        `branch_sbh` is the second one of the layer before. One kernel adds it to x, the first, and normalizes the sum.
        """
        if branch_sbh is None:
            normed_sbh = recompute.remade(self.attention_norm, x_sbh)
        else:
            normed_sbh, x_sbh = self.attention_norm.add_and_norm(branch_sbh, residual=x_sbh)
            recompute.remade_as(normed_sbh, self.attention_norm, x_sbh)
        attention_sbh = self._branch(self.attention_output_norm(self.attention(normed_sbh, context)))
        if self.parallel == "no":
            del normed_sbh  # its memory is free during the MLP
            # h = x + attention, and its norm: one kernel computes both.
            normed_sbh, h_sbh = self.mlp_norm.add_and_norm(attention_sbh, residual=x_sbh)
            recompute.remade_as(normed_sbh, self.mlp_norm, h_sbh)
        else:
            if self.parallel == "two_norms":
                normed_sbh = recompute.remade(self.mlp_norm, x_sbh)
            h_sbh = x_sbh + attention_sbh
        del attention_sbh
        branch_sbh = self._branch(self.mlp_output_norm(self.mlp(normed_sbh, context)))
        return h_sbh + branch_sbh if adds else (h_sbh, branch_sbh)

    def _branch(self, y_sbh: Tensor) -> Tensor:
        """The output of a branch, times the multiplier of both."""
        return y_sbh if self.multiplier == 1.0 else y_sbh * self.multiplier
