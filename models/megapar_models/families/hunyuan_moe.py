"""The mixtures of HunYuan (Tencent, 2025): dense HunYuan's attention, and experts beside one for every token.

The weights are those of dense HunYuan (megapar_models.families.hunyuan) and Mixtral (megapar_models.families.mixtral).
All experts are as wide as model.intermediate_size.

At Hugging Face: hunyuan_v1_moe.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megapar.config.model_options import MixtureModel, MoEConfig
from megapar_models.codecs import Dropouts
from megapar_models.families.hunyuan import FIXED, HUNYUAN, HunYuanModel, HunYuanRope, HunYuanStage
from megapar_models.families.qwen3_moe import QWEN3_MOE
from megapar_models.family import Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts, read_moe, refuse_unwritable
from megapar_models.stage import Stage


@dataclass(frozen=True)
class HunYuanMoeModel(MixtureModel, HunYuanModel):
    """The options of HunYuan's mixtures."""


class HunYuanMoeStage(Stage[HunYuanMoeModel]):
    """Consecutive layers of one of HunYuan's mixtures."""

    @classmethod
    def layer_kind(cls, model: HunYuanMoeModel, number: int) -> LayerKind:
        return replace(HunYuanStage.layer_kind(model, number), mlp="mixture", mixture=model.moe)


class _Experts(RoutedExperts):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        names = {**self.names, **self.aliases}
        stated = {name: _of_all(raw.get(name), raw["num_hidden_layers"]) for name in names}
        unlike = [name for name, value in stated.items() if isinstance(value, list)]
        if unlike:
            return {}, [f"{name}={raw[name]!r} is not supported unless all layers have the same" for name in unlike]
        moe, problems = read_moe(stated, names, self.defaults)
        width = raw["intermediate_size"]
        moe |= {**self.always, "moe_intermediate_size": width, "shared_expert_intermediate_size": width}
        return {"moe": MoEConfig(**moe)}, problems

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield what the published files say beside what transformers reads, if it is something else."""
        for name, value in (("moe_intermediate_size", raw["intermediate_size"]), ("num_shared_expert", 1)):
            if _of_all(raw.get(name, value), raw["num_hidden_layers"]) != value:
                yield f"{name}={raw[name]!r} is not supported unless all layers have {value}, as in transformers"

    def write(self, model: HunYuanMoeModel, fields: dict[str, Any]) -> None:
        width = model.moe.moe_intermediate_size
        fixed = {**self.always, "shared_expert_gate": False, "shared_expert_intermediate_size": width}
        refuse_unwritable(model, fields["model_type"], fixed, ())
        fields |= {theirs: getattr(model.moe, ours) for theirs, ours in self.names.items()}
        fields["intermediate_size"] = width


def _of_all(value: Any, layers: int) -> Any:
    """Return the number that a list has for each layer. Anything else is returned as it is."""
    return value[0] if isinstance(value, list) and value and value == [value[0]] * layers else value


_EXPERTS = _Experts(
    names={"num_experts": "num_experts", "moe_topk": "num_experts_per_tok"},
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"},
    defaults={"num_experts": 1, "moe_topk": 1},
    always={"norm_topk_prob": True},
)
# The published files also have fields of Tencent's own program.
_FIXED = {
    **{name: value for name, value in FIXED.items() if name != "num_experts"},
    **dict.fromkeys(("use_mla", "group_limited_greedy"), False),
    **{"use_mixed_mlp_moe": True, "norm_topk_prob": True, "moe_layer_num_skipped": 0, "routed_scaling_factor": 1.0},
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
}
_MLP = "model.layers.*.mlp"
_NAMES = HUNYUAN.hugging_face
_OF_EXPERTS = QWEN3_MOE.hugging_face
assert _NAMES is not None
assert _OF_EXPERTS is not None

HUNYUAN_MOE = Family(
    name="hunyuan_moe",
    stage=HunYuanMoeStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=HunYuanMoeModel,
    even_head_dim=True,
    hugging_face=like(
        HUNYUAN,
        model_types={"hunyuan_v1_moe": ModelType("HunYuanMoEV1ForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, Dropouts(("attention_dropout",), written=True), HunYuanRope()),
        modules={
            **dict.fromkeys(f"layers.*.mlp.{name}" for name in ("gate", "up", "down")),
            "layers.*.mlp.router": f"{_MLP}.gate.wg",
            **{f"layers.*.mlp.experts.*.{name}": f"{_MLP}.experts.*.{name}_proj" for name in ("gate", "up", "down")},
            **{f"layers.*.mlp.shared.{name}": f"{_MLP}.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
        },
        stacked=_OF_EXPERTS.stacked,
        maybe_fp32=("layers.*.mlp.router.weight",),
        without_effect=(
            *_NAMES.without_effect,
            *("moe_drop_tokens", "moe_random_routing_dropped_token", "n_group", "topk_group"),
        ),
    ),
)
