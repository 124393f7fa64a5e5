"""Where a run is: the trainer's section of a checkpoint's manifest, written and read."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from megapar.base.errors import CheckpointError
from megapar.base.precision import LossScale
from megapar.checkpoint.format import BASE, MOST, Manifest
from megapar.checkpoint.lineage import Lineage, lineage_of
from megapar.checkpoint.origin import ORIGIN
from megapar.config.compatible import weight_options
from megapar.config.options import flatten
from megapar.step.state import Recent, TrainState
from megapar.train.data import ORDER
from megapar.train.resumed_samples import stages_of


def trainer_state(state: TrainState) -> dict[str, Any]:
    """The fields of a checkpoint's manifest besides its tensors, as JSON types."""
    config = state.config
    parallel = state.config.parallel
    return {
        "step": state.step,
        "consumed_samples": state.consumed_samples,
        "layout": {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")},
        "model_config": options_of_weights(state),
        "trainer": {
            "updates": state.optimizer.step_count,
            "loss_scale": asdict(state.loss_scale) if state.loss_scale.dynamic else None,
            "config": flatten(config),
            "recent": {"losses": list(state.recent.losses), "norms": list(state.recent.norms)},
            "lineage": [list(start) for start in state.lineage],
            **({BASE: dict(state.base)} if state.base else {}),
            **({ORIGIN: dict(state.origin)} if state.origin else {}),
        },
        "data": {
            "train": list(config.data.train),
            "tokenizer": config.data.tokenizer,
            "stages": [[stage.first, list(stage.weights)] for stage in state.blend or stages_of(config)],
            **ORDER,
            **state.data_identity,
        },
    }


def options_of_weights(state: TrainState) -> dict[str, Any]:
    """The options that the weights depend on, with the sizes of the family."""
    # All stages are of one family.
    stage = next(iter(state.stages.values()))
    return weight_options(state.config, stage.sizes_of_weights)


@dataclass(frozen=True)
class TrainerRecord:
    """The state of the trainer in a checkpoint: the fields missing from some checkpoints."""

    updates: int
    loss_scale: LossScale | None
    config: dict[str, Any]
    lineage: Lineage
    recent: Recent | None


def position(manifest: Manifest) -> TrainerRecord:
    """Parse the `trainer` section of a manifest. Raises CheckpointError if a field is missing or has another type."""
    trainer = manifest.trainer
    updates = trainer.get("updates")
    config = trainer.get("config")
    prefix = f"checkpoint of step {manifest.step}: trainer"
    # Not isinstance: True is an int to Python, and JSON's true is no number of updates.
    if type(updates) is not int or not 0 <= updates < MOST:
        raise CheckpointError(f"{prefix}.updates is {updates!r}, not a number of updates")
    if type(config) is not dict:
        raise CheckpointError(f"{prefix}.config is {config!r}, not the run's options")
    for name in ("hashes", "modified", "samples"):
        if type(manifest.data.get(name, {})) is not dict:
            raise CheckpointError(f"checkpoint of step {manifest.step}: data.{name} is no object")
    scale = _loss_scale(trainer.get("loss_scale"), prefix)
    return TrainerRecord(updates, scale, config, lineage_of(trainer), _recent(trainer.get("recent"), prefix))


def _recent(saved: object, prefix: str) -> Recent | None:
    if saved is None:
        return None
    names = {"losses", "norms"}
    if type(saved) is not dict or saved.keys() != names or not all(_are_numbers(saved[name]) for name in names):
        raise CheckpointError(f"{prefix}.recent is {saved!r}, not the losses and norms of the last steps")
    recent = Recent()
    for loss, norm in zip(saved["losses"], saved["norms"], strict=False):
        recent.add(float(loss), float(norm))
    return recent


def _are_numbers(values: object) -> bool:
    return type(values) is list and all(type(x) in (int, float) and math.isfinite(x) for x in values)


def _loss_scale(saved: object, prefix: str) -> LossScale | None:
    if saved is None:
        return None
    types = {name: type(value) for name, value in asdict(LossScale.of("fp16")).items()}
    if type(saved) is not dict or {name: type(value) for name, value in saved.items()} != types:
        raise CheckpointError(f"{prefix}.loss_scale is {saved!r}, not a loss scale")
    scale = LossScale(**saved)
    if not 1.0 <= scale.scale <= LossScale.LARGEST:
        raise CheckpointError(f"{prefix}.loss_scale.scale is {scale.scale}, not from 1 to {LossScale.LARGEST:.0f}")
    return scale
