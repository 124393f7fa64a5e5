"""Sends the numbers of a run to Weights & Biases (log.wandb)."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from megapar.observe.sinks.base import CLOSING_SECONDS, Line, RunInfo, scalars
from megapar.observe.sinks.curve import replayed

_MARGIN_SECONDS = 1.0  # W&B's own patience at the end is shorter than the run's


class WeightsAndBiases:
    """A sink. WANDB_MODE, WANDB_ENTITY and the others of W&B's variables are W&B's to read."""

    name = "W&B"

    def __init__(self, run: RunInfo, project: str):
        self._info = run
        self._project = project
        self._run: Any = None

    def open(self) -> str:
        """Begin the run, or go on with it. Returns its address, or the folder of an offline run."""
        wandb = importlib.import_module("wandb")
        info = self._info
        self._run = wandb.init(
            project=self._project,
            id=info.curve,
            name=info.run_dir.resolve().name,
            dir=str(info.run_dir),
            config=dict(info.options),
            allow_val_change=True,
            resume="allow",
            # The console belongs to the run: W&B would replace sys.stdout.
            settings=wandb.Settings(
                console="off",
                silent=True,
                finish_timeout=CLOSING_SECONDS - _MARGIN_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        if info.replays:
            self.write(list(replayed(info.run_dir, info.first_step)))
        if self._run.offline:  # which warns when asked for its address
            return f"offline, in {info.run_dir / 'wandb'}; `wandb sync` sends it"
        return str(self._run.url)

    def write(self, lines: Sequence[Line]) -> None:
        """Hand lines to W&B's process. Those of one step make one row there."""
        for line in lines:
            self._run.log(dict(scalars(line)), step=line["step"])

    def close(self) -> None:
        """Wait for W&B's process. What it could not send is in run_dir/wandb."""
        self._run.finish()

    def abandon(self) -> None:
        """End W&B's process, which its atexit hook would wait for. Its file has the lines that it was handed."""
        for children in Path("/proc/self/task").glob("*/children"):
            for child in children.read_text().split():
                with suppress(OSError):  # it has ended meanwhile
                    if Path(f"/proc/{child}/comm").read_text().startswith("wandb"):
                        os.kill(int(child), signal.SIGKILL)
        ending = Thread(target=_end_library, daemon=True)
        ending.start()
        ending.join(_MARGIN_SECONDS)


def _end_library() -> None:
    """End W&B in this process too: its atexit hook would print that its process is gone, with a traceback."""
    # A module whose import goes on in the sink's thread has no teardown yet.
    teardown = getattr(sys.modules.get("wandb"), "teardown", None)
    if teardown is not None:
        # The errors of a process that was killed: a lost connection, and its exit code as SystemExit.
        with suppress(Exception, SystemExit):
            teardown()
