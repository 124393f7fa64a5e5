"""How a program reports its errors, and with which exit code it ends."""

import errno
import fcntl
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megapar.base.errors import CommunicationError, MegaparError, OutOfMemoryError, Preempted, StorageError
from megapar.comm.flight import Flight
from megapar.system import environment, events, limits
from megapar.system.atomic_files import as_json, replace_file
from megapar.system.regular_files import open_regular
from megapar.system.say import silence, tell

_OF_FAULT = ("class", "message", "exit_code", "rank", "host", "step", "phase")  # what events.jsonl has of an error


class Ended(SystemExit):
    """How `reported` ends the process. `exits_refused` tells it from a sys.exit elsewhere."""


class Interrupted(KeyboardInterrupt):
    """A signal to end at once."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def open_streams() -> None:
    """Prepare stdin, stdout and stderr for `say` and `tell`: open them, and escape letters outside their encoding."""
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by the parent process: the next file to be opened would get this number
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
        elif descriptor and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def begin_program() -> int:
    """Prepare this process for a program: its streams, and as many open files as it may have.

    Returns the rank for `reported`: 0 if this process speaks for all ranks until they have met, else 1.
    """
    open_streams()
    limits.raise_open_files()
    return 0 if environment.first_to_speak() else 1


@contextmanager
def _written_out() -> Iterator[None]:
    """A context around prints. At its end standard output has them all.

    Else Python writes the rest when the process ends, and a failure then changes the exit code to 120. Raises
    StorageError if the text cannot be written. Ends the process if the reader of the text has gone.
    """
    try:
        yield
        _flush_stdout()
    except SystemExit as end:
        # rich ends the process with 1 where its reader has gone. No program of ours ends with 1.
        if end.code == 1:
            raise Ended(128 + signal.SIGPIPE) from end
        # tyro has printed the text of --help before it ends the process.
        _flush_stdout()
        raise
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.ENOSPC) and error.filename is None:
            _end_if_stdout_fails()
        raise


def _flush_stdout() -> None:
    """Write what standard output holds. `_written_out` says what this raises."""
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except OSError:
        _end_if_stdout_fails()
        raise


def _end_if_stdout_fails() -> None:
    """After a failed write: end the program as `_written_out` says if standard output is what fails."""
    try:
        # The same error comes from full disks of other files, and from connections between ranks. So try it again.
        os.write(1, b"\n")
    except BrokenPipeError as error:
        silence(1)
        raise Ended(128 + signal.SIGPIPE) from error
    except OSError as error:
        silence(1)
        raise StorageError(f"cannot write to standard output: {error.strerror or error}") from error


@contextmanager
def reported(
    rank: int = 0, run_dir: str | None = None, flight: Flight | None = None, *, launcher_tells: bool = False
) -> Iterator[None]:
    """A context for a program's main: reports its errors, and ends the process with their exit codes.

    A MegaparError becomes one line on stderr, error.json in `run_dir`, and its exit code. Rank 0 alone reports an error
    raised by all ranks. If ranks of one host raise the same words, one of them reports it. With `launcher_tells` this
    rank only leaves its error in `flight`; the launcher sees the errors of all ranks and reports one. An interruption
    becomes one line and exit code 128 plus the signal's number. If the reader of standard output has gone, as `head`
    goes, the program ends in silence, with the exit code after SIGPIPE. Any other exception is a bug: its traceback is
    printed, and the exit code is 70.
    """
    flight = flight or Flight()
    try:
        try:
            with _written_out():
                yield
        except MemoryError as error:
            text = str(error) or "the host refused more memory (ulimit -v, or the container's limit)"
            raise OutOfMemoryError(f"out of memory: {text}") from error
    except MegaparError as error:
        record = {"everywhere": error.everywhere, "told_by_another": error.told_by_another}
        record |= error_record(error, rank, flight)
        flight.post_error(record)
        if not launcher_tells:
            # With `ranks` the cause is known already, so there is nothing to wait for.
            if not record.get("ranks"):
                time.sleep(error.patience_seconds)
            if rank == 0 or not error.everywhere:
                report_error(record, run_dir, ours=flight.has_flag("owns"))
        raise Ended(error.exit_code) from error
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        text = interrupted_at(flight.step, flight.last_checkpoint, number)
        flight.post_error(_record("Interrupted", text, 128 + number, rank, flight))
        if not launcher_tells and rank == 0:
            tell(text)
        raise Ended(128 + number) from error
    except SystemExit:
        raise
    except BaseException as error:  # Rust's panics, as in safetensors and tokenizers, are no subclass of Exception
        # A closed or broken stderr must not keep error.json from being written.
        with suppress(OSError, ValueError):
            traceback.print_exc()
        record = error_record(error, rank, flight)
        flight.post_error(record | {"told": True})
        if not launcher_tells:
            write_error(record, run_dir, ours=flight.has_flag("owns"))
        raise Ended(MegaparError.exit_code) from error


@contextmanager
def exits_refused() -> Iterator[None]:
    """Raise MegaparError if code in the block calls sys.exit. The process would end as if its work was done."""
    try:
        yield
    except Ended:
        raise
    except SystemExit as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise MegaparError(
            f"{last.filename}:{last.lineno} called sys.exit({error.code}) before the run was complete; what a run "
            "calls must not end its process"
        ) from error


def interrupted_at(step: int, checkpoint: int, number: int) -> str:
    """A line such as "interrupted at step 12, last checkpoint step 10 (SIGINT)".

    `step` 0 means before the first step. `checkpoint` -1 means none. `number` is the signal's.
    """
    progress = f"at step {step}" if step else "before the first step"
    saved = f"last checkpoint step {checkpoint}" if checkpoint >= 0 else "no checkpoint"
    return f"interrupted {progress}, {saved} ({signal.Signals(number).name})"


def error_record(error: BaseException, rank: int, flight: Flight) -> dict[str, Any]:
    """The contents of error.json as JSON types: the error, and the step and phase of this rank."""
    code = error.exit_code if isinstance(error, MegaparError) else MegaparError.exit_code
    # Such as a file that cannot be written: what to do about the limit is said here once, for all files.
    limit = limits.reached(error) if isinstance(error, MegaparError) else ""
    record = _record(type(error).__name__, f"{error}; {limit}" if limit else str(error), code, rank, flight)
    if isinstance(error, CommunicationError) and error.ranks:
        # error.json then describes the missing rank instead of this one, which only waited for it.
        record |= {**error.culprit, "ranks": list(error.ranks)}
        # The message names the missing rank, so it needs no "rank N:" in front.
        record |= {"everywhere": bool(error.culprit), "told_by_another": error.told_by_another}
    if isinstance(error, OutOfMemoryError) and error.unplanned is not None:
        record["unplanned"] = dict(error.unplanned)
    return record


def _record(name: str, message: str, code: int, rank: int, flight: Flight) -> dict[str, Any]:
    return {
        "class": name,
        "message": message,
        "exit_code": code,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": flight.step,
        "phase": flight.phase,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def report_error(record: Mapping[str, Any], run_dir: str | None, *, ours: bool) -> None:
    """Print an error's line, unless another rank prints it, and write error.json if it is a failure.

    `record` comes from `error_record`. A requested stop and an interruption are no failures.
    """
    prefix = f"rank {record['rank']}: " if record["rank"] and not record.get("everywhere") else ""
    if record["class"] == Interrupted.__name__:
        tell(record["message"])
    elif not (record.get("told_by_another") or record.get("told")):
        tell(f"{record['class']}: {prefix}{record['message']}")
    if record["class"] not in (Preempted.__name__, Interrupted.__name__):
        write_error(record, run_dir, ours=ours)


def write_error(record: Mapping[str, Any], run_dir: str | None, *, ours: bool) -> None:
    """Write `record` to error.json in `run_dir`. Never raises.

    `ours`: this job holds the lock of the folder. Nothing is written without a folder, or into that of another running
    job.
    """
    # These keys only say who reports the error, and what is left to plan.
    hidden = ("everywhere", "told_by_another", "told", "unplanned")
    shown = {key: value for key, value in record.items() if key not in hidden}
    if run_dir is None or not os.path.isdir(run_dir) or not (ours or _is_free(run_dir)):
        return
    path = Path(run_dir) / "error.json"
    try:
        replace_file(path, as_json(shown).encode())
        if not record.get("told_by_another"):
            events.append(Path(run_dir), "fault", **{key: record.get(key) for key in _OF_FAULT})
    except OSError as error:
        tell(f"{path} not written: {error.strerror or error}")


def _is_free(run_dir: str) -> bool:
    """Whether no running job holds the lock of the run folder (see megapar.checkpoint.folder)."""
    try:
        with open(open_regular(os.path.join(run_dir, ".lock"), os.O_RDONLY | os.O_NOFOLLOW)) as file:
            # A shared lock: several ranks may ask at once, and must not take each other for a running job.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no lock yet, or a file system without locks
        return True
    return True
