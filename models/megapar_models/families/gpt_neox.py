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
from megapar_models.codecs import GELUS, Always, Dropouts
from megapar_models.family import Codec, Family, HuggingFace, ModelType, Raw, same
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import PartialRotaryModel, Rotary
from megapar_models.rotary_fields import PartialRope
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
            rotary=Rotary.of(model),
            qk_norm=model.qk_norm,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            mlp_bias=model.mlp_bias,
        )

    @classmethod
    def ends_of(cls, model: GPTNeoXModel) -> Ends:
        return Ends(head_bias=model.head_bias)


@dataclass(frozen=True)
class NeoXRope(PartialRope):
    """Rotary positions under the names of GPT-NeoX."""

    part: float = 0.25
    """transformers' part of a head for an absent one."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        old = PartialRope(raw.get("rotary_emb_base", 10000.0), factor=raw.get("rotary_pct", self.part))
        return old.read(raw, model_type)

    def write(self, model: PartialRotaryModel, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        # Versions of transformers differ in these names, so the file has both.
        fields |= {"rotary_pct": model.partial_rotary_factor, "rotary_emb_base": model.rope_theta}


class _Branches(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        parallel = raw.get("use_parallel_residual", True)
        problems = [] if isinstance(parallel, bool) else [f"use_parallel_residual={parallel!r} should be bool"]
        values = {"parallel_residual": "two_norms" if parallel else "no"}
        return values | {"attention_bias": raw.get("attention_bias", True)}, problems

    def write(self, model: GPTNeoXModel, fields: dict[str, Any]) -> None:
        if model.parallel_residual == "one_norm":
            raise ConfigError("model.parallel_residual=one_norm: gpt_neox of Hugging Face has two_norms, or no")
        fields |= {"use_parallel_residual": model.parallel_residual == "two_norms"}
        fields |= {"attention_bias": model.attention_bias}


_LAYER = "gpt_neox.layers.*"

GPT_NEOX = Family(
    name="gpt_neox",
    stage=GPTNeoXStage,
    activations=("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu"),
    options=GPTNeoXModel,
    hugging_face=HuggingFace(
        model_types={"gpt_neox": ModelType("GPTNeoXForCausalLM", fixed={"is_decoder": False})},
        codecs=(
            Always({"mlp_bias": True, "head_bias": False, "qk_norm": False}, key_per_head=True),
            _Branches(),
            NeoXRope(),
            Dropouts(("attention_dropout", "hidden_dropout")),
        ),
        modules={
            "embedding": "gpt_neox.embed_in",
            "layers.*.attention_norm": f"{_LAYER}.input_layernorm",
            **dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), f"{_LAYER}.attention.query_key_value"),
            "layers.*.attention.o": f"{_LAYER}.attention.dense",
            "layers.*.mlp_norm": f"{_LAYER}.post_attention_layernorm",
            "layers.*.mlp.up": f"{_LAYER}.mlp.dense_h_to_4h",
            "layers.*.mlp.down": f"{_LAYER}.mlp.dense_4h_to_h",
            "norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        renamed={"lm_head.": "embed_out."},  # as transformers 5 calls it
        layouts={f"{_LAYER}.attention.query_key_value": Packing("num_attention_heads")},
        fields={
            **same("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
            **same("max_position_embeddings", "hidden_act", "tie_word_embeddings", "initializer_range"),
            "layer_norm_eps": "rms_norm_eps",
        },
        defaults={
            **{"hidden_act": "gelu", "layer_norm_eps": 1e-5},
            **{"tie_word_embeddings": False, "initializer_range": 0.02},
        },
        activations=GELUS,
        tied={"embed_out.weight": "gpt_neox.embed_in.weight"},
        without_effect=("classifier_dropout",),
    ),
)
