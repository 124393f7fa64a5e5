"""PEFT's adapter_config.json: written of our options, and read, with each field that would mean something else."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import first_few
from megapar.config.options import AdapterConfig
from megapar_models.convert.stacked_experts import GATE_UP, PARAMETERS, Stack
from megapar_models.convert.typed_fields import (
    COUNT,
    FLAG,
    NAMES,
    NOT_ZERO,
    NUMBER,
    OBJECT,
    TEXT,
    Kind,
    either,
    problems,
)

# The version of PEFT whose files these are.
PEFT_VERSION = "0.21.2"
PEFT_CONFIG = "adapter_config.json"
# Fields of adapter_config.json that are read, each with its kind.
READ: dict[str, Kind] = {
    **{"r": COUNT.needed, "lora_alpha": NOT_ZERO.needed, "lora_dropout": NUMBER},
    **{"use_rslora": FLAG, "use_dora": FLAG, "ensure_weight_tying": FLAG},
    **{"rank_pattern": OBJECT, "alpha_pattern": OBJECT, "target_parameters": NAMES, "modules_to_save": NAMES},
    "init_lora_weights": either(FLAG, TEXT),
}
# Fields with the only value that is written, and read. The later ones change what an adapter computes, or its base.
UNCHANGED: dict[str, Any] = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "fan_in_fan_out": False},
    **dict.fromkeys(("use_qalora", "lora_bias", "use_bdlora"), False),
    **dict.fromkeys(("layer_replication", "trainable_token_indices", "alora_invocation_tokens", "megatron_config")),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config", "corda_config")),
    **{"lora_ga_config": None, "loftq_config": {}},
}
# Fields of where an adapter came from, and of where it has matrices, which the names of its tensors say too.
WITHOUT_EFFECT = frozenset(
    (
        *("peft_version", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
    )
)
# How training began. Other ways have changed the weights of the base too.
STARTS = (True, False, "gaussian", "orthogonal", "eva")


def peft_config(
    adapter: AdapterConfig, target_modules: Sequence[str], modules_to_save: Sequence[str], base_name: str
) -> dict[str, Any]:
    """The content of adapter_config.json."""
    return {
        **{name: UNCHANGED[name] for name in ("peft_type", "task_type", "bias", "fan_in_fan_out")},
        **{"init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}},
        "modules_to_save": list(modules_to_save) or None,
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
    """The options of PEFT's adapter_config.json.

    Raises ConfigError for a field of a wrong type, one that means something else, and one that is not known.
    """
    wrong_kinds = [f"{PEFT_CONFIG}: {line}" for line in problems(document, READ)]
    if wrong_kinds:
        raise ConfigError("\n".join(wrong_kinds))
    stacked = GATE_UP in map(parameter, stacked_targets(document))
    wrong = [
        f"{name}={document[name]!r}"
        for name, value in UNCHANGED.items()
        if document.get(name, value) not in (value, None)
    ]
    if not stacked:
        wrong += [f"{name}={document[name]!r}" for name in ("rank_pattern", "alpha_pattern") if document.get(name)]
    if document.get("init_lora_weights") not in (*STARTS, None):
        wrong.append(f"init_lora_weights={document['init_lora_weights']!r} (such a start changes the base too)")
    wrong += [f"target_parameters={name}" for name in stacked_targets(document) if not parameter(name)]
    known = {*READ, *UNCHANGED, *WITHOUT_EFFECT}
    # What is null is not used.
    unknown = sorted(name for name in document.keys() - known if document[name] is not None)
    wrong += [f"{name}={document[name]!r} (not known, and may change what the adapter computes)" for name in unknown]
    adapter = AdapterConfig(
        rank=document["r"],
        alpha=float(document["lora_alpha"]),
        rslora=document.get("use_rslora") or False,
        dora=document.get("use_dora") or False,
        dropout=float(document.get("lora_dropout") or 0.0),
    )
    if stacked:
        joint = pattern(document, "rank_pattern", COUNT, adapter.rank)
        alpha = pattern(document, "alpha_pattern", NOT_ZERO, adapter.alpha)
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


def pattern(document: Mapping[str, Any], field: str, kind: Kind, default: Any) -> Any:
    """What rank_pattern or alpha_pattern has of gate_up_proj, of this kind. A pattern of anything else is refused.

    Raises ConfigError.
    """
    values = document.get(field) or {}
    if other := [key for key in values if not key.endswith("gate_up_proj")]:
        raise ConfigError(f"{PEFT_CONFIG}: not read: {field} of {first_few(other)}")
    for line in problems(values, dict.fromkeys(values, kind.needed)):
        raise ConfigError(f"{PEFT_CONFIG}: {field}: {line}")
    return next(iter(values.values()), default)
