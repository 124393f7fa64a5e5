"""GPT-NeoX (arXiv 2204.06745) and the models after it: Phi, GPT-J and Falcon.

Attention and MLP read the same residual stream, through one norm or a norm each. They have LayerNorm, an MLP without
gate, and a rotated part of each head.

The names of the weights are those of Llama (megapar_models.families.llama), without layers.N.mlp.gate, and with one
norm without layers.N.mlp_norm. Norms also have a bias.

At Hugging Face: gpt_neox.
"""

from dataclasses import dataclass
from typing import Any, Literal

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar_models.families.llama import SAME_FIELDS
from megapar_models.family import Family, HuggingFace, ModelType, Raw, dropout_warnings
from megapar_models.layer_kind import Ends, LayerKind
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
class GPTNeoXModel(PartialRotaryModel):
    """The options of GPT-NeoX, Phi, GPT-J and Falcon."""

    parallel_residual: Literal["no", "one_norm", "two_norms"] = "two_norms"
    """Whether attention and MLP read the same residual stream: through one norm, or through a norm each."""
    attention_bias: bool = True
    """Biases of all projections of attention."""
    mlp_bias: bool = True
    """Biases of both matrices of the MLP."""
    head_bias: bool = False
    """A bias of the logits."""
    qk_norm: bool = False
    """LayerNorm of each query and key head before the rotary embedding, with one weight for all heads."""


class GPTNeoXStage(Stage[GPTNeoXModel]):
    """Consecutive layers of GPT-NeoX, Phi, GPT-J or Falcon."""

    @classmethod
    def layer_kind(cls, model: GPTNeoXModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer"),
            parallel=model.parallel_residual,
            rotary=partial_rotary(model),
            qk_norm=model.qk_norm,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            mlp_bias=model.mlp_bias,
        )

    @classmethod
    def ends_of(cls, model: GPTNeoXModel) -> Ends:
        return Ends(head_bias=model.head_bias)


# Families with this block share these.
GELUS = {"gelu": "gelu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
GELUS |= {"gelu_pytorch_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2", "silu": "silu"}
PLAIN_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu")
# Fields of config.json whose names are those of our options. None of these models has a field for a head's width.
FIELDS = {name: name for name in SAME_FIELDS if name not in ("rms_norm_eps", "head_dim", "num_key_value_heads")}


def demand(model: ModelConfig, model_type: str, **values: Any) -> None:
    """Raise ConfigError for options with other values than every model of this model_type has."""
    width = model.hidden_size // model.num_attention_heads
    for name, value in {**values, "head_dim": width}.items():
        if getattr(model, name) != value:
            raise ConfigError(f"model.{name}={getattr(model, name)}: {model_type} of Hugging Face has {value}")


# Hugging Face

_LAYER = "gpt_neox.layers.*"
_MODULES = {
    "embedding": "gpt_neox.embed_in",
    "layers.*.attention_norm": f"{_LAYER}.input_layernorm",
    **dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), f"{_LAYER}.attention.query_key_value"),
    "layers.*.attention.o": f"{_LAYER}.attention.dense",
    "layers.*.mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "layers.*.mlp.up": f"{_LAYER}.mlp.dense_h_to_4h",
    "layers.*.mlp.down": f"{_LAYER}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}
_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.02}
_DROPOUTS = ("attention_dropout", "hidden_dropout")


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and branches from a config.json; returns option values and problems."""
    old = {"rope_theta": raw.get("rotary_emb_base", 10000.0), "partial_rotary_factor": raw.get("rotary_pct", 0.25)}
    values, problems = read_partial_rope(raw, old["rope_theta"], old["partial_rotary_factor"])
    parallel = raw.get("use_parallel_residual", True)
    biased = raw.get("attention_bias", True)
    if not isinstance(parallel, bool):
        problems = [*problems, f"use_parallel_residual={parallel!r} should be bool"]
    return {**values, "parallel_residual": "two_norms" if parallel else "no", "attention_bias": biased}, problems


def _write(model: GPTNeoXModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if gpt_neox does not represent it."""
    demand(
        model,
        "gpt_neox",
        num_key_value_heads=model.num_attention_heads,
        mlp_bias=True,
        head_bias=False,
        qk_norm=False,
    )
    if model.parallel_residual == "one_norm":
        raise ConfigError("model.parallel_residual=one_norm: gpt_neox of Hugging Face has two_norms, or no")
    fields |= {"use_parallel_residual": model.parallel_residual == "two_norms", "attention_bias": model.attention_bias}
    rope = write_partial_rope(model)
    # Versions of transformers differ in these names, so the file has both.
    old = {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
    return {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **fields, **rope, **old}


def _warnings(raw: Raw) -> list[str]:
    return [*factor_warnings(raw), *dropout_warnings(raw, "gpt_neox", *_DROPOUTS)]


GPT_NEOX = Family(
    name="gpt_neox",
    stage=GPTNeoXStage,
    activations=PLAIN_ACTIVATIONS,
    options=GPTNeoXModel,
    problems=partial_problems,
    hugging_face=HuggingFace(
        model_types={"gpt_neox": ModelType(_DEFAULTS, {"is_decoder": False})},
        modules=_MODULES,
        renamed={"lm_head.": "embed_out."},  # as transformers 5 calls it
        layouts={f"{_LAYER}.attention.query_key_value": Packing("num_attention_heads")},
        fields=FIELDS | {"layer_norm_eps": "rms_norm_eps"},
        activations=GELUS,
        tied={"embed_out.weight": "gpt_neox.embed_in.weight"},
        read=_read,
        write=_write,
        warnings=_warnings,
        without_effect=("classifier_dropout",),
    ),
)
