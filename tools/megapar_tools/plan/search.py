"""Ranks the layouts of a model on a number of GPUs by predicted step time, within their memory."""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megapar.base.errors import ConfigError
from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.pipeline.schedules import find
from megapar_tools.plan.estimate import Best, Estimator
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.memory import RankReport
from megapar_tools.plan.pipeline_times import microbatches_simulated
from megapar_tools.plan.space import Candidate, Space, layout_of
from megapar_tools.plan.step_time import StepTime
from megapar_tools.plan.verdict import for_uneven_experts

_ALL = 600
"""Up to so many layouts each is planned exactly. More are estimated first."""
_SHORTLIST = 300
"""How many of the layouts with the shortest estimated steps are planned, if so many do not fit."""
_ENOUGH = 60
"""How many of them need fit."""
_OF_A_GRID = 3
"""How many of them may be of one grid with one recomputation, so that an error of the estimate hides no other grid.
More rows to show are no reason for more: what is planned first would be variants of fewer grids."""
_WITHIN = 1.6
"""Layouts with longer estimated steps than the shortest, times this, are looked at only if too few others fit."""
_FASTEST = 3
"""So many layouts have their neighbors planned. The first may be full, and the second take the same time with less."""
_CLOSE = 1.05
"""A grid comes close if its fastest layout takes at most so many times as long as the fastest of all."""
_SLACK = 1.05
"""Estimated bytes may be so many times those that fit."""
_SOONEST = 0.9
"""A simulated step is expected to take at least so many times its planned seconds."""
_MOST_ACTIONS = 400_000
"""Of all simulated layouts. A few of 64 pipeline ranks have as many. Without a limit 100 of them would take long."""
_ROUNDS = 3
"""Rounds of a pipeline that show what its ranks keep at most. In longer steps the same repeats."""


class Planner(Protocol):
    """Plans one layout. `config` is validated."""

    def memory(self, config: Config) -> RankReport:
        """The memory of the fullest rank. Raises ConfigError if the schedule cannot be made."""

    def time(self, config: Config) -> StepTime:
        """Return the estimated time of a step, quickly and up to a tenth off."""

    def simulated(self, config: Config) -> StepTime:
        """Return the simulated time of a step, more exactly than `time` and more slowly."""


@dataclass(frozen=True)
class Row:
    """A planned layout. `time` is None if it does not fit, unless it is the given one.

    `config` has derived values, `options_from` has the options as they would be given.
    """

    layout: Candidate
    options_from: Config
    config: Config
    report: RankReport
    time: StepTime | None
    fits: bool
    given: bool = False

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory of the fullest rank."""
        return self.report.total

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step. Raises ValueError if no time was planned."""
        if self.time is None:
            raise ValueError("the time of a layout that does not fit is not planned")
        return self.time.seconds


@dataclass
class Found:
    """What a search has found. `rows` are those that fit, the fastest first."""

    rows: list[Row] = field(default_factory=list)
    given: Row | None = None
    given_problem: str = ""
    """Why the given config cannot run on the searched number of GPUs, else ""."""
    too_large: list[Row] = field(default_factory=list)
    """The planned layouts that do not fit, the smallest first."""
    estimated_too_large: int = 0
    """The layouts that do not fit by an estimate, and were not planned."""
    slower: int = 0
    """The layouts that were not planned because others take less time by an estimate."""


Progress = Callable[[Iterable[Candidate], int, str], Iterable[Candidate]]
"""Shows how far a loop has come: called with what it runs over, how many they are, and what happens to them."""


def without_progress(items: Iterable[Candidate], _count: int, _text: str) -> Iterable[Candidate]:
    return items


def search(
    space: Space,
    estimator: Estimator,
    planner: Planner,
    hardware: Hardware,
    given: tuple[Config, Config] | None,
    top: int,
    progress: Progress = without_progress,
) -> Found:
    """Plan the layouts of `space` that may be among the `top` fastest, and the config `given`.

    `given` is the user's config, and the same with derived values.

    The result does not depend on the order of enumeration: equally fast layouts are ordered by `Candidate`.
    """
    run = _Search(space, estimator, planner, hardware, top)
    found = run.found
    if given is not None:
        found.given = run.given(*given)
    run.plan_shortlist(progress)
    run.plan_neighbors(progress)
    run.confirm(progress)
    run.place_given()
    found.too_large.sort(key=lambda row: (row.memory_bytes, row.layout))
    planned = len(found.rows) + len(found.too_large)
    found.slower = max(len(space) - planned - found.estimated_too_large, 0)
    return found


