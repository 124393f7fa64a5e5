"""How a case is measured: inputs, comparison with torch in fp32, and times of each direction."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from megapar_kernels.backend import Kernels
from megapar_kernels.dispatch import interpreting, main_grad_of
from torch import Tensor

from benchmarks.kernels import peers
from benchmarks.kernels.ops import Case, Direction, Maker
from benchmarks.kernels.timing import ROTATED_BYTES, Stopwatch
from megapar import device
from megapar.errors import ConfigError, NumericError
from megapar.train.provenance import provenance

OTHER_RESULT = 2e-2  # a contender this far from fp32 computes something else


class KernelError(NumericError):
    """A kernel's result is not what torch computes in fp32."""

    exit_code = 70


@dataclass(frozen=True)
class Bench:
    """How and on which device everything is measured."""

    target: torch.device
    dtype: torch.dtype
    watch: Stopwatch

    def inputs(self, case: Case, seed: int) -> tuple[Any, ...]:
        return case.make(Maker(self.target, self.dtype, seed))


def prepare(dry_run: bool) -> tuple[Bench, Kernels, dict[str, Any]]:
    """The first GPU, or the CPU for a dry run, with its kernels and the limits of the machine.

    Raises ConfigError without a GPU.
    """
    if not dry_run and not device.cuda_devices():
        raise ConfigError("there is no GPU here; --dry_run does everything on the CPU, without figures")
    target = device.choose("cpu" if dry_run else "cuda", 0, 1)
    device.prepare(target, threads=1, deterministic=False)
    kernels = device.choose_kernels("triton" if not dry_run or interpreting() else "torch", target)
    watch = Stopwatch(target, dry_run=dry_run)
    bench = Bench(target, torch.float32 if dry_run else torch.bfloat16, watch)
    circumstances = provenance(target) | {"dry_run": dry_run, "kernels": asdict(kernels), "dtype": str(bench.dtype)}
    circumstances |= {"copy_gb_per_second": watch.copy_gb_per_second(), "gemm_tflops": watch.gemm_tflops()}
    return bench, kernels, circumstances


@dataclass
class Contender:
    """One implementation of a case: milliseconds by direction, peak bytes of forward and backward, error against fp32.

    `status` is ok, or why there are no figures.
    """

    status: str = "ok"
    error: float | None = None
    bytes: int | None = None
    ms: dict[Direction, float | None] = field(default_factory=dict)


def tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return list(results)


def gradients(inputs: Sequence[Any], results: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Of all inputs with one; of weights, the main gradient if the op adds to it."""
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not wanted:
        return []
    found = torch.autograd.grad(results, wanted, grads, allow_unused=True)
    mains = [main_grad_of(x) for x in wanted]
    return [m.tensor if g is None and m is not None else g for g, m in zip(found, mains, strict=True)]


def evaluate(bench: Bench, case: Case, op: peers.Op, *, wide: bool = False) -> list[Tensor]:
    """Results and gradients for the inputs of seed 0; `wide` computes in fp32."""
    inputs = bench.inputs(case, 0)
    if wide:
        floating = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs]
        inputs = tuple(
            x.detach().float().requires_grad_(x.requires_grad) if f else x
            for x, f in zip(inputs, floating, strict=True)
        )
    results = tensors(op(*inputs))
    maker = Maker(bench.target, bench.dtype, 1)  # the same upstream gradients for all, rounded to the op's dtype
    grads = [maker.floats(*y.shape, grad=False).to(y.dtype) for y in results if "both" in case.directions]
    return [x.detach() for x in results] + gradients(inputs, results, grads)


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Relative norms of the differences; NaN if a NaN is in either."""
    norms = [
        (torch.linalg.vector_norm(x.float() - e.float()), torch.linalg.vector_norm(e.float()))
        for x, e in zip(found, exact, strict=True)
    ]
    return [float(difference / norm.clamp(min=1e-30)) for difference, norm in norms]


def check(case: Case, found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest error of our kernel; KernelError if one is above what rounding explains."""
    measured = errors(found, exact)
    for i, (x, error) in enumerate(zip(found, measured, strict=True)):
        limit = case.tolerance or (4e-3 if x.dtype.itemsize == 2 else 1e-5)
        if not error <= limit:
            raise KernelError(f"result {i} differs from torch in fp32 by {error:.1e}, above {limit:.0e}")
    return max(measured)


class Inputs:
    """Sets of inputs of a case, and the gradients to start backward from. With so many sets, none is still in the
    device's cache at its next turn."""

    def __init__(self, bench: Bench, case: Case, op: peers.Op):
        first = bench.inputs(case, 0)
        nbytes = sum(x.nbytes for x in first if isinstance(x, Tensor))
        copies = 1 if bench.watch.dry_run else -(-ROTATED_BYTES // nbytes)
        self.differentiable = "both" in case.directions
        self.sets = [first] + [bench.inputs(case, seed) for seed in range(1, copies)]
        maker = Maker(bench.target, bench.dtype, 1)
        self.upstream = [
            [maker.floats(*y.shape, grad=False).to(y.dtype) for y in tensors(op(*inputs))]
            for inputs in self.sets
            if self.differentiable
        ]

    def forward(self, op: peers.Op, i: int) -> None:
        """Repetition i of `op`, of the i-th of the rotating sets."""
        op(*self.sets[i % len(self.sets)])

    def both(self, op: peers.Op, i: int) -> None:
        """Forward and backward of repetition i."""
        place = i % len(self.sets)
        gradients(self.sets[place], tensors(op(*self.sets[place])), self.upstream[place])


def measure(bench: Bench, case: Case, op: peers.Op, contender: Contender) -> None:
    """Times of each direction over rotating inputs, and peak memory, into `contender`."""
    inputs = Inputs(bench, case, op)
    forward = partial(inputs.forward, op)
    both = partial(inputs.both, op)
    contender.bytes = bench.watch.peak_bytes(both if inputs.differentiable else forward)
    contender.ms = times(bench, inputs, op)


def times(bench: Bench, inputs: Inputs, op: peers.Op) -> dict[Direction, float | None]:
    """Median milliseconds by direction; backward is both together without forward."""
    found: dict[Direction, float | None] = {}
    found["forward"] = ahead = bench.watch.median_ms(partial(inputs.forward, op))
    if inputs.differentiable:
        found["both"] = whole = bench.watch.median_ms(partial(inputs.both, op))
        found["backward"] = None if whole is None or ahead is None else whole - ahead
    return found


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:150]}"
