"""StableLM 3B and 2 (arXiv 2402.17834): Llama with LayerNorm and a rotated part of each head.

By option attention and MLP read the same residual stream through one norm, and each head of queries and keys has a
norm. Its weights are those of Llama (megapar_models.families.llama). Norms of the residual stream also have a bias.
With norms of heads (StableLM 2 12B) there are these, with d the width of a head:

    layers.N.attention.q_norm.weight    [heads * d]       cut by heads
    layers.N.attention.k_norm.weight    [kv heads * d]    cut by heads; several ranks may hold the same head

At Hugging Face: stablelm.
"""

from dataclasses import dataclass
from typing import Any

from megapar_models.families.gpt_neox import FIELDS, demand
from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw, dropout_warnings
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.partial_rotary import (
    PartialRotaryModel,
    partial_problems,
    partial_rotary,
    read_partial_rope,
    write_partial_rope,
)
from megapar_models.rope import factor_warnings
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing


@dataclass(frozen=True)
class StableLmModel(PartialRotaryModel):
    """The options of StableLM."""

    attention_bias: bool = False
    """Biases of the query, key and value projections."""
    parallel_residual: bool = False
    """Attention and MLP read the same residual stream, through one norm."""
    qk_norm: bool = False
    """LayerNorm of each query and key head before the rotary embedding, with weights of its own (StableLM 2 12B)."""


class StableLmStage(Stage[StableLmModel]):
    """Consecutive StableLM layers."""

    @classmethod
    def layer_kind(cls, model: StableLmModel, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps, "layer"),
            parallel="one_norm" if model.parallel_residual else "no",
            rotary=partial_rotary(model),
            qk_norm=model.qk_norm,
            qk_norm_over="each_head",
            qk_norm_rule=NormRule(model.rms_norm_eps, "layer", biased=False),
            qkv_bias=model.attention_bias,
        )


# Hugging Face

# Every head's norm is a tensor of its own.
_NORMS = {
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_layernorm.norms.*",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_layernorm.norms.*",
}
_LAYOUTS = {
    _NORMS["layers.*.attention.q_norm"]: Packing("num_attention_heads"),
    _NORMS["layers.*.attention.k_norm"]: Packing("num_key_value_heads"),
}
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "layer_norm_eps": 1e-5, "tie_word_embeddings": False}
_DEFAULTS |= {"initializer_range": 0.02, "num_key_value_heads": 32, "use_qkv_bias": False}
_DEFAULTS |= {"use_parallel_residual": False, "qk_layernorm": False}
_OWN_FIELDS = {"layer_norm_eps": "rms_norm_eps", "num_key_value_heads": "num_key_value_heads"}
_OWN_FIELDS |= {"use_qkv_bias": "attention_bias", "use_parallel_residual": "parallel_residual"}
_OWN_FIELDS |= {"qk_layernorm": "qk_norm"}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    return read_partial_rope(raw, 10000.0, 0.25)


def _write(model: StableLmModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if stablelm does not represent it."""
    demand(model, "stablelm")
    return {"model_type": "stablelm", "architectures": ["StableLmForCausalLM"], **fields, **write_partial_rope(model)}


def _warnings(raw: Raw) -> list[str]:
    return [*factor_warnings(raw), *dropout_warnings(raw, "stablelm", "attention_dropout", "hidden_dropout")]


STABLELM = Family(
    name="stablelm",
    stage=StableLmStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=StableLmModel,
    problems=partial_problems,
    hugging_face=HuggingFace(
        model_types={"stablelm": ModelType(_DEFAULTS, {"rotary_scaling_factor": 1.0})},
        modules=MODULES_BUT_MLP | MLP_MODULES | _NORMS,
        layouts=_LAYOUTS,
        fields=FIELDS | _OWN_FIELDS,
        activations=ACTIVATIONS,
        tied=TIED,
        without_effect=("use_norm_bias",),  # the tensors of the norms say it
        read=_read,
        write=_write,
        warnings=_warnings,
    ),
)
