"""Times other launch configurations of the Triton kernels than today's, on one GPU, for a person to choose from.

For each op and shape a grid of candidates takes the place of the functions choosing a configuration in
kernels/megapar_kernels. Each candidate is first compared with torch in fp32, then timed; a wrong one is listed and not
timed. Nothing is tuned when megapar trains: a better candidate is written into the sources by hand.

- norms: elements a thread (8, 16, 32), and with them the warps. Backward also stages of its loop over rows (1, 2, 3:
  rows on their way at a time), in a copy of the kernel with this number in its loop.
- cross entropy: steps, lanes and warps of the statistics; columns and warps of the gradient.
- AdamW: units and warps. RoPE: positions, heads and warps of a tile.

The JSON file is written after every op and shape. A failure at today's configuration ends the program with exit code
70, after all others. --dry_run runs each candidate once on the CPU at tiny shapes, and no candidate may fail there:
with TRITON_INTERPRET=1 the candidates themselves, interpreted, else torch's own ops in their place.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from megapar_kernels import adamw, cross_entropy, norms, rope
from megapar_kernels.backend import Kernels
from rich.table import Table

from benchmarks.kernels import ops
from benchmarks.kernels.measuring import Bench, Inputs, KernelError, brief, check, evaluate, prepare, times
from benchmarks.kernels.ops import LLAMA_8B, TINY, Case, Direction, cases
from benchmarks.report import Session, number, table
from megapar.errors import ConfigError

Config = tuple[int, ...]  # what the functions that choose a configuration return

WARPS = 32  # the most that a program can have

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
    """A configuration and its replacements in the kernel's modules: (module, attribute, new value)."""

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
class Knob:
    """A function of kernels/megapar_kernels choosing a configuration, and the candidates for its place.

    `what` names the kernel, and `direction` the changed time: forward or backward. `names` are the names of a
    configuration's numbers. `values` makes the others to try: from today's, or from `usual` if torch's own ops stand
    in, for then no launch tells today's.
    """

    what: str
    direction: Direction
    module: ModuleType
    function: str
    names: str
    usual: Config
    values: Callable[[Config, Case], Iterable[Config]]
    staged: bool = False


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
    if answers:
        return answers[-1]
    return None


def candidates(bench: Bench, case: Case, knob: Knob, staged: Mapping[int, ModuleType]) -> list[Candidate]:
    """One for each configuration, with today's among them. `staged` are the norms by stages of their backward loop."""
    today = launched(bench, case, knob.module, knob.function)
    values = knob.values(today or knob.usual, case)
    found = []
    for stages, module in staged.items() if knob.staged else [(1, knob.module)]:
        for value in dict.fromkeys([*([] if today is None else [today]), *values]):
            label = ", ".join(f"{name} {size}" for name, size in zip(knob.names.split(), value, strict=True))
            replaced = [replacement(module, knob.function, value)]
            if knob.staged:
                label += f", stages {stages}"
                replaced.append((ops, "norms", module))
            found.append(Candidate(label, value == today and stages == 1, tuple(replaced)))
    return found


