"""Measures every fused kernel on one GPU against torch, torch.compile and Liger-Kernel, in less than eight minutes.

First the limits of the machine, torch's copy and an 8192^3 bf16 GEMM; then each op, forward and backward, at the shapes
of Llama 8B and 70B with 8192 tokens. Last come attention with sinks, caps of scores, windows and documents, for which
the column of torch.compile is FlexAttention with its block mask made before, and rows and weight gradients of experts.
Each op is compared with torch in fp32 before it is timed; a wrong one ends the run with exit code 70, after all others.
GB/s count the fewest possible bytes of the op, also as a share of the measured copy; a contender's speed is the ratio
of its time to ours.

Three rounds: our kernels and eager torch for all ops, then Liger-Kernel, then torch.compile with its long compilation.
After every op of every round all results so far are written to the JSON file. --dry_run does all of it once on the CPU,
at tiny shapes, and claims no figure (TRITON_INTERPRET=1 interprets the kernels; without it torch's own ops stand in).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megapar_kernels.backend import Kernels
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks.harness import Found, Output, Session, figure, table
from benchmarks.kernels import attention, experts, measuring, peers
from benchmarks.kernels.measuring import Contender, brief, evaluate
from benchmarks.kernels.ops import LLAMA_8B, LLAMA_70B, TINY, Case, Model, cases
from benchmarks.kernels.timing import Stopwatch
from megapar.base.errors import ConfigError

NOT_RUN = "not run"


@dataclass(frozen=True)
class Options(Output):
    """Measure the fused kernels."""

    dry_run: bool = False
    """Everything once on the CPU at tiny shapes, without figures."""
    only: tuple[str, ...] = ()
    """Ops whose names contain one of these words, such as norm; empty means all."""
    minutes: float = 7.5
    """No op is begun after this time, in any round; the report names what was not run."""
    json: Path = Path("runs/benchmark_kernels.json")
    """Results go here, after every op."""


def compete(bench: Stopwatch, case: Case, ops: Mapping[str, peers.Op | None]) -> dict[str, Contender]:
    """Implementations by name, each compared with torch in fp32 and timed; None stands for a package without one."""
    try:
        exact = evaluate(bench, case, case.exact or case.torch, wide=True)
    except Exception as error:  # such as too little memory for fp32: a line of our report
        return {name: Contender(brief(error)) for name in ops}
    return {name: challenge(bench, case, name, op, exact) for name, op in ops.items()}


def challenge(bench: Stopwatch, case: Case, name: str, op: peers.Op | None, exact: list[Tensor]) -> Contender:
    """One implementation. If its results should equal another's and do not, it is not timed."""
    if op is None:
        return Contender("has none")
    contender = Contender()
    try:
        if name == "megapar":
            contender.error = measuring.check(case, evaluate(bench, case, op), exact)
        elif case.same:
            contender.error = max(measuring.errors(evaluate(bench, case, op), exact))
            if not contender.error <= measuring.OTHER_RESULT:
                contender.status = "another result"
                return contender
        measuring.measure(bench, case, op, contender)
    except Exception as error:  # all others are measured before it is raised; another project's is only a line
        contender.status = brief(error)
    return contender


def title(case: Case) -> str:
    return f"{case.op} {case.model} {case.shape}"


def rows(case: Case, found: dict[str, Contender], copy: float | None) -> Iterator[dict[str, Any]]:
    """One row of the report for each direction, as it goes into the JSON file. Contenders still missing have the status
    NOT_RUN."""
    found = found | {name: Contender(NOT_RUN) for name in peers.NAMES if name not in found}
    for direction in case.directions:
        least = {"forward": case.least[0], "backward": case.least[1], "both": sum(case.least)}[direction]
        times = {name: contender.ms.get(direction) for name, contender in found.items()}
        ours = times["megapar"]
        rate = None if ours is None else least / ours / (1e6 if case.unit == "bytes" else 1e9)
        yield {
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
            "contenders": {name: asdict(c) | {"ms": times[name]} for name, c in found.items()},
        }


