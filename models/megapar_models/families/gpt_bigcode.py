"""StarCoder and SantaCoder (arXiv 2305.06161): GPT-2 with one key/value head. Their names at Hugging Face."""

from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.families.gpt import FIELDS, MODULES, WITHOUT_EFFECT, GPTModel, GPTStage, warnings_of_dropout
from megapar_models.families.gpt_neox import GELUS, PLAIN_ACTIVATIONS, demand
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.tensor_layouts import Packing

# Hugging Face

_DEFAULTS: dict[str, Any] = {"n_inner": None, "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5}
_DEFAULTS |= {"tie_word_embeddings": True, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "initializer_range": 0.02}
_FIXED = {"scale_attn_weights": True, "add_cross_attention": False}
# The order of operations in 16 bits, sizes of old inference code, and the head of classifiers.
_OWN_WITHOUT_EFFECT: tuple[str, ...] = (
    "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
    "inference_runner",
)
_OWN_WITHOUT_EFFECT += ("max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache")
# transformers derives the number of key/value heads from multi_query.
_OWN_WITHOUT_EFFECT += ("validate_runner_input", "num_key_value_heads")


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    """The number of key/value heads from a config.json; returns option values and problems."""
    multi_query = raw.get("multi_query", True)
    problems = [] if isinstance(multi_query, bool) else [f"multi_query={multi_query!r} should be bool"]
    return {"num_key_value_heads": 1 if multi_query else raw.get("n_head")}, problems


def _write(model: GPTModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if gpt_bigcode does not represent it."""
    demand(model, "gpt_bigcode")
    if model.num_key_value_heads not in (1, model.num_attention_heads):
        raise ConfigError(
            f"model.num_key_value_heads={model.num_key_value_heads}: gpt_bigcode of Hugging Face has 1, or as many as "
            "heads"
        )
    fields |= {"multi_query": model.num_key_value_heads == 1, "embd_pdrop": model.hidden_dropout, **_FIXED}
    return {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], **fields}


GPT_BIGCODE = Family(
    name="gpt_bigcode",
    stage=GPTStage,
    activations=("gelu_pytorch_tanh", *(name for name in PLAIN_ACTIVATIONS if name != "gelu_pytorch_tanh")),
    options=GPTModel,
    hugging_face=HuggingFace(
        model_types={"gpt_bigcode": ModelType(_DEFAULTS, _FIXED)},
        modules=MODULES,
        # With one key/value head all rows are one group, else each head is one.
        layouts={"transformer.h.*.attn.c_attn": Packing("num_key_value_heads")},
        fields=FIELDS,
        activations=GELUS,
        tied={"lm_head.weight": "transformer.wte.weight"},
        base_prefix="transformer.",
        read=_read,
        write=_write,
        warnings=warnings_of_dropout,
        without_effect=(*WITHOUT_EFFECT, *_OWN_WITHOUT_EFFECT),
    ),
)
