"""OLMo 1 to 3 (arXiv 2402.00838, 2501.00656, 2512.13961): Llama with other norms.

OLMo 1 has LayerNorm without weights before each branch. OLMo 2 and 3 have RMSNorm behind each branch, and normalize
queries and keys over all heads together. Most layers of OLMo 3 read a window of keys, with a rotary table of their own.

Other weights than those of Llama (megapar_models.families.llama), with h hidden, d the width of a head and `norms`
after:

    layers.N.attention_output_norm.weight   [h]             on every tp rank, in place of attention_norm
    layers.N.mlp_output_norm.weight         [h]             on every tp rank, in place of mlp_norm
    layers.N.attention.q_norm.weight        [heads * d]     cut as q
    layers.N.attention.k_norm.weight        [kv heads * d]  cut as k

At Hugging Face: olmo, olmo2 and olmo3.
"""

from dataclasses import dataclass
from typing import Any, Literal

from megapar.base.errors import ConfigError
from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import LayerKind
from megapar_models.local_rope import LocalRopeModel, read_ropes, rotary_of, write_ropes
from megapar_models.norms import NormRule
from megapar_models.rope import factor_warnings, read_rope, write_rope
from megapar_models.stage import Stage
from megapar_models.windows import SLIDING, full_every, read_windows, rotary_problems, window_of, write_windows


@dataclass(frozen=True)
class OlmoModel(LocalRopeModel):
    """The options of OLMo."""

    norms: Literal["before", "after"] = "after"
    """before: LayerNorm without weights of the inputs of attention and MLP (OLMo 1). after: RMSNorm of their outputs,
    and of queries and keys (OLMo 2 and 3)."""
    attention_bias: bool = False
    """Biases of all projections of attention."""


class OlmoStage(Stage[OlmoModel]):
    """Consecutive OLMo layers."""

    @classmethod
    def layer_kind(cls, model: OlmoModel, number: int) -> LayerKind:
        norm = NormRule(model.rms_norm_eps)
        if model.norms == "before":
            norm = NormRule(model.rms_norm_eps, "layer", weighted=False, biased=False)
        return LayerKind(
            norm=norm,
            norms=model.norms,
            rotary=rotary_of(model, number),
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=model.norms == "after",
            qk_norm_over="width",
        )


# OLMo 1 has no weights of norms, so these are the names of OLMo 2. Its post_attention_layernorm is behind attention.
_NORMS = {
    "layers.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
}
_FIELDS = {name: name for name in (*SAME_FIELDS, "attention_bias")}
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_DEFAULTS |= {"initializer_range": 0.02, "num_key_value_heads": None, "head_dim": None, "attention_bias": False}
_FIXED = {"attention_dropout": 0.0}
_MODEL_TYPES = {
    # Its eps is no field. Another one in the file would be without effect.
    "olmo": ModelType(_DEFAULTS, {**_FIXED, "clip_qkv": None, "rms_norm_eps": 1e-5}),
    "olmo2": ModelType(_DEFAULTS, _FIXED),
    "olmo3": ModelType(_DEFAULTS, _FIXED),
}
_THETA3 = 500000.0


def _read(raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Norms, rotary embedding and windows from a config.json; returns option values and problems."""
    if model_type != "olmo3":
        values, problems = read_rope(raw, default_theta=10000.0)
        return {**values, "norms": "before" if model_type == "olmo" else "after"}, problems
    # transformers takes rope_theta for layers that read all keys alone. The others have its default.
    values, problems = read_ropes(raw, _THETA3, "", _THETA3)
    types = raw.get("layer_types") or full_every(4, raw.get("num_hidden_layers", 0))
    windows, wrong = read_windows(raw, raw.get("sliding_window", 4096), types, keeps_unused=True)
    if SLIDING not in types:
        values.pop("rope_local_base_freq", None)
        windows = {}
    return {**values, **windows, "norms": "after"}, [*problems, *wrong]


def _write(model: OlmoModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if no model_type represents it."""
    if model.norms == "before":
        if model.sliding_window or model.rms_norm_eps != 1e-5:
            raise ConfigError(
                "model.sliding_window, model.rms_norm_eps: olmo of transformers has no window, and eps 1e-5"
            )
        del fields["rms_norm_eps"]
        return {"model_type": "olmo", "architectures": ["OlmoForCausalLM"], **fields, **write_rope(model)}
    if not model.sliding_window:
        return {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], **fields, **write_rope(model)}
    fields |= write_windows(model) | write_ropes(model)
    return {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], **fields}


OLMO = Family(
    name="olmo",
    stage=OlmoStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=OlmoModel,
    even_head_dim=True,
    problems=rotary_problems,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=MODULES_BUT_MLP | MLP_MODULES | _NORMS,
        fields=_FIELDS,
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        write=_write,
        warnings=factor_warnings,
    ),
)
