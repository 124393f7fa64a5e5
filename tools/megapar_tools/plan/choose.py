"""Chooses what options leave open before a run, by the predicted time of a step (`check_choices`).

train.memory_gb leaves open recomputation, train.offload and optimizer.offload, and 0 the numbers of chunks in
parallel.tp_overlap_chunks and ep_overlap_chunks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

from megapar.activations.recompute import Mode
from megapar.base.errors import ConfigError
from megapar.config.derive import every_nth
from megapar.config.messages import problem
from megapar.config.options import BY_LAYER, Config, OptimizerConfig, TrainConfig
from megapar.config.validate_experts import fewest_experts
from megapar.pipeline.schedules import find, placement
from megapar.system.apart import apart
from megapar.system.say import say
from megapar.train.levers import EVERY, SHARES
from megapar_tools.plan import hardware
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.memory import RankReport, fullest_rank, reports
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.step_time import step_time
from megapar_tools.plan.target import with_planned_kernels
from megapar_tools.plan.verdict import for_uneven_experts

Option = Literal["tp_overlap_chunks", "ep_overlap_chunks"]
OPTIONS: tuple[Option, ...] = ("tp_overlap_chunks", "ep_overlap_chunks")
MOST = 8
"""More chunks are not tried: each is a collective with its latency, and of tp a product of fewer tokens."""


def possible(config: Config, option: Option) -> list[int]:
    """The numbers of chunks that are tried: at most the tokens of a rank in a linear layer, or the experts of a rank.

    A chunk for each expert is tried too, however many they are: its rows need not be sorted.
    """
    parallel = config.parallel
    if option == "tp_overlap_chunks":
        most = config.train.micro_batch_size * config.train.seq_length // (parallel.cp * parallel.tp)
        return list(range(1, max(min(MOST, most), 1) + 1))
    experts = max(fewest_experts(config), 1)
    return sorted({*range(1, min(MOST, experts) + 1), experts})


def with_chunks(config: Config, option: Option, chunks: int) -> Config:
    """`config` with this number of chunks."""
    values: dict[str, int] = {option: chunks}
    return replace(config, parallel=replace(config.parallel, **values))  # type: ignore[arg-type]


def left_open(config: Config) -> list[Option]:
    """The options with 0 for a number that is to be chosen."""
    return [option for option in OPTIONS if not getattr(config.parallel, option)]


def uncut(config: Config) -> Config:
    """`config` with 1 where a number is to be chosen. It keeps as many bytes."""
    for option in left_open(config):
        config = with_chunks(config, option, 1)
    return config


def best(config: Config, seconds: Callable[[Config], float]) -> Config:
    """`config` with the numbers of chunks that take the least `seconds`, where it asks for that. The fewest of equals.

    One option is chosen after the other.
    """
    options = left_open(config)
    config = uncut(config)
    for option in options:
        config = min((with_chunks(config, option, chunks) for chunks in possible(config, option)), key=seconds)
    return config


def check_chunks(config: Config, parts: Parts) -> Config:
    """`config`, validated, with numbers in place of 0. Every rank comes to the same alone.

    Raises ConfigError if there is no machine or no schedule to predict the time of a step for.
    """
    options = left_open(config)
    if not options:
        return config
    name = f"parallel.{options[0]}"
    if config.gpu == "auto":
        text = (
            "0 takes the number with the shortest predicted step, and needs --gpu, such as h100-80g; or give a number"
        )
        raise ConfigError(problem(config, f"{name} gpu", text))
    if config.parallel.schedule == "auto":
        text = "the schedule is not known before it is measured; name one, or give a number of chunks"
        raise ConfigError(problem(config, f"{name} parallel.schedule", text))
    machine: Hardware = hardware.load(config.gpu)

    def seconds(of: Config) -> float:
        return step_time(with_planned_kernels(of), parts, machine).seconds

    chosen = best(config, seconds)
    for option in options:
        gain = seconds(with_chunks(chosen, option, 1)) / seconds(chosen) - 1
        chunks = getattr(chosen.parallel, option)
        say(f"parallel.{option}=0: {chunks}, predicted {gain:.1%} faster on {machine.name} than 1")
    return chosen


_INPUTS = (0.0, 0.5, 1.0)
_TRIES = 8


class MemoryChoice(NamedTuple):
    """What saves memory: train.recompute, train.recompute_layers and train.offload, and optimizer.offload."""

    recompute: Mode
    layers: tuple[str, ...]
    inputs: float
    optimizer: float

    @property
    def activations(self) -> tuple[Mode, tuple[str, ...], float]:
        """The part of this choice that is about activations."""
        return self[:3]

    @property
    def order(self) -> tuple[Mode, int, float, float, tuple[str, ...]]:
        """What decides between equally fast choices: every n-th layer before layers by number."""
        return self.recompute, every_nth(self.layers), self.inputs, self.optimizer, self.layers

    def of(self, config: Config) -> Config:
        """`config` with it."""
        recompute, layers, inputs = self.activations
        train = replace(config.train, recompute=recompute, recompute_layers=layers, offload=inputs)
        return replace(config, train=train, optimizer=replace(config.optimizer, offload=self.optimizer))

    def in_words(self) -> str:
        """Return the choice as options."""
        layers = f" of layers {' '.join(self.layers)}" if self.layers else ""
        inputs = f", train.offload {self.inputs:g}" if self.inputs else ""
        return f"train.recompute {self.recompute}{layers}{inputs}, optimizer.offload {self.optimizer:g}"


def choices(config: Config) -> Iterator[MemoryChoice]:
    """Yield what is tried. An option that `config` sets stays as it is."""
    train = config.train
    shares: tuple[float, ...] = (0.0, *SHARES)
    if config.optimizer.offload != OptimizerConfig().offload:
        shares = (config.optimizer.offload,)
    modes: list[tuple[Mode, tuple[str, ...]]] = [("none", ()), ("light", ())]
    for by_layer, every in product(BY_LAYER, EVERY):
        if every < config.model.num_hidden_layers:
            modes.append((by_layer, (f"::{every}",) if every > 1 else ()))
    if train.recompute != TrainConfig().recompute:
        modes = [(train.recompute, train.recompute_layers)]
    for mode, layers in modes:
        for inputs, share in product(_shares_of_inputs(config, mode), shares):
            yield MemoryChoice(mode, layers, inputs, share)


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
    return MemoryChoice(train.recompute, train.recompute_layers, train.offload, optimizer.offload).of(given)


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


def needed(config: Config, report: RankReport) -> int:
    """The bytes of a rank, with what uneven experts may need."""
    return report.total + for_uneven_experts(config, report)


def in_ranges(numbers: Iterable[int]) -> tuple[str, ...]:
    """Numbers of layers as train.recompute_layers has them, such as 0-9 16."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return tuple(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _sort_key(timed: tuple[float, MemoryChoice]) -> tuple[float, tuple[object, ...]]:
    """Return the key that sorts choices: by seconds of a step, then the simpler choice first."""
    seconds, choice = timed
    return seconds, choice.order


