"""DeepSeek-V3 (arXiv 2412.19437), and with options DeepSeek-V2 (2405.04434), Kimi K2, Moonlight and GLM-4.7-Flash.

Layers have latent attention (megapar_models.latent_attention has the names of its weights). The first of them have the
MLP of Llama, the others Mixtral's experts and a shared expert.

With sigmoid scores the router is V3's: the score of a group is the sum of its two best. With softmax it is V2's: the
score of a group is its best, and the scores of experts in other groups become 0.

At Hugging Face: deepseek_v3 (also R1 and Moonlight), kimi_k2 (the same under another name), deepseek_v2, and
glm4_moe_lite. FP8 weights are dequantized when they are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from typing_extensions import TypeVar

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.config.options import Config
from megapar_models.codecs import FurtherTokens
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.families.qwen3_moe import QWEN3_MOE
from megapar_models.family import Codec, Family, ModelType, Raw, like, overlaid, same
from megapar_models.latent_attention import Latent
from megapar_models.layer_kind import LayerKind
from megapar_models.moe import router_rule
from megapar_models.moe_fields import Balanced, read_moe, wrong_mlp_types
from megapar_models.multi_token import MTPRule
from megapar_models.norms import NormRule
from megapar_models.rotary import RotaryModel, yarn_mscale
from megapar_models.rotary_fields import Rope, stated_rope
from megapar_models.tensor_layouts import Pairs

# Of the norms of latents, whatever model.rms_norm_eps says: so has the code of every model of this family.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class DeepseekExperts(MoEConfig):
    """A mixture whose first layers have no experts."""

    first_k_dense_replace: int = 0
    """The first layers, as many as this, have a plain MLP of width model.intermediate_size in place of experts."""


@dataclass(frozen=True)
class LatentModel(ModelConfig):
    """The options of a model with latent attention.

    model.head_dim is the width of the part of a key that all heads share, the rotated part if the model has positions.
    """

    q_lora_rank: int = 0
    """Width of the latent of queries; 0: queries are projected directly."""
    kv_lora_rank: int = 512
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int = 128
    """Width of the part of a latent head's query and key that is its own and is not rotated."""
    v_head_dim: int = 128
    """Width of a latent head's value."""
    attention_bias: bool = False
    """Biases on the projections to latents and on the output projection of latent attention."""

    @property
    def key_width(self) -> int:
        """The width of a latent head's query and key, with both of their parts."""
        return self.qk_nope_head_dim + self.head_dim

    @property
    def value_width(self) -> int:
        """The width of a latent head's value."""
        return self.v_head_dim


@dataclass(frozen=True)
class DeepseekModel(LatentModel, MixtralModel):
    """The options of DeepSeek-V2 and V3."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""


D = TypeVar("D", bound=DeepseekModel, default=DeepseekModel)


class DeepseekStage(MixtralStage[D]):
    """Consecutive layers of DeepSeek-V2 or V3."""

    @classmethod
    def layer_kind(cls, model: D, number: int) -> LayerKind:
        kind = with_latents(super().layer_kind(model, number), model)
        return with_experts(replace(kind, attention_scale=latent_scale(model)), model.moe, number)

    @classmethod
    def mtp_rule(cls, model: D) -> MTPRule | None:
        return MTPRule(kind=cls.layer_kind(model, model.num_hidden_layers))


def latents(model: LatentModel) -> Latent:
    """Return the rule of latent attention."""
    return Latent(
        q_rank=model.q_lora_rank,
        kv_rank=model.kv_lora_rank,
        nope_width=model.qk_nope_head_dim,
        rope_width=model.head_dim,
        value_width=model.v_head_dim,
        norm=NormRule(LATENT_EPS),
    )


def with_latents(kind: LayerKind, model: LatentModel) -> LayerKind:
    """Return `kind` with latent attention."""
    return replace(kind, mixer=latents(model), qkv_bias=model.attention_bias, out_bias=model.attention_bias)


def latent_scale(model: RotaryModel) -> float:
    """Return the factor of scores of latent attention: yarn stretches it too."""
    rope = model.rope_scaling
    scale = model.key_width**-0.5
    if rope.rope_type == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(max(rope.factor, 1.0), rope.mscale_all_dim) ** 2
    return float(scale)


def with_experts(kind: LayerKind, moe: DeepseekExperts, number: int) -> LayerKind:
    """`kind` with the MLP of layer `number`: a plain one in the first layers, or experts with DeepSeek's router."""
    if number < moe.first_k_dense_replace:
        return replace(kind, mlp="dense", mixture=None)
    rule = router_rule(moe)
    if moe.scoring_func == "sigmoid":
        return replace(kind, mixture=moe, router=replace(rule, group_score="best_2"))
    return replace(kind, mixture=moe, router=replace(rule, group_score="best", zero_other_groups=True))


