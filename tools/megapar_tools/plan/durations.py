"""The time of recorded work (`megapar_tools.plan.work`) on a machine: busy by kind, and exposed communication."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.network import Network
from megapar_tools.plan.work import AttentionWork, Kernel, Operations, Product, Started

PRODUCTS = "matrix products"
FP8_PRODUCTS = "products in FP8"
EXPERTS = "products of experts"
FORWARD_ATTENTION = "attention forward"
BACKWARD_ATTENTION = "attention backward"
KERNELS = "other kernels"
KINDS = (PRODUCTS, FP8_PRODUCTS, EXPERTS, FORWARD_ATTENTION, BACKWARD_ATTENTION, KERNELS)

# The time of our attention kernels over that of the machine's rates, forward and backward, by the widest head: measured
# on an H200 (docs/kernels.md) at 8,192 positions.
TILED = {64: (1.16, 0.96), 128: (1.27, 1.42), 256: (1.80, 2.19)}

Seconds = Mapping[str, float]
"""Seconds by the kind of work, or by axis."""


def add_seconds(*parts: Seconds) -> dict[str, float]:
    """The sums of `parts` by key."""
    total: dict[str, float] = {}
    for part in parts:
        for key, seconds in part.items():
            total[key] = total.get(key, 0.0) + seconds
    return total


def scale_seconds(seconds: Seconds, factor: float) -> dict[str, float]:
    """`seconds` multiplied by `factor`."""
    return {key: value * factor for key, value in seconds.items()}


@dataclass(frozen=True)
class Duration:
    """The time of one action, in seconds. `busy` counts kernels by kind.

    `communicating` counts communication by axis, and `exposed` the part without computing under it. `host` is the time
    of the host to issue all operations.
    """

    seconds: float = 0.0
    host: float = 0.0
    busy: Seconds = field(default_factory=dict)
    communicating: Seconds = field(default_factory=dict)
    exposed: Seconds = field(default_factory=dict)

    def times(self, factor: float) -> "Duration":
        """Return the duration of `factor` such actions, one after the other."""
        return Duration(
            self.seconds * factor,
            self.host * factor,
            scale_seconds(self.busy, factor),
            scale_seconds(self.communicating, factor),
            scale_seconds(self.exposed, factor),
        )


def total(parts: list[Duration]) -> Duration:
    """The time of actions one after the other."""
    return Duration(
        sum(part.seconds for part in parts),
        sum(part.host for part in parts),
        add_seconds(*(part.busy for part in parts)),
        add_seconds(*(part.communicating for part in parts)),
        add_seconds(*(part.exposed for part in parts)),
    )


def kernel_seconds(operation: Product | AttentionWork | Kernel, hardware: Hardware) -> tuple[str, float]:
    """The kind of a computing operation, and its seconds."""
    moved = hardware.memory_seconds(operation.moved_bytes)
    overhead = hardware.kernel_us * 1e-6
    match operation:
        case Product(m, n, k, number, precision):
            overhead *= operation.launches
            restored = 0.0
            if precision == "fp8" and not hardware.multiplies_fp8:
                precision = "bf16" if "bf16" in hardware.peak_tflops else "fp32"
                # A byte of each number is read, and two are written.
                restored = hardware.memory_seconds(3 * (m + n) * k * number)
            computed = number * hardware.product_seconds(m, n, k, precision)
            if operation.grouped:
                computed /= hardware.matrix.grouped_share
            kind = EXPERTS if operation.grouped else PRODUCTS
            if precision == "fp8":
                kind = FP8_PRODUCTS
            return kind, max(computed, moved) + restored + overhead
        case AttentionWork(flops, width, backward, precision):
            rate = hardware.attention_rate(width, precision)
            if operation.tiled:
                flops *= TILED[next(most for most in TILED if width <= most)][backward]
            if backward:
                # Five products instead of two: the scores are computed again (arXiv 2307.08691, section 3.1.2).
                return BACKWARD_ATTENTION, max(2.5 * flops / rate.backward / 1e12, moved) + overhead
            return FORWARD_ATTENTION, max(flops / rate.forward / 1e12, moved) + overhead
        case Kernel():
            return KERNELS, moved + overhead


def duration(operations: Operations, hardware: Hardware, network: Network) -> Duration:
    """The time of `operations`, issued in their order.

    A device computes them one after the other. Communication over the same kind of link runs one after
    the other too, beside what is computed, from its start to its wait.
    """
    clock = 0.0
    link_free: dict[str, float] = {}
    busy: dict[str, float] = {}
    communicating: dict[str, float] = {}
    exposed: dict[str, float] = {}
    travelling: dict[int, tuple[str, float]] = {}
    for operation in operations:
        if isinstance(operation, Started):
            axis = operation.axis
            level = network.level(axis)
            seconds = network.seconds(operation.operation, axis, operation.nbytes)
            link_free[level] = max(clock, link_free.get(level, 0.0)) + seconds
            communicating[axis] = communicating.get(axis, 0.0) + seconds
            travelling[operation.number] = axis, link_free[level]
        elif isinstance(operation, (Product, AttentionWork, Kernel)):
            kind, seconds = kernel_seconds(operation, hardware)
            busy[kind] = busy.get(kind, 0.0) + seconds
            clock += seconds
        else:
            axis, end = travelling.pop(operation.number)
            exposed[axis] = exposed.get(axis, 0.0) + max(end - clock, 0.0)
            clock = max(end, clock)
    disturbing = [axis for axis in communicating if axis not in network.copied]
    hidden = sum(communicating[axis] - exposed.get(axis, 0.0) for axis in disturbing)
    lost = max(hidden, 0.0) * hardware.interference
    return Duration(clock + lost, len(operations) * hardware.launch_us * 1e-6, busy, communicating, exposed)
