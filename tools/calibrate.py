"""Measures this machine and writes a hardware file for tools/plan.py: python tools/calibrate.py --output cpu.toml.

All ranks measure at the same time, because the ranks of a machine share its memory and, on CPUs, its cores. So
calibrate with as many ranks as the runs will have.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from benchmarks.ranks import run_ranks
from megapar_kernels.attention import causal_attention
from megapar_tools.plan.hardware import AttentionRate, Hardware, HostMemory, Link, MatrixRates, in_toml, load

from megapar.base.errors import ConfigError
from megapar.base.grid import Grid
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.config.messages import counted
from megapar.declare import context
from megapar.declare.sharding import model_dtype
from megapar.launch.reporting import reported
from megapar.system import device, environment
from megapar.system.atomic_files import replacing

Precision = Literal["fp32", "bf16", "fp16"]
REPETITIONS = 25
SMALL = 100  # operations on single numbers
SECONDS = 600.0  # a calibration that takes longer hangs

# Rows, columns and depth of products. Small ones show how the rate falls, long and flat ones are those of tensor
# parallelism and of experts.
CPU_PRODUCTS = (
    *((64, 64, 64), (128, 256, 256), (512, 256, 256), (512, 1024, 256), (512, 256, 1024)),
    *((1024, 512, 512), (1024, 4096, 256), (256, 1024, 1024), (2048, 1024, 1024)),
)
GPU_PRODUCTS = (
    *((512, 512, 512), (1024, 2048, 2048), (4096, 4096, 4096), (4096, 14336, 4096), (8192, 4096, 14336)),
    *((8192, 1024, 8192), (8192, 8192, 1024), (1024, 8192, 8192), (8192, 8192, 8192)),
)
WIDTHS = (32, 64, 128)  # of heads


@dataclass
class Arguments:
    """Measure matrix products, attention, memory and links, and write a hardware file."""

    output: Path
    """The TOML file to write."""
    like: str = ""
    """Hardware, by name or file, with what no measurement here gives: network, host memory, price and watts."""
    nproc: int = 0
    """Ranks that measure at the same time; 0: all GPUs, or two on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch sees GPUs, else cpu."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of products and attention; auto: bf16 on GPUs, fp32 on CPUs."""


@dataclass(frozen=True)
class Task:
    """What each rank measures."""

    world: int
    precision: Precision
    products: Sequence[tuple[int, int, int]]
    copy_elements: int
    """fp32 elements of the tensors that memory is measured with: far more than caches hold."""
    attention_length: int
    messages: Sequence[int]
    """Bytes that a rank gives to a gather."""


def seconds_of(work: Callable[[], object], target: torch.device) -> float:
    """The median seconds of one call.

    The number of calls is fixed, because with collectives all ranks must call the same. A first call loads code and
    allocates memory, and is not counted.
    """
    times: list[float] = []
    for _ in range(1 + REPETITIONS):
        start = time.perf_counter()
        work()
        device.synchronize(target)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure(task: Task, target: torch.device) -> dict[str, Any]:
    """All figures of one rank. The ranks of `task.world` call it together."""
    dtype = model_dtype(task.precision)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=target, dtype=dtype)

    products = []
    for m, n, k in task.products:
        a, b, out = random(m, k), random(k, n), random(m, n)
        products.append((m, n, k, seconds_of(partial(torch.mm, a, b, out=out), target)))
    attention = {}
    for width in WIDTHS:
        attention[width] = _attention_tflops(task, width, random, target)
    x, y = (torch.randn(task.copy_elements, device=target) for _ in range(2))
    z = torch.empty_like(x)
    memory = 3 * x.nbytes / seconds_of(partial(torch.add, x, y, out=z), target)
    launch = seconds_of(partial(_small_operations, random(1).requires_grad_()), target) / (2 * SMALL)
    ctx = context.create(Grid(dp=task.world), device=target)
    return {
        "products": products,
        "attention": attention,
        "memory": memory,
        "launch": launch,
        "peak": device.peak_tflops(target, task.precision),
        "memory_bytes": device.memory_bytes(target, task.world),
        **_links(task, ctx.dp, target),
    }


def _small_operations(x: torch.Tensor) -> None:
    """SMALL products of single numbers forward, and as many backward: what the host takes for an operation."""
    y = x
    for _ in range(SMALL):
        y = y * 1.0
    y.backward()


