"""Rotary positions in a config.json: `Rope` for one table, `PartialRope` for a part of each head, `LocalRope` for two.

rotary.py has their options, and computes the tables of angles.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem, shown
from megapar.config.options import Config, flatten
from megapar_models.family import Codec, Raw, overlaid, typed, wrong_types
from megapar_models.rotary import PartialRotaryModel, RopeScaling, RotaryModel
from megapar_models.windows import FULL, SLIDING, LocalRopeModel, Windows

# The fields of `RopeScaling` that a rope type must have in a config.json, and those that it may have.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "proportional": (),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("partial_rotary_factor", "factor"),
}


def _fields(rope_type: str) -> tuple[str, ...]:
    """The fields of `RopeScaling` read by the rope type, without `rope_type` itself."""
    return (*_REQUIRED[rope_type], *_OPTIONAL.get(rope_type, ()))


@dataclass(frozen=True)
class Rope(Codec):
    """One rotary table for all layers."""

    theta: float = 10000.0
    """transformers' base for an absent rope_theta."""
    warns: bool = True
    """Whether to tell where releases of transformers disagree on YaRN's factor."""

    reads_first = True

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        return read_rope(raw, self.theta)

    def warnings(self, raw: Raw, family: str) -> list[str]:
        return factor_warnings(raw) if self.warns else []

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields |= write_rope(model)

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        return scaling_problems(config, model)


@dataclass(frozen=True)
class StatedRope(Rope):
    """One rotary table for all layers. transformers takes more than a base for a file without any rotary field."""

    default: Raw = field(default_factory=dict)
    """What transformers takes then, with the base."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if raw.get("rope_parameters") or raw.get("rope_scaling"):
            return read_rope(raw, self.default["rope_theta"])
        if "rope_theta" in raw or "rope_scaling" in raw:
            # transformers 5 takes all of the default for such a file, and version 4 did not.
            text = "rope_scaling is missing beside rope_theta, and releases of transformers disagree on its default"
            return {}, [f'{text}; state it, such as {{"rope_type": "default"}}']
        return read_rope(overlaid(raw, {"rope_parameters": self.default}), self.default["rope_theta"])


@dataclass(frozen=True)
class PartialRope(Rope):
    """One rotary table for a part of each head: the options of `PartialRotaryModel`."""

    factor: float = 1.0
    """transformers' part for an absent partial_rotary_factor."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        raw, beside = split_rope(raw, "partial_rotary_factor")
        factor = beside.get("partial_rotary_factor", raw.get("partial_rotary_factor", self.factor))
        values, problems = read_rope(raw, self.theta)
        if not problems and values["rope_scaling"].rope_type == "proportional":
            problems = ["rope_type='proportional' is not supported; it turns other pairs than the first dimensions"]
        return {**values, "partial_rotary_factor": factor}, problems

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields |= {**write_rope(model), "partial_rotary_factor": model.partial_rotary_factor}

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        return partial_problems(config, model)


@dataclass(frozen=True)
class LocalRope(Rope):
    """Two rotary tables: of the layers that read all keys, and of those with a window (`LocalRopeModel`)."""

    local: str = ""
    """The field of transformers 4 with the base of layers with a window, "" if there was none."""
    local_theta: float = 10000.0
    """transformers' base of these layers for an absent one."""
    windows: Windows = field(default_factory=Windows)

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = self._read_tables(raw)
        windows, wrong = self.windows.read(raw, model_type)
        if SLIDING not in self.windows.types(raw):
            values.pop("rope_local_base_freq", None)
            windows = {}
        return values | windows, [*problems, *wrong]

    def judge(self, raw: Raw, model_type: str) -> Iterable[str]:
        return self.windows.judge(raw, model_type)

    def _read_tables(self, raw: Raw) -> tuple[dict[str, Any], list[str]]:
        both = raw.get("rope_parameters") or {}
        if not both.keys() <= {FULL, SLIDING}:
            return {}, [f"rope_parameters={both!r} is not supported; {FULL} and {SLIDING} with parameters of each are"]
        full = {**(both.get(FULL) or {}), **(raw.get("rope_scaling") or {})}
        full.setdefault("rope_theta", raw.get("rope_theta", self.theta))
        lengths = {name: raw[name] for name in ("max_position_embeddings",) if name in raw}
        values, problems = read_rope({"rope_parameters": full, **lengths}, self.theta)
        plain = {"rope_type": "default", "rope_theta": raw.get(self.local, self.local_theta)}
        sliding = plain | (both.get(SLIDING) or {})
        if sliding != plain | {"rope_theta": sliding["rope_theta"]}:
            problems.append(f"rope_parameters: {SLIDING} with {sliding!r} is not supported; rope_type default is")
        return {**values, "rope_local_base_freq": sliding["rope_theta"]}, problems

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        self.windows.write(model, fields)
        fields |= write_both_ropes(model)

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        yield from scaling_problems(config, model)
        yield from self.windows.problems(config, model)


