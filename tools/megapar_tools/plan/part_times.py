"""The times of one micro-batch in each part of a model, and in each stage of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.pipeline.schedules import find
from megapar_tools.plan.durations import Duration, add_seconds, duration, total
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.network import Network
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.recorded import Recording
from megapar_tools.plan.shard_groups import ShardGroups, gradient_itemsize
from megapar_tools.plan.stage_works import stages_of
from megapar_tools.plan.work import Operations

HOST_LINK = "host"
"""The link of a device to its host, among the axes."""


@dataclass(frozen=True)
class PartTimes:
    """The times of a part for one micro-batch, and of the collectives of its units (ZeRO-2 and 3)."""

    part: Recording
    number: int
    """How many such parts follow each other."""
    forward: Duration
    backward: Sequence[Duration]
    """B, or where the schedule runs them apart, I and W."""
    gather: float
    reduce: float
    add: float
    convert: float
    """Seconds to convert its weights to the format of their products, once a step. With ZeRO-3 the passes have them."""
    to_host: float
    """Seconds of the inputs of its layers on the link to the host, one way (train.offload)."""

    @property
    def backward_seconds(self) -> float:
        """Seconds of the whole backward pass."""
        return sum(one.seconds for one in self.backward)

    @property
    def weights_seconds(self) -> float:
        """Seconds of W, of a schedule that runs the halves of a backward pass apart."""
        return self.backward[1].seconds


class PartTimer:
    """Times the recorded work of parts on one machine, for one layout."""

    def __init__(self, config: Config, hardware: Hardware, network: Network, groups: ShardGroups):
        self._options = config.optimizer
        # Breadth-first, a unit that is gathered serves all micro-batches.
        self._runs = num_microbatches(config) if find(config.parallel.schedule).breadth_first else 1
        self._in_halves = find(config.parallel.schedule).in_halves
        self._hardware = hardware
        self._network = network
        self._groups = groups

    def time(self, part: Recording) -> PartTimes:
        """Return the times of one such part."""
        forward = self._duration(part.forward)
        passes = [part.inputs, part.weights] if self._in_halves else [part.backward]
        backward = [self._duration(operations) for operations in passes]
        gather = reduce = add = 0.0
        if self._options.zero_stage >= 2:
            for axis, elements in part.elements.items():
                shards = self._groups.shards(axis)
                reduce += self._network.seconds("reduce_scatter", shards, elements * gradient_itemsize(self._options))
                shard = elements / self._groups.num_shards(axis)
                # The sum is read and added to the shard.
                add += self._hardware.memory_seconds(3 * 4 * shard)
                if self._options.zero_stage == 3:
                    gather += self._network.seconds("all_gather", shards, part.gathered_bytes[axis])
        convert = self._duration(part.kept.converted.operations)
        if self._options.zero_stage == 3 and part.elements:
            # A rank converts its own shards, and gathers those of the others.
            own = sum(elements / self._groups.num_shards(axis) for axis, elements in part.elements.items())
            convert = convert.times(own / sum(part.elements.values()))
        to_host = sum(part.kept.on_host) / (self._hardware.host.link_gb_per_second * 1e9)
        return PartTimes(part, 1, forward, backward, gather, reduce, add, convert.seconds, to_host)

    def _duration(self, operations: Operations) -> Duration:
        return duration(operations, self._hardware, self._network)


def time_parts(config: Config, parts: Parts, timer: PartTimer) -> list[list[PartTimes]]:
    """Return the times of the parts of each of the pp * vpp stages."""
    times: dict[Recording, PartTimes] = {}
    stages = []
    for stage in stages_of(config, parts):
        for part, _ in stage:
            if part not in times:
                times[part] = timer.time(part)
        stages.append([replace(times[part], number=number) for part, number in stage])
    return stages


class StageTime(NamedTuple):
    """The time of one micro-batch through a stage: in all, forward (F), and backward (B, or I and W)."""

    whole: Duration
    forward: float
    backward: float


def time_stages(
    stages: Sequence[Sequence[PartTimes]], interference: float, *, with_units: bool, runs: int
) -> list[StageTime]:
    """Return the time of each stage. Most stages are alike, so each kind is timed once.

    `with_units` says whether parts gather and reduce (ZeRO-2 and 3). The collectives of a unit run under `runs`
    micro-batches in a row. `interference` is `Hardware.interference`.
    """
    times: dict[tuple[tuple[Recording, int], ...], StageTime] = {}
    found = []
    for stage in stages:
        key = tuple((one.part, one.number) for one in stage)
        if key not in times:
            times[key] = _time_stage(stage, interference, with_units, runs)
        found.append(times[key])
    return found


def _time_stage(stage: Sequence[PartTimes], interference: float, with_units: bool, runs: int) -> StageTime:
    forward = total([one.forward.times(one.number) for one in stage])
    backward = total([half.times(one.number) for one in stage for half in one.backward])
    forward_seconds = forward.seconds
    backward_seconds = backward.seconds
    exposed: dict[str, float] = {}
    if with_units:
        waits_forward = _unit_waits([(one.forward.seconds * runs, one.gather, one.number) for one in stage]) / runs
        of_backward = [(one.backward_seconds * runs, one.gather + one.reduce, one.number) for one in reversed(stage)]
        adds = sum(one.add * one.number for one in stage)
        waits_backward = (_unit_waits(of_backward) + adds) / runs
        forward_seconds += waits_forward
        backward_seconds += waits_backward
        exposed["grad"] = waits_forward + waits_backward
        moved = sum((2 * one.gather + one.reduce) * one.number for one in stage) / runs
        backward_seconds += max(moved - exposed["grad"], 0.0) * interference
    # Inputs of layers travel under a pass: to the host under the forward, and back under the backward.
    to_host = sum(one.to_host * one.number for one in stage)
    waits = [max(to_host - seconds, 0.0) for seconds in (forward_seconds, backward_seconds)]
    forward_seconds += waits[0]
    backward_seconds += waits[1]
    if sum(waits):
        exposed[HOST_LINK] = sum(waits)
    whole = total([forward, backward])
    # A device waits for a host that issues operations more slowly than they run.
    seconds = forward_seconds + backward_seconds
    slowed = max(seconds, whole.host) / seconds
    whole = replace(whole, seconds=seconds * slowed, exposed=add_seconds(whole.exposed, exposed))
    return StageTime(whole, forward_seconds * slowed, backward_seconds * slowed)


def _unit_waits(parts: Sequence[tuple[float, float, int]]) -> float:
    """Seconds of waiting for units. The collectives of a part run under the part before it. Parts repeat for ever.

    A part has its seconds of computing, those of its units' collectives, and a number: how often it follows itself.
    """
    waits = 0.0
    computed_before = parts[-1][0]
    for computed, moved, number in parts:
        waits += max(moved - computed_before, 0.0) + (number - 1) * max(moved - computed, 0.0)
        computed_before = computed
    return waits
