"""Dense HunYuan (Tencent, 2025): Llama with norms of queries and keys behind their rotation.

Its weights are those of Llama (megapar_models.families.llama), and layers.N.attention.{q,k}_norm.weight [width of a
head].

At Hugging Face: hunyuan_v1_dense.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw, dropout_warnings
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rope import factor_warnings, read_rope, scaling_problems, stated_rope, with_rope, write_rope
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
from megapar_models.stage import Stage


@dataclass(frozen=True)
class HunYuanModel(RotaryModel):
    """The options of dense HunYuan."""

    attention_bias: bool = False
    """Biases of all projections of attention."""


class HunYuanStage(Stage[HunYuanModel]):
    """Consecutive layers of dense HunYuan."""

    @classmethod
    def layer_kind(cls, model: HunYuanModel, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            # A norm's weights behind the rotation make scores depend on positions, and not on distances alone.
            rotary=replace(Rotary.of(model), inside_documents=True),
            qk_norm=True,
            qk_norm_after_rotary=True,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )


# Hugging Face

_MODULES = MODULES_BUT_MLP | MLP_MODULES
_MODULES |= {
    "layers.*.attention.q_norm": "model.layers.*.self_attn.query_layernorm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.key_layernorm",
}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": None, "head_dim": None, "attention_bias": False}
# The published files also have fields of Tencent's own program.
_FIXED = dict.fromkeys(("mlp_bias", "use_cla", "add_classification_head"), False)
_FIXED |= dict.fromkeys(("use_qk_norm", "use_rotary_pos_emb"), True)
_FIXED_NUMBERS = {"partial_rotary_factor": 1.0, "norm_type": "rms", "num_experts": 1}
_TOKENS = ("eod", "im_start", "im_end", "im_newline", "mask_init", "text_start", "text_end", "video_start", "video_end")
_WITHOUT_EFFECT = (
    *(f"{name}_id" for name in _TOKENS),
    *("eod_token_id", "image_token_id", "pad_id", "org_vocab_size", "cla_share_factor"),
    *("class_num", "dense_list", "pool_type"),  # of a head for classification
)


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding from a config.json; returns option values and problems.

    Their type "dynamic" with a field alpha is not dynamic: it is a larger base, and so it becomes one here.
    """
    rope = stated_rope(raw)
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return read_rope(raw, default_theta=10000.0)
    plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0))}
    values, problems = read_rope(with_rope(raw, plain), default_theta=10000.0)
    alpha, width = rope["alpha"], _width(raw)
    if not isinstance(alpha, (int, float)):
        problems.append(f"alpha={alpha!r} should be a number")
    elif not problems and width > 2:
        values["rope_theta"] *= alpha ** (width / (width - 2))
    return values, problems


def _width(raw: Raw) -> int:
    """The width of a head, 0 if the file does not say it. What is missing is reported elsewhere."""
    sizes = [raw.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads")]
    if isinstance(sizes[0], int):
        return sizes[0]
    if isinstance(sizes[1], int) and isinstance(sizes[2], int):
        return sizes[1] // sizes[2]
    return 0


def _judge(raw: Raw, _: str) -> Iterator[str]:
    width = _width(raw)
    if raw.get("attention_head_dim", width) != width:
        yield f"attention_head_dim={raw['attention_head_dim']} is not supported unless it is head_dim, {width}"


def _warnings(raw: Raw) -> list[str]:
    return [*factor_warnings(raw), *dropout_warnings(raw, "hunyuan", "attention_dropout")]  # its files have 0.1


def _write(model: HunYuanModel, fields: dict[str, Any]) -> dict[str, Any]:
    fields |= {"attention_dropout": 0.0, **write_rope(model)}
    return {"model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"], **fields}


HUNYUAN = Family(
    name="hunyuan",
    stage=HunYuanStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=HunYuanModel,
    even_head_dim=True,
    problems=scaling_problems,
    hugging_face=HuggingFace(
        model_types={"hunyuan_v1_dense": ModelType(_DEFAULTS, _FIXED | _FIXED_NUMBERS)},
        modules=_MODULES,
        fields={name: name for name in (*SAME_FIELDS, "attention_bias")},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        judge=_judge,
        write=_write,
        warnings=_warnings,
        without_effect=_WITHOUT_EFFECT,
    ),
)
