"""Compatibility of a checkpoint with a run: the options that decide the weights, and options that have changed."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from megapar.config import Config, flatten
from megapar.model_rules import MOE, ROPE_SCALING

# Model options that do not affect the shapes of weights. A checkpoint may differ in them. A family may declare that one
# of them is a size of its weights: a table of learned positions has max_position_embeddings rows.
_FREE_OF_WEIGHTS = {
    "model.max_position_embeddings",
    "model.rope_theta",
    "model.rms_norm_eps",
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.initializer_range",
    "model.moe.num_experts_per_tok",
    "model.moe.scoring_func",
    "model.moe.norm_topk_prob",
    "model.moe.routed_scaling_factor",
    "model.moe.n_group",
    "model.moe.topk_group",
    "model.moe.router_aux_loss_coef",
    "model.moe.router_bias_update_rate",
    "model.moe.router_z_loss_coef",
    *ROPE_SCALING,
}


def weight_options(config: Config, sizes: Collection[str] = ()) -> dict[str, Any]:
    """Return the model's options that decide its weights, by name without `model.`.

    A run can go on from a checkpoint only if these are equal. `sizes` are the dotted paths of options that are sizes of
    this family's weights (`PipelineStage.sizes_of_weights`).
    """
    free = _FREE_OF_WEIGHTS.difference(sizes)
    if not config.model.moe.num_experts:
        # Checkpoints of models without experts have never stated these options.
        free = free.union(MOE)
    elif config.model.moe.balance != "bias":
        # Of what balances experts only the bias is needed to compute the model. So weights fit a run with another loss.
        free = free.union({"model.moe.balance"})
    options = {}
    for path, value in flatten(config).items():
        if path.startswith("model.") and path not in free:
            options[path.removeprefix("model.")] = value
    return options


def changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Return lines "option: saved -> now" for the options of a resumed run that have changed.

    `saved` is a flattened config, which may have been JSON. Options that `saved` lacks are left out: they are newer
    than the checkpoint.
    """
    now = json.loads(json.dumps(flatten(config)))  # JSON turns tuples into lists, as it did with `saved`
    return [f"{path}: {saved[path]} -> {now[path]}" for path in now if path in saved and saved[path] != now[path]]
