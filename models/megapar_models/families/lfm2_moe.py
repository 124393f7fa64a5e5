"""LFM2's mixtures (LFM2-8B-A1B): LFM2 with Mixtral's experts behind the first layers, and DeepSeek-V3's router.

The weights are those of LFM2 and of Mixtral (megapar_models.families.lfm2, megapar_models.families.mixtral).

At Hugging Face: lfm2_moe.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from megapar_models.families.deepseek import DeepseekExperts
from megapar_models.families.lfm2 import LFM2, MODULES, OF_LFM2, Layers, Lfm2Model, TiedByAlias, with_convolution
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe import router_rule
from megapar_models.moe_fields import RoutedExperts, read_moe, refuse_unwritable
from megapar_models.rotary_fields import Rope


@dataclass(frozen=True)
class Lfm2MoeModel(MixtralModel, Lfm2Model):
    """The options of LFM2's mixtures."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""


class Lfm2MoeStage(MixtralStage[Lfm2MoeModel]):
    """Consecutive layers of one of LFM2's mixtures."""

    @classmethod
    def layer_kind(cls, model: Lfm2MoeModel, number: int) -> LayerKind:
        kind = replace(super().layer_kind(model, number), qk_norm=True)
        if number < model.moe.first_k_dense_replace:
            kind = replace(kind, mlp="dense", mixture=None)
        else:
            kind = replace(kind, router=replace(router_rule(model.moe), norm_epsilon=1e-6))
        return with_convolution(kind, model, number)


class _Experts(RoutedExperts):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        moe, problems = read_moe(raw, self.names, self.defaults)
        dense = raw.get("num_dense_layers", 2)
        if dense is None:
            problems.append("num_dense_layers is missing")
        balance = "bias" if raw.get("use_expert_bias", True) else "global"
        moe |= {**self.always, "first_k_dense_replace": dense or 0, "balance": balance}
        return {"moe": DeepseekExperts(**moe)}, problems

    def write(self, model: Lfm2MoeModel, fields: dict[str, Any]) -> None:
        moe = model.moe
        always: dict[str, Any] = {**self.always, "routed_scaling_factor": moe.routed_scaling_factor}
        refuse_unwritable(model, fields["model_type"], always, (), has_bias=moe.has_selection_bias)
        fields |= {theirs: getattr(moe, ours) for theirs, ours in self.names.items()}
        fields |= {"num_dense_layers": moe.first_k_dense_replace, "use_expert_bias": moe.has_selection_bias}


_NAMES = same("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor")
_DEFAULTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792}
_DEFAULTS |= {"norm_topk_prob": True, "routed_scaling_factor": 1.0}
_EXPERTS = _Experts(names=_NAMES, defaults=_DEFAULTS, always={"scoring_func": "sigmoid"})
_MLP = "model.layers.*.feed_forward"

LFM2_MOE = Family(
    name="lfm2_moe",
    stage=Lfm2MoeStage,
    activations=("silu",),
    options=Lfm2MoeModel,
    even_head_dim=True,
    hugging_face=like(
        LFM2,
        model_types={"lfm2_moe": ModelType("Lfm2MoeForCausalLM")},
        codecs=(_EXPERTS, Layers(), Rope(1e6), TiedByAlias()),
        modules={
            **MODULES,
            **OF_LFM2,
            "layers.*.mlp.router": f"{_MLP}.gate",
            "layers.*.mlp.router.bias": f"{_MLP}.expert_bias",
            "layers.*.mlp.experts.*.gate": f"{_MLP}.experts.*.w1",
            "layers.*.mlp.experts.*.up": f"{_MLP}.experts.*.w3",
            "layers.*.mlp.experts.*.down": f"{_MLP}.experts.*.w2",
        },
        stacked={f"{_MLP}.experts.gate_up_proj": ("w1", "w3"), f"{_MLP}.experts.down_proj": ("w2",)},
        fields=same("intermediate_size"),
    ),
)
