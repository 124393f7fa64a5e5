"""Shows what a search for layouts has found: as a table, in words, and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from megapar.config.messages import counted
from megapar.config.options import Config, flatten
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.questions import Answer, gib, row_exposed
from megapar_tools.plan.search import Found, Row, nearest
from megapar_tools.plan.space import Space
from megapar_tools.plan.verdict import UNEVEN_EXPERTS, for_uneven_experts

_GIB = 2**30


@dataclass(frozen=True)
class Budget:
    """A whole run: its tokens, and the GPUs that it takes."""

    tokens: int
    world_size: int
    hardware: Hardware

    def costs(self, row: Row) -> dict[str, float]:
        """Days, GPU hours, US dollars and megawatt-hours of the run. The energy is that of the GPUs under load."""
        assert row.time is not None
        hours = self.tokens / row.time.tokens_per_second_per_gpu / 3600
        return {
            "days": hours / self.world_size / 24,
            "gpu_hours": hours,
            "dollars": hours * self.hardware.price_per_hour,
            "megawatt_hours": hours * self.hardware.watts / 1e6,
        }

    def in_words(self, row: Row) -> str:
        costs = self.costs(row)
        return (
            f"{self.tokens:,} tokens take {costs['days']:,.1f} days, {costs['gpu_hours']:,.0f} GPU hours, "
            f"${costs['dollars']:,.0f} at ${self.hardware.price_per_hour:g} an hour, and "
            f"{costs['megawatt_hours']:,.1f} MWh at {self.hardware.watts:g} W a GPU"
        )


def given_options(row: Row, given: Config) -> dict[str, Any]:
    """The options of a row by dotted path: those of its layout, and others that differ from the config's."""
    before = flatten(given)
    changed = {
        path: value
        for path, value in flatten(row.options_from).items()
        if value != before[path] and not path.startswith("launch.")
    }
    return changed | row.layout.options()


def shown_rows(found: Found, top: int) -> list[Row]:
    """The first `top` rows, and the given one if it is not among them."""
    rows = found.rows[:top]
    given = found.given
    if given is not None and given not in rows:
        rows = [*rows, given]
    return rows


def table(rows: Sequence[Row], found: Found) -> Table:
    """The rows as a table. `rows` are those of `shown_rows`."""
    # Axes that nobody waits for would make the table wider.
    axes = sorted({axis for row in rows for axis, wait in row_exposed(row).items() if wait >= 5e-4 * row.seconds})
    shown = Table(box=None, header_style="bold")
    for name in ("#", "tp cp pp dp", "schedule", "ZeRO", "micro-batch", "recompute"):
        shown.add_column(name, no_wrap=True)
    in_fp8 = any(row.config.train.fp8 != "none" for row in rows)
    for name in (
        "GiB",
        "tokens/s/GPU",
        "MFU",
        *(("FP8",) if in_fp8 else ()),
        "idle",
        *(f"waits {axis}" for axis in axes),
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows, start=1):
        time = row.time
        assert time is not None
        rank = str(number)
        if row.given and row not in found.rows:
            rank = "given, too large"
        elif row.given:
            rank = f"{1 + found.rows.index(row)} given"
        waits = [f"{time.exposed.get(axis, 0.0) / time.seconds:.1%}" for axis in axes]
        shown.add_row(
            rank,
            *_layout_in_cells(row),
            f"{row.memory_bytes / _GIB:.1f}",
            f"{time.tokens_per_second_per_gpu:,.0f}",
            f"{time.mfu:.1%}",
            *((f"{time.fp8:.0%}",) if in_fp8 else ()),
            f"{time.idle_share:.1%}",
            *waits,
        )
    return shown


def fp8_in_words(rows: Sequence[Row], hardware: Hardware) -> Iterable[str]:
    """Yield lines about products in FP8 (train.fp8): what the column says, and what is not proven."""
    rows = [row for row in rows if row.config.train.fp8 != "none"]
    if not rows:
        return
    if not hardware.multiplies_fp8:
        yield (
            f"{hardware.name} has no products of FP8 blocks: numbers are restored and multiplied in 16 bits, which "
            "takes longer than without train.fp8"
        )
        return
    shares = {f"{row.time.fp8:.0%}" for row in rows if row.time is not None}
    yield (
        "FP8: of the FLOPs of matrix products, those in FP8, at an assumed rate of "
        f"{hardware.matrix.fp8_share * hardware.peak('fp8') / 1e12:,.0f} TFLOP/s; MFU is of the peak without FP8"
    )
    if len(shares) > 1:
        yield "rows with another share in FP8 round other matrices; train.fp8_skip gives all layouts the same ones"
    if any(row.time is not None and row.time.adds_fp8 for row in rows):
        yield "weight gradients in FP8 are unproven: no GPU has shown that their products are faster"


def _forms(row: Row) -> str:
    """Return how a layout uses its axes, such as ` sp ring` or `, ep 4 etp 1`: what stands behind its sizes."""
    layout = row.layout
    forms = ""
    if layout.sequence_parallel:
        forms += " sp"
    if layout.cp > 1:
        forms += f" {layout.cp_attention}"
    if row.config.model.num_experts:
        forms += f", ep {layout.ep} etp {layout.etp}"
    return forms


