"""LFM3: LFM2's convolutions, and attention that is full in some layers and has a window in others.

Each head's output is gated by a number, and branches are normalized on both sides. Layers with a window have a rotary
table of their own. The weights are those of LFM2 (megapar_models.families.lfm2), and with h hidden size and n heads:

    layers.N.attention.gate.weight          [n, h]   cut by output
    layers.N.attention_output_norm.weight   [h]      on every tp rank
    layers.N.mlp_output_norm.weight         [h]      on every tp rank

At Hugging Face: lfm3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.options import Config
from megapar_models.families.lfm2 import CONV, LFM2, MODULES, ConvolutionModel, Layers, with_convolution
from megapar_models.family import Family, ModelType, Raw, like, overlaid, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary_fields import LocalRope
from megapar_models.stage import Stage
from megapar_models.windows import FULL, SLIDING, LocalRopeModel, Windows, read_windows, rotary_of, window_of


@dataclass(frozen=True)
class Lfm3Model(ConvolutionModel, LocalRopeModel):
    """The options of LFM3."""

    layer_types: tuple[str, ...] = ()
    """conv, sliding_attention or full_attention for each layer; without any, all layers have the window."""
    conv_width: int = 7
    """Positions that a convolution reads, its own among them."""
    attention_bias: bool = False
    """Biases of attention's four projections."""
    use_sandwich_norm: bool = True
    """Norms of the outputs of both branches, beside those of their inputs."""
    use_attention_gate: bool = True
    """A number of the token gates the output of each head."""


class Lfm3Stage(Stage[Lfm3Model]):
    """Consecutive layers of LFM3."""

    @classmethod
    def layer_kind(cls, model: Lfm3Model, number: int) -> LayerKind:
        kind = LayerKind(
            norm=NormRule(model.rms_norm_eps),
            norms="both" if model.use_sandwich_norm else "before",
            rotary=rotary_of(model, number),
            window=window_of(model, number),
            qk_norm=True,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            head_gate=model.use_attention_gate,
        )
        return with_convolution(kind, model, number)


class _Layers(Layers):
    def types(self, raw: Raw) -> Any:
        return _types(raw)

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        for name in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
            if raw.get(name) is not None:
                yield f"{name} is not supported; rope_parameters has the table of each kind of layers"

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        yield from super().problems(config, model)
        if model.sliding_window < 0:
            yield problem(config, "model.sliding_window", "must be at least 0, which means no window")
        if model.attention_bias and model.use_attention_gate:
            text = "the gate has no bias where queries have one; use False for one of them"
            yield problem(config, "model.attention_bias model.use_attention_gate", text)
        if SLIDING in model.layer_types and not model.sliding_window:
            yield problem(config, "model.layer_types model.sliding_window", f"{SLIDING} needs a window above 0")


def _types(raw: Raw) -> Any:
    """Return the types of the layers: of absent ones, windows and full attention in turns between convolutions."""
    if raw.get("layer_types") is not None:
        return raw["layer_types"]
    return [FULL if n % 4 == 2 else SLIDING if n and n % 4 == 0 else CONV for n in range(raw["num_hidden_layers"])]


class _Windows(Windows):
    def types(self, raw: Raw) -> Any:
        return [kind for kind in _types(raw) if kind != CONV]

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = read_windows(raw, raw.get("sliding_window", self.window), self.types(raw), keeps_unused=True)
        return {name: value for name, value in values.items() if name != "layer_types"}, problems

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields |= {"sliding_window": model.sliding_window or None}

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        yield from ()


@dataclass(frozen=True)
class _Rope(LocalRope):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        both = raw.get("rope_parameters")
        if both is None:
            return super().read(overlaid(raw, {"rope_parameters": _ROPE}), model_type)
        lacking = {*self.windows.types(raw)} & {FULL, SLIDING} - both.keys()
        if lacking:
            return {}, [f"rope_parameters lacks {', '.join(sorted(lacking))}"]
        return super().read(raw, model_type)

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        if model.sliding_window and not model.rope_local_base_freq and not model.layer_types:
            raise ConfigError("model.rope_local_base_freq: lfm3 of transformers has a base for layers with a window")
        super().write(model, fields)


_ROPE = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_FLAGS = same("use_sandwich_norm", "use_attention_gate", "attention_bias")

LFM3 = Family(
    name="lfm3",
    stage=Lfm3Stage,
    activations=("silu",),
    options=Lfm3Model,
    even_head_dim=True,
    hugging_face=like(
        LFM2,
        model_types={"lfm3": ModelType("Lfm3ForCausalLM", fixed={"attention_dropout": 0.0})},
        codecs=(_Rope(1e6, windows=_Windows(256)), _Layers((CONV, FULL, SLIDING), 7)),
        modules={
            **MODULES,
            "layers.*.attention.o": "model.layers.*.self_attn.o_proj",
            "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
            "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
            "layers.*.attention.gate": "model.layers.*.self_attn.gate_proj",
            "layers.*.attention_output_norm": "model.layers.*.post_operator_norm",
            "layers.*.mlp_output_norm": "model.layers.*.post_ffn_norm",
        },
        renamed={".self_attn.g_proj.": ".self_attn.gate_proj."},  # what transformers calls it in memory
        fields={**_FLAGS, **same("intermediate_size")},
        defaults={
            **{"num_key_value_heads": 4, "head_dim": 128, "attention_bias": False},
            **{"use_sandwich_norm": True, "use_attention_gate": True},
        },
    ),
)
