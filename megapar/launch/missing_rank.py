"""The search for the rank that a failed operation waited for: one rank compares the logs of all, for all."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from megapar.comm.rendezvous import Store
from megapar.launch.diagnosis import Log, diagnose, rows
from megapar.launch.job_logs import SILENCE_SECONDS, JobLogs

_DIAGNOSIS = "diagnosis"  # the key of what the first asker has found
_ANSWER_SECONDS = 1.5  # how long a failed operation waits for the store's first answer
_SETTLE_SECONDS = 0.3  # ranks that fail at the same moment have raised their flags after this time


class MissingRankSearch:
    """What is known of the missing rank. The main thread asks; the monitor's thread talks to the job's store.

    `table` says where all ranks stood when an operation failed, as JSON types. `answer` is a sentence, and the rank
    that is the cause; None while nobody knows.
    """

    def __init__(self, logs: JobLogs, wake: Callable[[], None]):
        """`wake` makes the monitor's thread look at `is_asked`."""
        self.table: list[dict[str, Any]] = []
        self.answer: tuple[str, int] | None = None
        self._logs = logs
        self._wake = wake
        self._asked = threading.Event()  # the main thread wants to know who is missing
        self._heard = threading.Event()  # the store has answered
        self._answered = threading.Event()  # the comparison through the store is done

    def ask(self, reason: str) -> None:
        """Wait until some rank's monitor has compared the logs. `reason` is the backend's, for the answer.

        Called by the main thread.
        """
        logs = self._logs
        if logs.store is not None:
            self._asked.set()
            self._wake()
            patience = SILENCE_SECONDS + 4 * logs.interval
            if not self._heard.wait(_ANSWER_SECONDS) or not self._answered.wait(patience):
                logs.lose_store()
        elif not logs.lost_store:  # all ranks are on this host
            time.sleep(_SETTLE_SECONDS)
            self._conclude(logs.read())
        if self.answer is None and logs.lost_store:
            host = logs.members[0].host
            self.answer = f"the job's store on {host} does not answer: rank 0 or its host is lost ({reason})", 0

    @property
    def is_asked(self) -> bool:
        """Whether the main thread waits for `find_out`."""
        return self._asked.is_set() and not self._answered.is_set()

    def find_out(self) -> None:
        """Find the missing rank. The first rank to ask compares the logs; the others wait for its result.

        Called by the monitor's thread.
        """
        store = self._logs.store
        try:
            self.exchange()
            first = store is not None and store.add("askers", 1) == 1
            self._heard.set()
            if first and store is not None:
                time.sleep(_SETTLE_SECONDS)
                self._conclude(self._logs.read_fresh())
                store.set(_DIAGNOSIS, json.dumps([self.answer, self.table]))
            elif store is not None:
                end = time.monotonic() + SILENCE_SECONDS + 3 * self._logs.interval
                while not self._take_diagnosis(store) and time.monotonic() < end:
                    time.sleep(0.05)
        except RuntimeError:
            self._logs.lose_store()
        self._heard.set()
        self._answered.set()

    def exchange(self) -> None:
        """Post this rank's log to the store. Take the diagnosis if another rank has left one.

        Called by the monitor's thread.
        """
        store = self._logs.store
        if store is None:  # the main thread has lost it meanwhile
            return
        try:
            self._logs.post(store)
            self._take_diagnosis(store)
        except RuntimeError:  # the job is ending: nobody reads the log
            self._logs.lose_store()

    def culprit(self) -> dict[str, Any]:
        """Return rank, host, process number, step and phase of the missing rank; empty if nobody knows the rank."""
        rank = -1 if self.answer is None else self.answer[1]
        row = next((row for row in self.table if row["rank"] == rank), {})
        return {key: row[key] for key in ("rank", "host", "pid", "step", "phase") if key in row}

    def _conclude(self, logs: dict[int, Log]) -> None:
        """Keep the table of all ranks, and the diagnosis if there is one."""
        self.table = rows(logs, self._logs.members)
        self.answer = diagnose(logs, self._logs.members)

    def _take_diagnosis(self, store: Store) -> bool:
        """Keep the diagnosis in the store, left there by some rank. Returns whether there is one."""
        if not store.check([_DIAGNOSIS]):
            return False
        self.answer, self.table = json.loads(store.get(_DIAGNOSIS))
        return True