@dataclass(frozen=True, kw_only=True)
class PartialLocalRope(LocalRope):
    """`LocalRope` with a part of each head rotated (`PartialLocalRopeModel`). rope_parameters has all of it."""

    stated: Raw
    """The rope_parameters that transformers takes for a file without them."""
    part: float = 1.0
    """transformers' part for a table of rope_type default without partial_rotary_factor."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        both = dict(raw.get("rope_parameters") or self.stated)
        parts, tables = {}, {}
        for kind in (FULL, SLIDING):
            table = dict(both.pop(kind, None) or {})
            if not table and kind in self.windows.types(raw):
                return {}, [f"rope_parameters lacks {kind}"]
            usual = self.part if table.get("rope_type", "default") == "default" else 1.0
            parts[kind] = table.pop("partial_rotary_factor", usual)
            tables[kind] = table
        # Laguna's files state the length beside the tables too.
        length = both.pop("original_max_position_embeddings", None)
        if length not in (None, tables[FULL].get("original_max_position_embeddings", length)):
            return {}, [f"rope_parameters: original_max_position_embeddings={length!r} contradicts that of {FULL}"]
        overlay = {"rope_parameters": {**tables, **both}, "rope_scaling": None}
        values, problems = super().read(overlaid(raw, overlay), model_type)
        values["partial_rotary_factor"] = parts[FULL]
        if "rope_local_base_freq" in values:
            values["local_partial_rotary_factor"] = parts[SLIDING]
        return values, problems

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        yield from super().judge(raw, model_type)
        values, _ = self.read(raw, model_type)
        # Files state some of it beside the tables too, where transformers does not look.
        for name in ("rope_theta", "partial_rotary_factor"):
            if raw.get(name) not in (None, values.get(name)):
                yield f"{name}={raw[name]!r} contradicts {values.get(name)!r} of {FULL} in rope_parameters"
        if raw.get("rope_scaling") is not None:
            yield "rope_scaling is not supported; rope_parameters has the table of each kind of layers"

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        local = model.local_partial_rotary_factor if model.rope_local_base_freq else model.partial_rotary_factor
        fields["rope_parameters"][FULL]["partial_rotary_factor"] = model.partial_rotary_factor
        fields["rope_parameters"][SLIDING]["partial_rotary_factor"] = local

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        yield from super().problems(config, model)
        widths = {"partial": model.rotary_width, "local_partial": model.local_rotary_width}
        for name, width in widths.items():
            if width % 2 or not 2 <= width <= model.head_dim:
                text = f"rotates {width} of a head's {model.head_dim} dimensions; they must be pairs, 1.0 takes all"
                yield problem(config, f"model.{name}_rotary_factor", text)
        if model.local_partial_rotary_factor != 1.0 and not model.rope_local_base_freq:
            text = "layers with a window have the table of the others; set a base for them, or leave it at 1.0"
            yield problem(config, "model.local_partial_rotary_factor model.rope_local_base_freq", text)


# Options


def scaling_problems(config: Config, model: RotaryModel) -> Iterator[str]:
    """Yield the problems of model.rope_scaling: options unused by its type, and contradictory values."""
    defaults = RopeScaling()
    scaling = model.rope_scaling
    read = ("rope_type", *_fields(scaling.rope_type))
    for name, value in flatten(scaling).items():
        default = getattr(defaults, name)
        if name not in read and value != default:
            text = f"rope_type {scaling.rope_type} does not use it; leave it at {shown(default)}"
            yield problem(config, f"model.rope_scaling.{name}", f"{text}, or set model.rope_scaling.rope_type")
    if scaling.rope_type == "llama3" and scaling.low_freq_factor > scaling.high_freq_factor:
        options = "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor"
        yield problem(
            config,
            options,
            f"low must not be above high; use {shown(scaling.high_freq_factor / 4)} (Llama 3.1 has 1 and 4)",
        )
    # The factor of longrope is divided by the logarithm of the length, unless it is given.
    shortest = 2 if scaling.rope_type == "longrope" and not scaling.attention_factor else 1
    if "original_max_position_embeddings" in read and scaling.original_max_position_embeddings < shortest:
        name = "model.rope_scaling.original_max_position_embeddings"
        yield problem(config, name, f"must be at least {shortest}")
    if scaling.rope_type == "yarn":
        yield from _yarn_problems(config, scaling)
    turning, pairs = scaling.turning_pairs(model.rotary_width), model.rotary_width // 2
    if scaling.rope_type == "proportional" and not 0 < turning <= pairs:
        text = f"turns {turning} of a head's {pairs} pairs; 1.0 turns all"
        yield problem(config, "model.rope_scaling.partial_rotary_factor", text)
    if scaling.rope_type == "longrope":
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            if len(factors) != pairs or min(factors) <= 0:
                text = f"has {len(factors)} factors; give {pairs} above 0, one for each rotated pair of dimensions"
                yield problem(config, f"model.rope_scaling.{name}", text)


def _yarn_problems(config: Config, scaling: RopeScaling) -> Iterator[str]:
    if scaling.beta_slow > scaling.beta_fast:  # Kimi K2 has 1 for both
        options = "model.rope_scaling.beta_slow model.rope_scaling.beta_fast"
        yield problem(
            config,
            options,
            f"slow must not be above fast; use {shown(scaling.beta_fast / 32)} (the paper has 1 and 32)",
        )
    if bool(scaling.mscale) != bool(scaling.mscale_all_dim):
        options = "model.rope_scaling.mscale model.rope_scaling.mscale_all_dim"
        yield problem(config, options, "one of them alone has no effect; set both, or leave both at 0.0")
    elif scaling.mscale and scaling.attention_factor:
        options = "model.rope_scaling.mscale model.rope_scaling.attention_factor"
        yield problem(config, options, "attention_factor takes the place of mscale; leave one of them at 0.0")


def partial_problems(config: Config, model: PartialRotaryModel) -> Iterator[str]:
    """Yield the problems of the rotary options."""
    yield from scaling_problems(config, model)
    if not 0 < model.partial_rotary_factor <= 1 or model.rotary_width % 2 or model.rotary_width < 2:
        text = (
            f"rotates {model.rotary_width} of a head's {model.head_dim} dimensions; they must be pairs, 1.0 takes all"
        )
        yield problem(config, "model.partial_rotary_factor", text)


# Fields


def read_rope(raw: Raw, default_theta: float) -> tuple[dict[str, Any], list[str]]:
    """Read the rotary embedding of a config.json: values of our options, and problems.

    `default_theta` is what transformers takes for an absent rope_theta.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, Mapping):
            return {}, [f"{name}={raw[name]!r} should be an object of fields"]
    rope = _rope(raw, default_theta)
    problems = list(_rope_problems(rope))
    values = {"rope_theta": rope.pop("rope_theta")}
    if not problems:
        for name in rope.keys() & {"short_factor", "long_factor"}:
            rope[name] = tuple(float(factor) for factor in rope[name])
        values["rope_scaling"] = RopeScaling(**typed(rope, RopeScaling))
    return values, problems


