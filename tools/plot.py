"""Draws the loss curve of a run, the load of its experts, and the timeline of its pipeline (log.profile)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot is imported: it needs no display

import tyro
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from megapar_tools.trace import profile
from megapar_tools.trace.timeline import draw

from megapar.base.errors import DataError
from megapar.launch.reporting import reported
from megapar.system.atomic_files import save_figure

MOST_LOAD = 3  # times the mean; pages have the same scale
MOST_NAMES = 8  # of layers beside each other that can be read


@dataclass
class Arguments:
    """Write pictures into a run folder: loss.png, load.png of a mixture of experts, timeline.png with log.profile."""

    run_dir: tyro.conf.Positional[Path]
    """Folder of a training run."""
    entropies: Path | None = None
    """File that megapar entropy --json wrote: its unigram and bigram entropies become lines. By default
    RUN_DIR/entropies.json, if that is there."""


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
    save_figure(figure, path)
    plt.close(figure)
    return path


def multiples_of_the_mean(counts: dict[str, list[int]]) -> dict[str, list[float]]:
    """The tokens of each expert divided by those of the layer's mean expert, by the number of the layer, ascending."""
    ascending = sorted(counts, key=int)
    return {layer: [n * len(counts[layer]) / sum(counts[layer]) for n in counts[layer]] for layer in ascending}


def load_figure(title: str, lines: list[dict[str, Any]]) -> Figure | None:
    """How evenly experts are loaded, from the `lines` of metrics.jsonl; None if the run has no experts.

    The left half has, for each layer and expert, its tokens in the last logged step divided by those of the layer's
    mean expert. The right half has the fullest expert of each layer over the steps.
    """
    counted = [line for line in lines if "expert_counts" in line]
    if not counted:
        return None
    last = counted[-1]
    figure, (heat, curves) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    _draw_heat(heat, multiples_of_the_mean(last["expert_counts"]))
    heat.set_title(f"{title}: load at step {last['step']}")
    _draw_fullest(curves, [line for line in lines if "expert_load" in line])
    return figure


def _draw_heat(axes: Axes, shares: dict[str, list[float]]) -> None:
    # An even load is white, and a color means the same in every picture.
    norm = TwoSlopeNorm(vcenter=1, vmin=0, vmax=MOST_LOAD)
    image = axes.imshow(list(shares.values()), aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    beyond = "max" if max(map(max, shares.values())) > MOST_LOAD else "neither"
    axes.figure.colorbar(image, ax=axes, label="tokens ÷ mean of the layer's experts", extend=beyond)
    every = -(-len(shares) // MOST_NAMES)
    axes.set_yticks(range(0, len(shares), every), list(shares)[::every])
    axes.set(xlabel="expert", ylabel="layer")


def _draw_fullest(axes: Axes, lines: list[dict[str, Any]]) -> None:
    layers = sorted(lines[-1]["expert_load"], key=int)
    range_of_layers = Normalize(int(layers[0]), int(layers[-1]))
    # Without the yellow end of the map, which is hard to see on white.
    colors = ListedColormap(plt.get_cmap("viridis")(np.linspace(0, 0.8, 256)))
    steps = [line["step"] for line in lines]
    named = len(layers) <= MOST_NAMES
    for layer in layers:
        heights = [line["expert_load"][layer] for line in lines]
        axes.plot(
            steps,
            heights,
            color=colors(range_of_layers(int(layer))),
            linewidth=1,
            label=f"layer {layer}" if named else None,
        )
    axes.axhline(1, color="gray", linestyle=":", label="even")
    axes.set(xlabel="step", ylabel="tokens ÷ mean of the layer's experts", title="fullest expert of each layer")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(edgecolor="none")
    if not named:
        axes.figure.colorbar(ScalarMappable(range_of_layers, colors), ax=axes, label="layer")


def draw_load(run_dir: Path, lines: list[dict[str, Any]]) -> Path | None:
    """Draw `load_figure` into the run folder; returns the file, or None if the run has no experts."""
    figure = load_figure(run_dir.name, lines)
    if figure is None:
        return None
    path = run_dir / "load.png"
    save_figure(figure, path)
    plt.close(figure)
    return path


def draw_timeline(run_dir: Path) -> Path | None:
    """Draw the pipeline in the last step that the run recorded; returns the file, or None if it recorded none."""
    if not (run_dir / "profile").is_dir():
        return None
    records = profile.read(run_dir)
    path = run_dir / "timeline.png"
    with plt.rc_context({"font.size": 14}):  # the picture is wide, and mostly seen at half its size
        title = f"{run_dir.name}: pipeline ranks of the first replica, step {max(records[0].steps)}"
        draw(profile.events(records), path, title)
    return path


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        lines = read_metrics(args.run_dir)
        default = args.run_dir / "entropies.json"
        pictures = (
            draw_loss(args.run_dir, lines, args.entropies or (default if default.is_file() else None)),
            draw_load(args.run_dir, lines),
            draw_timeline(args.run_dir),
        )
        for path in pictures:
            if path:
                print(path)


if __name__ == "__main__":
    main()
