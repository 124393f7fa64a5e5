"""Compatibility of a checkpoint with a run: the options of the model that may differ, and those changed.

Each option of `model` decides one of three things.

The weights: their names, their shapes, what they are for. No run goes on from other values. An option decides this
unless its field declares something else, so a forgotten one is never too weak.
The function (OF_FUNCTION): what a model computes from the same weights. A resumed run may not change it: its loss would
jump, and the checkpoints before and after would be of different models. A new run from these weights
(checkpoint.init_from) may, for example with a larger rope_theta for longer contexts. The run says so.
Training (OF_TRAINING): how the weights are learned, and not what the model computes. It may change, and the run says
so.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from megapar.base.errors import CheckpointError
from megapar.config.messages import first_few, shown
from megapar.config.model_options import ModelConfig
from megapar.config.model_rules import SELECTION_BIAS
from megapar.config.option_values import convert_all
from megapar.config.options import AdapterConfig, Config, default_config, flatten, option_types


def decided_by(what: str, model: ModelConfig) -> set[str]:
    """The dotted paths of the options of `model` for "function" or "training", as their fields declare it."""
    return set(_declared(model, "model.", what, ""))


def _declared(section: Any, prefix: str, what: str, of_section: str) -> Iterator[str]:
    """Yield the options for `what`. `of_section` is what the field of the section itself declares for all in it."""
    for f in fields(section):
        value = getattr(section, f.name)
        decides = f.metadata.get("decides", of_section)
        if is_dataclass(value):
            yield from _declared(value, f"{prefix}{f.name}.", what, decides)
        elif decides == what:
            yield prefix + f.name


def weight_options(config: Config, sizes: Collection[str] = ()) -> dict[str, Any]:
    """The options behind the model's weights, by name without `model.`.

    A run can go on from a checkpoint only if these are equal. `sizes` are dotted paths of further options for sizes of
    this family's weights (`PipelineStage.sizes_of_weights`).
    """
    free = decided_by("function", config.model) | decided_by("training", config.model)
    free = free.difference(sizes)
    experts = config.model.experts
    # Of what balances experts only the bias is needed to compute the model. So weights fit a run with another loss.
    if experts is not None and not experts.has_selection_bias:
        free = free.union({"model.moe.balance"})
    if config.model.head == "vocabulary":
        # Weights are of such a model unless they say otherwise. So they may be from before the option.
        free = free.union({"model.head"})
    options = {}
    for path, value in flatten(config).items():
        if path.startswith("model.") and path not in free:
            options[path.removeprefix("model.")] = value
    if SELECTION_BIAS in options:
        options[SELECTION_BIAS] = "bias"  # with or without a loss beside it
    return options


def function_changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Parts of a message, "option (saved | now)", for the options behind another function of the same weights.

    `saved` is as for `changes`. A checkpoint without an option is older than it, and has its default.
    """
    before = _as_json({**flatten(default_config(type(config.model))), **saved})
    now = _as_json(flatten(config))
    function = decided_by("function", config.model)
    different = [path for path in now if path in function and before[path] != now[path]]
    return [f"{path} ({shown(before[path])} | {shown(now[path])})" for path in different]


def adapter_changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Parts of a message as those of `function_changes`, for the options of adapters.

    Dropout may change, and where adapters came from does not matter.
    """
    before = {**_as_json(flatten(default_config())), **saved}
    now = _as_json(flatten(config))
    free = ("adapter.dropout", "adapter.init_from")
    decides = [path for path in now if path.startswith("adapter.") and path not in free]
    different = [path for path in decides if before[path] != now[path]]
    return [f"{path} ({shown(before[path])} | {shown(now[path])})" for path in different]


def saved_adapter(saved: Mapping[str, Any]) -> AdapterConfig:
    """The options of adapters in the flattened config of a checkpoint. Raises CheckpointError for wrong types."""
    types = {path: annotation for path, annotation in option_types().items() if path.startswith("adapter.")}
    found, wrong = convert_all(saved, types)
    if wrong:
        raise CheckpointError(f"trainer.config: {first_few(wrong, separator='; ')}")
    return AdapterConfig(**{path.removeprefix("adapter."): value for path, value in found.items()})


def changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Lines "option: saved -> now" for the changed options of a resumed run.

    `saved` is a flattened config, possibly from JSON. Options missing from `saved` are left out: they are newer than
    the checkpoint.
    """
    now = _as_json(flatten(config))
    return [f"{path}: {saved[path]} -> {now[path]}" for path in now if path in saved and saved[path] != now[path]]


def _as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with tuples as lists, as a checkpoint has them."""
    values: dict[str, Any] = json.loads(json.dumps(options))
    return values
