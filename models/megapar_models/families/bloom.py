"""BLOOM (arXiv 2211.05100): GPT-2's layers without positions, ALiBi in their place, and a norm of embeddings.

At Hugging Face: bloom.
"""

from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar_models.codecs import Always, Dropouts, Written
from megapar_models.families.falcon import MODULES
from megapar_models.families.gpt_neox import GPT_NEOX
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing

# Of a number of heads that somebody has mistyped, the first few are enough: checks of the options refuse the number.
_MOST_HEADS = 10_000


def slopes_of(heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi: 2^(-8 i / heads) for i from 1 on, if the number of heads is a power of 2.

    Otherwise those of the power below, then every other one of the power above, as in the code of the paper.
    """
    heads = min(heads, _MOST_HEADS)
    power = 1 << (heads.bit_length() - 1)
    own = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return tuple((own + [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power, 2)])[:heads])


class BloomStage(Stage[ModelConfig]):
    """Consecutive BLOOM layers."""

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer"),
            slopes=slopes_of(model.num_attention_heads),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
        )

    @classmethod
    def ends_of(cls, model: ModelConfig) -> Ends:
        return Ends(embedding_norm=NormRule(model.rms_norm_eps, "layer"))


class FourTimes(Codec):
    """An MLP four times as wide as the layers, whose width is no field."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        width = raw.get("hidden_size", raw.get("d_model"))
        return {"intermediate_size": 4 * width} if isinstance(width, int) else {}, []

    def write(self, model: ModelConfig, fields: dict[str, Any]) -> None:
        if model.intermediate_size != 4 * model.hidden_size:
            text = f"{fields['model_type']} of Hugging Face has 4 * hidden_size, {4 * model.hidden_size}"
            raise ConfigError(f"model.intermediate_size={model.intermediate_size}: {text}")


# slow_but_exact leaves out biases of products if pretraining_tp is above 1.
_FIXED = {"apply_residual_connection_post_layernorm": False, "slow_but_exact": False}
_LAYER = "transformer.h.*"

BLOOM = Family(
    name="bloom",
    stage=BloomStage,
    activations=("gelu_pytorch_tanh",),
    options=ModelConfig,
    hugging_face=like(
        GPT_NEOX,
        model_types={"bloom": ModelType("BloomForCausalLM", fixed=_FIXED)},
        codecs=(
            Always({"hidden_act": "gelu_pytorch_tanh"}, key_per_head=True),
            FourTimes(),
            Dropouts(("attention_dropout", "hidden_dropout")),
            Written(_FIXED),
        ),
        modules={**MODULES, "embedding_norm": "transformer.word_embeddings_layernorm"},
        renamed={},
        layouts={f"{_LAYER}.self_attention.query_key_value": Packing("num_attention_heads")},
        fields={
            **{"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "layer_norm_epsilon": "rms_norm_eps"},
            # Of samples in training. No position is beyond it for transformers, which does not read the field.
            "seq_length": "max_position_embeddings",
            **{"intermediate_size": None, "hidden_act": None},
        },
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "seq_length": 2048},
        tied={"lm_head.weight": "transformer.word_embeddings.weight"},
        base_prefix="transformer.",
        without_effect=(
            *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner", "offset_alibi"),
            *("skip_bias_add", "skip_bias_add_qkv"),  # of the code that trained BLOOM
            "pretraining_tp",
        ),
    ),
)
