"""MPT (MosaicML, 2023): layers with ALiBi, LayerNorm without biases, and no other biases.

At Hugging Face: mpt.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION, ModelConfig
from megapar.config.options import Config
from megapar_models.codecs import Always, Dropouts, Written, unknown_in
from megapar_models.families.bloom import FourTimes, slopes_of
from megapar_models.families.gpt_neox import GPT_NEOX
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.stage import Stage


@dataclass(frozen=True)
class MPTModel(ModelConfig):
    """The options of MPT."""

    clip_qkv: float = field(default=0.0, metadata=OF_FUNCTION)
    """Bound of the numbers of queries, keys and values; 0: none."""
    softmax_scale: float = field(default=0.0, metadata=OF_FUNCTION)
    """Factor of attention's scores; 0: 1 / sqrt(width of a head)."""


class MPTStage(Stage[MPTModel]):
    """Consecutive MPT layers."""

    @classmethod
    def layer_kind(cls, model: MPTModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer", biased=False),
            slopes=slopes_of(model.num_attention_heads),
            qkv_clip=model.clip_qkv,
            attention_scale=model.softmax_scale or None,
        )


def _problems(config: Config, model: MPTModel) -> Iterator[str]:
    for name in ("clip_qkv", "softmax_scale"):
        if not 0 <= getattr(model, name) < float("inf"):
            yield problem(config, f"model.{name}", "must be at least 0, which means none")


# With other values transformers computes the same, and the model's own code another model.
_FIXED_ATTENTION = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False}
_FIXED_ATTENTION |= {"attn_uses_sequence_id": False, "alibi": True, "alibi_bias_max": 8}
_FIXED = {"no_bias": True, "logit_scale": None, "embedding_fraction": 1.0, "expansion_ratio": 4}


class _Attention(Codec):
    """The options of attention, in an object."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        stated = raw.get("attn_config") or {}
        problems = []
        for name, value in stated.items():
            if name in _FIXED_ATTENTION and value != _FIXED_ATTENTION[name]:
                problems.append(f"attn_config: {name}={value!r} is not supported; {_FIXED_ATTENTION[name]!r} is")
            elif name in ("clip_qkv", "softmax_scale") and value is not None and value <= 0:
                problems.append(f"attn_config: {name}={value!r} should be a number above 0, or null")
        problems += unknown_in(
            "attn_config", stated, ("attn_impl", "attn_pdrop", "clip_qkv", "softmax_scale", *_FIXED_ATTENTION)
        )
        if stated.get("attn_pdrop"):
            problems.append(f"attn_config: attn_pdrop={stated['attn_pdrop']} is not supported; 0 is")
        if raw.get("norm_type", "layernorm") not in ("layernorm", "low_precision_layernorm"):
            text = "is not supported; layernorm and low_precision_layernorm are"
            problems.append(f"norm_type={raw['norm_type']!r} {text}")
        return {name: float(stated.get(name) or 0) for name in ("clip_qkv", "softmax_scale") if not problems}, problems

    def write(self, model: MPTModel, fields: dict[str, Any]) -> None:
        numbers = {"clip_qkv": model.clip_qkv or None, "softmax_scale": model.softmax_scale or None}
        fields |= {"attn_config": {**_FIXED_ATTENTION, **numbers, "attn_pdrop": 0}}
        fields |= {"norm_type": "low_precision_layernorm"}


_LAYER = "transformer.blocks.*"

MPT = Family(
    name="mpt",
    stage=MPTStage,
    activations=("gelu",),
    options=MPTModel,
    problems=_problems,
    hugging_face=like(
        GPT_NEOX,
        model_types={"mpt": ModelType("MptForCausalLM", fixed=_FIXED)},
        codecs=(
            Always({"hidden_act": "gelu"}, key_per_head=True),
            FourTimes(),
            _Attention(),
            Dropouts(("emb_pdrop", "resid_pdrop")),
            Written(_FIXED),
        ),
        modules={
            "embedding": "transformer.wte",
            "layers.*.attention_norm": f"{_LAYER}.norm_1",
            **dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), f"{_LAYER}.attn.Wqkv"),
            "layers.*.attention.o": f"{_LAYER}.attn.out_proj",
            "layers.*.mlp_norm": f"{_LAYER}.norm_2",
            "layers.*.mlp.up": f"{_LAYER}.ffn.up_proj",
            "layers.*.mlp.down": f"{_LAYER}.ffn.down_proj",
            "norm": "transformer.norm_f",
            "head": "lm_head",
        },
        renamed={},
        layouts={},
        fields={
            **{"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"},
            **{"max_seq_len": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps"},
            **{"intermediate_size": None, "hidden_act": None},
        },
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "max_seq_len": 2048},
        tied={"lm_head.weight": "transformer.wte.weight"},
        base_prefix="transformer.",
        # How weights begin, a tokenizer, and learned positions, which are none beside ALiBi.
        without_effect=("init_device", "init_config", "tokenizer_name", "verbose", "learned_pos_emb"),
    ),
)
