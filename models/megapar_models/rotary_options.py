"""The options of rotary embeddings. rotary.py computes the angles, rope.py checks and converts the options."""

from dataclasses import dataclass, field
from typing import Literal

from megapar.config.model_options import OF_FUNCTION, ModelConfig


@dataclass(frozen=True)
class RopeScaling:
    """Hugging Face's `rope_scaling`; the default scales nothing."""

    rope_type: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    """default: no scaling. linear: positions are divided by factor. llama3, yarn: wavelengths are stretched by factor
    if they are long, and kept if they are short. longrope: each wavelength has a factor of its own."""
    factor: float = 1.0
    """How many times longer than original_max_position_embeddings contexts may be. Not used with rope_type default."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position_embeddings / low_freq_factor are stretched."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position_embeddings / high_freq_factor are kept."""
    original_max_position_embeddings: int = 8192
    """llama3, yarn, longrope: length of the contexts that the model was first trained on."""
    beta_fast: float = 32.0
    """yarn: pairs of dimensions that turn more often than this within the original context are kept (arXiv
    2309.00071)."""
    beta_slow: float = 1.0
    """yarn: pairs of dimensions that turn less often than this within the original context are stretched by factor."""
    attention_factor: float = 0.0
    """yarn, longrope: cos and sin are multiplied by it. 0 means for yarn 0.1 ln(factor) + 1, or what mscale and
    mscale_all_dim give, and for longrope sqrt(1 + ln(factor) / ln(original_max_position_embeddings))."""
    mscale: float = 0.0
    """yarn: sets attention_factor to (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1); 0: not set."""
    mscale_all_dim: float = 0.0
    """yarn: the number in the divisor of attention_factor, see mscale. Set both, as DeepSeek does, or leave both at
    0."""
    truncate: bool = True
    """yarn: between the pairs of dimensions that are kept and those that are stretched lies a range that is blended.
    True: round its two ends outwards to whole pairs."""
    short_factor: tuple[float, ...] = ()
    """longrope: the factor of each wavelength in samples of at most original_max_position_embeddings tokens (arXiv
    2402.13753)."""
    long_factor: tuple[float, ...] = ()
    """longrope: the factor of each wavelength in longer samples, also of documents in them that are short."""


@dataclass(frozen=True)
class RotaryModel(ModelConfig):
    """The options of a family with rotary positions."""

    rope_theta: float = field(default=10000.0, metadata=OF_FUNCTION)
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling, metadata=OF_FUNCTION)
    """Stretching of rotary wavelengths for long contexts."""

    @property
    def rotary_width(self) -> int:
        """How many dimensions of a head are rotated."""
        return self.head_dim
