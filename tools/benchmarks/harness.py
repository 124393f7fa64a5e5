"""What all benchmarks share: contenders that take turns, tables, and one JSON file with options and circumstances.

A benchmark is a module with `Options`, its flags, and `measure(options)`, which returns `Found`. Its docstring is the
help of `benchmark.py NAME`. A workload that several contenders do in turns is a `Case`.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.counting import cost, in_turn, spread
from benchmarks.ranks import BenchmarkError, run_ranks, synchronize
from megapar.base.errors import storing
from megapar.observe.provenance import in_a_line, provenance
from megapar.system.atomic_files import write_json

T = TypeVar("T")
WIDTH = 200  # of what is printed: narrower, numbers would be cut


@dataclass(frozen=True, kw_only=True)
class Output:
    """The flag of every benchmark."""

    json: Path | None = None
    """Write all numbers to this file."""


class Found(NamedTuple):
    """What a benchmark measured: the content of its JSON file, what is printed, and why the numbers are worthless.

    Without `shown` the tables are those of `tables(numbers)`. `circumstances` take the place of this CPU's in the file.
    """

    numbers: Mapping[str, Any]
    shown: Sequence[Table | str] = ()
    problems: Sequence[str] = ()
    circumstances: Mapping[str, Any] = {}


Contender = Callable[[], Any]
"""Does the work of a case once."""


class Turns(NamedTuple):
    """One contender's seconds on the clock and of CPU time in the rounds that count, and its notes of all rounds."""

    wall: list[float]
    cpu: list[float]
    notes: list[Any]


@dataclass(frozen=True)
class Case:
    """A workload: contenders by name, which take turns for `warmup` rounds and for `rounds` that count.

    `note` makes of a name and what this contender returned what is kept of the turn, after the time of the turn has
    ended. `check` gets the notes of each round by contender, and raises BenchmarkError if they differ.
    """

    contenders: Mapping[str, Contender]
    rounds: int
    warmup: int = 1
    note: Callable[[str, Any], Any] = lambda name, result: result
    check: Callable[[Mapping[str, Any]], None] = lambda notes: None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    world: int = 1
    """Processes that measure together. A turn begins and ends when all of them are there."""
    bar: bool = False
    """Show on stderr how many rounds are done: for contenders that are processes of their own."""

    def measure(self) -> dict[str, Turns]:
        """Return the turns of every contender in this process."""
        found = {name: Turns([], [], []) for name in self.contenders}
        numbers = range(self.warmup + self.rounds)
        for number in progress(numbers) if self.bar else numbers:
            for name in in_turn(found, number):
                synchronize(self.world, self.device)
                spent, result = cost(partial(self._turn, self.contenders[name]))
                if number >= self.warmup:
                    found[name].wall.append(spent.wall)
                    found[name].cpu.append(spent.cpu)
                found[name].notes.append(self.note(name, result))
            self.check({name: turns.notes[-1] for name, turns in found.items()})
        return found

    def _turn(self, contender: Contender) -> Any:
        result = contender()
        synchronize(self.world, self.device)
        return result


def on_ranks(world: int, make: Callable[[torch.device], Case]) -> list[dict[str, Turns]]:
    """Make a case on each of `world` forked processes, measure it there, and return the turns by rank."""
    ranks = run_ranks(world, "cpu", lambda device: make(device).measure())
    return [{name: Turns(*turns) for name, turns in rank.items()} for rank in ranks]


def progress(items: Iterable[T]) -> Iterable[T]:
    """Yield the items, with a bar on stderr that shows how many are done."""
    return track(list(items), "measuring", console=Console(stderr=True))


def _cells(row: Mapping[str, Any], within: str = "") -> dict[str, str]:
    """The cells of a row by column. Numbers in a list are rounds, and other lists are for the file alone."""
    cells: dict[str, str] = {}
    for name, value in row.items():
        column = f"{within}, {name}" if within else name
        if isinstance(value, list) and value and all(isinstance(each, int | float) for each in value):
            value = spread(value)
        if isinstance(value, dict) and value.keys() == {"median", "min", "max"}:
            median, least, most = (figure(value[key], column) for key in ("median", "min", "max"))
            value = median if least == most else f"{median} ({least}-{most})"
        if isinstance(value, dict):
            cells |= _cells(value, column)
        elif not isinstance(value, list | tuple):
            cells[f"{column}, MiB" if "bytes" in column else column] = figure(value, column)
    return cells


