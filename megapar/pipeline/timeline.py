"""Draws timelines of pipeline steps, simulated or measured."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megapar.pipeline.schedules import Action, Event

# Colors of forwards and backwards, from dark to light for the chunks of a rank. Text on the first two is white, on the
# others black.
_COLORS = {"F": ("#174a86", "#3b7cc4", "#78ade3", "#b0d1f3"), "B": ("#22692a", "#479a4b", "#7cc07f", "#b3ddb5")}
_NAMES = {"F": "forward", "B": "backward"}
_IDLE = "#f0f0f0"


def draw(events: Sequence[Event], path: str | Path, title: str, unit: str = "s") -> None:
    """Draw a timeline as a PNG at `path`, with a row for each rank and the numbers of micro-batches in the boxes.

    Raises ValueError if there are no events.
    """
    if not events:
        raise ValueError(f"no events to draw in {path}")
    ranks = 1 + max(event.rank for event in events)
    origin = min(event.start for event in events)
    span = max(event.end for event in events) - origin
    # Without pyplot, which would choose a backend for the whole process.
    figure = Figure(figsize=(14, 1.7 + 0.55 * ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank in range(ranks):
        _draw_rank(axes, rank, [event for event in events if event.rank == rank], ranks, origin, span)
    busy = sum(event.end - event.start for event in events)
    axes.set_title(f"{title}  ({1 - busy / (ranks * span):.1%} idle)", loc="left")
    axes.set_xlim(0, span)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlabel(f"time [{unit}]")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=_legend(events, ranks), loc="outside lower right", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)


def _draw_rank(axes: Axes, rank: int, events: Sequence[Event], ranks: int, origin: float, span: float) -> None:
    axes.broken_barh([(0, span)], (rank - 0.4, 0.8), facecolors=_IDLE)
    boxes = [(event.start - origin, event.end - event.start) for event in events]
    colors = [_color(event.action, ranks) for event in events]
    axes.broken_barh(boxes, (rank - 0.4, 0.8), facecolors=colors, edgecolors="white", linewidth=0.6)
    widest = max((len(str(event.action.microbatch)) for event in events), default=0)
    for event, (left, width) in zip(events, boxes, strict=True):
        if width / span > 0.006 * widest:  # a digit takes about 0.006 of the width of the picture
            label = str(event.action.microbatch)
            color = "white" if event.action.stage < 2 * ranks else "black"
            axes.text(left + width / 2, rank, label, ha="center", va="center", fontsize=9, color=color)


def _color(action: Action, ranks: int) -> str:
    shades = _COLORS[action.kind]
    return shades[min(action.stage // ranks, len(shades) - 1)]


def _legend(events: Iterable[Event], ranks: int) -> list[Patch]:
    """A patch for each kind and chunk of action that occurs, forwards first."""
    actions = {(event.action.kind, event.action.stage // ranks): event.action for event in events}
    several = any(chunk for _, chunk in actions)
    ordered = sorted(actions.items(), key=lambda item: ("FB".index(item[0][0]), item[0][1]))
    patches = []
    for (kind, chunk), action in ordered:
        label = f"{_NAMES[kind]}, chunk {chunk}" if several else _NAMES[kind]
        patches.append(Patch(color=_color(action, ranks), label=label))
    return [*patches, Patch(color=_IDLE, label="idle")]
