"""The dense Nemotrons (Nemotron-4, arXiv 2402.16819; Minitron, arXiv 2407.14679).

They have LayerNorm with a weight that is added to 1, an MLP without gate of squared ReLU, and a rotated part of each
head. The names of the weights are those of Llama (megapar_models.llama.model), without layers.N.mlp.gate. Norms also
have a bias.
"""

from dataclasses import dataclass

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.partial_rotary import PartialRotaryModel, partial_rotary
from megapar_models.stage import Stage


@dataclass(frozen=True)
class NemotronModel(PartialRotaryModel):
    """The options of the dense Nemotrons."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    mlp_bias: bool = False
    """Biases of both matrices of the MLP."""


class NemotronStage(Stage[NemotronModel]):
    """Consecutive layers of a dense Nemotron."""

    @classmethod
    def layer_kind(cls, model: NemotronModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer", offset=1),
            rotary=partial_rotary(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            mlp_bias=model.mlp_bias,
        )