class _Search:
    """The state of `search`."""

    def __init__(self, space: Space, estimator: Estimator, planner: Planner, hardware: Hardware, top: int):
        self.space = space
        self.estimator = estimator
        self.planner = planner
        self.limit = hardware.usable_bytes
        self.host_limit = hardware.host_bytes
        self.top = top
        self.found = Found()
        self.seen: set[Candidate] = set()
        self.planned: list[Row] = []
        """Those that fit, the fastest first, by `Planner.time`."""
        self.simulated: dict[Candidate, Row] = {}
        """Those of them with the time by simulation."""
        self.best = Best(0, math.inf)

    def plan_shortlist(self, progress: Progress) -> None:
        """Plan all layouts if they are few, else those with the shortest estimated steps."""
        if len(self.space) <= max(_ALL, self.top):
            layouts = sorted(layout for grid in self.space.grids for layout in grid.layouts())
            for layout in progress(layouts, len(layouts), "planning all layouts"):
                self.add(layout)
            return
        for within in (_WITHIN, math.inf):
            layouts = self.shortlist(within)
            for layout in progress(layouts, len(layouts), "planning layouts"):
                self.add(layout)
                if len(self.planned) >= max(_ENOUGH, 3 * self.top):
                    break
            if len(self.planned) >= self.top:
                return
        if not self.seen and self.best.smallest is not None:
            # Nothing fits by the estimate. How much the smallest lacks is planned for the user.
            self.add(self.best.smallest.layout)

    def shortlist(self, within: float) -> list[Candidate]:
        """The layouts with the shortest estimated steps."""
        best = self.best = Best(_OF_A_GRID, within)
        grids = self.space.grids
        self.found.estimated_too_large = sum(self.estimator.of_grid(grid, _SLACK * self.limit, best) for grid in grids)
        layouts = [estimate.layout for estimate in best.sorted() if estimate.layout not in self.seen]
        return layouts[: max(_SHORTLIST, 6 * self.top)]

    def plan_neighbors(self, progress: Progress) -> None:
        """Plan what differs in one part from the fastest layouts, for the estimate may have missed something.

        Of each grid that comes close, all schedules are planned. The estimate cannot tell some of them apart, so one
        alone, with several numbers of stages, may be all that the shortlist has of a grid.
        """
        while self.planned:
            self.simulate(progress)
            layouts = {near for row in self.found.rows[:_FASTEST] for near in _neighbors(row.layout, self.space)}
            for row in self.fastest_of_grids():
                layouts.update(_other_schedules(row.layout, self.space))
            unseen = sorted(layouts - self.seen)
            if not unseen:
                return
            for layout in progress(unseen, len(unseen), "planning neighbors of the fastest"):
                self.add(layout)

    def simulate(self, progress: Progress) -> None:
        """Time the fastest rows by simulation, until no other is expected among the first `top`.

        If they have too many actions, the others keep the time of `Planner.time`.
        """
        simulated: list[Row] = []
        actions = 0
        layouts = [row.layout for row in self.planned]
        for row, _ in zip(self.planned, progress(layouts, len(layouts), "simulating the fastest"), strict=True):
            actions += _simulated_actions(row.config)
            is_expected = len(simulated) < self.top or _SOONEST * row.seconds < simulated[self.top - 1].seconds
            if not is_expected or (simulated and actions > _MOST_ACTIONS):
                break
            insort(simulated, self.exact(row), key=_rank)
        self.found.rows = sorted([*simulated, *self.planned[len(simulated) :]], key=_rank)

    def exact(self, row: Row) -> Row:
        """`row` with the time by simulation."""
        if row.layout not in self.simulated:
            self.simulated[row.layout] = replace(row, time=self.planner.simulated(row.config))
        return self.simulated[row.layout]

    def fastest_of_grids(self) -> list[Row]:
        """The fastest row of each grid that comes close."""
        limit = _CLOSE * self.found.rows[0].seconds
        fastest: dict[tuple[int, ...], Row] = {}
        for row in self.found.rows:
            if row.seconds <= limit:
                fastest.setdefault(_grid_of(row.layout), row)
        return list(fastest.values())

    def confirm(self, progress: Progress) -> None:
        """Plan the memory of the first rows for the whole step. Until here it is that of `_ROUNDS` of the pipeline."""
        confirmed: list[Row] = []
        waiting = list(self.found.rows)
        layouts = [row.layout for row in waiting[: self.top]]
        for _ in progress(layouts, len(layouts), "planning whole steps"):
            while waiting:
                row = waiting.pop(0)
                row = replace(row, report=self.planner.memory(row.config))
                if self.fits(row.config, row.report):
                    confirmed.append(row)
                    break
                self.found.too_large.append(replace(row, fits=False))
        self.found.rows = [*confirmed, *waiting]

    def place_given(self) -> None:
        """Put the given row among the others, if it fits, in place of an equal one."""
        given = self.found.given
        if given is None or not given.fits:
            return
        rows = [row for row in self.found.rows if row.config != given.config]
        insort(rows, given, key=_rank)
        self.found.rows = rows

    def add(self, layout: Candidate) -> None:
        """Plan a layout, and put it into its place among the others."""
        self.seen.add(layout)
        try:
            config = self.space.check(layout)
            report = self.planner.memory(_shortened(config))
            fits = self.fits(config, report)
            time = self.planner.time(config) if fits else None
        except ConfigError as error:
            self.space.reject(error, 1)
            return
        row = Row(layout, layout.of(self.space.base), config, report, time, fits)
        if fits:
            insort(self.planned, row, key=_rank)
        else:
            self.found.too_large.append(row)

    def fits(self, config: Config, report: RankReport) -> bool:
        """Whether a layout fits, also if its experts get uneven numbers of tokens."""
        on_host = report.on_host <= self.host_limit
        return on_host and report.total + for_uneven_experts(config, report) <= self.limit

    def given(self, options: Config, config: Config) -> Row:
        """The row of the given config. It has a time even if it does not fit."""
        report = self.planner.memory(config)
        fits = self.fits(config, report)
        return Row(layout_of(config), options, config, report, self.planner.simulated(config), fits, given=True)


