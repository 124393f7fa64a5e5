"""What a plan of a step's time must know of the families."""

from collections.abc import Hashable, Sequence

from megapar.config.options import Config
from megapar.plan.stage_works import Model
from megapar.stage_set import Declared
from megapar_models.build import stage_layers, stage_maker
from megapar_models.counts import WholeModel
from megapar_models.registry import find


def planned_model() -> Model:
    """All that `megapar.plan.step_time` must know of the families."""
    return Model(stage_maker, _layer_kinds, stage_layers, _declared, _flops_per_token)


def _layer_kinds(config: Config) -> Sequence[Hashable]:
    stage = find(config.model.family).stage
    return [stage.layer_kind(config.model, number) for number in range(config.model.num_hidden_layers)]


def _declared(config: Config) -> Declared:
    return find(config.model.family).stage.declared(config.model)


def _flops_per_token(config: Config) -> int:
    return WholeModel(config.model).flops_per_token(config.train.seq_length, config.train.trainable)
