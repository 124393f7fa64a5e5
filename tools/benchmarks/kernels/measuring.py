"""How a case is measured: inputs, comparison with torch in fp32, and times of each direction."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from megapar_kernels.backend import Kernels
from megapar_kernels.dispatch import interpreting, main_grad_of
from torch import Tensor

from benchmarks.kernels import peers
from benchmarks.kernels.ops import Case, Direction, Maker
from benchmarks.kernels.timing import ROTATED_BYTES, Stopwatch
from benchmarks.ranks import BenchmarkError
from megapar.base.errors import ConfigError
from megapar.observe.provenance import provenance
from megapar.system import device

OTHER_RESULT = 2e-2  # a contender this far from fp32 computes something else


def prepare(dry_run: bool) -> tuple[Stopwatch, Kernels, dict[str, Any]]:
    """The first GPU, or the CPU for a dry run, with its kernels and the limits of the machine.

    Raises ConfigError without a GPU.
    """
    if not dry_run and not device.cuda_devices():
        raise ConfigError("there is no GPU here; --dry_run does everything on the CPU, without figures")
    target = device.choose("cpu" if dry_run else "cuda", 0, 1)
    device.prepare(target, threads=1, deterministic=False)
    kernels = device.choose_kernels("triton" if not dry_run or interpreting() else "torch", target)
    bench = Stopwatch(target, dry_run=dry_run)
    circumstances = provenance(target) | {"dry_run": dry_run, "kernels": asdict(kernels), "dtype": str(bench.dtype)}
    circumstances |= {"copy_gb_per_second": bench.copy_gb_per_second(), "gemm_tflops": bench.gemm_tflops()}
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
    found = torch.autograd.grad(results, wanted, grads, allow_unused=True)
    mains = [main_grad_of(x) for x in wanted]
    return [m.tensor if g is None and m is not None else g for g, m in zip(found, mains, strict=True)]


def widened(x: Any) -> Any:
    """An input in fp32, if it has a floating-point dtype."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().float().requires_grad_(x.requires_grad)


def evaluate(bench: Stopwatch, case: Case, op: peers.Op, *, wide: bool = False) -> list[Tensor]:
    """Results and gradients for the inputs of seed 0; `wide` computes in fp32."""
    inputs = inputs_of(bench, case, 0)
    if wide:
        inputs = tuple(map(widened, inputs))
    results = tensors(op(*inputs))
    found = [x.detach() for x in results]
    if "both" not in case.directions:
        return found
    return found + gradients(inputs, results, upstream(bench, results))


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Relative norms of the differences; NaN if a NaN is in either."""
    norm = torch.linalg.vector_norm
    return [
        float(norm(x.float() - e.float()) / norm(e.float()).clamp(min=1e-30)) for x, e in zip(found, exact, strict=True)
    ]


def check(case: Case, found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest error of our kernel; BenchmarkError if one is above what rounding explains."""
    measured = errors(found, exact)
    for i, (x, error) in enumerate(zip(found, measured, strict=True)):
        limit = case.tolerance or (4e-3 if x.dtype.itemsize == 2 else 1e-5)
        if not error <= limit:
            raise BenchmarkError(f"result {i} differs from torch in fp32 by {error:.1e}, above {limit:.0e}")
    return max(measured)


def inputs_of(bench: Stopwatch, case: Case, seed: int) -> tuple[Any, ...]:
    return case.make(Maker(bench.target, bench.dtype, seed))


def upstream(bench: Stopwatch, results: Sequence[Tensor]) -> list[Tensor]:
    """The gradients to start backward from: the same for all contenders, rounded to the dtype of each result."""
    maker = Maker(bench.target, bench.dtype, 1)
    return [maker.floats(*y.shape, grad=False).to(y.dtype) for y in results]


def measure(bench: Stopwatch, case: Case, op: peers.Op, contender: Contender) -> None:
    """Median milliseconds of each direction and peak memory, into `contender`. Backward is both without forward.

    There are so many sets of inputs that none is still in the device's cache at its next turn.
    """
    first = inputs_of(bench, case, 0)
    nbytes = sum(x.nbytes for x in first if isinstance(x, Tensor))
    copies = 1 if bench.dry_run else -(-ROTATED_BYTES // nbytes)
    sets = [first] + [inputs_of(bench, case, seed) for seed in range(1, copies)]

    def forward(i: int) -> None:
        op(*sets[i % copies])

    if "both" not in case.directions:
        contender.bytes = bench.peak_bytes(forward)
        contender.ms["forward"] = bench.median_ms(forward)
        return
    grads = [upstream(bench, tensors(op(*inputs))) for inputs in sets]

    def both(i: int) -> None:
        inputs = sets[i % copies]
        gradients(inputs, tensors(op(*inputs)), grads[i % copies])

    contender.bytes = bench.peak_bytes(both)
    contender.ms["forward"] = ahead = bench.median_ms(forward)
    contender.ms["both"] = whole = bench.median_ms(both)
    contender.ms["backward"] = None if whole is None or ahead is None else whole - ahead


def brief(error: Exception) -> str:
    """The error in one line. Of several lines torch.compile tells the cause in a later one."""
    lines = str(error).strip().splitlines() or [""]
    causes = [cause for line in lines if (cause := line.partition("Developer debug context: ")[2])]
    return f"{type(error).__name__}: {(causes or lines)[0][:150]}"
