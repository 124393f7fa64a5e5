"""Families of tests whose layers are attention and delta nets in turns.

Widths and an eps of the output's norm with which no output is near 0: its norm would make much of a rounding.
"""

from dataclasses import replace
from typing import ClassVar

from megapar_models.delta_net import GatedDelta
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.families.mixtral import MIXTRAL as MIXTRAL_FAMILY
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule

from megapar.config.model_options import ModelConfig

HEADS = GatedDelta(key_heads=2, value_heads=4, key_width=16, value_width=10, conv_width=4, norm=NormRule(1e-2))
CHANNELS = replace(
    HEADS, key_heads=4, decays_channels=True, decay_rank=6, gate_rank=7, gate="sigmoid", negative_eigenvalues=True
)
FLOOR = replace(CHANNELS, decay_rank=0, gate_rank=0, decay_floor=-5.0)


def with_delta(kind: LayerKind, number: int, rules: tuple[GatedDelta, ...]) -> LayerKind:
    """`kind` with one of the rules in every second layer."""
    if number % 2 == 0:
        return kind
    return replace(kind, mixer=rules[number // 2 % len(rules)], rotary=None, qk_norm=False)


class HeadsStage(LlamaStage):
    RULES: ClassVar[tuple[GatedDelta, ...]] = (HEADS,)

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        return with_delta(super().layer_kind(model, number), number, cls.RULES)


class ChannelsStage(HeadsStage):
    RULES = (CHANNELS, FLOOR)


class MixtureStage(MixtralStage[MixtralModel]):
    @classmethod
    def layer_kind(cls, model: MixtralModel, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return kind if number == 0 else replace(kind, mixer=(CHANNELS, HEADS)[number % 2], rotary=None)


HEADS_FAMILY = replace(LLAMA_FAMILY, name="delta_heads", stage=HeadsStage)
CHANNELS_FAMILY = replace(LLAMA_FAMILY, name="delta_channels", stage=ChannelsStage)
MIXTURE_FAMILY = replace(MIXTRAL_FAMILY, name="delta_mixture", stage=MixtureStage)
