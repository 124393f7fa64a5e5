"""SmolLM3 (Hugging Face, 2025): Llama with some layers that see no positions (NoPE, arXiv 2305.19466)."""

from dataclasses import dataclass, field, replace

from megapar.config.model_options import OF_FUNCTION
from megapar_models.layer_kind import LayerKind
from megapar_models.llama.model import LlamaModel, LlamaStage


@dataclass(frozen=True)
class SmolLM3Model(LlamaModel):
    """The options of SmolLM3."""

    no_rope_layers: tuple[int, ...] = field(default=(), metadata=OF_FUNCTION)
    """1 for each layer with rotary positions and 0 for each layer without, as in config.json; empty: all have them."""


class SmolLM3Stage(LlamaStage[SmolLM3Model]):
    """Consecutive SmolLM3 layers."""

    @classmethod
    def layer_kind(cls, model: SmolLM3Model, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        # A list of the wrong length is reported by the family.
        if model.no_rope_layers[number : number + 1] == (0,):
            return replace(kind, rotary=None)
        return kind
