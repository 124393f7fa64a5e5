"""Calls the user's command with an event as JSON on its standard input (log.alert_command).

No shell is involved. The command has a session and a process group of its own, and a time limit. What it prints goes
nowhere. docs/watching.md lists the events.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any

from megapar.base.errors import NumericError, Rewind, reason_of
from megapar.system.atomic_files import as_json

_LIMIT_SECONDS = 60.0  # for one call
CLOSING_SECONDS = 5.0  # how long the end of a run, and a restart, wait for the command
_PAUSE_SECONDS = 0.2
_QUEUED = 16


def call(command: str, event: Mapping[str, Any], end: Callable[[], float]) -> str:
    """Call the command, and wait for its end. Returns what went wrong, in words, or "". Raises nothing.

    `end` returns the moment on time.monotonic's clock at which the command is killed. It may come closer.
    """
    try:
        return _call(command, event, end)
    except Exception as error:  # an alert of any kind neither ends a run nor changes its exit code
        return f"failed ({type(error).__name__}: {reason_of(error)})"


def _call(command: str, event: Mapping[str, Any], end: Callable[[], float]) -> str:
    text = as_json({"time": time.time(), **event})
    quiet = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
    except (OSError, ValueError) as error:
        return f"not started ({reason_of(error)})"
    unsent: bytes | None = f"{text}\n".encode()
    while True:
        try:
            process.communicate(unsent, timeout=_PAUSE_SECONDS)
            break
        except subprocess.TimeoutExpired:
            unsent = None  # communicate goes on with it
        if time.monotonic() > end():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "killed, it took too long"
    return f"exit code {process.returncode}" if process.returncode else ""


def failure(error_class: str) -> str:
    """The event of a failure with this class of error."""
    return {NumericError.__name__: "not_finite", Rewind.__name__: "spike"}.get(error_class, "fault")


def call_now(command: str, event: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    """Call the command, if there is one, and wait for a few seconds at most. `warn` gets a line if it failed."""
    if command != "none":
        end = time.monotonic() + CLOSING_SECONDS
        _warn_of(call(command, event, lambda: end), event, warn)


def _warn_of(problem: str, event: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    if problem:
        warn(f"log.alert_command: {problem}, for the event {event['event']}; the run goes on")


class Alerts:
    """Calls a command for events, one at a time, in a thread. With the command "none" nothing is called.

    `warn` gets a line for a call that failed.
    """

    def __init__(self, command: str, warn: Callable[[str], None]):
        self._command = command
        self._warn = warn
        self._queue: Queue[Mapping[str, Any] | None] = Queue(_QUEUED)
        self._end = 0.0  # when calls must have ended, on time.monotonic's clock; 0: the run goes on
        self._thread: Thread | None = None
        if command != "none":
            self._thread = Thread(target=self._run, name="alerts", daemon=True)
            self._thread.start()

    def send(self, event: Mapping[str, Any]) -> None:
        """Queue an event, and return at once."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(event)
        except Full:
            self._warn(f"log.alert_command: {event['event']} not sent, {_QUEUED} events wait for the command")

    def close(self) -> None:
        """Send what is queued, for a few seconds at most."""
        if self._thread is None:
            return
        self._end = time.monotonic() + CLOSING_SECONDS
        with suppress(Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSING_SECONDS + 2 * _PAUSE_SECONDS)

    def _run(self) -> None:
        while True:
            try:
                event = self._queue.get(timeout=1.0)
            except Empty:
                if self._end:
                    return
                continue
            if event is None:
                return
            limit = time.monotonic() + _LIMIT_SECONDS
            problem = call(self._command, event, lambda limit=limit: min(limit, self._end or limit))  # type: ignore[misc]
            _warn_of(problem, event, self._warn)
