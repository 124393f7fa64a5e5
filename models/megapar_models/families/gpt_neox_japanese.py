"""GPT-NeoX Japanese (ABEJA, 2022): GPT-NeoX without biases, but that of attention's output in the last layer.

Its branches follow each other. The names of the weights are those of GPT-NeoX (megapar_models.families.gpt_neox).

At Hugging Face: gpt_neox_japanese.
"""

from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.codecs import Always, Dropouts
from megapar_models.families.gpt_neox import GPT_NEOX, NeoXRope
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import PartialRotaryModel, Rotary
from megapar_models.stage import Stage


class GPTNeoXJapaneseStage(Stage[PartialRotaryModel]):
    """Consecutive layers of GPT-NeoX Japanese."""

    @classmethod
    def layer_kind(cls, model: PartialRotaryModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer"),
            rotary=Rotary.of(model),
            out_bias=number == model.num_hidden_layers - 1,
        )


class _Width(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        times = raw.get("intermediate_multiple_size", 4)
        if not isinstance(times, int) or times < 1:
            return {}, [f"intermediate_multiple_size={times!r} should be a whole number from 1 on"]
        return {"intermediate_size": times * raw["hidden_size"]}, []

    def write(self, model: PartialRotaryModel, fields: dict[str, Any]) -> None:
        times, rest = divmod(model.intermediate_size, model.hidden_size)
        if rest:
            text = "gpt_neox_japanese of Hugging Face has a multiple of hidden_size"
            raise ConfigError(f"model.intermediate_size={model.intermediate_size}: {text}")
        fields |= {"intermediate_multiple_size": times}


_LAYER = "gpt_neox_japanese.layers.*"
_NAMES = GPT_NEOX.hugging_face
assert _NAMES is not None

GPT_NEOX_JAPANESE = Family(
    name="gpt_neox_japanese",
    stage=GPTNeoXJapaneseStage,
    activations=GPT_NEOX.activations,
    options=PartialRotaryModel,
    hugging_face=like(
        GPT_NEOX,
        model_types={"gpt_neox_japanese": ModelType("GPTNeoXJapaneseForCausalLM")},
        codecs=(
            *(Always(key_per_head=True), _Width(), NeoXRope(part=1.0)),
            Dropouts(("attention_dropout", "hidden_dropout"), written=True),
        ),
        modules={
            **{ours: theirs.replace("gpt_neox.", "gpt_neox_japanese.") for ours, theirs in _NAMES.modules.items()},
            "layers.*.attention.o.bias": f"{_LAYER}.attention.dense_bias",
        },
        renamed={},
        layouts={name.replace("gpt_neox.", "gpt_neox_japanese."): how for name, how in _NAMES.layouts.items()},
        fields={"intermediate_size": None},
        defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048},
        tied={"embed_out.weight": "gpt_neox_japanese.embed_in.weight"},
    ),
)
