"""What a plan of a step's time asks of a model: the kinds of its layers, what it declares, and its FLOPs.

With `build.stage_maker` and `build.stage_layers` these are the fields of `megapar.plan.stage_works.Model`.
"""

from collections.abc import Hashable, Sequence

from megapar.config.options import Config
from megapar.stage_set import Declared
from megapar_models.counts import WholeModel
from megapar_models.registry import find


def layer_kinds(config: Config) -> Sequence[Hashable]:
    """A kind for each layer. Layers of one kind are alike."""
    stage = find(config.model.family).stage
    return [stage.layer_kind(config.model, number) for number in range(config.model.num_hidden_layers)]


def declared(config: Config) -> Declared:
    """What the model declares beside its parameters."""
    return find(config.model.family).stage.declared(config.model)


def flops_per_token(config: Config) -> int:
    """FLOPs of a token, forward and backward."""
    return WholeModel(config.model).flops_per_token(config.train.seq_length, config.train.trainable)