@dataclass(frozen=True, kw_only=True)
class SharedExperts(Balanced):
    """DeepSeek's experts: the first layers have none, and the others have experts for every token."""

    defaults: Raw
    """transformers' defaults of norm_topk_prob, first_k_dense_replace and n_shared_experts, if they are absent."""
    moe: Raw
    """transformers' defaults of the other fields."""
    sigmoid: bool = True
    """Whether the router is V3's."""

    names: ClassVar[Mapping[str, str]] = {
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        "num_experts": "num_experts",
        **same("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor", "n_group", "topk_group"),
    }

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        experts, problems = read_moe(raw, self.names, self.moe)
        shared, normed, first = (
            raw.get(name, self.defaults[name])
            for name in ("n_shared_experts", "norm_topk_prob", "first_k_dense_replace")
        )
        if not isinstance(shared, int) or not isinstance(first, int) or not isinstance(normed, bool):
            stated = f"n_shared_experts={shared!r}, first_k_dense_replace={first!r}, norm_topk_prob={normed!r}"
            problems = [*problems, f"{stated} should be two whole numbers and a bool"]
            return {"moe": DeepseekExperts()}, problems
        experts |= {"norm_topk_prob": normed, "first_k_dense_replace": first, "balance": "global"}
        experts["shared_expert_intermediate_size"] = shared * experts.get("moe_intermediate_size", 0)
        if self.sigmoid:
            experts |= {"scoring_func": "sigmoid", "balance": "bias"}
        return {"moe": DeepseekExperts(**experts)}, problems

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        moe = model.moe
        shared, rest = divmod(moe.shared_expert_intermediate_size, moe.moe_intermediate_size)
        if rest or not shared or moe.shared_expert_gate:
            raise ConfigError(
                f"model.moe.shared_expert_intermediate_size: {fields['model_type']} of transformers has shared experts "
                "without a gate, together as wide as a multiple of model.moe.moe_intermediate_size"
            )
        fields |= {theirs: getattr(moe, ours) for theirs, ours in self.names.items() if ours != "num_experts"}
        fields |= {"n_routed_experts": moe.num_experts, "n_shared_experts": shared}
        fields |= {"first_k_dense_replace": moe.first_k_dense_replace, "norm_topk_prob": moe.norm_topk_prob}


@dataclass(frozen=True, kw_only=True)
class RenamedExperts(SharedExperts):
    """DeepSeek-V3's experts under other names of fields."""

    theirs: Mapping[str, str]
    """From their fields to those of DeepSeek."""
    lists_layers: bool = False
    """Whether mlp_layer_types may say which layers have experts, whatever first_k_dense_replace says."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        defaults = {**self.moe, **self.defaults}
        found = {ours: raw.get(theirs, defaults.get(ours)) for theirs, ours in self.theirs.items()}
        values, problems = super().read(overlaid(raw, found), model_type)
        types, layers = raw.get("mlp_layer_types") if self.lists_layers else None, raw["num_hidden_layers"]
        return (values, problems) if types is None else with_listed_layers(values, types, layers, problems)

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        if model.moe.scoring_func != "sigmoid" or not model.moe.has_selection_bias:
            text = f"{fields['model_type']} of transformers has sigmoid scores and a bias that selects experts"
            raise ConfigError(f"model.moe.scoring_func, model.moe.balance: {text}")
        super().write(model, fields)
        for theirs, ours in self.theirs.items():
            fields[theirs] = fields.pop(ours)
        if self.lists_layers:
            dense = model.moe.first_k_dense_replace
            fields["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (model.num_hidden_layers - dense)


class _V2Experts(SharedExperts):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        if raw.get("topk_method", "greedy") == "greedy":
            values["moe"] = replace(values["moe"], n_group=1, topk_group=1)
        return values, problems


class _LiteExperts(SharedExperts):
    """The experts of GLM-4.7-Flash, whose config lists the layers without experts (mlp_layer_types)."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        layers = raw["num_hidden_layers"]
        types = raw.get("mlp_layer_types") or ["dense", *["sparse"] * layers][:layers]
        return with_listed_layers(values, types, layers, problems)


