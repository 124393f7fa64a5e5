"""Mamba-2 in a model and in a config.json: its options (`MambaModel`), and the codec of its fields (`MambaFields`).

All families with layers of Mamba-2 share this module.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem, shown
from megapar.config.model_options import OF_FUNCTION, ModelConfig
from megapar.config.options import Config
from megapar_models.family import Codec, Raw
from megapar_models.mamba2 import Mamba2
from megapar_models.norms import NormRule


@dataclass(frozen=True)
class MambaModel(ModelConfig):
    """The options of a family with layers of Mamba-2."""

    mamba_n_heads: int = 8
    """Heads of Mamba-2; a multiple of parallel.tp."""
    mamba_d_head: int = 64
    """Width of a head of Mamba-2."""
    mamba_n_groups: int = 1
    """Groups of heads with an input matrix and an output matrix (B and C) of their own. May be fewer than
    parallel.tp."""
    mamba_d_state: int = 128
    """Width of B and C: a head's state has as many rows."""
    mamba_d_conv: int = 4
    """Positions that the convolution in front of the states reads."""
    mamba_conv_bias: bool = True
    """Biases of that convolution."""
    mamba_proj_bias: bool = False
    """Biases of the projections of Mamba-2."""
    mamba_step_min: float = field(default=0.0, metadata=OF_FUNCTION)
    """The least time step of a state."""
    mamba_step_max: float = field(default=0.0, metadata=OF_FUNCTION)
    """The largest time step of a state; 0: there is no limit."""

    @property
    def mamba_width(self) -> int:
        """The width of all heads of Mamba-2 together."""
        return self.mamba_n_heads * self.mamba_d_head


def mamba_rule(model: MambaModel, **others: Any) -> Mamba2:
    """Return the mixer of these options. `others` are further fields of the rule."""
    fields: dict[str, Any] = {
        "norm": NormRule(model.rms_norm_eps),
        "time_step_limit": (model.mamba_step_min, model.mamba_step_max or math.inf),
        "bias": model.mamba_proj_bias,
        "out_bias": model.mamba_proj_bias,
        "conv_bias": model.mamba_conv_bias,
    }
    return Mamba2(
        *(model.mamba_n_heads, model.mamba_d_head, model.mamba_n_groups, model.mamba_d_state, model.mamba_d_conv),
        **{**fields, **others},
    )


# Hugging Face

OF_BAMBA: Mapping[str, str] = {
    **{"heads": "mamba_n_heads", "head": "mamba_d_head", "groups": "mamba_n_groups", "state": "mamba_d_state"},
    **{"conv": "mamba_d_conv", "conv_bias": "mamba_conv_bias", "bias": "mamba_proj_bias", "expand": "mamba_expand"},
}
"""The fields of Bamba, and of the models that have its names."""
_OPTIONS = {
    **{"heads": "mamba_n_heads", "head": "mamba_d_head", "groups": "mamba_n_groups", "state": "mamba_d_state"},
    **{"conv": "mamba_d_conv", "conv_bias": "mamba_conv_bias", "bias": "mamba_proj_bias"},
}


@dataclass(frozen=True, kw_only=True)
class MambaFields(Codec):
    """Sizes of Mamba-2, and the limit of its time steps.

    Heads are together `expand` times as wide as the model, unless `width` names a field with their width.
    """

    names: Mapping[str, str] = field(default_factory=lambda: OF_BAMBA)
    """Their fields: of heads, head, groups, state, conv, conv_bias, bias and expand."""
    defaults: Raw
    """transformers' values for absent fields, by the same keys, and that of hidden_size if a file may lack hidden_size.

    The width of a head follows if it is "auto".
    """
    width: str = ""
    bound_to_model: bool = True
    """Whether heads are together as wide as `expand` says. If not, their widths are free."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        found = {key: raw.get(name, self.defaults.get(key)) for key, name in self.names.items()}
        hidden = raw.get("hidden_size", self.defaults.get("hidden_size"))
        nulls = [self.names[key] for key, value in found.items() if value is None]
        nulls += ["hidden_size"] * (hidden is None)
        if nulls:
            return {}, [f"{name}=None is not supported; give its value" for name in nulls]
        problems = []
        whole = self._whole(raw, found["expand"] * hidden)
        if found["head"] == "auto":
            found["head"] = int(whole // found["heads"])
        if self.bound_to_model and found["heads"] * found["head"] != whole:
            stated = f"{self.names['heads']}={found['heads']}, {self.names['head']}={found['head']}"
            problems.append(f"{stated}: heads are together {shown(whole)} wide, which {self._said()} says")
        values = {ours: found[key] for key, ours in _OPTIONS.items()}
        limit, wrong = _limit(raw.get("time_step_limit", [0.0, math.inf]))
        return values | limit, [*problems, *wrong]

    def _whole(self, raw: Raw, expanded: float) -> int:
        stated = raw.get(self.width, self.defaults.get("width")) if self.width else None
        return int(expanded) if stated is None else stated

    def _said(self) -> str:
        return self.width or self.names["expand"]

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields |= {self.names[key]: getattr(model, ours) for key, ours in _OPTIONS.items()}
        expand, rest = divmod(model.mamba_width, model.hidden_size)
        if self.width:
            fields[self.width] = model.mamba_width
        elif self.bound_to_model and rest:
            raise ConfigError(
                f"model.mamba_n_heads={model.mamba_n_heads}, model.mamba_d_head={model.mamba_d_head}: heads of "
                f"{fields['model_type']} of transformers are together a multiple of model.hidden_size wide"
            )
        elif self.bound_to_model:
            fields[self.names["expand"]] = expand
        if model.mamba_step_min or model.mamba_step_max:
            # transformers 5 writes an infinite number so: JSON has none.
            largest: Any = model.mamba_step_max or {"__float__": "Infinity"}
            fields["time_step_limit"] = [model.mamba_step_min, largest]

    def problems(self, config: Config, model: MambaModel) -> Iterator[str]:
        names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
        for name in names:
            if getattr(model, name) < 1:
                yield problem(config, f"model.{name}", "must be at least 1")
        if model.mamba_step_min < 0 or 0 < model.mamba_step_max < model.mamba_step_min or model.mamba_step_max < 0:
            text = "are the least and the largest time step, from 0 on; 0 for the largest is no limit"
            yield problem(config, "model.mamba_step_min model.mamba_step_max", text)


def _limit(stated: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the options of time_step_limit, and problems."""
    found = [math.inf if value == {"__float__": "Infinity"} else value for value in stated or ()]
    numbers = all(type(value) in (int, float) for value in found)
    if len(found) != 2 or not numbers or not 0 <= found[0] < found[1]:
        return {}, [f"time_step_limit={stated!r} should be two numbers, the least and the largest time step"]
    return {"mamba_step_min": float(found[0]), "mamba_step_max": 0.0 if found[1] == math.inf else float(found[1])}, []


def mamba_modules(theirs: str) -> dict[str, str]:
    """Return `HuggingFace.modules` of Mamba-2, which `theirs` has, such as model.layers.*.mamba."""
    ours = "layers.*.mamba"
    return {
        **{f"{ours}.{name}": f"{theirs}.in_proj" for name in ("z", "x", "B", "C", "dt")},
        **{f"{ours}.conv_{name}": f"{theirs}.conv1d" for name in ("x", "B", "C")},
        **{f"{ours}.{name}": f"{theirs}.{name}" for name in ("A_log", "dt_bias", "D")},
        f"{ours}.norm": f"{theirs}.norm",
        f"{ours}.o": f"{theirs}.out_proj",
    }
