"""The local launcher: starts ranks on this machine, watches them, and reports once why the run ended.

When one rank fails, the operations of the others fail soon after. The launcher reports the cause, not these effects.

The ranks are forks of this process, so they share the imported torch and start in a second. They are forked before CUDA
is used and while this process has one thread. So the ranks meet at a file: torchrun's agent serves a store, and would
fork while the store's threads run.

When this process ends, the kernel kills its ranks. The ranks share the store's file and the flight logs. Both are
memory without a name, so nothing is left behind. On systems without such memory the store is a temporary file, and a
killed launcher leaves it behind.
"""

import importlib
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from megapar.base.errors import CommunicationError, starting
from megapar.comm.flight import Board, Flight, has_flag, read
from megapar.comm.rendezvous import RankInfo
from megapar.config.options import Config
from megapar.launch.diagnosis import as_table, diagnose, mismatch, name, position_in_step, rows
from megapar.launch.job_logs import local_logs
from megapar.launch.reporting import Interrupted, error_record, interrupted_at, report_error, reported
from megapar.launch.signals import HANDLED, Signals
from megapar.pipeline import runtime
from megapar.system import environment, limits
from megapar.system.environment import Environment
from megapar.system.processes import end_with_parent
from megapar.system.say import tell

Main = Callable[[Environment, Board], None]
# After an operation of a rank has failed, the launcher waits this long for the end of another rank, the likely cause.
_ECHO_SECONDS = 1.0
_ENDING_SECONDS = 1.0  # after a signal that ends the run, ranks have this long to end by themselves
_LEAVING_SECONDS = 30.0  # after the first rank has ended well, the others have this long to end
# The descriptors that a rank needs: two pipes, one socket of gloo, a socket and a memory of the exchange for each rank.
_FILES_A_RANK = 5
_FILES = 24  # standard streams, store, signals, files of the run
# Ranks write their options and addresses into the store, about 12 KiB each. If the store's file reaches its limit, a
# record is cut off, and torch's FileStore waits for the rest for ever.
_STORE_BYTES_A_RANK = 1 << 16
_LOST = CommunicationError.exit_code
_PREEMPTED = 75


def preload(config: Config) -> None:
    """Import what ranks will need. Later forks share it."""
    if config.kernels.compile:
        importlib.import_module("torch._dynamo")  # takes seconds
    runtime.preload(config.parallel.pp)


def start_local_ranks(main: Main, nproc: int, run_dir: str) -> int:
    """Run `main` on `nproc` forked ranks of this machine; returns the exit code of the run.

    The code is 0 if every rank has finished, 75 if the run was asked to stop and has saved, 128 plus a signal's number
    if it was interrupted, and 6 if a rank was lost. Otherwise it is the code of the first failed rank. Only the
    cause is printed and written to error.json. Raises OutOfMemoryError if a limit of this process (`ulimit`) is too low
    for the ranks to start.
    """
    end = run_ranks(main, nproc, Signals(raises=False))
    if end.error is not None:
        report_error(end.error, run_dir, ours=False)
    return end.code


class JobStart(NamedTuple):
    """Which start of a job this is. `job`, `restart` and `snapshots` are those of `Environment`.

    The ranks are asked to stop after step `stop_at`; 0: after none.
    """

    job: str = ""
    restart: int = 0
    snapshots: str = ""
    stop_at: int = 0


class End(NamedTuple):
    """How the ranks of a start have ended.

    `error` holds the fields of error.json, None without an error. `step` is the newest step that a rank began. `owned`:
    the ranks had locked the run folder. `stopped_at`: they were asked to stop, because of `JobStart.stop_at`.
    """

    code: int
    error: Mapping[str, Any] | None
    step: int
    owned: bool
    stopped_at: bool


def run_ranks(main: Main, nproc: int, signals: Signals, start: JobStart = JobStart()) -> End:  # noqa: B008 (immutable)
    """Fork `nproc` ranks, and wait for their end. None of them is left then.

    Raises OutOfMemoryError as `start_local_ranks` does.
    """
    limits.require_open_files(_FILES_A_RANK * nproc + _FILES)
    limits.require_file_size(_STORE_BYTES_A_RANK * nproc)
    fewer = "start fewer with --launch.nproc"
    with starting("a rank", fewer):
        board = Board(nproc)
    with _store_file() as meeting:
        env = Environment(
            world_size=nproc,
            local_world_size=nproc,
            meeting=meeting,
            launcher="local",
            cores=max(1, environment.usable_cores() // nproc),
            job=start.job,
            restart=start.restart,
            snapshots=start.snapshots,
        )
        # Ranks inherit this process's handlers, which write to a pipe that they share with it. So signals stay blocked
        # in a rank until it has installed its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(
                target=_rank_main,
                args=(replace(env, rank=rank, local_rank=rank), os.getpid(), board, main),
                name=f"rank {rank}",
            )
            for rank in range(nproc)
        ]
        try:
            with starting("a rank", fewer):
                for process in ranks:
                    process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            launcher = _Launcher(ranks, board, signals, start.stop_at)
            code, error = launcher.watch()
        finally:
            _kill(ranks)
    step = max(read(board[rank], 0)["step"] for rank in range(nproc))
    stopped_at = launcher.stopping and code == _PREEMPTED
    return End(code, None if stopped_at else error, step, has_flag(board[0], "owns"), stopped_at)


