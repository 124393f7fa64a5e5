"""The predicted time of a step beside the measured one, once in the log of a run."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from megapar.observe.observer import Observed, Observer
from megapar.step.state import StepResult

STEPS = 5
"""How many steps are measured. The first one of a start allocates and compiles, and comes before them."""


@dataclass(frozen=True)
class Prediction:
    """What a model of time said of a step of this run, on the machine named `machine`.

    `idle_share` is the mean share of the step that pipeline ranks wait for other stages.
    """

    machine: str
    seconds: float
    idle_share: float


class Comparison(Observer):
    """Measures the first steps of a start, and tells their time beside `prediction`."""

    def __init__(self, prediction: Prediction, seen: Observed):
        self._prediction = prediction
        self._seen = seen
        self._seconds: list[float] = []

    def after_line(self, result: StepResult, line: dict[str, Any]) -> None:
        if len(self._seconds) > STEPS:
            return
        self._seconds.append(line["step_seconds"])
        if len(self._seconds) <= STEPS:
            return
        compared = {
            "step": result.step,
            "predicted_machine": self._prediction.machine,
            "predicted_step_seconds": self._prediction.seconds,
            "predicted_idle_share": self._prediction.idle_share,
            "measured_step_seconds": median(self._seconds[1:]),
        }
        self._seen.write(compared)
        self._seen.say(f"step {result.step}/{self._seen.state.config.train.steps} | {in_words(compared)}")


def in_words(line: dict[str, Any]) -> str:
    """The line of metrics.jsonl for people."""
    predicted = line["predicted_step_seconds"]
    measured = line["measured_step_seconds"]
    return (
        f"predicted for {line['predicted_machine']}: {predicted:.4g} s a step, {line['predicted_idle_share']:.0%} of "
        f"it idle; measured: {measured:.4g} s, {measured / predicted:.2f} times as long (median of {STEPS} steps)"
    )
