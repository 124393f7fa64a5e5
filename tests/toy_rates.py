"""A learning-rate schedule outside of the tree: warm restarts (Loshchilov and Hutter, arXiv 1608.03983)."""

import math

from megapar.config.options import OptimizerConfig
from megapar.config.rate_schedules import RatePoint, RateSchedule

LENGTH = 4  # updates from one restart to the next


def rate(point: RatePoint, optimizer: OptimizerConfig) -> float:
    """Return the rate, which falls from lr along a cosine to min_lr, and begins anew after LENGTH updates."""
    share = (point.n - point.warmup - 1) % LENGTH / LENGTH
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * (1 + math.cos(math.pi * share)) / 2


WARM_RESTARTS = RateSchedule(rate, decay="none")
BROKEN = RateSchedule(lambda point, optimizer: math.nan)
