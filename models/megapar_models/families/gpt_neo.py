"""GPT-Neo (EleutherAI, 2021): GPT-2 with scores that are not scaled, and a window in every other layer.

Queries, keys and values have no biases.

At Hugging Face: gpt_neo.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapar.config.options import Config
from megapar_models.codecs import GELUS, Always
from megapar_models.families.gpt import GPT, SUMMARY, Dropout, GPTModel, GPTStage
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.windows import FULL, SLIDING, WindowedModel, is_full, read_windows, window_of, window_problems


@dataclass(frozen=True)
class GPTNeoModel(WindowedModel, GPTModel):
    """The options of GPT-Neo."""


class GPTNeoStage(GPTStage):
    """Consecutive GPT-Neo layers."""

    @classmethod
    def layer_kind(cls, model: GPTModel, number: int) -> LayerKind:
        assert isinstance(model, GPTNeoModel)
        window = window_of(model, number)
        return replace(super().layer_kind(model, number), window=window, qkv_bias=False, attention_scale=1.0)


_TYPES = {"global": FULL, "local": SLIDING}


class _Windows(Codec):
    """Windows by runs of types, such as [[["global", "local"], 12]]: the two in turn, 12 times."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        count, runs = raw.get("num_layers"), raw.get("attention_types")
        listed = _in_turn([[["global", "local"], 12]] if runs is None else runs, count)
        if listed is None:
            return {}, [f"attention_types={runs!r} is not supported; [[[TYPE, ...], TIMES], ...] is"]
        given = raw.get("attention_layers", listed)  # transformers writes both, and reads this one if it is there
        if given != listed:
            return {}, [f"attention_layers={given!r} differs from attention_types={runs!r}; leave one of them out"]
        if len(listed) != count:
            return {}, [f"attention_types={runs!r} is of {len(listed)} layers; num_layers={count}"]
        if unknown := sorted(set(listed) - _TYPES.keys()):
            return {}, [f"attention_types={runs!r} has {', '.join(unknown)}; global and local are supported"]
        return read_windows(raw, raw.get("window_size", 256), [_TYPES[name] for name in listed])

    def write(self, model: GPTNeoModel, fields: dict[str, Any]) -> None:
        names = ["global" if is_full(model, number) else "local" for number in range(model.num_hidden_layers)]
        fields |= {"attention_types": [[names, 1]], "attention_layers": names}
        fields |= {"window_size": model.sliding_window or model.max_position_embeddings}

    def problems(self, config: Config, model: GPTNeoModel) -> Iterator[str]:
        return window_problems(config, model)


def _in_turn(runs: Any, count: Any) -> Sequence[str] | None:
    """Return the type of each layer, or a few more than `count`. None for what is no list of runs."""
    names: list[str] = []
    for run in runs if isinstance(runs, list) else [None]:
        match run:
            case [list(types), int(times)] if all(isinstance(name, str) for name in types) and isinstance(count, int):
                names += types * min(times, count + 1)
            case _:
                return None
    return names


GPT_NEO = Family(
    name="gpt_neo",
    stage=GPTNeoStage,
    activations=("gelu_pytorch_tanh", "gelu", "relu", "relu2", "silu"),
    options=GPTNeoModel,
    hugging_face=like(
        GPT,
        model_types={"gpt_neo": ModelType("GPTNeoForCausalLM")},
        codecs=(Always(key_per_head=True), _Windows(), Dropout("embed_dropout", "resid_dropout", 0.0)),
        modules={
            **{f"layers.*.attention.{name}": f"transformer.h.*.attn.attention.{name}_proj" for name in "qkv"},
            "layers.*.attention.o": "transformer.h.*.attn.attention.out_proj",
        },
        layouts={},
        fields={
            **{"hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
            **{"intermediate_size": "intermediate_size", "max_position_embeddings": "max_position_embeddings"},
            **{"resid_dropout": "hidden_dropout", "attention_dropout": "attention_dropout"},
        },
        defaults={"intermediate_size": None, "resid_dropout": 0.0, "attention_dropout": 0.0},
        activations=GELUS,
        without_effect=("classifier_dropout", *SUMMARY),
    ),
)
