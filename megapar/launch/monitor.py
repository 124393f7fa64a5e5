"""Watches a rank beside its training: publishes its flight log, finds the missing rank, answers signals.

It is a thread, because a collective may hold the main thread. Ranks of the local launcher share one Board with the
launcher. Under torchrun and Slurm each rank posts its log once a second to the job's TCP store, over a
connection of its own. Logs of ranks on the same host are read directly, also after these ranks have ended. The store
runs in rank 0 (Slurm) or in torchrun's agent. If the store does not answer, its process is the missing one.

NCCL's watchdog aborts a process (SIGABRT) when a collective takes longer than its timeout. No Python code runs then.
The flight logs outlive their processes, so the local launcher can report the missing rank. Under torchrun and
Slurm the living ranks report it. Each rank's monitor also warns shortly before the watchdog acts
(`warn_after`).
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

from megapar.comm.flight import Board, Flight, Memory, read
from megapar.comm.flight_file import FlightFile
from megapar.comm.rendezvous import RankInfo, Store
from megapar.launch.diagnosis import SILENT_SECONDS, Log, as_table, diagnose, process_state, rows
from megapar.launch.reporting import interrupted_at
from megapar.launch.signals import Signals
from megapar.system.say import tell

RECORDS = 64  # the number of newest operations of each axis that are compared
_DIAGNOSIS = "diagnosis"  # the key of what the first asker has found
_POSTED = 16  # the number of those that are posted for other hosts each second
_ANSWER_SECONDS = 1.5  # how long a failed operation waits for the store's first answer
_SILENCE_SECONDS = SILENT_SECONDS + 1.0  # after this time a process of another host that has ended is known as silent
_LAST_POST_SECONDS = 0.5  # how long the last post may take: the store may have ended
_SETTLE_SECONDS = 0.3  # ranks that fail at the same moment have raised their flags after this time
_HURRY_SECONDS = 2.0  # how long the main thread has to end after a signal that ends the process


def local_logs(board: Board, members: Sequence[RankInfo]) -> dict[int, Log]:
    """The logs of the local launcher's ranks, with the state of their processes."""
    return {member.rank: _log_here(board[member.rank]) for member in members}


def _log_here(memory: Memory) -> Log:
    """The log of a process of this host, with the field `state`."""
    # The state first: the log of a process that had ended by then says whether it had failed.
    state = process_state(read(memory, 0)["pid"])
    log = read(memory, RECORDS)
    return log | {"state": "failed" if "failed" in log["flags"] else state}


def _will_post_again(log: Log) -> bool:
    """Whether a log comes from another host and may be followed by another."""
    return "posted" in log and log["state"] != "failed" and log["error"] is None


