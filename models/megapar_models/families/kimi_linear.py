"""Kimi Linear (arXiv 2510.26692): Kimi's delta attention, and latent attention without positions in some layers.

The weights of attention are those of megapar_models.delta_net and megapar_models.latent_attention. Experts are those
of DeepSeek-V3 (megapar_models.families.deepseek), and the other weights those of Llama.

At Hugging Face: kimi_linear. Layers of multi-token prediction are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from typing_extensions import TypeVar

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import MixtureModel
from megapar.config.options import Config
from megapar_models.codecs import Written
from megapar_models.delta_fields import LINEAR, full_each, is_linear, types_of
from megapar_models.delta_net import GatedDelta
from megapar_models.families.deepseek import (
    DEEPSEEK,
    DeepseekExperts,
    LatentModel,
    OwnKeys,
    SharedExperts,
    with_experts,
    with_latents,
    with_listed_layers,
)
from megapar_models.family import Family, ModelType, Raw, like, overlaid, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing
from megapar_models.windows import FULL


@dataclass(frozen=True)
class KimiLinearModel(LatentModel, MixtureModel):
    """The options of Kimi Linear."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""
    layer_types: tuple[str, ...] = ()
    """linear_attention, a delta net, or full_attention, latent attention, for each layer; without any, each fourth
    layer has latent attention."""
    linear_num_heads: int = 32
    """Heads of a delta net."""
    linear_head_dim: int = 128
    """Width of a head's key and value in a delta net."""
    linear_conv_kernel_dim: int = 4
    """Tokens that the short convolutions of a delta net read, each token itself among them."""


K = TypeVar("K", bound=KimiLinearModel, default=KimiLinearModel)


class KimiLinearStage(Stage[K]):
    """Consecutive layers of Kimi Linear."""

    @classmethod
    def layer_kind(cls, model: K, number: int) -> LayerKind:
        kind = LayerKind(norm=NormRule(model.rms_norm_eps), mlp="mixture", mixture=model.moe)
        kind = with_experts(kind, model.moe, number)
        if is_linear(model, number):
            return replace(kind, mixer=cls.delta_net(model))
        return with_latents(kind, model)

    @classmethod
    def delta_net(cls, model: K) -> GatedDelta:
        """Return the rule of delta nets. Projections to decays and gates have the rank of a head's width."""
        return replace(delta_net(model), decay_rank=model.linear_head_dim, gate_rank=model.linear_head_dim)


def delta_net(model: KimiLinearModel) -> GatedDelta:
    """Return the rule of Kimi's delta attention, each projection by one matrix."""
    heads, width = model.linear_num_heads, model.linear_head_dim
    return GatedDelta(
        key_heads=heads,
        value_heads=heads,
        key_width=width,
        value_width=width,
        conv_width=model.linear_conv_kernel_dim,
        norm=NormRule(model.rms_norm_eps),
        gate="sigmoid",
        decays_channels=True,
    )


# Hugging Face

# Two names of a field that transformers takes for the same: Moonshot's, and DeepSeek's.
ALIASES: Mapping[str, str] = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}


def with_aliases(raw: Raw) -> tuple[Raw, list[str]]:
    """Return a config.json with the second name of each of `ALIASES`, and a problem for two values of one field."""
    found: dict[str, Any] = {}
    problems = []
    for alias, name in ALIASES.items():
        value, other = raw.get(alias), raw.get(name)
        if value is None:
            continue
        if other is not None and other != value:
            problems.append(f"{alias}={value!r} contradicts {name}={other!r}")
        found[name] = value
    return overlaid(raw, found), problems


