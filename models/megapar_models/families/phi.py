"""Phi-1, 1.5 and 2: their rules, and their names at Hugging Face (phi). Their block is that of GPT-NeoX.

Attention and MLP have one norm together, and logits have a bias.
"""

from typing import Any

from megapar_models.families.gpt_neox import FIELDS, GELUS, PLAIN_ACTIVATIONS, GPTNeoXModel, GPTNeoXStage, demand
from megapar_models.families.llama import MODULES_BUT_MLP, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw, dropout_warnings
from megapar_models.partial_rotary import partial_problems, read_partial_rope, write_partial_rope
from megapar_models.rope import factor_warnings

# Hugging Face

_LAYER = "model.layers.*"
_MODULES = MODULES_BUT_MLP | {
    "layers.*.attention.o": f"{_LAYER}.self_attn.dense",
    "layers.*.attention.q_norm": f"{_LAYER}.self_attn.q_layernorm",
    "layers.*.attention.k_norm": f"{_LAYER}.self_attn.k_layernorm",
    "layers.*.mlp.up": f"{_LAYER}.mlp.fc1",
    "layers.*.mlp.down": f"{_LAYER}.mlp.fc2",
    "norm": "model.final_layernorm",
}
_DEFAULTS: dict[str, Any] = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "tie_word_embeddings": False}
_DEFAULTS |= {"initializer_range": 0.02, "num_key_value_heads": None, "qk_layernorm": False}
_OWN_FIELDS = {
    "layer_norm_eps": "rms_norm_eps",
    "num_key_value_heads": "num_key_value_heads",
    "qk_layernorm": "qk_norm",
}
_ALWAYS = {"parallel_residual": "one_norm", "attention_bias": True, "mlp_bias": True, "head_bias": True}
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop")


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    values, problems = read_partial_rope(raw, 10000.0, 0.5)
    return {**values, **_ALWAYS}, problems


def _write(model: GPTNeoXModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if phi does not represent it."""
    demand(model, "phi", **_ALWAYS)
    return {"model_type": "phi", "architectures": ["PhiForCausalLM"], **fields, **write_partial_rope(model)}


def _warnings(raw: Raw) -> list[str]:
    return [*factor_warnings(raw), *dropout_warnings(raw, "phi", *_DROPOUTS)]  # the files of Phi-2 have 0.1


PHI = Family(
    name="phi",
    stage=GPTNeoXStage,
    activations=("gelu_pytorch_tanh", *(name for name in PLAIN_ACTIVATIONS if name != "gelu_pytorch_tanh")),
    options=GPTNeoXModel,
    problems=partial_problems,
    hugging_face=HuggingFace(
        model_types={"phi": ModelType(_DEFAULTS, {})},
        modules=_MODULES,
        fields=FIELDS | _OWN_FIELDS,
        activations=GELUS,
        tied=TIED,
        read=_read,
        write=_write,
        warnings=_warnings,
    ),
)
