"""Sliding windows: their options, the window of each layer, and their fields in a config.json (`Windows`, `OneWindow`).

All families with windows by layer share this module.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION, ModelConfig
from megapar.config.options import Config
from megapar_models.family import Codec, Raw, overlaid
from megapar_models.rotary import Rotary, RotaryModel

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class WindowedModel(ModelConfig):
    """The options of a family whose layers may have a window."""

    sliding_window: int = field(default=0, metadata=OF_FUNCTION)
    """Keys that a token attends to, its own among them; 0: all keys up to its own."""
    layer_types: tuple[str, ...] = field(default=(), metadata=OF_FUNCTION)
    """sliding_attention or full_attention for each layer; without any, all layers have the window."""


@dataclass(frozen=True)
class WindowModel(WindowedModel, RotaryModel):
    """The options of a family with rotary positions whose layers may have a window."""


def is_full(model: WindowedModel, number: int) -> bool:
    """Whether the layer attends to all keys."""
    # A list of the wrong length is reported by `window_problems`.
    listed = model.layer_types[number : number + 1]
    return not model.sliding_window or listed == (FULL,)


def window_of(model: WindowedModel, number: int) -> int:
    """The window of a layer, for `LayerKind.window`."""
    if is_full(model, number):
        return 0
    return model.sliding_window


def rotary_in_windows(model: WindowModel, number: int) -> Rotary | None:
    """The rotary table of a layer where layers with a window alone see positions. Without any window all layers do."""
    if model.sliding_window and is_full(model, number):
        return None
    return Rotary.of(model)


@dataclass(frozen=True)
class LocalRopeModel(WindowModel):
    """The options of a family whose layers with a window may have a rotary table of their own."""

    rope_local_base_freq: float = field(default=0.0, metadata=OF_FUNCTION)
    """Base of the rotary wavelengths, not scaled, of layers with a window; 0: they have those of the other layers."""


def rotary_of(model: LocalRopeModel, number: int) -> Rotary:
    """The rotary table of a layer."""
    if model.rope_local_base_freq and not is_full(model, number):
        return Rotary(model.rope_local_base_freq, model.head_dim)
    return Rotary.of(model)


@dataclass(frozen=True)
class PartialLocalRopeModel(LocalRopeModel):
    """The options of a family that rotates a part of each head, with another table in layers with a window."""

    partial_rotary_factor: float = field(default=1.0, metadata=OF_FUNCTION)
    """The part of a head's dimensions, its first ones, that is rotated, above 0 and at most 1."""
    local_partial_rotary_factor: float = field(default=1.0, metadata=OF_FUNCTION)
    """The same part in layers with a window, if model.rope_local_base_freq gives them a table of their own."""

    @property
    def rotary_width(self) -> int:
        """How many dimensions of a head are rotated in layers that attend to all keys."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def local_rotary_width(self) -> int:
        """How many dimensions of a head are rotated in layers with a window and a table of their own."""
        return int(self.head_dim * self.local_partial_rotary_factor)


def partial_rotary_of(model: PartialLocalRopeModel, number: int) -> Rotary:
    """The rotary table of a layer."""
    if model.rope_local_base_freq and not is_full(model, number):
        return Rotary(model.rope_local_base_freq, model.local_rotary_width)
    return Rotary.of(model)


def full_every(interval: int, layers: int) -> list[str]:
    """A type for each layer: each layer numbered by a multiple of `interval`, counted from 1, has no window."""
    return [SLIDING if number % interval else FULL for number in range(1, layers + 1)]


def window_problems(config: Config, model: WindowedModel) -> Iterator[str]:
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


@dataclass(frozen=True)
class Windows(Codec):
    """Windows of some layers, by `layer_types` or by a rule of transformers for files without it."""

    window: int | None = None
    """transformers' window for an absent sliding_window."""
    every: int = 0
    """Each layer of a multiple of this number reads all keys, counted from 1. 0: all layers have the window."""
    pattern: str = ""
    """The field for another number than `every`."""
    switch: str = ""
    """The field that turns windows on."""
    keeps_unused: bool = False
    """Whether a window that no token ever leaves is kept: the family asks whether there is one."""
    layers: int = 0
    """transformers' number of layers for an absent num_hidden_layers."""
    needed: bool = False
    """Whether transformers fails without a window, also if no layer reads it."""

    def types(self, raw: Raw) -> Sequence[str]:
        """Return the type of each layer."""
        stated = raw.get("layer_types")
        count = raw.get("num_hidden_layers", self.layers)
        every = raw.get(self.pattern, self.every) if self.pattern else self.every
        if not stated and self.every:
            return full_every(every, count)
        return stated or [SLIDING if self._window(raw) else FULL] * count

    def _window(self, raw: Raw) -> Any:
        window = raw.get("sliding_window", self.window)
        return None if self.switch and not raw.get(self.switch, False) else window

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        return read_windows(raw, self._window(raw), self.types(raw), keeps_unused=self.keeps_unused)

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        if self.needed and self._window(raw) is None:
            yield "sliding_window=null is not supported; transformers fails with it"

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        types = [FULL if is_full(model, number) else SLIDING for number in range(model.num_hidden_layers)]
        unused = model.max_position_embeddings if self.needed else None
        fields |= {"sliding_window": model.sliding_window or unused, "layer_types": types}
        if self.switch:
            fields |= {self.switch: model.sliding_window > 0}

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        return window_problems(config, model)


def _all_full(layers: int) -> list[str]:
    return [FULL] * layers


@dataclass(frozen=True)
class ListedWindows(Windows):
    """Windows of the layers that layer_types lists, in families whose layers with a window have other rules too."""

    usual: Callable[[int], Sequence[str]] = _all_full
    """transformers' types for an absent layer_types, of so many layers."""
    keeps_unused: bool = True

    def types(self, raw: Raw) -> Sequence[str]:
        listed: Sequence[str] | None = raw.get("layer_types")
        return self.usual(raw["num_hidden_layers"]) if listed is None else listed

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        types, layers = self.types(raw), raw["num_hidden_layers"]
        if len(types) != layers:
            return {}, [f"layer_types has {len(types)} layers; a type for each of {layers} is supported"]
        if raw.get("sliding_window") == 0 and SLIDING not in types:
            raw = overlaid(raw, {"sliding_window": None})  # transformers takes no null for it
        return super().read(raw, model_type)

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        fields["sliding_window"] = model.sliding_window


@dataclass(frozen=True)
class OneWindow(Codec):
    """The same window in all layers, or none."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        window, layers = raw.get("sliding_window"), raw.get("num_hidden_layers")
        if window is None or not isinstance(layers, int):
            return {}, []
        return read_windows(raw, window, [SLIDING] * layers)

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        if model.layer_types:
            text = f"{fields['model_type']} of Hugging Face has the same window in all layers"
            raise ConfigError(f"model.layer_types: {text}")
        fields |= {"sliding_window": model.sliding_window or None}

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        return window_problems(config, model)


@dataclass(frozen=True)
class NoWindow(Codec):
    """No window: the family has none, and refuses files of models with one that some token leaves."""

    window: int | None = None
    """transformers' window for an absent sliding_window."""
    switch: str = ""
    """The field that turns windows on; "": there is none."""

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        window, longest = raw.get("sliding_window", self.window), raw["max_position_embeddings"]
        used = not self.switch or raw.get(self.switch, False)
        if used and window is not None and window < longest:
            yield (
                f"sliding_window={window} is not supported below max_position_embeddings={longest}; with that set to "
                f"{window} the window never applies"
            )

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields |= {self.switch: False} if self.switch else {"sliding_window": None}


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