def with_listed_layers(
    values: dict[str, Any], types: Sequence[str], layers: int, problems: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return values of `SharedExperts` with the first layers dense that `types` lists as such, and problems.

    `types` is the field mlp_layer_types of a model of so many layers.
    """
    problems = [*problems, *wrong_mlp_types(types, layers)]
    dense = types.count("dense")
    if "dense" in types[dense:]:
        return values, [*problems, "mlp_layer_types is not supported unless its dense layers are the first"]
    return {"moe": replace(values["moe"], first_k_dense_replace=dense)}, problems


@dataclass(frozen=True)
class OwnKeys(Codec):
    """The heads of latent attention: each has a key of its own."""

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield a problem if heads share keys."""
        if raw.get("num_key_value_heads") not in (None, raw["num_attention_heads"]):
            text = "each head has a key of its own"
            yield f"num_key_value_heads is not supported unless it is num_attention_heads: {text}"

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields |= {"num_key_value_heads": model.num_attention_heads}

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        if model.num_key_value_heads != model.num_attention_heads:
            text = "each head of latent attention has a key of its own; use 0"
            yield problem(config, "model.num_key_value_heads", text)


@dataclass(frozen=True)
class Latents(OwnKeys):
    """Latent attention: its widths, and the factor that YaRN gives scores."""

    q_rank: int = 1536
    """transformers' width of the latent of queries, if the field is absent."""
    nope_width: int = 128
    """transformers' width of the part of a key that is not rotated, if the field is absent."""
    rope_width: int = 64
    """transformers' width of the rotated part, if the field is absent."""
    whole_heads: bool = False
    """Whether the field head_dim is the width of a whole key (Mistral 4), and not that of its rotated part."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        return {"q_lora_rank": raw.get("q_lora_rank", self.q_rank) or 0}, []

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield what latent attention does not compute."""
        yield from super().judge(raw, model_type)
        rope = stated_rope(raw)
        if rope.get("mscale_all_dim") and not rope.get("mscale"):
            yield "mscale_all_dim without mscale is not supported; DeepSeek's files have both"
        if rope.get("mscale_all_dim") and rope.get("attention_factor"):
            yield "attention_factor beside mscale_all_dim is not supported"
        rotated = raw.get("qk_rope_head_dim") or self.rope_width
        width = (raw.get("qk_nope_head_dim") or self.nope_width) + rotated
        head_dim = raw.get("head_dim")
        if head_dim not in (None, width if self.whole_heads else rotated):
            is_of = "qk_nope_head_dim + qk_rope_head_dim" if self.whole_heads else "qk_rope_head_dim"
            yield f"head_dim={head_dim!r} is not supported unless it is {is_of}"
        if raw.get("qk_head_dim", width) != width and model_type != "glm4_moe_lite":
            yield "qk_head_dim is not supported unless it is qk_nope_head_dim + qk_rope_head_dim"

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        fields |= {"q_lora_rank": model.q_lora_rank or None}


class _Latents(Latents):
    """Latent attention, and which of the two models is written."""

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield what latent attention or the router does not compute."""
        yield from super().judge(raw, model_type)
        methods = ("greedy", "group_limited_greedy")
        if model_type == "deepseek_v2" and raw.get("topk_method", "greedy") not in methods:
            yield f"topk_method={raw['topk_method']!r} is not supported; {' and '.join(methods)} are"

    def write(self, model: DeepseekModel, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        if fields["model_type"] == "deepseek_v2":
            fields["topk_method"] = "group_limited_greedy" if model.moe.n_group > 1 else "greedy"
        else:
            fields |= SIGMOID


def _type_of(model: DeepseekModel) -> str:
    moe = model.moe
    if moe.scoring_func != "softmax":
        if not moe.has_selection_bias:
            text = "deepseek_v3 of transformers has a bias that selects experts; use bias"
            raise ConfigError(f"model.moe.balance: {text}")
        return "deepseek_v3"
    if moe.has_selection_bias or moe.norm_topk_prob:
        raise ConfigError(
            "model.moe.balance, model.moe.norm_topk_prob: deepseek_v2 of transformers has no bias that selects "
            "experts, and does not divide weights by their sum"
        )
    if model.num_nextn_predict_layers:
        raise ConfigError("model.num_nextn_predict_layers: deepseek_v2 of transformers predicts the next token alone")
    return "deepseek_v2"


def prediction_layers(raw: Raw) -> tuple[str, ...]:
    """Return beginnings of the names of the layers of multi-token prediction, which follow the others."""
    layers = raw["num_hidden_layers"]
    further = raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0
    return tuple(f"model.layers.{number}." for number in range(layers, layers + further))


def prediction_modules(model: ModelConfig) -> dict[str, str]:
    """Return names of the modules that these layers have beside those of others."""
    if not model.num_nextn_predict_layers:
        return {}
    found = {f"layers.*.{name}": f"model.layers.*.{name}" for name in ("enorm", "hnorm", "eh_proj")}
    return {**found, "layers.*.shared_head_norm": "model.layers.*.shared_head.norm"}


def prediction_copies(model: ModelConfig) -> dict[str, str]:
    """Return the copies of embedding and head that each of these layers has in files."""
    embedding = "model.embed_tokens.weight"
    copies = {
        "embed_tokens": embedding,
        "shared_head.head": embedding if model.tie_word_embeddings else "lm_head.weight",
    }
    layers = range(model.num_hidden_layers, model.all_layers)
    return {f"model.layers.{number}.{name}.weight": of for number in layers for name, of in copies.items()}


def latent_pairs(model: LatentModel) -> dict[str, Pairs]:
    """Theirs have the two numbers of a rotary pair beside each other."""
    nope = model.qk_nope_head_dim
    of_heads = Pairs(nope + model.head_dim, nope, model.head_dim)
    of_keys = Pairs(0, model.kv_lora_rank, model.head_dim)
    name = "layers.*.attention"
    return {f"{name}.q": of_heads, f"{name}.q_b": of_heads, f"{name}.kv_a": of_keys}


SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_FIXED = {"attention_dropout": 0.0, "moe_layer_freq": 1, "rope_interleave": True, "mlp_bias": False}
_V3_MOE: dict[str, Any] = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
_V3_MOE |= {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_V2_MOE: dict[str, Any] = {"n_routed_experts": 64, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0}
_V2_MOE |= {"n_group": 1, "topk_group": 1}
_LITE_MOE = _V3_MOE | {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
_LITE_MOE |= {"routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1}
_V3 = {"norm_topk_prob": True, "first_k_dense_replace": 3, "n_shared_experts": 1}
_V2 = {"norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": 2}
_FURTHER = FurtherTokens(alias="num_mtp_layers", absent=1)
_CODECS = (SharedExperts(defaults=_V3, moe=_V3_MOE), Rope(), _Latents(), _FURTHER)
_SHARED = "model.layers.*.mlp.shared_experts"

DEEPSEEK = Family(
    name="deepseek",
    stage=DeepseekStage,
    activations=("silu",),
    options=DeepseekModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={
            "deepseek_v3": ModelType("DeepseekV3ForCausalLM", {}, _FIXED | SIGMOID, _CODECS),
            "kimi_k2": ModelType("DeepseekV3ForCausalLM", {}, _FIXED | SIGMOID, _CODECS),
            # The program of transformers never divides the weights by their sum.
            "deepseek_v2": ModelType(
                "DeepseekV2ForCausalLM",
                {},
                _FIXED | {"scoring_func": "softmax", "norm_topk_prob": False},
                (_V2Experts(defaults=_V2, moe=_V2_MOE, sigmoid=False), Rope(), _Latents()),
            ),
            "glm4_moe_lite": ModelType(
                "Glm4MoeLiteForCausalLM",
                {"rms_norm_eps": 1e-5, "qk_nope_head_dim": 192, "v_head_dim": 256},
                _FIXED | SIGMOID,
                (_LiteExperts(defaults=_V3, moe=_LITE_MOE), Rope(), _Latents(768), FurtherTokens()),
            ),
        },
        type_of=_type_of,
        modules={
            "layers.*.attention.q_a": "model.layers.*.self_attn.q_a_proj",
            "layers.*.attention.q_a_norm": "model.layers.*.self_attn.q_a_layernorm",
            "layers.*.attention.q_b": "model.layers.*.self_attn.q_b_proj",
            "layers.*.attention.kv_a": "model.layers.*.self_attn.kv_a_proj_with_mqa",
            "layers.*.attention.kv_a_norm": "model.layers.*.self_attn.kv_a_layernorm",
            "layers.*.attention.kv_b": "model.layers.*.self_attn.kv_b_proj",
            "layers.*.mlp.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
            **{f"layers.*.mlp.shared.{name}": f"{_SHARED}.{name}_proj" for name in ("gate", "up", "down")},
            "layers.*.mlp.shared_gate": None,
        },
        fields={
            "head_dim": None,
            **same("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "attention_bias"),
            "qk_rope_head_dim": "head_dim",
        },
        defaults={
            **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            **{"attention_bias": False, "num_key_value_heads": None},
        },
        activations=same("silu"),
        # ep_size was of the program that trained them; the other three are of its losses.
        without_effect=("ep_size", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef"),
        ignored=prediction_layers,
        modules_of=prediction_modules,
        mtp_copies=prediction_copies,
        pairs=latent_pairs,
    ),
)
