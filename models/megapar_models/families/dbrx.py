"""DBRX (Databricks, 2024): Mixtral's layers with LayerNorm without biases, and bounds of queries, keys and values.

At Hugging Face: dbrx. transformers takes the rotary base of rope_parameters, and the model's own code that of
attn_config: a file with two bases is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.codecs import Always, Dropouts, unknown_in
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.families.mpt import MPT
from megapar_models.family import Family, ModelType, Raw, like, overlaid
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts
from megapar_models.norms import NormRule
from megapar_models.rotary_fields import Rope, stated_rope
from megapar_models.tensor_layouts import Packing


@dataclass(frozen=True)
class DBRXModel(MixtralModel):
    """The options of DBRX."""

    clip_qkv: float = field(default=8.0, metadata=OF_FUNCTION)
    """Bound of the numbers of queries, keys and values."""


class DBRXStage(MixtralStage[DBRXModel]):
    """Consecutive DBRX layers."""

    @classmethod
    def layer_kind(cls, model: DBRXModel, number: int) -> LayerKind:
        norm = NormRule(model.rms_norm_eps, "layer", biased=False)
        return replace(super().layer_kind(model, number), norm=norm, qkv_clip=model.clip_qkv)


def _problems(config: Config, model: DBRXModel) -> Iterator[str]:
    if not 0 < model.clip_qkv < float("inf"):
        yield problem(config, "model.clip_qkv", "must be above 0; DBRX has 8.0")


class _Attention(Rope):
    """The options of attention, in an object, the rotary base among them."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        stated = raw.get("attn_config") or {}
        theta = stated.get("rope_theta", self.theta)
        beside = {"rope_theta": raw.get("rope_theta", theta), "max_position_embeddings": raw.get("max_seq_len", 2048)}
        values, problems = super().read(overlaid(raw, beside), model_type)
        problems += unknown_in("attn_config", stated, ("clip_qkv", "kv_n_heads", "rope_theta"))
        if not problems and values["rope_theta"] != theta:
            text = f"contradicts {values['rope_theta']!r} of rope_parameters: transformers reads that alone"
            problems.append(f"attn_config: rope_theta={theta!r} {text}; the two must be equal")
        clip = stated.get("clip_qkv")
        if clip is None or clip <= 0:
            problems.append(f"attn_config: clip_qkv={clip!r} should be a number above 0; transformers fails without it")
        heads = stated.get("kv_n_heads", 1)
        if raw.get("num_key_value_heads", heads) != heads:  # transformers writes it too
            text = f"contradicts kv_n_heads={heads!r} of attn_config"
            problems.append(f"num_key_value_heads={raw['num_key_value_heads']!r} {text}")
        return {**values, "clip_qkv": clip or 0.0, "num_key_value_heads": heads}, problems

    def warnings(self, raw: Raw, family: str) -> list[str]:
        theta = (raw.get("attn_config") or {}).get("rope_theta", self.theta)
        if theta == self.theta or stated_rope(raw) or "rope_theta" in raw:
            return []
        text = f"as the model's own code does; transformers 5 takes {self.theta}, unless rope_parameters says it too"
        return [f"config.json: rope_theta={theta!r} of attn_config is used, {text}"]

    def write(self, model: DBRXModel, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        numbers = {"clip_qkv": model.clip_qkv, "kv_n_heads": model.num_key_value_heads, "rope_theta": model.rope_theta}
        fields["attn_config"] = {"attn_pdrop": 0.0, **numbers}


class _Experts(RoutedExperts):
    """The options of experts, in an object."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        stated = raw.get("ffn_config") or {}
        values, problems = super().read(stated, model_type)
        act = stated.get("ffn_act_fn") or {"name": "silu"}
        if act not in [{"name": name} for name in _ACTIVATIONS]:
            problems.append(f"ffn_act_fn={act!r} is not supported; a name alone is, of {', '.join(_ACTIVATIONS)}")
        power = stated.get("moe_normalize_expert_weights", 1.0)
        if power not in (None, 1.0):
            problems.append(f"moe_normalize_expert_weights={power!r} is not supported; 1.0 and null are")
        # transformers takes the hidden size of the model, whatever this one is.
        known = (*self.names, "ffn_act_fn", "hidden_size", "moe_normalize_expert_weights")
        problems = [*(f"ffn_config: {line}" for line in problems), *unknown_in("ffn_config", stated, known)]
        if not problems:
            values["moe"] = replace(values["moe"], norm_topk_prob=power is not None)
        return {**values, "hidden_act": act.get("name")}, problems

    def write(self, model: DBRXModel, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        ffn = {name: fields.pop(name) for name in self.names}
        power = 1.0 if model.moe.norm_topk_prob else None
        ffn |= {"ffn_act_fn": {"name": model.hidden_act}, "moe_normalize_expert_weights": power}
        fields["ffn_config"] = ffn
        fields["output_router_logits"] = False


def _judged_with(config: Any) -> Raw:
    """Return the rotary base of a published file, of which transformers reads another one."""
    return {"rope_parameters": {**config.rope_parameters, "rope_theta": config.attn_config.rope_theta}}


_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_FIXED = {"tie_word_embeddings": False}
_BLOCK = "transformer.blocks.*"
_ATTENTION = f"{_BLOCK}.norm_attn_norm"
_MLP = f"{_BLOCK}.ffn.experts.mlp"
_MATRICES: Mapping[str, str] = {"gate": "w1", "up": "v1", "down": "w2"}

DBRX = Family(
    name="dbrx",
    stage=DBRXStage,
    activations=_ACTIVATIONS,
    options=DBRXModel,
    even_head_dim=True,
    problems=_problems,
    hugging_face=like(
        MPT,
        model_types={"dbrx": ModelType("DbrxForCausalLM", fixed=_FIXED, judged_with=_judged_with)},
        codecs=(
            Always({"rms_norm_eps": 1e-5, "tie_word_embeddings": False}),
            _Experts(
                names={
                    **{"moe_num_experts": "num_experts", "moe_top_k": "num_experts_per_tok"},
                    **{"ffn_hidden_size": "moe_intermediate_size", "moe_loss_weight": "router_aux_loss_coef"},
                },
                defaults={"moe_num_experts": 4, "moe_top_k": 1, "ffn_hidden_size": 3584, "moe_loss_weight": 0.01},
            ),
            _Attention(),
            Dropouts(("emb_pdrop", "resid_pdrop")),
        ),
        modules={
            "layers.*.attention_norm": f"{_ATTENTION}.norm_1",
            **dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), f"{_ATTENTION}.attn.Wqkv"),
            "layers.*.attention.o": f"{_ATTENTION}.attn.out_proj",
            "layers.*.mlp_norm": f"{_ATTENTION}.norm_2",
            **dict.fromkeys(("layers.*.mlp.up", "layers.*.mlp.down")),
            "layers.*.mlp.router": f"{_BLOCK}.ffn.router.layer",
            **{f"layers.*.mlp.experts.*.{our}.weight": f"{_MLP}.{their}" for our, their in _MATRICES.items()},
        },
        layouts={
            **{f"{_MLP}.{name}": Packing(joined=True) for name in ("w1", "v1")},
            f"{_MLP}.w2": Packing(joined=True, transposed=True),
        },
        fields={"layer_norm_epsilon": None, "tie_word_embeddings": None},
        defaults={"max_seq_len": 2048},
        # Of files by earlier releases: the loss of balance is that of ffn_config.
        without_effect=("router_aux_loss_coef",),
    ),
)
