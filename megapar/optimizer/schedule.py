"""The learning rate as a pure function of the step. So a resumed run needs no state of a scheduler."""

import math

from megapar.config.options import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of update number n = step + 1 (step 0 is the first update, step total_steps - 1 the last).

    Warm-up: lr * n / warmup_steps for n <= warmup_steps. After it, with p = (n - warmup_steps) / decay_steps, at most
    1, and d = lr - min_lr, where decay_steps 0 means total_steps - warmup_steps:

    - cosine: min_lr + d * (1 + cos(pi p)) / 2 (Loshchilov and Hutter, arXiv 1608.03983)
    - linear: min_lr + d * (1 - p)
    - constant: lr
    - inverse_sqrt: lr * sqrt(max(warmup_steps, 1) / n) (Vaswani et al., arXiv 1706.03762), not below min_lr
    - wsd: lr, then linear to min_lr over the last decay_steps (Hu et al., arXiv 2404.06395); decay_steps 0 means a
      tenth of total_steps; the decay never starts inside the warm-up
    """
    n = step + 1
    if n <= config.warmup_steps:
        return config.lr * n / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "inverse_sqrt":
        return max(config.min_lr, config.lr * math.sqrt(max(config.warmup_steps, 1) / n))
    if config.schedule in ("cosine", "linear"):
        last = config.warmup_steps + config.decay_steps if config.decay_steps else total_steps
        progress = _progress(n, config.warmup_steps, last)
        if config.schedule == "cosine":
            return _between(config, (1 + math.cos(math.pi * progress)) / 2)
        return _between(config, 1 - progress)
    decay_steps = config.decay_steps or max(1, total_steps // 10)
    decay_start = max(config.warmup_steps, total_steps - decay_steps)
    return _between(config, 1 - _progress(n, decay_start, total_steps))


def _progress(n: int, first: int, last: int) -> float:
    """0 up to `first`, 1 from `last` on, linear in between."""
    # Also right if first == last, where the division below would fail.
    if n >= last:
        return 1.0
    return max(0, n - first) / (last - first)


def _between(config: OptimizerConfig, share: float) -> float:
    """The rate at `share` of the way from min_lr (0) to lr (1)."""
    return config.min_lr + (config.lr - config.min_lr) * share


def change_of_rate(step: int, then: OptimizerConfig, now: OptimizerConfig, steps_then: int, steps_now: int) -> str:
    """A line for the user if a run continued after `step` has another learning rate than its options gave before.

    `then` and `steps_then` are its options and train.steps until now. Returns "" if the rate is the same.
    """
    planned = learning_rate(step, then, steps_then)
    rate = learning_rate(step, now, steps_now)
    if math.isclose(planned, rate, rel_tol=1e-9):
        return ""
    last = learning_rate(step - 1, then, steps_then) if step else 0.0
    line = (
        f"the learning rate goes on at {rate:.3g}: step {step} had {last:.3g}, and {planned:.3g} would have come next"
    )
    # The length of the run was the length of the decay. It can be kept, if nothing else has changed.
    length = steps_then - then.warmup_steps
    if then == now and now.schedule in ("cosine", "linear") and not now.decay_steps and length > 0:
        line += f"; --optimizer.decay_steps {length} keeps the schedule of {steps_then} steps"
    return line
