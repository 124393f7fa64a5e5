"""OLMo Hybrid: gated delta nets in three of four layers, with norms before both branches, and OLMo 2's layers.

The weights of layers of linear attention are those of megapar_models.delta_net, the others those of OLMo 2
(megapar_models.families.olmo). The published models have no rotary positions.

At Hugging Face: olmo_hybrid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.model_options import OF_FUNCTION
from megapar_models.codecs import Written
from megapar_models.delta_fields import (
    MAYBE_IN_FP32,
    SIZE_DEFAULTS,
    SIZE_FIELDS,
    DeltaLayers,
    DeltaModel,
    delta_rule,
    is_linear,
    linear_names,
    linear_names_of,
    types_of,
)
from megapar_models.families.olmo import OLMO
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_fields import Rope, stated_rope, write_rope
from megapar_models.stage import Stage

# Of the norm behind the recurrence; no field says it.
_OUTPUT_EPS = 1e-5


@dataclass(frozen=True)
class OlmoHybridModel(DeltaModel):
    """The options of OLMo Hybrid."""

    attention_bias: bool = False
    """Biases of all projections of full attention."""
    rotary: bool = field(default=True, metadata=OF_FUNCTION)
    """Rotary positions in layers of full attention. The published models have none."""
    linear_allow_neg_eigval: bool = field(default=True, metadata=OF_FUNCTION)
    """States of linear attention may turn their sign along a key (arXiv 2411.12537)."""


class OlmoHybridStage(Stage[OlmoHybridModel]):
    """Consecutive layers of OLMo Hybrid."""

    @classmethod
    def layer_kind(cls, model: OlmoHybridModel, number: int) -> LayerKind:
        norm = NormRule(model.rms_norm_eps)
        if is_linear(model, number):
            negative = model.linear_allow_neg_eigval
            return LayerKind(norm=norm, mixer=delta_rule(model, NormRule(_OUTPUT_EPS), negative_eigenvalues=negative))
        return LayerKind(
            norm=norm,
            norms="after",
            rotary=Rotary.of(model) if model.rotary else None,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=True,
            qk_norm_over="width",
        )


class _Rope(Rope):
    """One rotary table, or with a base of null none."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        stated = stated_rope(raw)
        theta = stated.get("rope_theta", raw.get("rope_theta", self.theta) if "rope_theta" in raw else self.theta)
        if theta is not None:
            return super().read(raw, model_type)
        others = {name: value for name, value in stated.items() if name not in ("rope_theta", "rope_type", "type")}
        if others or stated.get("rope_type", "default") != "default":
            return {}, ["rope_parameters: rope_theta=null is no rotary position, and supported alone"]
        return {"rotary": False}, []

    def write(self, model: OlmoHybridModel, fields: dict[str, Any]) -> None:
        rope = write_rope(model)
        parameters = {"rope_type": "default", **(rope["rope_scaling"] or {}), "rope_theta": rope["rope_theta"]}
        fields |= {"rope_parameters": parameters if model.rotary else {"rope_type": "default", "rope_theta": None}}


class _Sizes(Codec):
    """Sizes of linear attention that follow from others."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        def stated(name: str, otherwise: int) -> int:
            value = raw.get(name)
            return otherwise if value is None else value

        heads = raw["num_attention_heads"]
        found = {name: stated(name, heads) for name in ("linear_num_key_heads", "linear_num_value_heads")}
        width = int(0.75 * raw["hidden_size"] / found["linear_num_key_heads"])
        found |= {"linear_key_head_dim": stated("linear_key_head_dim", width)}
        wide = 2 * found["linear_key_head_dim"]
        return {**found, "linear_value_head_dim": stated("linear_value_head_dim", wide)}, []

    def write(self, model: OlmoHybridModel, fields: dict[str, Any]) -> None:
        if len({*types_of(model)}) < 2:
            raise ConfigError("model.layer_types: olmo_hybrid of transformers has layers of both types")


_NAMES: Mapping[str, str] = {
    **{name: f"{name}_proj" for name in ("q", "k", "v", "o")},
    **{"gate": "g_proj", "beta": "b_proj", "decay": "a_proj", "norm": "o_norm"},
    **{f"conv_{name}": f"{name}_conv1d" for name in ("q", "k", "v")},
}
# Of initial weights.
_INITIAL = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")

OLMO_HYBRID = Family(
    name="olmo_hybrid",
    stage=OlmoHybridStage,
    activations=("silu",),
    options=OlmoHybridModel,
    even_head_dim=True,
    hugging_face=like(
        OLMO,
        model_types={
            "olmo_hybrid": ModelType(
                "OlmoHybridForCausalLM", fixed={"attention_dropout": 0.0, "partial_rotary_factor": 1.0}
            )
        },
        codecs=(_Sizes(), DeltaLayers(both=True, interval=""), _Rope(), Written({"pad_token_id": None})),
        modules=linear_names(_NAMES),
        modules_of=lambda model: linear_names_of(model, _NAMES),
        # As its first files and those of transformers call the norms.
        renamed={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
        maybe_fp32=MAYBE_IN_FP32,
        fields={**SIZE_FIELDS, **same("attention_bias", "linear_allow_neg_eigval")},
        defaults={
            **dict.fromkeys(SIZE_DEFAULTS),
            **{"rms_norm_eps": 1e-6, "attention_bias": False, "linear_allow_neg_eigval": True},
            "linear_conv_kernel_dim": 4,
        },
        activations=same("silu"),
        without_effect=_INITIAL,
    ),
)
