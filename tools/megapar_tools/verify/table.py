"""Differences as text for people."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from megapar_tools.verify.compare import Difference

_SHOWN = 10
_KINDS = ("initial weight", "gradient", "weight", "value")


def first_seen(difference: Difference) -> tuple[int, int, float]:
    """For sorting: the earliest step, gradients before weights, and the largest excess."""
    return difference.step, _KINDS.index(difference.kind), -difference.excess


def failures(differences: Sequence[Difference]) -> list[str]:
    """A line for each of the first differences beyond what is allowed, and one for the number of the others.

    A parameter is named once, at its earliest difference.
    """
    by_name: dict[str, Difference] = {}
    for difference in sorted((each for each in differences if not each.passed), key=first_seen):
        by_name.setdefault(difference.name, difference)
    lines = [f"    {difference.sentence()}" for difference in by_name.values()]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"    and {len(lines) - _SHOWN} more"]
    return lines


def as_table(by_layout: Mapping[str, Sequence[Difference]]) -> str:
    """A row for each parameter: noise and largest difference of its gradient and of its weight, and the layout.

    Both are relative to the norm, at the step with the largest excess.
    """
    table = Table("parameter", "gradient", "noise", "layout", "weight", "noise", "layout", box=None, pad_edge=False)
    names = dict.fromkeys(
        each.name for differences in by_layout.values() for each in differences if each.kind in ("gradient", "weight")
    )
    for name in names:
        cells: list[str] = []
        for kind in ("gradient", "weight"):
            cells += _cells(name, kind, by_layout)
        table.add_row(name, *cells)
    console = Console(width=160)
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines()) + "\n"


def _cells(name: str, kind: str, by_layout: Mapping[str, Sequence[Difference]]) -> list[str]:
    """Largest difference, noise, and the name of its layout."""
    found = [
        (each, layout)
        for layout, differences in by_layout.items()
        for each in differences
        if (each.name, each.kind) == (name, kind)
    ]
    if not found:
        return ["", "", ""]
    worst, layout = max(found, key=lambda pair: pair[0].excess)
    norm = worst.norm or 1.0
    return [f"{worst.difference / norm:.1e}", f"{worst.noise / norm:.1e}", layout]
