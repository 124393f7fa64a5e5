"""Two rotary tables: one of the layers that read all keys, and one of the layers with a window.

It has the option for the second table, and the fields of a config.json for both.
"""

from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.model_options import OF_FUNCTION
from megapar_models.family import Raw
from megapar_models.rope import read_rope, write_rope
from megapar_models.rotary import Rotary
from megapar_models.windows import FULL, SLIDING, WindowModel, is_full


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


def read_ropes(raw: Raw, default_theta: float, local: str, default_local: float) -> tuple[dict[str, Any], list[str]]:
    """Both tables from a config.json; returns values of our options, and problems.

    `local` is the field of transformers 4 with the base of layers with a window, "" if it had none. The two numbers are
    what transformers takes for absent bases.
    """
    both = raw.get("rope_parameters") or {}
    if not both.keys() <= {FULL, SLIDING}:
        return {}, [f"rope_parameters={both!r} is not supported; {FULL} and {SLIDING} with parameters of each are"]
    full = {**(both.get(FULL) or {}), **(raw.get("rope_scaling") or {})}
    full.setdefault("rope_theta", raw.get("rope_theta", default_theta))
    lengths = {name: raw[name] for name in ("max_position_embeddings",) if name in raw}
    values, problems = read_rope({"rope_parameters": full, **lengths}, default_theta)
    plain = {"rope_type": "default", "rope_theta": raw.get(local, default_local)}
    sliding = plain | (both.get(SLIDING) or {})
    if sliding != plain | {"rope_theta": sliding["rope_theta"]}:
        problems.append(f"rope_parameters: {SLIDING} with {sliding!r} is not supported; rope_type default is")
    return {**values, "rope_local_base_freq": sliding["rope_theta"]}, problems


def write_ropes(model: LocalRopeModel) -> dict[str, Any]:
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
