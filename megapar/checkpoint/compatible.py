"""Which options of a run decide what its checkpoints can go on with, and which have changed since."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from megapar.config import Config, flatten
from megapar.model_rules import ROPE_SCALING

# Model options that do not affect the shapes of weights, so that a checkpoint may differ in them. A family may say that
# one of them is a size of its weights, as a table of learned positions is.
_FREE_OF_WEIGHTS = {
    "model.max_position_embeddings",
    "model.rope_theta",
    "model.rms_norm_eps",
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.initializer_range",
    *ROPE_SCALING,
}


def weight_options(config: Config, sizes: Collection[str] = ()) -> dict[str, Any]:
    """The model's options that decide which weights there are, by name: no run with others can go on from them.

    `sizes`: options by dotted path that are sizes of this family's weights (`PipelineStage.sizes_of_weights`).
    """
    free = _FREE_OF_WEIGHTS.difference(sizes)
    options = {path: value for path, value in flatten(config).items() if path.startswith("model.") and path not in free}
    return {path.removeprefix("model."): value for path, value in options.items()}


def changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Lines "option: saved -> now" for a run that goes on. `saved` is a flattened config that may have been JSON."""
    now = json.loads(json.dumps(flatten(config)))
    return [f"{path}: {saved[path]} -> {now[path]}" for path in now if path in saved and saved[path] != now[path]]