@dataclass(frozen=True, kw_only=True)
class AliasedExperts(SharedExperts):
    """DeepSeek-V3's experts, and the longest context, under names of `ALIASES`."""

    written: Sequence[str]
    """The aliases that are written."""
    longest: int
    """transformers' longest context, if the field is absent."""

    names: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "num_experts",
        **same("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor", "n_group", "topk_group"),
    }

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        raw, contradictions = with_aliases(raw)
        values, problems = super().read(raw, model_type)
        longest = raw.get("max_position_embeddings")
        if types := raw.get("mlp_layer_types"):
            values, problems = with_listed_layers(values, types, raw["num_hidden_layers"], problems)
        values |= {"max_position_embeddings": self.longest if longest is None else longest}
        return values, [*contradictions, *problems]

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        if model.tie_word_embeddings or not model.moe.has_selection_bias or model.moe.scoring_func != "sigmoid":
            raise ConfigError(
                f"model.tie_word_embeddings, model.moe.balance, model.moe.scoring_func: {fields['model_type']} of "
                "transformers has a head of its own, sigmoid scores and a bias that selects experts"
            )
        super().write(model, fields)
        fields["num_local_experts"] = fields.pop("n_routed_experts")
        fields |= {"max_position_embeddings": model.max_position_embeddings, "num_mtp_layers": 0}
        fields["pad_token_id"] = None  # the default is one of the published vocabulary
        for alias in self.written:
            fields[alias] = fields.pop(ALIASES[alias])


