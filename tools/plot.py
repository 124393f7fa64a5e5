"""Draws the loss curve of a run, the load of its experts, and the timeline of its pipeline (log.timeline)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported: it needs no display

import tyro
from matplotlib import pyplot as plt

from megapar.errors import DataError, reported
from megapar.pipeline.schedules import Action, Event
from megapar.pipeline.timeline import draw


@dataclass
class Arguments:
    """Write pictures into a run folder: loss.png, load.png of a mixture of experts, timeline.png with log.timeline."""

    run_dir: tyro.conf.Positional[Path]
    """Folder of a training run."""
    entropies: Path | None = None
    """File that tools/entropy.py --json wrote: its unigram and bigram entropies become lines."""


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Raises DataError if there is no such file."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(f"{metrics} is not there: give the folder of a run that has trained")
    return [json.loads(text) for text in metrics.read_text().splitlines()]


def draw_loss(run_dir: Path, lines: list[dict[str, Any]], entropies: Path | None) -> Path:
    """Draw the loss of each step and each validation loss, from the `lines` of metrics.jsonl; returns the file."""
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


def over_the_mean(counts: dict[str, list[int]]) -> dict[str, list[float]]:
    """The tokens of each expert over those of the layer's mean expert, by the number of the layer, ascending."""
    ascending = sorted(counts, key=int)
    return {layer: [n * len(counts[layer]) / sum(counts[layer]) for n in counts[layer]] for layer in ascending}


def draw_load(run_dir: Path, lines: list[dict[str, Any]]) -> Path | None:
    """Draw how evenly experts are loaded; returns the file, or None if the run has no experts.

    The left half has, for each layer and expert, its tokens in the last logged step over those of the layer's mean
    expert. The right half has the fullest expert of each layer over the steps.
    """
    counted = [line for line in lines if "expert_counts" in line]
    if not counted:
        return None
    last = counted[-1]
    shares = over_the_mean(last["expert_counts"])
    layers = list(shares)
    figure, (heat, curves) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    image = heat.imshow(list(shares.values()), aspect="auto", cmap="coolwarm", vmin=0, vmax=2, interpolation="nearest")
    figure.colorbar(image, ax=heat, label="tokens over the mean")
    heat.set(xlabel="expert", ylabel="layer", title=f"{run_dir.name}: load at step {last['step']}")
    heat.set_yticks(range(len(layers)), layers)
    loads = [line for line in lines if "expert_load" in line]
    colors = plt.get_cmap("viridis")
    for number, layer in enumerate(layers):
        heights = [line["expert_load"][layer] for line in loads]
        color = colors(number / max(len(layers) - 1, 1))
        curves.plot([line["step"] for line in loads], heights, color=color, linewidth=1, label=f"layer {layer}")
    curves.axhline(1, color="gray", linestyle=":", label="even")
    curves.set(xlabel="step", ylabel="fullest expert over the mean", title="fullest expert")
    curves.grid(alpha=0.3)
    curves.spines[["top", "right"]].set_visible(False)
    if len(layers) <= 8:
        curves.legend(frameon=False)
    path = run_dir / "load.png"
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
        lines = read_metrics(args.run_dir)
        pictures = (
            draw_loss(args.run_dir, lines, args.entropies),
            draw_load(args.run_dir, lines),
            draw_timeline(args.run_dir),
        )
        for path in pictures:
            if path:
                print(path)


if __name__ == "__main__":
    main()
