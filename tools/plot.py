"""Draws the loss curve of a run, and the timeline of its pipeline if the run recorded one (log.timeline)."""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported: it needs no display

import tyro
from matplotlib import pyplot as plt

from megapar.errors import DataError, reported
from megapar.pipeline.schedules import Action, Event
from megapar.pipeline.timeline import draw


@dataclass
class Arguments:
    """Write loss.png, and timeline.png if there is a timeline.json, into a run folder."""

    run_dir: tyro.conf.Positional[Path]
    """Folder of a training run."""
    entropies: Path | None = None
    """File that tools/entropy.py --json wrote: its unigram and bigram entropies become lines."""


def draw_loss(run_dir: Path, entropies: Path | None) -> Path:
    """Draw the loss of each step and each validation loss; returns the file. DataError if there is no metrics.jsonl."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(f"{metrics} is not there: give the folder of a run that has trained")
    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
    axes.plot(*zip(*train, strict=True), label="training loss", linewidth=1.2)
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:red", label="held-out loss")
    if entropies:
        for (name, value), style in zip(json.loads(entropies.read_text()).items(), ("--", ":"), strict=False):
            axes.axhline(value, color="gray", linestyle=style, label=f"{name} entropy {value:.2f}")
    axes.set(xlabel="step", ylabel="nats per token", title=f"{run_dir.name}: loss")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    path = run_dir / "loss.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def draw_timeline(run_dir: Path) -> Path | None:
    """Draw the timeline that the run recorded; returns the file, or None if the run recorded none."""
    source = run_dir / "timeline.json"
    if not source.is_file():
        return None
    rows = json.loads(source.read_text())
    events = [Event(rank, Action(kind, stage, mb), start, end) for rank, kind, stage, mb, start, end in rows]
    path = run_dir / "timeline.png"
    with plt.rc_context({"font.size": 14}):  # the picture is wide, and mostly seen at half its size
        draw(events, path, f"{run_dir.name}: pipeline ranks of the first replica, last step")
    return path


def main() -> None:
    args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
    with reported():
        for path in (draw_loss(args.run_dir, args.entropies), draw_timeline(args.run_dir)):
            if path:
                print(path)


if __name__ == "__main__":
    main()
