"""OPT (arXiv 2205.01068): GPT-2 with ReLU, and a table of positions with two rows in front that no position reads.

Its weights are those of GPT-2; positions.weight has 2 + max_position_embeddings rows. OPT 350M has norms of the stream
itself, none before the head, and narrow embeddings (project_in.weight and project_out.weight).

At Hugging Face: opt.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megapar.config.messages import problem
from megapar.config.options import Config
from megapar_models.codecs import Always
from megapar_models.families.gpt import GPTModel, GPTStage
from megapar_models.families.gpt_neox import GPT_NEOX
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import Ends, LayerKind


@dataclass(frozen=True)
class OPTModel(GPTModel):
    """The options of OPT."""

    word_embed_proj_dim: int = 0
    """Width of embeddings, projected to that of the layers and back before the head; 0: that of the layers."""
    do_layer_norm_before: bool = True
    """Norms before attention, MLP and head. Without: norms of the residual stream behind attention and MLP."""


class OPTStage(GPTStage):
    """Consecutive OPT layers."""

    first_position = 2

    @classmethod
    def layer_kind(cls, model: GPTModel, number: int) -> LayerKind:
        assert isinstance(model, OPTModel)
        return replace(super().layer_kind(model, number), norms="before" if model.do_layer_norm_before else "stream")

    @classmethod
    def ends_of(cls, model: GPTModel) -> Ends:
        assert isinstance(model, OPTModel)
        return Ends(width=model.word_embed_proj_dim, norm=model.do_layer_norm_before)


def _problems(config: Config, model: OPTModel) -> Iterator[str]:
    if model.word_embed_proj_dim < 0:
        yield problem(config, "model.word_embed_proj_dim", "must be at least 0, which means the width of the layers")


class _Width(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        width, hidden = raw.get("word_embed_proj_dim"), raw.get("hidden_size")
        if width is not None and width < 1:
            return {}, [f"word_embed_proj_dim={width} should be a whole number from 1 on, or null"]
        return {"word_embed_proj_dim": 0 if width in (None, hidden) else width}, []

    def write(self, model: OPTModel, fields: dict[str, Any]) -> None:
        fields |= {**_FIXED, "word_embed_proj_dim": model.word_embed_proj_dim or model.hidden_size}
        fields |= {"pad_token_id": None}


_FIXED = {"_remove_final_layer_norm": False, "layerdrop": 0.0, "enable_bias": True}
_FIXED |= {"layer_norm_elementwise_affine": True}
_LAYER = "model.decoder.layers.*"

OPT = Family(
    name="opt",
    stage=OPTStage,
    activations=("relu", "gelu", "gelu_pytorch_tanh", "relu2", "silu"),
    options=OPTModel,
    problems=_problems,
    hugging_face=like(
        GPT_NEOX,
        model_types={"opt": ModelType("OPTForCausalLM", fixed=_FIXED)},
        codecs=(Always({"rms_norm_eps": 1e-5}, key_per_head=True), _Width()),  # the eps of norms is no field
        modules={
            "embedding": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "layers.*.attention_norm": f"{_LAYER}.self_attn_layer_norm",
            **{f"layers.*.attention.{name}": f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"},
            "layers.*.attention.o": f"{_LAYER}.self_attn.out_proj",
            "layers.*.mlp_norm": f"{_LAYER}.final_layer_norm",
            "layers.*.mlp.up": f"{_LAYER}.fc1",
            "layers.*.mlp.down": f"{_LAYER}.fc2",
            "norm": "model.decoder.final_layer_norm",
            "project_in": "model.decoder.project_in",
            "project_out": "model.decoder.project_out",
            "head": "lm_head",
        },
        renamed={},
        layouts={},
        fields={
            "layer_norm_eps": None,
            "activation_function": "hidden_act",
            "ffn_dim": "intermediate_size",
            "init_std": "initializer_range",
            "dropout": "hidden_dropout",
            **same("attention_dropout", "do_layer_norm_before"),
        },
        defaults={
            **{"activation_function": "relu", "tie_word_embeddings": True, "init_std": 0.02},
            **{"dropout": 0.1, "attention_dropout": 0.0, "do_layer_norm_before": True},
        },
        tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
        base_prefix="model.",
        without_effect=("activation_dropout",),  # no version of its model reads it
    ),
)
