"""GPT-J: its rules, and its names at Hugging Face (gptj). Its block is that of GPT-NeoX.

Attention and MLP have one norm together, attention has no biases, and logits have one. Rotary pairs are neighbors.
"""

import math
from typing import Any

from megapar_models.families.gpt_neox import GELUS, PLAIN_ACTIVATIONS, GPTNeoXModel, GPTNeoXStage, demand
from megapar_models.family import Family, HuggingFace, ModelType, Raw, dropout_warnings
from megapar_models.partial_rotary import partial_problems
from megapar_models.rotary_options import RopeScaling
from megapar_models.tensor_layouts import Pairs

# Hugging Face

_LAYER = "transformer.h.*"
_MODULES = {
    "embedding": "transformer.wte",
    "layers.*.attention_norm": f"{_LAYER}.ln_1",
    **{f"layers.*.attention.{name}": f"{_LAYER}.attn.{name}_proj" for name in "qkv"},
    "layers.*.attention.o": f"{_LAYER}.attn.out_proj",
    "layers.*.mlp.up": f"{_LAYER}.mlp.fc_in",
    "layers.*.mlp.down": f"{_LAYER}.mlp.fc_out",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
_DEFAULTS = {"n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
_DEFAULTS |= {"tie_word_embeddings": False, "initializer_range": 0.02}
# The file has a part of rotary positions alone: their base is 10,000.
_ALWAYS: dict[str, Any] = {"parallel_residual": "one_norm", "attention_bias": False, "mlp_bias": True}
_ALWAYS |= {"head_bias": True, "qk_norm": False, "rope_theta": 10000.0, "rope_scaling": RopeScaling()}
_DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")  # of classifiers


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    """The rotated part of a head from a config.json; returns option values and problems."""
    rotated, hidden_size, heads = raw.get("rotary_dim", 64), raw.get("n_embd"), raw.get("n_head")
    if not isinstance(rotated, int) or rotated < 1:
        return {}, [f"rotary_dim={rotated!r} is not supported; the number of rotated dimensions of a head is"]
    if not isinstance(hidden_size, int) or not isinstance(heads, int) or hidden_size < heads:
        return {}, [f"n_embd={hidden_size!r} is not supported below n_head={heads!r}: a head has a dimension at least"]
    width = hidden_size // heads
    part = rotated / width
    if int(width * part) < rotated:  # the quotient was rounded down
        part = math.nextafter(part, 1.0)
    return {**_ALWAYS, "partial_rotary_factor": part}, []


def _write(model: GPTNeoXModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if gptj does not represent it."""
    demand(model, "gptj", num_key_value_heads=model.num_attention_heads, **_ALWAYS)
    fields |= {"rotary_dim": model.rotary_width, **dict.fromkeys(_DROPOUTS, 0.0)}
    if fields["activation_function"] == "gelu_pytorch_tanh":
        fields["activation_function"] = "gelu_new"  # two names of one function; GPT-J's own file has this one
    return {"model_type": "gptj", "architectures": ["GPTJForCausalLM"], **fields}


def _pairs(model: GPTNeoXModel) -> dict[str, Pairs]:
    return dict.fromkeys(("layers.*.attention.q", "layers.*.attention.k"), Pairs(model.head_dim, 0, model.rotary_width))


def _warnings(raw: Raw) -> list[str]:
    return dropout_warnings(raw, "gptj", *_DROPOUTS)


GPTJ = Family(
    name="gptj",
    stage=GPTNeoXStage,
    activations=("gelu_pytorch_tanh", *(name for name in PLAIN_ACTIVATIONS if name != "gelu_pytorch_tanh")),
    options=GPTNeoXModel,
    problems=partial_problems,
    hugging_face=HuggingFace(
        model_types={"gptj": ModelType(_DEFAULTS, {})},
        modules=_MODULES,
        fields=_FIELDS,
        activations=GELUS,
        tied={"lm_head.weight": "transformer.wte.weight"},
        pairs=_pairs,
        read=_read,
        write=_write,
        warnings=_warnings,
        without_effect=("n_ctx", "rotary", "scale_attn_weights", *(f"summary_{name}" for name in _SUMMARY)),
    ),
)
