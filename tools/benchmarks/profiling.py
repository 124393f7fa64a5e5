"""The time of one training step by kind: of torch.profiler's operations, or of a GPU's kernels."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megapar.system import device


class Kernel(NamedTuple):
    """All launches of one kernel in a step, or all calls of one operation."""

    name: str
    calls: int
    ms: float


def record(step: Callable[[], object], target: torch.device) -> list[Kernel]:
    """Kernels of `step`, the longest first. On a CPU torch's operations, without the time of those within them."""
    on_gpu = target.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
        device.synchronize(target)
    events = [event for event in profiler.events() if event.device_type == kind]
    return gather((e.name, e.time_range.elapsed_us() if on_gpu else e.self_cpu_time_total) for e in events)


def gather(launches: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Launches, as (name, microseconds), by kernel."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in launches:
        found[name].append(microseconds)
    kernels = [Kernel(name, len(times), sum(times) / 1e3) for name, times in found.items()]
    return sorted(kernels, key=lambda kernel: kernel.ms, reverse=True)


def kind_of(name: str, patterns: Mapping[str, str], other: str) -> str:
    """The first kind with its pattern found in `name`."""
    return next((kind for kind, pattern in patterns.items() if re.search(pattern, name)), other)
