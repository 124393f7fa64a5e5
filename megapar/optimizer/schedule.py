"""The learning rate as a pure function of the step and of the samples consumed before it.

So a resumed run needs no state of a scheduler.
"""

import math

from megapar.base.errors import ConfigError
from megapar.config.lengths import Lengths
from megapar.config.messages import shown
from megapar.config.options import Config, OptimizerConfig, TrainConfig
from megapar.config.rate_schedules import RATE_SCHEDULES, RatePoint, find_rate_schedule


def learning_rate(step: int, consumed_samples: int, config: OptimizerConfig, train: TrainConfig) -> float:
    """Return the learning rate of update number n = step + 1 (step 0 is the first update).

    During warm-up, for n <= warmup_steps, the rate is lr * n / warmup_steps. Behind the warm-up the schedule decides
    (`megapar.config.rate_schedules`).

    Where warm-up or decay is in samples or tokens, n is `consumed_samples`, those of the steps before this one, and
    the run's end is counted in samples too. Megatron-LM reads its rate at the same count, so its first step has rate 0.
    Raises ConfigError if a schedule outside of the tree gives a rate that is negative or not finite.
    """
    lengths = Lengths.of(config, train)
    if lengths.unit == "steps":
        n, total = step + 1, train.steps
    else:
        n, total = consumed_samples, train.samples(step, consumed_samples)
    if n <= lengths.warmup and lengths.warmup:
        return config.lr * n / lengths.warmup
    rate = find_rate_schedule(config.schedule).rate(RatePoint(n, lengths.warmup, lengths.decay, total), config)
    if not 0 <= rate < math.inf:
        raise ConfigError(
            f"optimizer.schedule={config.schedule}: gives the rate {rate} for step {step + 1}; a rate is finite, and "
            "not negative"
        )
    return rate


def change_of_rate(step: int, consumed_samples: int, then: Config, now: Config) -> str:
    """A line for the user if a run continued after `step` has another learning rate than its options gave before.

    `then` has its options until now, out of a checkpoint. Returns "" if the rate is the same.
    """
    if then.optimizer.schedule not in (now.optimizer.schedule, *RATE_SCHEDULES):
        # A schedule that only the file names is not imported: its module would run.
        rate = learning_rate(step, consumed_samples, now.optimizer, now.train)
        before = f"optimizer.schedule {shown(then.optimizer.schedule)}"
        return f"the learning rate goes on at {rate:.3g}; what {before} would have given is not known"
    planned = learning_rate(step, consumed_samples, then.optimizer, then.train)
    rate = learning_rate(step, consumed_samples, now.optimizer, now.train)
    if math.isclose(planned, rate, rel_tol=1e-9):
        return ""
    lengths = Lengths.of(then.optimizer, then.train)
    line = f"the learning rate goes on at {rate:.3g}: "
    if lengths.unit == "steps":
        last = learning_rate(step - 1, consumed_samples, then.optimizer, then.train) if step else 0.0
        line += f"step {step} had {last:.3g}, and "
    line += f"{planned:.3g} would have come next"
    # The length of the run was the length of the decay. It can be kept, if nothing else has changed.
    run = then.train.steps if lengths.unit == "steps" else then.train.samples(step, consumed_samples)
    length = int(run - lengths.warmup)
    falls = find_rate_schedule(now.optimizer.schedule).decay == "after_warmup"
    if then.optimizer == now.optimizer and falls and not lengths.decay and length > 0:
        kept = str(length) if lengths.unit == "steps" else f"'{length} samples'"
        line += f"; --optimizer.decay_steps {kept} keeps the schedule of {then.train.steps} steps"
    return line
