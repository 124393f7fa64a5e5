"""The numbers of metrics.jsonl by name, read further as the file grows."""

import json
import math
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megapar.base.errors import DataError, reason_of
from megapar.observe.sinks.base import scalars
from megapar.system.regular_files import open_regular
from megapar.system.typed import is_of

_AT_ONCE = 1 << 24  # bytes of a read
# A run of a million steps writes half of it. Of a longer file the end is read.
_MOST_BYTES = 1 << 30
_LONGEST_LINE = 1 << 22  # a longer line is passed over: the one with a number of each of 100,000 ranks is half as long
_MOST_NAMES = 1000
_NOT_FINITE = ("loss", "grad_norm")
SUMMED = ("tokens", "step_seconds")


class Curve:
    """One number over the steps, in ascending order."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def add(self, step: int, value: float) -> None:
        """Add the number of a step. Later numbers of a step replace earlier ones."""
        self._go_back(step)
        self.steps.append(step)
        self.values.append(value)

    def add_to_sum(self, step: int, value: float) -> None:
        """Add the sum of the numbers up to a step, where `value` is that of the step."""
        self._go_back(step)
        self.steps.append(step)
        self.values.append(value + (self.values[-1] if self.values else 0.0))

    def _go_back(self, step: int) -> None:
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def thinned(self, first: int, last: int, points: int) -> tuple[list[int], list[float]]:
        """The numbers of the steps first..last. Of many, the least and the largest of each bin: no peak is lost.

        Returns at most `points` numbers, and one on either side of the range, so a line goes on to its edges.
        """
        steps, values = np.array(self.steps, np.int64), np.array(self.values)
        begin = max(0, int(np.searchsorted(steps, first)) - 1)
        end = int(np.searchsorted(steps, last, "right")) + 1
        steps, values = steps[begin:end], values[begin:end]
        if len(steps) > points:
            kept: set[int] = {0, len(steps) - 1}
            for some in np.array_split(np.arange(len(steps)), max(1, (points - 2) // 2)):
                # Values that are not finite come first: they are what a reader looks for.
                bad = some[~np.isfinite(values[some])]
                kept |= (
                    {int(some[np.argmin(values[some])]), int(some[np.argmax(values[some])])}
                    if not len(bad)
                    else {
                        int(bad[0]),
                        int(bad[-1]),
                    }
                )
            chosen = sorted(kept)
            steps, values = steps[chosen], values[chosen]
        return steps.tolist(), values.tolist()


class Curves:
    """The curves of a metrics.jsonl, which need not be there yet."""

    def __init__(self, path: Path):
        self.path = path
        self._start_over()

    def _start_over(self) -> None:
        self.by_name: dict[str, Curve] = {}
        self.sums = {name: Curve() for name in SUMMED}  # over the steps up to each step
        self.newest: dict[str, Any] = {}  # the newest line of each kind, by its keys that are no scalars too
        self.counted_step = 0  # of the newest expert_counts
        self.step_seconds = 0.0  # of all steps
        self.data_seconds = 0.0
        self.bytes_left_out = 0  # from the beginning of a file that is too long
        self.changed = 0.0  # when the file got its newest line, in seconds since 1970
        self._inode = -1
        self._read = 0

    def update(self) -> None:
        """Read what the file has got since the last call. Raises DataError if it cannot be read."""
        try:
            with open(open_regular(self.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                found = os.fstat(file.fileno())
                # A run that goes back to a checkpoint replaces the file by a shorter one.
                if found.st_ino != self._inode or found.st_size < self._read:
                    self._start_over()
                self._inode, self.changed = found.st_ino, found.st_mtime
                if found.st_size - self._read > _MOST_BYTES:
                    self._read = self.bytes_left_out = found.st_size - _MOST_BYTES
                file.seek(self._read)
                for line in self._lines(file):
                    self._add(line)
        except (FileNotFoundError, NotADirectoryError):
            self._start_over()
        except OSError as error:
            raise DataError(f"{self.path}: {reason_of(error)}") from error

    def _lines(self, file: Any) -> Iterator[dict[str, Any]]:
        """The whole lines from here on. The end of a line that is being written is read at the next call."""
        left = b""
        while data := file.read(_AT_ONCE):
            *whole, left = (left + data).split(b"\n")
            for text in whole:
                self._read += len(text) + 1
                if len(text) > _LONGEST_LINE:
                    continue
                with suppress(ValueError, RecursionError):
                    line = json.loads(text)
                    if isinstance(line, dict) and is_of(line.get("step"), int):
                        yield line
            if len(left) > _LONGEST_LINE:
                self._read += len(left)
                left = b""  # what comes before the next line's end is no JSON

    def _add(self, line: dict[str, Any]) -> None:
        step = line["step"]
        self.newest |= line
        if "expert_counts" in line:
            self.counted_step = step
        # A number that JSON has not, as of a loss that is not finite, is null in the file.
        line = line | {name: math.nan for name in _NOT_FINITE if line.get(name, 0) is None}
        # Python reads numbers of any length.
        numbers = {name: value for name, value in scalars(line) if isinstance(value, float) or is_of(value, int)}
        sent = [value for name, value in numbers.items() if name.startswith("comm_bytes/")]
        if len(sent) > 1:
            numbers["comm_bytes"] = sum(sent)
        if "loss" in numbers:
            seconds = [numbers.get(name, 0.0) for name in ("step_seconds", "data_seconds")]
            if all(map(math.isfinite, seconds)):
                self.step_seconds += seconds[0]
                self.data_seconds += seconds[1]
            for name in SUMMED:
                value = numbers.get(name, 0.0)
                self.sums[name].add_to_sum(step, value if math.isfinite(value) else 0.0)
        for name, value in numbers.items():
            if name not in self.by_name and len(self.by_name) == _MOST_NAMES:
                continue
            self.by_name.setdefault(name, Curve()).add(step, value)
