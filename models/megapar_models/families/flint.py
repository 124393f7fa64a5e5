"""Flint (Recursive SI, 2026): Qwen3-MoE with windows, a sink of each head, sigmoid scores and a shared expert.

Layers with a window have rotary positions, and the others see none. The weights are those of Qwen3-MoE
(megapar_models.families.qwen3_moe), and layers.N.attention.sinks [heads].

At Hugging Face: flint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.options import Config
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.families.qwen3_moe import QWEN3_MOE, Qwen3MoeExperts, dense_layers, numbering_problems
from megapar_models.family import Family, ModelType, Raw, like, overlaid, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts, read_moe, refuse_unwritable
from megapar_models.rotary import Rotary
from megapar_models.rotary_fields import Rope
from megapar_models.windows import FULL, SLIDING, WindowModel, Windows, is_full, window_of


@dataclass(frozen=True)
class FlintModel(MixtralModel, WindowModel):
    """The options of Flint. Layers without a window see no positions."""

    moe: Qwen3MoeExperts = field(default_factory=Qwen3MoeExperts)
    """Mixture of experts."""
    attention_bias: bool = False
    """Biases of all projections of attention."""


class FlintStage(MixtralStage[FlintModel]):
    """Consecutive layers of Flint."""

    @classmethod
    def layer_kind(cls, model: FlintModel, number: int) -> LayerKind:
        kind = replace(
            super().layer_kind(model, number),
            rotary=None if is_full(model, number) else Rotary.of(model),
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=True,
            sinks=True,
        )
        if number in model.moe.mlp_only_layers:
            return replace(kind, mlp="dense", mixture=None)
        return kind


class _Windows(Windows):
    def types(self, raw: Raw) -> Sequence[str]:
        layers = raw["num_hidden_layers"]
        full = {0, layers - 1, *range(1, layers, 4)}
        return raw.get("layer_types") or [FULL if number in full else SLIDING for number in range(layers)]


class _Experts(RoutedExperts):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        moe, problems = read_moe(raw, {**self.names, **self.aliases}, self.defaults)
        if raw.get("mlp_only_layers") is None:
            raw = overlaid(raw, {"mlp_only_layers": [0, 1]})
        dense, wrong = dense_layers(raw)
        return {"moe": Qwen3MoeExperts(mlp_only_layers=dense, **self.always, **moe)}, [*problems, *wrong]

    def write(self, model: FlintModel, fields: dict[str, Any]) -> None:
        moe = model.moe
        fixed = {**self.always, "shared_expert_gate": False, _SHARED: moe.shared_expert_intermediate_size}
        refuse_unwritable(model, fields["model_type"], fixed, self.refusals(model))
        fields |= {theirs: getattr(moe, ours) for theirs, ours in self.names.items()}
        fields |= {"mlp_only_layers": list(moe.mlp_only_layers), "decoder_sparse_step": 1}

    def refusals(self, model: FlintModel) -> Iterator[str]:
        if not model.moe.shared_expert_intermediate_size:
            yield "model.moe.shared_expert_intermediate_size=0: flint of transformers has a shared expert"

    def problems(self, config: Config, model: FlintModel) -> Iterator[str]:
        return numbering_problems(config, model)


_SHARED = "shared_expert_intermediate_size"
_NAMES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")
_EXPERTS = _Experts(
    names=same(*_NAMES, _SHARED),
    aliases={"num_local_experts": "num_experts"},
    defaults={
        **{"num_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 512, "norm_topk_prob": True},
        **{"router_aux_loss_coef": 0.0005, _SHARED: 1024},
    },
    always={"scoring_func": "sigmoid"},
)

FLINT = Family(
    name="flint",
    stage=FlintStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=FlintModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={
            "flint": ModelType("FlintForCausalLM", fixed={"attention_dropout": 0.0, "partial_rotary_factor": 1.0})
        },
        codecs=(_EXPERTS, Rope(), _Windows(513, keeps_unused=True, needed=True)),
        modules={
            "layers.*.attention.sinks": "model.layers.*.self_attn.softmax_offset",
            "layers.*.mlp.shared_gate": None,
        },
        renamed={".self_attn.sinks": ".self_attn.softmax_offset"},  # as transformers calls them in memory
        in_fp32=("layers.*.mlp.router.weight", "layers.*.attention.sinks"),
        fields=same("attention_bias"),
        defaults={"head_dim": 128, "attention_bias": False},
    ),
)
