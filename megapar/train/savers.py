"""Saves a run's checkpoints in all its tiers."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from megapar.base.errors import StorageError
from megapar.checkpoint.format import step_of
from megapar.checkpoint.tiers import Tier, shared
from megapar.declare.agreement import from_first
from megapar.step.state import TrainState
from megapar.train.checkpoints import Saver


def best_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """The seconds between two saves that lose the least time, if failures come once in `mtbf_seconds`.

    A job loses the time of its saves, and after a failure half an interval (Young, doi 10.1145/361147.361115).
    """
    return math.sqrt(2 * save_seconds * mtbf_seconds)


class Saved(NamedTuple):
    """A completed checkpoint. `seconds` are those that training waited for it."""

    path: Path
    tier: Tier
    seconds: float


class Lost(NamedTuple):
    """A checkpoint that a faster tier could not take; `reason` says why."""

    tier: Tier
    reason: str


class Savers:
    """The savers of `state.tiers`. All methods are collectives. As a context manager it waits for saves in progress.

    A snapshot in memory or on a local disk is an extra. If its tier is full or gone the snapshot is lost on all ranks,
    and nothing else: the tier is tried again at its next checkpoint.
    """

    def __init__(self, state: TrainState, run_dir: Path):
        tiers = state.tiers or [shared(state.config.checkpoint, run_dir)]
        self._savers = [Saver(state, run_dir, tier) for tier in tiers]
        self._steps = state.config.train.steps
        self._seconds: dict[Path, float] = {}  # of the newest save, by its tier's root
        world = state.ctx.world.size
        self._mtbf_seconds = 3600 * state.config.checkpoint.mtbf_hours / world
        self._not_before: dict[Path, int] = {}  # the step of the next save, by its tier's root
        self._start = time.perf_counter()
        self._first = state.step
        self._stack = ExitStack()
        self._out: set[str] = set()  # tiers whose newest checkpoint was lost

    def due(self, step: int) -> bool:
        """Whether some tier gets a checkpoint after `step` steps."""
        return any(self._is_due(saver, step) for saver in self._savers)

    def _is_due(self, saver: Saver, step: int) -> bool:
        last = step == self._steps
        return saver.due(step, last) and (last or step >= self._not_before.get(saver.tier.root, 0))

    def save(self, state: TrainState, *, stopping: bool, ready: Callable[[], None]) -> list[Saved | Lost]:
        """Save to the tiers that are due, and to the run folder if the run is `stopping`.

        Returns the checkpoints completed, and lost, since the last call. `ready` and the errors raised are those of
        `Saver.save`; a faster tier raises no StorageError.
        """
        completed: list[Saved | Lost] = []
        for saver in self._savers:
            if self._is_due(saver, state.step) or (stopping and saver.tier.name == "shared"):
                start = time.perf_counter()
                paths, error = self._sparing(saver, lambda saver=saver: saver.save(state, ready))  # type: ignore[misc]
                self._seconds[saver.tier.root] = time.perf_counter() - start
                completed += self._of(saver, paths, error)
                if self._mtbf_seconds:
                    self._plan_next(saver, state)
        return completed

    def _sparing(self, saver: Saver, save: Callable[[], list[Path]]) -> tuple[list[Path], StorageError | None]:
        """The checkpoints that `save` returns, and the error with which a faster tier has lost one."""
        try:
            return save(), None
        except StorageError as error:  # on every rank, with the same words
            if saver.tier.name == "shared":
                raise
            return [], error

    def _plan_next(self, saver: Saver, state: TrainState) -> None:
        """Choose the step of the tier's next checkpoint. Rank 0's clock decides for all."""
        step_seconds = (time.perf_counter() - self._start) / max(state.step - self._first, 1)
        steps = best_interval(self._seconds[saver.tier.root], self._mtbf_seconds) / step_seconds
        every = max(saver.tier.every, 1)
        multiple = max(1, round(steps / every))
        self._not_before[saver.tier.root] = from_first(state.step + multiple * every, state.ctx)

    def completed(self, wait: bool = False) -> Iterator[Saved | Lost]:
        """Yield the newly completed checkpoints, and those lost; with `wait`, wait for all, as `Saver.completed`."""
        for saver in self._savers:
            paths = saver.completed(wait)
            while True:
                found, error = self._sparing(saver, lambda paths=paths: list(islice(paths, 1)))  # type: ignore[misc]
                yield from self._of(saver, found, error)
                if error:
                    paths = saver.completed(wait)  # of the saves begun after the lost one
                elif not found:
                    break

    def _of(self, saver: Saver, paths: list[Path], error: StorageError | None) -> list[Saved | Lost]:
        lost = [] if error is None else [Lost(saver.tier, str(error))]
        return [*(Saved(path, saver.tier, self._seconds[saver.tier.root]) for path in paths), *lost]

    def change(self, one: Saved | Lost) -> str:
        """Return the line to print if snapshot `one` shows that its tier has just failed or just recovered, else ""."""
        name = {"memory": "in memory", "local": "on the local disk"}.get(one.tier.name, "")
        if isinstance(one, Lost) and one.tier.name not in self._out:
            self._out.add(one.tier.name)
            return f"no snapshot {name}: {one.reason}; the run goes on, and tries again at the next snapshot"
        if isinstance(one, Saved) and one.tier.name in self._out:
            self._out.remove(one.tier.name)
            return f"snapshots {name} again, from step {step_of(one.path)} on"
        return ""

    def __enter__(self) -> "Savers":
        for saver in self._savers:
            self._stack.enter_context(saver)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
