"""BitNet b1.58 2B4T (arXiv 2504.12285), with dense matrices: Llama with norms in front of the last matrix of a branch.

The paper's model multiplies with matrices rounded to -1, 0 and 1 and inputs rounded to 8 bits. This one does not: it is
what transformers computes for a config.json without quantization_config, and a file with that is refused.

Its weights are those of Llama (megapar_models.families.llama), and these. Sizes are those of Llama:

    layers.N.attention.sub_norm.weight      [heads * d]     cut as the inputs of attention.o
    layers.N.mlp.sub_norm.weight            [i]             cut as the inputs of mlp.down

At Hugging Face: bitnet, without quantization_config.
"""

from dataclasses import dataclass

from megapar_models.codecs import Always
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage


@dataclass(frozen=True)
class BitNetModel(RotaryModel):
    """The options of BitNet."""

    attention_bias: bool = False
    """Biases of all projections of attention."""


class BitNetStage(Stage[BitNetModel]):
    """Consecutive BitNet layers."""

    @classmethod
    def layer_kind(cls, model: BitNetModel, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            sub_norms=True,
        )


BITNET = Family(
    name="bitnet",
    stage=BitNetStage,
    activations=("relu2", "silu", "gelu_pytorch_tanh"),
    options=BitNetModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={
            "bitnet": ModelType("BitNetForCausalLM", fixed={"attention_dropout": 0.0, "partial_rotary_factor": 1.0})
        },
        codecs=(Always(), Rope(500000.0)),  # transformers has no other width of heads
        modules={
            "layers.*.attention.sub_norm": "model.layers.*.self_attn.attn_sub_norm",
            "layers.*.mlp.sub_norm": "model.layers.*.mlp.ffn_sub_norm",
        },
        fields={"head_dim": None, **same("attention_bias")},
        defaults={
            **{"num_key_value_heads": 5, "hidden_act": "relu2", "rms_norm_eps": 1e-5, "attention_bias": False},
            "max_position_embeddings": 2048,
        },
        activations=same("relu2", "silu", "gelu_pytorch_tanh"),
    ),
)