def with_stages(stages: int, folder: Path) -> ModuleType:
    """megapar_kernels.norms with a backward kernel loading `stages` rows ahead.

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


def norm_values(tile: Config, _: Case) -> list[Config]:
    """The same tile shared by as many warps as give each thread about 8, 16 or 32 elements."""
    rows, columns = tile[:2]
    return [(rows, columns, min(max(rows * columns // (32 * each), 1), WARPS)) for each in (8, 16, 32)]


def statistics_values(_: Config, case: Case) -> list[Config]:
    """Lanes are 4 or 8 a thread; a tile holds up to 8192 logits."""
    columns = int(case.shape.split("x")[1])
    return [
        (steps, lanes, lanes // (32 * each))
        for lanes in (512, 1024, 2048)
        for steps in (1, 2, 4, 8)
        for each in (4, 8)
        if steps * lanes <= 8192 and lanes <= max(columns, 512)
    ]


def gradient_values(_: Config, case: Case) -> list[Config]:
    """A program holds up to 16384 logits."""
    columns = int(case.shape.split("x")[1])
    values = [(block, block // (32 * each)) for block in (1024, 2048, 4096, 8192, 16384) for each in (8, 16, 32, 64)]
    return [v for v in values if 1 <= v[1] <= WARPS and v[0] <= max(columns, 1024)]


def adamw_values(*_: Any) -> list[Config]:
    """4, 8 or 16 elements a thread: one to four wide accesses to each buffer."""
    return [(warps * 32 * each // adamw.UNIT, warps) for warps in (2, 4, 8, 16) for each in (4, 8, 16)]


def rope_values(tile: Config, case: Case) -> list[Config]:
    """Tiles of half to four times today's positions and half to twice its heads, 4 to 32 pairs a thread."""
    most_heads = int(case.shape.split("(")[1].split("+")[0])
    positions, heads, pairs, _ = tile
    return [
        (p, h, pairs, warps)
        for p in (positions // 2, positions, 2 * positions, 4 * positions)
        for h in (heads // 2, heads, 2 * heads)
        for warps in (2, 4, 8)
        if 4 * 32 * warps <= p * h * pairs <= 32 * 32 * warps and h <= most_heads
    ]


NORM = ("rows columns warps", (1, 4096, 16), norm_values)
NORMS = (
    Knob("forward", "forward", norms, "forward_config", *NORM),
    Knob("backward", "backward", norms, "backward_config", *NORM, staged=True),
)
ROPE = (rope, "config", "positions heads pairs warps", (1, 16, 64, 4), rope_values)
KNOBS: dict[str, tuple[Knob, ...]] = {
    "cross entropy": (
        Knob("statistics", "forward", cross_entropy, "statistics_config", "steps lanes warps", (), statistics_values),
        Knob("gradient", "backward", cross_entropy, "gradient_config", "columns warps", (), gradient_values),
    ),
    "RMSNorm": NORMS,
    "add + RMSNorm": NORMS,
    "AdamW": (Knob("update", "forward", adamw, "config", "units warps", (), adamw_values),),
    "RoPE": (Knob("forward", "forward", *ROPE), Knob("backward", "backward", *ROPE)),
}


def all_cases(options: Options, kernels: Kernels) -> list[Case]:
    """The ops of --only, beginning with the farthest from what others reach. Raises ConfigError if there is none."""
    model = TINY if options.dry_run else LLAMA_8B
    widths = (model.hidden,) if options.dry_run else NORM_COLUMNS
    # Other widths are for norms alone, and other vocabularies and wide norms are not tuned.
    plain = model._replace(others=(0, 0, 0))
    every = [case for case in cases(plain, kernels) if not case.op.endswith("RMSNorm")]
    every += [c for h in widths for c in cases(plain._replace(hidden=h), kernels) if c.op.endswith("RMSNorm")]
    named = [case for op in KNOBS for case in every if case.op == op]
    chosen = [case for case in named if not options.only or any(word in case.op for word in options.only)]
    if not chosen:
        raise ConfigError(f"--only {' '.join(options.only)}: no op that is tuned has such a word in its name")
    return chosen


def try_all(bench: Bench, case: Case, direction: Direction, tried: Iterable[Candidate]) -> list[dict[str, Any]]:
    """Each candidate's time in `direction`, the fastest first; without a time a status other than ok."""
    exact = evaluate(bench, case, case.exact or case.torch, wide=True)
    inputs = Inputs(bench, case, case.ours)
    found = []
    for candidate in tried:
        row: dict[str, Any] = {"config": candidate.label, "today": candidate.today, "ms": None, "status": "ok"}
        try:
            with candidate.chosen():
                row["error"] = check(case, evaluate(bench, case, case.ours), exact)
                if direction == "forward":
                    row["ms"] = bench.watch.median_ms(partial(inputs.forward, case.ours))
                else:
                    row["ms"] = times(bench, inputs, case.ours)[direction]
        except Exception as error:  # a configuration that does not compile, or computes something else
            row["status"] = brief(error)
        found.append(row)
    return sorted(found, key=lambda row: (row["status"] != "ok", row["ms"] or 0.0))


def describe(case: Case, knob: Knob, rows: list[dict[str, Any]], copy: float | None) -> dict[str, Any]:
    """What was found with shares of the measured copy, as it goes into the file."""
    least = case.least[0 if knob.direction == "forward" else 1]
    for row in rows:
        row["share"] = least / row["ms"] / 1e6 / copy if row["ms"] and copy else None
    return {"op": case.op, "shape": case.shape, "what": knob.what, "least_bytes": least, "candidates": rows}


def table_of(result: dict[str, Any]) -> Table:
    lines = []
    for row in result["candidates"]:
        words = (row["config"], "<-- today" if row["today"] else "", row["status"])
        lines.append((*words, number(row["ms"], ".4f"), number(row["share"], ".0%")))
    title = f"{result['op']} {result['shape']}: {result['what']}"
    return table(lines, ("configuration", "", "status"), ("ms", "of copy"), title)


class Tuning(Session):
    """The results of each op and shape, and the file with all of them at any time."""

    def __init__(self, options: Options, bench: Bench, circumstances: dict[str, Any]):
        super().__init__(options, circumstances)
        self.dry_run = options.dry_run
        self.bench = bench
        self.results: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def work(self, case: Case, staged: Mapping[int, ModuleType]) -> None:
        """All knobs of a case, unless the time is up. A failure is kept, and other cases go on."""
        title = f"{case.op} {case.shape}"
        if not self.may_begin(title):
            return
        try:
            for knob in KNOBS[case.op]:
                tried = candidates(self.bench, case, knob, staged)
                rows = try_all(self.bench, case, knob.direction, tried)
                self.results.append(describe(case, knob, rows, self.circumstances["copy_gb_per_second"]))
                self.console.print(table_of(self.results[-1]))
                wrong = [row for row in rows if row["status"] != "ok" and (row["today"] or self.dry_run)]
                self.failed += [f"{title}: {row['config']}: {row['status']}" for row in wrong]
        except Exception as error:  # the kernel fails as it is
            self.failed.append(f"{title}: {brief(error)}")
        self.bench.watch.release()
        self.keep()

    def found(self) -> dict[str, Any]:
        return super().found() | {"results": self.results, "failed": self.failed}


def main(options: Options) -> None:
    """Try all candidates, print a table of each knob, write the JSON file after each case; raises KernelError if a
    kernel fails as it is, or in a dry run with any configuration."""
    bench, kernels, circumstances = prepare(options.dry_run)
    session = Tuning(options, bench, circumstances)
    with tempfile.TemporaryDirectory() as folder:
        staged = {1: norms} | {stages: with_stages(stages, Path(folder)) for stages in (2, 3)}
        for case in all_cases(options, kernels):
            session.work(case, staged)
    session.end()
    if session.failed:
        raise KernelError("; ".join(session.failed))
