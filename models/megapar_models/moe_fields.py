"""The fields of a mixture of experts in a config.json of Hugging Face, for the families with experts."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import shown
from megapar.config.model_options import MixtureModel, MoEConfig
from megapar_models.family import Raw, typed, wrong_types
from megapar_models.rope import factor_warnings


def read_moe(raw: Raw, names: Mapping[str, str], defaults: Raw) -> tuple[dict[str, Any], list[str]]:
    """Read the options `model.moe` from a config.json; returns their values and problems.

    `names` maps the fields of config.json to options. `defaults` has transformers' defaults for absent fields. A field
    without a default must be there. Several fields may name the same option, if they agree: transformers 5 writes
    num_local_experts, version 4 wrote num_experts.
    """
    values: dict[str, Any] = {}
    problems = []
    for theirs, ours in names.items():
        value = raw.get(theirs)
        if value is None:
            continue
        if values.get(ours, value) != value:
            problems.append(f"{theirs}={value!r} contradicts {values[ours]!r} of another field for the same")
        values[ours] = value
    for theirs, ours in names.items():
        if ours in values:
            continue
        if theirs in defaults:
            values[ours] = defaults[theirs]
        else:
            problems.append(f"{theirs} is missing")
            values[ours] = 1  # so that it is named once
    problems += wrong_types(values, MoEConfig)
    return ({} if problems else typed(values, MoEConfig)), problems


def mixture_warnings(raw: Raw) -> list[str]:
    """Lines about fields with another meaning in transformers: YaRN's factor, and its loss of balance."""
    lines = factor_warnings(raw)
    if raw.get("output_router_logits"):
        # Its loss depends on the micro-batch.
        lines.append(
            "config.json: output_router_logits=true is not read: model.moe.balance says which loss balances the experts"
        )
    return lines


def refuse_unwritable(
    model: MixtureModel, model_type: str, fixed: Mapping[str, Any], because: Iterable[str], *, has_bias: bool = False
) -> None:
    """Raise ConfigError with every option of model.moe the config.json of `model_type` cannot hold.

    `fixed` has further options, each with its only value in transformers' model. `because` are other problems.
    `has_bias` says whether its routers have a bias that selects experts. Then all models of `model_type` have one.
    """
    problems = list(because)
    always: dict[str, Any] = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "n_group": 1}
    always |= {"shared_expert_intermediate_size": 0, **fixed}
    for name, value in always.items():
        found = getattr(model.moe, name)
        if found != value:
            problems.append(f"model.moe.{name}={shown(found)}: {model_type} of transformers has {shown(value)}")
    if model.moe.has_selection_bias and not has_bias:
        problems.append(
            f"model.moe.balance={model.moe.balance}: {model_type} of transformers has no bias that selects experts"
        )
    if has_bias and not model.moe.has_selection_bias:
        problems.append(f"model.moe.balance={model.moe.balance}: {model_type} of transformers has bias")
    if problems:
        raise ConfigError("\n".join(problems))


def refuse_windows(raw: Raw, model_type: str) -> Iterator[str]:
    """Yield a problem if a sliding window applies to positions of the model. Any other window is allowed."""
    # What transformers takes for an absent window, and whether it uses one.
    window = raw.get("sliding_window", None if model_type == "mixtral" else 4096)
    used = model_type == "mixtral" or raw.get("use_sliding_window", False)
    longest = raw["max_position_embeddings"]
    if used and window is not None and window < longest:
        yield (
            f"sliding_window={window} is not supported below max_position_embeddings={longest}; with that set to "
            f"{window} the window never applies"
        )
