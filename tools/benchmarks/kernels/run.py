"""Measures every fused kernel on one GPU against torch, torch.compile and Liger-Kernel, in less than eight minutes.

First the limits of the machine, torch's copy and an 8192^3 bf16 GEMM; then each op, forward and backward, at the shapes
of Llama 8B and 70B with 8192 tokens. Each is compared with torch in fp32 before it is timed; a wrong one ends the run
with exit code 70, after all others. GB/s are those of the fewest bytes that the op can move, and a share of the
measured copy; a contender's speed is the ratio of its time to ours.

Three rounds: our kernels and eager torch for all ops, then Liger-Kernel, then torch.compile, whose compilation takes
longest. After every op of every round all that is known is written to the JSON file, by default
tools/benchmarks/kernels/results/<gpu>.json; a bar chart is drawn beside it at the end. --dry_run does all of it once on
the CPU, at tiny shapes, and claims no figure (TRITON_INTERPRET=1 interprets the kernels; without it torch's own ops
stand in).
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from megapar_kernels.dispatch import interpreting
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks.kernels import peers
from benchmarks.kernels.measuring import (
    OTHER_RESULT,
    Bench,
    Contender,
    KernelError,
    brief,
    check,
    errors,
    evaluate,
    measure,
)
from benchmarks.kernels.ops import LLAMA_8B, LLAMA_70B, TINY, Case, Model, Target, cases
from benchmarks.kernels.report import draw, print_report
from benchmarks.kernels.timing import Stopwatch
from megapar import device
from megapar.errors import ConfigError, storing
from megapar.launch.reporting import reported
from megapar.system.atomic_files import write_json
from megapar.train.provenance import provenance

HERE = Path(__file__).parent
NOT_RUN = "not run"


@dataclass(frozen=True)
class Options:
    """Measure the fused kernels."""

    dry_run: bool = False
    """Everything once on the CPU at tiny shapes, without figures."""
    only: tuple[str, ...] = ()
    """Ops whose names contain one of these words, such as norm; empty means all."""
    minutes: float = 7.5
    """No op is begun after this time, in any round; the report names what was not run."""
    json: Path | None = None
    """Results go here (and the chart beside); default results/<gpu>.json, in a dry run nowhere."""


def compete(bench: Bench, case: Case) -> tuple[dict[str, Contender], str]:
    """Our kernel, eager torch and the case's own others, and what is wrong with our result, if anything."""
    ours = Contender()
    wrong = ""
    exact: list[Tensor] | None = None
    try:
        exact = evaluate(bench, case, case.exact or case.torch, wide=True)
        ours.error = check(case, evaluate(bench, case, case.ours), exact)
        measure(bench, case, case.ours, ours)
    except Exception as error:  # all other ops are measured before it is raised
        ours.status = wrong = f"{title(case)}: {brief(error)}"
    found = {"megapar": ours, "torch": challenge(bench, case, "torch", case.torch, exact)}
    return found | {name: challenge(bench, case, name, op, exact) for name, op in case.others.items()}, wrong


def challenge(bench: Bench, case: Case, name: str, op: peers.Op, exact: list[Tensor] | None) -> Contender:
    """Another's implementation, timed if its result is the same where it should be."""
    contender = Contender()
    try:
        if exact and case.same and name in peers.NAMES:
            contender.error = max(errors(evaluate(bench, case, op), exact))
            if not contender.error <= OTHER_RESULT:
                contender.status = "another result"
                return contender
        measure(bench, case, op, contender)
    except Exception as error:  # another project's failure is a line of our report
        contender.status = brief(error)
    return contender


def challenge_later(bench: Bench, case: Case, name: str) -> Contender:
    """Liger-Kernel or torch.compile, in a round of its own."""
    torch.compiler.reset()  # else its limit of recompilations would end in eager mode
    if name == "torch.compile":
        op = peers.compiled(case.to_compile or case.torch, dry_run=bench.watch.dry_run)
    elif (found := peers.liger().get(case.op)) is None:
        return Contender("has none")
    else:
        op = found
    try:
        exact = evaluate(bench, case, case.exact or case.torch, wide=True) if case.same else None
    except Exception as error:  # such as too little memory for fp32: a line of our report
        return Contender(brief(error))
    return challenge(bench, case, name, op, exact)


def title(case: Case) -> str:
    return f"{case.op} {case.model} {case.shape}"


def rows(case: Case, found: dict[str, Contender], copy: float | None) -> Iterator[dict[str, Any]]:
    """One row of the report for each direction, as it goes into the JSON file. Contenders that are still missing have
    the status NOT_RUN."""
    found = found | {name: Contender(NOT_RUN) for name in peers.NAMES if name not in found}
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