def _kill(ranks: Sequence[BaseProcess]) -> None:
    """Kill all started ranks with SIGKILL: it ends stopped processes too."""
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.kill()
    for process in started:
        process.join()


@contextmanager
def _store_file() -> Iterator[str]:
    """Yield the URL of a file for torch's FileStore, the meeting point of the forks."""
    # On Linux the file is memory without a name: nothing is left behind, however this process ends. Other systems have
    # no such memory, and a container's filter of system calls may refuse it.
    descriptor = -1
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            descriptor = os.memfd_create("megapar-store")
    if descriptor < 0:
        # Its mode is 0700, so other users cannot reach the file.
        with tempfile.TemporaryDirectory(prefix="megapar-store-") as folder:
            yield f"file://{folder}/store"
        return
    try:
        yield f"file:///proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _rank_main(env: Environment, launcher: int, board: Board, main: Main) -> None:
    """The program of a forked rank. `launcher` is the launcher's process number."""
    if not end_with_parent(launcher):
        os._exit(_LOST)
    signal.set_wakeup_fd(-1)  # a signal of this rank must not arrive in the launcher's pipe
    flight = Flight(board[env.rank])
    # `main` reports its errors itself. This is for those of its first moments, such as threads that cannot be started.
    with reported(env.rank, flight=flight, launcher_tells=True):
        main(env, board)
    # An exit code of 0 without this flag means that something else ended the rank early (fault rank-that-ends-early of
    # docs/faults.md).
    flight.raise_flag("done")


class _Errors:
    """The fields of error.json for ranks of this machine, by their flight logs."""

    def __init__(self, board: Board, members: Sequence[RankInfo]):
        self._board = board
        self._members = members

    def name_of(self, rank: int) -> str:
        return name(self._members[rank], {"pid": self._members[rank].pid})

    def record(self, rank: int, text: str, code: int) -> dict[str, Any]:
        """Return the fields of error.json for `rank`, without the table of all ranks."""
        log = read(self._board[rank], 0)
        record = error_record(CommunicationError(text), rank, Flight())
        record |= {"step": log["step"], "phase": log["phase"], "pid": self._members[rank].pid, "exit_code": code}
        # The text names its rank already, so no "rank N" is to be put before it.
        return record | {"everywhere": True}

    def interrupted(self, number: int, note: str = "") -> dict[str, Any]:
        """Return the fields of error.json of a run ended by signal `number`."""
        log = read(self._board[0], 0)
        text = interrupted_at(log["step"], log["checkpoint"], number) + note
        return self.record(0, text, 128 + number) | {"class": Interrupted.__name__}

    def lost(self, rank: int, code: int) -> dict[str, Any]:
        """Return the fields of error.json for a rank gone before its work was done.

        A signal killed the rank (a negative `code`), or something ended the rank with exit code 0.
        """
        logs = local_logs(self._board, self._members)
        if code == 0:
            text = f"{self.name_of(rank)} ended with exit code 0 before its run was complete"
        else:
            text = f"{self.name_of(rank)} was ended by {signal.Signals(-code).name}"
        text += f" in {position_in_step(logs[rank])}"
        if code == -signal.SIGBUS:
            text += ": often a file that was cut short while it was read, or a full disk or /dev/shm"
        if code == -signal.SIGKILL:
            text += ": if nobody did it, the kernel does so for want of memory (see dmesg)"
        different = mismatch(logs, self._members)
        if different is not None:
            text = f"{different[0]}; then {text}"
        return self.record(rank, text, _LOST) | {"ranks": rows(logs, self._members)}


