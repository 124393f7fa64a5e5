"""Attention and Mamba-2 beside each other in one layer: both read the same token, and their outputs are added."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar_models.attention import Attention
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind, MixerRule
from megapar_models.mamba2 import Mamba2


class Factors(NamedTuple):
    """Factors of what a branch reads, and of what it returns."""

    of_input: float
    of_output: float


@dataclass(frozen=True)
class SideBySide(MixerRule):
    """The rule of both branches. The layer's kind says what attention does."""

    mamba: Mamba2
    of_mamba: Factors
    of_attention: Factors

    OVER_CP = True
    READS = Attention.READS

    def make(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory) -> nn.Module:
        return BothMixers(self, number, kind, model, factory)

    def problems(self, config: Config) -> Iterator[str]:
        yield from self.mamba.problems(config)


class BothMixers(nn.Module):
    """Attention and the Mamba-2 of layer `number`. The names of their weights begin with attention and mamba."""

    def __init__(self, rule: SideBySide, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        self.rule = rule
        self.attention = Attention(number, kind, model, factory)
        self.mamba = rule.mamba.make(number, kind, model, factory)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Map [s or s/tp, b, h] to the same shape."""
        return self._branch(self.mamba, self.rule.of_mamba, x_sbh, context) + self._branch(
            self.attention, self.rule.of_attention, x_sbh, context
        )

    def _branch(self, mixer: nn.Module, factors: Factors, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        if factors.of_input != 1.0:
            x_sbh = x_sbh * factors.of_input
        y_sbh: Tensor = mixer(x_sbh, context)
        return y_sbh if factors.of_output == 1.0 else y_sbh * factors.of_output
