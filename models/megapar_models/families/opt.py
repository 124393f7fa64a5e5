"""OPT (arXiv 2205.01068): GPT-2 with ReLU, and a table of positions with two rows in front that no position reads.

Its weights are those of GPT-2; positions.weight has 2 + max_position_embeddings rows.

At Hugging Face: opt.
"""

from dataclasses import dataclass
from typing import Any

from megapar_models.codecs import Always
from megapar_models.families.gpt import GPTModel, GPTStage
from megapar_models.families.gpt_neox import GPT_NEOX
from megapar_models.family import Codec, Family, ModelType, Raw, like


@dataclass(frozen=True)
class OPTModel(GPTModel):
    """The options of OPT."""


class OPTStage(GPTStage):
    """Consecutive OPT layers."""

    first_position = 2


class _Layers(Codec):
    """What OPT 350M has otherwise."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        width, size, before = (raw.get(name) for name in ("word_embed_proj_dim", "hidden_size", "do_layer_norm_before"))
        problems = []
        if width not in (None, size):
            text = "is not supported: no rule projects embeddings to the width of layers and back"
            problems.append(f"word_embed_proj_dim={width} {text}; hidden_size is, {size}")
        if before not in (None, True):
            text = "is not supported: no rule norms the residual stream itself"
            problems.append(f"do_layer_norm_before={before!r} {text}; True is")
        return {}, problems

    def write(self, model: OPTModel, fields: dict[str, Any]) -> None:
        fields |= {**_FIXED, "do_layer_norm_before": True, "word_embed_proj_dim": model.hidden_size}
        fields |= {"pad_token_id": None}


_FIXED = {"_remove_final_layer_norm": False, "layerdrop": 0.0, "enable_bias": True}
_FIXED |= {"layer_norm_elementwise_affine": True}
_LAYER = "model.decoder.layers.*"

OPT = Family(
    name="opt",
    stage=OPTStage,
    activations=("relu", "gelu", "gelu_pytorch_tanh", "relu2", "silu"),
    options=OPTModel,
    hugging_face=like(
        GPT_NEOX,
        model_types={"opt": ModelType("OPTForCausalLM", fixed=_FIXED)},
        codecs=(Always({"rms_norm_eps": 1e-5}, key_per_head=True), _Layers()),  # the eps of norms is no field
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
            "attention_dropout": "attention_dropout",
        },
        defaults={
            **{"activation_function": "relu", "tie_word_embeddings": True, "init_std": 0.02},
            **{"dropout": 0.1, "attention_dropout": 0.0},
        },
        tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
        base_prefix="model.",
        without_effect=("activation_dropout",),  # no version of its model reads it
    ),
)
