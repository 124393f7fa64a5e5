"""The view of a run at the bottom of a terminal: how far it is, when it ends, its loss, speed and memory."""

import math
from datetime import timedelta
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
_LETTERS = ".:-=+*#@"  # of a terminal without Unicode
_MOST = 512  # numbers of a history; then two neighbors become their mean


class History:
    """A number over all steps, in at most `_MOST` means of neighboring steps."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._steps = 1  # of one mean
        self._newest: list[float] = []  # too few for a mean

    def add(self, value: float) -> None:
        """Add the number of the next step."""
        self._newest.append(value)
        if len(self._newest) < self._steps:
            return
        self._means.append(sum(self._newest) / self._steps)
        self._newest = []
        if len(self._means) == _MOST:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._steps *= 2

    def drawn(self, width: int, letters: str = _BLOCKS) -> str:
        """The history in at most `width` letters, from the least number to the largest one; ! is not finite."""
        means = self._means + ([sum(self._newest) / len(self._newest)] if self._newest else [])
        columns = min(width, len(means))
        edges = [column * len(means) // columns for column in range(columns + 1)] if columns else []
        shown = [sum(means[a:b]) / (b - a) for a, b in pairwise(edges)]
        known = [value for value in shown if math.isfinite(value)]
        least, largest = min(known, default=0.0), max(known, default=0.0)
        step = (largest - least) / (len(letters) - 1) or 1.0
        return "".join(letters[round((value - least) / step)] if math.isfinite(value) else "!" for value in shown)


class View:
    """Rows below the lines of a run, on a terminal."""

    def __init__(self, console: Console, total: int, done: int):
        self._console = console
        self._total = total
        self._done = done
        self._losses, self._speeds = History(), History()
        self._line: dict[str, Any] = {}
        self._eta: float | None = None
        self._live = Live(console=console, get_renderable=self.rows, refresh_per_second=4, transient=True)

    def start(self) -> None:
        """Begin to show."""
        self._live.start()

    def stop(self) -> None:
        """Remove the rows. The lines above stay."""
        self._live.stop()

    def step(self, line: dict[str, Any], eta_seconds: float | None) -> None:
        """Take the line of a completed step."""
        self._done, self._line, self._eta = line["step"], line, eta_seconds
        self._losses.add(line["loss"])
        self._speeds.add(line["tokens_per_second"])

    def rows(self) -> RenderableType:
        """What is shown now."""
        line = self._line
        left = "" if self._eta is None else f"{timedelta(seconds=int(self._eta))} left"
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            f"step {self._done}/{self._total}", ProgressBar(total=self._total, completed=self._done, width=40), left
        )
        if not line:
            return bar
        mfu = f", mfu {line['mfu']:.1%}" if line["mfu"] is not None else ""
        memory = f"{line['peak_memory_bytes'] / 2**30:.2f} GiB"
        numbers = Table.grid(padding=(0, 2))
        letters = _LETTERS if self._console.options.ascii_only else _BLOCKS
        width = max(8, min(64, self._console.width - 50))
        numbers.add_row("loss", f"{line['loss']:.4f}", Text(self._losses.drawn(width, letters)))
        numbers.add_row("tokens/s", f"{line['tokens_per_second']:,.0f}{mfu}", Text(self._speeds.drawn(width, letters)))
        numbers.add_row("memory", memory, "")
        return Group(bar, numbers)
