"""The dense Nemotrons (Nemotron-4, arXiv 2402.16819; Minitron, arXiv 2407.14679).

They have LayerNorm with a weight that is added to 1, an MLP without gate of squared ReLU, and a rotated part of each
head. The names of the weights are those of Llama (megapar_models.families.llama), without layers.N.mlp.gate. Norms also
have a bias.

At Hugging Face: nemotron.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megapar_models.families.llama import MODULES_BUT_MLP, PLAIN_MLP_MODULES, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.partial_rotary import (
    PartialRotaryModel,
    partial_problems,
    partial_rotary,
    read_partial_rope,
    write_partial_rope,
)
from megapar_models.rope import factor_warnings
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
            rotary=partial_rotary(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            mlp_bias=model.mlp_bias,
        )


# Hugging Face

_FIELDS = {name: name for name in (*SAME_FIELDS, "attention_bias", "mlp_bias") if name != "rms_norm_eps"}
_FIELDS |= {"norm_eps": "rms_norm_eps"}
_DEFAULTS = {"hidden_act": "relu2", "norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.0134}
_DEFAULTS |= {"num_key_value_heads": None, "head_dim": None, "attention_bias": False, "mlp_bias": False}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    return read_partial_rope(raw, 10000.0, 0.5)


def _judge(raw: Raw, _: str) -> Iterator[str]:
    # Minitron's files have the width of a head under NeMo's name, which no version of transformers reads.
    width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    if raw.get("kv_channels", width) != width:
        yield f"kv_channels={raw['kv_channels']} is not supported unless it is the width of a head, {width}"


def _write(model: NemotronModel, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "nemotron", "architectures": ["NemotronForCausalLM"], **fields, **write_partial_rope(model)}


NEMOTRON = Family(
    name="nemotron",
    stage=NemotronStage,
    activations=("relu2", "silu", "gelu_pytorch_tanh"),
    options=NemotronModel,
    even_head_dim=True,
    problems=partial_problems,
    hugging_face=HuggingFace(
        model_types={"nemotron": ModelType(_DEFAULTS, {"attention_dropout": 0.0})},
        modules=MODULES_BUT_MLP | PLAIN_MLP_MODULES,
        fields=_FIELDS,
        activations={name: name for name in ("relu2", "silu", "gelu_pytorch_tanh")},
        tied=TIED,
        read=_read,
        judge=_judge,
        write=_write,
        warnings=factor_warnings,
    ),
)
