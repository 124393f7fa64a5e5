"""OPT (arXiv 2205.01068): GPT-2 with ReLU, and a table of positions with two rows in front that no position reads.

Its weights are those of GPT-2; positions.weight has 2 + max_position_embeddings rows.

At Hugging Face: opt.
"""

from dataclasses import dataclass
from typing import Any

from megapar_models.families.gpt import GPTModel, GPTStage
from megapar_models.families.gpt_neox import FIELDS, GELUS, PLAIN_ACTIVATIONS, demand
from megapar_models.family import Family, HuggingFace, ModelType, Raw


@dataclass(frozen=True)
class OPTModel(GPTModel):
    """The options of OPT."""


class OPTStage(GPTStage):
    """Consecutive OPT layers."""

    first_position = 2


# Hugging Face

_LAYER = "model.decoder.layers.*"
_MODULES = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "layers.*.attention_norm": f"{_LAYER}.self_attn_layer_norm",
    **{f"layers.*.attention.{name}": f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"},
    "layers.*.attention.o": f"{_LAYER}.self_attn.out_proj",
    "layers.*.mlp_norm": f"{_LAYER}.final_layer_norm",
    "layers.*.mlp.up": f"{_LAYER}.fc1",
    "layers.*.mlp.down": f"{_LAYER}.fc2",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
}
_RENAMED = {"hidden_act": "activation_function", "intermediate_size": "ffn_dim", "initializer_range": "init_std"}
_FIELDS = {_RENAMED.get(name, name): name for name in FIELDS}
_FIELDS |= {"dropout": "hidden_dropout", "attention_dropout": "attention_dropout"}
_DEFAULTS: dict[str, Any] = {"activation_function": "relu", "tie_word_embeddings": True, "init_std": 0.02}
_DEFAULTS |= {"dropout": 0.1, "attention_dropout": 0.0}
_FIXED = {"_remove_final_layer_norm": False, "layerdrop": 0.0, "enable_bias": True}
_FIXED |= {"layer_norm_elementwise_affine": True}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    """What OPT 350M has otherwise, from a config.json. The eps of norms is no field."""
    width, size, before = (raw.get(name) for name in ("word_embed_proj_dim", "hidden_size", "do_layer_norm_before"))
    problems = []
    if width not in (None, size):
        text = "is not supported: no rule projects embeddings to the width of layers and back"
        problems.append(f"word_embed_proj_dim={width} {text}; hidden_size is, {size}")
    if before not in (None, True):
        text = "is not supported: no rule norms the residual stream itself"
        problems.append(f"do_layer_norm_before={before!r} {text}; True is")
    return {"rms_norm_eps": 1e-5}, problems


def _write(model: OPTModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if opt does not represent it."""
    demand(model, "opt", num_key_value_heads=model.num_attention_heads, rms_norm_eps=1e-5)
    fields |= {**_FIXED, "do_layer_norm_before": True, "word_embed_proj_dim": model.hidden_size, "pad_token_id": None}
    return {"model_type": "opt", "architectures": ["OPTForCausalLM"], **fields}


OPT = Family(
    name="opt",
    stage=OPTStage,
    activations=("relu", *(name for name in PLAIN_ACTIVATIONS if name != "relu")),
    options=OPTModel,
    hugging_face=HuggingFace(
        model_types={"opt": ModelType(_DEFAULTS, _FIXED)},
        modules=_MODULES,
        fields=_FIELDS,
        activations=GELUS,
        tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
        base_prefix="model.",
        read=_read,
        write=_write,
        without_effect=("activation_dropout",),  # no version of its model reads it
    ),
)