def _attention_tflops(
    task: Task, width: int, random: Callable[..., torch.Tensor], target: torch.device
) -> tuple[float, float]:
    """TFLOP/s of causal attention forward and backward, half of the scores counted."""
    heads = 8
    length = task.attention_length
    q, k, v = (random(length, 1, heads, width).requires_grad_() for _ in range(3))
    impl: Literal["torch", "cudnn"] = "cudnn" if target.type == "cuda" else "torch"
    flops = 2.0 * length * length * width * heads

    def forward() -> torch.Tensor:
        return causal_attention(q, k, v, impl)

    def both() -> None:
        y = forward()
        torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

    with torch.no_grad():
        forward_seconds = seconds_of(forward, target)
    backward_seconds = max(seconds_of(both, target) - forward_seconds, 1e-9)
    return flops / forward_seconds / 1e12, 2.5 * flops / backward_seconds / 1e12


def _links(task: Task, axis: Axis, target: torch.device) -> dict[str, Any]:
    """Seconds of gathers by the bytes of a rank, of an all-to-all, and of a product alone and over a gather."""
    if axis.size == 1:
        return {}
    gathers = []
    for nbytes in task.messages:
        x = torch.zeros(nbytes // 4, device=target)
        gathers.append((nbytes, seconds_of(partial(collectives.all_gather, x, axis), target)))
    nbytes = task.messages[-1]
    rows = torch.zeros(axis.size, nbytes // 4, device=target)
    each = [1] * axis.size
    all_to_all = seconds_of(partial(collectives.all_to_all, rows, each, each, axis), target)
    side = 1024 if target.type == "cpu" else 8192
    a = torch.randn(side, side, device=target)

    def product_under_gather() -> None:
        out, pending = collectives.all_gather_async(rows[0], axis)
        torch.mm(a, a)
        pending.wait()
        del out

    alone = seconds_of(partial(torch.mm, a, a), target)
    return {
        "gathers": gathers,
        "all_to_all": (nbytes, all_to_all),
        "overlap": (alone, gathers[-1][1], seconds_of(product_under_gather, target)),
    }


def fitted_rates(products: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """FLOP/s of large products, and the half sizes of `MatrixRates`, with the least squared error of log seconds.

    `products` has rows, columns, depth and seconds of each.
    """
    m, n, k, seconds = np.array(products, dtype=float).T
    best = (math.inf, 0.0, 0.0, 0.0)
    sizes = (0.0, *2.0 ** np.arange(0, 9, 0.5))
    for half in sizes:
        for half_depth in sizes:
            ratios = np.log(2 * (m + half) * (n + half) * (k + half_depth) / seconds)
            error = float(np.var(ratios))  # the rate takes the mean away
            best = min(best, (error, float(half), float(half_depth), float(np.exp(np.mean(ratios)))))
    _, half, half_depth, rate = best
    return rate, half, half_depth


def fitted_link(gathers: Sequence[tuple[int, float]], world: int) -> Link:
    """Latency and bandwidth with the least relative error. A gather takes world - 1 messages of a rank's bytes."""
    nbytes, seconds = np.array(gathers, dtype=float).T
    messages = world - 1
    # seconds = messages * (latency + nbytes / bandwidth), each row divided by its seconds.
    columns = np.stack([messages / seconds, messages * nbytes / seconds], axis=1)
    latency, inverse = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0]
    # With noise the line may cut the axis below 0, or fall. The smallest message then tells the latency, or the largest
    # one the bandwidth.
    if latency <= 0:
        latency = seconds.min() / messages
    if inverse <= 0:
        inverse = seconds[-1] / messages / nbytes[-1]
    return Link(gb_per_second=round(1 / inverse / 1e9, 3), latency_us=round(latency * 1e6, 2))


def medians(found: Sequence[Any]) -> Any:
    """The median over ranks of each number in what they measured: dicts, lists and numbers, of one shape."""
    first = found[0]
    if isinstance(first, dict):
        return {key: medians([rank[key] for rank in found]) for key in first}
    if isinstance(first, list):
        return [medians([rank[i] for rank in found]) for i in range(len(first))]
    return statistics.median(found)


def hardware_of(found: dict[str, Any], world: int, precision: Precision, name: str, like: Hardware | None) -> Hardware:
    """The machine by the medians of what its `world` ranks have measured. `like` has what they cannot measure."""
    rate, half, half_depth = fitted_rates(found["products"])
    peak = found["peak"] or rate / 1e12  # nobody lists the peak of a CPU, so its share is 1
    memory = found["memory"] / 1e9
    # A rank alone has nobody to talk to. It copies to itself.
    node = Link(gb_per_second=round(memory, 3), latency_us=0.0)
    all_to_all_share = 1.0
    interference = 0.0
    if world > 1:
        node = fitted_link(found["gathers"], world)
        all_to_all_share = _share_of(node, found["all_to_all"], world)
        interference = _interference(*found["overlap"])
    made = Hardware(
        name=name,
        gpus_per_node=world,
        memory_gib=round(found["memory_bytes"] / 2**30, 2),
        reserve_gib=0.5,
        peak_tflops={precision: round(peak, 5)},
        matrix=MatrixRates(round(rate / peak / 1e12, 4), half, half_depth, grouped_share=1.0),
        attention={
            int(width): AttentionRate(round(forward, 5), round(backward, 5))
            for width, (forward, backward) in found["attention"].items()
        },
        memory_gb_per_second=round(memory, 3),
        memory_share=1.0,
        node=node,
        network=node,
        host=HostMemory(round(found["memory_bytes"] * world / 2**30, 2), round(memory, 3), round(memory, 3)),
        all_to_all_share=round(all_to_all_share, 3),
        interference=round(interference, 3),
        kernel_us=0.0,
        launch_us=round(found["launch"] * 1e6, 2),
        step_overhead_ms=0.0,
        price_per_hour=0.0,
        watts=0.0,
    )
    if like is None:
        return made
    return replace(
        made,
        gpus_per_node=like.gpus_per_node,
        reserve_gib=like.reserve_gib,
        network=like.network,
        host=like.host,
        price_per_hour=like.price_per_hour,
        watts=like.watts,
    )


def _share_of(link: Link, all_to_all: Sequence[float], world: int) -> float:
    """The share of the link's bandwidth that an all-to-all reached: bytes to each rank, and seconds."""
    nbytes, seconds = all_to_all
    moved = nbytes * (world - 1)
    reached = moved / max(seconds - (world - 1) * link.latency_us / 1e6, 1e-9)
    return min(1.0, reached / (link.gb_per_second * 1e9))


def _interference(alone: float, gather: float, together: float) -> float:
    """Seconds that a product loses to each second of a gather under it."""
    hidden = min(alone, gather)
    return min(1.0, max(0.0, (together - max(alone, gather)) / hidden))


def main(arguments: Arguments) -> None:
    """Measure on all ranks, and write the file."""
    like = load(arguments.like) if arguments.like else None
    if arguments.output.suffix != ".toml":
        raise ConfigError(f"--output {arguments.output}: is no TOML file, such as {arguments.output}.toml")
    gpus = device.cuda_devices()
    target = arguments.device
    if target == "auto":
        target = "cuda" if gpus else "cpu"
    precision: Precision = "bf16" if target == "cuda" else "fp32"
    if arguments.precision != "auto":
        precision = arguments.precision
    world = arguments.nproc
    if not world:
        world = gpus if target == "cuda" else min(2, environment.usable_cores())
    task = _task(target, precision, world)
    with replacing(arguments.output) as file:  # an error of the path comes before minutes of measuring
        print(f"measuring {precision} on {counted(world, 'rank')} at the same time, for about a minute", flush=True)
        ranks = run_ranks(world, target, partial(measure, task), seconds=SECONDS)
        made = hardware_of(medians(ranks), world, precision, arguments.output.stem, like)
        text = in_toml(made, _comments(arguments.like))
        file.write(text.encode())
    print(text, end="")


def _task(target: str, precision: Precision, world: int) -> Task:
    if target == "cuda":
        return Task(world, precision, GPU_PRODUCTS, 1 << 28, 4096, [1 << power for power in range(12, 29, 4)])
    return Task(world, precision, CPU_PRODUCTS, 1 << 23, 512, [1 << power for power in range(10, 23, 3)])


def _comments(like: str) -> dict[str, str]:
    """What to know of the figures, by the key of `Hardware`."""
    note = f"as {like}" if like else "not measured: --like HARDWARE takes it from another file"
    comments = dict.fromkeys(("reserve_gib", "network.gb_per_second", "host.gib", "price_per_hour", "watts"), note)
    comments["step_overhead_ms"] = "not measured"
    comments["matrix.grouped_share"] = "not measured"
    return comments


if __name__ == "__main__":
    with reported():
        main(tyro.cli(Arguments, description=__doc__))
