"""K-EXAONE (arXiv 2601.01739): EXAONE 4's layers with norms before the branches, and DeepSeek-V3's experts.

Layers with a window have rotary positions, and the others see none. The weights are those of Mixtral
(megapar_models.families.mixtral); the first layers have the MLP of Llama.

At Hugging Face: exaone_moe. Layers of multi-token prediction are left out.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.families.deepseek import SIGMOID, DeepseekExperts, RenamedExperts, with_experts
from megapar_models.families.exaone4 import Exaone4Windows
from megapar_models.families.glm4_moe import GLM4_MOE
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.rotary_fields import Rope
from megapar_models.windows import WindowModel, rotary_in_windows, window_of


@dataclass(frozen=True)
class ExaoneMoeModel(MixtralModel, WindowModel):
    """The options of K-EXAONE."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""


class ExaoneMoeStage(MixtralStage[ExaoneMoeModel]):
    """Consecutive layers of K-EXAONE."""

    @classmethod
    def layer_kind(cls, model: ExaoneMoeModel, number: int) -> LayerKind:
        kind = replace(
            super().layer_kind(model, number),
            rotary=rotary_in_windows(model, number),
            window=window_of(model, number),
            qk_norm=True,
        )
        return with_experts(kind, model.moe, number)


class _Windows(Exaone4Windows):
    def write(self, model: ExaoneMoeModel, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        if not model.sliding_window:
            raise ConfigError("model.sliding_window=0: exaone_moe of transformers has a window")


class _Experts(RenamedExperts):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        sparse = raw.get("is_moe_layer")  # in the first published files
        if problems or sparse is None:
            return values, problems
        dense = values["moe"].first_k_dense_replace
        if sparse != [number >= dense for number in range(raw["num_hidden_layers"])]:
            text = f"is not supported unless the first {dense} layers alone have no experts"
            problems = [f"is_moe_layer={sparse!r} {text}"]
        return values, problems


_EXPERTS = _Experts(
    theirs={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    lists_layers=True,
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    moe={
        **{"n_routed_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024},
        **{"routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1},
    },
)
_WINDOWS = _Windows(4096, every=4, pattern="sliding_window_pattern", keeps_unused=True, needed=True)
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False}
_FIXED |= {"first_last_k_dense_replace": 1}  # in the first published files

EXAONE_MOE = Family(
    name="exaone_moe",
    stage=ExaoneMoeStage,
    activations=("silu",),
    options=ExaoneMoeModel,
    even_head_dim=True,
    hugging_face=like(
        GLM4_MOE,
        model_types={"exaone_moe": ModelType("ExaoneMoeForCausalLM", fixed={**_FIXED, **SIGMOID, "moe_layer_freq": 1})},
        codecs=(_EXPERTS, Rope(), _WINDOWS),
        modules={"layers.*.mlp.router.bias": "model.layers.*.mlp.e_score_correction_bias"},
        renamed={".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"},
        fields={"attention_bias": None, "use_qk_norm": None},
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32},
        ignored=lambda raw: ("mtp.",),
        # Of the layers of prediction.
        without_effect=("num_nextn_predict_layers", "mtp_loss_scaling_factor", "mtp_share_layers"),
    ),
)
