"""Compatibility of a checkpoint with a run: the options of the model that may differ, and those changed.

Each option of `model` is in one of three sets, and a test asks for the set of a new option.

WEIGHTS decides the tensors: their names, their shapes, what they are for. No run goes on from other values.
FUNCTION decides what a model computes from the same weights. A resumed run may not change it: its loss would jump, and
the checkpoints before and after would be of different models. A new run from these weights (checkpoint.init_from) may,
for example with a larger rope_theta for longer contexts. The run says so.
TRAINING changes how the weights are learned, and not what the model computes. It may change, and the run says so.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from megapar.config.messages import shown
from megapar.config.model_rules import MOE, ROPE_SCALING
from megapar.config.options import Config, flatten

WEIGHTS = {
    "model.family",
    "model.hidden_size",
    "model.num_hidden_layers",
    "model.num_attention_heads",
    "model.num_key_value_heads",
    "model.head_dim",
    "model.intermediate_size",
    "model.vocab_size",
    # Weights that are trained with one activation are of no use with another.
    "model.hidden_act",
    "model.attention_bias",
    "model.qk_norm",
    "model.tie_word_embeddings",
    "model.moe.num_experts",
    "model.moe.moe_intermediate_size",
    "model.moe.mlp_only_layers",
    "model.moe.shared_expert_intermediate_size",
    "model.moe.shared_expert_gate",
    "model.moe.balance",  # a bias of the selection is a tensor
}
FUNCTION = {
    "model.rope_theta",
    "model.rms_norm_eps",
    "model.moe.num_experts_per_tok",
    "model.moe.scoring_func",
    "model.moe.norm_topk_prob",
    "model.moe.routed_scaling_factor",
    "model.moe.n_group",
    "model.moe.topk_group",
    *ROPE_SCALING,
}
TRAINING = {
    # A limit of train.seq_length. A family of learned positions declares that it is a size (`sizes_of_weights`).
    "model.max_position_embeddings",
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.initializer_range",
    "model.moe.router_aux_loss_coef",
    "model.moe.router_bias_update_rate",
    "model.moe.router_z_loss_coef",
}


def weight_options(config: Config, sizes: Collection[str] = ()) -> dict[str, Any]:
    """The options behind the model's weights, by name without `model.`.

    A run can go on from a checkpoint only if these are equal. `sizes` are dotted paths of further options for sizes of
    this family's weights (`PipelineStage.sizes_of_weights`).
    """
    free = (FUNCTION | TRAINING).difference(sizes)
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


def function_changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Parts of a message, "option (saved | now)", for the options behind another function of the same weights.

    `saved` is as for `changes`. A checkpoint without an option is older than it, and has its default.
    """
    before = {**flatten(Config()), **saved}
    now = flatten(config)
    different = [path for path in now if path in FUNCTION and before[path] != now[path]]
    return [f"{path} ({shown(before[path])} | {shown(now[path])})" for path in different]


def changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Lines "option: saved -> now" for the changed options of a resumed run.

    `saved` is a flattened config, possibly from JSON. Options missing from `saved` are left out: they are newer than
    the checkpoint.
    """
    now = json.loads(json.dumps(flatten(config)))  # JSON turns tuples into lists, as it did with `saved`
    return [f"{path}: {saved[path]} -> {now[path]}" for path in now if path in saved and saved[path] != now[path]]
