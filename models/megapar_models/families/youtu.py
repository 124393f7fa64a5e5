"""Youtu-LLM (Tencent, 2025): Llama with the latent attention of DeepSeek-V3.

The weights of attention are those of megapar_models.latent_attention, and the others those of Llama
(megapar_models.families.llama).

At Hugging Face: youtu.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import TypeVar

from megapar_models.families.deepseek import DEEPSEEK, LatentModel, Latents, latent_scale, with_latents
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage


@dataclass(frozen=True)
class DenseLatentModel(LatentModel, RotaryModel):
    """The options of a model with latent attention and without experts."""


D = TypeVar("D", bound=DenseLatentModel, default=DenseLatentModel)


class DenseLatentStage(Stage[D]):
    """Consecutive layers with latent attention and the MLP of Llama."""

    @classmethod
    def layer_kind(cls, model: D, number: int) -> LayerKind:
        kind = LayerKind(norm=NormRule(model.rms_norm_eps), rotary=Rotary.of(model))
        return replace(with_latents(kind, model), attention_scale=latent_scale(model))


class _Initial(Codec):
    """The deviation of initial weights follows from the width if it is absent. That of embeddings is not read."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        stated = raw.get("initializer_range")
        return {"initializer_range": 2.0 / (5.0 * raw["hidden_size"]) ** 0.5 if stated is None else stated}, []

    def warnings(self, raw: Raw, family: str) -> Iterator[str]:
        if raw.get("embedding_initializer_range") is not None:
            text = "embeddings start as matrices do, by model.initializer_range"
            yield f"config.json: embedding_initializer_range is not read: {text}"


_FIXED = {"attention_dropout": 0.0, "rope_interleave": True, "mlp_bias": False}

YOUTU = Family(
    name="youtu",
    stage=DenseLatentStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=DenseLatentModel,
    even_head_dim=True,
    hugging_face=like(
        DEEPSEEK,
        model_types={"youtu": ModelType("YoutuForCausalLM", fixed=_FIXED)},
        codecs=(Rope(), Latents(), _Initial()),
        defaults={"tie_word_embeddings": True},
        activations=same("silu", "gelu_pytorch_tanh", "relu2"),
        stacked={},
        without_effect=("embedding_initializer_range",),
        ignored=lambda raw: (),
    ),
)
