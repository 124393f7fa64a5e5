"""EXAONE 4 (arXiv 2507.11407): norms behind the branches and of q and k, and global layers that see no positions.

Its weights are those of Llama (megapar_models.families.llama), but attention_output_norm and mlp_output_norm stand in
the place of attention_norm and mlp_norm.

At Hugging Face: exaone4.
"""

from collections.abc import Mapping
from typing import Any

from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rope import factor_warnings, read_rope, write_rope
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.windows import (
    WindowModel,
    full_every,
    is_full,
    read_windows,
    rotary_problems,
    window_of,
    write_windows,
)


class Exaone4Stage(Stage[WindowModel]):
    """Consecutive EXAONE 4 layers. In a model without windows all layers have rotary positions."""

    @classmethod
    def layer_kind(cls, model: WindowModel, number: int) -> LayerKind:
        rotary: Rotary | None = Rotary.of(model)
        if model.sliding_window and is_full(model, number):
            rotary = None
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            norms="after",
            rotary=rotary,
            window=window_of(model, number),
            qk_norm=True,
        )


# Hugging Face

_BEFORE = ("layers.*.attention_norm", "layers.*.mlp_norm")
_MODULES = {ours: theirs for ours, theirs in MODULES_BUT_MLP.items() if ours not in _BEFORE} | MLP_MODULES
_MODULES |= {
    "layers.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": 32, "head_dim": None}
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False}


def _read(raw: Mapping[str, Any], _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and windows from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=10000.0)
    layers = raw.get("num_hidden_layers")
    every = raw.get("sliding_window_pattern", 4)
    types = raw.get("layer_types")
    if not isinstance(layers, int):
        return values, problems  # it is reported elsewhere
    window = raw.get("sliding_window", 4096)
    if types is None:
        if window is None or not isinstance(every, int) or every < 1:
            text = (
                "layer_types is missing; without it transformers needs a sliding_window, and a sliding_window_pattern"
            )
            return values, [*problems, f"{text} from 1 on"]
        types = full_every(every, layers)
    windows, wrong = read_windows(raw, window, types, keeps_unused=True)
    return values | windows, [*problems, *wrong]


def _write(model: WindowModel, fields: dict[str, Any]) -> dict[str, Any]:
    fields |= {**write_rope(model), **write_windows(model)}
    return {"model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], **fields}


EXAONE4 = Family(
    name="exaone4",
    stage=Exaone4Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=WindowModel,
    even_head_dim=True,
    problems=rotary_problems,
    hugging_face=HuggingFace(
        model_types={"exaone4": ModelType(_DEFAULTS, _FIXED)},
        modules=_MODULES,
        fields={name: name for name in SAME_FIELDS},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        write=_write,
        warnings=factor_warnings,
    ),
)
