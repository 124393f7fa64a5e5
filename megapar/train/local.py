"""Starts ranks on this machine, watches them, and tells why a run ended: once, and its cause rather than its echoes.

The ranks are forks of this process, so they share the imported torch and start in a second. It must happen before CUDA
is used and while this process has one thread: hence a file for the ranks to meet at, and not torchrun's agent, which
serves a store and so forks among threads.

However this process ends, its ranks end: the kernel kills them with it. What they share (the store's file, the flight
logs) is memory without a name, so nothing is left behind.
"""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from megapar import device
from megapar.errors import CommunicationError, Interrupted, error_facts, interrupted_at, report_error, tell
from megapar.flight import Board, Flight, has_flag, read
from megapar.rendezvous import Member
from megapar.train.diagnosis import as_table, diagnose, mismatch, name, place, rows
from megapar.train.monitor import local_logs
from megapar.train.signals import HANDLED, Signals

Main = Callable[[device.Environment, Board], None]
_ECHO_SECONDS = 1.0  # after a rank's failed operation: time for another rank's end, which may be its cause
_ENDING_SECONDS = 1.0  # that ranks have to end by themselves after a signal that ends the run
_LEAVING_SECONDS = 30.0  # that ranks may end apart once the run is over
_LOST = CommunicationError.exit_code
_PREEMPTED = 75


def start_local_ranks(main: Main, nproc: int, run_dir: str) -> int:
    """Run `main` on `nproc` forked ranks of this machine; returns the exit code of the run.

    0: every rank has done all it had to. 75: it was asked to stop, and saved. 128 and a signal's number: interrupted.
    6: a rank was lost. Else the code of the first rank that failed. Only the cause is printed and stands in error.json.
    """
    board = Board(nproc)
    with _store_file() as meeting:
        # Until a rank has handlers of its own it must not run this process's, which share a pipe with it.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        signals = Signals(raises=False)
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=_rank_main, args=(rank, nproc, meeting, os.getpid(), board, main), name=f"rank {rank}")
            for rank in range(nproc)
        ]
        for process in ranks:
            process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        launcher = _Launcher(ranks, board, signals)
        try:
            code, facts = launcher.watch()
        finally:
            launcher.kill()
    if facts is not None:
        report_error(facts, run_dir, ours=False)
    return code


@contextmanager
def _store_file() -> Iterator[str]:
    """The URL of a file at which forked processes meet, for torch's FileStore.

    On Linux the file is memory without a name, so that nothing is left behind however this process ends.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("megapar-store")
        try:
            yield f"file:///proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile(prefix="megapar-store-") as file:
        yield f"file://{file.name}"


def _rank_main(rank: int, nproc: int, meeting: str, launcher: int, board: Board, main: Main) -> None:
    _die_with(launcher)
    signal.set_wakeup_fd(-1)
    flight = Flight(board[rank])
    env = device.Environment(
        rank=rank,
        world_size=nproc,
        local_rank=rank,
        local_world_size=nproc,
        meeting=meeting,
        launcher="local",
        cores=max(1, device.usable_cores() // nproc),
    )
    main(env, board)
    flight.raise_flag("done")


def _die_with(launcher: int) -> None:
    """Let the kernel kill this process when the launcher ends, however that happens. Linux only."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != launcher:  # it has ended already
        os._exit(_LOST)


