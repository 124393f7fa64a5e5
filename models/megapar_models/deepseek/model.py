"""DeepSeek-V3 (arXiv 2412.19437), and with options DeepSeek-V2 (2405.04434), Kimi K2, Moonlight and GLM-4.7-Flash.

Layers have latent attention (megapar_models.latent_attention has the names of its weights). The first of them have the
MLP of Llama, the others Mixtral's experts and a shared expert.

With sigmoid scores the router is V3's: the score of a group is the sum of its two best. With softmax it is V2's: the
score of a group is its best, and the scores of experts in other groups become 0.
"""

from dataclasses import dataclass, field, replace

from megapar.config.model_options import MoEConfig
from megapar_models.layer_kind import Latent, LayerKind
from megapar_models.mixtral.model import MixtralModel, MixtralStage
from megapar_models.moe import router_rule
from megapar_models.norms import NormRule
from megapar_models.rotary import yarn_mscale

# Of the norms of latents, whatever model.rms_norm_eps says: so has the code of every model of this family.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class DeepseekExperts(MoEConfig):
    """A mixture whose first layers have no experts."""

    first_k_dense_replace: int = 0
    """The first layers, as many as this, have a plain MLP of width model.intermediate_size in place of experts."""


@dataclass(frozen=True)
class DeepseekModel(MixtralModel):
    """The options of DeepSeek-V2 and V3. model.head_dim is the width of the rotated part of a head."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""
    q_lora_rank: int = 0
    """Width of the latent of queries; 0: queries are projected directly."""
    kv_lora_rank: int = 512
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int = 128
    """Width of the part of a head's query and key that is not rotated."""
    v_head_dim: int = 128
    """Width of a head's value."""
    attention_bias: bool = False
    """Biases on the projections to latents and on the output projection."""

    @property
    def key_width(self) -> int:
        """The width of a head's query and key, with both of their parts."""
        return self.qk_nope_head_dim + self.head_dim

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.v_head_dim


class DeepseekStage(MixtralStage[DeepseekModel]):
    """Consecutive layers of DeepSeek-V2 or V3."""

    @classmethod
    def layer_kind(cls, model: DeepseekModel, number: int) -> LayerKind:
        rope = model.rope_scaling
        scale = (model.qk_nope_head_dim + model.head_dim) ** -0.5
        if rope.rope_type == "yarn" and rope.mscale_all_dim:
            scale *= yarn_mscale(max(rope.factor, 1.0), rope.mscale_all_dim) ** 2
        latent = Latent(
            q_rank=model.q_lora_rank,
            kv_rank=model.kv_lora_rank,
            nope_width=model.qk_nope_head_dim,
            rope_width=model.head_dim,
            value_width=model.v_head_dim,
            norm=NormRule(LATENT_EPS),
        )
        kind = replace(
            super().layer_kind(model, number),
            mixer="latent",
            latent=latent,
            attention_scale=scale,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )
        return with_experts(kind, model.moe, number)


def with_experts(kind: LayerKind, moe: DeepseekExperts, number: int) -> LayerKind:
    """`kind` with the MLP of layer `number`: a plain one in the first layers, or experts with DeepSeek's router."""
    if number < moe.first_k_dense_replace:
        return replace(kind, mlp="dense", mixture=None)
    rule = router_rule(moe)
    if moe.scoring_func == "sigmoid":
        return replace(kind, mixture=moe, router=replace(rule, group_score="best_2"))
    return replace(kind, mixture=moe, router=replace(rule, group_score="best", zero_other_groups=True))
