"""Hy3 (Tencent, 2026): Llama's attention with norms of queries and keys, and DeepSeek-V3's experts without groups.

The weights are those of Mixtral (megapar_models.families.mixtral); the first layers have the MLP of Llama.

At Hugging Face: hy_v3. Layers of multi-token prediction are left out.
"""

from dataclasses import dataclass, field, replace

from megapar_models.families.deepseek import DeepseekExperts, RenamedExperts, with_experts
from megapar_models.families.glm4_moe import GLM4_MOE
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, ModelType, like
from megapar_models.layer_kind import LayerKind
from megapar_models.rotary_fields import Rope


@dataclass(frozen=True)
class HyV3Model(MixtralModel):
    """The options of Hy3."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""
    attention_bias: bool = False
    """Biases of all projections of attention."""


class HyV3Stage(MixtralStage[HyV3Model]):
    """Consecutive layers of Hy3."""

    @classmethod
    def layer_kind(cls, model: HyV3Model, number: int) -> LayerKind:
        kind = replace(
            super().layer_kind(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=True,
        )
        return with_experts(kind, model.moe, number)


_EXPERTS = RenamedExperts(
    theirs={
        **{"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        **{"router_scaling_factor": "routed_scaling_factor"},
    },
    lists_layers=True,
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    moe={
        **{"n_routed_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
        **{"routed_scaling_factor": 2.826, "n_group": 1, "topk_group": 1},
    },
)
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "mlp_bias": False}
_MLP = "model.layers.*.mlp"

HY_V3 = Family(
    name="hy_v3",
    stage=HyV3Stage,
    activations=("silu",),
    options=HyV3Model,
    even_head_dim=True,
    hugging_face=like(
        GLM4_MOE,
        model_types={"hy_v3": ModelType("HYV3ForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, Rope(11158840.0)),
        modules={
            "layers.*.mlp.router": f"{_MLP}.router.gate",
            "layers.*.mlp.router.bias": f"{_MLP}.expert_bias",
            **{f"layers.*.mlp.shared.{name}": f"{_MLP}.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
        },
        # As transformers calls them in memory.
        renamed={
            **{".mlp.gate.weight": ".mlp.router.gate.weight", ".mlp.e_score_correction_bias": ".mlp.expert_bias"},
            ".mlp.shared_experts.": ".mlp.shared_mlp.",
        },
        fields={"use_qk_norm": None},
        defaults={"head_dim": 128, "initializer_range": 0.006},
        without_effect=("enable_moe_fp32_combine",),  # of rounding
    ),
)
