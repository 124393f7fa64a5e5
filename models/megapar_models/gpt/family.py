"""The GPT-2 family: its options, and its names at Hugging Face and in Megatron-LM."""

from collections.abc import Mapping
from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.family import Family, HuggingFace, Megatron, ModelType
from megapar_models.gpt.model import GPTModel, GPTStage
from megapar_models.gpt.reference import logits
from megapar_models.tensor_layouts import Packing

# Hugging Face. GPT-BigCode has the same modules and fields.

# GPT-2's c_attn stacks the weights of q, k and v.
MODULES = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "layers.*.attention_norm": "transformer.h.*.ln_1",
    "layers.*.attention.q": "transformer.h.*.attn.c_attn",
    "layers.*.attention.k": "transformer.h.*.attn.c_attn",
    "layers.*.attention.v": "transformer.h.*.attn.c_attn",
    "layers.*.attention.o": "transformer.h.*.attn.c_proj",
    "layers.*.mlp_norm": "transformer.h.*.ln_2",
    "layers.*.mlp.up": "transformer.h.*.mlp.c_fc",
    "layers.*.mlp.down": "transformer.h.*.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
# Modules of the class Conv1D, whose weights are [in, out]. Those of Linear are [out, in].
_CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_LAYOUTS = {f"transformer.h.*.{name}": Packing(transposed=True) for name in _CONV1D}
FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "resid_pdrop": "hidden_dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "initializer_range",
}
_DEFAULTS = {
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "initializer_range": 0.02,
}
_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}

# The number of positions under its old name, the head of classifiers, and an order of operations for fp16.
WITHOUT_EFFECT = (
    *("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("summary_type", "summary_use_proj"),
)


def _write(model: GPTModel, fields: dict[str, Any]) -> dict[str, Any]:
    # config.json of gpt2 has no field for grouped-query attention or for the width of a head.
    whole = model.num_key_value_heads == model.num_attention_heads
    if not whole or model.num_attention_heads * model.head_dim != model.hidden_size:
        raise ConfigError(
            "model.num_key_value_heads, model.head_dim: gpt2 of Hugging Face has as many key/value heads as heads, "
            "of width hidden_size / num_attention_heads"
        )
    # Two names of one function. GPT-2's own config.json has this one.
    if model.hidden_act == "gelu_pytorch_tanh":
        fields["activation_function"] = "gelu_new"
    fields["embd_pdrop"] = model.hidden_dropout
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **fields, **_FIXED}


def warnings_of_dropout(raw: Mapping[str, Any]) -> list[str]:
    """A line if a config.json has another dropout of embeddings than of the residual stream: ours is one for both."""
    embedding = raw.get("embd_pdrop", 0.1)
    residual = raw.get("resid_pdrop", 0.1)
    if embedding != residual:
        both = "model.hidden_dropout is the latter for both, and training may choose another"
        return [f"config.json: embd_pdrop={embedding} differs from resid_pdrop={residual}: {both}"]
    return []


GPT = Family(
    name="gpt",
    stage=GPTStage,
    reference=logits,
    activations=("gelu_pytorch_tanh", "relu2"),
    options=GPTModel,
    hugging_face=HuggingFace(
        model_types={"gpt2": ModelType(_DEFAULTS, _FIXED)},
        modules=MODULES,
        fields=FIELDS,
        activations={"gelu_new": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "relu2": "relu2"},
        tied={"lm_head.weight": "transformer.wte.weight"},
        layouts=_LAYOUTS,
        base_prefix="transformer.",
        write=_write,
        warnings=warnings_of_dropout,
        without_effect=WITHOUT_EFFECT,
    ),
    megatron=Megatron(
        swiglu=False, normalization="LayerNorm", position_embedding_type="learned_absolute", add_bias_linear=True
    ),
)
