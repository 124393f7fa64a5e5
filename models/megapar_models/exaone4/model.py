"""EXAONE 4 (arXiv 2507.11407): norms behind the branches and of q and k, and global layers that see no positions.

Its weights are those of Llama (megapar_models.llama.model), but attention_output_norm and mlp_output_norm stand in the
place of attention_norm and mlp_norm.
"""

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, is_full, window_of


class Exaone4Stage(Stage[WindowModel]):
    """Consecutive EXAONE 4 layers. In a model without windows all layers have rotary positions."""

    @classmethod
    def layer_kind(cls, model: WindowModel, number: int) -> LayerKind:
        rotary: Rotary | None = Rotary.of(model)
        if model.sliding_window and is_full(model, number):
            rotary = None
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            norms="after",
            rotary=rotary,
            window=window_of(model, number),
            qk_norm=True,
        )
