"""A layer: a mixer of tokens and an MLP, each a branch of the residual stream. `LayerKind` says what both are."""

from collections.abc import Mapping

from torch import Tensor, nn

from megapar.config.options import ModelConfig
from megapar.config.plugins import named
from megapar_models.attention import Attention
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind
from megapar_models.mlp import DenseMLP
from megapar_models.moe import MixtureOfExperts
from megapar_models.norms import NoNorm, Norm

# A mixer and an MLP are made as CLASS(number, kind, model, factory), and map x_sbh and a ForwardContext to x_sbh.
MIXERS: Mapping[str, type] = {"attention": Attention}
MLPS: Mapping[str, type] = {"dense": DenseMLP, "mixture": MixtureOfExperts}


class Layer(nn.Module):
    """h = x + attention(norm(x)), then h + mlp(norm(h)).

    Each norm may stand before its branch, behind it, or both (`LayerKind.norms`). Behind a branch it normalizes what
    is added to the residual stream. The mixer is called attention whatever it is.
    """

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        name = f"layers.{number}"

        def norm(module: str, placement: str) -> Norm:
            if kind.norms not in (placement, "both"):
                return NoNorm()
            return factory.norm(f"{name}.{module}", model.hidden_size, kind.norm)

        mixer = named(f"the mixer of layer {number}", kind.mixer, MIXERS, type)
        mlp = named(f"the MLP of layer {number}", kind.mlp, MLPS, type)
        self.attention_norm = norm("attention_norm", "before")
        self.attention: nn.Module = mixer(number, kind, model, factory)
        self.attention_output_norm = norm("attention_output_norm", "after")
        self.mlp_norm = norm("mlp_norm", "before")
        self.mlp: nn.Module = mlp(number, kind, model, factory)
        self.mlp_output_norm = norm("mlp_output_norm", "after")

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        attention_sbh = self.attention_output_norm(self.attention(self.attention_norm(x_sbh), context))
        # h = x + attention, and its norm: one kernel computes both.
        normed_sbh, h_sbh = self.mlp_norm.add_and_norm(attention_sbh, residual=x_sbh)
        del attention_sbh  # its memory is free during the MLP
        return h_sbh + self.mlp_output_norm(self.mlp(normed_sbh, context))
