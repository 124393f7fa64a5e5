"""StarCoder2 (arXiv 2402.19173): GPT-2's norms and MLP, Llama's rotary positions and key/value heads, and a window."""

from dataclasses import dataclass

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, window_of


@dataclass(frozen=True)
class StarCoder2Model(WindowModel):
    """The options of StarCoder2."""

    use_bias: bool = True
    """Biases of all matrices of attention and of the MLP."""


class StarCoder2Stage(Stage[StarCoder2Model]):
    """Consecutive StarCoder2 layers."""

    @classmethod
    def layer_kind(cls, model: StarCoder2Model, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer"),
            rotary=Rotary.of(model),
            window=window_of(model, number),
            qkv_bias=model.use_bias,
            out_bias=model.use_bias,
            mlp_bias=model.use_bias,
        )
