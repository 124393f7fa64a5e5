"""What sees the steps of a run: a list of observers, each a class of its own. The loop knows none of them.

An observer sees a run and changes nothing of it. What decides (a step that is not finite, a spike, a rewind) is no
observer: see `megapar.step`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.declare.batch import MicroBatch
from megapar.step.state import StepResult, TrainState


@dataclass(frozen=True)
class Observed:
    """The run that an observer sees: its state, its folder, and two ways to tell.

    `say` prints a line on rank 0. `write` appends a line to metrics.jsonl on rank 0. On other ranks both do nothing.
    """

    state: TrainState
    run_dir: Path
    say: Callable[[str], None]
    write: Callable[[dict[str, Any]], None]


class Observer:
    """Sees the steps of a run, by methods that do nothing here. One of log.observers is made with an `Observed`.

    Every rank has the same observers in the same order, so each method may be a collective. Steps count from 1. On a
    GPU the line of a step comes when the next step is queued.
    """

    def begin_step(self, number: int) -> None:
        """Note that a step begins. Its data are not there yet."""

    def before_compute(self, number: int, batches: Sequence[MicroBatch]) -> None:
        """Note the micro-batches of this rank, on the host. The time of this method is not the step's."""

    def after_queue(self, number: int) -> None:
        """Note that the step is queued: `state` has its counts, and a CPU has computed it."""

    def after_line(self, result: StepResult, line: dict[str, Any]) -> None:
        """Note the result of a step, and its line of metrics.jsonl, which is written."""

    def end_step(self, number: int) -> None:
        """Note that the lines are told for this time. The next step, an evaluation or a save comes."""

    def before_save(self, step: int) -> None:
        """Note that a checkpoint comes."""

    def close(self, error: BaseException | None) -> None:
        """End what the observer has begun: after the last step, or after `error` at any moment."""


class Observers(Observer):
    """All observers of a run as one. A context manager: leaving it closes them.

    Methods go through the list in order, `after_queue` and `close` in reverse, so that one observer's measurement may
    lie within another's.
    """

    def __init__(self, observers: Sequence[Observer]):
        self._observers = list(observers)

    def begin_step(self, number: int) -> None:
        for observer in self._observers:
            observer.begin_step(number)

    def before_compute(self, number: int, batches: Sequence[MicroBatch]) -> None:
        for observer in self._observers:
            observer.before_compute(number, batches)

    def after_queue(self, number: int) -> None:
        for observer in reversed(self._observers):
            observer.after_queue(number)

    def after_line(self, result: StepResult, line: dict[str, Any]) -> None:
        for observer in self._observers:
            observer.after_line(result, line)

    def end_step(self, number: int) -> None:
        for observer in self._observers:
            observer.end_step(number)

    def before_save(self, step: int) -> None:
        for observer in self._observers:
            observer.before_save(step)

    def close(self, error: BaseException | None) -> None:
        first = error
        for observer in reversed(self._observers):  # all of them, though one fails
            try:
                observer.close(error)
            except Exception as failure:
                if first is None:
                    first = failure
                else:  # the first error is the cause: what fails after it is told beside it, and does not hide it
                    first.add_note(f"then {type(observer).__name__} failed to close: {failure!r}")
        if first is not error and first is not None:
            raise first

    def __enter__(self) -> "Observers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)
