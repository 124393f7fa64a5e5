"""HyperCLOVA X (NAVER, arXiv 2404.01954; SEED Think, arXiv 2506.22403): Granite with norms behind the branches too.

Its weights are those of Llama (megapar_models.families.llama), and layers.N.attention_output_norm.weight and
layers.N.mlp_output_norm.weight, [h].

At Hugging Face: hyperclovax.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.model_options import OF_FUNCTION
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.codecs import EvenHeads
from megapar_models.families.granite import GRANITE, DenseGraniteModel, GraniteStage, Multipliers
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import Ends, LayerKind


@dataclass(frozen=True)
class HyperCLOVAXModel(DenseGraniteModel):
    """The options of HyperCLOVA X."""

    logits_scaling: float = field(default=1.0, metadata=OF_FUNCTION)
    """Logits are multiplied by it."""
    use_post_norm: bool = True
    """Norms of the outputs of attention and MLP, beside those of their inputs."""


class HyperCLOVAXStage(GraniteStage[HyperCLOVAXModel]):
    """Consecutive layers of HyperCLOVA X."""

    @classmethod
    def layer_kind(cls, model: HyperCLOVAXModel, number: int) -> LayerKind:
        kind = replace(super().layer_kind(model, number), mlp_bias=model.mlp_bias)
        return replace(kind, norms="both") if model.use_post_norm else kind

    @classmethod
    def ends_of(cls, model: HyperCLOVAXModel) -> Ends:
        return Ends(embedding_multiplier=model.embedding_multiplier, logits=LogitRule(model.logits_scaling))


class _Multipliers(Multipliers):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        if raw.get("attention_multiplier") is None:
            width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
            values["attention_multiplier"] = width**-0.5
        return values, problems


# The published files state dropouts of 0 that no version of the model reads.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout")
_FIXED = dict.fromkeys(_DROPOUTS, 0.0) | {"partial_rotary_factor": 1.0}

HYPERCLOVAX = Family(
    name="hyperclovax",
    stage=HyperCLOVAXStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=HyperCLOVAXModel,
    even_head_dim=True,
    hugging_face=like(
        GRANITE,
        model_types={"hyperclovax": ModelType("HyperCLOVAXForCausalLM", fixed=_FIXED)},
        codecs=(EvenHeads(), _Multipliers()),
        modules={
            "layers.*.attention_output_norm": "model.layers.*.post_norm1",
            "layers.*.mlp_output_norm": "model.layers.*.post_norm2",
        },
        fields=same("use_post_norm"),
        defaults={"attention_multiplier": None, "use_post_norm": True},
        without_effect=("end_token_id",),
    ),
)
