"""StarCoder2 (arXiv 2402.19173): GPT-2's norms and MLP, Llama's rotary positions and key/value heads, and a window.

At Hugging Face: starcoder2.
"""

from dataclasses import dataclass

from megapar_models.codecs import Dropouts
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage
from megapar_models.windows import OneWindow, WindowModel, window_of


@dataclass(frozen=True)
class StarCoder2Model(WindowModel):
    """The options of StarCoder2."""

    use_bias: bool = True
    """Biases of all matrices of attention and of the MLP."""


class StarCoder2Stage(Stage[StarCoder2Model]):
    """Consecutive StarCoder2 layers."""

    @classmethod
    def layer_kind(cls, model: StarCoder2Model, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer"),
            rotary=Rotary.of(model),
            window=window_of(model, number),
            qkv_bias=model.use_bias,
            out_bias=model.use_bias,
            mlp_bias=model.use_bias,
        )


_DROPOUTS = Dropouts(("attention_dropout", "residual_dropout", "embedding_dropout"), written=True)  # its files have 0.1

STARCODER2 = Family(
    name="starcoder2",
    stage=StarCoder2Stage,
    activations=("gelu_pytorch_tanh", "silu", "relu2"),
    options=StarCoder2Model,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"starcoder2": ModelType("Starcoder2ForCausalLM", fixed={"partial_rotary_factor": 1.0})},
        codecs=(OneWindow(), _DROPOUTS, Rope()),
        modules={
            "layers.*.mlp.gate": None,
            "layers.*.mlp.up": "model.layers.*.mlp.c_fc",
            "layers.*.mlp.down": "model.layers.*.mlp.c_proj",
        },
        fields={"rms_norm_eps": None, **same("use_bias"), "norm_epsilon": "rms_norm_eps"},
        defaults={
            **{"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "tie_word_embeddings": True, "use_bias": True},
            **{"initializer_range": 0.018042, "num_key_value_heads": 2},
        },
        activations={**same("gelu_pytorch_tanh"), "gelu_new": "gelu_pytorch_tanh", **same("silu", "relu2")},
        without_effect=("mlp_type", "norm_type"),  # of the first files; no version of its model reads them
    ),
)
