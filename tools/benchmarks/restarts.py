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
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import Case, Found, Output, table
from benchmarks.programs import PRETRAIN, TINY
from benchmarks.ranks import BenchmarkError
from megapar.system import events

_SNAPSHOTS = ("--launch.max_restarts", "1", "--checkpoint.memory_every", "1")


@dataclass(frozen=True)
class Options(Output):
    """Measure restarts on this machine."""

    rounds: int = 5
    """Runs, each with a killed rank."""
    steps: int = 60
    """Steps of a run."""


def _run(options: Options, flags: tuple[str, ...], kill_at: int) -> dict[str, float]:
    """Run the program, kill a rank after a step unless `kill_at` is 0, and return the times of events."""
    shape = ("--launch.nproc", "2", "--launch.device", "cpu", "--train.steps", str(options.steps), "--run_dir", "run")
    command = [sys.executable, str(PRETRAIN), "--config", str(TINY), *shape, "--log.no-tensorboard", *flags]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert running.stdout is not None
        assert running.stderr is not None
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


def measure(options: Options) -> Found:
    """Make the runs of all rounds. A row has the four figures of a round."""
    runs = {
        "lost": partial(_run, options, _SNAPSHOTS, options.steps // 2),
        "snapshots": partial(_run, options, _SNAPSHOTS, 0),
        "alone": partial(_run, options, (), 0),
    }
    turns = Case(runs, options.rounds, warmup=0, bar=True).measure()
    rows: list[dict[str, float]] = []
    for lost, snapshots, alone in zip(*(found.notes for found in turns.values()), strict=True):
        added = snapshots["seconds_of_a_step"] - alone["seconds_of_a_step"]
        times = {"report": lost["report"], "step": lost["step"]}
        rows.append({**times, "snapshot": added, "share": added / alone["seconds_of_a_step"]})
    return Found({"rows": rows}, [table([{name: [row[name] for row in rows] for name in rows[0]}])])
