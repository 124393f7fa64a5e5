"""The model families by name, one line for each. A family outside this repository is named by its import path."""

import importlib
from typing import Any

from megapar import validate as checks
from megapar.checkpoint import compatible
from megapar.config import Config
from megapar.errors import ConfigError
from megapar_models.family import Family
from megapar_models.gpt_family import GPT
from megapar_models.llama_family import LLAMA

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "gpt": GPT,
}


def find(name: str) -> Family:
    """The family that model.family names: a key of FAMILIES, or MODULE:NAME for a Family in an importable module.

    Raises ConfigError if there is no such family.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(
            f"model.family={name}: no such family; {' and '.join(FAMILIES)} are, and MODULE:NAME names one of your own"
        )
    try:
        family = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"model.family={name}: cannot be imported ({reason}); the module must lie where Python looks (PYTHONPATH)"
        ) from error
    if not isinstance(family, Family):
        raise ConfigError(f"model.family={name}: is {type(family).__name__}, not a megapar_models.family.Family")
    return family


def validate(config: Config, world_size: int) -> Config:
    """Call `megapar.validate.validate` with the rules of the config's family."""
    return checks.validate(config, world_size, find(config.model.family))


def weight_options(config: Config) -> dict[str, Any]:
    """Call `compatible.weight_options` with the options that decide the sizes of the family's weights."""
    return compatible.weight_options(config, find(config.model.family).stage.sizes_of_weights)
