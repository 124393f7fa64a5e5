"""nanochat (Karpathy, 2025): norms without weights, one of them behind the embedding, squared ReLU and capped logits.

Queries and keys are rotated backwards, and then normalized. The weights are those of Llama
(megapar_models.families.llama), without norms and layers.N.mlp.gate.

At Hugging Face: nanochat.
"""

from dataclasses import dataclass, field, replace

from megapar.config.model_options import OF_FUNCTION
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.codecs import Always, ZeroAsNull
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage


@dataclass(frozen=True)
class NanoChatModel(RotaryModel):
    """The options of nanochat."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    final_logit_softcapping: float = field(default=0.0, metadata=OF_FUNCTION)
    """Logits x become cap * tanh(x / cap), with this cap; 0: they stay as they are."""


class NanoChatStage(Stage[NanoChatModel]):
    """Consecutive layers of nanochat."""

    @classmethod
    def layer_kind(cls, model: NanoChatModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=_norm(model),
            rotary=replace(Rotary.of(model), backwards=True),
            qk_norm=True,
            qk_norm_after_rotary=True,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )

    @classmethod
    def ends_of(cls, model: NanoChatModel) -> Ends:
        return Ends(embedding_norm=_norm(model), logits=LogitRule(cap=model.final_logit_softcapping))


def _norm(model: NanoChatModel) -> NormRule:
    return NormRule(model.rms_norm_eps, weighted=False)


NANOCHAT = Family(
    name="nanochat",
    stage=NanoChatStage,
    activations=("relu2", "silu", "gelu_pytorch_tanh"),
    options=NanoChatModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={
            "nanochat": ModelType("NanoChatForCausalLM", fixed={"attention_dropout": 0.0, "partial_rotary_factor": 1.0})
        },
        codecs=(Always(), Rope(), ZeroAsNull(("final_logit_softcapping",))),
        modules={
            "layers.*.mlp.gate": None,
            "layers.*.mlp.up": "model.layers.*.mlp.fc1",
            "layers.*.mlp.down": "model.layers.*.mlp.fc2",
        },
        fields={"head_dim": None, **same("attention_bias", "final_logit_softcapping")},
        defaults={"hidden_act": "relu2", "attention_bias": False, "final_logit_softcapping": 15.0},
        activations=same("relu2", "silu", "gelu_pytorch_tanh"),
    ),
)
