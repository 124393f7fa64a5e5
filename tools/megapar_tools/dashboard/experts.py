"""How evenly the experts of a mixture are loaded, as tables for heat maps: layers by steps, and layers by experts."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from megapar.system.typed import is_of
from megapar_tools.dashboard.curves import Curve

_PREFIX = "expert_load/"
_COLUMNS = 200  # of steps; one column has the largest load of its steps
_MOST_EXPERTS = 1024


def is_layer(name: str) -> bool:
    """Return whether the curve of this name is the load of one layer."""
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdecimal()


def tabulate_fullest(curves: Mapping[str, Curve], first: int, last: int) -> dict[str, Any]:
    """Return the load of the fullest expert over the mean, by layer and step; empty without a mixture.

    `steps` are the first steps of the columns.
    """
    layers = sorted((name for name in curves if is_layer(name)), key=lambda name: int(name.removeprefix(_PREFIX)))
    if not layers:
        return {}
    within = np.array(curves[layers[0]].steps, np.int64)
    within = within[(within >= first) & (within <= last)]
    bounds = [int(part[0]) for part in np.array_split(within, min(_COLUMNS, len(within)))] if len(within) else []
    rows = []
    for name in layers:
        steps, values = np.array(curves[name].steps, np.int64), np.array(curves[name].values)
        edges = np.searchsorted(steps, [*bounds, last + 1])
        rows.append([_largest(values[a:b]) for a, b in pairwise(edges)])
    return {"layers": [name.removeprefix(_PREFIX) for name in layers], "steps": bounds, "loads": rows}


def _largest(values: Any) -> float | None:
    return round(float(values.max()), 3) if len(values) and math.isfinite(values.max()) else None


def tabulate_newest(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of each expert over the mean, by layer, from the newest `expert_counts`; empty without them."""
    counts = line.get("expert_counts")
    if not isinstance(counts, dict):
        return {}
    loads = {
        layer: found for layer in sorted(filter(str.isdecimal, counts), key=int) if (found := _over_mean(counts[layer]))
    }
    return {"layers": list(loads), "loads": list(loads.values())} if loads else {}


def _over_mean(row: object) -> Sequence[float]:
    if not isinstance(row, list) or not 0 < len(row) <= _MOST_EXPERTS or not all(is_of(n, int) and n >= 0 for n in row):
        return []
    return [round(n * len(row) / max(1, sum(row)), 3) for n in row]
