"""The model families by name, one line for each. A family outside this repository is named by its import path."""

from pathlib import Path
from typing import Any

from megapar.config import compatible
from megapar.config import validate as checks
from megapar.config.options import Config
from megapar.config.plugins import named
from megapar.pipeline.schedules import virtual_stages
from megapar_models.family import Family
from megapar_models.gpt.family import GPT
from megapar_models.llama.family import LLAMA
from megapar_models.mixtral.family import MIXTRAL
from megapar_models.qwen3_moe.family import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "gpt": GPT,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
}


def find(name: str) -> Family:
    """The family that model.family names: a key of FAMILIES, or MODULE:NAME. Raises ConfigError if there is none."""
    return named("model.family", name, FAMILIES, Family)


def presets() -> dict[str, Path]:
    """Published models by name: TOML files of options of `model`, in the folder `presets` of each family."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*/presets/*.toml"))}


def named_configs(folder: Path) -> dict[str, Path]:
    """What `--config` and `base` find by name: the presets, and the configurations of whole runs in `folder`."""
    return presets() | {path.stem: path for path in sorted(folder.glob("*.toml"))}


def validate(config: Config, world_size: int) -> Config:
    """Call `megapar.config.validate.validate` with what the config's family and schedule say of themselves."""
    rules = find(config.model.family)
    return checks.validate(config, world_size, rules, virtual_stages(config.parallel.schedule))


def weight_options(config: Config) -> dict[str, Any]:
    """Call `compatible.weight_options` with the options that decide the sizes of the family's weights."""
    return compatible.weight_options(config, find(config.model.family).stage.sizes_of_weights)
