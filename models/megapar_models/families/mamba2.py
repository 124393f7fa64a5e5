"""Mamba-2 alone (arXiv 2405.21060): each layer is one norm and one mixer, without attention and without an MLP.

megapar_models.mamba2 has the names of the weights of a layer. layers.N.attention_norm.weight [h] is its norm.

At Hugging Face: mamba2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megapar_models.codecs import Written
from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.mamba2_fields import MambaFields, MambaModel, mamba_modules, mamba_rule
from megapar_models.norms import NormRule
from megapar_models.stage import Stage

# No position is beyond what the model sees: its state has no length.
_LONGEST = 1 << 20
_HIDDEN = 4096


@dataclass(frozen=True)
class Mamba2Model(MambaModel):
    """The options of Mamba-2 alone. Those of attention and of the MLP are read nowhere."""


class Mamba2Stage(Stage[Mamba2Model]):
    """Consecutive layers of Mamba-2."""

    @classmethod
    def layer_kind(cls, model: Mamba2Model, number: int) -> LayerKind:
        return LayerKind(norm=NormRule(model.rms_norm_eps), mixer=mamba_rule(model), mlp="none")


class _Alone(Codec):
    """What a model without attention says of attention: heads that tp divides wherever it divides those of Mamba-2."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        heads, width = raw.get("num_heads", 128), raw.get("head_dim", 64)
        return {"num_attention_heads": heads, "head_dim": width, "max_position_embeddings": _LONGEST}, []

    def warnings(self, raw: Raw, family: str) -> Iterator[str]:
        if raw.get("residual_in_fp32", True):
            yield "config.json: residual_in_fp32=true is not read: the residual stream has the dtype of the run"

    def write(self, model: Mamba2Model, fields: dict[str, Any]) -> None:
        fields["residual_in_fp32"] = False


_MAMBA = MambaFields(
    names={
        **{"heads": "num_heads", "head": "head_dim", "groups": "n_groups", "state": "state_size"},
        **{"conv": "conv_kernel", "conv_bias": "use_conv_bias", "bias": "use_bias", "expand": "expand"},
    },
    defaults={
        **{"heads": 128, "head": 64, "groups": 8, "state": 128, "conv": 4, "conv_bias": True, "bias": False},
        **{"expand": 2, "hidden_size": _HIDDEN},
    },
)
_FIXED = {"hidden_act": "silu"}
_MIXER = "backbone.layers.*.mixer"

MAMBA2 = Family(
    name="mamba2",
    stage=Mamba2Stage,
    activations=("silu",),
    options=Mamba2Model,
    hugging_face=like(
        LLAMA,
        model_types={"mamba2": ModelType("Mamba2ForCausalLM", fixed=_FIXED)},
        codecs=(_MAMBA, _Alone(), Written(_FIXED)),
        modules={
            **dict.fromkeys(LLAMA.hugging_face.modules if LLAMA.hugging_face else ()),
            "embedding": "backbone.embeddings",
            "layers.*.attention_norm": "backbone.layers.*.norm",
            "norm": "backbone.norm_f",
            "head": "lm_head",
            **mamba_modules(_MIXER),
        },
        # What transformers 4 called it.
        renamed={".embedding.": ".embeddings."},
        fields={
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")),
            **dict.fromkeys(("max_position_embeddings", "hidden_act")),
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={
            **{"hidden_size": _HIDDEN, "num_hidden_layers": 64, "vocab_size": 32768, "layer_norm_epsilon": 1e-5},
            "initializer_range": 0.1,
        },
        activations=same("silu"),
        tied={"lm_head.weight": "backbone.embeddings.weight"},
        without_effect=(
            *("chunk_size", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
            "rescale_prenorm_residual",
        ),
    ),
)
