"""Tells what FP8 loses in watched steps (`log.fp8_every`): numbers for curves, and an event for what has grown."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megapar.base.errors import reason_of
from megapar.config.messages import counted
from megapar.linear.fp8_watch import TENSORS
from megapar.observe.observer import Observed, Observer
from megapar.step.state import StepResult
from megapar.system.regular_files import open_regular
from megapar.system.typed import is_of

KEY = "fp8"
"""The key of the table of all products in a line of metrics.jsonl."""

_GROWTH = 2.0  # times the share at the first watch
_LEAST_SHARE = 0.01
_DECIBELS = 3.0  # below those at the first watch
_IN_A_ROW = 2  # watched steps: the sample of a single one may be unlike the others
_MOST_BYTES = 1 << 26  # of metrics.jsonl, in which the first watch is looked for


def line_of(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a line of metrics.jsonl says of a watched step: the table by product, and its worst numbers.

    `fp8_decibels_min` are the least decibels of a product. `fp8_flushed_max` has the largest share that becomes zero,
    of inputs, weights and gradients.
    """
    line: dict[str, Any] = {}
    decibels = [row["decibels"] for row in table.values() if row["decibels"] is not None]
    if decibels:
        line["fp8_decibels_min"] = min(decibels)
    shares = {t: [s for row in table.values() if (s := row[t]["flushed"]) is not None] for t in TENSORS}
    line["fp8_flushed_max"] = {tensor: max(found) for tensor, found in shares.items() if found}
    return line | {KEY: {name: dict(row) for name, row in table.items()}}


class Grown(NamedTuple):
    """A number of the product `matrix` that has become worse since the first watch."""

    matrix: str
    what: str
    first: float
    now: float

    def __str__(self) -> str:
        if self.what == "decibels":
            return f"the product {self.matrix} is {self.now:.1f} dB above its noise, and was {self.first:.1f}"
        of = {"x": "inputs", "weight": "weights", "gradient": "gradients"}[self.what]
        return f"{self.now:.2%} of the {of} of {self.matrix} become zero, and {self.first:.2%} did"

    @property
    def severity(self) -> float:
        """How much worse, for the order of what is told."""
        return self.first - self.now if self.what == "decibels" else 100.0 * (self.now - self.first)


class Fp8Growth(Observer):
    """Compares watched steps with the first one of the run, and calls `event` on rank 0 for what has grown, once.

    Of a resumed run the first one is read from metrics.jsonl.
    """

    def __init__(self, seen: Observed, event: Callable[..., None]):
        self._event = event
        self._speaks = seen.state.ctx.world.first
        self._first = _first_watch(seen.run_dir / "metrics.jsonl") if self._speaks else {}
        self._in_a_row: dict[tuple[str, str], int] = {}
        self._told: set[tuple[str, str]] = set()

    def after_line(self, result: StepResult, line: dict[str, Any]) -> None:
        if not self._speaks or KEY not in line:
            return
        now = dict(_numbers(line[KEY]))
        grown = []
        for place, value in now.items():
            first = self._first.setdefault(place, value)
            self._in_a_row[place] = self._in_a_row.get(place, 0) + 1 if _is_worse(place[1], first, value) else 0
            if self._in_a_row[place] >= _IN_A_ROW and place not in self._told:
                self._told.add(place)
                grown.append(Grown(*place, first, value))
        if grown:
            self._tell(result.step, sorted(grown, key=lambda one: -one.severity))

    def _tell(self, step: int, grown: list[Grown]) -> None:
        worst = grown[0]
        others = sorted({one.matrix for one in grown} - {worst.matrix})
        more = f", and {counted(len(others), 'other product loses', 'other products lose')} more too" if others else ""
        pattern = worst.matrix.partition("|")[0]
        text = f"step {step}: {worst} at the first watch{more}; train.fp8_skip {pattern} keeps it out of FP8"
        self._event("fp8", text, step=step, **worst._asdict(), others=others)


def _is_worse(what: str, first: float, now: float) -> bool:
    if what == "decibels":
        return now < first - _DECIBELS
    return now > max(_GROWTH * first, _LEAST_SHARE)


def _numbers(table: object) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the compared numbers of a table, with their product and what they say. A file may hold anything."""
    for name, row in table.items() if isinstance(table, dict) else ():
        if not isinstance(row, dict):
            continue
        found: dict[str, Any] = {"decibels": row.get("decibels")}
        found |= {t: part.get("flushed") for t in TENSORS if isinstance(part := row.get(t), dict)}
        yield from (((name, what), float(value)) for what, value in found.items() if is_of(value, float))


def _first_watch(path: Path) -> dict[tuple[str, str], float]:
    """Return the numbers of the first watched step in a metrics.jsonl; empty without one. A failure is a warning."""
    try:
        with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            while file.tell() < _MOST_BYTES and (text := file.readline(_MOST_BYTES)):
                if f'"{KEY}": {{'.encode() not in text:
                    continue
                with suppress(ValueError, RecursionError):
                    line: Any = json.loads(text)
                    if isinstance(line, dict):
                        return dict(_numbers(line.get(KEY)))
    except OSError as error:
        words = "%s not read (%s): what FP8 loses is compared with the next watch"
        logging.getLogger(__name__).warning(words, path, reason_of(error))
    return {}
