"""Draws where the time of recorded steps went (`megapar_tools.trace.profile`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megapar.system.atomic_files import save_figure
from megapar_tools.trace.colors import PARTS as SHADES
from megapar_tools.trace.colors import find_axis
from megapar_tools.trace.profile import PARTS, RankRecord, RankTime, Segment, segments

_LABELS = {"W": "gradients of weights", "slowest": "waiting for the slowest", "idle": "idle: waiting for the pipeline"}


def draw(
    records: Sequence[RankRecord], accounts: Sequence[RankTime], ranks: Sequence[int], path: Path, title: str
) -> None:
    """Draw the parts of a step of each of `ranks` as a bar, and below when they came in the last recorded step."""
    step = max(records[0].steps)
    pieces = segments(records, step)
    names = [axis for axis in _axes(accounts) if any(accounts[rank].exposed.get(axis, 0) > 0 for rank in ranks)]
    colors = {part: SHADES[part].light for part in PARTS} | {axis: find_axis(axis).light for axis in names}
    # Without pyplot, which would choose a backend for the whole process.
    figure = Figure(figsize=(14, 2.2 + 0.75 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    bars, timeline = figure.subplots(2, 1)
    _draw_bars(bars, accounts, ranks, names, colors)
    bars.set_title(title, loc="left")
    _draw_timeline(timeline, pieces, ranks, colors, min(record.steps[step].start for record in records))
    timeline.set_title(f"step {step}", loc="left")
    shown = {segment.part for rank in ranks for segment in pieces[rank]}
    legend = [Patch(color=colors[part], label=_LABELS.get(part, part)) for part in PARTS if part in shown]
    legend += [Patch(color=colors[axis], label=f"{axis}, exposed") for axis in names]
    figure.legend(handles=legend, loc="outside lower center", ncols=6, frameon=False)
    save_figure(figure, path)


def _axes(accounts: Sequence[RankTime]) -> list[str]:
    """The axes of all ranks, each once."""
    return list(dict.fromkeys(axis for account in accounts for axis in account.exposed))


def _draw_bars(
    bars: Axes, accounts: Sequence[RankTime], ranks: Sequence[int], names: Sequence[str], colors: Mapping[str, str]
) -> None:
    computing = ("forward", "backward", "W", "optimizer")
    others = [part for part in PARTS if part not in computing]
    for row, rank in enumerate(ranks):
        account = accounts[rank]
        parts = {**account.parts, **account.exposed}
        left = 0.0
        for part in (*computing, *names, *others):
            width = 1e3 * parts.get(part, 0.0)
            bars.barh(row, width, left=left, color=colors[part], height=0.8)
            left += width
    _label_rows(bars, ranks)
    bars.set_xlabel("milliseconds a step")


def _draw_timeline(
    timeline: Axes,
    pieces: Sequence[Sequence[Segment]],
    ranks: Sequence[int],
    colors: Mapping[str, str],
    origin: float,
) -> None:
    for row, rank in enumerate(ranks):
        boxes = [(1e3 * (piece.start - origin), 1e3 * (piece.end - piece.start)) for piece in pieces[rank]]
        shades = [colors[piece.axis if piece.part == "exposed" else piece.part] for piece in pieces[rank]]
        timeline.broken_barh(boxes, (row - 0.4, 0.8), facecolors=shades)
    _label_rows(timeline, ranks)
    timeline.set_xlabel("milliseconds since the first rank began")


def _label_rows(axes: Axes, ranks: Sequence[int]) -> None:
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0)
