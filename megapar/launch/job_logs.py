"""The flight logs of all ranks of a job, as one rank reaches them.

Ranks of the local launcher share one Board with the launcher. Under torchrun and Slurm each rank posts its log once a
second to the job's TCP store. Logs of ranks on the same host are read directly, also after these ranks have ended. The
store runs in rank 0 (Slurm) or in torchrun's agent. If the store does not answer, its process is the missing one.
"""

import json
import socket
import time
from collections.abc import Sequence
from hashlib import blake2b

from megapar.comm.flight import Board, Flight, Memory, read
from megapar.comm.flight_file import FlightFile
from megapar.comm.rendezvous import RankInfo, Store
from megapar.launch.diagnosis import SILENT_SECONDS, Log, process_state

SILENCE_SECONDS = SILENT_SECONDS + 1.0
"""After this time a process of another host that has ended is known as silent."""
_RECORDS = 64  # the number of newest operations of each axis that are compared
_POSTED = 16  # the number of those that are posted for other hosts each second


def local_logs(board: Board, members: Sequence[RankInfo]) -> dict[int, Log]:
    """The logs of the local launcher's ranks, with the state of their processes."""
    return {member.rank: _log_here(board[member.rank]) for member in members}


def _log_here(memory: Memory) -> Log:
    """The log of a process of this host, with the field `state`."""
    # The state first: the log of a process that had ended by then says whether it had failed.
    state = process_state(read(memory, 0)["pid"])
    log = read(memory, _RECORDS)
    return log | {"state": "failed" if "failed" in log["flags"] else state}


def _will_post_again(log: Log) -> bool:
    """Whether a log comes from another host and may be followed by another."""
    return "posted" in log and log["state"] != "failed" and log["error"] is None


class JobLogs:
    """The logs of `members`, all ranks of the job, for rank `rank`. `board` is the local launcher's, if there is one.

    Under torchrun and Slurm `file` has this rank's log for other ranks of this host. `store` is None if all ranks are
    on this host, and once the store has ended (`lost_store`). Posts are `interval` seconds apart.
    """

    def __init__(self, flight: Flight, rank: int, board: Board | None = None):
        self.members: list[RankInfo] = []
        self.file: FlightFile | None = None
        self.store: Store | None = None
        self.lost_store = False
        self.interval = 1.0
        self._flight = flight
        self._rank = rank
        self._board = board

    def watch(self, members: Sequence[RankInfo], store: Store | None, file: FlightFile | None) -> None:
        """Reach the logs of `members` from now on. `store` and `file` are given under torchrun and Slurm."""
        self.members = list(members)
        self.interval = max(1.0, len(members) / 1000)  # at most 1000 posts a second: the store is one process
        self.file = file
        # If all ranks are on this host, their logs are read directly, and no store is needed.
        self.store = store if any(member.host != socket.gethostname() for member in members) else None

    def lose_store(self) -> None:
        """Note that the store has ended, and with it rank 0 or torchrun's agent."""
        self.store = None
        self.lost_store = True

    def post(self, store: Store) -> None:
        """Write this rank's log to the store. Raises RuntimeError if the store has ended."""
        log = read(self._flight.memory, _POSTED) | {"posted": time.time()}
        store.set(f"log/{self._rank}", json.dumps(log))

    def read(self) -> dict[int, Log]:
        """Return all logs within reach, each with the state of its process."""
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
        if self.file and member.host == socket.gethostname():
            memory = self.file.peer(member.pid)
        if memory is not None:
            return _log_here(memory)
        key = f"log/{member.rank}"
        if self.store is None or not self.store.check([key]):
            return None
        posted: Log = json.loads(self.store.get(key))
        if "failed" in posted["flags"]:
            return posted | {"state": "failed"}
        silent = time.time() - posted["posted"] > SILENT_SECONDS + self.interval
        return posted | {"state": "silent" if silent else "running"}

    def read_fresh(self) -> dict[int, Log]:
        """Do as `read`, but wait until the ranks of other hosts have posted again. A rank without a new post is silent.

        An old post may be from before the failure, and others would seem to wait for its rank.
        """
        logs = self.read()
        if any("posted" not in log and log["state"] in ("stopped", "ended") for log in logs.values()):
            return logs  # the cause is on this host
        older = {rank: log["posted"] for rank, log in logs.items() if _will_post_again(log)}
        end = time.monotonic() + SILENCE_SECONDS + self.interval
        while older and time.monotonic() < end:
            time.sleep(self.interval / 4)
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

    def claims_to_tell(self, words: str = "") -> bool:
        """Whether this rank is the first one of its host to ask for `words`. It needs `file` and `members`."""
        assert self.file is not None
        # The process number of the job's lowest rank on this host identifies the job on this host.
        lowest = next(member.pid for member in self.members if member.host == socket.gethostname())
        return self.file.claim(lowest, f"-{blake2b(words.encode(), digest_size=8).hexdigest()}" if words else "")
