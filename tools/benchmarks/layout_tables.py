"""The tables that layouts.py prints."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.peers import Result
from benchmarks.products import Products


def speed_table(runs: Sequence[dict[str, Any]]) -> Table:
    """The fastest peer in bold: what megapar wants to reach."""
    table = Table(
        title="megapar's speed over that of each contender, whose losses and norms differ from plain PyTorch's; "
        "limit: the share of the speed of matrix products and attention alone"
    )
    for column in ("hidden", "layout", "contender"):
        table.add_column(column)
    for column in ("tokens/s", "speed", "range", "limit", "CPU time", "peak MiB a rank", "loss", "norm"):
        table.add_column(column, justify="right")
    for run in runs:
        peers = [c for c in run["contenders"] if "sent" not in c and c["name"] != Products.name]
        fastest = max(peers, key=lambda c: c["tokens_per_second"], default=None)
        for contender in run["contenders"]:
            faster = contender["megapar_is_faster"]
            errors = contender["errors"]
            table.add_row(
                str(run["hidden"]),
                run["layout"],
                contender["name"],
                f"{contender['tokens_per_second']:,.0f}",
                f"{faster['median']:.2f}x",
                f"{faster['min']:.2f}-{faster['max']:.2f}",
                f"{contender['share_of_products']['median']:.0%}" if "share_of_products" in contender else "",
                f"{contender['cpu_time_over_megapar']:.2f}x",
                " ".join(f"{n / 2**20:,.0f}" for n in contender["peak_bytes_above_start"]),
                *(f"{errors[what]:.0e}" if what in errors else "" for what in Result._fields),
                style="bold" if contender is fastest else None,
                end_section=contender is run["contenders"][-1],
            )
    return table


def traffic_table(runs: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Bytes that rank 0 of megapar sends in a step")
    for column in ("hidden", "layout", "contender", "axis"):
        table.add_column(column)
    for column in ("measured", "formula"):
        table.add_column(column, justify="right")
    for run in runs:
        for contender in (c for c in run["contenders"] if "sent" in c):
            sent = contender["sent"][0]
            formula = contender["formula"][0]
            for axis in sorted(sent | formula):
                numbers = (f"{bytes_.get(axis, 0):,}" for bytes_ in (sent, formula))
                table.add_row(str(run["hidden"]), run["layout"], contender["name"], axis, *numbers)
    return table


def balance_table(runs: Sequence[dict[str, Any]]) -> Table:
    """The ranks or experts with the most work set the pace."""
    table = Table(title="The largest load over the mean")
    for column in ("hidden", "layout", "contender", "what"):
        table.add_column(column)
    table.add_column("max/mean", justify="right")
    for run in runs:
        where = str(run["hidden"]), run["layout"]
        for deal, largest in run.get("attended_pairs", {}).items():
            table.add_row(*where, "", f"attended pairs of ranks, {deal}", f"{largest:.2f}")
        for contender in run["contenders"]:
            if "expert_load" in contender:
                what = "tokens of experts, in the last step"
                table.add_row(*where, contender["name"], what, f"{contender['expert_load']:.2f}")
            if "rank_load" in contender:
                what = "tokens of ranks, in the last step"
                table.add_row(*where, contender["name"], what, f"{contender['rank_load']:.2f}")
    return table
