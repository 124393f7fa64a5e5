"""Saves a run's checkpoints in all its tiers."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from megapar.checkpoint.tiers import Tier, shared
from megapar.comm.agreement import from_first
from megapar.train.checkpoints import Saver
from megapar.train.state import TrainState


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


class Savers:
    """The savers of `state.tiers`. All methods are collectives. As a context manager it waits for saves in progress."""

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

    def due(self, step: int) -> bool:
        """Whether some tier gets a checkpoint after `step` steps."""
        return any(self._is_due(saver, step) for saver in self._savers)

    def _is_due(self, saver: Saver, step: int) -> bool:
        last = step == self._steps
        return saver.due(step, last) and (last or step >= self._not_before.get(saver.tier.root, 0))

    def save(self, state: TrainState, *, stopping: bool, ready: Callable[[], None]) -> list[Saved]:
        """Save to the tiers that are due, and to the run folder if the run is `stopping`.

        Returns the checkpoints completed since the last call. `ready` and the errors raised are those of `Saver.save`.
        """
        completed = []
        for saver in self._savers:
            if self._is_due(saver, state.step) or (stopping and saver.tier.name == "shared"):
                start = time.perf_counter()
                paths = saver.save(state, ready)
                self._seconds[saver.tier.root] = time.perf_counter() - start
                completed += [self._saved(path, saver) for path in paths]
                if self._mtbf_seconds:
                    self._plan_next(saver, state)
        return completed

    def _plan_next(self, saver: Saver, state: TrainState) -> None:
        """Choose the step of the tier's next checkpoint. Rank 0's clock decides for all."""
        step_seconds = (time.perf_counter() - self._start) / max(state.step - self._first, 1)
        steps = best_interval(self._seconds[saver.tier.root], self._mtbf_seconds) / step_seconds
        every = max(saver.tier.every, 1)
        multiple = max(1, round(steps / every))
        self._not_before[saver.tier.root] = from_first(state.step + multiple * every, state.ctx)

    def completed(self, wait: bool = False) -> Iterator[Saved]:
        """Yield the newly completed checkpoints; with `wait`, wait for all of them, as `Saver.completed` does."""
        for saver in self._savers:
            for path in saver.completed(wait):
                yield self._saved(path, saver)

    def _saved(self, path: Path, saver: Saver) -> Saved:
        return Saved(path, saver.tier, self._seconds[saver.tier.root])

    def __enter__(self) -> "Savers":
        for saver in self._savers:
            self._stack.enter_context(saver)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
