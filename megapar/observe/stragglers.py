"""Finds ranks that compute more slowly than the others: a hot GPU, a busy host, a slow disk.

All ranks of a job wait for each other, so their steps take the same time. What differs is how much of it they wait. In
the first steps of each window a rank notes its waits for other ranks. The rest of the step is its own: computation, and
the wait for data. The least of these steps counts, because a step may be disturbed by chance. On a GPU the times are
those of events in its stream, read when it has long passed them.

Ranks are compared with those of the same pipeline rank, which have the same layers. At the end of a window the time and
the peak memory of each rank are gathered.
"""

import math
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch

from megapar.comm import collectives
from megapar.declare.batch import MicroBatch
from megapar.declare.context import ParallelContext
from megapar.observe.observer import Observer
from megapar.system import device
from megapar.system.recorder import Clock, Moment, Recorder

SAMPLED = 4  # steps of a window in which a rank notes its waits
SLOW = 1.1  # times the median
_SLOW_ON_CPU = 1.5  # ranks on CPUs share cores, caches and memory with each other
WINDOWS = 3  # one after another, in which a rank must be slow
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Straggler:
    """A rank that needs `ratio` times the median for its own part of a step, up to `step`."""

    step: int
    rank: int
    host: str
    ratio: float

    def __str__(self) -> str:
        return (
            f"step {self.step}: rank {self.rank} on {self.host} computes {self.ratio:.2f} times as long as the median "
            "of the ranks with its layers"
        )


class Waits(Recorder):
    """A recorder that keeps the moments of waits, and nothing else of a step."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._moments: list[Moment] = [clock.moment()]

    def span(self, name: str, numbers: tuple[int, int]) -> AbstractContextManager[None]:  # type: ignore[override]
        return _NOTHING

    def begin(self, axis: str, position: int, name: str, number: int, peer: int, nbytes: int) -> None: ...

    def started(self, axis: str, first: int, last: int) -> None: ...

    def wait(self, axis: str, first: int, last: int) -> None:
        self._moments.append(self._clock.moment())

    def end(self) -> None:
        self._moments.append(self._clock.moment())

    def close(self) -> None:
        """Note the end of the step."""
        self._moments.append(self._clock.moment())

    def own_seconds(self) -> float:
        """The seconds of the step outside of waits. Waits until the device has passed its end."""
        start, *waits, end = self._clock.read(self._moments)
        return end - start - sum(waits[1::2]) + sum(waits[::2])


class Stragglers(Observer):
    """Compares the ranks of a job. `every` is log.straggler_every. `tell` is called on rank 0 for each slow rank, once.

    `write` is called on rank 0 for each window, with a line of metrics.jsonl. The constructor is a collective, and so
    is the last step of each window.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        every: int,
        tell: Callable[[Straggler], None],
        write: Callable[[dict[str, Any]], None],
    ):
        self._ctx = ctx
        self._every = every if ctx.world.size > 1 else 0
        self._tell = tell
        self._write = write
        self._ratio = SLOW if device.is_asynchronous(ctx.device) else _SLOW_ON_CPU
        self._samples: list[tuple[Waits, int]] = []
        self._gathered: tuple[int, device.HostCopy] | None = None
        self._slow: dict[int, int] = {}  # windows one after another, by rank
        self._waits: Waits | None = None  # of the running step
        self._microbatches = 0  # of this rank in it
        if self._every:
            self._clock = device.DeviceClock(ctx.device)
            here = [socket.gethostname(), ctx.pp.rank]
            self._ranks = collectives.gather_json(here, ctx.world, ctx.device)

    def _position(self, number: int) -> int:
        """Return the position of a step in its window, -1 if nothing is compared."""
        return (number - 1) % self._every if self._every else -1

    def begin_step(self, number: int) -> None:
        flight = self._ctx.flight
        if 0 <= self._position(number) < SAMPLED and flight.recorder is None:  # else log.profile records the step
            self._waits = flight.recorder = Waits(self._clock)

    def before_compute(self, number: int, batches: Sequence[MicroBatch]) -> None:
        self._microbatches = len(batches)

    def after_queue(self, number: int) -> None:
        if self._waits is not None:
            self._ctx.flight.recorder = None
            self._waits.close()
            self._samples.append((self._waits, max(self._microbatches, 1)))
            self._waits = None
        position = self._position(number)
        asynchronous = device.is_asynchronous(self._ctx.device)
        if self._every and position == self._every - 1:
            self._gather(number)
        if self._gathered and (position == 1 or not asynchronous):  # a GPU has gathered them by then
            self._judge(*self._gathered)
            self._gathered = None

    def close(self, error: BaseException | None) -> None:
        if self._waits is not None:
            self._ctx.flight.recorder = None

    def _gather(self, step: int) -> None:
        """Gather the peak memory of each rank, and its least time for a micro-batch, NaN without a sample."""
        seconds = [waits.own_seconds() / number for waits, number in self._samples]
        self._samples = []
        here = torch.tensor(
            [min(seconds, default=math.nan), device.peak_memory_bytes(self._ctx.device)], dtype=torch.float64
        )
        everywhere = collectives.all_gather(device.to_device(here, self._ctx.device), self._ctx.world)
        if self._ctx.world.first:
            self._gathered = step, device.HostCopy(everywhere)

    def _judge(self, step: int, gathered: device.HostCopy) -> None:
        with self._ctx.flight.held():
            seconds, peak = gathered.wait().view(-1, 2).T.tolist()
        known = [value if math.isfinite(value) else None for value in seconds]
        self._write(
            {"step": step, "rank_compute_seconds": known, "rank_peak_memory_bytes": [int(size) for size in peak]}
        )
        by_stage: dict[int, list[int]] = {}
        for rank, (_, stage) in enumerate(self._ranks):
            if math.isfinite(seconds[rank]):
                by_stage.setdefault(stage, []).append(rank)
        for ranks in by_stage.values():
            middle = median_low(seconds[rank] for rank in ranks)
            for rank in ranks:
                ratio = seconds[rank] / middle if middle > 0 else 1.0
                self._slow[rank] = self._slow.get(rank, 0) + 1 if ratio > self._ratio else 0
                if self._slow[rank] == WINDOWS:
                    # Rounded here, so that the line and the event say the same.
                    self._tell(Straggler(step, rank, self._ranks[rank][0], round(ratio, 3)))
