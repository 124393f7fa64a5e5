"""The learning rate as a pure function of the step and of the samples consumed before it.

So a resumed run needs no state of a scheduler.
"""

import math

from megapar.config.lengths import Lengths
from megapar.config.options import Config, OptimizerConfig, TrainConfig


def learning_rate(step: int, consumed_samples: int, config: OptimizerConfig, train: TrainConfig) -> float:
    """Learning rate of update number n = step + 1 (step 0 is the first update, step train.steps - 1 the last).

    Warm-up: lr * n / warmup_steps for n <= warmup_steps. After it, with p = (n - warmup_steps) / decay_steps, at most
    1, and d = lr - min_lr, where decay_steps 0 means train.steps - warmup_steps:

    - cosine: min_lr + d * (1 + cos(pi p)) / 2 (Loshchilov and Hutter, arXiv 1608.03983)
    - linear: min_lr + d * (1 - p)
    - constant: lr
    - inverse_sqrt: lr * sqrt(max(warmup_steps, 1) / n) (Vaswani et al., arXiv 1706.03762), not below min_lr
    - wsd: lr, then linear to min_lr over the last decay_steps (Hu et al., arXiv 2404.06395); decay_steps 0 means a
      tenth of train.steps; the decay never starts inside the warm-up

    Where warm-up or decay is in samples or tokens, n is `consumed_samples`, those of the steps before this one, and
    the run's end is counted in samples too. Megatron-LM reads its rate at the same count, so its first step has rate 0.
    """
    lengths = Lengths.of(config, train)
    if lengths.unit == "steps":
        n, total = step + 1, train.steps
    else:
        n, total = consumed_samples, train.samples(step, consumed_samples)
    if n <= lengths.warmup and lengths.warmup:
        return config.lr * n / lengths.warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "inverse_sqrt":
        return max(config.min_lr, config.lr * math.sqrt(max(lengths.warmup, 1) / max(n, 1)))
    if config.schedule in ("cosine", "linear"):
        last = lengths.warmup + lengths.decay if lengths.decay else total
        progress = _progress(n, lengths.warmup, last)
        if config.schedule == "cosine":
            return _between(config, (1 + math.cos(math.pi * progress)) / 2)
        return _between(config, 1 - progress)
    decay = lengths.decay or max(1, total // 10)
    decay_start = max(lengths.warmup, total - decay)
    return _between(config, 1 - _progress(n, decay_start, total))


def _progress(n: int, first: float, last: float) -> float:
    """0 up to `first`, 1 from `last` on, linear in between."""
    # Also right if first == last, where the division below would fail.
    if n >= last:
        return 1.0
    return max(0.0, n - first) / (last - first)


def _between(config: OptimizerConfig, share: float) -> float:
    """The rate at `share` of the way from min_lr (0) to lr (1)."""
    return config.min_lr + (config.lr - config.min_lr) * share


def change_of_rate(step: int, consumed_samples: int, then: Config, now: Config) -> str:
    """A line for the user if a run continued after `step` has another learning rate than its options gave before.

    `then` has its options until now. Returns "" if the rate is the same.
    """
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
    falls = now.optimizer.schedule in ("cosine", "linear")
    if then.optimizer == now.optimizer and falls and not lengths.decay and length > 0:
        kept = str(length) if lengths.unit == "steps" else f"'{length} samples'"
        line += f"; --optimizer.decay_steps {kept} keeps the schedule of {then.train.steps} steps"
    return line
