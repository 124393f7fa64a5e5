"""The color of each part of a step and of each axis, the same on pages and in pictures."""

from typing import NamedTuple


class Shade(NamedTuple):
    """A color on a light background, and on a dark one."""

    light: str
    dark: str


# Actions of a pipeline, a shade for each chunk of a rank. Texts in the boxes of the first two are white, else black; on
# a dark page dark, else light.
CHUNKS = {
    "F": (
        Shade("#174a86", "#5b9be6"),
        Shade("#3b7cc4", "#9cc4f2"),
        Shade("#78ade3", "#2f5f96"),
        Shade("#b0d1f3", "#24466d"),
    ),
    "B": (
        Shade("#22692a", "#57b35e"),
        Shade("#479a4b", "#98d49c"),
        Shade("#7cc07f", "#2c6b31"),
        Shade("#b3ddb5", "#214d25"),
    ),
    "I": (
        Shade("#0f6b6b", "#4fb8b2"),
        Shade("#2f9c97", "#93d8d3"),
        Shade("#74c4bd", "#216662"),
        Shade("#b2e0dc", "#194a48"),
    ),
    "W": (
        Shade("#9a5b06", "#d9953a"),
        Shade("#cf8420", "#edc083"),
        Shade("#e8b468", "#7a4d12"),
        Shade("#f5d9ab", "#59390f"),
    ),
}
# Parts of a step (`megapar_tools.trace.profile`), then parts of a run's time (`megapar_tools.dashboard.status`).
PARTS = {
    "forward": CHUNKS["F"][0],
    "backward": CHUNKS["B"][0],
    "I": CHUNKS["I"][0],
    "W": CHUNKS["W"][0],
    "optimizer": Shade("#6a3d9a", "#a67ddb"),
    "data": Shade("#8c6d46", "#b3946c"),
    "slowest": Shade("#c62828", "#ef6660"),
    "idle": Shade("#e3e3e3", "#3a4352"),
    "host": Shade("#9e9e9e", "#7d8796"),
    "steps": Shade("#2f6fde", "#6c9bf0"),
    "saving": Shade("#1c8c8c", "#4fb8b2"),
    "between starts": Shade("#d1495b", "#f08795"),
    "other": Shade("#b6bdc8", "#566173"),
}
AXES = {
    "tp": Shade("#d98e00", "#f0b040"),
    "pp": Shade("#e0603c", "#f58a68"),
    "cp": Shade("#0b93b8", "#42bfe0"),
    "dp": Shade("#5b8c1a", "#96c454"),
    "grad": Shade("#cc3d92", "#ea74bd"),
    "ep": Shade("#6b4fbf", "#a08af0"),
    "etp": Shade("#b08c00", "#e0c04a"),
    "expert_grad": Shade("#a3195b", "#d95f98"),
    "tied": Shade("#4a7fa5", "#8ab6d6"),
    "world": Shade("#546e7a", "#93a9b5"),
}
OTHER_AXIS = Shade("#7a6a53", "#bca98c")


def find_axis(name: str) -> Shade:
    """Return the color of an axis; axes without one of their own share one."""
    return AXES.get(name, OTHER_AXIS)
