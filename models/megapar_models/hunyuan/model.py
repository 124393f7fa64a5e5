"""Dense HunYuan (Tencent, 2025): Llama with norms of queries and keys behind their rotation.

Its weights are those of Llama (megapar_models.llama.model), and layers.N.attention.{q,k}_norm.weight [width of a head].
"""

from dataclasses import dataclass, replace

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
from megapar_models.stage import Stage


@dataclass(frozen=True)
class HunYuanModel(RotaryModel):
    """The options of dense HunYuan."""

    attention_bias: bool = False
    """Biases of all projections of attention."""


class HunYuanStage(Stage[HunYuanModel]):
    """Consecutive layers of dense HunYuan."""

    @classmethod
    def layer_kind(cls, model: HunYuanModel, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            # A norm's weights behind the rotation make scores depend on positions, and not on distances alone.
            rotary=replace(Rotary.of(model), inside_documents=True),
            qk_norm=True,
            qk_norm_after_rotary=True,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )
