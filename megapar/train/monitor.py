"""Watches a rank beside its training: tells others where it stands, finds out who is missing, answers signals.

A thread, because the main thread may be held in a collective. Ranks of the local launcher share one Board, which the
launcher reads as well. Under torchrun and Slurm each rank posts its log once a second to the job's TCP store, over a
connection of its own; logs of ranks on the same host are read directly, also after these have ended. The store lives in
rank 0 (Slurm) or in torchrun's agent: if that does not answer, it is what is missing.

NCCL's watchdog aborts a process (SIGABRT) when a collective outlasts its time, and no Python code runs then. The local
launcher tells who was missing, as the logs outlive their processes. Under torchrun and Slurm the ranks that live tell
it; so does, a little before the watchdog acts, each rank's monitor (`warn_after`).
"""

import json
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from megapar.errors import interrupted_at, tell
from megapar.flight import Board, Flight, FlightFile, read
from megapar.rendezvous import Member, Store
from megapar.train.diagnosis import SILENT_SECONDS, Log, as_table, diagnose, process_state, rows
from megapar.train.signals import Signals

RECORDS = 64  # operations of each axis that are compared
_POSTED = 16  # those that travel to other hosts each second
_ANSWER_SECONDS = 1.5  # that a failed operation waits for the store
_SILENCE_SECONDS = SILENT_SECONDS + 1.0  # after which a process that has ended counts as silent
_LAST_POST_SECONDS = 0.5  # the store may have ended
_SETTLE_SECONDS = 0.3  # until others that failed at the same moment have said so
_HURRY_SECONDS = 2.0  # that the main thread has to end after a signal that ends the process


def local_logs(board: Board, members: Sequence[Member]) -> dict[int, Log]:
    """The logs of the launcher's ranks, with the state of their processes."""
    return {member.rank: _with_state(read(board[member.rank], RECORDS)) for member in members}


def _with_state(log: Log) -> Log:
    """The log of a process of this host, with what that does now."""
    return log | {"state": "failed" if "failed" in log["flags"] else process_state(log["pid"])}


