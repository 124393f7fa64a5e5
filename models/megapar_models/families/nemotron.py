"""The dense Nemotrons (Nemotron-4, arXiv 2402.16819; Minitron, arXiv 2407.14679).

They have LayerNorm with a weight that is added to 1, an MLP without gate of squared ReLU, and a rotated part of each
head. The names of the weights are those of Llama (megapar_models.families.llama), without layers.N.mlp.gate. Norms also
have a bias.

At Hugging Face: nemotron.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import PartialRotaryModel, Rotary
from megapar_models.rotary_fields import PartialRope
from megapar_models.stage import Stage


@dataclass(frozen=True)
class NemotronModel(PartialRotaryModel):
    """The options of the dense Nemotrons."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    mlp_bias: bool = False
    """Biases of both matrices of the MLP."""


class NemotronStage(Stage[NemotronModel]):
    """Consecutive layers of a dense Nemotron."""

    @classmethod
    def layer_kind(cls, model: NemotronModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer", offset=1),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            mlp_bias=model.mlp_bias,
        )


class _Rope(PartialRope):
    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        # Minitron's files have the width of a head under NeMo's name, which no version of transformers reads.
        width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        if raw.get("kv_channels", width) != width:
            yield f"kv_channels={raw['kv_channels']} is not supported unless it is the width of a head, {width}"


NEMOTRON = Family(
    name="nemotron",
    stage=NemotronStage,
    activations=("relu2", "silu", "gelu_pytorch_tanh"),
    options=NemotronModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"nemotron": ModelType("NemotronForCausalLM", fixed={"attention_dropout": 0.0})},
        codecs=(_Rope(factor=0.5),),
        modules={"layers.*.mlp.gate": None},
        fields={"rms_norm_eps": None, **same("attention_bias", "mlp_bias"), "norm_eps": "rms_norm_eps"},
        defaults={
            **{"hidden_act": "relu2", "norm_eps": 1e-5, "initializer_range": 0.0134},
            **{"attention_bias": False, "mlp_bias": False},
        },
        activations=same("relu2", "silu", "gelu_pytorch_tanh"),
    ),
)
