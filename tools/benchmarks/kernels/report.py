"""A benchmark's results as a table and as a bar chart."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kernels import peers
from megapar.train.provenance import in_a_line


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def ratio(row: dict[str, Any], name: str) -> str:
    """How many times the contender's time is ours, or why that is unknown."""
    over = row["over"][name]
    status = row["contenders"][name]["status"]
    return f"{over:.2f}x" if over is not None else "ran" if status == "ok" else status[:40]


def target_text(target: dict[str, Any]) -> str:
    """share >= 0.85: reached | missed | not measured."""
    verdict = {True: "reached", False: "missed", None: "not measured"}[target["reached"]]
    sign = "<=" if target["at_most"] else ">="
    return f"{target['figure']} {sign} {target['limit']:g}: {verdict}"


def print_report(facts: dict[str, Any]) -> None:
    """The table, the machine's limits, and what was left out or wrong."""
    title = "DRY RUN on the CPU: no figures" if facts["dry_run"] else "Fused kernels: time, and other times over it"
    table = Table(title=title)
    for column in ("op", "shape", "direction"):
        table.add_column(column)
    for column in ("ms", "GB/s or TFLOP/s", "of copy", "peak MB", *peers.NAMES):
        table.add_column(column, justify="right")
    table.add_column("targets, other contenders")
    for row in facts["rows"]:
        table.add_row(
            row["op"],
            f"{row['model']} {row['shape']}",
            row["direction"],
            number(row["ms"], ".3f"),
            number(row["gb_per_second"] or row["tflops"], ",.0f"),
            number(row["share"], ".0%"),
            number(row["bytes"] and row["bytes"] / 1e6, ",.0f"),
            *(ratio(row, name) for name in peers.NAMES),
            "\n".join(
                [target_text(target) for target in row["targets"]]
                + [f"{name}: {ratio(row, name)}" for name in row["over"] if name not in peers.NAMES]
            ),
        )
    console = Console(width=200)  # narrower, numbers would be cut
    console.print(table)
    console.print(
        f"copy {number(facts['copy_gb_per_second'], ',.0f')} GB/s, GEMM {number(facts['gemm_tflops'], ',.0f')} TFLOP/s"
        f", {facts['minutes']:.1f} minutes | {in_a_line(facts)}"
    )
    for what in facts["not_run"]:
        console.print(f"not run, the time was up: {what}")
    for what in facts["wrong"]:
        console.print(f"WRONG: {what}")


def draw(facts: dict[str, Any], file: Path) -> None:
    """Bars of GB/s (of the fewest bytes) of each contender for each op and direction, the measured copy as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in facts["rows"] if row["unit"] == "bytes" and row["direction"] != "both"]
    names = ("megapar", *peers.NAMES)
    figure, axes = pyplot.subplots(figsize=(11, 2 + 0.5 * len(shown)))
    for place, name in enumerate(names):
        times = [row["contenders"][name]["ms"] for row in shown]
        rates = [row["least"] / ms / 1e6 if ms else 0.0 for row, ms in zip(shown, times, strict=True)]
        axes.barh([i + 0.2 * place for i in range(len(shown))], rates, height=0.2, label=name)
    if facts["copy_gb_per_second"]:
        axes.axvline(facts["copy_gb_per_second"], color="black", linestyle="--", label="torch's copy")
    axes.set_yticks(
        [i + 0.3 for i in range(len(shown))],
        [f"{row['op']} {row['model']} {row['shape']} {row['direction']}" for row in shown],
        fontsize=7,
    )
    axes.invert_yaxis()
    axes.set_xlabel("GB/s over the fewest bytes that the op can move")
    axes.set_title("dry run: no figures" if facts["dry_run"] else f"{facts['hardware']}, commit {facts['commit']}")
    axes.margins(y=0.01)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
