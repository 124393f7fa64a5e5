"""EXAONE 4 (arXiv 2507.11407): norms behind the branches and of q and k, and global layers that see no positions.

Its weights are those of Llama (megapar_models.families.llama), but attention_output_norm and mlp_output_norm stand in
the place of attention_norm and mlp_norm.

At Hugging Face: exaone4.
"""

from collections.abc import Sequence
from typing import Any

from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, Windows, rotary_in_windows, window_of


class Exaone4Stage(Stage[WindowModel]):
    """Consecutive EXAONE 4 layers. In a model without windows all layers have rotary positions."""

    @classmethod
    def layer_kind(cls, model: WindowModel, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            norms="after",
            rotary=rotary_in_windows(model, number),
            window=window_of(model, number),
            qk_norm=True,
        )


class Exaone4Windows(Windows):
    """Windows of some layers. transformers needs a number for the pattern, and may have none."""

    def types(self, raw: Raw) -> Sequence[str]:
        stated = raw.get("layer_types")
        return super().types(raw) if stated is None else stated

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        every = raw.get(self.pattern, self.every)
        unknown = raw.get("sliding_window", self.window) is None or not isinstance(every, int) or every < 1
        if raw.get("layer_types") is None and unknown:
            text = "without it transformers needs a sliding_window, and a sliding_window_pattern from 1 on"
            return {}, [f"layer_types is missing; {text}"]
        return super().read(raw, model_type)


_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False}

EXAONE4 = Family(
    name="exaone4",
    stage=Exaone4Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=WindowModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"exaone4": ModelType("Exaone4ForCausalLM", fixed=_FIXED)},
        codecs=(Rope(), Exaone4Windows(4096, every=4, pattern="sliding_window_pattern", keeps_unused=True)),
        modules={
            "layers.*.attention_norm": None,
            "layers.*.mlp_norm": None,
            "layers.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
            "layers.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
        },
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32},
    ),
)
