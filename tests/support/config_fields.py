"""Other values for the fields of a config.json."""

from collections.abc import Collection, Mapping
from typing import Any

from megapar_models.convert.config_json import from_hugging_face

from megapar.errors import ConfigError

# Fields about files and versions: transformers itself would load another class, or none, with other values.
OF_FILES = frozenset(("model_type", "architectures", "dtype", "torch_dtype", "transformers_version"))


def others(value: Any) -> list[Any]:
    """Other values, of the same type if there is one. Of an object, one of its fields is another."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, value * 2 + 1]
    if isinstance(value, str):
        return ["relu2", "another"]
    if isinstance(value, list):
        return [value[1:] + value[:1], value[:-1]] if value else [[1]]
    if isinstance(value, dict):
        return [{**value, name: other} for name, old in value.items() for other in others(old)]
    return [0.5, 3, True]


def assert_read_or_refused(raw: Mapping[str, Any], without_effect: Collection[str]) -> None:
    """Each field with another value makes another model or is refused by name, but those `without_effect`."""
    base = from_hugging_face(raw)
    same = set()
    for field, value in raw.items():
        for other in others(value):
            try:
                changed = from_hugging_face({**raw, field: other}) != base
            except ConfigError:
                changed = True
            if not changed:
                same.add(field)
    assert same - _OF_NO_MODEL <= {*without_effect}, same


# What transformers writes into every file and no model computes with.
_OF_NO_MODEL = {"architectures", "transformers_version", "dtype", "use_cache", "pretraining_tp"}
_OF_NO_MODEL |= {"bos_token_id", "eos_token_id", "pad_token_id"}