class _Launcher:
    """Watches ranks until the run is over or must be ended."""

    def __init__(self, ranks: Sequence[BaseProcess], board: Board, signals: Signals):
        self._ranks = ranks
        self._board = board
        self._signals = signals
        host = socket.gethostname()
        self._members = [Member(rank, host, "", pid=process.pid or 0) for rank, process in enumerate(ranks)]
        self._codes: dict[int, int] = {}  # exit codes of ranks that have ended, in the order of their ends
        self._failed_at = self._over_at = 0.0
        self._logs: dict[int, Any] = {}  # as they were when the first operation failed
        self._passed_on = False

    def watch(self) -> tuple[int, Mapping[str, Any] | None]:
        """The run's exit code, and what to tell: None if there is nothing."""
        while True:
            alive = [process.sentinel for rank, process in enumerate(self._ranks) if rank not in self._codes]
            wait([*alive, self._signals.reader], timeout=0.1)
            self._signals.judge()
            self._note_ends()
            if self._signals.wants_table:
                self._signals.wants_table = False
                tell(as_table(local_logs(self._board, self._members), self._members).rstrip())
            if self._signals.ending:
                return self._interrupt()
            self._pass_on_request()
            verdict = self._primary() or self._echo() or self._over()
            if verdict is not None:
                return verdict

    def kill(self) -> None:
        """End all ranks at once, stopped ones too."""
        for process in self._ranks:
            if process.is_alive():
                process.kill()
        for process in self._ranks:
            process.join()

    def _note_ends(self) -> None:
        for rank, process in enumerate(self._ranks):
            if rank not in self._codes and process.exitcode is not None:
                self._codes[rank] = process.exitcode

    def _interrupt(self) -> tuple[int, Mapping[str, Any]]:
        number = self._signals.ending
        self._send(number)
        end = time.monotonic() + _ENDING_SECONDS
        while len(self._codes) < len(self._ranks) and time.monotonic() < end:
            time.sleep(0.02)
            self._note_ends()
        return 128 + number, self._interrupted(number)

    def _interrupted(self, number: int, note: str = "") -> dict[str, Any]:
        log = read(self._board[0], 0)
        text = interrupted_at(log["step"], log["checkpoint"], number) + note
        return self._facts(0, text, 128 + number) | {"class": Interrupted.__name__}

    def _pass_on_request(self) -> None:
        """A request to stop reaches every rank once. Before the first step there is nothing to save: then it ends."""
        if not self._signals.request or self._passed_on:
            self._signals.armed = all(has_flag(self._board[rank], "armed") for rank in range(len(self._ranks)))
            return
        self._passed_on = True
        self._send(signal.Signals[self._signals.request])

    def _send(self, number: int) -> None:
        for rank, process in enumerate(self._ranks):
            if rank not in self._codes and process.pid is not None:
                os.kill(process.pid, number)  # not reaped yet, so the number is still its own

    def _primary(self) -> tuple[int, Mapping[str, Any] | None] | None:
        """The first rank that ended by itself and too early."""
        for rank, code in self._codes.items():
            if code in (_LOST, _PREEMPTED) or (code == 0 and has_flag(self._board[rank], "done")):
                continue
            if code > 128 and code - 128 in HANDLED:
                text = f"; {self._name(rank)} was sent the signal" if self._signals.ending == 0 else ""
                return code, self._interrupted(code - 128, text)
            if code <= 0:
                return _LOST, self._lost(rank, code)
            error = read(self._board[rank], 0)["error"]
            text = f"{self._name(rank)} ended with exit code {code}"
            return code, error or self._facts(rank, text, code)
        return None

    def _lost(self, rank: int, code: int) -> dict[str, Any]:
        logs = local_logs(self._board, self._members)
        if code == 0:
            text = f"{self._name(rank)} ended with exit code 0 before its run was complete"
        else:
            text = f"{self._name(rank)} was ended by {signal.Signals(-code).name}"
        text += f" in {place(logs[rank])}"
        if code == -signal.SIGBUS:
            text += ": often a file that was cut short while it was read, or a full disk or /dev/shm"
        if code == -signal.SIGKILL:
            text += ": if nobody did it, the kernel does so for want of memory (see dmesg)"
        found = mismatch(logs, self._members)
        if found is not None:
            text = f"{found[0]}; then {text}"
        return self._facts(rank, text, _LOST) | {"ranks": rows(logs, self._members)}

    def _echo(self) -> tuple[int, Mapping[str, Any]] | None:
        """Operations have failed on some rank, for want of another: told once no rank ends by itself meanwhile."""
        failed = [rank for rank in range(len(self._ranks)) if self._has_failed(rank)]
        if not failed:
            return None
        if not self._failed_at:
            self._failed_at = time.monotonic()
            self._logs = local_logs(self._board, self._members)
        others_live = len(self._codes) < len(self._ranks)
        if others_live and time.monotonic() - self._failed_at < _ECHO_SECONDS:
            return None
        # Without a failed operation a rank has said itself what it lacks: the others did not come to the meeting, say.
        in_operation = any("failed" in log["flags"] for log in self._logs.values())
        found = diagnose(self._logs, self._members) if in_operation else None
        if found is not None:
            text, rank = found
            return _LOST, self._facts(rank, text, _LOST) | {"ranks": rows(self._logs, self._members)}
        errors = [read(self._board[rank], 0)["error"] for rank in failed]
        told = next((error for error in errors if error is not None), None)
        return _LOST, told or self._facts(failed[0], "an operation failed, and no rank is missing", _LOST)

    def _has_failed(self, rank: int) -> bool:
        return self._codes.get(rank) == _LOST or has_flag(self._board[rank], "failed")

    def _over(self) -> tuple[int, Mapping[str, Any] | None] | None:
        """Every rank has ended well, or should have."""
        if len(self._codes) == len(self._ranks):
            # `_primary` and `_echo` have answered for all other codes.
            assert set(self._codes.values()) <= {0, _PREEMPTED}, self._codes
            stopped = [rank for rank, code in self._codes.items() if code == _PREEMPTED]
            return (_PREEMPTED, read(self._board[stopped[0]], 0)["error"]) if stopped else (0, None)
        if self._codes and not self._over_at:
            self._over_at = time.monotonic()
        if self._over_at and time.monotonic() - self._over_at > _LEAVING_SECONDS:
            rank = next(rank for rank in range(len(self._ranks)) if rank not in self._codes)
            text = f"{self._name(rank)} did not end within {_LEAVING_SECONDS:g} s after the run was over"
            return _LOST, self._facts(rank, text, _LOST)
        return None

    def _name(self, rank: int) -> str:
        return name(self._members[rank], {"pid": self._members[rank].pid})

    def _facts(self, rank: int, text: str, code: int) -> dict[str, Any]:
        """What error.json says of `rank`, without its table."""
        log = read(self._board[rank], 0)
        facts = error_facts(CommunicationError(text), rank, Flight())
        facts |= {"step": log["step"], "phase": log["phase"], "pid": self._members[rank].pid, "exit_code": code}
        return facts | {"everywhere": True}  # the text names its rank
