"""Gemma 4 (Google, 2026): head sizes by kind of layer, KV sharing, and per-layer inputs.

Full-attention layers have a head width, a number of key/value heads and a rotary table (of the shortest wavelengths
alone) of their own, and may take the projected keys as values (`attention_k_eq_v`). The last `num_kv_shared_layers`
layers read the keys and values of the last earlier layer of their kind. Scores are not scaled by 1 / sqrt(d), and
values have an RMS norm without a weight. A layer's output is multiplied by `layer_scalar`, which is not trained. In
mixtures, experts stand beside the MLP of each layer. These are the weights beyond those of Gemma 3
(megapar_models.families.gemma2) and of mixtures (megapar_models.families.mixtral), with h hidden and p the width of
per-layer inputs:

    per_layer_norm.weight                   [p]     on every tp rank
    layers.N.per_layer.*                            those of megapar_models.per_layer_inputs
    layers.N.layer_scalar                   [1]     no parameter, but state
    layers.N.mlp.router.expert_scale        [E]     on every tp rank
    layers.N.mlp.router_norm.weight         [h]     on every tp rank
    layers.N.mlp.{dense_output_norm, experts_norm, experts_output_norm}.weight   [h]   on every tp rank

Layers that read keys and values have no weights of attention.{k, v, k_norm}, and layers whose values are keys none of
attention.v.

At Hugging Face: gemma4_text, and the text of gemma4 (E2B, E4B, 26B-A4B, 31B); gemma4_unified_text, and the text of
gemma4_unified (12B), which are written as gemma4_text.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION, MaybeMixtureModel, MoEConfig
from megapar.config.options import Config
from megapar.declare.params import ONES
from megapar.expert_parallel.balance import add_to_checkpoints
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar.tensor_parallel.layers import shared_vector
from megapar_models import per_layer_inputs
from megapar_models.codecs import ZeroAsNull
from megapar_models.factory import Factory
from megapar_models.families.gemma import GEMMA, GemmaModel
from megapar_models.family import Codec, Family, ModelType, Raw, like, overlaid, same
from megapar_models.forward import ForwardContext
from megapar_models.handed import Handed
from megapar_models.layer import Layer
from megapar_models.layer_kind import Ends, HeadSizes, LayerKind, keys_of
from megapar_models.moe_fields import Balanced, read_moe, refuse_unwritable
from megapar_models.norms import NormRule
from megapar_models.per_layer_inputs import PerLayerInput
from megapar_models.rotary import Rotary
from megapar_models.rotary_fields import LocalRope
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing
from megapar_models.windows import FULL, ListedWindows, LocalRopeModel, full_every, is_full, window_of


@dataclass(frozen=True)
class Gemma4Model(MaybeMixtureModel, LocalRopeModel, GemmaModel):
    """The options of Gemma 4."""

    global_head_dim: int = 0
    """The width of a head in layers that attend to all keys; 0: model.head_dim."""
    num_global_key_value_heads: int = 0
    """Key/value heads of layers that attend to all keys; 0: model.num_key_value_heads."""
    attention_k_eq_v: bool = False
    """In layers that attend to all keys, values are the projection to keys, before norm and rotation."""
    num_kv_shared_layers: int = 0
    """The number of last layers that have no keys and values of their own (KV sharing): each attends to those of the
    last layer before them of its kind, sliding or full attention."""
    use_double_wide_mlp: bool = False
    """Layers that read keys and values of an earlier one have an MLP of twice model.intermediate_size."""
    hidden_size_per_layer_input: int = 0
    """The width of inputs of each layer's own; 0: there are none."""
    final_logit_softcapping: float = field(default=0.0, metadata=OF_FUNCTION)
    """Logits x become cap * tanh(x / cap), with this cap; 0: they stay as they are."""

    @property
    def global_width(self) -> int:
        """The width of a head in layers that attend to all keys."""
        return self.global_head_dim or self.head_dim

    @property
    def rotary_width(self) -> int:
        """The width of the rotary table of layers that attend to all keys."""
        return self.global_width

    @property
    def first_reader(self) -> int:
        """The number of the first layer that reads keys and values of an earlier one."""
        return self.num_hidden_layers - self.num_kv_shared_layers


class Gemma4Layer(Layer):
    """A layer with an input of its own as a third branch, times a number that is not trained."""

    layer_scalar: Tensor

    def __init__(self, number: int, kind: LayerKind, model: Gemma4Model, factory: Factory):
        super().__init__(number, kind, model, factory)
        width = model.hidden_size_per_layer_input
        self.per_layer = PerLayerInput(number, width, kind, model, factory) if width else None
        self.register_buffer("layer_scalar", torch.ones(1, dtype=torch.float32, device=factory.sharding.device))
        add_to_checkpoints(self.layer_scalar, f"layers.{number}.layer_scalar", factory.sharding)

    def forward(self, x_sbh: Tensor, context: ForwardContext, *_: Any, **__: Any) -> Tensor:
        """Return the hidden states after the layer, [s, b, h]."""
        x_sbh = super().forward(x_sbh, context)
        if self.per_layer is not None:
            x_sbh = x_sbh + self.per_layer(x_sbh, context)
        return x_sbh * self.layer_scalar.to(x_sbh.dtype)


