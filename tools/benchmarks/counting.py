"""How everything on a CPU is counted: turns of contenders, seconds on the clock, CPU seconds, bytes of memory."""

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megapar.system import device


def in_turn(names: Iterable[str], number: int) -> list[str]:
    """The contenders of round `number`. Each round has the reverse order of the one before, so noise of the machine
    hits neighbors alike. A ratio is taken within a round."""
    return list(names)[:: 1 if number % 2 else -1]


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, and of CPU time: without waiting, and without other programs."""

    wall: float
    cpu: float


def cost(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> tuple[Cost, Any]:
    """What `work` costs, and what it returns. `clock` counts CPU seconds: those of this process."""
    wall = time.perf_counter()
    cpu = clock()
    result = work()
    return Cost(time.perf_counter() - wall, clock() - cpu), result


def with_children() -> float:
    """CPU seconds of this process and of its children after their `wait`, by ticks of a hundredth."""
    return sum(os.times()[:4])


def memory(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes of this process: the highest resident size during `work`, and by how much it is above that before."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)  # what earlier work freed and malloc kept is resident: `work` would take it again, uncounted
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    work()
    peak = device.peak_memory_bytes(torch.device("cpu"))
    return peak, peak - before


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and range."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Median and range, over rounds, of the ratio within a round."""
    return spread(above / below for above, below in zip(numerators, denominators, strict=True))
