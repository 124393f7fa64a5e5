"""How runs are, from the files of their folders alone: megapar status RUN_DIR [RUN_DIR ...] [--json]

Exit code 0: each run is at work or has done all its steps. 1: one of them failed, was stopped or stands still.
"""

import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import tyro
from megapar_tools.dashboard.status import HEALTHY, Status, look, shown

from megapar.base.errors import DataError
from megapar.config.messages import counted
from megapar.launch.reporting import open_streams, reported
from megapar.system.atomic_files import as_json
from megapar.system.say import say

_LONGEST = 1e11  # seconds; a timedelta ends at 8.6e13


@dataclass
class Arguments:
    """Say how runs are."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""
    json: bool = False
    """Print one JSON object for each run in place of text."""


def in_words(status: Status) -> list[str]:
    """The lines for a person."""
    if status.state == "no run":
        return [f"{shown(status.run)}: no run"]
    of = f"/{status.steps}" if status.steps else ""
    head = f"{shown(status.run)}: {status.state} | step {status.step}{of}"
    if status.loss is not None:
        head += f" | loss {status.loss:.4f}"
    if status.validation_loss is not None:
        head += f" | held-out {status.validation_loss:.4f}"
    lines = [head]
    if status.step_seconds is not None:
        speed = f"{status.step_seconds:.3g} s a step"
        if status.tokens_per_second is not None:
            speed += f", {status.tokens_per_second:,.0f} tokens/s"
        if status.speed_steps is not None:
            speed += " (steps {} to {})".format(*status.speed_steps)
        lines.append(f"  speed     {speed}")
    if status.seconds_left is not None:
        lines.append(f"  left      {_span(status.seconds_left)}")
    if status.state in ("stands still", "gone") and status.silent_seconds is not None:
        times = f", {status.silent_seconds / status.step_seconds:,.0f} steps' time" if status.step_seconds else ""
        lines.append(f"  silent    for {_span(status.silent_seconds)}{times}")
    if status.saved_step is not None:
        lines.append(f"  saved     step {status.saved_step}")
    if status.failed_saves:
        lines.append(f"  failed    {counted(status.failed_saves, 'save')}, since the newest in the run folder")
    if status.slow_ranks:
        lines.append(f"  slow      rank {', '.join(map(str, status.slow_ranks))}")
    if status.fault:
        lines.append(f"  fault     {status.fault}")
    if status.restarts:
        lines.append(f"  restarts  {status.restarts}")
    if status.goodput is not None:
        part, whole = _span(status.seconds["steps"]), _span(status.wall_seconds)
        lines.append(f"  goodput   {status.goodput:.1%}: {part} of steps in {whole}")
    return lines


def _span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return str(timedelta(seconds=round(seconds))) if seconds < _LONGEST else f"{seconds:.3g} s"


def main() -> int:
    open_streams()
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        found, unread = [], []
        for run_dir in args.run_dirs:
            try:
                found.append(look(run_dir, time.time()))
            except DataError as error:
                unread.append(error)
        for status in found:
            if args.json:
                say(as_json({**asdict(status), "goodput": status.goodput}))
            else:
                for line in in_words(status):
                    say(line)
        if unread:
            raise DataError("; ".join(map(shown, unread)))
    return 0 if all(status.state in HEALTHY for status in found) else 1


if __name__ == "__main__":
    sys.exit(main())
