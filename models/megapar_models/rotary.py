"""Rotary positions (Su et al., arXiv 2104.09864): their options, and tables of cos and sin to rotate queries and keys.

Layers may have different tables, or none. A stage makes each table of its layers once for a micro-batch. The fields of
a config.json are read in rotary_fields.py.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megapar.config.model_options import OF_FUNCTION, ModelConfig
from megapar.declare.batch import MicroBatch


@dataclass(frozen=True)
class RopeScaling:
    """Hugging Face's `rope_scaling`; the default scales nothing."""

    rope_type: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    """default: no scaling. linear: positions are divided by factor. llama3, yarn: wavelengths are stretched by factor
    if they are long, and kept if they are short. longrope: each wavelength has a factor of its own. proportional: the
    shortest wavelengths alone turn, with frequencies divided by factor."""
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
    partial_rotary_factor: float = 1.0
    """proportional: the part of a head's pairs of dimensions that turns, above 0 and at most 1."""

    def turning_pairs(self, width: int) -> int:
        """Return how many of the pairs of `width` dimensions turn with rope_type proportional."""
        return int(self.partial_rotary_factor * width // 2)


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


@dataclass(frozen=True)
class PartialRotaryModel(RotaryModel):
    """The options of a family that rotates the first dimensions of a head, and leaves the others as they are."""

    partial_rotary_factor: float = field(default=1.0, metadata=OF_FUNCTION)
    """The part of a head's dimensions that is rotated, above 0 and at most 1."""

    @property
    def rotary_width(self) -> int:
        """How many dimensions of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class Rotary:
    """The angles of a layer. Layers with equal ones share a table.

    `theta` is the base, and `width` the width d of the rotated part of a head, its first dimensions.
    `scaling` changes the frequencies as Hugging Face's rope types `linear`, `llama3`, `yarn`, `longrope` and
    `proportional` do.

    Positions run over all documents of a sample. Rotary attention depends on distances alone, and a token attends only
    to its own document, so they need not begin again. With `inside_documents` they do: fp32 angles of small positions
    have smaller errors, and a mixer may read the positions themselves.

    With `backwards` angles are negative.
    """

    theta: float
    width: int
    scaling: RopeScaling = field(default_factory=RopeScaling)
    inside_documents: bool = False
    backwards: bool = False

    @classmethod
    def of(cls, model: RotaryModel) -> "Rotary":
        """Return the rotary positions of a model whose layers share one table of angles."""
        return cls(model.rope_theta, model.rotary_width, model.rope_scaling)

    def tables(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles of the columns of `batch`, fp32 [s, d].

        Positions inside documents may differ from sample to sample. The tables are then [s b, d], with a row for each
        position of each sample. A head has d/2 angles, so the columns from d/2 on repeat the columns 0 to d/2.
        """
        positions = batch.positions_s
        if self.inside_documents and batch.starts is not None:
            positions = batch.document_positions_bs().t().flatten()
        frequency, attention_factor = self.frequency(positions.device, batch.sample_length)
        angles = positions.to(torch.float32)[:, None] * (-frequency if self.backwards else frequency)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * attention_factor, angles.sin() * attention_factor

    def frequency(self, device: torch.device, length: int) -> tuple[Tensor, float]:
        """Radians per position of each pair of dimensions [d/2], fp32, and the factor of cos and sin.

        The factor is 1 for all types of scaling but yarn and longrope. For longrope the frequencies depend on `length`,
        the number of positions of a sample.
        """
        exponents = torch.arange(0, self.width, 2, dtype=torch.float32, device=device) / self.width
        radians = self.theta**exponents  # one over the frequency
        frequency = 1.0 / radians
        scaling = self.scaling
        if scaling.rope_type == "default":
            return frequency, 1.0
        if scaling.rope_type == "linear":
            return frequency / scaling.factor, 1.0
        if scaling.rope_type == "proportional":
            turning = torch.arange(len(frequency), device=device) < scaling.turning_pairs(self.width)
            return frequency * turning / scaling.factor, 1.0
        if scaling.rope_type == "yarn":
            keep_weight = self._yarn_keep_weight(device)
            stretched = 1.0 / (scaling.factor * radians)
            return stretched * (1 - keep_weight) + frequency * keep_weight, _yarn_attention_factor(scaling)
        if scaling.rope_type == "longrope":
            # transformers asks for the largest position in a batch. A sample has its length on every rank of cp, also
            # if its documents are shorter.
            is_long = length > scaling.original_max_position_embeddings
            factors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor, device=device)
            return 1.0 / (factors * radians), _longrope_attention_factor(scaling)
        # llama3. Dimensions that turn at least high_freq_factor times within the original context keep their frequency.
        # The frequency of those that turn at most low_freq_factor times is divided by the factor. Between the two, both
        # frequencies are mixed.
        turns_in_context = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        mixed_turns = scaling.high_freq_factor - scaling.low_freq_factor
        if not mixed_turns:  # Llama 4
            keep_weight = (turns_in_context >= scaling.high_freq_factor).to(frequency.dtype)
        else:
            keep_weight = ((turns_in_context - scaling.low_freq_factor) / mixed_turns).clamp(0, 1)
        return keep_weight * frequency + (1 - keep_weight) * frequency / scaling.factor, 1.0

    def _yarn_keep_weight(self, device: torch.device) -> Tensor:
        """The weight [d/2], fp32, of the unchanged frequency in YaRN's mixture (arXiv 2309.00071, section 3.2).

        It is 1 for pairs of dimensions with more than beta_fast turns within the original context, and 0 for those with
        less than beta_slow turns. Between the two it falls linearly with the number of the pair.
        """
        scaling = self.scaling

        def pair_that_turns(times: float) -> float:
            """The number of the pair with so many turns within the original context. It may lie between two pairs."""
            radians = scaling.original_max_position_embeddings / (2 * math.pi * times)
            return self.width * math.log(radians) / (2 * math.log(self.theta))

        first = pair_that_turns(scaling.beta_fast)
        last = pair_that_turns(scaling.beta_slow)
        if scaling.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        # The bound of `last` is a number of dimensions, not of pairs. transformers computes it so, and so did the
        # paper's authors.
        first = max(first, 0)
        last = min(last, self.width - 1)
        if first == last:
            last += 0.001  # as transformers: there is nothing to mix, and no division by 0
        pairs = torch.arange(self.width // 2, dtype=torch.float32, device=device)
        return 1 - ((pairs - first) / (last - first)).clamp(0, 1)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """The factor of cos and sin. Its square scales the attention scores (arXiv 2309.00071, section 3.4)."""
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    """The factor of cos and sin, in short samples too (arXiv 2404.14219, section 2)."""
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's factor 0.1 mscale ln(factor) + 1 (arXiv 2309.00071, section 3.4). `factor` is at least 1."""
    return 0.1 * mscale * math.log(factor) + 1.0
