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
from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing, Pairs
from megapar_models.windows import WindowModel, Windows, full_every, rotary_in_windows, window_of


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
        return LayerKind(
            norm=NormRule(model.rms_norm_eps, "layer", biased=False),
            parallel="one_norm",
            qk_norm=model.qk_norm,
            qk_norm_over="each_head",
            rotary=rotary_in_windows(model, number),
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )

    @classmethod
    def ends_of(cls, model: CohereModel) -> Ends:
        return Ends(logits=LogitRule(model.logit_scale))


class _KeyNorms(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        return {"qk_norm": raw.get("use_qk_norm", False)}, []

    def write(self, model: CohereModel, fields: dict[str, Any]) -> None:
        fields |= {"use_qk_norm": model.qk_norm}


class _Windows(Windows):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        windows, problems = super().read(raw, model_type)
        if not windows and not problems:
            problems = ["sliding_window=None is not supported; a number of keys is"]
        return windows, problems

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield what other names of the fields of cohere2 say that the fields themselves do not."""
        tied = raw.get("tie_word_embeddings", True)
        if raw.get("use_embedding_sharing", tied) != tied:
            text = f"is not supported beside tie_word_embeddings={tied}"
            yield f"use_embedding_sharing={raw['use_embedding_sharing']} {text}"
        switch = raw.get("layer_switch")
        if switch is not None and (switch < 1 or list(self.types(raw)) != full_every(switch, raw["num_hidden_layers"])):
            yield f"layer_switch={switch} is not supported unless each layer of that number has no window"


def _type_of(model: CohereModel) -> str:
    if not model.sliding_window:
        return "cohere"
    if model.qk_norm:
        raise ConfigError("model.qk_norm, model.sliding_window: cohere2 of Hugging Face has no norms of q and k")
    return "cohere2"


def neighbors(model: CohereModel) -> dict[str, Pairs]:
    """Return the tensors of q and k, whose rotary pairs are neighbors in Hugging Face's files."""
    names = (f"layers.*.attention.{name}" for name in ("q", "k", "q_norm", "k_norm"))
    return dict.fromkeys(names, Pairs(model.head_dim, 0, model.head_dim))


# What the published files of cohere2 say of the model that transformers computes.
_FIXED2 = {"attention_dropout": 0.0, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_qk_norm": False}
_FIXED2 |= {"order_of_interleaved_layers": "local_attn_first", "use_parallel_block": True, "use_gated_activation": True}
# A window decides on positions too, however long it is.
_WINDOWS = _Windows(4096, every=4, pattern="sliding_window_pattern", keeps_unused=True)

COHERE = Family(
    name="cohere",
    stage=CohereStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=CohereModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={
            "cohere": ModelType(
                "CohereForCausalLM", fixed={"attention_dropout": 0.0}, codecs=(Rope(500000.0), _KeyNorms())
            ),
            "cohere2": ModelType("Cohere2ForCausalLM", fixed=_FIXED2, codecs=(Rope(), _WINDOWS)),
        },
        type_of=_type_of,
        layouts={
            "model.layers.*.self_attn.q_norm": Packing("num_attention_heads", by_group=True),
            "model.layers.*.self_attn.k_norm": Packing("num_key_value_heads", by_group=True),
        },
        pairs=neighbors,
        fields={"layer_norm_eps": "rms_norm_eps", **same("attention_bias", "logit_scale")},
        defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": False, "logit_scale": 0.0625},
        # The last one is of how it was trained.
        without_effect=(
            *("_sliding_window_pattern", "cache_implementation", "model_max_length", "use_parallel_embedding"),
        ),
    ),
)