class _Launcher:
    """Watches ranks until the run is over or must be ended."""

    def __init__(self, ranks: Sequence[BaseProcess], board: Board, signals: Signals, stop_at: int = 0):
        self.stopping = False  # whether the ranks were asked to stop after step `stop_at`
        self._stop_at = stop_at
        self._ranks = ranks
        self._board = board
        self._signals = signals
        host = socket.gethostname()
        self._members = [RankInfo(rank, host, "", pid=process.pid or 0) for rank, process in enumerate(ranks)]
        self._errors = _Errors(board, self._members)
        self._codes: dict[int, int] = {}  # exit codes of ranks that have ended, in the order in which they were noted
        self._failed_at = 0.0  # when the first operation failed, on time.monotonic's clock; 0 for never
        self._over_at = 0.0  # when the first rank ended well; 0 for never
        self._logs: dict[int, Any] = {}  # the flight logs at the moment when the first operation failed
        self._passed_on = False  # whether the request to stop has been sent to the ranks

    def watch(self) -> tuple[int, Mapping[str, Any] | None]:
        """Wait for the end of the run; returns its exit code and the fields of error.json (None without error)."""
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
            # A failed operation often follows from the end of a rank, so ends are looked at first.
            verdict = self._primary() or self._echo() or self._over()
            if verdict is not None:
                return verdict

    def _note_ends(self) -> None:
        """Add the exit codes of the ranks ended since the last call."""
        for rank, process in enumerate(self._ranks):
            if rank not in self._codes and process.exitcode is not None:
                self._codes[rank] = process.exitcode

    def _interrupt(self) -> tuple[int, Mapping[str, Any]]:
        """Pass the ending signal on, and wait for the ranks for a moment."""
        number = self._signals.ending
        self._send(number)
        end = time.monotonic() + _ENDING_SECONDS
        while len(self._codes) < len(self._ranks) and time.monotonic() < end:
            time.sleep(0.02)
            self._note_ends()
        return 128 + number, self._errors.interrupted(number)

    def _pass_on_request(self) -> None:
        """Send a request to stop to every rank, once."""
        if not self._signals.request or self._passed_on:
            # Not armed means that some rank has not begun its first step. Then there is nothing to save, and SIGTERM
            # ends the run at once (`Signals`).
            self._signals.armed = all(has_flag(self._board[rank], "armed") for rank in range(len(self._ranks)))
            if self._stop_at and not self.stopping and self._signals.armed:
                self.stopping = all(read(self._board[r], 0)["step"] > self._stop_at for r in range(len(self._ranks)))
                if self.stopping:
                    self._send(signal.SIGUSR1)
            return
        self._passed_on = True
        self._send(signal.Signals[self._signals.request])

    def _send(self, number: int) -> None:
        for rank, process in enumerate(self._ranks):
            if rank not in self._codes and process.pid is not None:
                os.kill(process.pid, number)  # the process was not reaped yet, so no other has its number

    def _primary(self) -> tuple[int, Mapping[str, Any] | None] | None:
        """The exit code and error if a rank has ended early by itself; None if none has."""
        for rank, code in self._codes.items():
            # `_echo` judges ranks that lost another one, and `_over` those that were preempted or have finished.
            if code in (_LOST, _PREEMPTED) or (code == 0 and has_flag(self._board[rank], "done")):
                continue
            if code > 128 and code - 128 in HANDLED:
                text = ""
                if self._signals.ending == 0:  # the launcher got no signal, so someone sent it to the rank
                    text = f"; {self._errors.name_of(rank)} was sent the signal"
                return code, self._errors.interrupted(code - 128, text)
            if code <= 0:  # multiprocessing gives the number of the signal that killed a process as a negative code
                return _LOST, self._errors.lost(rank, code)
            error = read(self._board[rank], 0)["error"]
            text = f"{self._errors.name_of(rank)} ended with exit code {code}"
            return code, error or self._errors.record(rank, text, code)
        return None

    def _echo(self) -> tuple[int, Mapping[str, Any]] | None:
        """The exit code and error if operations have failed on some rank because another one is missing.

        Returns None for `_ECHO_SECONDS` after the first failure: the cause may show as the early end of a rank.
        """
        failed = [rank for rank in range(len(self._ranks)) if self._has_failed(rank)]
        if not failed:
            return None
        if not self._failed_at:
            self._failed_at = time.monotonic()
            self._logs = local_logs(self._board, self._members)
        others_live = len(self._codes) < len(self._ranks)
        if others_live and time.monotonic() - self._failed_at < _ECHO_SECONDS:
            return None
        # If no operation has failed, the rank's own error says what is missing: ranks that did not come to the meeting,
        # for example. The logs would add nothing.
        diagnosis = None
        if any("failed" in log["flags"] for log in self._logs.values()):
            diagnosis = diagnose(self._logs, self._members)
        if diagnosis is not None:
            text, rank = diagnosis
            return _LOST, self._errors.record(rank, text, _LOST) | {"ranks": rows(self._logs, self._members)}
        errors = [read(self._board[rank], 0)["error"] for rank in failed]
        first_error = next((error for error in errors if error is not None), None)
        text = "an operation failed, and no rank is missing"
        return _LOST, first_error or self._errors.record(failed[0], text, _LOST)

    def _has_failed(self, rank: int) -> bool:
        return self._codes.get(rank) == _LOST or has_flag(self._board[rank], "failed")

    def _over(self) -> tuple[int, Mapping[str, Any] | None] | None:
        """The exit code if every rank has ended well, an error if one is late; None while the run goes on."""
        if len(self._codes) == len(self._ranks):
            # `_primary` and `_echo` have answered for all other codes.
            assert set(self._codes.values()) <= {0, _PREEMPTED}, self._codes
            stopped = [rank for rank, code in self._codes.items() if code == _PREEMPTED]
            if not stopped:
                return 0, None
            return _PREEMPTED, read(self._board[stopped[0]], 0)["error"]
        if self._codes and not self._over_at:
            self._over_at = time.monotonic()
        if self._over_at and time.monotonic() - self._over_at > _LEAVING_SECONDS:
            rank = next(rank for rank in range(len(self._ranks)) if rank not in self._codes)
            text = f"{self._errors.name_of(rank)} did not end within {_LEAVING_SECONDS:g} s after the run was over"
            return _LOST, self._errors.record(rank, text, _LOST)
        return None
