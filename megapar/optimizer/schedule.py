"""The learning rate as a pure function of the step, so that a resumed run needs no state of a scheduler."""

import math

from megapar.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of update number n = step + 1 (step 0 is the first update, step total_steps - 1 the last).

    Warm-up: lr * n / warmup_steps for n <= warmup_steps. After it, with p = (n - warmup_steps) / (total_steps -
    warmup_steps), at most 1, and d = lr - min_lr:

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
    if config.schedule == "cosine":
        progress = _progress(n, config.warmup_steps, total_steps)
        return _between(config, (1 + math.cos(math.pi * progress)) / 2)
    if config.schedule == "linear":
        return _between(config, 1 - _progress(n, config.warmup_steps, total_steps))
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
