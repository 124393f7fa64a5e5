"""Measures every fused kernel on one GPU against torch, torch.compile and Liger-Kernel, in less than ten minutes.

First the limits of the machine, torch's copy and an 8192^3 bf16 GEMM; then each op, forward and backward, at the shapes
of Llama 8B and 70B with 8192 tokens. Each is compared with torch in fp32 before it is timed; a wrong one ends the run
with exit code 70, after all others. GB/s are those of the fewest bytes that the op can move, and a share of the
measured copy; a contender's speed is the ratio of its time to ours.

Writes kernels/benchmarks/results/<gpu>.json and a bar chart beside it. --dry_run does all of it once on the CPU, at
tiny shapes, and claims no figure (TRITON_INTERPRET=1 interprets the kernels; without it torch's own ops stand in).
"""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peers
import torch
import tyro
from megapar_kernels.launch import interpreting
from ops import LLAMA_8B, LLAMA_70B, TINY, Case, Direction, Maker, Model, Target, cases
from report import draw, print_report
from rich.console import Console
from rich.progress import Progress
from timing import ROTATED_BYTES, Stopwatch
from torch import Tensor

from megapar import device
from megapar.errors import ConfigError, NumericError, reported, storing
from megapar.params import main_grad_of
from megapar.train.report import provenance, write_json

HERE = Path(__file__).parent
OTHER_RESULT = 2e-2  # a contender this far from fp32 computes something else


class KernelError(NumericError):
    """A kernel's result is not what torch computes in fp32."""

    exit_code = 70


@dataclass(frozen=True)
class Options:
    """Measure the fused kernels."""

    dry_run: bool = False
    """Everything once on the CPU at tiny shapes, without figures."""
    only: tuple[str, ...] = ()
    """Ops whose names contain one of these words, such as norm; empty means all."""
    minutes: float = 9.0
    """No op is begun after this time; the report names those that were not."""
    json: Path | None = None
    """Results go here (and the chart beside); default results/<gpu>.json, in a dry run nowhere."""


@dataclass(frozen=True)
class Bench:
    """Where and how everything is measured."""

    where: torch.device
    dtype: torch.dtype
    watch: Stopwatch

    def inputs(self, case: Case, seed: int) -> tuple[Any, ...]:
        return case.make(Maker(self.where, self.dtype, seed))


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
    return [results] if isinstance(results, Tensor) else list(results)


def gradients(inputs: Sequence[Any], results: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Of all inputs that want one; of weights whose gradient the op adds to their main gradient, that."""
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not wanted:
        return []
    found = torch.autograd.grad(results, wanted, grads, allow_unused=True)
    mains = [main_grad_of(x) for x in wanted]
    return [m.view if g is None and m is not None else g for g, m in zip(found, mains, strict=True)]


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
    maker = Maker(bench.where, bench.dtype, 1)  # the same upstream gradients for all, rounded to the op's dtype
    grads = [maker.floats(*y.shape, grad=False).to(y.dtype) for y in results if "both" in case.directions]
    return [x.detach() for x in results] + gradients(inputs, results, grads)


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Relative norms of the differences; NaN where a NaN is in either."""
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


def measure(bench: Bench, case: Case, op: peers.Op, contender: Contender) -> None:
    """Times of each direction over rotating inputs, and peak memory, into `contender`."""
    first = bench.inputs(case, 0)
    nbytes = sum(x.nbytes for x in first if isinstance(x, Tensor))
    copies = 1 if bench.watch.dry_run else -(-ROTATED_BYTES // nbytes)
    sets = [first] + [bench.inputs(case, seed) for seed in range(1, copies)]
    maker, differentiable = Maker(bench.where, bench.dtype, 1), "both" in case.directions
    upstream = [
        [maker.floats(*y.shape, grad=False).to(y.dtype) for y in tensors(op(*inputs))]
        for inputs in sets
        if differentiable
    ]

    def forward(i: int) -> None:
        op(*sets[i % copies])

    def both(i: int) -> None:
        inputs = sets[i % copies]
        gradients(inputs, tensors(op(*inputs)), upstream[i % copies])

    contender.ms["forward"] = ahead = bench.watch.median_ms(forward)
    contender.bytes = bench.watch.peak_bytes(both if differentiable else forward)
    if differentiable:
        contender.ms["both"] = whole = bench.watch.median_ms(both)
        contender.ms["backward"] = None if whole is None or ahead is None else whole - ahead


def compete(bench: Bench, case: Case) -> tuple[dict[str, Contender], str]:
    """All contenders of a case, ours first, and what is wrong with our result, if anything."""
    ours, wrong = Contender(), ""
    exact: list[Tensor] | None = None
    try:
        exact = evaluate(bench, case, case.exact or case.torch, wide=True)
        ours.error = check(case, evaluate(bench, case, case.ours), exact)
        measure(bench, case, case.ours, ours)
    except Exception as error:  # all other ops are measured before it is raised
        ours.status = wrong = f"{case.op} {case.model} {case.shape}: {brief(error)}"
    found = {"megapar": ours}
    for name, op in opponents(bench, case):
        found[name] = contender = op if isinstance(op, Contender) else Contender()
        if isinstance(op, Contender):
            continue
        try:
            if exact and case.same and name in peers.NAMES:
                contender.error = max(errors(evaluate(bench, case, op), exact))
                if not contender.error <= OTHER_RESULT:
                    contender.status = "another result"
                    continue
            measure(bench, case, op, contender)
        except Exception as error:  # another project's failure is a line of our report
            contender.status = brief(error)
    return found, wrong


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:150]}"