class KernelSession(Session):
    """The cases, the results of each, and the file with all of them at any time."""

    def __init__(self, options: Options, bench: Stopwatch, circumstances: dict[str, Any], todo: list[Case]):
        super().__init__(options, circumstances)
        self.bench = bench
        self.todo = todo
        self.contenders: dict[str, dict[str, Contender]] = {}

    def work(self) -> None:
        """All rounds, as far as the time lasts."""
        self.round("megapar and torch", lambda case: {"megapar": case.ours, "torch": case.torch})
        self.round_of("Liger-Kernel", peers.liger, "pip install liger-kernel")
        self.round_of("fla", peers.flash_linear_attention, "pip install flash-linear-attention")
        self.round("torch.compile", self.compiled)

    def round_of(self, name: str, ops_of: Callable[[], dict[str, peers.Op]], how: str) -> None:
        """Measure another project's ops, if it is installed; `how` installs it."""
        try:
            ops = ops_of()
        except Exception as error:  # another project's import, which must not end the round after it
            print(f"no {name} ({how}), its column stays empty: {brief(error)}", file=sys.stderr)
            for found in self.contenders.values():
                found[name] = Contender("not installed")
        else:
            self.round(name, lambda case: {name: ops.get(case.op)})

    def compiled(self, case: Case) -> dict[str, peers.Op]:
        torch.compiler.reset()  # else its limit of recompilations would end in eager mode
        # A dry run traces and differentiates the graph without generating code.
        backend = "aot_eager" if self.bench.dry_run else "inductor"
        op = torch.compile(case.to_compile or case.torch, fullgraph=True, dynamic=False, backend=backend)
        return {"torch.compile": op}

    def round(self, name: str, ops_of: Callable[[Case], Mapping[str, peers.Op | None]]) -> None:
        """Measure the contenders of `ops_of` in all cases that the rounds before have reached."""
        with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
            for case in progress.track(self.todo, description=name):
                progress.refresh()
                if self.may_begin(f"{title(case)}: {name}"):
                    self.contenders.setdefault(title(case), {}).update(compete(self.bench, case, ops_of(case)))
                    self.bench.release()
                self.keep()

    def wrong(self) -> list[str]:
        """What is wrong with our kernels."""
        ours = {title: found["megapar"].status for title, found in self.contenders.items()}
        return [f"{title}: {status}" for title, status in ours.items() if status != "ok"]

    def found(self) -> dict[str, Any]:
        copy = self.circumstances["copy_gb_per_second"]
        measured = [case for case in self.todo if title(case) in self.contenders]
        lines = [row for case in measured for row in rows(case, self.contenders[title(case)], copy)]
        return super().found() | {"wrong": self.wrong(), "rows": lines}


def ratio(row: dict[str, Any], name: str) -> str:
    """How many times the contender's time is ours, or why this is unknown."""
    over = row["over"][name]
    status = row["contenders"][name]["status"]
    return f"{over:.2f}x" if over is not None else "ran" if status == "ok" else status[:40]


def results_table(dry_run: bool, found: dict[str, Any]) -> Table:
    rows = []
    for row in found["rows"]:
        shown = {"op": row["op"], "shape": f"{row['model']} {row['shape']}"}
        shown |= {name: row[name] for name in ("direction", "ms", "gb_per_second", "tflops", "share", "bytes")}
        rows.append(shown | {name: ratio(row, name) for name in peers.NAMES})
    return table(rows, "Fused kernels: time, and other times over it" if not dry_run else "DRY RUN: no figures")


def choose_cases(options: Options, kernels: Kernels) -> list[Case]:
    """Each op and shape of --only once. Raises ConfigError if there is none."""
    models: tuple[Model, ...] = (TINY,) if options.dry_run else (LLAMA_8B, LLAMA_70B)
    todo: dict[tuple[str, str], Case] = {}
    found = [case for model in models for case in cases(model, kernels)]
    found += attention.cases(attention.TINY if options.dry_run else attention.MODELS, kernels.masked_attention)
    for model in experts.TINY if options.dry_run else experts.GPU:
        found += experts.cases(model, kernels)
    for case in found:
        if not options.only or any(word in case.op for word in options.only):
            todo.setdefault((case.op, case.shape), case)  # models share a vocabulary
    if not todo:
        raise ConfigError(f"--only {' '.join(options.only)}: no op has such a word in its name")
    return list(todo.values())


def measure(options: Options) -> Found:
    """Measure in rounds. Wrong kernels of ours are problems."""
    bench, kernels, circumstances = measuring.prepare(options.dry_run)
    session = KernelSession(options, bench, circumstances, choose_cases(options, kernels))
    session.work()
    copy, gemm = (figure(circumstances[name]) for name in ("copy_gb_per_second", "gemm_tflops"))
    wrong = session.wrong()
    shown = results_table(options.dry_run, session.found())
    return session.end(
        shown, f"copy {copy} GB/s, GEMM {gemm} TFLOP/s", *(f"WRONG: {what}" for what in wrong), problems=wrong
    )
