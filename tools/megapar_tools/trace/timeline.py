"""Draws timelines of pipeline steps, simulated or measured, as pictures or as a trace for chrome://tracing."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megapar.pipeline.actions import Action, Event
from megapar.system.atomic_files import as_json, save_figure, write_text
from megapar_tools.trace.colors import CHUNKS, PARTS

_NAMES = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
_IDLE = PARTS["idle"].light


def draw(events: Sequence[Event], path: str | Path, title: str, unit: str = "s") -> None:
    """Draw a timeline at `path`, with a row for each rank and the numbers of micro-batches in the boxes.

    The extension of the file's name, such as .png or .svg, gives the format. Raises ValueError if there are no events.
    """
    draw_over_each_other({title: events}, path, unit)


def draw_over_each_other(timelines: Mapping[str, Sequence[Event]], path: str | Path, unit: str = "s") -> None:
    """Draw timelines below each other on one axis of time. The keys are their titles.

    Raises ValueError if one of them has no events.
    """
    for title, events in timelines.items():
        if not events:
            raise ValueError(f"no events to draw in {path}: {title}")
    ranks = 1 + max(event.rank for events in timelines.values() for event in events)
    span = max(_span(events) for events in timelines.values())
    # Without pyplot, which would choose a backend for the whole process.
    figure = Figure(figsize=(14, 0.6 + len(timelines) * (1.1 + 0.55 * ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), squeeze=False)[:, 0]
    for axes, (title, events) in zip(panels, timelines.items(), strict=True):
        _draw_panel(axes, title, events, ranks, span)
    panels[-1].set_xlabel(f"time [{unit}]")
    legend = _legend([event for events in timelines.values() for event in events], ranks)
    figure.legend(handles=legend, loc="outside lower right", ncols=5, frameon=False)
    save_figure(figure, Path(path))


def write_chrome_trace(timelines: Mapping[str, Sequence[Event]], path: str | Path, seconds: float) -> None:
    """Write timelines as a trace for chrome://tracing and ui.perfetto.dev. The keys are their titles.

    Each timeline is a process and each rank a thread. `seconds` is how long the unit of the events' times is.
    """
    rows: list[dict[str, object]] = []
    for number, (title, events) in enumerate(timelines.items()):
        rows.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}})
        origin = min(event.start for event in events)
        for event in events:
            rows.append(
                {
                    "ph": "X",  # an event with a duration
                    "name": str(event.action),
                    "cat": _NAMES[event.action.kind],
                    "pid": number,
                    "tid": event.rank,
                    "ts": 1e6 * seconds * (event.start - origin),  # microseconds
                    "dur": 1e6 * seconds * (event.end - event.start),
                    "args": {"stage": event.action.stage, "microbatch": event.action.microbatch},
                }
            )
    write_text(Path(path), as_json({"traceEvents": rows}))


def _span(events: Sequence[Event]) -> float:
    return max(event.end for event in events) - min(event.start for event in events)


def _draw_panel(axes: Axes, title: str, events: Sequence[Event], ranks: int, width: float) -> None:
    """Draw one timeline. `width` is the time on the axis."""
    origin = min(event.start for event in events)
    span = _span(events)
    for rank in range(ranks):
        _draw_rank(axes, rank, [event for event in events if event.rank == rank], ranks, origin, span, width)
    busy = sum(event.end - event.start for event in events)
    axes.set_title(f"{title}  ({1 - busy / (ranks * span):.1%} idle)", loc="left")
    axes.set_xlim(0, width)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_rank(
    axes: Axes, rank: int, events: Sequence[Event], ranks: int, origin: float, span: float, width_of_axis: float
) -> None:
    axes.broken_barh([(0, span)], (rank - 0.4, 0.8), facecolors=_IDLE)
    boxes = [(event.start - origin, event.end - event.start) for event in events]
    colors = [_color(event.action, ranks) for event in events]
    axes.broken_barh(boxes, (rank - 0.4, 0.8), facecolors=colors, edgecolors="white", linewidth=0.6)
    widest = max((len(str(event.action.microbatch)) for event in events), default=0)
    for event, (left, width) in zip(events, boxes, strict=True):
        if width / width_of_axis > 0.006 * widest:  # a digit takes about 0.006 of the width of the picture
            label = str(event.action.microbatch)
            color = "white" if event.action.stage < 2 * ranks else "black"
            axes.text(left + width / 2, rank, label, ha="center", va="center", fontsize=9, color=color)


def _color(action: Action, ranks: int) -> str:
    shades = CHUNKS[action.kind]
    return shades[min(action.stage // ranks, len(shades) - 1)].light


def _legend(events: Iterable[Event], ranks: int) -> list[Patch]:
    """A patch for each kind and chunk of action that occurs, forwards first."""
    actions = {(event.action.kind, event.action.stage // ranks): event.action for event in events}
    several = any(chunk for _, chunk in actions)
    ordered = sorted(actions.items(), key=lambda item: ("FBIW".index(item[0][0]), item[0][1]))
    patches = []
    for (kind, chunk), action in ordered:
        label = f"{_NAMES[kind]}, chunk {chunk}" if several else _NAMES[kind]
        patches.append(Patch(color=_color(action, ranks), label=label))
    return [*patches, Patch(color=_IDLE, label="idle")]