def opponents(bench: Bench, case: Case) -> Iterator[tuple[str, peers.Op | Contender]]:
    """The implementations to beat, or in place of one a Contender that says why it is not there."""
    torch.compiler.reset()  # else its limit of recompilations would end in eager mode
    yield "torch", case.torch
    yield "torch.compile", peers.compiled(case.to_compile or case.torch, dry_run=bench.watch.dry_run)
    try:
        yield "Liger-Kernel", peers.liger().get(case.op, Contender("has none"))
    except ImportError:
        yield "Liger-Kernel", Contender("not installed")
    yield from case.others.items()


def rows(case: Case, found: dict[str, Contender], copy: float | None) -> Iterator[dict[str, Any]]:
    """One row of the report for each direction, as it goes into the JSON file."""
    for direction in case.directions:
        least = {"forward": case.least[0], "backward": case.least[1], "both": sum(case.least)}[direction]
        times = {name: contender.ms.get(direction) for name, contender in found.items()}
        ours = times["megapar"]
        rate = None if ours is None else least / ours / (1e6 if case.unit == "bytes" else 1e9)
        row: dict[str, Any] = {
            "op": case.op,
            "model": case.model,
            "shape": case.shape,
            "direction": direction,
            "ms": ours,
            "least": least,
            "unit": case.unit,
            "gb_per_second": rate if case.unit == "bytes" else None,
            "tflops": rate if case.unit == "flops" else None,
            "share": rate / copy if rate and copy and case.unit == "bytes" else None,
            "bytes": found["megapar"].bytes,
            "over": {n: t / ours if t and ours else None for n, t in times.items() if n != "megapar"},
            "contenders": {
                name: {"ms": times[name], "bytes": c.bytes, "error": c.error, "status": c.status}
                for name, c in found.items()
            },
        }
        judged = [judge(target, row) for target in case.targets if target.direction == direction]
        yield row | {"targets": judged}


def judge(target: Target, row: dict[str, Any]) -> dict[str, Any]:
    """A target with what was reached; None where there is no figure."""
    figure = row.get(target.figure, row["over"].get(target.figure))
    reached = None if figure is None else figure <= target.limit if target.at_most else figure >= target.limit
    return {**target._asdict(), "found": figure, "reached": reached}


def main(options: Options) -> None:
    """Measure, report, write the files; raises KernelError if a kernel of ours is wrong."""
    began = time.monotonic()
    if not options.dry_run and not device.cuda_devices():
        raise ConfigError("there is no GPU here; --dry_run does everything on the CPU, without figures")
    where = device.choose("cpu" if options.dry_run else "cuda", 0, 1)
    device.prepare(where, threads=1, deterministic=False)
    watch = Stopwatch(where, dry_run=options.dry_run)
    kernels = device.choose_kernels("triton" if not options.dry_run or interpreting() else "torch", where)
    bench = Bench(where, torch.float32 if options.dry_run else torch.bfloat16, watch)
    models: tuple[Model, ...] = (TINY,) if options.dry_run else (LLAMA_8B, LLAMA_70B)
    every = [case for model in models for case in cases(model, kernels)]
    once = {(case.op, case.shape): case for case in reversed(every)}  # models share a vocabulary
    chosen = [case for case in every if not options.only or any(word in case.op for word in options.only)]
    todo = [case for case in chosen if once[case.op, case.shape] is case]
    if not todo:
        raise ConfigError(f"--only {' '.join(options.only)}: no op has such a word in its name")
    facts = provenance(where) | {"dry_run": options.dry_run, "kernels": asdict(kernels), "dtype": str(bench.dtype)}
    facts |= {"copy_gb_per_second": watch.copy_gb_per_second(), "gemm_tflops": watch.gemm_tflops()}
    measured: list[dict[str, Any]] = []
    not_run: list[str] = []
    wrong: list[str] = []
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=len(todo))
        for case in todo:
            progress.update(task, description=f"{case.op} {case.model} {case.shape}", refresh=True)
            if time.monotonic() - began > 60 * options.minutes:
                not_run.append(f"{case.op} {case.model} {case.shape}")
                continue
            found, problem = compete(bench, case)
            wrong += [problem] if problem else []
            measured += rows(case, found, facts["copy_gb_per_second"])
            watch.release()
            progress.update(task, advance=1, refresh=True)
    facts |= {"minutes": (time.monotonic() - began) / 60, "not_run": not_run, "wrong": wrong, "rows": measured}
    print_report(facts)
    write(options, facts)
    if wrong:
        raise KernelError("; ".join(wrong))


def write(options: Options, facts: dict[str, Any]) -> None:
    """JSON and chart: where --json says, else results/<gpu>.json; a dry run without --json writes nothing."""
    name = re.sub(r"[^a-z0-9]+", "-", facts["hardware"].lower()).strip("-")
    file = options.json or (None if options.dry_run else HERE / f"results/{name}.json")
    if file is None:
        return
    with storing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, facts | {"options": {k: str(v) for k, v in asdict(options).items()}})
    draw(facts, file.with_suffix(".png"))
    print(f"{file} and {file.with_suffix('.png').name}", file=sys.stderr)


if __name__ == "__main__":
    with reported():
        main(tyro.cli(Options, description=__doc__))
