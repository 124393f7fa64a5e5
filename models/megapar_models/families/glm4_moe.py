"""GLM-4.5 (arXiv 2508.06471): Llama's attention, rotated in part, with DeepSeek-V3's experts behind the first layers.

Its weights are those of Llama and of Mixtral (megapar_models.families.llama, megapar_models.families.mixtral).

At Hugging Face: glm4_moe. Files of dots1 (dots.llm1, arXiv 2506.05767)
and solar_open (Solar Open 100B) are read too: they are the same model, all of each head rotated. Both are written as
glm4_moe, and a model with windows as dots1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.codecs import FurtherTokens
from megapar_models.families.deepseek import (
    SIGMOID,
    DeepseekExperts,
    SharedExperts,
    prediction_copies,
    prediction_layers,
    prediction_modules,
    with_experts,
)
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.families.qwen3_moe import QWEN3_MOE
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.multi_token import MTPRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_fields import PartialRope, scaling_problems
from megapar_models.windows import FULL, SLIDING, WindowModel, Windows, window_of


@dataclass(frozen=True)
class Glm4MoeModel(MixtralModel, WindowModel):
    """The options of GLM-4.5."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotary embedding."""
    partial_rotary_factor: float = field(default=0.5, metadata=OF_FUNCTION)
    """The share of a head's dimensions, its first ones, that is rotated."""

    @property
    def rotary_width(self) -> int:
        """How many dimensions of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


class Glm4MoeStage(MixtralStage[Glm4MoeModel]):
    """Consecutive layers of GLM-4.5."""

    @classmethod
    def layer_kind(cls, model: Glm4MoeModel, number: int) -> LayerKind:
        kind = replace(
            super().layer_kind(model, number),
            rotary=Rotary.of(model),
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            qk_norm=model.qk_norm,
        )
        return with_experts(kind, model.moe, number)

    @classmethod
    def mtp_rule(cls, model: Glm4MoeModel) -> MTPRule | None:
        return None if model.sliding_window else MTPRule(kind=cls.layer_kind(model, model.num_hidden_layers))


class _Rope(PartialRope):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        if model_type != "glm4_moe" and values.get("partial_rotary_factor") != 1.0:
            problems = [
                *problems,
                f"partial_rotary_factor is not supported in {model_type}; its model reads it nowhere",
            ]
        return values, problems

    def problems(self, config: Config, model: Glm4MoeModel) -> Iterator[str]:
        yield from scaling_problems(config, model)
        width = model.rotary_width
        if width % 2 or not 0 < width <= model.head_dim:
            text = f"{width} dimensions of a head of {model.head_dim} cannot be rotated, an odd number: use 1.0"
            yield problem(config, "model.partial_rotary_factor", text)


class _Windows(Windows):
    """The windows of dots1, and what its files say of scores."""

    def types(self, raw: Raw) -> Sequence[str]:
        stated, layers = raw.get("max_window_layers"), raw["num_hidden_layers"]
        first = 62 if stated is None else stated
        return raw.get("layer_types") or [SLIDING if number >= first else FULL for number in range(layers)]

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if self._window(raw) is None and not raw.get("layer_types"):
            return {}, []
        return super().read(raw, model_type)

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        # The published files give the scores the name of DeepSeek's method.
        if raw.get("scoring_func", "sigmoid") not in ("sigmoid", "noaux_tc"):
            yield f"scoring_func={raw['scoring_func']!r} is not supported; 'sigmoid' and 'noaux_tc' are"

    def write(self, model: Glm4MoeModel, fields: dict[str, Any]) -> None:
        if not model.qk_norm or model.attention_bias or model.partial_rotary_factor != 1.0:
            raise ConfigError(
                "model.sliding_window, model.qk_norm, model.attention_bias, model.partial_rotary_factor: dots1 of "
                "transformers, which alone has windows, has norms of q and k, no biases, and rotates whole heads"
            )
        super().write(model, fields)


def _type_of(model: Glm4MoeModel) -> str:
    if model.moe.scoring_func != "sigmoid" or not model.moe.has_selection_bias:
        raise ConfigError(
            "model.moe.scoring_func, model.moe.balance: glm4_moe of transformers has sigmoid scores and a bias that "
            "selects experts"
        )
    return "dots1" if model.sliding_window else "glm4_moe"


_FIXED = {"attention_dropout": 0.0, "moe_layer_freq": 1}
_MOE = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
_GROUPS = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_EXPERTS = SharedExperts(
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1}, moe=_MOE | _GROUPS
)
# A file of dots1 must have its sizes of experts.
_DOTS1_EXPERTS = SharedExperts(
    defaults={"norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": None}, moe=_GROUPS
)
_SOLAR_EXPERTS = SharedExperts(
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 0, "n_shared_experts": 1},
    moe=_MOE | _GROUPS | {"moe_intermediate_size": 1280},
)
_SHARED = "model.layers.*.mlp.shared_experts"

GLM4_MOE = Family(
    name="glm4_moe",
    stage=Glm4MoeStage,
    activations=("silu",),
    options=Glm4MoeModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={
            "glm4_moe": ModelType(
                "Glm4MoeForCausalLM",
                {},
                _FIXED | SIGMOID,
                (_EXPERTS, _Rope(factor=0.5), FurtherTokens(alias="num_mtp_layers", absent=1)),
            ),
            "dots1": ModelType(
                "Dots1ForCausalLM",
                {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "use_qk_norm": True},
                _FIXED | {"topk_method": "noaux_tc", "attention_bias": False, "use_qk_norm": True},
                (_DOTS1_EXPERTS, _Rope(), _Windows(4096)),
            ),
            "solar_open": ModelType(
                "SolarOpenForCausalLM",
                {"head_dim": 128, "intermediate_size": None},  # no layer is without experts
                _FIXED | SIGMOID | {"use_qk_norm": False, "first_k_dense_replace": 0},
                (_SOLAR_EXPERTS, _Rope(1000000.0)),
            ),
        },
        type_of=_type_of,
        modules={
            "layers.*.mlp.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
            **{f"layers.*.mlp.shared.{name}": f"{_SHARED}.{name}_proj" for name in ("gate", "up", "down")},
            "layers.*.mlp.shared_gate": None,
        },
        fields={**same("attention_bias"), "use_qk_norm": "qk_norm"},
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "attention_bias": False, "use_qk_norm": False},
        activations=same("silu"),
        ignored=prediction_layers,
        modules_of=prediction_modules,
        mtp_copies=prediction_copies,
    ),
)
