"""Trinity (Arcee AI, arXiv 2602.17004): gated attention, norms on both sides of a branch, and DeepSeek-V3's experts.

Layers with a window have rotary positions, and the others see none. The weights are those of Mixtral
(megapar_models.families.mixtral); the first layers have the MLP of Llama. Further weights, with h hidden and d the
width of a head:

    layers.N.attention.{q,k}_norm.weight    [d]             on every tp rank
    layers.N.attention.gate.weight          [heads * d, h]  cut by output, as q
    layers.N.attention_output_norm.weight   [h]             on every tp rank
    layers.N.mlp_output_norm.weight         [h]             on every tp rank

At Hugging Face: afmoe.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.model_options import OF_FUNCTION
from megapar_models.families.deepseek import DeepseekExperts, RenamedExperts, with_experts
from megapar_models.families.glm4_moe import GLM4_MOE
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.rotary import Rotary
from megapar_models.rotary_fields import Rope
from megapar_models.windows import WindowModel, Windows, is_full, window_of


@dataclass(frozen=True)
class AfmoeModel(MixtralModel, WindowModel):
    """The options of Trinity. Layers without a window see no positions."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""
    mup_enabled: bool = field(default=False, metadata=OF_FUNCTION)
    """Multiply token embeddings by the root of model.hidden_size."""


class AfmoeStage(MixtralStage[AfmoeModel]):
    """Consecutive layers of Trinity."""

    @classmethod
    def layer_kind(cls, model: AfmoeModel, number: int) -> LayerKind:
        kind = replace(
            super().layer_kind(model, number),
            norms="both",
            rotary=None if is_full(model, number) else Rotary.of(model),
            window=window_of(model, number),
            qk_norm=True,
            output_gate=True,
        )
        return with_experts(kind, model.moe, number)

    @classmethod
    def ends_of(cls, model: AfmoeModel) -> Ends:
        return Ends(embedding_multiplier=math.sqrt(model.hidden_size) if model.mup_enabled else 1.0)


_EXPERTS = RenamedExperts(
    theirs={
        **{"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        **{"num_dense_layers": "first_k_dense_replace", "route_scale": "routed_scaling_factor"},
    },
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 2},
    moe={
        **{"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
        **{"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    },
)
# The published files say what the model always computes.
_FIXED: dict[str, Any] = {
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
}
_FIXED |= {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, "use_grouped_mm": True}
_WINDOWS = Windows(1024, every=4, pattern="global_attn_every_n_layers", keeps_unused=True, needed=True)
_MLP = "model.layers.*.mlp"
_LAYER = "model.layers.*"

AFMOE = Family(
    name="afmoe",
    stage=AfmoeStage,
    activations=("silu",),
    options=AfmoeModel,
    even_head_dim=True,
    hugging_face=like(
        GLM4_MOE,
        model_types={"afmoe": ModelType("AfmoeForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, Rope(), _WINDOWS),
        modules={
            "layers.*.attention.gate": f"{_LAYER}.self_attn.gate_proj",
            # In Llama post_attention_layernorm is the norm before the MLP, and here it is the one behind attention.
            "layers.*.attention_output_norm": f"{_LAYER}.post_attention_layernorm",
            "layers.*.mlp_norm": f"{_LAYER}.pre_mlp_layernorm",
            "layers.*.mlp_output_norm": f"{_LAYER}.post_mlp_layernorm",
            "layers.*.mlp.router": f"{_MLP}.router.gate",
            "layers.*.mlp.router.bias": f"{_MLP}.expert_bias",
        },
        fields={"use_qk_norm": None, "attention_bias": None, **same("mup_enabled")},
        defaults={"head_dim": 128, "num_key_value_heads": None, "mup_enabled": False},
        # Of the losses it was trained with, and of a program.
        without_effect=("load_balance_coeff", "num_expert_groups", "num_limited_groups"),
    ),
)
