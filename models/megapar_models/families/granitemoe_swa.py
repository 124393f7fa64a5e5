"""The mixtures of Granite with windows (Granite SWASH, IBM, 2026).

The names of the weights are those of Mixtral (megapar_models.families.mixtral), and layers.N.attention.sinks [heads].

At Hugging Face: granitemoe_swa.
"""

from dataclasses import dataclass, replace

from megapar_models.families.granite import GraniteStage, Multipliers
from megapar_models.families.granite_swa import SINKS, GraniteWindowModel, LayerBases, with_windows
from megapar_models.families.granitemoe import GRANITEMOE, SHARED_EXPERTS, GraniteMoeModel, SharedWidth
from megapar_models.family import Family, ModelType, like
from megapar_models.layer_kind import LayerKind


@dataclass(frozen=True)
class GraniteMoeSwaModel(GraniteMoeModel, GraniteWindowModel):
    """The options of Granite's mixtures with windows."""


class GraniteMoeSwaStage(GraniteStage[GraniteMoeSwaModel]):
    """Consecutive layers of Granite with experts and windows."""

    @classmethod
    def layer_kind(cls, model: GraniteMoeSwaModel, number: int) -> LayerKind:
        kind = replace(super().layer_kind(model, number), mlp="mixture", mixture=model.moe)
        return with_windows(kind, model, number)


_MOE = "model.layers.*.block_sparse_moe"
_EXPERT = "layers.*.mlp.experts.*"
_MATRICES = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}

GRANITEMOE_SWA = Family(
    name="granitemoe_swa",
    stage=GraniteMoeSwaStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=GraniteMoeSwaModel,
    even_head_dim=True,
    hugging_face=like(
        GRANITEMOE,
        model_types={"granitemoe_swa": ModelType("GraniteMoeSWAForCausalLM", fixed={"attention_dropout": 0.0})},
        codecs=(SHARED_EXPERTS, Multipliers(), SharedWidth(), LayerBases(128, needed=True)),
        # Unlike files of granitemoe, these have the names that transformers has in memory.
        modules={
            **SINKS,
            "layers.*.mlp.router": f"{_MOE}.router",
            **{f"{_EXPERT}.{ours}": None for ours in _MATRICES},
            **{f"{_EXPERT}.{ours}.weight": f"{_MOE}.experts.{theirs}" for ours, theirs in _MATRICES.items()},
        },
        renamed={},
    ),
)
