"""MiniCPM3 (OpenBMB, 2024): Llama with latent attention, and the factors of MiniCPM (arXiv 2404.06395).

The weights are those of Youtu-LLM (megapar_models.families.youtu).

At Hugging Face: minicpm3.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.codecs import EvenHeads, ZeroAsNull
from megapar_models.families.deepseek import Latents
from megapar_models.families.youtu import YOUTU, DenseLatentModel, DenseLatentStage
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.rotary_fields import Rope


@dataclass(frozen=True)
class MiniCPM3Model(DenseLatentModel):
    """The options of MiniCPM3."""

    mlp_bias: bool = False
    """Biases of all matrices of the MLP."""
    scale_emb: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of token embeddings."""
    scale_depth: float = field(default=0.0, metadata=OF_FUNCTION)
    """Outputs of attention and MLP are multiplied by scale_depth / sqrt(num_hidden_layers); 0: they have no factor."""
    dim_model_base: int = field(default=0, metadata=OF_FUNCTION)
    """Logits are multiplied by dim_model_base / hidden_size; 0: they have no factor."""


class MiniCPM3Stage(DenseLatentStage[MiniCPM3Model]):
    """Consecutive layers of MiniCPM3."""

    @classmethod
    def layer_kind(cls, model: MiniCPM3Model, number: int) -> LayerKind:
        factor = model.scale_depth / math.sqrt(model.num_hidden_layers) if model.scale_depth else 1.0
        return replace(super().layer_kind(model, number), residual_multiplier=factor, mlp_bias=model.mlp_bias)

    @classmethod
    def ends_of(cls, model: MiniCPM3Model) -> Ends:
        factor = model.dim_model_base / model.hidden_size if model.dim_model_base else 1.0
        return Ends(embedding_multiplier=model.scale_emb, logits=LogitRule(factor))


class _Latents(Latents):
    """Latent attention, and the factors."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        # transformers takes null for no factor, and another number for an absent field.
        values |= {name: raw.get(name, default) or 0 for name, default in _FACTORS.items()}
        width = raw.get("v_head_dim")
        values["v_head_dim"] = raw["hidden_size"] // raw["num_attention_heads"] if width is None else width
        return values, problems

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield what latent attention does not compute, and factors of 0."""
        yield from super().judge(raw, model_type)
        for name in _FACTORS:
            if raw.get(name) == 0:
                yield f"{name}=0 is not supported; null means no factor"

    def problems(self, config: Config, model: MiniCPM3Model) -> Iterator[str]:
        yield from super().problems(config, model)
        for name in _FACTORS:
            if getattr(model, name) < 0:
                yield problem(config, f"model.{name}", "must be at least 0, which means no factor")


_FACTORS = {"scale_depth": 1.4, "dim_model_base": 256}

MINICPM3 = Family(
    name="minicpm3",
    stage=MiniCPM3Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=MiniCPM3Model,
    even_head_dim=True,
    hugging_face=like(
        YOUTU,
        model_types={"minicpm3": ModelType("MiniCPM3ForCausalLM", fixed={"attention_dropout": 0.0})},
        codecs=(Rope(), _Latents(768, 64, 32), ZeroAsNull(tuple(_FACTORS)), EvenHeads()),
        fields=same("mlp_bias", "scale_emb", *_FACTORS),
        defaults={
            **{"rms_norm_eps": 1e-5, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
            **{"v_head_dim": None, "initializer_range": 0.1, "mlp_bias": False, "scale_emb": 12.0, **_FACTORS},
        },
        # The numbers of a rotary pair lie half of the rotated part apart, as here.
        pairs=lambda model: {},
    ),
)
