"""Tells a hung process from a slow one: a hung process uses no CPU time, on however slow a machine."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

CAP_SECONDS = 600.0  # for a process that works without an end
BUSY = 0.02  # of one core: who waits for a peer and looks up ten times a second uses less


def cpu_ticks(pid: int) -> int:
    """CPU time of a process and of its ended children, in clock ticks of 10 ms; 0 once it is gone."""
    try:
        fields = _stat(pid)
    except OSError:  # it ended between two looks
        return 0
    return sum(int(ticks) for ticks in fields[11:15])


def processes_of_session(session: int) -> list[int]:
    """All processes of a session, such as a program and its ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = _stat(int(folder.name))
        except OSError:  # it ended between two looks
            continue
        if int(fields[3]) == session:
            found.append(int(folder.name))
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the program's name. The name may contain blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Watch:
    """Watches processes, together: `hung` once they have used almost no CPU time for `idle_seconds`.

    Without a /proc to tell their CPU time, `idle_seconds` count from the beginning. Elsewhere no time is too long
    before `cap_seconds`.
    """

    def __init__(self, idle_seconds: float, pids: Callable[[], Iterable[int]], cap_seconds: float = CAP_SECONDS):
        self._idle_seconds = idle_seconds
        self._cap_seconds = cap_seconds
        self._pids = pids
        self._began = time.monotonic()
        self._marked = self._began
        self._ticks = 0

    def hung(self) -> bool:
        """True if nothing more is to be expected. Call it about once a second."""
        now = time.monotonic()
        ticks = sum(cpu_ticks(pid) for pid in self._pids())
        # A process that has ended takes its time along: the sum may fall, and that is progress too.
        if abs(ticks - self._ticks) > 100 * BUSY * self._idle_seconds:
            self._marked = now
            self._ticks = ticks
        return now - self._marked > self._idle_seconds or now - self._began > self._cap_seconds
