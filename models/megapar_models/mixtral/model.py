"""Mixtral (arXiv 2401.04088): Llama with a mixture of experts in place of the MLP.

These are the weights that Llama does not have (see megapar_models.llama.model for the others). Sizes are h hidden,
f the width of an expert, and E experts:

    layers.N.mlp.router.weight                  [E, h]    on every tp rank; each computes a part of its gradient
    layers.N.mlp.router.bias                    [E]       balance=bias alone: no parameter, but state
    layers.N.mlp.experts.K.{gate,up}.weight     [f, h]    on the ep rank of expert K; cut by output over etp
    layers.N.mlp.experts.K.down.weight          [h, f]    on the ep rank of expert K; cut by input over etp
    layers.N.mlp.shared.{gate,up,down}.weight             an expert for every token (optional), cut as an MLP
    layers.N.mlp.shared_gate.weight             [1, h]    on every tp rank (optional)
"""

from torch import Tensor, nn

from megapar_models.attention import Attention
from megapar_models.llama.model import GATED, LlamaMLP, LlamaStage, RMSNorm
from megapar_models.moe import MixtureOfExperts, SharedExpert
from megapar_models.stage import Blueprint, ForwardContext


def mixture(number: int, blueprint: Blueprint) -> MixtureOfExperts:
    """The mixture of experts of a layer, with a shared expert if the options ask for one."""
    model = blueprint.model
    shared = None
    if model.moe.shared_expert_intermediate_size:
        name = f"layers.{number}.mlp.shared"
        mlp = LlamaMLP(name, model.moe.shared_expert_intermediate_size, blueprint)
        shared = SharedExpert(number, mlp, blueprint)
    return MixtureOfExperts(number, blueprint, GATED[model.hidden_act], shared)


class MixtralLayer(nn.Module):
    """x + attention(norm(x)), then x + mixture(norm(x))."""

    def __init__(self, number: int, blueprint: Blueprint):
        super().__init__()
        name = f"layers.{number}"
        self.attention_norm = RMSNorm(f"{name}.attention_norm", blueprint)
        self.attention = Attention(number, blueprint, qkv_bias=blueprint.model.attention_bias, out_bias=False)
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm", blueprint)
        self.mlp = mixture(number, blueprint)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        normed_sbh, residual_sbh = self.mlp_norm.add_and_norm(
            self.attention(self.attention_norm(x_sbh), context), residual=x_sbh
        )
        return residual_sbh + self.mlp(normed_sbh, context)


class MixtralStage(LlamaStage):
    """Consecutive Mixtral layers."""

    def make_layer(self, number: int) -> nn.Module:
        return MixtralLayer(number, self.blueprint)
