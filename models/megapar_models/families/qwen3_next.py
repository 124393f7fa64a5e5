"""Qwen3-Next: the layers of Qwen3.5's mixtures, some of them with a plain MLP.

Its weights are those of Qwen3.5's mixtures (megapar_models.families.qwen3_5_moe). The layers in
model.moe.mlp_only_layers have those of Llama.

At Hugging Face: qwen3_next. Its config.json does not say whether a folder holds a layer of multi-token prediction.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.model_options import MixtureModel
from megapar.config.options import Config
from megapar_models.delta_fields import (
    MAYBE_IN_FP32,
    SIZE_DEFAULTS,
    SIZE_FIELDS,
    DeltaLayers,
    linear_names,
    linear_names_of,
)
from megapar_models.families.qwen3_5 import (
    FIXED,
    LAYOUTS,
    NAMES_OF_LINEAR,
    Q_AND_GATE,
    GatedModel,
    full_kind,
    gated_kind,
    other_parts,
    prediction_modules,
    prediction_names,
)
from megapar_models.families.qwen3_5_moe import EXPERT_DEFAULTS, EXPERT_FIELDS, STACKED_TOO, GatedSharedExpert
from megapar_models.families.qwen3_moe import QWEN3_MOE, Qwen3MoeExperts, dense_layers, numbering_problems
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import read_moe
from megapar_models.multi_token import MTPRule
from megapar_models.rotary_fields import PartialRope
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing


@dataclass(frozen=True)
class Qwen3NextModel(MixtureModel, GatedModel):
    """The options of Qwen3-Next."""

    moe: Qwen3MoeExperts = field(default_factory=Qwen3MoeExperts)
    """Mixture of experts."""


class Qwen3NextStage(Stage[Qwen3NextModel]):
    """Consecutive layers of Qwen3-Next."""

    @classmethod
    def layer_kind(cls, model: Qwen3NextModel, number: int) -> LayerKind:
        kind = gated_kind(model, number)
        if number in model.moe.mlp_only_layers:
            return kind
        return replace(kind, mlp="mixture", mixture=model.moe)

    @classmethod
    def mtp_rule(cls, model: Qwen3NextModel) -> MTPRule | None:
        return MTPRule(kind=replace(full_kind(model), mlp="mixture", mixture=model.moe))


class _Experts(GatedSharedExpert):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        moe, problems = read_moe(raw, {**self.names, **self.aliases}, self.defaults)
        dense, wrong = dense_layers(raw)
        return {"moe": Qwen3MoeExperts(**self.always, mlp_only_layers=dense, **moe)}, [*problems, *wrong]

    def write(self, model: Qwen3NextModel, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        fields |= {"mlp_only_layers": list(model.moe.mlp_only_layers), "decoder_sparse_step": 1}

    def problems(self, config: Config, model: Qwen3NextModel) -> Iterator[str]:
        return numbering_problems(config, model)


_EXPERTS = _Experts(
    names={**EXPERT_FIELDS, **same("norm_topk_prob")},
    aliases={"num_local_experts": "num_experts"},
    defaults={**EXPERT_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    always={"shared_expert_gate": True},
)
# Both fused matrices have the rows of a key head and of its value heads together.
_QKVZ, _BA = (f"model.layers.*.linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba"))
_OF_LINEAR = {
    **NAMES_OF_LINEAR,
    **dict.fromkeys(("q", "k", "v", "gate"), "in_proj_qkvz"),
    **dict.fromkeys(("beta", "decay"), "in_proj_ba"),
}
_BY_KEY_HEAD = Packing("linear_num_key_heads")

QWEN3_NEXT = Family(
    name="qwen3_next",
    stage=Qwen3NextStage,
    activations=("silu",),
    options=Qwen3NextModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={"qwen3_next": ModelType("Qwen3NextForCausalLM", fixed={**FIXED, "use_sliding_window": False})},
        codecs=(_EXPERTS, DeltaLayers(), PartialRope(factor=0.25)),
        modules={"layers.*.attention.gate": Q_AND_GATE, **linear_names(_OF_LINEAR)},
        modules_of=lambda model: {**linear_names_of(model, _OF_LINEAR), **prediction_modules(model)},
        mtp_names=prediction_names,
        stacked=STACKED_TOO,
        layouts={**LAYOUTS, _QKVZ: _BY_KEY_HEAD, _BA: _BY_KEY_HEAD},
        maybe_fp32=MAYBE_IN_FP32,
        fields={**SIZE_FIELDS, **same("attention_bias")},
        defaults={**SIZE_DEFAULTS, "num_key_value_heads": 2, "head_dim": 256, "attention_bias": False},
        activations=same("silu"),
        ignored=other_parts,
    ),
)
