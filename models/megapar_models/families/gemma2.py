"""Gemma 2 and 3 (arXiv 2408.00118, 2503.19786): Gemma with norms behind attention and MLP as well.

Most layers read a window of keys. Gemma 2 caps scores and logits. Gemma 3 normalizes queries and keys, and its layers
with a window have a rotary table of their own.

These are the weights beyond those of Llama (megapar_models.families.llama has the others), with h hidden and d the
width of a head:

    layers.N.attention_output_norm.weight   [h]     on every tp rank
    layers.N.mlp_output_norm.weight         [h]     on every tp rank
    layers.N.attention.{q,k}_norm.weight    [d]     on every tp rank (Gemma 3)

At Hugging Face: gemma2, gemma3_text, and the text of gemma3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.families.gemma import ACTIVATIONS, DEFAULTS, FIELDS, GemmaModel, GemmaStage, bidirectional
from megapar_models.families.llama import MLP_MODULES, MODULES_BUT_MLP, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.local_rope import LocalRopeModel, read_ropes, rotary_of, write_ropes
from megapar_models.rope import factor_warnings, read_rope, write_rope
from megapar_models.windows import SLIDING, full_every, read_windows, rotary_problems, window_of, write_windows


@dataclass(frozen=True)
class Gemma2Model(LocalRopeModel, GemmaModel):
    """The options of Gemma 2 and 3."""

    qk_norm: bool = False
    """Norms of each head's query and key before the rotary embedding (Gemma 3)."""
    query_pre_attn_scalar: int = field(default=0, metadata=OF_FUNCTION)
    """Scores are divided by its root; 0: the width of a head."""
    attn_logit_softcapping: float = field(default=0.0, metadata=OF_FUNCTION)
    """Scores x become cap * tanh(x / cap), with this cap; 0: they stay as they are."""
    final_logit_softcapping: float = field(default=0.0, metadata=OF_FUNCTION)
    """Logits x become cap * tanh(x / cap), with this cap; 0: they stay as they are."""


class Gemma2Stage(GemmaStage[Gemma2Model]):
    """Consecutive layers of Gemma 2 or 3."""

    @classmethod
    def layer_kind(cls, model: Gemma2Model, number: int) -> LayerKind:
        return replace(
            super().layer_kind(model, number),
            norms="both",
            rotary=rotary_of(model, number),
            window=window_of(model, number),
            qk_norm=model.qk_norm,
            attention_scale=(model.query_pre_attn_scalar or model.head_dim) ** -0.5,
            score_cap=model.attn_logit_softcapping,
        )

    @classmethod
    def ends_of(cls, model: Gemma2Model) -> Ends:
        return replace(super().ends_of(model), logits=LogitRule(cap=model.final_logit_softcapping))


# In Llama post_attention_layernorm is the norm before the MLP, and here it is the one behind attention.
_NORMS = {
    "layers.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
}
_RENAMED = {"hidden_act": "hidden_activation"}
_SCALARS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_DEFAULTS = {_RENAMED.get(name, name): value for name, value in DEFAULTS.items()}
_DEFAULTS |= {"num_key_value_heads": 4, "query_pre_attn_scalar": 256}
_GEMMA2 = {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# The text of a multimodal file states what differs from these.
_GEMMA3 = {**_DEFAULTS, "attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_size": 2304}
_GEMMA3 |= {"intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "vocab_size": 262208}
_GEMMA3 |= {"max_position_embeddings": 131072}
_FIXED = {"attention_dropout": 0.0}
# transformers' model of Gemma 3 does not read the cap of scores.
_FIXED3 = {**_FIXED, "attn_logit_softcapping": None}
_MODEL_TYPES = {
    "gemma2": ModelType(_GEMMA2, _FIXED),
    "gemma3_text": ModelType(_GEMMA3, _FIXED3),
}


def _read(raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Norms, rotary embedding and windows from a config.json; returns option values and problems."""
    count = raw.get("num_hidden_layers", _GEMMA3["num_hidden_layers"])
    window = raw.get("sliding_window", 4096)
    if model_type == "gemma2":
        pattern = 2
        values, problems = read_rope(raw, default_theta=10000.0)
    else:
        pattern = raw.get("sliding_window_pattern", 6)
        values, problems = read_ropes(raw, 1e6, "rope_local_base_freq", 10000.0)
    types = raw.get("layer_types") or full_every(pattern, count)
    # In Gemma 3 a window decides on the rotary table too, however long it is.
    windows, wrong = read_windows(raw, window, types, keeps_unused=model_type != "gemma2")
    if SLIDING not in types:
        values.pop("rope_local_base_freq", None)
        windows = {}
    values["qk_norm"] = model_type != "gemma2"
    return values | windows, [*problems, *wrong, *bidirectional(raw)]


def _judge(raw: Raw, _: str) -> Iterator[str]:
    """Yield a problem for another window under the name that Gemma 2's first files have beside the right one."""
    window = raw.get("sliding_window", 4096)
    if raw.get("sliding_window_size", window) != window:
        yield f"sliding_window_size={raw['sliding_window_size']} is not supported unless it is sliding_window, {window}"


def _problems(config: Config, model: Gemma2Model) -> Iterator[str]:
    yield from rotary_problems(config, model)
    for name in _SCALARS:
        if getattr(model, name) < 0:
            yield problem(config, f"model.{name}", "must be at least 0")


def _write(model: Gemma2Model, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if no model_type represents it."""
    fields |= {name: fields[name] or None for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    fields |= {"query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim, **write_windows(model)}
    # transformers makes a mask of the window also if no layer reads it, and fails without a number.
    fields["sliding_window"] = model.sliding_window or model.max_position_embeddings
    if not model.qk_norm:
        if model.rope_local_base_freq:
            raise ConfigError("model.rope_local_base_freq: gemma2 of transformers has one rotary table; use 0.0")
        return {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **fields, **write_rope(model)}
    if model.attn_logit_softcapping:
        raise ConfigError("model.attn_logit_softcapping: gemma3_text of transformers does not cap scores; use 0.0")
    return {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **fields, **write_ropes(model)}


GEMMA2 = Family(
    name="gemma2",
    stage=Gemma2Stage,
    activations=ACTIVATIONS,
    options=Gemma2Model,
    even_head_dim=True,
    problems=_problems,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=MODULES_BUT_MLP | MLP_MODULES | _NORMS,
        fields={_RENAMED.get(name, name): name for name in (*FIELDS, *_SCALARS)},
        activations={name: name for name in ACTIVATIONS},
        tied=TIED,
        # transformers reads hidden_activation, and writes the pattern that gave its layer_types.
        without_effect=("hidden_act", "_sliding_window_pattern", "cache_implementation"),
        read=_read,
        judge=_judge,
        write=_write,
        warnings=factor_warnings,
    ),
)
