"""Bamba: Llama's layers, with Mamba-2 in place of attention in all but a few of them.

The names of the weights are those of Llama (megapar_models.families.llama). Layers of Mamba-2 have those of
megapar_models.mamba2 in place of layers.N.attention.

At Hugging Face: bamba.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.messages import problem, shown
from megapar.config.options import Config
from megapar_models.codecs import Always, Written
from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.mamba2_fields import MambaFields, MambaModel, mamba_modules, mamba_rule
from megapar_models.norms import NormRule
from megapar_models.rotary import PartialRotaryModel, Rotary
from megapar_models.rotary_fields import PartialRope
from megapar_models.stage import Stage


@dataclass(frozen=True)
class MambaLayers(MambaModel):
    """The options of a family whose layers have attention or Mamba-2."""

    attn_layer_indices: tuple[int, ...] = field(default=())
    """Numbers of the layers with attention, from 0, such as 9 18 27. All others have Mamba-2."""


@dataclass(frozen=True)
class BambaModel(MambaLayers, PartialRotaryModel):
    """The options of Bamba."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    mlp_bias: bool = False
    """Biases of all matrices of the MLP."""


class BambaStage(Stage[BambaModel]):
    """Consecutive layers of Bamba."""

    @classmethod
    def layer_kind(cls, model: BambaModel, number: int) -> LayerKind:
        kind = LayerKind(norm=NormRule(model.rms_norm_eps), mlp_bias=model.mlp_bias)
        if number not in model.attn_layer_indices:
            return replace(kind, mixer=mamba_rule(model))
        biases = model.attention_bias
        return replace(kind, rotary=Rotary.of(model), qkv_bias=biases, out_bias=biases)


class AttentionLayers(Codec):
    """Which layers have attention."""

    def problems(self, config: Config, model: MambaLayers) -> Iterator[str]:
        layers = model.num_hidden_layers
        kept = tuple(layer for layer in model.attn_layer_indices if 0 <= layer < layers)
        if kept != model.attn_layer_indices:
            text = f"layers are numbered from 0 to {layers - 1}; use {shown(kept)}"
            yield problem(config, "model.attn_layer_indices model.num_hidden_layers", text)


class _Indices(AttentionLayers):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        return {"attn_layer_indices": tuple(raw.get("attn_layer_indices") or ())}, []

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        # Bamba's own files have it. No version of transformers reads it.
        width = raw["hidden_size"] // raw["num_attention_heads"] // 2
        if raw.get("attn_rotary_emb", width) != width:
            yield f"attn_rotary_emb={raw['attn_rotary_emb']} is not supported unless it is half of a head, {width}"

    def write(self, model: BambaModel, fields: dict[str, Any]) -> None:
        fields["attn_layer_indices"] = list(model.attn_layer_indices)


MAMBA_DEFAULTS = {
    **{"heads": 128, "head": "auto", "groups": 1, "state": 256, "conv": 4, "conv_bias": True, "bias": False},
    "expand": 2,
}
FIXED = {"attention_dropout": 0.0}
_WITHOUT_EFFECT = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")

BAMBA = Family(
    name="bamba",
    stage=BambaStage,
    activations=("silu",),
    options=BambaModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"bamba": ModelType("BambaForCausalLM", fixed=FIXED)},
        codecs=(Always(), PartialRope(factor=0.5), MambaFields(defaults=MAMBA_DEFAULTS), _Indices(), Written(FIXED)),
        modules={
            "layers.*.mlp_norm": "model.layers.*.pre_ff_layernorm",
            **{f"layers.*.mlp.{name}": f"model.layers.*.feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            "norm": "model.final_layernorm",
            **mamba_modules("model.layers.*.mamba"),
        },
        fields={"head_dim": None, **same("attention_bias", "mlp_bias")},
        defaults={
            **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
            "max_position_embeddings": 262144,
        },
        activations=same("silu"),
        without_effect=_WITHOUT_EFFECT,
    ),
)
