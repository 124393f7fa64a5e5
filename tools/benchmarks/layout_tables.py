"""The tables of layouts.py."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.peers import Result
from benchmarks.products import Products
from benchmarks.report import table

Runs = Sequence[dict[str, Any]]


def rows(runs: Runs) -> Iterator[tuple[tuple[str, str, str], dict[str, Any], dict[str, Any]]]:
    """(width, layout and name), run and contender of every contender."""
    for run in runs:
        for contender in run["contenders"]:
            yield (str(run["hidden"]), run["layout"], contender["name"]), run, contender


def speed_table(runs: Runs) -> Table:
    """The fastest peer in bold: what megapar wants to reach."""
    lines = []
    for (hidden, layout, name), run, contender in rows(runs):
        peers = [c for c in run["contenders"] if "sent" not in c and c["name"] != Products.name]
        fastest = max(peers, key=lambda c: c["tokens_per_second"], default=None)
        faster = contender["megapar_is_faster"]
        errors = contender["errors"]
        lines.append(
            (
                *(hidden, layout, f"[bold]{name}[/bold]" if contender is fastest else name),
                f"{contender['tokens_per_second']:,.0f}",
                f"{faster['median']:.2f}x",
                f"{faster['min']:.2f}-{faster['max']:.2f}",
                f"{contender['share_of_products']['median']:.0%}" if "share_of_products" in contender else "",
                f"{contender['cpu_time_over_megapar']:.2f}x",
                " ".join(f"{n / 2**20:,.0f}" for n in contender["peak_bytes_above_start"]),
                *(f"{errors[what]:.0e}" if what in errors else "" for what in Result._fields),
            )
        )
    title = (
        "megapar's speed over that of each contender, whose losses and norms differ from plain PyTorch's; "
        "limit: the share of the speed of matrix products and attention alone"
    )
    numbers = ("tokens/s", "speed", "range", "limit", "CPU time", "peak MiB a rank", "loss", "norm")
    return table(lines, ("hidden", "layout", "contender"), numbers, title, sections=2)


def traffic_table(runs: Runs) -> Table:
    lines = []
    for words, _, contender in rows(runs):
        if "sent" in contender:
            sent = contender["sent"][0]
            formula = contender["formula"][0]
            for axis in sorted(sent | formula):
                lines.append((*words, axis, *(f"{bytes_.get(axis, 0):,}" for bytes_ in (sent, formula))))
    title = "Bytes that rank 0 of megapar sends in a step"
    return table(lines, ("hidden", "layout", "contender", "axis"), ("measured", "formula"), title, sections=2)


def balance_table(runs: Runs) -> Table:
    """The experts or ranks with the most tokens set the pace."""
    lines = []
    for words, _, contender in rows(runs):
        for whose in ("expert", "rank"):
            if f"{whose}_load" in contender:
                lines.append((*words, f"tokens of {whose}s, in the last step", f"{contender[f'{whose}_load']:.2f}"))
    return table(lines, ("hidden", "layout", "contender", "what"), ["max/mean"], "The largest load over the mean")
