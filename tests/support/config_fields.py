"""Other values for the fields of a config.json."""

from typing import Any

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
