"""Helium (Kyutai, 2025) and dense ERNIE 4.5 (Baidu, 2025): Llama with another order of the rows of q and k.

The two numbers of a rotary pair lie beside each other in files. A conversion moves them half a head apart.

At Hugging Face: helium and ernie4_5.
"""

from collections.abc import Iterator
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.options import Config
from megapar_models.families.llama import LLAMA, LlamaModel, LlamaStage
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.rotary_fields import Rope
from megapar_models.tensor_layouts import Pairs


class _Biases(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if model_type == "ernie4_5":
            names = ("attention_bias", "attention_out_bias", "mlp_bias")
            return dict.fromkeys(names, raw.get("use_bias", False)), []
        problems, width = [], raw.get("head_dim", 128)
        if width is not None and raw["num_attention_heads"] * width != raw["hidden_size"]:
            problems = [f"hidden_size={raw['hidden_size']} should be num_attention_heads x head_dim in helium"]
        return {name: raw.get(name, False) for name in ("attention_bias", "mlp_bias")}, problems

    def write(self, model: LlamaModel, fields: dict[str, Any]) -> None:
        if fields["model_type"] == "ernie4_5":
            fields |= {"use_bias": model.mlp_bias}
        else:
            fields |= {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}

    def problems(self, config: Config, model: LlamaModel) -> Iterator[str]:
        if model.qk_norm or model.sliding_window or model.layer_types:
            text = "family helium has no norms of q and k and no windows; use family llama"
            yield problem(config, "model.qk_norm model.sliding_window model.layer_types", text)


def _type_of(model: LlamaModel) -> str:
    if len({model.attention_bias, model.attention_out_bias, model.mlp_bias}) == 1:
        return "ernie4_5"
    if model.attention_out_bias or model.num_attention_heads * model.head_dim != model.hidden_size:
        text = "ernie4_5 has all biases or none; helium has none on o, and heads as wide as the model"
        raise ConfigError(f"model.attention_bias, model.attention_out_bias, model.mlp_bias, model.head_dim: {text}")
    return "helium"


def _pairs(model: LlamaModel) -> dict[str, Pairs]:
    return dict.fromkeys(("layers.*.attention.q", "layers.*.attention.k"), Pairs(model.head_dim, 0, model.head_dim))


_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}

HELIUM = Family(
    name="helium",
    stage=LlamaStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=LlamaModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={
            "helium": ModelType(
                "HeliumForCausalLM",
                {"rms_norm_eps": 1e-8, "num_key_value_heads": 20},
                _FIXED,
                (Rope(100000.0), _Biases()),
            ),
            "ernie4_5": ModelType(
                "Ernie4_5ForCausalLM",
                {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 2},
                {**_FIXED, "attention_bias": False, "mlp_bias": False},
                (Rope(500000.0), _Biases()),
            ),
        },
        type_of=_type_of,
        defaults={"head_dim": 128},
        pairs=_pairs,
    ),
)
