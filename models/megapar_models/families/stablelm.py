"""StableLM 3B and 2 (arXiv 2402.17834): Llama with LayerNorm and a rotated part of each head.

By option attention and MLP read the same residual stream through one norm, and each head of queries and keys has a
norm. Its weights are those of Llama (megapar_models.families.llama). Norms of the residual stream also have a bias.
With norms of heads (StableLM 2 12B) there are these, with d the width of a head:

    layers.N.attention.q_norm.weight    [heads * d]       cut by heads
    layers.N.attention.k_norm.weight    [kv heads * d]    cut by heads; several ranks may hold the same head

At Hugging Face: stablelm.
"""

from dataclasses import dataclass

from megapar_models.codecs import Always, Dropouts
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, like
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import PartialRotaryModel, Rotary
from megapar_models.rotary_fields import PartialRope
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing


@dataclass(frozen=True)
class StableLmModel(PartialRotaryModel):
    """The options of StableLM."""

    attention_bias: bool = False
    """Biases of the query, key and value projections."""
    parallel_residual: bool = False
    """Attention and MLP read the same residual stream, through one norm."""
    qk_norm: bool = False
    """LayerNorm of each query and key head before the rotary embedding, with weights of its own (StableLM 2 12B)."""


class StableLmStage(Stage[StableLmModel]):
    """Consecutive StableLM layers."""

    @classmethod
    def layer_kind(cls, model: StableLmModel, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps, "layer"),
            parallel="one_norm" if model.parallel_residual else "no",
            rotary=Rotary.of(model),
            qk_norm=model.qk_norm,
            qk_norm_over="each_head",
            qk_norm_rule=NormRule(model.rms_norm_eps, "layer", biased=False),
            qkv_bias=model.attention_bias,
        )


_LAYER = "model.layers.*"
# Every head's norm is a tensor of its own.
_NORMS = {name: f"{_LAYER}.self_attn.{name}_layernorm.norms.*" for name in "qk"}

STABLELM = Family(
    name="stablelm",
    stage=StableLmStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=StableLmModel,
    hugging_face=like(
        LLAMA,
        model_types={"stablelm": ModelType("StableLmForCausalLM", fixed={"rotary_scaling_factor": 1.0})},
        codecs=(Always(), PartialRope(factor=0.25), Dropouts(("attention_dropout", "hidden_dropout"))),
        modules={f"layers.*.attention.{name}_norm": theirs for name, theirs in _NORMS.items()},
        layouts={_NORMS["q"]: Packing("num_attention_heads"), _NORMS["k"]: Packing("num_key_value_heads")},
        fields={
            **{"head_dim": None, "rms_norm_eps": None, "layer_norm_eps": "rms_norm_eps"},
            **{"num_key_value_heads": "num_key_value_heads", "use_qkv_bias": "attention_bias"},
            **{"use_parallel_residual": "parallel_residual", "qk_layernorm": "qk_norm"},
        },
        defaults={
            **{"layer_norm_eps": 1e-5, "num_key_value_heads": 32, "use_qkv_bias": False},
            **{"use_parallel_residual": False, "qk_layernorm": False},
        },
        without_effect=("use_norm_bias",),  # the tensors of the norms say it
    ),
)
