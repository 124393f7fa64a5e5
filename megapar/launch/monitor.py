"""Watches a rank beside its training: publishes its flight log, finds the missing rank, answers signals.

It is a thread, because a collective may hold the main thread. `job_logs` has the logs of the other ranks, and the
thread uses a connection of its own to the job's store. `missing_rank` compares the logs.

NCCL's watchdog aborts a process (SIGABRT) when a collective takes longer than its timeout. No Python code runs then.
The flight logs outlive their processes, so the local launcher can report the missing rank. Under torchrun and
Slurm the living ranks report it. Each rank's monitor also warns shortly before the watchdog acts
(`warn_after`).
"""

import os
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

from megapar.comm.flight import Board, Flight, read
from megapar.comm.flight_file import FlightFile
from megapar.comm.rendezvous import RankInfo, Store
from megapar.launch.diagnosis import as_table, diagnose
from megapar.launch.job_logs import JobLogs
from megapar.launch.missing_rank import MissingRankSearch
from megapar.launch.reporting import interrupted_at
from megapar.launch.signals import Signals
from megapar.system.say import tell

_LAST_POST_SECONDS = 0.5  # how long the last post may take: the store may have ended
_HURRY_SECONDS = 2.0  # how long the main thread has to end after a signal that ends the process


class Monitor:
    """The monitor thread of one rank. It starts at once. `board` is the local launcher's, if there is one."""

    def __init__(self, flight: Flight, rank: int, signals: Signals, board: Board | None = None):
        self.warn_after = 0.0  # seconds without progress before a warning (see above on NCCL); 0: never
        self._flight = flight
        self._rank = rank
        self._signals = signals
        self._board = board
        self._logs = JobLogs(flight, rank, board)
        self._search = MissingRankSearch(self._logs, signals.wake)
        self._exit_at = 0.0  # when this thread ends the process, on time.monotonic's clock; 0 for never
        self._closing = False
        self._closed = threading.Event()
        self._warned = False
        flight.explain = self.explain
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def watch(self, members: Sequence[RankInfo], store: Store | None = None, file: FlightFile | None = None) -> None:
        """Begin to watch `members`, all ranks of the job. `store` and `file` are given under torchrun and Slurm."""
        self._logs.watch(members, store, file)
        self._signals.wake()

    def close(self) -> None:
        """Post this rank's last log, with the error of its end."""
        if self._logs.store is None:
            return
        if self._rank == 0 and self._search.answer is not None:
            # The store may be in this process. The other ranks look for the answer when they post their logs.
            time.sleep(2 * self._logs.interval)
        self._closing = True
        self._signals.wake()
        self._closed.wait(_LAST_POST_SECONDS)

    def explain(self, reason: str) -> str:
        """Return the message of a failed operation: the missing rank, or the backend's `reason` if nobody knows."""
        self._flight.raise_flag("failed")
        if self._board is not None or self._logs.file is None:
            return reason  # the local launcher finds the cause and reports it, once for all ranks
        if self._search.answer is None:
            self._search.ask(reason)
        if self._search.answer is None:
            return reason
        return self._search.answer[0]

    @property
    def table(self) -> list[dict[str, Any]]:
        """Where all ranks stood when an operation failed, as JSON types."""
        return self._search.table

    def culprit(self) -> dict[str, Any]:
        """Return `MissingRankSearch.culprit`, the rank named by `explain`."""
        return self._search.culprit()

    def speaks(self) -> bool:
        """Whether this rank is to print what `explain` found: it asks first on its host."""
        return self._logs.file is None or not self._search.answer or self._logs.claims_to_tell()

    def tells(self, words: str) -> bool:
        """Whether this rank is to print an error with these `words`: no other rank of this host prints the same.

        Errors with the same words have one cause. For example, all ranks of a tensor group read the same bad token.
        """
        # The local launcher prints one error for all ranks. Before the ranks have met, each one speaks for itself.
        if self._logs.file is None or not self._logs.members:
            return True
        return self._logs.claims_to_tell(words)

    def _run(self) -> None:
        next_post = time.monotonic()
        logs = self._logs
        while True:
            # Signals and `wake` end the pause early. Without posts and warnings there is nothing else to do.
            pause = 60.0
            if self._exit_at:
                pause = 0.1
            elif logs.store is not None or self.warn_after:
                pause = logs.interval
            select.select([self._signals.reader], [], [], pause)
            self._signals.judge()
            if self._signals.wants_table:
                self._signals.wants_table = False
                tell(as_table(logs.read(), logs.members).rstrip())
            self._end_if_asked()
            if self._search.is_asked:
                self._search.find_out()
            elif logs.store is not None and (time.monotonic() >= next_post or self._closing):
                self._search.exchange()
                next_post = time.monotonic() + logs.interval
            if self._closing:
                logs.store = None
                self._closed.set()
            self._warn()

    def _end_if_asked(self) -> None:
        """End the process if a signal asked for its end and the main thread does not end it in time.

        The signal's handler raises in the main thread, but only after its return to Python.
        """
        if not self._signals.ending:
            return
        if not self._exit_at:
            self._exit_at = time.monotonic() + _HURRY_SECONDS
        elif time.monotonic() > self._exit_at:
            if self._board is None and self._rank == 0:
                tell(interrupted_at(self._flight.step, self._flight.last_checkpoint, self._signals.ending))
            os._exit(128 + self._signals.ending)

    def _warn(self) -> None:
        """Print the missing rank, once, if the main thread has made no progress for `warn_after` seconds."""
        if not self.warn_after or self._warned:
            return
        log = read(self._flight.memory, 1)
        newest = max([log["since"], *(axis["records"][-1]["started"] for axis in log["axes"] if axis["records"])])
        if log["step"] and time.time() - newest > self.warn_after:
            self._warned = True
            diagnosis = diagnose(self._logs.read(), self._logs.members)
            if diagnosis is not None:
                tell(f"rank {self._rank} is held up: {diagnosis[0]}")
