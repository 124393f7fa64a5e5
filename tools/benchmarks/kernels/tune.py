"""Times other launch configurations of the Triton kernels than today's, on one GPU, for a person to choose from.

For each op and shape a grid of candidates takes the place of the functions that choose a configuration in
kernels/megapar_kernels. Each candidate is first compared with torch in fp32, then timed; a wrong one is listed and not
timed. Nothing is tuned when megapar trains: what is better here is written into the sources by hand.

- norms: elements a thread (8, 16, 32), which decides the warps. Backward also stages of its loop over rows (1, 2, 3:
  rows that are on their way at a time), in a copy of the kernel whose loop asks for them.
- cross entropy: steps, lanes and warps of the statistics; columns and warps of the gradient.
- AdamW: units and warps. RoPE: positions, heads and warps of a tile.

The JSON file is written after every op and shape. What fails at today's configuration ends the program with exit code
70, after all others. --dry_run runs each candidate once on the CPU at tiny shapes, where no candidate may fail: with
TRITON_INTERPRET=1 the candidates themselves, interpreted, else torch's own ops in their place.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import tyro
from megapar_kernels import adamw, cross_entropy, norms, rope
from megapar_kernels.dispatch import interpreting
from rich.console import Console
from rich.table import Table

from benchmarks.kernels import ops
from benchmarks.kernels.measuring import Bench, Inputs, KernelError, brief, check, evaluate, times
from benchmarks.kernels.ops import LLAMA_8B, TINY, Case, Direction, cases
from benchmarks.kernels.timing import Stopwatch
from megapar import device
from megapar.errors import ConfigError, storing
from megapar.launch.reporting import reported
from megapar.system.atomic_files import write_json
from megapar.train.provenance import in_a_line, provenance

Config = tuple[int, ...]  # what the functions that choose a configuration return

WARPS = 32  # the most that a program can have

# Tiles that candidates vary where torch's own ops stand in, so that no launch tells today's.
NORM_TILE: Config = (1, 4096, 16)
ROPE_TILE: Config = (1, 16, 64, 4)

# The loop over rows of the norms' backward kernel, and the same with rows loaded ahead.
ROWS_LOOP = "in range(program * ROW_BLOCK, rows, tl.num_programs(0) * ROW_BLOCK):"
STAGED_LOOP = "in tl.range(program * ROW_BLOCK, rows, tl.num_programs(0) * ROW_BLOCK, num_stages={stages}):"

# Widths of Llama 1B, 8B and 70B; the tokens are those of LLAMA_8B.
NORM_COLUMNS = 2048, 4096, 8192


@dataclass(frozen=True)
class Options:
    """Time launch configurations."""

    dry_run: bool = False
    """Every candidate once on the CPU at tiny shapes, without figures."""
    only: tuple[str, ...] = ()
    """Ops whose names contain one of these words, such as norm; empty means all."""
    minutes: float = 7.5
    """No op is begun after this time; the report names those that were not."""
    json: Path = Path("runs/tune.json")
    """Results go here, after every op and shape."""


@dataclass(frozen=True)
class Candidate:
    """A configuration and what must be replaced so that the kernel takes it: (module, attribute, new value)."""

    label: str
    today: bool
    replaced: tuple[tuple[Any, str, Any], ...]

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """While this lasts, launches take this configuration."""
        with ExitStack() as stack:
            for owner, attribute, value in self.replaced:
                stack.enter_context(mock.patch.object(owner, attribute, value))
            yield


@dataclass(frozen=True)
class Grid:
    """Candidates for one case, and the direction whose time they change."""

    case: Case
    what: str
    direction: Direction
    candidates: tuple[Candidate, ...]


def replacement(module: ModuleType, function: str, value: Config) -> tuple[Any, str, Any]:
    """`module.function` returns `value` whatever it is given."""
    return module, function, lambda *_: value


def launched(bench: Bench, case: Case, module: ModuleType, function: str) -> Config | None:
    """What `module.function` answers when the case is computed, whatever its arguments are; None if it is not asked,
    because torch's own ops stand in."""
    answers: list[Config] = []
    original = getattr(module, function)

    def recording(*args: Any, **named: Any) -> Config:
        answers.append(original(*args, **named))
        return answers[-1]

    with mock.patch.object(module, function, recording):
        evaluate(bench, case, case.ours)
    return answers[-1] if answers else None


