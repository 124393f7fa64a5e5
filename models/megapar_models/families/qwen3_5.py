"""Qwen3.5: gated delta nets in three of four layers, and attention with a gated output in the others.

Its weights beyond those of Llama (megapar_models.families.llama), with d the width of a head:

    layers.N.attention.gate.weight          [heads * d, h]  cut as q (full attention)
    layers.N.attention.{q,k}_norm.weight    [d]             on every tp rank (full attention)
    layers.N.attention.*                    those of megapar_models.delta_net (linear attention)

At Hugging Face: qwen3_5_text, and the text of qwen3_5 (also Qwen3.6).
"""

from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.model_options import OF_FUNCTION, OF_TRAINING, ModelConfig
from megapar_models.codecs import FurtherTokens
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
)
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.multi_token import MTPRule
from megapar_models.norms import NormRule
from megapar_models.rotary import PartialRotaryModel, Rotary
from megapar_models.rotary_fields import PartialRope, split_rope, write_rope
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing


@dataclass(frozen=True)
class GatedModel(DeltaModel, PartialRotaryModel):
    """The options of Qwen3-Next and Qwen3.5."""

    attention_bias: bool = False
    """Biases of all projections of full attention."""
    partial_rotary_factor: float = field(default=0.25, metadata=OF_FUNCTION)
    """The part of a head's dimensions, its first ones, that is rotated, above 0 and at most 1."""


@dataclass(frozen=True)
class Qwen35Model(GatedModel):
    """The options of Qwen3.5."""

    mrope_section: tuple[int, ...] = field(default=(), metadata=OF_TRAINING)
    """Rotary pairs of time, height and width of images, such as 11 11 10. Text does not use them: they are kept for
    the export to Hugging Face."""


def gated_kind(model: GatedModel, number: int) -> LayerKind:
    """Return what the layer is made of, with a plain MLP."""
    if is_linear(model, number):
        norm = NormRule(model.rms_norm_eps, offset=1)
        return LayerKind(norm=norm, mixer=delta_rule(model, NormRule(model.rms_norm_eps)))
    return full_kind(model)


def full_kind(model: GatedModel) -> LayerKind:
    """Return what a layer of full attention is made of, with a plain MLP."""
    return LayerKind(
        norm=NormRule(model.rms_norm_eps, offset=1),
        rotary=Rotary.of(model),
        qkv_bias=model.attention_bias,
        out_bias=model.attention_bias,
        qk_norm=True,
        output_gate=True,
    )


class Qwen35Stage(Stage[Qwen35Model]):
    """Consecutive layers of Qwen3.5."""

    @classmethod
    def layer_kind(cls, model: Qwen35Model, number: int) -> LayerKind:
        return gated_kind(model, number)

    @classmethod
    def mtp_rule(cls, model: Qwen35Model) -> MTPRule | None:
        return MTPRule(kind=full_kind(model))


@dataclass(frozen=True)
class Mrope(PartialRope):
    """Rotary positions with a part of the pairs for each axis of an image: for text, all axes have its positions."""

    factor: float = 0.25

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        raw, beside = split_rope(raw, "mrope_section", "mrope_interleaved")
        values, problems = super().read(raw, model_type)
        if not beside.get("mrope_interleaved", True):
            problems = [*problems, "mrope_interleaved=False is not supported; True is"]
        return {**values, "mrope_section": tuple(beside.get("mrope_section") or ())}, problems

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        rope = write_rope(model)
        parameters = {"rope_type": "default", **(rope["rope_scaling"] or {}), "rope_theta": rope["rope_theta"]}
        parameters |= {"partial_rotary_factor": model.partial_rotary_factor}
        if model.mrope_section:
            parameters |= {"mrope_section": list(model.mrope_section), "mrope_interleaved": True}
        fields |= {"rope_parameters": parameters}


def other_parts(raw: Raw) -> tuple[str, ...]:
    """Return beginnings of the names of tensors of multi-token prediction, and of a tower of images."""
    return ("mtp.", "model.visual.")


def prediction_modules(model: ModelConfig) -> dict[str, str]:
    """Return names of the modules that a layer of multi-token prediction has beside those of others."""
    if not model.num_nextn_predict_layers:
        return {}
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
    names |= {"shared_head_norm": "norm"}
    return {f"layers.*.{ours}": f"model.layers.*.mtp.{theirs}" for ours, theirs in names.items()}


def prediction_names(model: ModelConfig) -> dict[str, str]:
    """Return the names in files. Several layers share all but the layers there, and here each has its own."""
    if not model.num_nextn_predict_layers:
        return {}
    if model.num_nextn_predict_layers > 1:
        text = "several layers share a projection and norms at Hugging Face, and have their own here; use 1"
        raise ConfigError(f"model.num_nextn_predict_layers={model.num_nextn_predict_layers}: {text}")
    number = model.num_hidden_layers
    return {f"model.layers.{number}.mtp.": "mtp.", f"model.layers.{number}.": "mtp.layers.0."}


Q_AND_GATE = "model.layers.*.self_attn.q_proj"
LAYOUTS = {Q_AND_GATE: Packing("num_attention_heads")}
"""Each head has the rows of its query, then those of its gate."""
_QKV = dict.fromkeys(("q", "k", "v"), "in_proj_qkv")
NAMES_OF_LINEAR = {
    **_QKV,
    **{"gate": "in_proj_z", "beta": "in_proj_b", "decay": "in_proj_a", "norm": "norm", "o": "out_proj"},
    **dict.fromkeys(("conv_q", "conv_k", "conv_v"), "conv1d"),
}
FIXED = {"attention_dropout": 0.0, "attn_output_gate": True, "output_gate_type": "swish"}
MODULES = {"layers.*.attention.gate": Q_AND_GATE, **linear_names(NAMES_OF_LINEAR)}
# Fields of published files about layers of prediction, and about the dtype of a cache.
UNREAD = ("mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
FURTHER = FurtherTokens("mtp_num_hidden_layers")

QWEN3_5 = Family(
    name="qwen3_5",
    stage=Qwen35Stage,
    activations=("silu",),
    options=Qwen35Model,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"qwen3_5_text": ModelType("Qwen3_5ForCausalLM", fixed={**FIXED, "mlp_only_layers": []})},
        codecs=(DeltaLayers(), Mrope(), FURTHER),
        modules=MODULES,
        modules_of=lambda model: {**linear_names_of(model, NAMES_OF_LINEAR), **prediction_modules(model)},
        mtp_names=prediction_names,
        layouts=LAYOUTS,
        maybe_fp32=MAYBE_IN_FP32,
        fields={**SIZE_FIELDS, **same("attention_bias")},
        defaults={**SIZE_DEFAULTS, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False},
        # transformers applies it behind the short convolutions too.
        activations=same("silu"),
        without_effect=UNREAD,
        ignored=other_parts,
    ),
)
