"""What every benchmark does with what it found: tables of one kind, and a JSON file with options and circumstances."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megapar.base.errors import storing
from megapar.observe.provenance import in_a_line
from megapar.system.atomic_files import write_json

WIDTH = 200  # of what is printed: narrower, numbers would be cut


def number(value: float | None, form: str) -> str:
    """A figure as text; what was not measured is a dash."""
    if value is None:
        return "-"
    return format(value, form)


def table(
    rows: Iterable[Sequence[object]], words: Sequence[str], numbers: Sequence[str], title: str = "", sections: int = 0
) -> Table:
    """Columns `words`, then columns `numbers`, aligned to the right. A line is drawn between rows with different first
    `sections` cells."""
    shown = Table(title=title or None)
    for name in words:
        shown.add_column(name)
    for name in numbers:
        shown.add_column(name, justify="right")
    before: Sequence[object] = ()
    for row in rows:
        if before and before[:sections] != row[:sections]:
            shown.add_section()
        shown.add_row(*map(str, row))
        before = row
    return shown


class Report:
    """The tables and the file of a benchmark. `options` are the program's, with a field `json`, and `facts` what
    `provenance` found."""

    def __init__(self, options: Any, circumstances: Mapping[str, Any]):
        self.file: Path | None = options.json
        # Paths are of this machine, and change no figure.
        given = {name: str(value) for name, value in asdict(options).items() if not isinstance(value, Path)}
        self.circumstances = {**circumstances, "options": given}
        self.console = Console(width=WIDTH, highlight=False)

    def write(self, found: Mapping[str, Any]) -> None:
        """Replace the file, if one is wanted. Raises StorageError."""
        if self.file:
            with storing(self.file):
                self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, {**self.circumstances, **found})

    def finish(self, found: Mapping[str, Any], *shown: Table | str) -> None:
        """Print tables and lines, then the circumstances, and write the file."""
        for one in shown:
            self.console.print(one)
        self.console.print(in_a_line(self.circumstances))
        self.write(found)


class Session(Report):
    """A report growing for `options.minutes`. After each measurement all results so far are written, so nothing is lost
    whenever the program is ended."""

    def __init__(self, options: Any, circumstances: Mapping[str, Any]):
        super().__init__(options, circumstances)
        self.began = time.monotonic()
        self.limit = options.minutes
        self.not_run: list[str] = []

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def may_begin(self, title: str) -> bool:
        """Whether there is time left. If not, the report names `title` as not run."""
        if self.minutes < self.limit:
            return True
        self.not_run.append(title)
        return False

    def found(self) -> dict[str, Any]:
        """All results so far. Subclasses add to them."""
        return {"minutes": self.minutes, "not_run": self.not_run}

    def keep(self) -> None:
        """Write what is known."""
        self.write(self.found())

    def end(self, *shown: Table | str) -> None:
        """Print tables, what was not run and the circumstances; write the file."""
        missing = [f"not run, the time was up: {what}" for what in self.not_run]
        self.finish(self.found(), *shown, *missing, f"{self.minutes:.1f} minutes, {self.file}")
