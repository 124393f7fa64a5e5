"""The door to `megapar_models.convert`: what a run asks of it if --config names a model of Hugging Face.

No other module that trains imports anything of `convert`, and this function imports it when it is called.
"""

from pathlib import Path

from megapar.config.files import part_toml
from megapar.config.options import Config


def described(path: Path, family: str) -> str:
    """The section [model] of the config.json `path` as TOML, by the family of a name, or if it is "" by model_type.

    Raises ConfigError for a file that no family reads.
    """
    from megapar_models.convert.config_json import from_hugging_face
    from megapar_models.convert.typed_fields import read_object

    return part_toml(Config(model=from_hugging_face(read_object(path), family)), ("model",))