def _layout_in_cells(row: Row) -> tuple[str, ...]:
    layout = row.layout
    grid = f"{layout.tp} {layout.cp} {layout.pp} {layout.dp}{_forms(row)}"
    schedule = layout.schedule
    if layout.pp == 1 and schedule == "1f1b":
        schedule = "-"
    elif layout.vpp > 1:
        schedule += f" x{layout.vpp}"
    zero = str(layout.zero_stage)
    if layout.shard_ranks:
        zero += f" over {layout.shard_ranks}"
    recompute = layout.recompute
    if layout.recompute == "full" and layout.recompute_layers:
        recompute += f", layers {' '.join(layout.recompute_layers)}"
    return grid, schedule, zero, str(layout.micro_batch_size), recompute


def _layout_in_words(row: Row) -> str:
    """Return a layout with the names of its columns, such as `tp 1 cp 2 pp 2 dp 128, schedule 1f1b, ZeRO 3, ...`."""
    layout = row.layout
    _, schedule, zero, micro_batch, recompute = _layout_in_cells(row)
    grid = f"tp {layout.tp} cp {layout.cp} pp {layout.pp} dp {layout.dp}{_forms(row)}"
    return f"{grid}, schedule {schedule}, ZeRO {zero}, micro-batch {micro_batch}, recompute {recompute}"


def rejections(found: Found, space: Space, hardware: Hardware) -> Iterable[str]:
    """Yield lines about the layouts that are no rows."""
    yield (
        f"{len(space):,} layouts can run; {counted(len(found.rows) + len(found.too_large), 'was', 'were')} planned, "
        f"{found.slower:,} take longer by an estimate"
    )
    for reason, count in space.rejected.most_common(5):
        yield f"{count:,} cannot run: {reason}, such as {space.first_problems[reason]}"
    large = found.estimated_too_large + len(found.too_large)
    if not large:
        return
    usable = gib(hardware.usable_bytes)
    text = f"{large:,} need more than {usable}"
    if found.estimated_too_large:
        text += f" ({found.estimated_too_large:,} of them by an estimate)"
    if found.too_large:
        text += f"; {_with_nearest(found.too_large[0], found)}"
    yield text
    given = found.given
    if given is not None and not given.fits:
        yield f"the given layout does not fit: {_with_nearest(given, found)}"


def _with_nearest(row: Row, found: Found) -> str:
    """A row that does not fit, and the most similar one that does."""
    text = f"{_layout_in_words(row)}, needs {gib(row.memory_bytes)}"
    uneven = for_uneven_experts(row.config, row.report)
    if uneven:
        text += f", and {gib(uneven)} for experts with {1 + UNEVEN_EXPERTS:g} times their even share"
    other = nearest(row, found.rows)
    if other is None:
        return text
    changed = []
    for name, before, after in zip(row.layout._fields, row.layout, other.layout, strict=True):
        if before != after:
            changed.append(f"{name} {after} in place of {before}")
    return f"{text}; with {', '.join(changed) or 'the other options of its row'} it needs {gib(other.memory_bytes)}"


def row_as_json(row: Row, given: Config, run: Budget) -> dict[str, Any]:
    """A row for --json."""
    values: dict[str, Any] = {
        "layout": given_options(row, given),
        "given": row.given,
        "fits": row.fits,
        "memory_bytes": row.memory_bytes,
        "bytes_by_kind": dict(row.report.rows),
    }
    time = row.time
    if time is not None:
        values |= {
            "step_seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second_per_gpu * run.world_size,
            "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
            "mfu": time.mfu,
            "fp8_share_of_products": time.fp8,
            "idle": time.idle_share,
            "exposed_seconds": dict(time.exposed),
            "busy_seconds": dict(time.busy),
            **run.costs(row),
        }
    return values


def as_json(
    found: Found, rows: Sequence[Row], space: Space, given: Config, run: Budget, answers: Sequence[Answer], why: str
) -> dict[str, Any]:
    """What --json writes."""
    hardware = run.hardware
    return {
        "gpus": run.world_size,
        "hardware": {f.name: _plain(getattr(hardware, f.name)) for f in fields(hardware)},
        "usable_bytes": hardware.usable_bytes,
        "tokens": run.tokens,
        "rows": [row_as_json(row, given, run) for row in rows],
        "given_problem": found.given_problem,
        "questions": [{"question": answer.question, "answer": answer.answer} for answer in answers],
        "why_first": why,
        "layouts": len(space),
        "planned": len(found.rows) + len(found.too_large),
        "slower_by_estimate": found.slower,
        "too_large": found.estimated_too_large + len(found.too_large),
        "too_large_by_estimate": found.estimated_too_large,
        "cannot_run": dict(space.rejected),
    }


def _plain(value: Any) -> Any:
    """A value of a hardware file as JSON takes it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(part) for name, part in vars(value).items()}
    return value


def write(console: Console, lines: Iterable[str]) -> None:
    """Print lines without markup, as long as they are."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