class Monitor:
    """The thread of one rank, from its start on. `board`: the launcher's, if it started this rank."""

    def __init__(self, flight: Flight, rank: int, signals: Signals, board: Board | None = None):
        self.members: list[Member] = []
        self.table: list[dict[str, Any]] = []  # where all ranks stood when an operation failed, as JSON types
        self.warn_after = 0.0  # seconds; see above on NCCL. 0: never
        self._flight = flight
        self._rank = rank
        self._signals = signals
        self._board = board
        self._store: Store | None = None
        self._file: FlightFile | None = None
        self._interval = 1.0
        self._asked = threading.Event()  # the main thread wants to know who is missing
        self._heard = threading.Event()  # the store answers
        self._answered = threading.Event()  # the store's part is done
        self._answer: tuple[str, int] | None = None
        self._exit_at = 0.0
        self._closing = False
        self._closed = threading.Event()
        self._warned = False
        flight.explain = self.explain
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def watch(self, members: Sequence[Member], store: Store | None = None, file: FlightFile | None = None) -> None:
        """From now on tell `members`, all ranks of the job, apart. `store` and `file`: for ranks that torchrun or Slurm
        started."""
        self.members = list(members)
        self._interval = max(1.0, len(members) / 1000)  # so that a large job does not keep its store busy
        self._file = file
        # On one host all logs are read directly.
        self._store = store if any(member.host != socket.gethostname() for member in members) else None
        self._signals.wake()

    def close(self) -> None:
        """Post this rank's last log, with the error that ends it."""
        if self._store is not None:
            self._closing = True
            self._signals.wake()
            self._closed.wait(_LAST_POST_SECONDS)

    def explain(self, reason: str) -> str:
        """What a failed operation says: who did not arrive or, if that cannot be found out, what the backend said."""
        self._flight.raise_flag("failed")
        if self._board is not None or self._file is None:
            return reason  # the local launcher finds out and tells, once for all ranks
        if self._store is not None:
            self._asked.set()
            self._signals.wake()
            patience = _SILENCE_SECONDS + 2 * self._interval
            if not self._heard.wait(_ANSWER_SECONDS) or not self._answered.wait(patience):
                self._store = None
            if self._answer is None and self._store is None:
                host = self.members[0].host
                self._answer = f"the job's store on {host} does not answer: rank 0 or its host is lost ({reason})", 0
        elif self._answer is None:
            time.sleep(_SETTLE_SECONDS)
            self._conclude(self.logs())
        return reason if self._answer is None else self._answer[0]

    def culprit(self) -> dict[str, Any]:
        """Rank, host, process number, step and phase of the rank that `explain` has named; empty if it named none."""
        rank = -1 if self._answer is None else self._answer[1]
        row = next((row for row in self.table if row["rank"] == rank), {})
        return {key: row[key] for key in ("rank", "host", "pid", "step", "phase") if key in row}

    def speaks(self) -> bool:
        """Whether this rank is the first of its host that has something to tell about what `explain` found."""
        return self._file is None or not self._answer or self._file.claim(self._lowest_pid())

    def tells(self, words: str) -> bool:
        """Whether no other rank of this host tells an error with the same `words`. Ranks that raise the same words have
        one cause: all ranks of a tensor group read the same bad token, say."""
        if self._file is None or not self.members:  # the local launcher tells one error for all; or nobody is known yet
            return True
        return self._file.claim(self._lowest_pid(), f"-{blake2b(words.encode(), digest_size=8).hexdigest()}")

    def _lowest_pid(self) -> int:
        """The process number of the job's lowest rank on this host, which names the job here."""
        return next(member.pid for member in self.members if member.host == socket.gethostname())

    def logs(self) -> dict[int, Log]:
        """The logs of all ranks that can be read here, each with the state of its process."""
        if self._board is not None:
            return local_logs(self._board, self.members)
        logs = {self._rank: _with_state(read(self._flight.memory, RECORDS))}
        for member in self.members:
            if member.rank != self._rank and (log := self._log_of(member)) is not None:
                logs[member.rank] = log
        return logs

    def _log_of(self, member: Member) -> Log | None:
        memory = self._file.peer(member.pid) if self._file and member.host == socket.gethostname() else None
        if memory is not None:
            return _with_state(read(memory, RECORDS))
        key = f"log/{member.rank}"
        if self._store is None or not self._store.check([key]):
            return None
        posted: Log = json.loads(self._store.get(key))
        if "failed" in posted["flags"]:
            return posted | {"state": "failed"}
        silent = time.time() - posted["posted"] > SILENT_SECONDS + self._interval
        return posted | {"state": "silent" if silent else "running"}

    def _conclude(self, logs: dict[int, Log]) -> None:
        self.table = rows(logs, self.members)
        self._answer = diagnose(logs, self.members)

    def _run(self) -> None:
        next_post = time.monotonic()
        while True:
            pause = self._interval if self._store is not None or self.warn_after else 60.0
            select.select([self._signals.reader], [], [], 0.1 if self._exit_at else pause)
            self._signals.judge()
            if self._signals.wants_table:
                self._signals.wants_table = False
                tell(as_table(self.logs(), self.members).rstrip())
            self._end_if_asked()
            if self._asked.is_set() and not self._answered.is_set():
                self._find_out()
            elif self._store is not None and (time.monotonic() >= next_post or self._closing):
                self._post()
                next_post = time.monotonic() + self._interval
            if self._closing:
                self._store = None
                self._closed.set()
            self._warn()

    def _end_if_asked(self) -> None:
        """End the process if the main thread, in which the signal's handler has raised, does not come to its end."""
        if not self._signals.ending:
            return
        if not self._exit_at:
            self._exit_at = time.monotonic() + _HURRY_SECONDS
        elif time.monotonic() > self._exit_at:
            if self._board is None and self._rank == 0:
                tell(interrupted_at(self._flight.step, self._flight.last_checkpoint, self._signals.ending))
            os._exit(128 + self._signals.ending)

    def _post(self) -> None:
        assert self._store is not None
        log = read(self._flight.memory, _POSTED) | {"posted": time.time()}
        try:
            self._store.set(f"log/{self._rank}", json.dumps(log))
        except RuntimeError:  # the job is ending; nobody is left to read
            self._store = None

    def _find_out(self) -> None:
        """The first rank that asks compares the logs; the others take over what it has found."""
        store = self._store
        try:
            self._post()
            first = store is not None and store.add("askers", 1) == 1
            self._heard.set()
            if first and store is not None:
                time.sleep(_SETTLE_SECONDS)
                self._conclude(self.logs())
                if self._answer is None:  # a process of another host may have ended without a word: it falls silent
                    time.sleep(_SILENCE_SECONDS + self._interval)
                    self._conclude(self.logs())
                store.set("verdict", json.dumps([self._answer, self.table]))
            elif store is not None:
                end = time.monotonic() + _SILENCE_SECONDS + 2 * self._interval
                while not store.check(["verdict"]) and time.monotonic() < end:
                    time.sleep(0.05)
                if store.check(["verdict"]):
                    self._answer, self.table = json.loads(store.get("verdict"))
        except RuntimeError:  # the store has ended, and with it rank 0 or the agent
            self._store = None
        self._heard.set()
        self._answered.set()

    def _warn(self) -> None:
        """Tell once who is missing when the main thread has not moved for `warn_after` seconds: see above on NCCL."""
        if not self.warn_after or self._warned:
            return
        log = read(self._flight.memory, 1)
        newest = max([log["since"], *(axis["records"][-1]["started"] for axis in log["axes"] if axis["records"])])
        if log["step"] and time.time() - newest > self.warn_after:
            self._warned = True
            found = diagnose(self.logs(), self.members)
            if found is not None:
                tell(f"rank {self._rank} is held up: {found[0]}")
