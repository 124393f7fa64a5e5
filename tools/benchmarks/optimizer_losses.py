"""Held-out losses of the quickstart by optimizers, for several seeds, each run in one process on one core.

`pretrain_scripts/quickstart_data.sh` makes the data. Runs are kept in `runs`, and a run that has ended there is read,
not repeated: so the benchmark may be ended and started again. The picture has the difference of the second case's loss
from the first's, beside the spread of the first's seeds.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.counting import with_children
from benchmarks.harness import Found, Output, table
from benchmarks.programs import PRETRAIN, pretrain

CASES: Mapping[str, tuple[str, ...]] = {
    "adamw": ("--optimizer.name", "adamw"),
    "muon": ("--optimizer.name", "muon"),
    "muon_per_head": ("--optimizer.name", "muon", "--optimizer.muon_per_head"),
    "fp32": ("--optimizer.moments", "fp32"),
    "bf16": ("--optimizer.moments", "bf16"),
}
"""Flags of the runs by name. fp32 and bf16 are moments of AdamW."""
_ONE_PROCESS = (
    *("--launch.nproc", "1", "--parallel.dp", "1", "--parallel.tp", "1", "--parallel.pp", "1"),
    *("--parallel.no_sequence_parallel", "--log.profile", "none", "--checkpoint.no_save_last"),
)


@dataclass(frozen=True)
class Options(Output):
    """Train the quickstart with several optimizers and seeds."""

    cases: tuple[str, ...] = ("adamw", "muon")
    """Names in CASES. Differences are those from the first."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """train.seed of the runs."""
    steps: int = 180
    """Steps of a run."""
    eval_every: int = 30
    """Steps between evaluations on the held-out tokens."""
    flags: tuple[str, ...] = ()
    """Further options of all runs as NAME=VALUE, such as model.hidden_size=64. Give each set a folder of its own."""
    runs: Path = Path("runs/optimizer_losses")
    """Folder of the runs."""
    picture: Path | None = None
    """Draw the losses into this file."""


def trained(options: Options, case: str, seed: int) -> Path:
    """The folder of a run that has ended, which is started if there is none. Raises BenchmarkError if it fails."""
    folder = options.runs.absolute() / f"{case}-{options.steps}-{seed}"
    ended = folder / "cpu_seconds.json"
    if not ended.exists():
        words = ["--config", PRETRAIN.parent / "configs/quickstart.toml", *_ONE_PROCESS, *CASES[case]]
        words += ["--train.seed", seed, "--train.steps", options.steps, "--train.eval_every", options.eval_every]
        words += [word for flag in options.flags for word in ("--" + flag).split("=", 1)]
        before = with_children()
        pretrain(folder, words)
        ended.write_text(json.dumps({"cpu": with_children() - before}))
    return folder


def measured(folder: Path) -> dict[str, Any]:
    """The losses of a run by step: of training, and held out. And its CPU seconds."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = {str(line["step"]): line["validation_loss"] for line in lines if "validation_loss" in line}
    losses = [line["loss"] for line in lines if "loss" in line]
    fastest = min(line["step_seconds"] for line in lines if "step_seconds" in line)
    cpu = json.loads((folder / "cpu_seconds.json").read_text())["cpu"]
    return {"held_out": held_out, "losses": losses, "cpu_seconds": cpu, "fastest_step": fastest}


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Left, the training losses of all runs. Right, differences of cases by seed beside those of seeds."""
    import matplotlib

    matplotlib.use("Agg")  # before pyplot is imported: it needs no display
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    first, *others = found
    for number, (case, runs) in enumerate(found.items()):
        for index, run in enumerate(runs):
            label = case if index == 0 else None
            left.plot(run["losses"], color=f"C{number}", linewidth=0.8, alpha=0.8, label=label)
    steps = [int(step) for step in found[first][0]["held_out"]]
    of_first = [list(run["held_out"].values()) for run in found[first]]
    means = [statistics.mean(values) for values in zip(*of_first, strict=True)]
    for index, values in enumerate(of_first):
        label = f"{first}: a seed from the mean of seeds" if index == 0 else None
        right.plot(steps, [x - y for x, y in zip(values, means, strict=True)], ":", color="gray", label=label)
    for number, case in enumerate(others, 1):
        for index, run in enumerate(found[case]):
            difference = [x - y for x, y in zip(run["held_out"].values(), of_first[index], strict=True)]
            label = f"{case} from {first}, of one seed" if index == 0 else None
            right.plot(steps, difference, "o-", color=f"C{number}", markersize=3, label=label)
    left.set(xlabel="step", ylabel="nats per token", title="training loss")
    right.set(xlabel="step", ylabel="nats per token", title="differences of held-out losses")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.margins(y=0.25)  # room for the legend
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def measure(options: Options) -> Found:
    """Train what is missing, and draw the picture."""
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in options.cases}
    for seed in options.seeds:
        for case in options.cases:
            found[case].append(measured(trained(options, case, seed)))
    if options.picture:
        draw(found, options.picture)
    rows = [{"case": case, **run} for case, runs in found.items() for run in runs]
    return Found({"seeds": options.seeds, "cases": found}, [table(rows)])