class Session:
    """The cases, what is found about each, and the file that always holds all of it."""

    def __init__(self, options: Options, bench: Bench, facts: dict[str, Any], todo: list[Case]):
        self.options = options
        self.bench = bench
        self.facts = facts
        self.todo = todo
        self.began = time.monotonic()
        self.found: dict[str, dict[str, Contender]] = {}
        self.wrong: list[str] = []
        self.not_run: list[str] = []

    def work(self) -> None:
        """All rounds, as far as the time lasts."""
        self._round("megapar and torch", self._first)
        try:
            peers.liger()
        except Exception as error:  # another project's import, which must not end the round after it
            print(
                f"no Liger-Kernel (pip install liger-kernel), its column stays empty: {brief(error)}", file=sys.stderr
            )
            for found in self.found.values():
                found["Liger-Kernel"] = Contender("not installed")
        else:
            self._round("Liger-Kernel", lambda case: self._later(case, "Liger-Kernel"))
        self._round("torch.compile", lambda case: self._later(case, "torch.compile"))

    def _first(self, case: Case) -> None:
        self.found[title(case)], problem = compete(self.bench, case)
        self.wrong += [problem] if problem else []

    def _later(self, case: Case, name: str) -> None:
        if title(case) in self.found:
            self.found[title(case)][name] = challenge_later(self.bench, case, name)

    def _round(self, name: str, measure_case: Callable[[Case], None]) -> None:
        with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
            task = progress.add_task(name, total=len(self.todo))
            for case in self.todo:
                progress.update(task, description=f"{name}: {title(case)}", refresh=True)
                if time.monotonic() - self.began >= 60 * self.options.minutes:
                    self.not_run.append(f"{title(case)}: {name}")
                    continue
                measure_case(case)
                self.bench.watch.release()
                self.write()
                progress.update(task, advance=1, refresh=True)
        self.write()

    def state(self) -> dict[str, Any]:
        """All that is known, as it goes into the file."""
        copy = self.facts["copy_gb_per_second"]
        measured = [case for case in self.todo if title(case) in self.found]
        return self.facts | {
            "minutes": (time.monotonic() - self.began) / 60,
            "not_run": self.not_run,
            "wrong": self.wrong,
            "rows": [row for case in measured for row in rows(case, self.found[title(case)], copy)],
            "options": {key: str(value) for key, value in asdict(self.options).items()},
        }

    def file(self) -> Path | None:
        """Where --json says, else results/<gpu>.json; a dry run without --json writes nothing."""
        if self.options.json or self.options.dry_run:
            return self.options.json
        name = re.sub(r"[^a-z0-9]+", "-", self.facts["hardware"].lower()).strip("-")
        return HERE / f"results/{name}.json"

    def write(self) -> None:
        """The file as things stand."""
        if file := self.file():
            with storing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, self.state())

    def finish(self) -> None:
        """Print the report and draw the chart; raises KernelError if a kernel of ours is wrong."""
        print_report(self.state())
        if file := self.file():
            draw(self.state(), file.with_suffix(".png"))
            print(f"{file} and {file.with_suffix('.png').name}", file=sys.stderr)
        if self.wrong:
            raise KernelError("; ".join(self.wrong))


def choose_cases(options: Options, kernels: Any) -> list[Case]:
    """Each op and shape once, of those that --only names. Raises ConfigError if it names none."""
    models: tuple[Model, ...] = (TINY,) if options.dry_run else (LLAMA_8B, LLAMA_70B)
    every = [case for model in models for case in cases(model, kernels)]
    once = {(case.op, case.shape): case for case in reversed(every)}  # models share a vocabulary
    chosen = [case for case in every if not options.only or any(word in case.op for word in options.only)]
    todo = [case for case in chosen if once[case.op, case.shape] is case]
    if not todo:
        raise ConfigError(f"--only {' '.join(options.only)}: no op has such a word in its name")
    return todo


def main(options: Options) -> None:
    """Measure, report, write the files; raises KernelError if a kernel of ours is wrong."""
    if not options.dry_run and not device.cuda_devices():
        raise ConfigError("there is no GPU here; --dry_run does everything on the CPU, without figures")
    where = device.choose("cpu" if options.dry_run else "cuda", 0, 1)
    device.prepare(where, threads=1, deterministic=False)
    kernels = device.choose_kernels("triton" if not options.dry_run or interpreting() else "torch", where)
    todo = choose_cases(options, kernels)
    watch = Stopwatch(where, dry_run=options.dry_run)
    bench = Bench(where, torch.float32 if options.dry_run else torch.bfloat16, watch)
    facts = provenance(where) | {"dry_run": options.dry_run, "kernels": asdict(kernels), "dtype": str(bench.dtype)}
    facts |= {"copy_gb_per_second": watch.copy_gb_per_second(), "gemm_tflops": watch.gemm_tflops()}
    session = Session(options, bench, facts, todo)
    session.work()
    session.finish()


if __name__ == "__main__":
    with reported():
        main(tyro.cli(Options, description=__doc__))
