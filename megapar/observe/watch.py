"""Watches a run on rank 0: its progress and its disk. What it sees becomes a line, an event and an alert."""

import shutil
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any

from megapar.base.errors import MegaparError
from megapar.comm.flight import Flight
from megapar.observe.observer import Observer
from megapar.observe.stragglers import Straggler
from megapar.step.state import StepResult
from megapar.system import events
from megapar.system.alert_command import Alerts, failure

_LOOK_SECONDS = 5.0
_LEAST_STALL_SECONDS = 60.0
_STALL_STEPS = 10  # times the longest of the newest steps
_LONG_PHASES = ("save", "evaluate", "start")  # for which a multiple of a step says nothing
_LONG_STALL_SECONDS = 600.0
_LOW_SHARE = 0.02  # of a disk; of a large one, as many bytes
_LOW_BYTES = 100 * 2**30


class Watch(Observer):
    """A context manager around the steps. On other ranks than 0, with `speaks` False, every method does nothing.

    `ends` says whether this process tells the end of the run: a launcher above it knows more.
    """

    def __init__(
        self,
        run_dir: Path,
        command: str,
        flight: Flight,
        say: Callable[[str], None],
        *,
        speaks: bool,
        ends: bool = True,
    ):
        self._run_dir = run_dir
        self._flight = flight
        self._say = say
        self._speaks = speaks
        self._ends = ends
        self._newest: deque[float] = deque(maxlen=_STALL_STEPS)  # seconds of the newest steps
        self._longest = 0.0  # of them
        self._since = 0.0  # when the newest step was reported, on time.monotonic's clock; 0 before the second one
        self._stalled = False
        self._low = False
        self._over = Event()
        self._step = 0
        if speaks:
            self._alerts = Alerts(command, say)
            self._thread = Thread(target=self._look_again, name="watch", daemon=True)
            self._thread.start()

    def after_line(self, result: StepResult, line: dict[str, Any]) -> None:
        if not self._speaks:
            return
        now = time.monotonic()
        if self._step:  # the first one allocates and compiles
            self._newest.append(line["step_seconds"])
            self._longest = max(self._newest)
            self._since = now
        self._step = line["step"]
        self._stalled = False

    def straggler(self, found: Straggler) -> None:
        """Take a slow rank."""
        fields = {"step": found.step, "rank": found.rank, "host": found.host, "ratio": found.ratio}
        self.event("straggler", str(found), **fields)

    def tier(self, name: str, text: str, step: int, *, works: bool) -> None:
        """Take that a faster tier of checkpoints has failed, or works again, in words; "" for no news."""
        if self._speaks and text:
            self.event("tier_back" if works else "tier_lost", text, tier=name, step=step, reason=text)

    def save_failed(self, text: str, step: int) -> None:
        """Take that a checkpoint of the run folder could not be written, and that the run goes on, in words."""
        if self._speaks:
            self.event("save_failed", text, step=step, reason=text)

    def event(self, name: str, text: str, **fields: Any) -> None:
        """Print a line, append the event to events.jsonl, and alert."""
        self._say(f"{name}: {text}")
        events.append(self._run_dir, name, **fields)
        self.alert(name, text, **fields)

    def alert(self, name: str, text: str, **fields: Any) -> None:
        """Call log.alert_command for an event told elsewhere."""
        if not self._speaks:
            return
        where = {"run_dir": str(self._run_dir.resolve()), "from": socket.gethostname()}
        self._alerts.send({"event": name, "message": text, **where, **fields})

    def ended(self, code: int, step: int, reason: str) -> None:
        """Alert that the steps are over."""
        if self._speaks and self._ends:
            self.alert("end", reason or "all steps are done", code=code, step=step)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._speaks:
            return
        self._over.set()
        if isinstance(error, KeyboardInterrupt):
            self.ended(128 + signal.SIGINT, self._flight.step, "interrupted")
        elif error is not None and self._ends:
            code = error.exit_code if isinstance(error, MegaparError) else MegaparError.exit_code
            self.alert(failure(type(error).__name__), str(error), code=code, step=self._flight.step)
        self._alerts.close()

    def _look_again(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        """Look for a run that stands still, and for a disk that is nearly full."""
        since = self._since
        if since and not self._stalled:
            phase = self._flight.phase
            least = _LONG_STALL_SECONDS if phase in _LONG_PHASES else _LEAST_STALL_SECONDS
            seconds = time.monotonic() - since
            if seconds > max(least, _STALL_STEPS * self._longest):
                self._stalled = True
                text = f"no step for {seconds:.0f} s, after step {self._step}; rank 0 is in {phase}"
                self.event("stall", text, step=self._step, seconds=round(seconds), phase=phase)
        try:
            disk = shutil.disk_usage(self._run_dir)
        except OSError:  # a file system that does not answer is no full disk
            return
        low = disk.free < min(_LOW_SHARE * disk.total, _LOW_BYTES)
        if low and not self._low:
            text = f"{disk.free / 2**30:.1f} GiB of {disk.total / 2**30:.1f} are free at {self._run_dir}"
            self.event("disk", text, free_bytes=disk.free, total_bytes=disk.total)
        self._low = low
