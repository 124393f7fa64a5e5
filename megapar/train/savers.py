"""Saves a run's checkpoints in all its tiers."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from megapar.base.errors import StorageError
from megapar.checkpoint.format import MANIFEST, checkpoint_folders, step_of
from megapar.checkpoint.tiers import Tier, shared
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.step.state import TrainState
from megapar.train.saver import Saver


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
    """The checkpoint of `step`, which could not be written; `reason` says why.

    `next_step` is the step of the next one, None if there is none.
    """

    step: int
    tier: Tier
    reason: str
    next_step: int | None


class Savers:
    """The savers of `state.tiers`. All methods are collectives. As a context manager it waits for saves in progress.

    A snapshot in memory or on a local disk is an extra. If its tier is full or gone the snapshot is lost on all ranks,
    and nothing else: the tier is tried again at its next checkpoint. So is the run folder, unless checkpoint.on_failure
    is stop; but the run ends if the checkpoint was its last one, or if another folder has the name of the run folder.
    """

    def __init__(self, state: TrainState, run_dir: Path):
        tiers = state.tiers or [shared(state.config.checkpoint, run_dir)]
        self._savers = [Saver(state, run_dir, tier) for tier in tiers]
        self._state = state
        self._steps = state.config.train.steps
        self._seconds: dict[Path, float] = {}  # of the newest save, by its tier's root
        world = state.ctx.world.size
        self._mtbf_seconds = 3600 * state.config.checkpoint.mtbf_hours / world
        self._not_before: dict[Path, int] = {}  # the step of the next save, by its tier's root
        self._start = time.perf_counter()
        self._first = state.step
        self._stack = ExitStack()
        self._out: set[str] = set()  # faster tiers whose newest checkpoint was lost
        self._failed: list[int] = []  # steps of the run folder's lost checkpoints that are newer than its newest one
        root = tiers[-1].root
        look = partial(_newest, root) if state.ctx.world.first else lambda: None
        # The newest complete checkpoint of the run folder: its step, and its time as time.time() has it.
        self._newest = on_all_ranks(look, state.ctx, StorageError, f"{root} not read")

    @property
    def failed(self) -> int:
        """How many saves to the run folder have failed since the newest one that did not."""
        return len(self._failed)

    def due(self, step: int) -> bool:
        """Whether some tier gets a checkpoint after `step` steps."""
        return any(self._is_due(saver, step) for saver in self._savers)

    def _is_due(self, saver: Saver, step: int) -> bool:
        last = step == self._steps
        return saver.due(step, last) and (last or step >= self._not_before.get(saver.tier.root, 0))

    def _next_due(self, saver: Saver) -> int | None:
        """The step of the tier's next checkpoint, if the run is not asked to stop before."""
        following = range(self._state.step + 1, self._steps + 1)
        return next((step for step in following if self._is_due(saver, step)), None)

    def save(self, state: TrainState, *, stopping: bool, ready: Callable[[], None]) -> Iterator[Saved | Lost]:
        """Save to the tiers that are due, and to the run folder if the run is `stopping`.

        Yields the checkpoints completed, and lost, since the last call. `ready` and the errors raised are those of
        `Saver.save`, but StorageError is only raised for a checkpoint that must not be lost.
        """
        for saver in self._savers:
            if self._is_due(saver, state.step) or (stopping and saver.tier.name == "shared"):
                yield from self._save(saver, state, None if stopping else self._next_due(saver), ready)

    def _save(
        self, saver: Saver, state: TrainState, next_step: int | None, ready: Callable[[], None]
    ) -> Iterator[Saved | Lost]:
        start = time.perf_counter()
        # Those that have ended are told before this save, whose line names the newest one.
        while saver.has_ended() or saver.must_wait(state):
            yield from self._finish(saver, state.step)

        def save() -> list[Path]:
            paths = saver.save(state, ready)
            self._seconds[saver.tier.root] = time.perf_counter() - start
            return paths

        found = self._try(saver, save, state.step, next_step)
        yield from found
        if self._mtbf_seconds and not any(isinstance(one, Lost) for one in found):
            self._plan_next(saver, state)

    def completed(self, wait: bool = False) -> Iterator[Saved | Lost]:
        """Yield the newly completed checkpoints, and those lost; with `wait`, as the run ends, wait for all.

        Raises StorageError as `save` does.
        """
        for saver in self._savers:
            while saver.has_ended(wait):
                yield from self._finish(saver, None if wait else self._next_due(saver))

    def _finish(self, saver: Saver, next_step: int | None) -> list[Saved | Lost]:
        """Finish the tier's oldest save. `next_step` is the step of the first one that is not begun."""
        step, *begun = saver.under_way()
        return self._try(saver, lambda: [saver.finish()], step, begun[0] if begun else next_step)

    def _try(self, saver: Saver, act: Callable[[], list[Path]], step: int, next_step: int | None) -> list[Saved | Lost]:
        """The checkpoints that `act` returns, or the one of `step`, which it fails to write."""
        try:
            paths = act()
        except StorageError as error:  # on every rank, with the same words
            if saver.tier.name == "shared" and self._must_end(saver, next_step):
                raise
            return [Lost(step, saver.tier, str(error), next_step)]
        return [Saved(path, saver.tier, self._seconds[saver.tier.root]) for path in paths]

    def _must_end(self, saver: Saver, next_step: int | None) -> bool:
        stops = self._state.config.checkpoint.on_failure == "stop"
        return stops or next_step is None or saver.is_replaced(self._state.ctx)

    def _plan_next(self, saver: Saver, state: TrainState) -> None:
        """Choose the step of the tier's next checkpoint. Rank 0's clock decides for all."""
        step_seconds = (time.perf_counter() - self._start) / max(state.step - self._first, 1)
        steps = best_interval(self._seconds[saver.tier.root], self._mtbf_seconds) / step_seconds
        every = max(saver.tier.every, 1)
        multiple = max(1, round(steps / every))
        self._not_before[saver.tier.root] = from_first(state.step + multiple * every, state.ctx)

    def change(self, one: Saved | Lost) -> str:
        """Return the line to print about a lost checkpoint of the run folder, or if a faster tier changes, else "".

        A faster tier changes if snapshot `one` shows that the tier has just failed, or has just recovered.
        """
        if one.tier.name == "shared":
            return self._of_run_folder(one)
        name = {"memory": "in memory", "local": "on the local disk"}[one.tier.name]
        if isinstance(one, Lost) and one.tier.name not in self._out:
            self._out.add(one.tier.name)
            return f"no snapshot {name}: {one.reason}; the run goes on, and tries again at the next snapshot"
        if isinstance(one, Saved) and one.tier.name in self._out:
            self._out.remove(one.tier.name)
            return f"snapshots {name} again, from step {step_of(one.path)} on"
        return ""

    def _of_run_folder(self, one: Saved | Lost) -> str:
        if isinstance(one, Saved):
            self._newest = (step_of(one.path), time.time())
            # A save behind may complete after a later one could not be begun.
            self._failed = [step for step in self._failed if step > step_of(one.path)]
            return ""
        self._failed.append(one.step)
        often = f"; {self.failed} saves have failed in a row" if self.failed > 1 else ""
        newest = "there is no complete checkpoint yet"
        if self._newest:
            step, since = self._newest
            newest = f"the newest complete checkpoint is that of step {step}, {_in_words(time.time() - since)} old"
        return f"{one.reason}{often}; the run goes on, and the next save is that of step {one.next_step}; {newest}"

    def __enter__(self) -> "Savers":
        for saver in self._savers:
            self._stack.enter_context(saver)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _newest(root: Path) -> tuple[int, float] | None:
    """The step of the newest checkpoint in `root` that has a manifest, and the time of the manifest."""
    with suppress(OSError):
        for folder in checkpoint_folders(root):
            with suppress(FileNotFoundError):
                return step_of(folder), (folder / MANIFEST).stat().st_mtime
    return None


def _in_words(seconds: float) -> str:
    """A time, rounded, such as "90 s", "45 min" and "3 h"."""
    unit, length = next((unit for unit in (("h", 3600), ("min", 60)) if seconds >= 2 * unit[1]), ("s", 1))
    return f"{max(seconds, 0) / length:.0f} {unit}"
