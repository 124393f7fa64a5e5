"""NVIDIA's hybrids, Nemotron-H (arXiv 2504.03624), Nemotron Nano 2 and Nemotron 3: one branch in each layer.

A layer is Mamba-2, attention without positions, an MLP of squared ReLU, or experts without gate, and one norm. The
names of the weights are those of megapar_models.mamba2, or of Llama and Mixtral without a gate
(megapar_models.families.llama, megapar_models.families.mixtral). Experts may read and write a latent:

    layers.N.mlp.latent_in.weight     [l, h]    on every tp rank
    layers.N.mlp.latent_out.weight    [h, l]    on every tp rank

At Hugging Face: nemotron_h. Layers of multi-token prediction are left out. Time steps have the limits of the field
time_step_limit, as in the reference (state-spaces/mamba). transformers never lets them fall below time_step_min, a
field of their first values: its logits are others where a time step is smaller.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.messages import problem
from megapar.config.model_options import MaybeMixtureModel, MoEConfig
from megapar.config.options import Config
from megapar_models.codecs import Dropouts, Written
from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.mamba2_fields import MambaFields, MambaModel, mamba_modules, mamba_rule
from megapar_models.moe import router_rule
from megapar_models.moe_fields import RoutedExperts, refuse_unwritable
from megapar_models.norms import NormRule
from megapar_models.stage import Stage

# transformers lets no time step be smaller. 0 has no logarithm, which its first values are made of.
JUDGED_WITH = {"time_step_min": 1e-30}
# The letter of each kind of layer, and its names in transformers 5 and before.
_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}


@dataclass(frozen=True)
class NemotronHModel(MambaModel, MaybeMixtureModel):
    """The options of NVIDIA's hybrids."""

    hybrid_override_pattern: str = field(default="M-*-")
    """A letter for each layer: M Mamba-2, * attention, - an MLP, E experts."""
    moe_latent_size: int = 0
    """Width of what experts read and write; 0: model.hidden_size."""


class NemotronHStage(Stage[NemotronHModel]):
    """Consecutive layers of a hybrid of NVIDIA."""

    @classmethod
    def layer_kind(cls, model: NemotronHModel, number: int) -> LayerKind:
        norm = NormRule(model.rms_norm_eps)
        # A pattern of the wrong length is reported by `_Pattern.problems`.
        letter = model.hybrid_override_pattern[number : number + 1]
        if letter == "*":
            return LayerKind(norm=norm, mlp="none")
        if letter == "-":
            return LayerKind(norm=norm, mixer="none", mlp="plain")
        if letter == "E":
            return LayerKind(
                norm=norm,
                mixer="none",
                mlp="mixture",
                mixture=model.moe,
                router=replace(router_rule(model.moe), group_score="best_2"),
                plain_experts=True,
                expert_latent=model.moe_latent_size,
            )
        return LayerKind(norm=norm, mixer=mamba_rule(model), mlp="none")


class _Pattern(Codec):
    """The kind of each layer."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        pattern = raw.get("hybrid_override_pattern")
        types = raw.get("layers_block_type") or raw.get("layer_types")
        raw.get("num_hidden_layers")  # transformers takes the number of layers from their kinds
        if types is not None:
            if unknown := sorted({*types} - _LETTERS.keys()):
                text = f"{', '.join(unknown)} not supported; {', '.join(_LETTERS)} are"
                return {}, [f"layers_block_type: {text}"]
            pattern = "".join(_LETTERS[name] for name in types)
        if not pattern:
            return {}, ["hybrid_override_pattern is missing"]
        return {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}, []

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        # In files of Nemotron-H; transformers reads head_dim alone.
        width = raw.get("head_dim", 128)
        if raw.get("attention_head_dim", width) != width:
            yield f"attention_head_dim={raw['attention_head_dim']} is not supported unless it is head_dim, {width}"

    def write(self, model: NemotronHModel, fields: dict[str, Any]) -> None:
        # So transformers computes the same.
        fields |= JUDGED_WITH
        fields |= {"hybrid_override_pattern": model.hybrid_override_pattern}
        fields |= {"num_hidden_layers": model.num_hidden_layers, "num_nextn_predict_layers": 0}

    def problems(self, config: Config, model: NemotronHModel) -> Iterator[str]:
        pattern = model.hybrid_override_pattern
        if {*pattern} - {*"M*-E"}:
            yield problem(config, "model.hybrid_override_pattern", "has other letters than M, *, - and E")
        if len(pattern) != model.num_hidden_layers:
            text = f"has {len(pattern)} layers; give a letter for each of the {model.num_hidden_layers}"
            yield problem(config, "model.hybrid_override_pattern model.num_hidden_layers", text)
        if ("E" in pattern) != (model.experts is not None):
            text = "layers E have experts, and others have none; use both or neither"
            yield problem(config, "model.hybrid_override_pattern model.moe.num_experts", text)


class _Experts(RoutedExperts):
    """Experts, in models that have layers of them."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        latent = raw.get("moe_latent_size") or 0
        kinds = raw.get("layers_block_type") or raw.get("layer_types") or raw.get("hybrid_override_pattern") or ()
        if not {"moe", "E"} & {*kinds}:
            return {"moe": MoEConfig()}, []
        return {**values, "moe_latent_size": latent}, problems

    def write(self, model: NemotronHModel, fields: dict[str, Any]) -> None:
        if model.experts is None:
            return
        moe = model.moe
        free = ("routed_scaling_factor", "n_group", "shared_expert_intermediate_size")
        fixed = {**self.always, "shared_expert_gate": False, **{name: getattr(moe, name) for name in free}}
        because = []
        if not moe.shared_expert_intermediate_size:
            because = ["model.moe.shared_expert_intermediate_size: nemotron_h of transformers has a shared expert"]
        refuse_unwritable(model, "nemotron_h", fixed, because, has_bias=True)
        fields |= {theirs: getattr(moe, ours) for theirs, ours in self.names.items()}
        fields["moe_latent_size"] = model.moe_latent_size or None


