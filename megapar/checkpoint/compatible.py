"""Which options of a run decide what its checkpoints can go on with, and which have changed since."""

import json
from collections.abc import Mapping
from typing import Any

from megapar.config import Config, RopeScaling, flatten

# Of the model's options, those that any weights go with; gpt's position table makes one exception.
_FREE_OF_WEIGHTS = {
    "model.max_position_embeddings",
    "model.rope_theta",
    "model.rms_norm_eps",
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.initializer_range",
    *(f"model.rope_scaling.{name}" for name in flatten(RopeScaling())),
}


def weight_options(config: Config) -> dict[str, Any]:
    """The model's options that decide which weights there are, by name: no run with others can go on from them."""
    free = _FREE_OF_WEIGHTS - ({"model.max_position_embeddings"} if config.model.family == "gpt" else set())
    options = {path: value for path, value in flatten(config).items() if path.startswith("model.") and path not in free}
    return {path.removeprefix("model."): value for path, value in options.items()}


def changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Lines "option: saved -> now" for a run that goes on. `saved` is a flattened config that may have been JSON."""
    now = json.loads(json.dumps(flatten(config)))
    return [f"{path}: {saved[path]} -> {now[path]}" for path in now if path in saved and saved[path] != now[path]]
