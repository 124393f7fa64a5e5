"""Compares predicted speeds of training with published ones, and fits the constants of machines to them.

Rows without a lacking feature judge the model of time: constants are fitted on every second of them, and errors are
reported on the others. Rows with one, such as another recipe of FP8, are listed beside. tools/published_runs.toml has
all of them.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from megapar_models.build import StageBuilder
from megapar_models.registry import FOR_OPTIONS, presets, validate
from megapar_tools.plan import hardware
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.step_time import step_time

from megapar.base.errors import ConfigError
from megapar.config.files import load
from megapar.config.options import Config
from megapar.launch.reporting import reported

RUNS = Path(__file__).parent / "published_runs.toml"
PAGE = Path(__file__).parents[1] / "docs/accuracy.md"
BEGIN = "<!-- made by tools/plan_accuracy.py --write -->"


@dataclass
class Arguments:
    """Compare predicted speeds of training with published ones."""

    fit: bool = False
    """Print the share of the peak that products reach, as it fits the fitted rows of each machine best."""
    write: bool = False
    """Write the tables into docs/accuracy.md."""


@dataclass(frozen=True)
class Row:
    """A published run and its prediction, both in tokens a second and GPU.

    `role` is fitted, judged, or the feature that the prediction lacks.
    """

    name: str
    source: str
    machine: str
    gpus: int
    layout: str
    role: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """How much faster the prediction is, as a share of the published speed."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class PublishedRun:
    """A published run with the configuration that comes nearest to it."""

    name: str
    source: str
    machine: str
    role: str
    config: Config
    published: float


def published_runs(parts: Parts) -> list[PublishedRun]:
    """The runs of the file. Raises ConfigError for an option that does not exist or cannot run."""
    found: list[PublishedRun] = []
    judging: dict[str, int] = {}
    for entry in tomllib.loads(RUNS.read_text())["run"]:
        config = _config(entry["options"], entry["gpus"])
        role = entry["lacks"] or entry.get("role", "")
        if not role:
            number = judging.get(entry["hardware"], 0)
            judging[entry["hardware"]] = number + 1
            role = "judged" if number % 2 else "fitted"
        tokens = entry.get("tokens") or entry["tflops"] * 1e12 / parts.flops_per_token(config)
        found.append(PublishedRun(entry["name"], entry["source"], entry["hardware"], role, config, tokens))
    return found


def _config(options: Mapping[str, Any], gpus: int) -> Config:
    flags = ["--launch.device", "cuda", "--kernels.backend", "triton", "--train.precision", "bf16"]
    for name, value in options.items():
        if name == "base":
            flags += ["--config", value]
        elif value is True:
            flags.append(f"--{name}")
        else:
            flags += [f"--{name}", str(value)]
    return validate(load(flags, presets(), FOR_OPTIONS).config, gpus)


def rows(
    runs: Sequence[PublishedRun], parts: Parts, machine_of: Callable[[str], Hardware] = hardware.load
) -> list[Row]:
    """The runs with their predictions on the machines of that name."""
    found = []
    for run in runs:
        parallel = run.config.parallel
        sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "vpp": parallel.vpp, "ep": parallel.ep}
        layout = [f"{name} {size}" for name, size in {**sizes, "dp": parallel.dp}.items() if size > 1]
        predicted = step_time(run.config, parts, machine_of(run.machine), timeline=True).tokens_per_second_per_gpu
        gpus = parallel.tp * parallel.cp * parallel.pp * parallel.dp
        found.append(
            Row(run.name, run.source, run.machine, gpus, ", ".join(layout), run.role, run.published, predicted)
        )
    return found


def mean_error(some: Sequence[Row]) -> float:
    """The mean of the errors' absolute values."""
    return sum(abs(row.error) for row in some) / len(some)


def fit(runs: Sequence[PublishedRun], parts: Parts) -> dict[str, float]:
    """By kind of machine, the `matrix.share` that fits the fitted rows best. A100s of both sizes are one kind.

    The sum of squared logarithms of (predicted / published) is least for it.
    """
    found = {}
    for kind in sorted({_kind(run) for run in runs if run.role == "fitted"}):
        fitted = [run for run in runs if run.role == "fitted" and _kind(run) == kind]
        candidates = [0.005 * step for step in range(60, 190)]
        found[kind] = min(candidates, key=lambda share: _misfit(fitted, parts, share))
    return found


def _kind(run: PublishedRun) -> str:
    return run.machine.partition("-")[0]


def _misfit(fitted: Sequence[PublishedRun], parts: Parts, share: float) -> float:
    total = 0.0
    for run in fitted:
        machine = hardware.load(run.machine)
        machine = replace(machine, matrix=replace(machine.matrix, share=share))
        predicted = step_time(run.config, parts, machine).tokens_per_second_per_gpu
        total += math.log(predicted / run.published) ** 2
    return total


def tables(found: Sequence[Row]) -> str:
    """The tables of docs/accuracy.md, with the errors of the fitted and of the judged rows above them."""
    judging = [row for row in found if row.role in ("fitted", "judged")]
    lines = []
    for role, words in (("fitted", "on which constants were fitted"), ("judged", "that no constant has seen")):
        some = [row for row in judging if row.role == role]
        worst = max(some, key=lambda row: abs(row.error))
        lines.append(
            f"- {len(some)} rows {words}: mean error {mean_error(some):.1%}, largest {worst.error:+.0%} ({worst.name}, "
            f"{worst.gpus} x {worst.machine})."
        )
    apart = [row for row in found if row.role.endswith("of 2023")]
    lines.append(
        f"- {len(apart)} rows set apart, all of bf16 runs of 2023: mean error {mean_error(apart):.1%}. Predictions for "
        "today's kernels are faster than these runs were, the more so with long sequences and on the H100 "
        "(`tools/published_runs.toml` has the runs)."
    )
    lines += ["", "Tokens a second and GPU:", ""]
    lines += _table(judging, "role", "| run | machine | GPUs | layout | published | predicted | error | row |")
    lines += ["", "Rows that judge nothing, because the prediction lacks a feature of the run:", ""]
    others = [row for row in found if row not in judging and row not in apart]
    lines += _table(others, "lacks", "| run | machine | GPUs | layout | published | predicted | error | lacks |")
    lines += ["", "Sources: " + "; ".join(dict.fromkeys(row.source for row in found)) + "."]
    return "\n".join(lines)


def _table(some: Sequence[Row], last: str, head: str) -> list[str]:
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for row in some:
        lines.append(
            f"| {row.name} | {row.machine} | {row.gpus:,} | {row.layout or 'one'} | {row.published:,.0f} | "
            f"{row.predicted:,.0f} | {row.error:+.0%} | {row.role} |"
        )
    return lines


def page_with(made: str) -> str:
    """The page, with `made` in place of what stands behind the mark. Raises ConfigError if it has no mark."""
    text = PAGE.read_text()
    if BEGIN not in text:
        raise ConfigError(f"{PAGE}: has no line {BEGIN}; put it where the tables should stand")
    return text.partition(BEGIN)[0] + BEGIN + "\n\n" + made + "\n"


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        parts = Parts(StageBuilder())
        runs = published_runs(parts)
        if args.fit:
            for kind, share in fit(runs, parts).items():
                print(f"{kind}: matrix.share {share:.3f}")
            return
        made = tables(rows(runs, parts))
        print(made)
        if args.write:
            PAGE.write_text(page_with(made))


if __name__ == "__main__":
    main()
