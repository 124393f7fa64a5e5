"""The predicted time of a step beside the measured one, once in the log of a run."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

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


@dataclass
class Comparison:
    """Measures the first steps of a start, to compare them with `prediction`."""

    prediction: Prediction
    _seconds: list[float] = field(default_factory=list)

    def add(self, step: int, step_seconds: float) -> dict[str, Any] | None:
        """Note how long a step took. Returns the line of metrics.jsonl when there are enough steps, else None."""
        self._seconds.append(step_seconds)
        if len(self._seconds) != STEPS + 1:
            return None
        return {
            "step": step,
            "predicted_machine": self.prediction.machine,
            "predicted_step_seconds": self.prediction.seconds,
            "predicted_idle_share": self.prediction.idle_share,
            "measured_step_seconds": median(self._seconds[1:]),
        }


def in_words(line: dict[str, Any]) -> str:
    """The line of metrics.jsonl for people."""
    predicted = line["predicted_step_seconds"]
    measured = line["measured_step_seconds"]
    return (
        f"predicted for {line['predicted_machine']}: {predicted:.4g} s a step, {line['predicted_idle_share']:.0%} of "
        f"it idle; measured: {measured:.4g} s, {measured / predicted:.2f} times as long (median of {STEPS} steps)"
    )