@dataclass(frozen=True)
class KimiLayers(OwnKeys):
    """Which layers have delta nets, and the widths of latent attention beside `HuggingFace.fields`."""

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield what latent attention does not compute."""
        yield from super().judge(raw, model_type)
        width = (raw.get("qk_nope_head_dim") or 128) + (raw.get("qk_rope_head_dim") or 64)
        if raw.get("qk_head_dim", width) != width:
            yield "qk_head_dim is not supported unless it is qk_nope_head_dim + qk_rope_head_dim"

    def problems(self, config: Config, model: KimiLinearModel) -> Iterator[str]:
        yield from super().problems(config, model)
        if unknown := sorted(set(model.layer_types) - {LINEAR, FULL}):
            yield problem(config, "model.layer_types", f"{', '.join(unknown)} unknown; use {LINEAR} and {FULL}")
        if model.layer_types and len(model.layer_types) != model.num_hidden_layers:
            text = f"has {len(model.layer_types)} layers; give a type for each of the {model.num_hidden_layers}"
            yield problem(config, "model.layer_types model.num_hidden_layers", f"{text}, or none")
        for name in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"):
            if getattr(model, name) < 1:
                yield problem(config, f"model.{name}", "must be at least 1")


@dataclass(frozen=True)
class _Layers(KimiLayers):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        stated = raw.get("linear_attn_config") or {}
        values: dict[str, Any] = {"q_lora_rank": raw.get("q_lora_rank") or 0}
        for name, (theirs, default) in _OF_DELTA_NETS.items():
            values[name] = stated.get(theirs, raw.get(name, default))
        known = {*_LISTS, *(theirs for theirs, _ in _OF_DELTA_NETS.values())}
        problems = [f"linear_attn_config: {name} is not known" for name in sorted(stated.keys() - known)]
        listed, wrong = _listed(stated, raw["num_hidden_layers"])
        types = raw.get("layer_types") or listed
        if listed and types != listed:
            wrong.append("layer_types contradicts the layers of linear_attn_config")
        # transformers counts from 0 here, and the first layer is none of them.
        types = types or [LINEAR, *full_each(4, raw["num_hidden_layers"])][: raw["num_hidden_layers"]]
        return values | {"layer_types": tuple(types)}, [*problems, *wrong]

    def write(self, model: KimiLinearModel, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        types = types_of(model)
        lists = {
            name: [number for number, listed in enumerate(types, 1) if listed == kind] for name, kind in _LISTS.items()
        }
        widths = {theirs: getattr(model, name) for name, (theirs, _) in _OF_DELTA_NETS.items()}
        fields |= {"q_lora_rank": model.q_lora_rank or None, "linear_attn_config": {**widths, **lists}}


# Our options of delta nets, each with its field of linear_attn_config, and with transformers' default.
_OF_DELTA_NETS = {
    "linear_num_heads": ("num_heads", 32),
    "linear_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}
_LISTS = {"kda_layers": LINEAR, "full_attn_layers": FULL}


def _listed(stated: Raw, layers: int) -> tuple[list[str], list[str]]:
    """Return the layers of linear_attn_config, which counts from 1, and problems. Without both lists there are none."""
    if not stated.keys() >= _LISTS.keys():
        return [], []
    wrong = [f"linear_attn_config: {' and '.join(_LISTS)} should list each layer from 1 to {layers} once"]
    if not all(isinstance(stated[name], list) for name in _LISTS):
        return [], wrong
    numbers = [(number, kind) for name, kind in _LISTS.items() for number in stated[name]]
    if any(type(number) is not int for number, _ in numbers) or len(numbers) != layers:
        return [], wrong
    kinds = dict(numbers)
    return ([], wrong) if kinds.keys() != {*range(1, layers + 1)} else ([kinds[n] for n in sorted(kinds)], [])


_MOE: dict[str, Any] = {"num_local_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}
_MOE |= {"routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1}
_EXPERTS = AliasedExperts(
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    moe=_MOE,
    written=tuple(ALIASES),
    longest=1048576,
)
# Of the published files. transformers reads none of them.
_PUBLISHED = {
    **{"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True},
    "rope_scaling": None,
}
_FIXED = {"attention_dropout": 0.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", **_PUBLISHED}
_LAYER = "model.layers.*"
_MIXTURE = f"{_LAYER}.block_sparse_moe"
_MLP = ("gate", "up", "down")


def delta_modules(attention: str) -> dict[str, str]:
    """Return the names of what all model types of delta nets have. `attention` is their name of the module."""
    return {
        **{f"layers.*.attention.conv_{name}": f"{attention}.{name}_conv1d" for name in "qkv"},
        "layers.*.attention.beta": f"{attention}.b_proj",
        "layers.*.attention.norm": f"{attention}.o_norm",
        **{f"layers.*.attention.{name}": f"{attention}.{name}" for name in ("A_log", "dt_bias")},
    }


IN_FP32 = ("layers.*.attention.A_log", "layers.*.attention.dt_bias")

KIMI_LINEAR = Family(
    name="kimi_linear",
    stage=KimiLinearStage,
    activations=("silu",),
    options=KimiLinearModel,
    hugging_face=like(
        DEEPSEEK,
        model_types={"kimi_linear": ModelType("KimiLinearForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, _Layers(), Written(_PUBLISHED)),
        modules={
            **delta_modules(f"{_LAYER}.self_attn"),
            **{
                f"layers.*.attention.{ours}_{part}": f"{_LAYER}.self_attn.{theirs}_{part}_proj"
                for ours, theirs in (("decay", "f"), ("gate", "g"))
                for part in "ab"
            },
            "layers.*.mlp.router": f"{_MIXTURE}.gate",
            "layers.*.mlp.router.bias": f"{_MIXTURE}.gate.e_score_correction_bias",
            "layers.*.mlp.experts.*.gate": f"{_MIXTURE}.experts.*.w1",
            "layers.*.mlp.experts.*.up": f"{_MIXTURE}.experts.*.w3",
            "layers.*.mlp.experts.*.down": f"{_MIXTURE}.experts.*.w2",
            **{f"layers.*.mlp.shared.{name}": f"{_MIXTURE}.shared_experts.{name}_proj" for name in _MLP},
        },
        stacked={f"{_MIXTURE}.experts.gate_up_proj": ("w1", "w3"), f"{_MIXTURE}.experts.down_proj": ("w2",)},
        renamed={
            # transformers 5 saves the MLP of layers without experts as if it were a mixture,
            **{f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in _MLP},
            # and calls a mixture mlp in memory.
            **{f".mlp.{name}.": f".block_sparse_moe.{name}." for name in ("gate", "experts", "shared_experts")},
            ".forget_gate.": ".",
        },
        layouts={f"{_LAYER}.self_attn.A_log": Packing(axes=(2, 1))},
        in_fp32=IN_FP32,
        fields={"max_position_embeddings": None},
        defaults={"rms_norm_eps": 1e-5},
        tied={},
        # Widths of other programs, and rotary positions, which no layer has.
        without_effect=("head_dim", "rope_theta", "rope_parameters"),
        pairs=lambda model: {},
    ),
)
