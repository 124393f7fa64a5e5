"""Rotary positions of a part of each head: the option, and its fields in a config.json."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.family import Raw
from megapar_models.rope import read_rope, scaling_problems, split_rope, write_rope
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel


@dataclass(frozen=True)
class PartialRotaryModel(RotaryModel):
    """The options of a family that rotates the first dimensions of a head, and leaves the others as they are."""

    partial_rotary_factor: float = field(default=1.0, metadata=OF_FUNCTION)
    """The part of a head's dimensions that is rotated, above 0 and at most 1."""

    @property
    def rotary_width(self) -> int:
        """How many dimensions of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


def partial_rotary(model: PartialRotaryModel) -> Rotary:
    """The one table for all layers of a model."""
    return Rotary(model.rope_theta, model.rotary_width, model.rope_scaling)


def partial_problems(config: Config, model: PartialRotaryModel) -> Iterator[str]:
    """Yield the problems of the rotary options."""
    yield from scaling_problems(config, model)
    if not 0 < model.partial_rotary_factor <= 1 or model.rotary_width % 2 or model.rotary_width < 2:
        text = (
            f"rotates {model.rotary_width} of a head's {model.head_dim} dimensions; they must be pairs, 1.0 takes all"
        )
        yield problem(config, "model.partial_rotary_factor", text)


# Hugging Face


def read_partial_rope(raw: Raw, default_theta: float, default_factor: float) -> tuple[dict[str, Any], list[str]]:
    """As `read_rope`, with the rotated part of a head. The two defaults are those of transformers."""
    raw, beside = split_rope(raw, "partial_rotary_factor")
    factor = beside.get("partial_rotary_factor", raw.get("partial_rotary_factor", default_factor))
    values, problems = read_rope(raw, default_theta)
    return {**values, "partial_rotary_factor": factor}, problems


def write_partial_rope(model: PartialRotaryModel) -> dict[str, Any]:
    """The fields of a config.json for rotary positions, in a form for both transformers 4 and 5."""
    return {**write_rope(model), "partial_rotary_factor": model.partial_rotary_factor}