class Monitor:
    """The monitor thread of one rank. It starts at once. `board` is the local launcher's, if there is one."""

    def __init__(self, flight: Flight, rank: int, signals: Signals, board: Board | None = None):
        self.members: list[RankInfo] = []
        self.table: list[dict[str, Any]] = []  # where all ranks stood when an operation failed, as JSON types
        self.warn_after = 0.0  # seconds without progress before a warning (see above on NCCL); 0: never
        self._flight = flight
        self._rank = rank
        self._signals = signals
        self._board = board
        self._store: Store | None = None  # None if all ranks are on this host
        self._lost_store = False
        self._file: FlightFile | None = None
        self._interval = 1.0  # seconds between two posts
        self._asked = threading.Event()  # the main thread wants to know who is missing
        self._heard = threading.Event()  # the store has answered
        self._answered = threading.Event()  # the comparison through the store is done
        self._answer: tuple[str, int] | None = None  # a sentence, and the rank that is the cause
        self._exit_at = 0.0  # when this thread ends the process, on time.monotonic's clock; 0 for never
        self._closing = False
        self._closed = threading.Event()
        self._warned = False
        flight.explain = self.explain
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def watch(self, members: Sequence[RankInfo], store: Store | None = None, file: FlightFile | None = None) -> None:
        """Begin to watch `members`, all ranks of the job. `store` and `file` are given under torchrun and Slurm."""
        self.members = list(members)
        self._interval = max(1.0, len(members) / 1000)  # at most 1000 posts a second: the store is one process
        self._file = file
        # If all ranks are on this host, their logs are read directly, and no store is needed.
        self._store = store if any(member.host != socket.gethostname() for member in members) else None
        self._signals.wake()

    def close(self) -> None:
        """Post this rank's last log, with the error of its end."""
        if self._store is None:
            return
        if self._rank == 0 and self._answer is not None:
            # The store may be in this process. The other ranks look for the answer when they post their logs.
            time.sleep(2 * self._interval)
        self._closing = True
        self._signals.wake()
        self._closed.wait(_LAST_POST_SECONDS)

    def explain(self, reason: str) -> str:
        """The message of a failed operation: the missing rank, or the backend's `reason` if nobody knows."""
        self._flight.raise_flag("failed")
        if self._board is not None or self._file is None:
            return reason  # the local launcher finds the cause and reports it, once for all ranks
        if self._answer is None:
            self._ask(reason)
        if self._answer is None:
            return reason
        return self._answer[0]

    def _ask(self, reason: str) -> None:
        """Wait until some rank's monitor has compared the logs."""
        if self._store is not None:
            self._asked.set()
            self._signals.wake()
            patience = _SILENCE_SECONDS + 4 * self._interval
            if not self._heard.wait(_ANSWER_SECONDS) or not self._answered.wait(patience):
                self._lose_store()
        elif not self._lost_store:  # all ranks are on this host
            time.sleep(_SETTLE_SECONDS)
            self._conclude(self.logs())
        if self._answer is None and self._lost_store:
            host = self.members[0].host
            self._answer = f"the job's store on {host} does not answer: rank 0 or its host is lost ({reason})", 0

    def _lose_store(self) -> None:
        """Note that the store has ended, and with it rank 0 or torchrun's agent."""
        self._store = None
        self._lost_store = True

    def culprit(self) -> dict[str, Any]:
        """Rank, host, process number, step and phase of the rank named by `explain`; empty if it named none."""
        rank = -1 if self._answer is None else self._answer[1]
        row = next((row for row in self.table if row["rank"] == rank), {})
        return {key: row[key] for key in ("rank", "host", "pid", "step", "phase") if key in row}

    def speaks(self) -> bool:
        """Whether this rank is to print what `explain` found: it asks first on its host."""
        return self._file is None or not self._answer or self._file.claim(self._lowest_pid())

    def tells(self, words: str) -> bool:
        """Whether this rank is to print an error with these `words`: no other rank of this host prints the same.

        Errors with the same words have one cause. For example, all ranks of a tensor group read the same bad token.
        """
        # The local launcher prints one error for all ranks. Before the ranks have met, each one speaks for itself.
        if self._file is None or not self.members:
            return True
        return self._file.claim(self._lowest_pid(), f"-{blake2b(words.encode(), digest_size=8).hexdigest()}")

    def _lowest_pid(self) -> int:
        """The process number of the job's lowest rank on this host. It identifies the job on this host."""
        return next(member.pid for member in self.members if member.host == socket.gethostname())

    def logs(self) -> dict[int, Log]:
        """All logs within reach, each with the state of its process."""
        if self._board is not None:
            return local_logs(self._board, self.members)
        logs = {self._rank: _log_here(self._flight.memory)}
        for member in self.members:
            if member.rank == self._rank:
                continue
            log = self._log_of(member)
            if log is not None:
                logs[member.rank] = log
        return logs

    def _log_of(self, member: RankInfo) -> Log | None:
        """The log of another rank: from its file on this host, else from the store; None if neither has it."""
        memory = None
        if self._file and member.host == socket.gethostname():
            memory = self._file.peer(member.pid)
        if memory is not None:
            return _log_here(memory)
        key = f"log/{member.rank}"
        if self._store is None or not self._store.check([key]):
            return None
        posted: Log = json.loads(self._store.get(key))
        if "failed" in posted["flags"]:
            return posted | {"state": "failed"}
        silent = time.time() - posted["posted"] > SILENT_SECONDS + self._interval
        return posted | {"state": "silent" if silent else "running"}

    def _fresh_logs(self) -> dict[int, Log]:
        """Do as `logs`, but wait until the ranks of other hosts have posted again. A rank without a new post is silent.

        An old post may be from before the failure, and others would seem to wait for its rank.
        """
        logs = self.logs()
        if any("posted" not in log and log["state"] in ("stopped", "ended") for log in logs.values()):
            return logs  # the cause is on this host
        older = {rank: log["posted"] for rank, log in logs.items() if _will_post_again(log)}
        end = time.monotonic() + _SILENCE_SECONDS + self._interval
        while older and time.monotonic() < end:
            time.sleep(self._interval / 4)
            for rank, posted in list(older.items()):
                log = self._log_of(self.members[rank])
                if log is not None and log["posted"] != posted:
                    logs[rank] = log
                    del older[rank]
        # Clocks of hosts differ, so what tells is whether a rank has posted, and not when.
        for rank, log in logs.items():
            if _will_post_again(log):
                log["state"] = "silent" if rank in older else "running"
        return logs

    def _conclude(self, logs: dict[int, Log]) -> None:
        """Keep the table of all ranks, and the diagnosis if there is one."""
        self.table = rows(logs, self.members)
        self._answer = diagnose(logs, self.members)

    def _run(self) -> None:
        next_post = time.monotonic()
        while True:
            # Signals and `wake` end the pause early. Without posts and warnings there is nothing else to do.
            pause = 60.0
            if self._exit_at:
                pause = 0.1
            elif self._store is not None or self.warn_after:
                pause = self._interval
            select.select([self._signals.reader], [], [], pause)
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

    def _post(self) -> None:
        """Write this rank's log to the store. Read the diagnosis if another rank has left one."""
        assert self._store is not None
        log = read(self._flight.memory, _POSTED) | {"posted": time.time()}
        try:
            self._store.set(f"log/{self._rank}", json.dumps(log))
            self._read_diagnosis(self._store)
        except RuntimeError:  # the job is ending: nobody reads the log
            self._lose_store()

    def _find_out(self) -> None:
        """Find the missing rank. The first rank to ask compares the logs; the others wait for its result."""
        store = self._store
        try:
            self._post()
            first = store is not None and store.add("askers", 1) == 1
            self._heard.set()
            if first and store is not None:
                time.sleep(_SETTLE_SECONDS)
                self._conclude(self._fresh_logs())
                store.set(_DIAGNOSIS, json.dumps([self._answer, self.table]))
            elif store is not None:
                end = time.monotonic() + _SILENCE_SECONDS + 3 * self._interval
                while not self._read_diagnosis(store) and time.monotonic() < end:
                    time.sleep(0.05)
        except RuntimeError:
            self._lose_store()
        self._heard.set()
        self._answered.set()

    def _read_diagnosis(self, store: Store) -> bool:
        """Keep the diagnosis in the store, left there by some rank. Returns whether there is one."""
        if not store.check([_DIAGNOSIS]):
            return False
        self._answer, self.table = json.loads(store.get(_DIAGNOSIS))
        return True

    def _warn(self) -> None:
        """Print the missing rank, once, if the main thread has made no progress for `warn_after` seconds."""
        if not self.warn_after or self._warned:
            return
        log = read(self._flight.memory, 1)
        newest = max([log["since"], *(axis["records"][-1]["started"] for axis in log["axes"] if axis["records"])])
        if log["step"] and time.time() - newest > self.warn_after:
            self._warned = True
            diagnosis = diagnose(self.logs(), self.members)
            if diagnosis is not None:
                tell(f"rank {self._rank} is held up: {diagnosis[0]}")
