"""StarCoder2 (arXiv 2402.19173): GPT-2's norms and MLP, Llama's rotary positions and key/value heads, and a window.

At Hugging Face: starcoder2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapar_models.families.llama import MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, dropout_warnings
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rope import factor_warnings, read_rope, write_rope
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, read_one_window, rotary_problems, window_of, write_one_window


@dataclass(frozen=True)
class StarCoder2Model(WindowModel):
    """The options of StarCoder2."""

    use_bias: bool = True
    """Biases of all matrices of attention and of the MLP."""


class StarCoder2Stage(Stage[StarCoder2Model]):
    """Consecutive StarCoder2 layers."""

    @classmethod
    def layer_kind(cls, model: StarCoder2Model, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer"),
            rotary=Rotary.of(model),
            window=window_of(model, number),
            qkv_bias=model.use_bias,
            out_bias=model.use_bias,
            mlp_bias=model.use_bias,
        )


# Hugging Face

_MLP = {"layers.*.mlp.up": "model.layers.*.mlp.c_fc", "layers.*.mlp.down": "model.layers.*.mlp.c_proj"}
_FIELDS = {name: name for name in (*SAME_FIELDS, "use_bias") if name != "rms_norm_eps"}
_FIELDS |= {"norm_epsilon": "rms_norm_eps"}
_DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "tie_word_embeddings": True, "use_bias": True}
_DEFAULTS |= {"initializer_range": 0.018042, "num_key_value_heads": 2, "head_dim": None}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}
_ACTIVATIONS |= {"silu": "silu", "relu2": "relu2"}
_DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout")


def _read(raw: Mapping[str, Any], _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and window from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=10000.0)
    windows, wrong = read_one_window(raw)
    return values | windows, [*problems, *wrong]


def _write(model: StarCoder2Model, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if starcoder2 does not represent it."""
    fields |= {**write_one_window(model, "starcoder2"), **dict.fromkeys(_DROPOUTS, 0.0), **write_rope(model)}
    return {"model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], **fields}


def _warnings(raw: Mapping[str, Any]) -> list[str]:
    return [*factor_warnings(raw), *dropout_warnings(raw, "starcoder2", *_DROPOUTS)]  # its files have 0.1


STARCODER2 = Family(
    name="starcoder2",
    stage=StarCoder2Stage,
    activations=("gelu_pytorch_tanh", "silu", "relu2"),
    options=StarCoder2Model,
    even_head_dim=True,
    problems=rotary_problems,
    hugging_face=HuggingFace(
        model_types={"starcoder2": ModelType(_DEFAULTS, {"partial_rotary_factor": 1.0})},
        modules=MODULES_BUT_MLP | _MLP,
        fields=_FIELDS,
        activations=_ACTIVATIONS,
        tied=TIED,
        read=_read,
        write=_write,
        warnings=_warnings,
        without_effect=("mlp_type", "norm_type"),  # of the first files; no version of its model reads them
    ),
)
