"""Gemma 2 and 3 (arXiv 2408.00118, 2503.19786): Gemma with norms behind attention and MLP as well.

Most layers read a window of keys. Gemma 2 caps scores and logits. Gemma 3 normalizes queries and keys, and its layers
with a window have a rotary table of their own. VaultGemma (arXiv 2510.15001) is Gemma 2 without the norms behind.

These are the weights beyond those of Llama (megapar_models.families.llama has the others), with h hidden and d the
width of a head:

    layers.N.attention_output_norm.weight   [h]     on every tp rank
    layers.N.mlp_output_norm.weight         [h]     on every tp rank
    layers.N.attention.{q,k}_norm.weight    [d]     on every tp rank (Gemma 3)

At Hugging Face: gemma2, vaultgemma, gemma3_text, and the text of gemma3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.codecs import EvenHeads, ZeroAsNull
from megapar_models.families.gemma import GEMMA, Causal, GemmaModel, GemmaStage
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.rotary_fields import LocalRope, Rope
from megapar_models.windows import LocalRopeModel, Windows, rotary_of, window_of


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
    norms: Literal["before", "both"] = "both"
    """Norms of the inputs of attention and MLP (VaultGemma), or also of their outputs."""


class Gemma2Stage(GemmaStage[Gemma2Model]):
    """Consecutive layers of Gemma 2 or 3."""

    @classmethod
    def layer_kind(cls, model: Gemma2Model, number: int) -> LayerKind:
        return replace(
            super().layer_kind(model, number),
            norms=model.norms,
            rotary=rotary_of(model, number),
            window=window_of(model, number),
            qk_norm=model.qk_norm,
            attention_scale=(model.query_pre_attn_scalar or model.head_dim) ** -0.5,
            score_cap=model.attn_logit_softcapping,
        )

    @classmethod
    def ends_of(cls, model: Gemma2Model) -> Ends:
        return replace(super().ends_of(model), logits=LogitRule(cap=model.final_logit_softcapping))


def _type_of(model: Gemma2Model) -> str:
    if model.qk_norm:
        return "gemma3_text"
    return "gemma2" if model.norms == "both" else "vaultgemma"


_SCALARS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


class _Scores(Codec):
    """Factors and caps of scores, and the norms of a model type."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        norms = "before" if model_type == "vaultgemma" else "both"
        return {"qk_norm": model_type == "gemma3_text", "norms": norms}, []

    def write(self, model: Gemma2Model, fields: dict[str, Any]) -> None:
        if not model.qk_norm and model.rope_local_base_freq:
            raise ConfigError("model.rope_local_base_freq: gemma2 of transformers has one rotary table; use 0.0")
        if model.qk_norm and model.attn_logit_softcapping:
            raise ConfigError("model.attn_logit_softcapping: gemma3_text of transformers does not cap scores; use 0.0")
        if model.qk_norm and model.norms != "both":
            raise ConfigError("model.norms: gemma3_text of transformers has norms of inputs and outputs; use both")
        fields |= {"query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim}

    def problems(self, config: Config, model: Gemma2Model) -> Iterator[str]:
        for name in _SCALARS:
            if getattr(model, name) < 0:
                yield problem(config, f"model.{name}", "must be at least 0")


class _Windows(Windows):
    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield a problem for another window under the name that the first files have beside the right one."""
        window = raw.get("sliding_window", 4096)
        if raw.get("sliding_window_size", window) != window:
            text = f"is not supported unless it is sliding_window, {window}"
            yield f"sliding_window_size={raw['sliding_window_size']} {text}"

    def write(self, model: Gemma2Model, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        # transformers makes a mask of the window also if no layer reads it, and fails without a number.
        fields["sliding_window"] = model.sliding_window or model.max_position_embeddings


_CAPS = ZeroAsNull(("attn_logit_softcapping", "final_logit_softcapping"))
_CAPS2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_CODECS2 = (_Scores(), _CAPS, _Windows(4096, every=2), Rope(), Causal())
# In Gemma 3 a window decides on the rotary table too, however long it is.
_WINDOWS3 = _Windows(4096, every=6, pattern="sliding_window_pattern", keeps_unused=True, layers=26)
_CODECS3 = (_Scores(), _CAPS, LocalRope(1e6, local="rope_local_base_freq", windows=_WINDOWS3), Causal())
# The text of a multimodal file states what differs from these.
_GEMMA3 = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_size": 2304}
_GEMMA3 |= {"intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "vocab_size": 262208}
_GEMMA3 |= {"max_position_embeddings": 131072}
# transformers' model of Gemma 3 does not read the cap of scores.
_FIXED3 = {"attention_dropout": 0.0, "attn_logit_softcapping": None}

GEMMA2 = Family(
    name="gemma2",
    stage=Gemma2Stage,
    activations=("gelu_pytorch_tanh", "silu", "relu2"),
    options=Gemma2Model,
    even_head_dim=True,
    hugging_face=like(
        GEMMA,
        model_types={
            "gemma2": ModelType("Gemma2ForCausalLM", _CAPS2, {"attention_dropout": 0.0}, _CODECS2),
            "vaultgemma": ModelType(
                "VaultGemmaForCausalLM", _CAPS2, {"attention_dropout": 0.0}, (EvenHeads(), *_CODECS2)
            ),
            "gemma3_text": ModelType("Gemma3ForCausalLM", _GEMMA3, _FIXED3, _CODECS3),
        },
        type_of=_type_of,
        modules={
            # In Llama post_attention_layernorm is the norm before the MLP, and here it is the one behind attention.
            "layers.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
            "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
            "layers.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
        },
        fields={"hidden_activation": "hidden_act", **same(*_SCALARS)},
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
        },
        activations=same("gelu_pytorch_tanh", "silu", "relu2"),
        # transformers reads hidden_activation, and writes the pattern that gave its layer_types.
        without_effect=("hidden_act", "_sliding_window_pattern", "cache_implementation"),
    ),
)