def stated_rope(raw: Raw) -> Raw:
    """The rotary parameters that transformers reads: all of `rope_scaling` if it has any, else `rope_parameters`."""
    parameters, scaling = raw.get("rope_parameters"), raw.get("rope_scaling")
    return scaling or parameters or {}


def with_rope(raw: Raw, rope: Raw) -> Raw:
    """The config.json with these rotary parameters."""
    if raw.get("rope_scaling"):
        return overlaid(raw, {"rope_scaling": rope, "rope_parameters": None})
    return overlaid(raw, {"rope_parameters": rope})


def split_rope(raw: Raw, *names: str) -> tuple[Raw, dict[str, Any]]:
    """The config.json without these fields of its rotary parameters, and their values."""
    rope = stated_rope(raw)
    if not rope:
        return raw, {}
    others = {name: value for name, value in rope.items() if name not in names}
    return with_rope(raw, others), {name: rope[name] for name in names if name in rope}


def contradictory_ropes(file: Raw) -> Iterator[str]:
    """Yield a problem for what only `rope_parameters` has, beside a `rope_scaling` that transformers reads instead."""
    parameters, scaling = file.get("rope_parameters"), file.get("rope_scaling")
    if not parameters or not scaling:
        return
    for name in ("rope_theta", "partial_rotary_factor"):
        value = parameters.get(name)
        if value is not None and scaling.get(name) is None and file.get(name) != value:
            yield (
                f"rope_parameters has {name}={value!r}, and rope_scaling, which transformers reads in its place, has "
                f"none: add it to rope_scaling, or leave one of the two fields out"
            )


def _rope(raw: Raw, default_theta: float) -> dict[str, Any]:
    """The base and the scaling of the rotary embedding, under the names of transformers 5."""
    # transformers 5 writes both in `rope_parameters`. Version 4 has `rope_theta` and `rope_scaling`, whose field
    # `rope_type` was once called `type`.
    rope = {"rope_theta": raw.get("rope_theta", default_theta), "rope_type": "default"}
    rope |= stated_rope(raw)
    old_type = rope.pop("type", "default")
    if rope["rope_type"] == "default":
        rope["rope_type"] = old_type
    if rope.get("partial_rotary_factor") == 1.0:
        del rope["partial_rotary_factor"]
    if rope["rope_type"] in ("yarn", "longrope"):
        return _with_lengths(rope, raw)
    return rope