class Gemma4Stage(Stage[Gemma4Model]):
    """Consecutive layers of Gemma 4. The first stage also has the norm of all layers' inputs."""

    def __init__(self, model: Gemma4Model, factory: Factory, layers: range, **options: Any):
        super().__init__(model, factory, layers, **options)
        self.per_layer_norm = None
        if self.first and model.hidden_size_per_layer_input:
            name, width = "per_layer_norm.weight", model.hidden_size_per_layer_input
            self.per_layer_norm = shared_vector(name, width, ONES, factory.sharding)

    @classmethod
    def layer_kind(cls, model: Gemma4Model, number: int) -> LayerKind:
        full, local = is_full(model, number), model.rope_local_base_freq
        width, keys = model.head_dim, model.num_key_value_heads
        rotary = Rotary(local, width) if local else Rotary(model.rope_theta, width, model.rope_scaling)
        if full:
            width, keys = model.global_width, model.num_global_key_value_heads or keys
            rotary = Rotary(model.rope_theta, width, model.rope_scaling)
        wide = model.use_double_wide_mlp and number >= model.first_reader
        kind = LayerKind(
            norm=NormRule(model.rms_norm_eps),
            norms="both",
            rotary=rotary,
            window=window_of(model, number),
            head_sizes=HeadSizes(model.num_attention_heads, keys, width, width),
            sizes_from="model.num_attention_heads model.num_key_value_heads model.num_global_key_value_heads",
            mlp_width=(1 + wide) * model.intermediate_size,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=True,
            attention_scale=1.0,
            keys_as_values=full and model.attention_k_eq_v,
            value_norm=NormRule(model.rms_norm_eps, weighted=False),
            reads=per_layer_inputs.HANDED if model.hidden_size_per_layer_input else (),
        )
        if model.experts is not None:
            kind = replace(kind, mlp="both", mlp_norms="after", mixture=model.experts, expert_scale=True)
        return _with_shared_keys(kind, model, number)

    @classmethod
    def ends_of(cls, model: Gemma4Model) -> Ends:
        width = model.hidden_size_per_layer_input
        return Ends(
            embedding_multiplier=math.sqrt(model.hidden_size),
            logits=LogitRule(cap=model.final_logit_softcapping),
            writes=per_layer_inputs.handed(model.hidden_size, width) if width else (),
        )

    def make_layer(self, number: int, kind: LayerKind) -> nn.Module:
        return Gemma4Layer(number, kind, self.model, self.factory)

    def begin(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        if self.per_layer_norm is None:
            return x_sbh
        context.handed[per_layer_inputs.NORM] = self.per_layer_norm
        context.handed[per_layer_inputs.EMBEDDING] = x_sbh
        return x_sbh


def _with_shared_keys(kind: LayerKind, model: Gemma4Model, number: int) -> LayerKind:
    """Return the kind of a layer that reads keys and values, or hands its own on, if it does one of them."""
    if not model.num_kv_shared_layers:
        return kind
    full, first = is_full(model, number), model.first_reader
    group = "full" if full else "sliding"
    if number >= first:
        return replace(kind, shared_keys=group, reads=(*keys_of(group), *kind.reads))
    alike = [other for other in range(model.num_hidden_layers) if is_full(model, other) == full]
    if number != max(other for other in alike if other < first) or alike[-1] < first:
        return kind
    sizes = kind.heads_of(model)
    shape = (sizes.kv_heads, sizes.head_dim)
    handed = [Handed(name=name, shape=shape, query_heads=sizes.query_heads) for name in keys_of(group)]
    return replace(kind, shared_keys=group, writes=tuple(handed))


# Hugging Face


class _Heads(Codec):
    """Heads of layers that attend to all keys, which transformers states by layer, and what layers share."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if raw.get("use_bidirectional_attention") not in (None, False, "vision"):
            stated = raw["use_bidirectional_attention"]
            return {}, [f"use_bidirectional_attention={stated!r} is not supported; use null, false or 'vision'"]
        types = _WINDOWS.types(raw)
        if not types or types[-1] != FULL:
            return {}, [f"layer_types={types!r} is not supported; its last entry must be {FULL}, as in transformers"]
        values = {name: raw.get(name) or 0 for name in ("num_kv_shared_layers", _WIDTH)}
        values["use_double_wide_mlp"] = bool(raw.get("use_double_wide_mlp", False))
        if _WIDTH not in raw and model_type == "gemma4_text":
            values[_WIDTH] = 256
        width, keys = raw.get("global_head_dim", 512), raw.get("num_global_key_value_heads")
        keys = keys if raw.get("attention_k_eq_v", False) else None
        if "per_layer_config" in raw:
            full = [str(number) for number, kind in enumerate(types) if kind == FULL]
            stated = {str(number): fields for number, fields in (raw["per_layer_config"] or {}).items()}
            first = stated.get(full[0], {})
            if not isinstance(first, Mapping):
                return {}, [f"per_layer_config={raw['per_layer_config']!r} is not supported; its values are objects"]
            known = {"head_dim": first.get("head_dim"), "num_key_value_heads": first.get("num_key_value_heads")}
            known = {name: value for name, value in known.items() if value is not None}
            if stated != (dict.fromkeys(full, known) if known else {}):
                text = f"give head_dim and num_key_value_heads alone, equal for all {FULL} layers and for no other"
                return {}, [f"per_layer_config={raw['per_layer_config']!r} is not supported; {text}"]
            width, keys = known.get("head_dim"), known.get("num_key_value_heads")
        own, usual = raw.get("head_dim", 256), raw.get("num_key_value_heads", 4)
        values["global_head_dim"] = width if width not in (None, own) else 0
        values["num_global_key_value_heads"] = keys if keys not in (None, usual) else 0
        return values, []

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        table, rows = raw.get("vocab_size_per_layer_input", 262144), raw["vocab_size"]
        width = raw.get(_WIDTH, 256 if model_type == "gemma4_text" else 0)
        if width and table != rows:
            yield f"vocab_size_per_layer_input={table!r} is not supported unless it is vocab_size, {rows}"
        if _is_reader_alone(_WINDOWS.types(raw), raw.get("num_kv_shared_layers") or 0):
            yield f"num_kv_shared_layers={raw['num_kv_shared_layers']!r}: {_READER_ALONE}"
        if model_type != "gemma4_text" and (raw.get(_WIDTH) or raw.get("enable_moe_block")):
            yield f"{_WIDTH}, enable_moe_block: {model_type} of transformers has neither; use 0 and false"

    def write(self, model: Gemma4Model, fields: dict[str, Any]) -> None:
        if not is_full(model, model.num_hidden_layers - 1):
            raise ConfigError(f"model.layer_types: transformers makes the last layer of gemma4_text {FULL}")
        fields |= {name: getattr(model, name) for name in ("num_kv_shared_layers", _WIDTH, "use_double_wide_mlp")}
        fields["vocab_size_per_layer_input"] = model.vocab_size
        fields["global_head_dim"] = model.global_width
        fields["num_global_key_value_heads"] = model.num_global_key_value_heads or None

    def problems(self, config: Config, model: Gemma4Model) -> Iterator[str]:
        if model.global_head_dim < 0 or model.global_head_dim % 2:
            text = "rotary embeddings turn pairs, so a head's width must be even; 0 takes model.head_dim"
            yield problem(config, "model.global_head_dim", text)
        if model.num_global_key_value_heads and not model.attention_k_eq_v:
            text = "only layers with attention_k_eq_v may have key/value heads of their own; set it true, or use 0"
            yield problem(config, "model.num_global_key_value_heads model.attention_k_eq_v", text)
        if model.hidden_size_per_layer_input < 0:
            yield problem(config, f"model.{_WIDTH}", "must be at least 0, which means no inputs by layer")
        if model.final_logit_softcapping < 0:
            yield problem(config, "model.final_logit_softcapping", "must be at least 0, which means no cap")
        kinds = [is_full(model, number) for number in range(model.num_hidden_layers)]
        if _is_reader_alone(kinds, model.num_kv_shared_layers):
            yield problem(config, "model.num_kv_shared_layers model.layer_types", _READER_ALONE)


class _Experts(Balanced):
    """Experts beside the MLP of every layer."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        stated = {name: raw.get(name) for name in _EXPERTS}
        if not raw.get("enable_moe_block", False):
            return {}, []  # transformers reads none of them either
        moe, problems = read_moe(stated, _EXPERTS, {})
        return {"moe": MoEConfig(**moe)}, problems

    def write(self, model: Gemma4Model, fields: dict[str, Any]) -> None:
        fields["enable_moe_block"] = model.experts is not None
        if model.experts is not None:
            refuse_unwritable(model, "gemma4_text", {"norm_topk_prob": True}, ())
            fields |= {theirs: getattr(model.moe, ours) for theirs, ours in _EXPERTS.items()}


class _Rope(LocalRope):
    """Two rotary tables. transformers takes those of the published models for a file without any."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if not raw.get("rope_parameters"):
            raw = overlaid(raw, {"rope_parameters": {FULL: _FULL_ROPE}})
        return super().read(raw, model_type)

    def write(self, model: Gemma4Model, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        # transformers makes a mask of the window also if no layer reads it, and fails without a number.
        fields["sliding_window"] = model.sliding_window or 512


def _types(layers: int) -> list[str]:
    """Each sixth layer reads all keys, and the last one."""
    return [*full_every(6, layers)[:-1], FULL]


def _is_reader_alone(kinds: Sequence[object], shared: int) -> bool:
    """Whether one of the `shared` last layers has no layer of its kind before them."""
    first = len(kinds) - shared
    return shared < 0 or first < 1 or not {*kinds[first:]} <= {*kinds[:first]}


_READER_ALONE = (
    "each kind of layers that read keys and values needs one before them that hands its own on; use fewer, or 0"
)


def _keys_of_readers(raw: Raw) -> tuple[str, ...]:
    """Return beginnings of names of keys and values in layers that read those of others: transformers leaves them."""
    layers = raw["num_hidden_layers"]
    readers = range(layers - (raw.get("num_kv_shared_layers") or 0), layers)
    bases = ("model.layers", "model.language_model.layers", "language_model.model.layers")
    return tuple(f"{base}.{number}.self_attn.{x}_" for number in readers for base in bases for x in "kv")


_WIDTH = "hidden_size_per_layer_input"
_EXPERTS = {"num_experts": "num_experts", "top_k_experts": "num_experts_per_tok", **same("moe_intermediate_size")}
_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
_LAYER = "model.layers.*"
_FIXED: dict[str, Any] = {"attention_dropout": 0.0}


def _codecs(window: int) -> tuple[Codec, ...]:
    windows = ListedWindows(window, usual=_types)
    return (_Heads(), _Experts(), ZeroAsNull(("final_logit_softcapping",)), _Rope(1e6, windows=windows))


_WINDOWS = ListedWindows(512, usual=_types)
_UNIFIED = "Gemma4UnifiedForCausalLM"

GEMMA4 = Family(
    name="gemma4",
    stage=Gemma4Stage,
    activations=("gelu_pytorch_tanh", "silu", "relu2"),
    options=Gemma4Model,
    even_head_dim=True,
    hugging_face=like(
        GEMMA,
        model_types={
            "gemma4_text": ModelType("Gemma4ForCausalLM", fixed=_FIXED, codecs=_codecs(512)),
            "gemma4_unified_text": ModelType(_UNIFIED, fixed=_FIXED, codecs=_codecs(1024)),
        },
        modules={
            # In Llama post_attention_layernorm is the norm before the MLP, and here it is the one behind attention.
            "layers.*.attention_output_norm": f"{_LAYER}.post_attention_layernorm",
            "layers.*.mlp_norm": f"{_LAYER}.pre_feedforward_layernorm",
            "layers.*.mlp_output_norm": f"{_LAYER}.post_feedforward_layernorm",
            "layers.*.layer_scalar": f"{_LAYER}.layer_scalar",
            "per_layer_norm": "model.per_layer_projection_norm",
            "layers.*.per_layer.embedding": "model.embed_tokens_per_layer",
            "layers.*.per_layer.model_projection": "model.per_layer_model_projection",
            "layers.*.per_layer.gate": f"{_LAYER}.per_layer_input_gate",
            "layers.*.per_layer.projection": f"{_LAYER}.per_layer_projection",
            "layers.*.per_layer.norm": f"{_LAYER}.post_per_layer_input_norm",
            "layers.*.mlp.router": f"{_LAYER}.router.proj",
            "layers.*.mlp.router.expert_scale": f"{_LAYER}.router.per_expert_scale",
            "layers.*.mlp.router_norm.weight": f"{_LAYER}.router.scale",
            "layers.*.mlp.dense_output_norm": f"{_LAYER}.post_feedforward_layernorm_1",
            "layers.*.mlp.experts_norm": f"{_LAYER}.pre_feedforward_layernorm_2",
            "layers.*.mlp.experts_output_norm": f"{_LAYER}.post_feedforward_layernorm_2",
            **{f"layers.*.mlp.experts.*.{name}.weight": f"{_LAYER}.experts.gate_up_proj" for name in ("gate", "up")},
            "layers.*.mlp.experts.*.down.weight": f"{_LAYER}.experts.down_proj",
        },
        layouts={
            "model.embed_tokens_per_layer": Packing(joined=True, beside=True),
            "model.per_layer_model_projection": Packing(joined=True),
        },
        maybe_fp32=("layers.*.layer_scalar",),
        fields={"hidden_activation": "hidden_act", **same("attention_k_eq_v", "final_logit_softcapping")},
        defaults={
            **{"hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
            **{"attention_k_eq_v": False, "final_logit_softcapping": None},
        },
        activations=same("gelu_pytorch_tanh", "silu", "relu2"),
        ignored=_keys_of_readers,
    ),
)
