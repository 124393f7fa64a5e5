"""Sweeps: many cases to prove one thing. Some represent the others in the lanes; the rest run with -m slow."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest


def slow_but(numbers: Iterable[int], cases: Iterable[Any]) -> list[Any]:
    """`cases` for pytest.mark.parametrize. Cases with a place in the list outside of `numbers` are slow. Several
    arguments of a case are a tuple."""
    in_lanes = set(numbers)
    marked = []
    for number, case in enumerate(cases):
        values = case if type(case) is tuple else (case,)  # a NamedTuple is one argument
        marked.append(pytest.param(*values, marks=[] if number in in_lanes else [pytest.mark.slow]))
    assert in_lanes <= set(range(len(marked))), f"there are only {len(marked)} cases"
    return marked


def one_of_each(groups: Iterable[Any]) -> list[int]:
    """The place of the first case of each group, for `slow_but`. `groups` says the group of each case."""
    found: dict[Any, int] = {}
    for number, group in enumerate(groups):
        found.setdefault(group, number)
    return sorted(found.values())


def with_new_values(layouts: Iterable[Any], others: Iterable[Any]) -> list[int]:
    """The places of layouts with a value of an option that neither `others` nor layouts before have."""
    seen = set().union(*map(_values, others))
    found = []
    for number, layout in enumerate(layouts):
        if not _values(layout) <= seen:
            found.append(number)
        seen |= _values(layout)
    return found


def _values(layout: Any) -> set[tuple[str, str]]:
    return {(option.name, str(getattr(layout, option.name))) for option in fields(layout)}