def _with_lengths(rope: dict[str, Any], raw: Raw) -> dict[str, Any]:
    """The fields of yarn or longrope without those ignored by transformers, and with its sizes for absent ones."""
    longest = raw.get("max_position_embeddings")
    # transformers 5 prefers the field beside `rope_parameters`, as Phi-3 has it.
    original = raw.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", longest))
    rope = rope | {"original_max_position_embeddings": original}
    # A field with the value null is one that is left out. The check of types refuses two exceptions: transformers takes
    # null for false in `truncate`, and fails without a base.
    exceptions = ("truncate", "rope_theta")
    rope = {name: value for name, value in rope.items() if value is not None or name in exceptions}
    # DeepSeek may leave the factor out, and Phi-3 does.
    if isinstance(longest, int) and isinstance(original, int) and original > 0:
        rope.setdefault("factor", longest / original)
    if rope.get("attention_factor") or not (rope.get("mscale") and rope.get("mscale_all_dim")):
        rope.pop("mscale", None)
        rope.pop("mscale_all_dim", None)
    return rope


def _rope_problems(rope: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for an unknown rope_type, and for each field missing, superfluous or of a wrong type."""
    rope_type = rope["rope_type"]
    if rope_type not in _REQUIRED:
        yield f"rope_type={rope_type!r} is not supported; {', '.join(_REQUIRED)} are"
        return
    fields = rope.keys() - {"rope_theta", "rope_type"}
    for name in sorted(fields - set(_fields(rope_type))):
        yield f"rope_type {rope_type} does not use {name}"
    for name in sorted(set(_REQUIRED[rope_type]) - fields):
        yield f"rope_type {rope_type} lacks {name}"
    if rope.get("attention_factor") == 0:
        yield "attention_factor=0 is not supported; a model with it would not see positions"
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name, [])
        if not isinstance(factors, list) or any(not isinstance(factor, (int, float)) for factor in factors):
            yield f"{name}={factors!r} should be a list of numbers"
    yield from wrong_types({"rope_theta": rope["rope_theta"]}, RotaryModel)
    yield from wrong_types({name: rope[name] for name in fields}, RopeScaling)


def write_rope(model: RotaryModel) -> dict[str, Any]:
    """The fields `rope_theta` and `rope_scaling` of a config.json, in a form for both transformers 4 and 5."""
    scaling = model.rope_scaling
    if scaling.rope_type == "default":
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    written = {name: getattr(scaling, name) for name in ("rope_type", *_REQUIRED[scaling.rope_type])}
    for name in _OPTIONAL.get(scaling.rope_type, ()):
        # Our 0 of attention_factor means that it follows from the others. transformers would take it as a number.
        if getattr(scaling, name) != getattr(RopeScaling, name):
            written[name] = getattr(scaling, name)
    return {"rope_theta": model.rope_theta, "rope_scaling": written}


def write_both_ropes(model: LocalRopeModel) -> dict[str, Any]:
    """The field rope_parameters of a config.json, for both kinds of layers.

    Raises ConfigError if layers with a window have scaled wavelengths.
    """
    full = write_rope(model)
    parameters = {"rope_type": "default", **(full["rope_scaling"] or {}), "rope_theta": full["rope_theta"]}
    if model.sliding_window and not model.rope_local_base_freq and full["rope_scaling"]:
        raise ConfigError(
            "model.rope_local_base_freq=0.0, model.rope_scaling: Hugging Face's file has no scaling for layers with a "
            "window; set a base for them"
        )
    local = {"rope_type": "default", "rope_theta": model.rope_local_base_freq or model.rope_theta}
    return {"rope_parameters": {FULL: parameters, SLIDING: local}}


def factor_warnings(raw: Raw) -> list[str]:
    """A line if releases of transformers disagree on YaRN's factor for this config.json."""
    rope = _rope(raw, default_theta=0.0)
    if rope["rope_type"] != "yarn":
        return []
    ratio = raw["max_position_embeddings"] / rope["original_max_position_embeddings"]
    # A ratio of 1 is that of a file which leaves the original length out.
    if ratio == 1 or math.isclose(ratio, rope["factor"]):
        return []
    return [
        f"config.json: factor={rope['factor']} of yarn is used, as transformers 5 does; transformers 4 takes "
        f"max_position_embeddings / original_max_position_embeddings = {ratio:g} in its place"
    ]
