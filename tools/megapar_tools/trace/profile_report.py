"""The program behind tools/profile.py: where the time of recorded steps went, as a table, a picture and a trace."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from megapar.base.errors import storing
from megapar.config.messages import counted
from megapar.launch.reporting import reported
from megapar.system import atomic_files
from megapar_tools.trace.profile import PARTS, RankRecord, RankTime, account, chrome_trace, read, straggler
from megapar_tools.trace.profile_picture import draw

_MOST_ROWS = 32  # of the table and of the picture; the JSON file has all ranks
_NARROW = 120  # characters a line where the output is no terminal


@dataclass
class Arguments:
    """Show where the time of the steps of log.profile went, on every rank. Writes profile.png and trace.json beside the
    records in RUN/profile."""

    run_dir: tyro.conf.Positional[Path]
    """Folder of a run with --log.profile A-B."""
    json: Path | None = None
    """Write the times of every rank to this file too."""


def shown_ranks(accounts: Sequence[RankTime]) -> list[int]:
    """The ranks to show: all, or of many the ones with the most and the least computing."""
    if len(accounts) <= _MOST_ROWS:
        return [found.rank for found in accounts]
    by_computing = sorted(accounts, key=lambda found: found.computing)
    half = _MOST_ROWS // 2
    return sorted(found.rank for found in [*by_computing[:half], *by_computing[-half:]])


def table(accounts: Sequence[RankTime], ranks: Sequence[int]) -> Table:
    """A row for each of `ranks`, and their mean. Times are milliseconds a step."""
    parts = [part for part in PARTS if part != "W" or any(found.parts["W"] for found in accounts)]
    axes = list(dict.fromkeys(axis for found in accounts for axis, seconds in found.exposed.items() if seconds))
    result = Table(title="milliseconds a step; of an axis: exposed (hidden under computing)", title_justify="left")
    for heading in ("rank", "step", *parts, *axes):
        result.add_column(heading, justify="right")
    rows = [(str(rank), [accounts[rank]]) for rank in ranks]
    for name, members in [*rows, ("mean", list(accounts))]:

        def mean(values: Sequence[float]) -> str:
            return f"{1e3 * sum(values) / len(values):.1f}"

        cells = [mean([found.parts[part] for found in members]) for part in parts]
        for axis in axes:
            exposed = mean([found.exposed.get(axis, 0.0) for found in members])
            hidden = mean([found.hidden.get(axis, 0.0) for found in members])
            cells.append(f"{exposed} ({hidden})")
        result.add_row(
            name, mean([found.step_seconds for found in members]), *cells, end_section=name == str(ranks[-1])
        )
    return result


def in_words(records: Sequence[RankRecord], accounts: Sequence[RankTime]) -> list[str]:
    """Sentences on the steps, the clocks, the largest losses and the slowest rank."""
    steps = sorted(records[0].steps)
    seconds = sum(found.step_seconds for found in accounts) / len(accounts)
    error = max(record.clock_error for record in records)
    clock = "one clock" if error == 0 else f"clocks equal to within {1e6 * error:.0f} us"
    named = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    ranks = counted(len(records), "rank")
    lines = [f"{named} on {ranks} ({records[0].device}; {clock}): {1e3 * seconds:.1f} ms a step"]
    lost: defaultdict[str, float] = defaultdict(float)
    for found in accounts:
        for part in ("data", "slowest", "idle", "host"):
            lost[part] += found.parts[part]
        for axis, time in found.exposed.items():
            lost[f"{axis} exposed"] += time
    most = sorted(lost, key=lost.__getitem__, reverse=True)[:3]
    largest = [f"{name} {lost[name] / len(accounts) / seconds:.0%}" for name in most if lost[name] > 0]
    computing = sum(found.computing for found in accounts) / len(accounts) / seconds
    lines.append(f"computing {computing:.0%} of the time; the most of the rest: {', '.join(largest)}")
    slowest = straggler(records, accounts)
    if slowest is not None:
        lines.append(
            f"slowest: rank {slowest.rank} is busy for {1e3 * slowest.busy:.1f} ms a step, the fastest rank with "
            f"the same work for {1e3 * slowest.least:.1f} ms; other ranks waited {1e3 * slowest.waited:.1f} ms for it"
        )
    return lines


def predicted(run_dir: Path, records: Sequence[RankRecord], accounts: Sequence[RankTime]) -> dict[str, Any] | None:
    """What the run's log says of a predicted step, beside what was recorded. None if it says nothing."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        return None
    lines = [json.loads(text) for text in metrics.read_text().splitlines() if "predicted_step_seconds" in text]
    if not lines:
        return None
    seconds = sum(found.step_seconds for found in accounts) / len(accounts)
    idle = sum(found.parts["idle"] for found in accounts) / len(accounts) / seconds
    return lines[-1] | {"recorded_step_seconds": seconds, "recorded_idle_share": idle}


def as_json(records: Sequence[RankRecord], accounts: Sequence[RankTime]) -> dict[str, Any]:
    """The accounts as JSON types, in seconds a step."""
    rows = []
    for record, found in zip(records, accounts, strict=True):
        rows.append(
            {
                "rank": found.rank,
                "pipeline_rank": record.pipeline_rank,
                "clock_error": record.clock_error,
                "step_seconds": found.step_seconds,
                "parts": found.parts,
                "exposed": found.exposed,
                "hidden": found.hidden,
                "waited_for": dict(found.waited_for),
            }
        )
    return {"steps": sorted(records[0].steps), "device": records[0].device, "ranks": rows}


def main() -> None:
    """Run the program of sys.argv. Ends the process with the code of a MegaparError."""
    with reported():
        args = tyro.cli(Arguments, description=Arguments.__doc__, use_underscores=True)
        records = read(args.run_dir)
        accounts = account(records)
        ranks = shown_ranks(accounts)
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=_NARROW)
        console.print(table(accounts, ranks))
        if len(ranks) < len(records):
            print(
                f"{len(ranks)} of {len(records)} ranks: those that compute the longest, and the least; --json has all"
            )
        for line in in_words(records, accounts):
            print(line)
        prediction = predicted(args.run_dir, records, accounts)
        if prediction:
            ms = {key: f"{1e3 * prediction[f'{key}_step_seconds']:.1f} ms" for key in ("predicted", "recorded")}
            idle = {key: f"{prediction[f'{key}_idle_share']:.0%}" for key in ("predicted", "recorded")}
            print(
                f"predicted for {prediction['predicted_machine']}: {ms['predicted']} a step, {idle['predicted']} of it "
                f"idle; recorded: {ms['recorded']}, {idle['recorded']} idle"
            )
        folder = args.run_dir / "profile"
        with storing(folder):
            picture = folder / "profile.png"
            draw(records, accounts, ranks, picture, f"{args.run_dir.name}: where the time of a step went")
            trace = folder / "trace.json"
            atomic_files.write_text(trace, atomic_files.as_json(chrome_trace(records)))
        for path in (picture, trace):
            print(path)
        if args.json:
            atomic_files.write_json(args.json, as_json(records, accounts) | {"prediction": prediction})
            print(args.json)
