"""Dense HunYuan (Tencent, 2025): Llama with norms of queries and keys behind their rotation.

Its weights are those of Llama (megapar_models.families.llama), and layers.N.attention.{q,k}_norm.weight [width of a
head].

At Hugging Face: hunyuan_v1_dense.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megapar_models.codecs import Dropouts
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope, stated_rope, with_rope
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


class HunYuanRope(Rope):
    """Rotary positions, whose base a field may enlarge."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        """Read their type "dynamic" with a field alpha: it is not dynamic but a larger base, and so one here."""
        rope = stated_rope(raw)
        if rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
            return super().read(raw, model_type)
        plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta", raw.get("rope_theta", self.theta))}
        values, problems = super().read(with_rope(raw, plain), model_type)
        alpha, width = rope["alpha"], _width(raw)
        if not isinstance(alpha, (int, float)):
            problems.append(f"alpha={alpha!r} should be a number")
        elif not problems and width > 2:
            values["rope_theta"] *= alpha ** (width / (width - 2))
        return values, problems

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        width = _width(raw)
        if raw.get("attention_head_dim", width) != width:
            yield f"attention_head_dim={raw['attention_head_dim']} is not supported unless it is head_dim, {width}"


def _width(raw: Raw) -> int:
    """Return the width of a head."""
    width = raw.get("head_dim")
    return int(raw["hidden_size"] // raw["num_attention_heads"] if width is None else width)


# The published files also have fields of Tencent's own program.
FIXED: dict[str, Any] = dict.fromkeys(("mlp_bias", "use_cla", "add_classification_head"), False)
FIXED |= dict.fromkeys(("use_qk_norm", "use_rotary_pos_emb"), True)
FIXED |= {"partial_rotary_factor": 1.0, "norm_type": "rms", "num_experts": 1}
_TOKENS = ("eod", "im_start", "im_end", "im_newline", "mask_init", "text_start", "text_end", "video_start", "video_end")

HUNYUAN = Family(
    name="hunyuan",
    stage=HunYuanStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=HunYuanModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"hunyuan_v1_dense": ModelType("HunYuanDenseV1ForCausalLM", fixed=FIXED)},
        codecs=(Dropouts(("attention_dropout",), written=True), HunYuanRope()),  # its files have 0.1
        modules={
            "layers.*.attention.q_norm": "model.layers.*.self_attn.query_layernorm",
            "layers.*.attention.k_norm": "model.layers.*.self_attn.key_layernorm",
        },
        fields=same("attention_bias"),
        defaults={"rms_norm_eps": 1e-5, "attention_bias": False},
        without_effect=(
            *(f"{name}_id" for name in _TOKENS),
            *("eod_token_id", "image_token_id", "pad_id", "org_vocab_size", "cla_share_factor"),
            *("class_num", "dense_list", "pool_type"),  # of a head for classification
        ),
    ),
)