def _rank(row: Row) -> tuple[float, Candidate]:
    """What rows are sorted by. Of equally fast ones the simplest comes first."""
    return row.seconds, row.layout


def _simulated_actions(config: Config) -> int:
    """How many forward passes are simulated for the time of a layout."""
    parallel = config.parallel
    # With ZeRO-2 and 3, layers are actions of their own.
    parts = config.model.num_hidden_layers if config.optimizer.zero_stage >= 2 else parallel.pp * parallel.vpp
    return parts * sum(microbatches_simulated(config))


def _shortened(config: Config) -> Config:
    """`config` with a step of fewer micro-batches, if it has many, and its schedule repeats the same for each round."""
    parallel = config.parallel
    enough = _ROUNDS * parallel.pp
    schedule = find(parallel.schedule)
    if not schedule.repeats or schedule.keeps_all or num_microbatches(config) < enough + parallel.pp:
        return config
    # As many more as the whole step has beyond full rounds.
    micro_batches = enough + num_microbatches(config) % parallel.pp
    samples = micro_batches * config.train.micro_batch_size * parallel.dp
    return replace(config, train=replace(config.train, global_batch_size=samples, batch_ramp=()))


def _neighbors(layout: Candidate, space: Space) -> Iterator[Candidate]:
    """Yield the layouts of a grid that differ from `layout` in one part."""
    yield from _other_schedules(layout, space)
    for grid in space.grids:
        if _grid_of(grid.mildest) != _grid_of(layout):
            continue
        for zero_stage, shard_ranks in grid.states:
            if layout.schedule != "breadth" or zero_stage >= 2:
                yield layout._replace(zero_stage=zero_stage, shard_ranks=shard_ranks)
        for sequence_parallel, cp_attention in grid.sequences:
            yield layout._replace(sequence_parallel=sequence_parallel, cp_attention=cp_attention)
        for size in grid.micro_batch_sizes:
            yield layout._replace(micro_batch_size=size)
        for recompute, layers in grid.recomputes:
            yield layout._replace(recompute=recompute, recompute_layers=layers)


def _other_schedules(layout: Candidate, space: Space) -> Iterator[Candidate]:
    """Yield `layout` with each schedule of its grid."""
    for grid in space.grids:
        if _grid_of(grid.mildest) == _grid_of(layout):
            for schedule, vpp in grid.pipelines:
                if schedule != "breadth" or layout.zero_stage >= 2:
                    yield layout._replace(schedule=schedule, vpp=vpp)


def _grid_of(layout: Candidate) -> tuple[int, ...]:
    return layout.pp, layout.tp, layout.cp, layout.ep, layout.etp


def nearest(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row with the fewest other options than `row`, the fastest of them. None if there are no rows."""

    def distance(other: Row) -> tuple[int, float, Candidate]:
        changed = sum(a != b for a, b in zip(row.layout, other.layout, strict=True))
        return changed, other.seconds, other.layout

    return min(rows, key=distance, default=None)
