"""Cohere's Command R and Command R7B: parallel branches behind one LayerNorm without bias, and scaled logits.

The layers of Command R7B that read all keys see no positions (NoPE). The others have a window and rotary positions.

The names of the weights are those of Llama (megapar_models.families.llama), without layers.N.mlp_norm. Command R+ also
has these, with d the width of a head:

    layers.N.attention.q_norm.weight    [heads * d]       cut by heads
    layers.N.attention.k_norm.weight    [kv heads * d]    cut by heads; several ranks may hold the same head

At Hugging Face: cohere and cohere2.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.model_options import OF_FUNCTION
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rope import factor_warnings, read_rope, write_rope
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing, Pairs
from megapar_models.windows import (
    WindowModel,
    full_every,
    is_full,
    read_windows,
    rotary_problems,
    window_of,
    write_windows,
)


@dataclass(frozen=True)
class CohereModel(WindowModel):
    """The options of Cohere's models. With a window, layers without it have no rotary positions."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    qk_norm: bool = False
    """LayerNorm of each query and key head before the rotary embedding, with weights of its own (Command R+)."""
    logit_scale: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of logits."""


class CohereStage(Stage[CohereModel]):
    """Consecutive layers of Cohere's models."""

    @classmethod
    def layer_kind(cls, model: CohereModel, number: int) -> LayerKind:
        sees_positions = not model.sliding_window or not is_full(model, number)
        return LayerKind(
            norm=NormRule(model.rms_norm_eps, "layer", biased=False),
            parallel="one_norm",
            qk_norm=model.qk_norm,
            qk_norm_over="each_head",
            rotary=Rotary.of(model) if sees_positions else None,
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )

    @classmethod
    def ends_of(cls, model: CohereModel) -> Ends:
        return Ends(logits=LogitRule(model.logit_scale))


_RENAMED = {"rms_norm_eps": "layer_norm_eps"}
_FIELDS = {_RENAMED.get(name, name): name for name in (*SAME_FIELDS, "attention_bias", "logit_scale")}
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "layer_norm_eps": 1e-5, "tie_word_embeddings": True}
_DEFAULTS |= {"initializer_range": 0.02, "num_key_value_heads": None, "head_dim": None, "attention_bias": False}
_DEFAULTS |= {"logit_scale": 0.0625}
_FIXED = {"attention_dropout": 0.0}
# What the published files of cohere2 say of the model that transformers computes.
_FIXED2: dict[str, Any] = {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_qk_norm": False}
_FIXED2 |= {"order_of_interleaved_layers": "local_attn_first", "use_parallel_block": True, "use_gated_activation": True}
_ROTATED = tuple(f"layers.*.attention.{name}" for name in ("q", "k", "q_norm", "k_norm"))
_LAYOUTS = {
    "model.layers.*.self_attn.q_norm": Packing("num_attention_heads", by_group=True),
    "model.layers.*.self_attn.k_norm": Packing("num_key_value_heads", by_group=True),
}
_MODEL_TYPES = {
    "cohere": ModelType(_DEFAULTS, _FIXED),
    "cohere2": ModelType(_DEFAULTS, _FIXED | _FIXED2),
}


def _pairs(model: CohereModel) -> dict[str, Pairs]:
    """Return the tensors of q and k, whose rotary pairs are neighbors in Hugging Face's files."""
    return dict.fromkeys(_ROTATED, Pairs(model.head_dim, 0, model.head_dim))


def _read(raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and windows from a config.json; returns option values and problems."""
    if model_type == "cohere":
        values, problems = read_rope(raw, default_theta=500000.0)
        return values | {"qk_norm": raw.get("use_qk_norm", False)}, problems
    values, problems = read_rope(raw, default_theta=10000.0)
    pattern = raw.get("sliding_window_pattern", 4)
    types = raw.get("layer_types") or full_every(pattern, raw.get("num_hidden_layers", 0))
    # A window decides on positions too, however long it is.
    windows, wrong = read_windows(raw, raw.get("sliding_window", 4096), types, keeps_unused=True)
    if not windows and not wrong:
        wrong = ["sliding_window=None is not supported; a number of keys is"]
    return values | windows, [*problems, *wrong]


def _judge(raw: Raw, model_type: str) -> Iterator[str]:
    """Yield what other names of the fields of cohere2 say that the fields themselves do not."""
    if model_type != "cohere2":
        return
    tied = raw.get("tie_word_embeddings", True)
    if raw.get("use_embedding_sharing", tied) != tied:
        yield f"use_embedding_sharing={raw['use_embedding_sharing']} is not supported beside tie_word_embeddings={tied}"
    layers = raw["num_hidden_layers"]
    types = raw.get("layer_types") or full_every(raw.get("sliding_window_pattern", 4), layers)
    switch = raw.get("layer_switch")
    if switch is not None and (switch < 1 or list(types) != full_every(switch, layers)):
        yield f"layer_switch={switch} is not supported unless each layer of that number has no window"


def _write(model: CohereModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if neither model_type represents it."""
    fields |= write_rope(model)
    if not model.sliding_window:
        fields |= {"use_qk_norm": model.qk_norm}
        return {"model_type": "cohere", "architectures": ["CohereForCausalLM"], **fields}
    if model.qk_norm:
        raise ConfigError("model.qk_norm, model.sliding_window: cohere2 of Hugging Face has no norms of q and k")
    return {"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], **fields, **write_windows(model)}


COHERE = Family(
    name="cohere",
    stage=CohereStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=CohereModel,
    even_head_dim=True,
    problems=rotary_problems,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=MODULES_BUT_MLP | MLP_MODULES,
        layouts=_LAYOUTS,
        pairs=_pairs,
        fields=_FIELDS,
        activations=ACTIVATIONS,
        tied=TIED,
        # The last one is of how it was trained.
        without_effect=(
            *("_sliding_window_pattern", "cache_implementation", "model_max_length", "use_parallel_embedding"),
        ),
        read=_read,
        judge=_judge,
        write=_write,
        warnings=factor_warnings,
    ),
)
