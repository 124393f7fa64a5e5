"""What a lost rank costs, and what snapshots cost the steps of a run.

Two ranks of the quickstart's small model on this machine's CPUs. In each round one run is made, and a rank of it is
killed in the middle.

- report: from the kill to the line that names the rank.
- step: from the kill to the end of the next step that was not computed before.
- snapshot: what one in memory adds to a step; share: of the step.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.counting import in_turn
from benchmarks.ranks import BenchmarkError
from benchmarks.report import Report, table
from megapar.observe.provenance import provenance
from megapar.system import events

_PROGRAM = Path(__file__).parents[2] / "pretrain_scripts/pretrain.py"
_TINY = _PROGRAM.parent / "configs/tiny.toml"


@dataclass(frozen=True)
class Options:
    """Measure restarts on this machine."""

    rounds: int = 5
    """Runs, each with a killed rank."""
    steps: int = 60
    """Steps of a run."""
    json: Path | None = None
    """File for the figures."""


def _run(folder: Path, options: Options, *flags: str, kill_at: int = 0) -> dict[str, float]:
    """One run in `folder`; returns when it was killed, and the times of its events."""
    shape = ("--launch.nproc", "2", "--launch.device", "cpu", "--train.steps", str(options.steps), "--run_dir", "run")
    command = [sys.executable, str(_PROGRAM), "--config", str(_TINY), *shape, "--log.no-tensorboard", *flags]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stderr is not None
    found: dict[str, float] = {}
    for line in running.stdout:
        step = _step(line)
        if step == kill_at and kill_at and "killed" not in found:
            ranks = json.loads((folder / "run/ranks.json").read_text())["ranks"]
            found["killed"] = time.time()
            os.kill(ranks[1]["pid"], signal.SIGKILL)
            running.stderr.readline()
            found["report"] = time.time() - found["killed"]
            kill_at = -step - 1  # the steps until here are computed again
        elif "killed" in found and "step" not in found and step > -kill_at:
            found["step"] = time.time() - found["killed"]
    if running.wait():
        raise BenchmarkError(running.stderr.read())
    times = {event["event"]: event["time"] for event in events.read(folder / "run")}
    return {**found, "seconds_of_a_step": (times["exit"] - times["start"]) / options.steps}


def _step(line: str) -> int:
    """The step of a line on the console, 0 in other lines."""
    words = line.replace("/", " ").split()
    return int(words[1]) if words[:1] == ["step"] and "loss" in words else 0


def main(options: Options) -> None:
    """Measure, print the table, write the JSON file."""
    every = ("--launch.max_restarts", "1", "--checkpoint.memory_every", "1")
    rows: list[dict[str, float]] = []
    for number in track(range(options.rounds), "rounds", console=Console(stderr=True)):
        turns = in_turn(["lost", "snapshots", "alone"], number)
        found = {}
        for turn in turns:
            with tempfile.TemporaryDirectory() as folder:
                flags = () if turn == "alone" else every
                at = options.steps // 2 if turn == "lost" else 0
                found[turn] = _run(Path(folder), options, *flags, kill_at=at)
        alone, with_them = found["alone"]["seconds_of_a_step"], found["snapshots"]["seconds_of_a_step"]
        lost = {name: found["lost"][name] for name in ("report", "step")}
        rows.append({**lost, "snapshot": with_them - alone, "share": with_them / alone - 1})
    lines = []
    for name, form in (("report", ".2f"), ("step", ".2f"), ("snapshot", ".4f"), ("share", ".1%")):
        values = sorted(row[name] for row in rows)
        lines.append((name, *(format(x, form) for x in (statistics.median(values), values[0], values[-1]))))
    Report(options, provenance(torch.device("cpu"))).finish(
        {"rows": rows}, table(lines, ["seconds"], ["median", "least", "most"])
    )
