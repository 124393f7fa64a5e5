"""Reads values of options out of TOML and JSON: each has the type of its option, or is refused."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from megapar.config.lengths import is_length
from megapar.config.messages import shown
from megapar.config.options import Length


def convert(raw: Any, annotation: Any) -> Any:
    """Convert a value of TOML or JSON to an option's type. Returns None if it has another type.

    A whole number is accepted for a float. Nothing else is cast.
    """
    if get_origin(annotation) is Literal:
        # Types are compared too: to Python True equals 1.
        for choice in get_args(annotation):
            if type(choice) is type(raw) and choice == raw:
                return choice
        return None
    if get_origin(annotation) is tuple:
        item_types = get_args(annotation)
        any_length = item_types[-1] is Ellipsis
        if not isinstance(raw, list) or (not any_length and len(raw) != len(item_types)):
            return None
        # All items of an option have the type of the first.
        items = [convert(item, item_types[0]) for item in raw]
        if None in items:
            return None
        return tuple(items)
    if annotation == Length:
        return raw if (type(raw) is int and fits(raw)) or (isinstance(raw, str) and is_length(raw)) else None
    if not fits(raw):
        return None
    if annotation is float and type(raw) is int:
        return float(raw)
    if type(raw) is annotation:
        return raw
    return None


def expected(annotation: Any) -> str:
    """An option's type in words for messages, such as "a whole number"."""
    if annotation == Length:
        return "a whole number of steps, or a text such as '2000 samples'"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if get_origin(annotation) is tuple:
        item_types = get_args(annotation)
        plural = {int: "whole numbers", float: "numbers", str: "strings"}[item_types[0]]
        if item_types[-1] is Ellipsis:
            return plural
        return f"{len(item_types)} {plural}"
    return words[annotation]


def fits(value: Any) -> bool:
    """Whether each integer of `value`, a number or a tuple, fits into 64 bits, as integers in TOML must."""
    items = value if isinstance(value, tuple) else (value,)
    # `type` rather than isinstance, because a bool is an int too.
    return all(-(2**63) <= item < 2**63 for item in items if type(item) is int)


def is_length_or_steps(value: Length) -> bool:
    """Whether a value is a length of training: a number of steps, or a text such as "2000 samples"."""
    return isinstance(value, int) or is_length(value)


def convert_all(stated: Mapping[str, Any], types: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert values of JSON to options, by dotted path. `types` are those of `option_types`.

    Returns the options, and a problem for each value of another type than its option. Values of no option are left out.
    """
    options = {path: convert(stated[path], types[path]) for path in types if path in stated}
    wrong = [
        f"{path} is {shown(stated[path])[:80]}, not {expected(types[path])}"
        for path, value in options.items()
        if value is None
    ]
    return options, wrong
