"""Lengths of the learning rate's schedule: a number of steps, or a text such as 2000 samples or 3e9 tokens."""

import math
import re
from typing import NamedTuple

from megapar.config.options import Length, OptimizerConfig, TrainConfig
from megapar.config.rate_schedules import find_rate_schedule

_NUMBER = r"\d[\d_]*(?:\.\d*)?(?:e[+-]?\d{1,3})?"
_EXAMPLES = "a number of steps, or a text such as '2000 samples' or '3e9 tokens'"


def in_samples(length: Length, seq_length: int) -> float | None:
    """Samples of a length that counts them or tokens; None if the length counts steps.

    Raises ValueError for a text that is no length.
    """
    if isinstance(length, int):
        return None
    found = re.fullmatch(rf"({_NUMBER}) ?(samples|tokens)", length)
    number = float(found[1]) if found else 0.0
    if found is None or not 0 < number < math.inf:
        raise ValueError(f"expected {_EXAMPLES}")
    return number if found[2] == "samples" else number / seq_length


def is_length(text: str) -> bool:
    """Whether a text is a length in samples or tokens."""
    try:
        in_samples(text, 1)
    except ValueError:
        return False
    return True


class Lengths(NamedTuple):
    """Warm-up and decay of the learning rate, both in steps or both in samples. A decay of 0 has a default length."""

    unit: str
    warmup: float
    decay: float

    @classmethod
    def of(cls, optimizer: OptimizerConfig, train: TrainConfig) -> "Lengths":
        """The lengths of a run. Raises ValueError for a text that is no length, and for steps beside samples."""
        given = (optimizer.warmup_steps, optimizer.decay_steps)
        warmup, decay = (in_samples(length, train.seq_length) for length in given)
        if warmup is None and decay is None:
            return cls("steps", *map(float, given))
        # A length of 0 is the same in steps and in samples.
        if (warmup is None and given[0]) or (decay is None and given[1]):
            raise ValueError("one counts steps and the other does not; give both in steps, or none")
        return cls("samples", warmup or 0.0, decay or 0.0)


def lengths_in_steps(optimizer: OptimizerConfig, train: TrainConfig) -> str:
    """A sentence on the steps that a warm-up and decay in samples take; "" if the run counts them in steps."""
    lengths = Lengths.of(optimizer, train)
    if lengths.unit == "steps":
        return ""
    ends = []
    if lengths.warmup:
        ends.append(f"warms up until step {_step_at(train, lengths.warmup)}")
    if lengths.decay:
        run = train.samples()
        last = find_rate_schedule(optimizer.schedule).decay != "last"
        samples = lengths.warmup + lengths.decay if last else max(run - lengths.decay, lengths.warmup)
        ends.append(f"{'has decayed' if last else 'decays'} after step {_step_at(train, samples)}")
    return f"the learning rate {' and '.join(ends)}"


def _step_at(train: TrainConfig, samples: float) -> str:
    """The number of the first step before which so many samples were consumed, or that the run ends before it."""
    consumed = 0
    for step in range(train.steps + 1):
        if consumed >= samples:
            return f"{step:,}"
        size = train.batch_size(consumed)
        if size == train.global_batch_size:
            step += math.ceil((samples - consumed) / size)
            return f"{step:,}" if step <= train.steps else f"{step:,}, after its end"
        consumed += size
    return f"{train.steps:,} or later"
