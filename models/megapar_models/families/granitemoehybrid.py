"""Granite 4: the factors of Granite 3, and Mamba-2 in place of attention in most layers.

With experts the names of the weights are those of Mixtral, without experts those of Llama
(megapar_models.families.mixtral, megapar_models.families.llama). Layers of Mamba-2 have those of megapar_models.mamba2
in place of layers.N.attention.

At Hugging Face: granitemoehybrid.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megapar.config.model_options import OF_FUNCTION, MaybeMixtureModel, MoEConfig
from megapar_models.codecs import Written
from megapar_models.families.bamba import FIXED, MAMBA_DEFAULTS, AttentionLayers, MambaLayers
from megapar_models.families.granite import GraniteModel, GraniteStage, Multipliers
from megapar_models.families.granitemoe import GRANITEMOE, SHARED_EXPERTS, GraniteExperts
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.mamba2_fields import MambaFields, mamba_modules, mamba_rule


@dataclass(frozen=True)
class GraniteMoeHybridModel(MambaLayers, MaybeMixtureModel, GraniteModel):
    """The options of Granite 4. Without experts the width of the MLP is model.intermediate_size."""

    position_embedding_type: Literal["none", "rope"] = field(default="none", metadata=OF_FUNCTION)
    """Whether attention sees positions: by a rotation (rope), or not at all."""


class GraniteMoeHybridStage(GraniteStage[GraniteMoeHybridModel]):
    """Consecutive layers of Granite 4."""

    @classmethod
    def layer_kind(cls, model: GraniteMoeHybridModel, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        if model.experts is not None:
            kind = replace(kind, mlp="mixture", mixture=model.moe)
        if number not in model.attn_layer_indices:
            none: dict[str, Any] = {"rotary": None, "qkv_bias": False, "out_bias": False, "attention_scale": None}
            return replace(kind, mixer=mamba_rule(model), **none)
        return kind if model.position_embedding_type == "rope" else replace(kind, rotary=None)


class _Experts(GraniteExperts):
    """Experts beside an MLP for every token, or this MLP alone."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        if problems or values["moe"].num_experts:
            return values, problems
        return {"moe": MoEConfig(), "intermediate_size": values["moe"].shared_expert_intermediate_size}, []

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        if model.experts is None:
            fields |= {"num_local_experts": 0, "shared_intermediate_size": model.intermediate_size}
            return
        super().write(model, fields)
        fields["shared_intermediate_size"] = model.moe.shared_expert_intermediate_size


class _Types(AttentionLayers):
    """Which layers have attention, and whether it sees positions."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        types = raw.get("layer_types") or ["mamba"] * raw["num_hidden_layers"]
        known = {"mamba", "linear_attention", "attention", "full_attention"}
        if unknown := sorted({*types} - known):
            return {}, [f"layer_types: {', '.join(unknown)} not supported; {', '.join(sorted(known))} are"]
        if len(types) != raw["num_hidden_layers"]:
            return {}, [f"layer_types has {len(types)} layers, and num_hidden_layers={raw['num_hidden_layers']}"]
        indices = tuple(number for number, name in enumerate(types) if name in ("attention", "full_attention"))
        # transformers rotates for rope alone. The published files say nope.
        position = raw.get("position_embedding_type") or "nope"
        if position not in ("nope", "rope"):
            return {}, [f"position_embedding_type={position!r} is not supported; rope, nope and null are"]
        rotates: dict[str, Any] = {"position_embedding_type": "rope" if position == "rope" else "none"}
        return {"attn_layer_indices": indices, **rotates}, []

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        if raw.get("normalization_function", "rmsnorm") != "rmsnorm":
            yield f"normalization_function={raw['normalization_function']!r} is not supported; rmsnorm is"

    def write(self, model: GraniteMoeHybridModel, fields: dict[str, Any]) -> None:
        attention = model.attn_layer_indices
        layers = range(model.num_hidden_layers)
        fields["layer_types"] = ["attention" if number in attention else "mamba" for number in layers]
        fields["position_embedding_type"] = "rope" if model.position_embedding_type == "rope" else None


def _experts_of(experts: GraniteExperts) -> _Experts:
    return _Experts(
        names=experts.names,
        aliases=experts.aliases,
        defaults={**experts.defaults, "shared_intermediate_size": 1024},
        always=experts.always,
    )


_LAYER = "model.layers.*"
_DENSE = {"gate": "input_linear", "up": "input_linear", "down": "output_linear"}

GRANITEMOEHYBRID = Family(
    name="granitemoehybrid",
    stage=GraniteMoeHybridStage,
    activations=("silu",),
    options=GraniteMoeHybridModel,
    even_head_dim=True,
    hugging_face=like(
        GRANITEMOE,
        model_types={"granitemoehybrid": ModelType("GraniteMoeHybridForCausalLM", fixed=FIXED)},
        codecs=(
            *(_experts_of(SHARED_EXPERTS), Multipliers(), MambaFields(defaults=MAMBA_DEFAULTS), _Types()),
            Written(FIXED),
        ),
        modules={
            **{f"layers.*.mlp.{ours}": f"{_LAYER}.shared_mlp.{theirs}" for ours, theirs in _DENSE.items()},
            **mamba_modules(f"{_LAYER}.mamba"),
        },
        defaults={"rms_norm_eps": 1e-6},
        activations=same("silu"),
        without_effect=("mamba_chunk_size", "init_method"),
    ),
)
