"""Falcon-H1 (arXiv 2507.22448): Llama's layers with Mamba-2 beside attention, and a factor at every projection.

The names of the weights are those of Llama (megapar_models.families.llama) with those of megapar_models.mamba2.

At Hugging Face: falcon_h1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megapar.activations import recompute
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.codecs import Written
from megapar_models.factory import Factory
from megapar_models.families.bamba import FIXED, MAMBA_DEFAULTS
from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.mamba2_fields import MambaFields, MambaModel, mamba_modules, mamba_rule
from megapar_models.mlp import DenseMLP
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.side_by_side import Factors, SideBySide
from megapar_models.stage import Stage


@dataclass(frozen=True)
class FalconH1Model(MambaModel, RotaryModel):
    """The options of Falcon-H1."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    mlp_bias: bool = False
    """Biases of all matrices of the MLP."""
    projectors_bias: bool = False
    """A bias of the output projection of Mamba-2."""
    mamba_rms_norm: bool = False
    """A norm of the outputs of Mamba-2."""
    mamba_norm_before_gate: bool = field(default=True, metadata=OF_FUNCTION)
    """Whether this norm stands in front of the gate."""
    embedding_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of token embeddings."""
    lm_head_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of logits."""
    key_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of keys."""
    attention_in_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of what attention reads."""
    attention_out_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of what attention returns."""
    ssm_in_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of what Mamba-2 reads."""
    ssm_out_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of what Mamba-2 returns."""
    ssm_multipliers: tuple[float, ...] = field(default=(1.0, 1.0, 1.0, 1.0, 1.0), metadata=OF_FUNCTION)
    """The factors of the projections of Mamba-2: gate, input, B, C and time step."""
    mlp_multipliers: tuple[float, ...] = field(default=(1.0, 1.0), metadata=OF_FUNCTION)
    """The factors of the MLP: of its gate in front of the activation, and of what it returns."""


class FalconH1MLP(DenseMLP):
    """A gated MLP with factors of its gate and of its output."""

    def __init__(self, number: int, kind: LayerKind, model: FalconH1Model, factory: Factory):
        super().__init__(number, kind, model, factory)
        self.factors = model.mlp_multipliers

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        of_gate, of_output = self.factors
        gate, up = self.gate_up(x_sbh, context.tokens).chunk(2, dim=-1)
        inner_sbf = recompute.remade(self.activation, torch.cat([gate * of_gate, up], dim=-1))
        y_sbh: Tensor = self.down(inner_sbf, context.tokens)
        return y_sbh * of_output


class FalconH1Stage(Stage[FalconH1Model]):
    """Consecutive layers of Falcon-H1."""

    @classmethod
    def layer_kind(cls, model: FalconH1Model, number: int) -> LayerKind:
        norm = NormRule(model.rms_norm_eps)
        mamba = mamba_rule(
            model,
            norm=norm if model.mamba_rms_norm else None,
            norm_first=model.mamba_norm_before_gate,
            out_bias=model.projectors_bias,
            factors=model.ssm_multipliers,
        )
        factors = [
            Factors(model.ssm_in_multiplier, model.ssm_out_multiplier),
            Factors(model.attention_in_multiplier, model.attention_out_multiplier),
        ]
        kind = LayerKind(
            norm=norm,
            mixer=SideBySide(mamba, *factors),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            attention_scale=model.key_multiplier * model.head_dim**-0.5,
            mlp_bias=model.mlp_bias,
        )
        if model.mlp_multipliers == (1.0, 1.0):
            return kind
        return replace(kind, mlp=f"{__name__}:{FalconH1MLP.__name__}")

    @classmethod
    def ends_of(cls, model: FalconH1Model) -> Ends:
        return Ends(embedding_multiplier=model.embedding_multiplier, logits=LogitRule(model.lm_head_multiplier))


class _Multipliers(Codec):
    """The factors that are lists."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = {}, []
        for name, count in _LISTS.items():
            stated = raw.get(name) or [1.0] * count
            if len(stated) != count or any(type(value) not in (int, float) for value in stated):
                problems.append(f"{name}={stated!r} should be {count} numbers")
            else:
                values[name] = tuple(float(value) for value in stated)
        return values, problems

    def write(self, model: FalconH1Model, fields: dict[str, Any]) -> None:
        fields |= {name: list(getattr(model, name)) for name in _LISTS}

    def problems(self, config: Config, model: FalconH1Model) -> Iterator[str]:
        for name, count in _LISTS.items():
            if len(getattr(model, name)) != count:
                yield problem(config, f"model.{name}", f"has {len(getattr(model, name))} factors; give {count}")


_LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}
_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
# Of the published files; no version of transformers reads them.
_PUBLISHED = {"mamba_use_mlp": True, "attn_layer_indices": None}
_FLAGS = {"attention_bias": False, "mlp_bias": False, "projectors_bias": False, "mamba_rms_norm": False}
_FLAGS |= {"mamba_norm_before_gate": True}

FALCON_H1 = Family(
    name="falcon_h1",
    stage=FalconH1Stage,
    activations=("silu",),
    options=FalconH1Model,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"falcon_h1": ModelType("FalconH1ForCausalLM", fixed={**FIXED, **_PUBLISHED})},
        codecs=(
            *(Rope(), MambaFields(defaults={**MAMBA_DEFAULTS, "width": 1024}, width="mamba_d_ssm"), _Multipliers()),
            Written(FIXED),
        ),
        modules={
            "layers.*.mlp_norm": "model.layers.*.pre_ff_layernorm",
            **{f"layers.*.mlp.{name}": f"model.layers.*.feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            "norm": "model.final_layernorm",
            **mamba_modules("model.layers.*.mamba"),
        },
        fields=same(*_FLAGS, *_FACTORS),
        defaults={
            **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
            **{**_FLAGS, **dict.fromkeys(_FACTORS, 1.0)},
        },
        activations=same("silu"),
        without_effect=("mamba_chunk_size", "num_logits_to_keep"),
    ),
)
