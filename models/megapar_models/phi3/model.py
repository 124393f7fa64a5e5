"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): Llama with a window, and with a rotated part of each head.

Its weights are those of Llama (megapar_models.llama.model). Their files have q, k and v in one matrix, and gate and up.
"""

from dataclasses import dataclass

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.partial_rotary import PartialRotaryModel, partial_rotary
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, window_of


@dataclass(frozen=True)
class Phi3Model(PartialRotaryModel, WindowModel):
    """The options of Phi-3 and Phi-4."""


class Phi3Stage(Stage[Phi3Model]):
    """Consecutive Phi-3 layers."""

    @classmethod
    def layer_kind(cls, model: Phi3Model, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps), rotary=partial_rotary(model), window=window_of(model, number)
        )
