"""BioGPT (Luo et al., 2022, doi 10.1093/bib/bbac409): OPT with GELU and scaled embeddings.

At Hugging Face: biogpt.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from megapar.config.model_options import OF_FUNCTION
from megapar_models.codecs import Always, Dropouts, Written
from megapar_models.families.gpt import GPTModel, GPTStage
from megapar_models.families.opt import OPT
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import Ends

LAYERDROP = {"layerdrop": 0.0}


@dataclass(frozen=True)
class BioGPTModel(GPTModel):
    """The options of BioGPT and XGLM."""

    scale_embedding: bool = field(default=True, metadata=OF_FUNCTION)
    """Multiply token embeddings by the root of hidden_size."""


class BioGPTStage(GPTStage):
    """Consecutive BioGPT layers."""

    first_position = 2

    @classmethod
    def ends_of(cls, model: GPTModel) -> Ends:
        assert isinstance(model, BioGPTModel)
        return Ends(embedding_multiplier=math.sqrt(model.hidden_size) if model.scale_embedding else 1.0)


_LAYER = "biogpt.layers.*"
_OF_LAYERS: dict[str, Any] = {
    "layers.*.attention_norm": f"{_LAYER}.self_attn_layer_norm",
    **{f"layers.*.attention.{name}": f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"},
    "layers.*.attention.o": f"{_LAYER}.self_attn.out_proj",
    "layers.*.mlp_norm": f"{_LAYER}.final_layer_norm",
    "layers.*.mlp.up": f"{_LAYER}.fc1",
    "layers.*.mlp.down": f"{_LAYER}.fc2",
}

BIOGPT = Family(
    name="biogpt",
    stage=BioGPTStage,
    activations=("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu"),
    options=BioGPTModel,
    hugging_face=like(
        OPT,
        model_types={"biogpt": ModelType("BioGptForCausalLM", fixed=LAYERDROP)},
        codecs=(
            Always({"rms_norm_eps": 1e-5}, key_per_head=True),  # transformers does not read layer_norm_eps
            Dropouts(("activation_dropout",)),
            Written({**LAYERDROP, "pad_token_id": None}),
        ),
        modules={
            "embedding": "biogpt.embed_tokens",
            "positions": "biogpt.embed_positions",
            **_OF_LAYERS,
            "norm": "biogpt.layer_norm",
            "head": "output_projection",
            **dict.fromkeys(("project_in", "project_out")),
        },
        fields={
            **{"word_embed_proj_dim": None, "do_layer_norm_before": None, **same("scale_embedding", "hidden_act")},
            **{"intermediate_size": "intermediate_size", "initializer_range": "initializer_range"},
            **{"hidden_dropout_prob": "hidden_dropout", "attention_probs_dropout_prob": "attention_dropout"},
        },
        defaults={
            **{"hidden_act": "gelu", "initializer_range": 0.02, "scale_embedding": True},
            **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        },
        tied={"output_projection.weight": "biogpt.embed_tokens.weight"},
        base_prefix="",
        without_effect=("layer_norm_eps",),
    ),
)
