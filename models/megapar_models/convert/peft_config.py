"""PEFT's adapter_config.json: written of our options, and read, with each field that would mean something else."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megapar.config.messages import first_few
from megapar.config.options import AdapterConfig
from megapar.errors import ConfigError
from megapar_models.convert.stacked_experts import GATE_UP, PARAMETERS, Stack

# The version of PEFT whose files these are.
PEFT_VERSION = "0.21.2"
PEFT_CONFIG = "adapter_config.json"
# Fields of adapter_config.json with the only value that is written, and read.
UNCHANGED: dict[str, Any] = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"},
    **{"fan_in_fan_out": False, "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}},
    "modules_to_save": None,
}


def peft_config(adapter: AdapterConfig, target_modules: Sequence[str], base_name: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    return {
        **UNCHANGED,
        "peft_version": PEFT_VERSION,
        "base_model_name_or_path": base_name or None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha or float(adapter.rank),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "target_modules": list(target_modules),
        "inference_mode": True,
    }


def stacks_in_config(adapter: AdapterConfig, stacked: Iterable[Stack]) -> dict[str, Any]:
    """The fields of adapter_config.json for stacks of experts."""
    words = {stack.words for stack in stacked}
    fields: dict[str, Any] = {"target_parameters": [name for name, those in PARAMETERS.items() if those in words]}
    if GATE_UP in fields["target_parameters"]:
        joint = replace(adapter, rank=2 * adapter.rank, alpha=0.0)
        # s stays the same.
        alpha = adapter.scale * joint.rank / joint.scale
        fields |= {"rank_pattern": {GATE_UP: joint.rank}, "alpha_pattern": {GATE_UP: alpha}}
    return fields


def words_in_stacks(document: Mapping[str, Any]) -> set[str]:
    """The words gate, up and down of experts whose adapters are in stacks."""
    return {word for name in stacked_targets(document) for word in PARAMETERS[parameter(name)]}


def adapter_from_peft(document: Mapping[str, Any]) -> AdapterConfig:
    """The options of PEFT's adapter_config.json. Raises ConfigError for a field that means something else."""
    patterns = ("rank_pattern", "alpha_pattern")
    stacked = GATE_UP in map(parameter, stacked_targets(document))
    wrong = [
        f"{name}={document[name]!r}"
        for name, value in UNCHANGED.items()
        if document.get(name, value) not in (value, None) and not (stacked and name in patterns)
    ]
    further = ("layer_replication", "trainable_token_indices", "lora_bias", "layers_to_transform")
    wrong += [f"{name}={document[name]!r}" for name in further if document.get(name)]
    wrong += [f"target_parameters={name}" for name in stacked_targets(document) if not parameter(name)]
    adapter = AdapterConfig(
        rank=document["r"],
        alpha=float(document["lora_alpha"]),
        rslora=bool(document.get("use_rslora", False)),
        dora=bool(document.get("use_dora", False)),
        dropout=float(document.get("lora_dropout", 0.0)),
    )
    if stacked:
        joint = pattern(document, "rank_pattern", adapter.rank)
        alpha = pattern(document, "alpha_pattern", adapter.alpha)
        if joint not in (adapter.rank, 2 * adapter.rank):
            wrong.append(f"rank_pattern={document['rank_pattern']!r} (r, or 2 r of gate and up, is read)")
        elif not math.isclose(replace(adapter, rank=joint, alpha=alpha).scale, adapter.scale):
            wrong.append(f"alpha_pattern={document.get('alpha_pattern')!r} (another scale than of the other matrices)")
    if wrong:
        raise ConfigError(f"{PEFT_CONFIG}: not read: {', '.join(wrong)}")
    return adapter


def stacked_targets(document: Mapping[str, Any]) -> list[str]:
    """PEFT's target_parameters, without the weights of modules: those have factors of the same names as modules."""
    return [name for name in document.get("target_parameters") or () if not name.endswith(".weight")]


def parameter(name: str) -> str:
    """The name in `PARAMETERS` of one of PEFT's target_parameters, which may have words before it, or ""."""
    return next((known for known in PARAMETERS if f".{name}".endswith(f".{known}") or known.endswith(f".{name}")), "")


def pattern(document: Mapping[str, Any], field: str, default: Any) -> Any:
    """What rank_pattern or alpha_pattern has of gate_up_proj. A pattern of anything else is refused.

    Raises ConfigError.
    """
    values = document.get(field) or {}
    if other := [key for key in values if not key.endswith("gate_up_proj")]:
        raise ConfigError(f"{PEFT_CONFIG}: not read: {field} of {first_few(other)}")
    return next(iter(values.values()), default)
