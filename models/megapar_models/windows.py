"""Sliding windows: their options, the window of each layer, and their fields in a config.json.

All families with windows by layer share this module.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.family import Raw
from megapar_models.rope import scaling_problems
from megapar_models.rotary_options import RotaryModel

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class WindowModel(RotaryModel):
    """The options of a family whose layers may have a window."""

    sliding_window: int = field(default=0, metadata=OF_FUNCTION)
    """Keys that a token attends to, its own among them; 0: all keys up to its own."""
    layer_types: tuple[str, ...] = field(default=(), metadata=OF_FUNCTION)
    """sliding_attention or full_attention for each layer; without any, all layers have the window."""


def is_full(model: WindowModel, number: int) -> bool:
    """Whether the layer attends to all keys."""
    # A list of the wrong length is reported by `window_problems`.
    listed = model.layer_types[number : number + 1]
    return not model.sliding_window or listed == (FULL,)


def window_of(model: WindowModel, number: int) -> int:
    """The window of a layer, for `LayerKind.window`."""
    if is_full(model, number):
        return 0
    return model.sliding_window


def full_every(interval: int, layers: int) -> list[str]:
    """A type for each layer: each layer numbered by a multiple of `interval`, counted from 1, has no window."""
    return [SLIDING if number % interval else FULL for number in range(1, layers + 1)]


def rotary_problems(config: Config, model: WindowModel) -> Iterator[str]:
    """Yield the problems of the rotary options and of the windows."""
    yield from scaling_problems(config, model)
    yield from window_problems(config, model)


def window_problems(config: Config, model: WindowModel) -> Iterator[str]:
    """Yield the problems of the window and of the list of layers that have it."""
    types = model.layer_types
    if model.sliding_window < 0:
        yield problem(config, "model.sliding_window", "must be at least 0, which means no window")
    if not types:
        return
    if unknown := sorted(set(types) - {FULL, SLIDING}):
        yield problem(config, "model.layer_types", f"{', '.join(unknown)} unknown; use {FULL} and {SLIDING}")
    if len(types) != model.num_hidden_layers:
        text = f"has {len(types)} layers; give a type for each of the {model.num_hidden_layers}, or none"
        yield problem(config, "model.layer_types model.num_hidden_layers", text)
    if SLIDING in types and not model.sliding_window:
        yield problem(config, "model.layer_types model.sliding_window", f"{SLIDING} needs a window above 0")


# Hugging Face


def read_windows(
    raw: Raw, window: Any, types: Sequence[str], *, keeps_unused: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The values of our options, and problems.

    `window` and `types` are what transformers makes of the fields: None or a number, and a type for each layer. A
    window that no token ever leaves is none, unless `keeps_unused`: a family may ask whether there is one.
    """
    if window is not None and (not isinstance(window, int) or window < 1):
        return {}, [f"sliding_window={window!r} should be a whole number from 1 on, or null"]
    if not isinstance(types, (list, tuple)) or not set(types) <= {FULL, SLIDING}:
        return {}, [f"layer_types={types!r} is not supported; lists of {FULL} and {SLIDING} are"]
    if SLIDING not in types and not keeps_unused:
        return {}, []
    if window is None:
        if SLIDING in types:
            return {}, [f"layer_types={list(types)!r} has {SLIDING}, but there is no sliding_window"]
        return {}, []
    longest = raw.get("max_position_embeddings")
    if isinstance(longest, int) and window >= longest and not keeps_unused:
        return {}, []
    values = {"sliding_window": window, "layer_types": tuple(types)}
    if FULL not in types:
        values["layer_types"] = ()
    return values, []


def read_one_window(raw: Raw) -> tuple[dict[str, Any], list[str]]:
    """As `read_windows`, for a model_type with the same window in all layers, or with none."""
    window = raw.get("sliding_window")
    layers = raw.get("num_hidden_layers")
    if window is None or not isinstance(layers, int):
        return {}, []
    return read_windows(raw, window, [SLIDING] * layers)


def write_one_window(model: WindowModel, model_type: str) -> dict[str, Any]:
    """The field `sliding_window` of such a model_type. Raises ConfigError if only some layers have the window."""
    if model.layer_types:
        raise ConfigError(f"model.layer_types: {model_type} of Hugging Face has the same window in all layers")
    return {"sliding_window": model.sliding_window or None}


def write_windows(model: WindowModel) -> dict[str, Any]:
    """The fields `sliding_window` and `layer_types` of a config.json."""
    types = [FULL if is_full(model, number) else SLIDING for number in range(model.num_hidden_layers)]
    return {"sliding_window": model.sliding_window or None, "layer_types": types}
