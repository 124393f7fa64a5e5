"""OLMo 1 to 3 (arXiv 2402.00838, 2501.00656, 2512.13961): Llama with other norms.

OLMo 1 has LayerNorm without weights before each branch. OLMo 2 and 3 have RMSNorm behind each branch, and normalize
queries and keys over all heads together. Most layers of OLMo 3 read a window of keys, with a rotary table of their own.

Other weights than those of Llama (megapar_models.families.llama), with h hidden, d the width of a head and `norms`
after:

    layers.N.attention_output_norm.weight   [h]             on every tp rank, in place of attention_norm
    layers.N.mlp_output_norm.weight         [h]             on every tp rank, in place of mlp_norm
    layers.N.attention.q_norm.weight        [heads * d]     cut as q
    layers.N.attention.k_norm.weight        [kv heads * d]  cut as k

At Hugging Face: olmo, olmo2 and olmo3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary_fields import LocalRope, Rope
from megapar_models.stage import Stage
from megapar_models.windows import LocalRopeModel, Windows, rotary_of, window_of


@dataclass(frozen=True)
class OlmoModel(LocalRopeModel):
    """The options of OLMo."""

    norms: Literal["before", "after"] = "after"
    """before: LayerNorm without weights of the inputs of attention and MLP (OLMo 1). after: RMSNorm of their outputs,
    and of queries and keys (OLMo 2 and 3)."""
    attention_bias: bool = False
    """Biases of all projections of attention."""
    clip_qkv: float = field(default=0.0, metadata=OF_FUNCTION)
    """Bound of the numbers of queries, keys and values of OLMo 1; 0: none."""


class OlmoStage(Stage[OlmoModel]):
    """Consecutive OLMo layers."""

    @classmethod
    def layer_kind(cls, model: OlmoModel, number: int) -> LayerKind:
        norm = NormRule(model.rms_norm_eps)
        if model.norms == "before":
            norm = NormRule(model.rms_norm_eps, "layer", weighted=False, biased=False)
        return LayerKind(
            norm=norm,
            norms=model.norms,
            rotary=rotary_of(model, number),
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            qkv_clip=model.clip_qkv,
            out_bias=model.attention_bias,
            qk_norm=model.norms == "after",
            qk_norm_over="width",
        )


class _Norms(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if model_type != "olmo":
            return {"norms": "after"}, []
        bound = raw.get("clip_qkv")
        problems = [] if bound is None or bound > 0 else [f"clip_qkv={bound} should be a number above 0, or null"]
        return {"norms": "before", "clip_qkv": bound or 0.0}, problems

    def write(self, model: OlmoModel, fields: dict[str, Any]) -> None:
        if fields["model_type"] == "olmo":
            if model.sliding_window or model.rms_norm_eps != 1e-5:
                text = "olmo of transformers has no window, and eps 1e-5"
                raise ConfigError(f"model.sliding_window, model.rms_norm_eps: {text}")
            del fields["rms_norm_eps"]
            fields |= {"clip_qkv": model.clip_qkv or None}


def _problems(config: Config, model: OlmoModel) -> Iterator[str]:
    if not 0 <= model.clip_qkv < float("inf"):
        yield problem(config, "model.clip_qkv", "must be at least 0, which means none")
    if model.clip_qkv and model.norms == "after":
        yield problem(config, "model.clip_qkv model.norms", "OLMo 2 and 3 norm queries and keys instead; use 0")


def _type_of(model: OlmoModel) -> str:
    if model.norms == "before":
        return "olmo"
    return "olmo3" if model.sliding_window else "olmo2"


_FIXED = {"attention_dropout": 0.0}
# transformers takes rope_theta for layers that read all keys alone. The others have its default.
_ROPES3 = LocalRope(500000.0, local_theta=500000.0, windows=Windows(4096, every=4, keeps_unused=True))

OLMO = Family(
    name="olmo",
    stage=OlmoStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=OlmoModel,
    problems=_problems,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={
            # Its eps is no field. Another one in the file would be without effect.
            "olmo": ModelType("OlmoForCausalLM", {}, {**_FIXED, "rms_norm_eps": 1e-5}, (Rope(),)),
            "olmo2": ModelType("Olmo2ForCausalLM", {}, _FIXED, (Rope(),)),
            "olmo3": ModelType("Olmo3ForCausalLM", {}, _FIXED, (_ROPES3,)),
        },
        type_of=_type_of,
        codecs=(_Norms(),),
        # OLMo 1 has no weights of norms, so these are the names of OLMo 2. Its post_attention_layernorm is behind
        # attention.
        modules={
            "layers.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
            "layers.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
        },
        fields=same("attention_bias"),
        defaults={"rms_norm_eps": 1e-5, "attention_bias": False},
    ),
)
