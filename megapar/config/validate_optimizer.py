"""Checks of the options of the optimizer that need other options."""

from collections.abc import Iterator

from megapar.base.errors import ConfigError
from megapar.config.groups import Group
from megapar.config.lengths import Lengths, in_samples
from megapar.config.messages import counted, divisors, listed, problem, shown
from megapar.config.options import OPTIMIZER_NAMES, Config
from megapar.config.rate_schedules import RATE_SCHEDULES, RateSchedule, find_rate_schedule

_SMALLEST_BUCKET_MB = 1e-5  # two gradients
_LARGEST_BUCKET_MB = 1e9  # no device has a thousandth of it


def problems(config: Config) -> Iterator[str]:
    """Problems of ZeRO, and of options for some of its stages only."""
    optimizer = config.optimizer
    stage = optimizer.zero_stage
    if optimizer.name not in OPTIMIZER_NAMES and ":" not in optimizer.name:
        text = f"unknown; there are {', '.join(OPTIMIZER_NAMES)}, and MODULE:NAME names one of your own"
        yield problem(config, "optimizer.name", text)
    for group in optimizer.groups:
        try:
            Group.parse(group)
        except ValueError as error:
            yield f"optimizer.groups {error}"
    use = f"use zero_stage {listed(_zero_stages(config))}"
    if optimizer.overlap_param_gather and stage == 0:
        text = f"without ZeRO every rank updates all weights, and none are gathered; {use}, or leave it at false"
        yield problem(config, "optimizer.overlap_param_gather optimizer.zero_stage", text)
    if optimizer.overlap_param_gather and stage == 3:
        text = f"stage 3 gathers the weights of each layer while the layer before runs; {use}, or leave it at false"
        yield problem(config, "optimizer.overlap_param_gather optimizer.zero_stage", text)
    if optimizer.shard_ranks and stage == 0:
        text = f"without ZeRO nothing is sharded; {use}, or leave it at 0"
        yield problem(config, "optimizer.shard_ranks optimizer.zero_stage", text)
    if optimizer.grad_reduce_dtype == "bf16" and stage == 0:
        text = f"without ZeRO every rank needs the whole sum, which is not rounded; {use}, or leave it at fp32"
        yield problem(config, "optimizer.grad_reduce_dtype optimizer.zero_stage", text)
    bucket_mb = optimizer.bucket_mb
    if bucket_mb > 0 and not _SMALLEST_BUCKET_MB <= bucket_mb <= _LARGEST_BUCKET_MB:
        text = f"must be from {_SMALLEST_BUCKET_MB:g} to {_LARGEST_BUCKET_MB:g}, or 0"
        yield problem(config, "optimizer.bucket_mb", text)
    if optimizer.bucket_mb and stage >= 2:
        text = f"stages 2 and 3 reduce the gradients of one layer at a time; leave bucket_mb at 0, or {use}"
        yield problem(config, "optimizer.bucket_mb optimizer.zero_stage", text)
    if config.train.eval_weights == "average" and not optimizer.ema:
        text = "there is no average of the weights; set optimizer.ema, such as 0.999, or leave it at trained"
        yield problem(config, "train.eval_weights optimizer.ema", text)
    if optimizer.qk_clip:
        use = "the weights of its queries and keys would stay as they are; leave it out, or use qk_clip 0"
        if config.adapter.rank:
            yield problem(config, "optimizer.qk_clip adapter.rank", use)
        elif config.train.trainable:
            yield problem(config, "optimizer.qk_clip train.trainable", use)
    yield from _state(config)
    yield from _rates(config)


def _state(config: Config) -> Iterator[str]:
    """Yield the problems of state in 16 bits."""
    optimizer = config.optimizer
    if optimizer.main_weights == "remainder":
        if config.train.precision != "bf16":
            text = (
                "only bf16 weights are the upper halves of fp32 ones; use precision bf16, or leave main_weights at fp32"
            )
            yield problem(config, "optimizer.main_weights train.precision", text)
        if optimizer.offload:
            text = "the parameters are halves of the main weights, and stay on the device; use one of the two"
            yield problem(config, "optimizer.main_weights optimizer.offload", text)
        if optimizer.ema:
            text = "the average is that of whole fp32 weights; use one of the two"
            yield problem(config, "optimizer.main_weights optimizer.ema", text)
    if config.kernels.backend == "apex":
        for name in ("moments", "main_weights"):
            if getattr(optimizer, name) != "fp32":
                text = f"apex's AdamW keeps fp32 state alone; use backend auto, or leave {name} at fp32"
                yield problem(config, f"optimizer.{name} kernels.backend", text)