def candidates_of(
    module: ModuleType, function: str, names: str, today: Config | None, values: Iterable[Config]
) -> tuple[Candidate, ...]:
    """One for each of `values`, with today's among them. `names` are those of a value's numbers."""
    every = list(dict.fromkeys([*([] if today is None else [today]), *values]))
    return tuple(
        Candidate(
            ", ".join(f"{name} {number}" for name, number in zip(names.split(), value, strict=True)),
            value == today,
            (replacement(module, function, value),),
        )
        for value in every
    )


def with_stages(stages: int, folder: Path) -> ModuleType:
    """megapar_kernels.norms with a backward kernel that loads `stages` rows ahead.

    Triton takes kernels' sources from files, so the changed text is written to `folder`. Raises ValueError if the loop
    is not what this program knows.
    """
    source = Path(norms.__file__).read_text()
    if source.count(ROWS_LOOP) != 1:
        raise ValueError(f"{norms.__file__} has no loop `{ROWS_LOOP}`: write it as it is now into tune.py")
    file = folder / f"norms_with_{stages}_stages.py"
    file.write_text(source.replace(ROWS_LOOP, STAGED_LOOP.format(stages=stages)))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _with_elements(config: Config, elements: int) -> Config:
    """The same tile shared by as many warps as give each thread about `elements`."""
    rows, columns, _ = config
    return rows, columns, min(max(rows * columns // (32 * elements), 1), WARPS)


def norm_grids(bench: Bench, case: Case, variants: dict[int, ModuleType]) -> Iterator[Grid]:
    """`variants`: the norms module by stages of the backward kernel's loop; 1 is the module itself."""
    names = "rows columns warps"
    today = launched(bench, case, norms, "forward_config")
    values = [_with_elements(today or NORM_TILE, elements) for elements in (8, 16, 32)]
    yield Grid(case, "forward", "forward", candidates_of(norms, "forward_config", names, today, values))
    today = launched(bench, case, norms, "backward_config")
    values = [_with_elements(today or NORM_TILE, elements) for elements in (8, 16, 32)]
    found = []
    for stages, module in variants.items():
        for one in candidates_of(module, "backward_config", names, today, values):
            replaced = (*one.replaced, (ops, "norms", module))
            found.append(Candidate(f"{one.label}, stages {stages}", one.today and stages == 1, replaced))
    yield Grid(case, "backward", "backward", tuple(found))


def cross_entropy_grids(bench: Bench, case: Case) -> Iterator[Grid]:
    """Lanes are 4 or 8 a thread; a statistics tile holds up to 8192 logits, a gradient program up to 16384."""
    columns = int(case.shape.split("x")[1])
    statistics = [
        (steps, lanes, lanes // (32 * each)) for lanes in (512, 1024, 2048) for steps in (1, 2, 4, 8) for each in (4, 8)
    ]
    fitting: list[Config] = [v for v in statistics if v[0] * v[1] <= 8192 and v[1] <= max(columns, 512)]
    today = launched(bench, case, cross_entropy, "statistics_config")
    found = candidates_of(cross_entropy, "statistics_config", "steps lanes warps", today, fitting)
    yield Grid(case, "statistics", "forward", found)
    gradient = [(block, block // (32 * each)) for block in (1024, 2048, 4096, 8192, 16384) for each in (8, 16, 32, 64)]
    fitting = [v for v in gradient if 1 <= v[1] <= WARPS and v[0] <= max(columns, 1024)]
    today = launched(bench, case, cross_entropy, "gradient_config")
    found = candidates_of(cross_entropy, "gradient_config", "columns warps", today, fitting)
    yield Grid(case, "gradient", "backward", found)


def adamw_grids(bench: Bench, case: Case) -> Iterator[Grid]:
    """4, 8 or 16 elements a thread: one to four wide accesses to each buffer."""
    values = [(warps * 32 * each // adamw.UNIT, warps) for warps in (2, 4, 8, 16) for each in (4, 8, 16)]
    today = launched(bench, case, adamw, "config")
    yield Grid(case, "update", "forward", candidates_of(adamw, "config", "units warps", today, values))


def rope_grids(bench: Bench, case: Case, most_heads: int) -> Iterator[Grid]:
    """Tiles of half to four times today's positions and half to twice its heads, 4 to 32 pairs a thread."""
    today = launched(bench, case, rope, "config")
    positions_today, heads_today, pairs, _ = today or ROPE_TILE
    values = [
        (positions, heads, pairs, warps)
        for positions in (positions_today // 2, positions_today, 2 * positions_today, 4 * positions_today)
        for heads in (heads_today // 2, heads_today, 2 * heads_today)
        for warps in (2, 4, 8)
        if 4 * 32 * warps <= positions * heads * pairs <= 32 * 32 * warps and heads <= most_heads
    ]
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        names = "positions heads pairs warps"
        yield Grid(case, direction, direction, candidates_of(rope, "config", names, today, values))


def all_cases(options: Options, kernels: Any, folder: Path) -> list[tuple[Case, Callable[[Bench], Iterator[Grid]]]]:
    """Of the ops that --only names, those first that are farthest from their targets, each with what makes its grids.
    Raises ConfigError if --only names none."""
    model = TINY if options.dry_run else LLAMA_8B
    variants = {1: norms} | {stages: with_stages(stages, folder) for stages in (2, 3)}
    every = list(cases(model, kernels))
    found: list[tuple[Case, Callable[[Bench], Iterator[Grid]]]] = []
    for case in every:
        if case.op == "cross entropy" and case.shape.endswith(f"x{model.vocab}"):
            found.append((case, partial(cross_entropy_grids, case=case)))
    for columns in (model.hidden,) if options.dry_run else NORM_COLUMNS:
        for case in cases(model._replace(hidden=columns), kernels):
            if case.op in ("RMSNorm", "add + RMSNorm") and case.shape == f"{model.tokens}x{columns}":
                found.append((case, partial(norm_grids, case=case, variants=variants)))
    for case in every:
        if case.op == "AdamW":
            found.append((case, partial(adamw_grids, case=case)))
        elif case.op == "RoPE":
            most_heads = max(model.heads, model.kv_heads)
            found.append((case, partial(rope_grids, case=case, most_heads=most_heads)))
    chosen = [(c, make) for c, make in found if not options.only or any(word in c.op for word in options.only)]
    if not chosen:
        raise ConfigError(f"--only {' '.join(options.only)}: no op that is tuned has such a word in its name")
    return chosen


def try_grid(bench: Bench, grid: Grid) -> list[dict[str, Any]]:
    """Each candidate's time in the grid's direction, the fastest first; a status other than ok where there is none."""
    case = grid.case
    exact = evaluate(bench, case, case.exact or case.torch, wide=True)
    inputs = Inputs(bench, case, case.ours)
    found = []
    for candidate in grid.candidates:
        row: dict[str, Any] = {"config": candidate.label, "today": candidate.today, "ms": None, "status": "ok"}
        try:
            with candidate.chosen():
                row["error"] = check(case, evaluate(bench, case, case.ours), exact)
                if grid.direction == "forward":
                    row["ms"] = bench.watch.median_ms(partial(inputs.forward, case.ours))
                else:
                    row["ms"] = times(bench, inputs, case.ours)[grid.direction]
        except Exception as error:  # a configuration that does not compile, or computes something else
            row["status"] = brief(error)
        found.append(row)
    return sorted(found, key=lambda row: (row["status"] != "ok", row["ms"] or 0.0))


def describe(grid: Grid, rows: list[dict[str, Any]], copy: float | None) -> dict[str, Any]:
    """A grid's results with shares of the measured copy, as they go into the file."""
    least = grid.case.least[0 if grid.direction == "forward" else 1]
    for row in rows:
        rate = least / row["ms"] / 1e6 if row["ms"] else None
        row["share"] = rate / copy if rate and copy else None
    return {"op": grid.case.op, "shape": grid.case.shape, "what": grid.what, "least_bytes": least, "candidates": rows}


def table_of(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['op']} {result['shape']}: {result['what']}")
    for column in ("configuration", "ms", "of copy", "", "status"):
        table.add_column(column)
    for row in result["candidates"]:
        ms = "-" if row["ms"] is None else f"{row['ms']:.4f}"
        share = "-" if row["share"] is None else f"{row['share']:.0%}"
        table.add_row(row["config"], ms, share, "<-- today" if row["today"] else "", row["status"])
    return table


class Session:
    """What is found about each op and shape, and the file that always holds all of it."""

    def __init__(self, options: Options, bench: Bench, facts: dict[str, Any]):
        self.options = options
        self.bench = bench
        self.facts = facts
        self.began = time.monotonic()
        self.console = Console(width=130)
        self.results: list[dict[str, Any]] = []
        self.not_run: list[str] = []
        self.failed: list[str] = []

    def work(self, case: Case, make_grids: Callable[[Bench], Iterator[Grid]]) -> None:
        """All grids of a case, unless the time is up. What fails is kept, so that other cases go on."""
        title = f"{case.op} {case.shape}"
        if time.monotonic() - self.began >= 60 * self.options.minutes:
            self.not_run.append(title)
            return
        try:
            for grid in make_grids(self.bench):
                rows = try_grid(self.bench, grid)
                self.results.append(describe(grid, rows, self.facts["copy_gb_per_second"]))
                self.console.print(table_of(self.results[-1]))
                wrong = [row for row in rows if row["status"] != "ok" and (row["today"] or self.options.dry_run)]
                self.failed += [f"{title}: {row['config']}: {row['status']}" for row in wrong]
        except Exception as error:  # the kernel fails as it is
            self.failed.append(f"{title}: {brief(error)}")
        self.bench.watch.release()
        self.write()

    def write(self) -> None:
        """The file as things stand."""
        found = {"results": self.results, "not_run": self.not_run, "failed": self.failed}
        write_json(self.options.json, self.facts | found | {"minutes": (time.monotonic() - self.began) / 60})

    def finish(self) -> None:
        """Write and print what was left out; raises KernelError if something failed."""
        self.write()
        for what in self.not_run:
            self.console.print(f"not run, the time was up: {what}")
        minutes = (time.monotonic() - self.began) / 60
        self.console.print(f"{in_a_line(self.facts)}\n{minutes:.1f} minutes, {self.options.json}")
        if self.failed:
            raise KernelError("; ".join(self.failed))


def main(options: Options) -> None:
    """Try all grids, print a table of each, write the JSON file after each case; raises KernelError if a kernel fails
    as it is, or in a dry run with any configuration."""
    if not options.dry_run and not device.cuda_devices():
        raise ConfigError("there is no GPU here; --dry_run tries everything on the CPU, without figures")
    where = device.choose("cpu" if options.dry_run else "cuda", 0, 1)
    device.prepare(where, threads=1, deterministic=False)
    kernels = device.choose_kernels("triton" if not options.dry_run or interpreting() else "torch", where)
    watch = Stopwatch(where, dry_run=options.dry_run)
    bench = Bench(where, torch.float32 if options.dry_run else torch.bfloat16, watch)
    facts = provenance(where) | {"dry_run": options.dry_run, "kernels": asdict(kernels), "dtype": str(bench.dtype)}
    facts["copy_gb_per_second"] = watch.copy_gb_per_second()
    with storing(options.json):
        options.json.parent.mkdir(parents=True, exist_ok=True)
    session = Session(options, bench, facts)
    with tempfile.TemporaryDirectory() as folder:
        for case, make_grids in all_cases(options, kernels, Path(folder)):
            session.work(case, make_grids)
    session.finish()


if __name__ == "__main__":
    with reported():
        main(tyro.cli(Options, description=__doc__))
