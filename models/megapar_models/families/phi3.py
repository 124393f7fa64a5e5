"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): Llama with a window, and with a rotated part of each head.

Its weights are those of Llama (megapar_models.families.llama). Their files have q, k and v in one matrix, and gate and
up.

At Hugging Face: phi3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.options import Config
from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, overlaid
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.partial_rotary import (
    PartialRotaryModel,
    partial_problems,
    partial_rotary,
    read_partial_rope,
    write_partial_rope,
)
from megapar_models.rope import stated_rope, with_rope
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, read_one_window, window_of, window_problems, write_one_window


@dataclass(frozen=True)
class Phi3Model(PartialRotaryModel, WindowModel):
    """The options of Phi-3 and Phi-4."""


class Phi3Stage(Stage[Phi3Model]):
    """Consecutive Phi-3 layers."""

    @classmethod
    def layer_kind(cls, model: Phi3Model, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps), rotary=partial_rotary(model), window=window_of(model, number)
        )


# Hugging Face

_MODULES = MODULES_BUT_MLP | MLP_MODULES
_MODULES |= dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), "model.layers.*.self_attn.qkv_proj")
_MODULES |= dict.fromkeys(("layers.*.mlp.gate", "layers.*.mlp.up"), "model.layers.*.mlp.gate_up_proj")
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": None, "head_dim": None}
_FIXED = dict.fromkeys(("attention_dropout", "embd_pdrop", "resid_pdrop"), 0.0)
_FIXED |= {"attention_bias": False, "mlp_bias": False}
_FIXED |= {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}  # in Phi-4 mini's file


def _read(raw: Mapping[str, Any], _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and window from a config.json; returns option values and problems."""
    # transformers reads this length beside the rotary parameters, whatever they say of it.
    length = {name: raw.get(name, 4096) for name in ("original_max_position_embeddings",)}
    rope, file = stated_rope(raw), overlaid(raw, length)
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        file = with_rope(file, {**rope, "rope_type": "longrope"})  # their older names
    values, problems = read_partial_rope(file, 10000.0, 1.0)
    windows, wrong = read_one_window(raw)
    return values | windows, [*problems, *wrong]


def _write(model: Phi3Model, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if phi3 does not represent it."""
    fields |= write_partial_rope(model)
    if model.rope_scaling.rope_type == "longrope":
        fields |= _written_longrope(model, fields["rope_scaling"])
    elif fields["rope_scaling"] is not None:
        raise ConfigError(f"model.rope_scaling.rope_type={model.rope_scaling.rope_type}: phi3 has default and longrope")
    # transformers takes 32000 for an absent padding token, and refuses one beyond the vocabulary.
    fields |= {**write_one_window(model, "phi3"), "pad_token_id": None}
    return {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], **fields}


def _written_longrope(model: Phi3Model, scaling: dict[str, Any]) -> dict[str, Any]:
    """The fields of longrope in Phi-3's form, where transformers 4 allows three and computes the factor itself."""
    scaling = {"type": scaling.pop("rope_type"), **scaling}
    original = scaling.pop("original_max_position_embeddings")
    if scaling.get("factor") == model.max_position_embeddings / original:
        del scaling["factor"]
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _problems(config: Config, model: Phi3Model) -> Iterator[str]:
    yield from partial_problems(config, model)
    yield from window_problems(config, model)


PHI3 = Family(
    name="phi3",
    stage=Phi3Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=Phi3Model,
    even_head_dim=True,
    problems=_problems,
    hugging_face=HuggingFace(
        model_types={"phi3": ModelType(_DEFAULTS, _FIXED)},
        modules=_MODULES,
        fields={name: name for name in SAME_FIELDS},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        write=_write,
        without_effect=("original_max_position_embeddings",),  # but with longrope
    ),
)