def _zero_stages(config: Config) -> list[int]:
    """The stages of ZeRO compatible with the other options of `optimizer`. Stage 1 always does."""
    optimizer = config.optimizer
    fits = {0, 1, 2, 3}
    if optimizer.overlap_param_gather:
        fits &= {1, 2}
    if optimizer.shard_ranks or optimizer.grad_reduce_dtype == "bf16":
        fits &= {1, 2, 3}
    # A derived bucket_mb is not among these options: it follows the stage.
    if optimizer.bucket_mb and optimizer.zero_stage >= 2:
        fits &= {0, 1}
    return sorted(fits)


def _rates(config: Config) -> Iterator[str]:
    """Problems of the learning rate's schedule."""
    optimizer = config.optimizer
    try:
        schedule = find_rate_schedule(optimizer.schedule)
    except ConfigError as error:
        yield str(error)
        return
    yield from _lengths(config, schedule)
    if optimizer.min_lr and not schedule.reads_min_lr:
        readers = " or ".join(name for name, each in RATE_SCHEDULES.items() if each.reads_min_lr)
        text = f"the schedule does not read it; choose {readers}, or leave it at 0"
        yield problem(config, "optimizer.min_lr optimizer.schedule", text)
    elif optimizer.min_lr > optimizer.lr >= 0:  # a negative lr has its own message
        text = f"the rate must not end above its peak; use at most {shown(optimizer.lr)}"
        yield problem(config, "optimizer.min_lr optimizer.lr", text)


def _lengths(config: Config, schedule: RateSchedule) -> Iterator[str]:
    """Problems of the lengths of warm-up and decay."""
    optimizer, train = config.optimizer, config.train
    wrong = False
    for name in ("warmup_steps", "decay_steps"):
        try:
            in_samples(getattr(optimizer, name), train.seq_length)
        except ValueError as error:
            wrong = True
            yield problem(config, f"optimizer.{name}", str(error))
    if wrong or len(train.batch_ramp) not in (0, 3):  # a ramp has its own message
        return
    try:
        unit, warmup, decay = Lengths.of(optimizer, train)
    except ValueError as error:
        yield problem(config, "optimizer.warmup_steps optimizer.decay_steps", str(error))
        return
    run = train.steps if unit == "steps" else train.samples()

    def longest(number: float) -> str:
        return f"{number:.0f}" if unit == "steps" else f"'{max(number, 0):.0f} samples'"

    if decay and schedule.decay == "none":
        readers = " or ".join(name for name, each in RATE_SCHEDULES.items() if each.decay != "none")
        text = f"has no decay; set optimizer.schedule {readers}, or leave decay_steps at 0"
        yield problem(config, "optimizer.decay_steps optimizer.schedule", text)
    if warmup > run:
        text = f"the warm-up would not end within the run; use at most {longest(run)}"
        yield problem(config, "optimizer.warmup_steps train.steps", text)
    elif schedule.decay == "last" and warmup + decay > run:
        text = f"warm-up and decay together are longer than the run; decay_steps may be at most {longest(run - warmup)}"
        yield problem(config, "optimizer.warmup_steps optimizer.decay_steps train.steps", text)


def problems_of_shards(config: Config) -> Iterator[str]:
    """Problems of ZeRO's groups of ranks."""
    number = config.optimizer.shard_ranks
    if not number or config.optimizer.zero_stage == 0:
        return
    parallel = config.parallel
    replicas = parallel.dp * parallel.cp
    if replicas % number:
        text = f"must divide the {counted(replicas, 'rank')} of dp x cp; use {listed(divisors(replicas))}, or 0 for all"
        yield problem(config, "optimizer.shard_ranks parallel.dp parallel.cp", text)
    elif config.model.num_experts:
        holders = parallel.tp * replicas // (parallel.ep * parallel.etp)
        if number < holders and holders % number:
            works = [n for n in divisors(replicas) if n >= holders or holders % n == 0]
            text = (
                f"must divide the {holders} ranks that hold the same experts, or be at least as many; use "
                f"{listed(works)}, or 0 for all"
            )
            yield problem(config, "optimizer.shard_ranks parallel.ep parallel.etp", text)