_EXPERTS = _Experts(
    names={
        "n_routed_experts": "num_experts",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        **same("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor", "n_group", "topk_group"),
        **same("norm_topk_prob"),
    },
    defaults={
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "n_group": 1},
        **{"moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0, "topk_group": 1},
        "norm_topk_prob": True,
    },
    always={"scoring_func": "sigmoid"},
    has_bias=True,
)
_MAMBA = MambaFields(
    names={
        **{"heads": "mamba_num_heads", "head": "mamba_head_dim", "groups": "n_groups", "state": "ssm_state_size"},
        **{"conv": "conv_kernel", "conv_bias": "use_conv_bias", "bias": "use_bias", "expand": "expand"},
    },
    defaults={
        **{"heads": 128, "head": 64, "groups": 8, "state": 128, "conv": 4, "conv_bias": True, "bias": False},
        "expand": 2,
    },
    bound_to_model=False,
)
_FIXED = {
    **{"attention_dropout": 0.0, "attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False},
    **{"mamba_hidden_act": "silu", "n_shared_experts": 1, "sliding_window": None},
}
_LAYER = "backbone.layers.*"
_MIXER = f"{_LAYER}.mixer"

NEMOTRON_H = Family(
    name="nemotron_h",
    stage=NemotronHStage,
    activations=("relu2", "silu", "gelu_pytorch_tanh"),
    options=NemotronHModel,
    hugging_face=like(
        LLAMA,
        model_types={"nemotron_h": ModelType("NemotronHForCausalLM", fixed=_FIXED, judged_with=lambda _: JUDGED_WITH)},
        codecs=(_Pattern(), _EXPERTS, _MAMBA, Dropouts(("hidden_dropout",)), Written({"mlp_bias": False})),
        modules={
            "embedding": "backbone.embeddings",
            "layers.*.attention_norm": f"{_LAYER}.norm",
            **{f"layers.*.attention.{name}": f"{_MIXER}.{name}_proj" for name in "qkvo"},
            **dict.fromkeys((*(f"layers.*.attention.{name}_norm" for name in "qk"), "layers.*.mlp.gate")),
            "layers.*.mlp_norm": f"{_LAYER}.norm",
            **{f"layers.*.mlp.{name}": f"{_MIXER}.{name}_proj" for name in ("up", "down")},
            "layers.*.mlp.router": f"{_MIXER}.gate",
            "layers.*.mlp.router.bias": f"{_MIXER}.gate.e_score_correction_bias",
            **{f"layers.*.mlp.experts.*.{name}": f"{_MIXER}.experts.*.{name}_proj" for name in ("up", "down")},
            **{f"layers.*.mlp.shared.{name}": f"{_MIXER}.shared_experts.{name}_proj" for name in ("up", "down")},
            "layers.*.mlp.latent_in": f"{_MIXER}.fc1_latent_proj",
            "layers.*.mlp.latent_out": f"{_MIXER}.fc2_latent_proj",
            "norm": "backbone.norm_f",
            **mamba_modules(_MIXER),
        },
        stacked={f"{_MIXER}.experts.{name}_proj": (f"{name}_proj",) for name in ("up", "down")},
        # What transformers 5 calls it in memory.
        renamed={"model.": "backbone."},
        fields={
            **{"num_hidden_layers": None, "hidden_act": None, "rms_norm_eps": None},
            **{"mlp_hidden_act": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"},
        },
        defaults={
            **{"num_key_value_heads": 8, "head_dim": 128, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5},
            **{"max_position_embeddings": 4096, "intermediate_size": 21504},
        },
        activations=same("relu2", "silu", "gelu_pytorch_tanh"),
        tied={"lm_head.weight": "backbone.embeddings.weight"},
        ignored=lambda raw: ("mtp.",) if raw.get("num_nextn_predict_layers") else (),
        without_effect=(
            *("chunk_size", "expand", "mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep"),
            *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32"),
            *("moe_shared_expert_overlap", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
            # Attention has no positions, whatever the published files say of them.
            *("num_nextn_predict_layers", "norm_eps", "partial_rotary_factor", "rope_theta"),
        ),
    ),
)
