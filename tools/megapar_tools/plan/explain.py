"""Explains one layout: the bytes of its ranks, the time of its layers, what each axis sends over which link, and the
timeline of a step."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from megapar.base.errors import storing
from megapar.config.derive import num_microbatches
from megapar.config.messages import counted, first_few
from megapar.config.options import Config
from megapar.launch.grid import grid_of
from megapar.pipeline.schedules import embedding_ranks, placement
from megapar_tools.plan.durations import duration
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.memory import RankReport
from megapar_tools.plan.network import Network
from megapar_tools.plan.parts import LAST, Parts
from megapar_tools.plan.recorded import kept_by_stage
from megapar_tools.plan.stage_works import stages_of
from megapar_tools.plan.step_time import StepTime
from megapar_tools.plan.work import Started

_GIB = 2**30
_SHADES = 4  # of the stages of a rank in a picture


@dataclass(frozen=True)
class LayerTraffic:
    """What a rank communicates over an axis for the layers of its stages in a step, beside its group there.

    `nbytes` are those of whole tensors, as `megapar_tools.plan.work.Started` counts them. `link` is the slowest one
    between the `ranks` of the group, which are on so many `nodes`.
    """

    axis: str
    ranks: int
    nodes: int
    link: str
    calls: int
    nbytes: int
    exposed: float


@dataclass(frozen=True)
class LayerTime:
    """What the kernels of a kind of layer take in a step, forward and backward: the mean of the pipeline's ranks.

    `first` is the number of the first of so many `layers` of the kind. `sent` counts the bytes of one layer and one
    micro-batch by axis, as `LayerTraffic`.
    """

    first: int
    layers: int
    seconds: float
    sent: Mapping[str, int]


def layer_times(config: Config, parts: Parts, hardware: Hardware) -> list[LayerTime]:
    """Return the times of all kinds of layers. `config` has the kernels of the planned machine."""
    ctx = parts.context(config, 0)
    network = Network(grid_of(config), hardware)
    found = []
    for part, layers in Counter(parts.layer_parts(config, ctx)).items():
        recording = parts.recording(config, ctx, part)
        operations = (*recording.forward, *recording.backward)
        busy = duration(operations, hardware, network).busy
        times = layers * num_microbatches(config) / config.parallel.pp
        sent: Counter[str] = Counter()
        for operation in operations:
            if isinstance(operation, Started):
                sent[operation.axis] += operation.nbytes
        found.append(LayerTime(part.number, layers, times * sum(busy.values()), sent))
    return found


def layer_table(rows: list[LayerTime], step_seconds: float) -> Table:
    """Make a table of the times of kinds of layers."""
    shown = Table(box=None, header_style="bold", title="Kernels of layers in a step", title_justify="left")
    shown.add_column("layers like")
    axes = list(dict.fromkeys(axis for row in rows for axis in row.sent))
    for name in ("number", "ms", "share", *(f"{axis} MB a layer" for axis in axes)):
        shown.add_column(name, justify="right")
    for row in rows:
        sent = [f"{row.sent.get(axis, 0) / 1e6:,.1f}" for axis in axes]
        shown.add_row(
            str(row.first), str(row.layers), f"{1e3 * row.seconds:,.1f}", f"{row.seconds / step_seconds:.1%}", *sent
        )
    return shown


def bytes_by_rank(reports: Mapping[RankReport, list[int]]) -> Table:
    """A table of the bytes of each kind of rank. The keys are the reports, the values the ranks that they are for."""
    by_kind = {report: _without_stages(report.rows) for report in reports}
    kinds = list(dict.fromkeys(name for sizes in by_kind.values() for name in sizes))
    shown = Table(box=None, header_style="bold", title="GiB on each rank", title_justify="left")
    shown.add_column("ranks")
    shown.add_column("pp", justify="right")
    for name in (*kinds, "all"):
        shown.add_column(name, justify="right")
    for report, ranks in reports.items():
        sizes = [by_kind[report].get(name, 0) for name in kinds]
        words = [f"{size / _GIB:,.2f}" for size in (*sizes, report.total)]
        shown.add_row(first_few(map(str, ranks), 4, " "), str(report.pp), *words)
    return shown


def _without_stages(rows: Mapping[str, int]) -> Counter[str]:
    """The bytes of a rank by kind, over all of its stages."""
    found: Counter[str] = Counter()
    for name, nbytes in rows.items():
        found[re.sub(r" of stage \d+", "", name)] += nbytes
    return found


def traffic(config: Config, parts: Parts, hardware: Hardware, time: StepTime) -> list[LayerTraffic]:
    """What each axis sends. Gradients, weights and the tensors between stages are in the rows of grad and pp.

    `config` has the kernels of the planned machine. It is the busiest pipeline rank on each axis.
    """
    network = Network(grid_of(config), hardware)
    found = []
    sent = _sent_by_layers(config, parts)
    for axis in ("tp", "cp", "ep", "etp", "pp", "grad", "expert_grad"):
        if axis in ("ep", "etp", "expert_grad") and not config.model.num_experts:
            continue
        span = network.span(axis)
        if span.ranks == 1:
            continue
        calls, nbytes = sent.get(axis, (0, 0))
        found.append(
            LayerTraffic(axis, span.ranks, span.nodes, network.level(axis), calls, nbytes, time.exposed.get(axis, 0.0))
        )
    return found


def _sent_by_layers(config: Config, parts: Parts) -> dict[str, tuple[int, int]]:
    """By axis, the calls and the bytes of a step on the rank that sends most, in forward and backward passes."""
    parallel = config.parallel
    rank_of = placement(parallel.schedule, parallel.pp, parallel.vpp)
    calls: dict[tuple[str, int], int] = Counter()
    nbytes: dict[tuple[str, int], int] = Counter()
    elements: dict[tuple[str, int], int] = Counter()
    for stage, rank in zip(stages_of(config, parts), rank_of, strict=True):
        for part, number in stage:
            for operation in (*part.forward, *part.backward):
                if isinstance(operation, Started):
                    calls[operation.axis, rank] += number
                    nbytes[operation.axis, rank] += number * operation.nbytes
            for axis, count in part.elements.items():
                elements[axis, rank] += number * count
            # Both directions of the boundary before the stage.
            if part is stage[0][0] and parallel.pp > 1:
                calls["pp", rank] += 2
                nbytes["pp", rank] += part.boundary_bytes + part.boundary_gradient_bytes
    micro_batches = num_microbatches(config)
    found: dict[str, tuple[int, int]] = {}
    for (axis, rank), count in calls.items():
        most = found.get(axis, (0, 0))
        found[axis] = max(most, (micro_batches * count, micro_batches * nbytes[axis, rank]), key=lambda pair: pair[1])
    for (axis, _), count in elements.items():
        # Gradients are summed in fp32 once, and from ZeRO-2 on in every micro-batch; weights are gathered.
        times = micro_batches if config.optimizer.zero_stage >= 2 else 1
        gathers = {0: 0, 1: 1, 2: 1, 3: 2 * micro_batches}[config.optimizer.zero_stage]
        width = 4 if config.train.precision == "fp32" else 2
        before = found.get(axis, (0, 0))
        found[axis] = before[0], max(before[1], count * (4 * times + width * gathers))
    return found


def traffic_table(rows: list[LayerTraffic]) -> Table:
    """The traffic as a table."""
    shown = Table(box=None, header_style="bold", title="What each axis sends in a step", title_justify="left")
    for name in ("axis", "ranks", "nodes", "link"):
        shown.add_column(name)
    for name in ("GB", "waited for"):
        shown.add_column(name, justify="right")
    for row in rows:
        exposed = f"{1e3 * row.exposed:,.1f} ms"
        shown.add_row(row.axis, str(row.ranks), str(row.nodes), row.link, f"{row.nbytes / 1e9:,.2f}", exposed)
    return shown


def seconds_in_words(time: StepTime) -> Iterator[str]:
    """Yield lines about where the time of a step goes."""
    yield f"a step takes {time.seconds:,.3f} s"
    kinds = {**time.busy, **{f"waiting for {axis}": seconds for axis, seconds in time.exposed.items()}}
    kinds["idle in the pipeline"] = time.idle_share * time.seconds
    for name, seconds in sorted(kinds.items(), key=lambda item: -item[1]):
        yield f"  {name:24} {1e3 * seconds:12,.1f} ms  {seconds / time.seconds:6.1%}"


def mtp_in_words(config: Config, parts: Parts, hardware: Hardware, step_seconds: float) -> Iterator[str]:
    """Yield a line about the layers of multi-token prediction, if there are any. `config` is as in `layer_times`."""
    depths = config.model.num_nextn_predict_layers
    if not depths:
        return
    network = Network(grid_of(config), hardware)
    without = replace(config, model=replace(config.model, num_nextn_predict_layers=0))
    busy, kept, size, embedding = [], [], [], 0
    for each in (config, without):
        ctx = parts.context(each, 0)
        recording = parts.recording(each, ctx, LAST)
        busy.append(sum(duration((*recording.forward, *recording.backward), hardware, network).busy.values()))
        kept.append(kept_by_stage([recording.kept], has_first=False, has_layers=False).total())
        size.append(sum(math.prod(p.shape) for p in parts.structure(each, ctx, LAST).params))
        if each is config and not config.model.tie_word_embeddings:
            embedding = recording.embedding_elements
    copied = embedding and embedding_ranks(config.parallel)[0] != embedding_ranks(config.parallel)[1]
    own = size[0] - size[1] - (0 if copied else embedding)
    seconds = (busy[0] - busy[1]) * num_microbatches(config)
    yield (
        f"{counted(depths, 'layer')} of multi-token prediction, with the head: {1e3 * seconds:,.1f} ms of the last "
        f"rank's kernels ({seconds / step_seconds:.1%} of the step), {(kept[0] - kept[1]) / _GIB:.2f} GiB kept by a "
        f"micro-batch, {own:,} parameters on a rank" + ", its copy of the embedding among them" * bool(copied)
    )


def draw(time: StepTime, number: int, title: str, folder: Path) -> list[Path]:
    """Write the timeline of a simulated step as a picture and as a Chrome trace into `folder`. Returns their paths."""
    from megapar_tools.trace import timeline  # here, because only this needs matplotlib, which is slow to import

    ranks = 1 + max(event.rank for event in time.events)
    # Of many stages on a rank, such as single layers with ZeRO-3, the legend would fill the picture.
    few = [
        event._replace(action=event.action._replace(stage=min(event.action.stage, _SHADES * ranks - 1)))
        for event in time.events
    ]
    picture = folder / f"plan_{number}.png"
    trace = folder / f"plan_{number}.trace.json"
    with storing(picture):
        timeline.draw(few, picture, title)
    with storing(trace):
        timeline.write_chrome_trace({title: time.events}, trace, 1.0)
    return [picture, trace]


def as_json(
    reports: Mapping[RankReport, list[int]], rows: list[LayerTraffic], layers: list[LayerTime], files: list[Path]
) -> dict[str, Any]:
    """The explanation for --json."""
    return {
        "ranks": [
            {"ranks": ranks, "pp": report.pp, "bytes_by_kind": dict(report.rows), "memory_bytes": report.total}
            for report, ranks in reports.items()
        ],
        "axes": [vars(row) for row in rows],
        "layers": [vars(row) for row in layers],
        "files": [str(path) for path in files],
    }