class _Budget:
    """The bytes of train.memory_gb, and what they are spent on."""

    def __init__(self, config: Config, parts: Parts, machine: Hardware):
        self.config = config
        self.parts = parts
        self.machine = machine
        self.limit = int(config.train.memory_gb * 2**30)
        parallel = config.parallel
        self.rank_of = placement(parallel.schedule, parallel.pp, parallel.vpp)

    def spend(self) -> Config:
        """The fastest choice that fits."""
        seconds, choice = self.fastest_by_layer(*self.fastest_alike())
        config = choice.of(self.config)
        report = fullest_rank(config, self.parts)
        config, words = self.with_schedule(config, report)
        text = f"{choice.in_words()}{words}, {needed(config, report) / 2**30:,.2f} GiB by plan, {seconds:.4g} s a step"
        say(f"train.memory_gb={self.config.train.memory_gb:g}: {text} predicted on {self.machine.name}")
        return config

    def fastest_alike(self) -> tuple[float, MemoryChoice]:
        """The predicted seconds and the choice, of those that recompute as much in all stages."""
        smallest: tuple[int, MemoryChoice] | None = None
        # Times of equally fast ones may differ in a last bit. Of these the one that moves least is taken.
        timed = [(round(seconds, 9), choice) for seconds, choice in self.timed()]
        for seconds, choice in sorted(timed, key=_sort_key):
            config = choice.of(self.config)
            report = fullest_rank(config, self.parts)
            fits_host = report.on_host <= self.machine.host_bytes
            if needed(config, report) <= self.limit and fits_host:
                return seconds, choice
            if fits_host and (smallest is None or needed(config, report) < smallest[0]):
                smallest = needed(config, report), choice
        text = f"a host of {self.machine.name} has too little memory"
        if smallest is not None:
            text = f"the least is {smallest[0] / 2**30:,.2f} GiB, with {smallest[1].in_words()}"
        text += "; allow more, use more ranks, or shard more by optimizer.zero_stage, parallel.tp, pp or cp"
        raise ConfigError(problem(self.config, "train.memory_gb", text))

    def fastest_by_layer(self, seconds: float, alike: MemoryChoice) -> tuple[float, MemoryChoice]:
        """Return seconds and choice of the fastest: `alike`, or recomputing on each pipeline rank as few layers as fit.

        Early stages keep activations of more micro-batches, so they recompute more.
        """
        best = seconds, alike
        if self.config.train.recompute != TrainConfig().recompute:
            return best
        # The state may stay on the device where that suffices.
        shares = sorted({next(choices(self.config)).optimizer, alike.optimizer})
        if alike.recompute == "none" and alike.optimizer == shares[0]:
            return best
        for mode, share in product(BY_LAYER, shares):
            for inputs in _shares_of_inputs(self.config, mode):
                choice = self.with_fewest_layers(MemoryChoice(mode, (), inputs, share))
                if choice is not None:
                    best = min(best, (round(self.seconds(choice), 9), choice), key=_sort_key)
        return best

    def with_fewest_layers(self, choice: MemoryChoice) -> MemoryChoice | None:
        """`choice` with the fewest layers of each pipeline rank that make it fit. None if they all do not suffice."""
        of_rank: dict[int, list[int]] = {}
        for stage, numbers in enumerate(self.parts.builder.stage_layers(self.config)):
            of_rank.setdefault(self.rank_of[stage], []).extend(numbers)
        fewest = dict.fromkeys(of_rank, 0)  # that may still suffice
        enough = {rank: len(numbers) for rank, numbers in of_rank.items()}
        if self.fits(choice.of(self.config), set(of_rank)) != set(of_rank):
            return None
        while open_ranks := {rank for rank in of_rank if fewest[rank] < enough[rank]}:
            tried = {rank: (fewest[rank] + enough[rank]) // 2 for rank in of_rank}
            layers = in_ranges(number for rank, count in tried.items() for number in of_rank[rank][:count])
            # Without a layer nothing is recomputed; with recompute full an empty list would mean all.
            mode: Mode = choice.recompute if layers else "none"
            config = choice._replace(recompute=mode, layers=layers, inputs=choice.inputs if layers else 0.0)
            fit = self.fits(config.of(self.config), open_ranks)
            for rank in open_ranks:
                if rank in fit:
                    enough[rank] = tried[rank]
                else:
                    fewest[rank] = tried[rank] + 1
        layers = in_ranges(number for rank, count in enough.items() for number in of_rank[rank][:count])
        found = choice._replace(layers=layers)
        # More layers may need more in a rare case, so what was found is planned as a whole.
        if not layers or self.fits(found.of(self.config), set(of_rank)) != set(of_rank):
            return None
        return found

    def fits(self, config: Config, ranks: set[int]) -> set[int]:
        """Return which of the pipeline `ranks` stay within train.memory_gb, and within the memory of their host."""
        over = {
            report.pp
            for report in reports(config, self.parts)
            if needed(config, report) > self.limit or report.on_host > self.machine.host_bytes
        }
        return ranks - over

    def timed(self) -> list[tuple[float, MemoryChoice]]:
        """Return each choice with its predicted seconds of a step."""
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

    def seconds(self, choice: MemoryChoice) -> float:
        """Return the predicted seconds of a step with this choice."""
        return step_time(with_planned_kernels(uncut(choice.of(self.config))), self.parts, self.machine).seconds

    def with_schedule(self, config: Config, report: RankReport) -> tuple[Config, str]:
        """`config` with parallel.schedule_memory_gb of what is left, if its schedule makes use of it, and in words."""
        parallel = config.parallel
        # A searched schedule that may grow keeps as much as parallel.schedule_memory_gb allows, and idles less for it.
        search = find(parallel.schedule).search
        if search is None or not search.grows or parallel.schedule_memory_gb or parallel.pp == 1:
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
