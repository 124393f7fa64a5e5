"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): Llama with a window, and with a rotated part of each head.

Its weights are those of Llama (megapar_models.families.llama). Their files have q, k and v in one matrix, and gate and
up.

At Hugging Face: phi3.
"""

from dataclasses import dataclass
from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.codecs import Written
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, Raw, like, overlaid
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import PartialRotaryModel, Rotary
from megapar_models.rotary_fields import PartialRope, stated_rope, with_rope
from megapar_models.stage import Stage
from megapar_models.windows import OneWindow, WindowModel, window_of


@dataclass(frozen=True)
class Phi3Model(PartialRotaryModel, WindowModel):
    """The options of Phi-3 and Phi-4."""


class Phi3Stage(Stage[Phi3Model]):
    """Consecutive Phi-3 layers."""

    @classmethod
    def layer_kind(cls, model: Phi3Model, number: int) -> LayerKind:
        return LayerKind(norm=NormRule(model.rms_norm_eps), rotary=Rotary.of(model), window=window_of(model, number))


class _Rope(PartialRope):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        # transformers reads this length beside the rotary parameters, whatever they say of it.
        length = {name: raw.get(name, 4096) for name in ("original_max_position_embeddings",)}
        rope, file = stated_rope(raw), overlaid(raw, length)
        if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            file = with_rope(file, {**rope, "rope_type": "longrope"})  # their older names
        return super().read(file, model_type)

    def write(self, model: Phi3Model, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        scaling = fields["rope_scaling"]
        if scaling is None:
            return
        if scaling["rope_type"] != "longrope":
            raise ConfigError(f"model.rope_scaling.rope_type={scaling['rope_type']}: phi3 has default and longrope")
        # transformers 4 allows three fields, and computes the factor itself.
        scaling = {"type": scaling.pop("rope_type"), **scaling}
        original = scaling.pop("original_max_position_embeddings")
        if scaling.get("factor") == model.max_position_embeddings / original:
            del scaling["factor"]
        fields |= {"rope_scaling": scaling, "original_max_position_embeddings": original}


_FIXED = dict.fromkeys(("attention_dropout", "embd_pdrop", "resid_pdrop"), 0.0)
_FIXED |= {"attention_bias": False, "mlp_bias": False}
_FIXED |= {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}  # in Phi-4 mini's file
_LAYER = "model.layers.*"

PHI3 = Family(
    name="phi3",
    stage=Phi3Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=Phi3Model,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"phi3": ModelType("Phi3ForCausalLM", fixed=_FIXED)},
        # transformers takes 32000 for an absent padding token, and refuses one beyond the vocabulary.
        codecs=(_Rope(warns=False), OneWindow(), Written({"pad_token_id": None})),
        modules={
            **dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), f"{_LAYER}.self_attn.qkv_proj"),
            **dict.fromkeys(("layers.*.mlp.gate", "layers.*.mlp.up"), f"{_LAYER}.mlp.gate_up_proj"),
        },
        defaults={"rms_norm_eps": 1e-5},
        without_effect=("original_max_position_embeddings",),  # but with longrope
    ),
)
