"""The shapes of the learning rate behind its warm-up. One outside this repository is named by its import path."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megapar.config.options import OptimizerConfig
from megapar.config.plugins import named


class RatePoint(NamedTuple):
    """A point of a run behind the warm-up, all in steps or all in samples.

    `n` is the number of the update, counted from 1, or the samples consumed before it. `warmup` and `decay` are
    lengths; a decay of 0 has the default length. `total` is the length of the run.
    """

    n: float
    warmup: float
    decay: float
    total: float

    def progress(self, first: float, last: float) -> float:
        """Return 0 up to `first`, 1 from `last` on, and the share of the way between."""
        # Also right if first == last, where the division below would fail.
        if self.n >= last:
            return 1.0
        return max(0.0, self.n - first) / (last - first)


@dataclass(frozen=True)
class RateSchedule:
    """A shape of the learning rate behind its warm-up.

    `rate` returns the rate at a point. optimizer.decay_steps is the length of a decay right after the warm-up, or of
    the last part of the run, or is refused. With `reads_min_lr` False, optimizer.min_lr is refused.
    """

    rate: Callable[[RatePoint, OptimizerConfig], float]
    decay: Literal["after_warmup", "last", "none"] = "after_warmup"
    reads_min_lr: bool = True


def _between(optimizer: OptimizerConfig, share: float) -> float:
    """Return the rate at `share` of the way from min_lr (0) to lr (1)."""
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * share


def _decayed(point: RatePoint) -> float:
    """Return the share done of a decay right after the warm-up. By default it ends with the run."""
    return point.progress(point.warmup, point.warmup + point.decay if point.decay else point.total)


def _cosine(point: RatePoint, optimizer: OptimizerConfig) -> float:
    """Return min_lr + d * (1 + cos(pi p)) / 2 (Loshchilov and Hutter, arXiv 1608.03983)."""
    return _between(optimizer, (1 + math.cos(math.pi * _decayed(point))) / 2)


def _linear(point: RatePoint, optimizer: OptimizerConfig) -> float:
    """Return min_lr + d * (1 - p)."""
    return _between(optimizer, 1 - _decayed(point))


def _constant(point: RatePoint, optimizer: OptimizerConfig) -> float:
    """Return lr."""
    return optimizer.lr


def _inverse_sqrt(point: RatePoint, optimizer: OptimizerConfig) -> float:
    """Return lr * sqrt(max(warmup, 1) / n), not below min_lr (Vaswani et al., arXiv 1706.03762)."""
    return max(optimizer.min_lr, optimizer.lr * math.sqrt(max(point.warmup, 1) / max(point.n, 1)))


def _wsd(point: RatePoint, optimizer: OptimizerConfig) -> float:
    """Return lr, then linear to min_lr in the last decay (Hu et al., arXiv 2404.06395).

    The default decay is a tenth of the run. The decay never starts inside the warm-up.
    """
    decay = point.decay or max(1, point.total // 10)
    return _between(optimizer, 1 - point.progress(max(point.warmup, point.total - decay), point.total))


RATE_SCHEDULES: Mapping[str, RateSchedule] = {
    "cosine": RateSchedule(_cosine),
    "linear": RateSchedule(_linear),
    "constant": RateSchedule(_constant, decay="none", reads_min_lr=False),
    "inverse_sqrt": RateSchedule(_inverse_sqrt, decay="none"),
    "wsd": RateSchedule(_wsd, decay="last"),
}
"""The schedules by the values of optimizer.schedule. p is the share done of the decay, and d = lr - min_lr."""


def find_rate_schedule(name: str) -> RateSchedule:
    """Return the schedule named by optimizer.schedule: a key of RATE_SCHEDULES, or MODULE:NAME.

    Raises ConfigError if there is none.
    """
    return named("optimizer.schedule", name, RATE_SCHEDULES, RateSchedule)
