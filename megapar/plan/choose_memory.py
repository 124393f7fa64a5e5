"""Chooses recomputation, train.offload and optimizer.offload, so that a rank needs at most train.memory_gb by plan.

`check_choices` makes all choices that options leave to the model of time.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from megapar.config.messages import problem
from megapar.config.options import BY_LAYER, Config, OptimizerConfig, TrainConfig
from megapar.errors import ConfigError
from megapar.launch.reporting import say
from megapar.plan import hardware
from megapar.plan.choose_chunks import check_chunks, left_open, uncut
from megapar.plan.hardware import Hardware
from megapar.plan.memory import RankReport, fullest_rank
from megapar.plan.parts import Parts
from megapar.plan.simulate import with_planned_kernels
from megapar.plan.step_time import step_time
from megapar.plan.verdict import for_uneven_experts
from megapar.recompute import Mode
from megapar.system.apart import apart

_EVERY = (8, 6, 4, 3, 2, 1)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_INPUTS = (0.0, 0.5, 1.0)
_OBEY = ("zb-h1", "zb-interleaved", "zb-v")
"""The schedules that keep as much as parallel.schedule_memory_gb allows, and idle less for it."""

_TRIES = 8


class Choice(NamedTuple):
    """What saves memory: train.recompute, its every n-th layer and train.offload, and optimizer.offload."""

    recompute: Mode
    recompute_every: int
    inputs: float
    optimizer: float

    @property
    def activations(self) -> tuple[Mode, int, float]:
        """What it chooses for activations."""
        return self[:3]

    def of(self, config: Config) -> Config:
        """`config` with it."""
        recompute, every, inputs = self.activations
        train = replace(config.train, recompute=recompute, recompute_every=every, offload=inputs)
        return replace(config, train=train, optimizer=replace(config.optimizer, offload=self.optimizer))

    def in_words(self) -> str:
        """As options."""
        every = f" every {self.recompute_every} layers" if self.recompute_every > 1 else ""
        inputs = f", train.offload {self.inputs:g}" if self.inputs else ""
        return f"train.recompute {self.recompute}{every}{inputs}, optimizer.offload {self.optimizer:g}"


def choices(config: Config) -> Iterator[Choice]:
    """Yield what is tried. An option that `config` sets stays as it is."""
    train = config.train
    shares: tuple[float, ...] = _SHARES
    if config.optimizer.offload != OptimizerConfig().offload:
        shares = (config.optimizer.offload,)
    modes: list[tuple[Mode, int]] = [("none", 1), ("light", 1)]
    modes += [(mode, every) for mode in BY_LAYER for every in _EVERY]
    if train.recompute != TrainConfig().recompute:
        modes = [(train.recompute, train.recompute_every)]
    for mode, every in modes:
        if every < config.model.num_hidden_layers:
            for inputs, share in product(_shares_of_inputs(config, mode), shares):
                yield Choice(mode, every, inputs, share)


def _shares_of_inputs(config: Config, mode: Mode) -> tuple[float, ...]:
    """The shares of train.offload that are tried with this recomputation."""
    if config.train.offload or mode not in BY_LAYER:
        return (config.train.offload,)
    return _INPUTS


def check_choices(config: Config, parts: Parts) -> Config:
    """`config`, validated, with what its options leave to be chosen: see `check_memory`, then `check_chunks`.

    A fork plans it, because plans have backward passes, and this process may fork ranks for GPUs next.
    """
    if not config.train.memory_gb and not left_open(config):
        return config
    return apart(_chosen, config, parts)


def _chosen(config: Config, parts: Parts) -> Config:
    return check_chunks(check_memory(config, parts), parts)


def with_choices_of(config: Config, given: Config) -> Config:
    """`given`, the options as the user gave them, with what `check_memory` has chosen for `config`."""
    train, optimizer = config.train, config.optimizer
    return Choice(train.recompute, train.recompute_every, train.offload, optimizer.offload).of(given)


def check_memory(config: Config, parts: Parts) -> Config:
    """`config`, validated, with what it needs to stay within train.memory_gb. Every rank comes to the same alone.

    Of all that fits, it takes what is predicted to be the fastest. Raises ConfigError if nothing fits, or if there is
    no machine or no schedule to predict the time of a step for.
    """
    if not config.train.memory_gb:
        return config
    if config.gpu == "auto":
        text = "what fits is chosen by its predicted time, which needs --gpu, such as h100-80g; or leave it at 0"
        raise ConfigError(problem(config, "train.memory_gb gpu", text))
    if config.parallel.schedule == "auto":
        text = "the schedule is not known before it is measured; name one, or leave memory_gb at 0"
        raise ConfigError(problem(config, "train.memory_gb parallel.schedule", text))
    return _Budget(config, parts, hardware.load(config.gpu)).spend()


class _Budget:
    """The bytes of train.memory_gb, and what they are spent on."""

    def __init__(self, config: Config, parts: Parts, machine: Hardware):
        self.config = config
        self.parts = parts
        self.machine = machine
        self.limit = int(config.train.memory_gb * 2**30)

    def spend(self) -> Config:
        """The fastest choice that fits."""
        smallest: tuple[int, Choice] | None = None
        # Times of equally fast ones may differ in a last bit. Of these the one that moves least is taken.
        for seconds, choice in sorted((round(seconds, 9), choice) for seconds, choice in self.timed()):
            config = choice.of(self.config)
            report = fullest_rank(config, self.parts)
            needed = report.total + for_uneven_experts(config, report)
            fits_host = report.on_host <= self.machine.host_bytes
            if needed <= self.limit and fits_host:
                config, words = self.with_schedule(config, report)
                text = f"{choice.in_words()}{words}, {needed / 2**30:,.2f} GiB by plan, {seconds:.4g} s a step"
                say(f"train.memory_gb={self.config.train.memory_gb:g}: {text} predicted on {self.machine.name}")
                return config
            if fits_host and (smallest is None or needed < smallest[0]):
                smallest = needed, choice
        text = f"a host of {self.machine.name} has too little memory"
        if smallest is not None:
            text = f"the least is {smallest[0] / 2**30:,.2f} GiB, with {smallest[1].in_words()}"
        text += "; allow more, use more ranks, or shard more by optimizer.zero_stage, parallel.tp, pp or cp"
        raise ConfigError(problem(self.config, "train.memory_gb", text))

    def timed(self) -> list[tuple[float, Choice]]:
        """The choices with their predicted seconds of a step."""
        # What the host's update adds does not depend on activations. So not every pair has to be planned.
        tried = list(choices(self.config))
        first = tried[0]
        of_activations = {
            choice.activations: self.seconds(choice) for choice in tried if choice.optimizer == first.optimizer
        }
        of_optimizer = {
            choice.optimizer: self.seconds(choice) - of_activations[first.activations]
            for choice in tried
            if choice.activations == first.activations
        }
        return [(of_activations[choice.activations] + of_optimizer[choice.optimizer], choice) for choice in tried]

    def seconds(self, choice: Choice) -> float:
        """Those of a step."""
        return step_time(with_planned_kernels(uncut(choice.of(self.config))), self.parts, self.machine).seconds

    def with_schedule(self, config: Config, report: RankReport) -> tuple[Config, str]:
        """`config` with parallel.schedule_memory_gb of what is left, if its schedule makes use of it, and in words."""
        parallel = config.parallel
        if parallel.schedule not in _OBEY or parallel.schedule_memory_gb or parallel.pp == 1:
            return config, ""
        left = self.limit - (report.total - report.activations)
        for _ in range(_TRIES):
            gib = int(left / 2**30 * 100) / 100
            if gib <= 0:
                break
            changed = replace(config, parallel=replace(parallel, schedule_memory_gb=gib))
            over = fullest_rank(changed, self.parts).total - self.limit
            if over <= 0:
                return changed, f", parallel.schedule_memory_gb {gib:g}"
            left -= over  # another rank became the fullest
        return config, ""