def figure(value: Any, column: str = "") -> str:
    """Return a number or word as a table shows it: bytes in MiB, and a dash for what was not measured."""
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return str(value)
    if "bytes" in column:
        return f"{value / 2**20:,.1f}"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> Table:
    """Build a table with a column for every number and word of the rows, those within dictionaries among them.

    Medians stand beside their ranges, bytes are in MiB.
    """
    found = [_cells(row) for row in rows]
    columns = dict.fromkeys(name for row in found for name in row)
    shown = Table(title=title or None)
    for name in columns:
        shown.add_column(name, justify="left" if any(isinstance(row.get(name), str) for row in rows) else "right")
    for row in found:
        shown.add_row(*(row.get(name, "") for name in columns))
    return shown


def tables(numbers: Mapping[str, Any]) -> list[Table]:
    """Build a table of each list of rows, or dictionary of rows by name, and one of all other numbers."""
    found = []
    others = {}
    for name, value in numbers.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            found.append(table(value, name))
        elif isinstance(value, dict) and value and all(isinstance(row, dict) for row in value.values()):
            found.append(table([{name: key, **row} for key, row in value.items()]))
        else:
            others[name] = value
    return [*found, table([others])] if _cells(others) else found


class Report:
    """The tables and the file of a benchmark. `options` are its `Output`, `circumstances` what `provenance` found."""

    def __init__(self, options: Any, circumstances: Mapping[str, Any]):
        self.file: Path | None = options.json
        # Paths are of this machine, and change no figure.
        given = {name: str(value) for name, value in asdict(options).items() if not isinstance(value, Path)}
        self.circumstances = {**circumstances, "options": given}
        self.console = Console(width=WIDTH, highlight=False)

    def write(self, numbers: Mapping[str, Any]) -> None:
        """Replace the file, if one is wanted. Raises StorageError."""
        if self.file:
            with storing(self.file):
                self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, {**self.circumstances, **numbers})

    def finish(self, numbers: Mapping[str, Any], shown: Iterable[Table | str]) -> None:
        """Print tables and lines, then the circumstances, and write the file."""
        for one in shown:
            self.console.print(one)
        self.console.print(in_a_line(self.circumstances))
        self.write(numbers)


@dataclass
class Session:
    """A report that grows for `options.minutes`. After each measurement all results so far are written, so nothing is
    lost whenever the program is ended."""

    options: Any
    circumstances: dict[str, Any]
    not_run: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.report = Report(self.options, self.circumstances)

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def may_begin(self, title: str) -> bool:
        """Return whether there is time left. If not, the report names `title` as not run."""
        if self.minutes < self.options.minutes:
            return True
        self.not_run.append(title)
        return False

    def found(self) -> dict[str, Any]:
        """Return all results so far. Subclasses add to them."""
        return {"minutes": self.minutes, "not_run": self.not_run}

    def keep(self) -> None:
        """Write what is known."""
        self.report.write(self.found())

    def end(self, *shown: Table | str, problems: Sequence[str] = ()) -> Found:
        """Return everything, and name what was not run."""
        missing = [f"not run, the time was up: {what}" for what in self.not_run]
        lines = (*shown, *missing, f"{self.minutes:.1f} minutes, {self.options.json}")
        return Found(self.found(), lines, problems, self.circumstances)


def run(measure: Callable[[Any], Found], options: Any) -> None:
    """Measure, print, write the file. Raises BenchmarkError if the numbers are worthless."""
    circumstances = provenance(torch.device("cpu"))
    found = measure(options)
    report = Report(options, {**circumstances, **found.circumstances})
    report.finish(found.numbers, found.shown or tables(found.numbers))
    if found.problems:
        raise BenchmarkError("\n".join(found.problems))
