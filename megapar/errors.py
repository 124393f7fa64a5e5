"""Errors for people: each class has an exit code, each message is one line saying what, where, why and what would
work."""

import fcntl
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megapar.flight import Flight


class MegaparError(Exception):
    """Base of every error that a user can cause or mend; printed without a traceback.

    `everywhere`: all ranks raise it with the same words, so that rank 0 alone prints it. `told`: another rank of this
    host prints it, as it has the same words.
    """

    exit_code = 70
    everywhere = False
    told = False
    patience_seconds = 0.0


class ConfigError(MegaparError):
    """Options that cannot run, or are not understood."""

    exit_code = 2
    everywhere = True


class DataError(MegaparError):
    """Tokens, documents or files of data that are missing or damaged."""

    exit_code = 3


class CheckpointError(MegaparError):
    """A checkpoint that is incomplete, damaged or of another model."""

    exit_code = 4


class NumericError(MegaparError):
    """A loss or gradient that is not finite."""

    exit_code = 5
    everywhere = True


class CommunicationError(MegaparError):
    """A rank that was lost, or a collective that outlasted its time.

    It is usually a consequence of another rank's failure. So it is reported with a delay, in which a launcher may end
    this rank: then only the cause is reported.
    """

    exit_code = 6
    patience_seconds = 1.0
    ranks: Sequence[Any] = ()  # where all ranks stood, if that is known, as JSON types
    culprit: Mapping[str, Any] = {}  # rank, host, pid, step and phase of the rank that is missing, if it is known


class StorageError(MegaparError):
    """Files that cannot be written."""

    exit_code = 7


class OutOfMemoryError(MegaparError):
    """A device or a process that has no memory, or may start no thread, for what the run needs."""

    exit_code = 8


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Around the writing of `path`: what the disk refuses is a StorageError that names it."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


class Preempted(MegaparError):  # noqa: N818 (no error)
    """No failure: the run was asked to stop, and has saved at the end of a step."""

    exit_code = 75  # EX_TEMPFAIL: start it again
    everywhere = True


class Interrupted(KeyboardInterrupt):
    """A signal that ends the process at once."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def tell(text: str) -> None:
    """A line for people on stderr. Never raises: an error's own cause must not be hidden by a full disk or a reader
    that has gone."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        _replace_by_nothing(2)


def say(text: str) -> None:
    """A line for people on stdout. Never raises: a lost reader (`| head`) or a full disk must not end a run.

    The loss is told once, on stderr; later lines are dropped.
    """
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:
        _replace_by_nothing(1)
        tell(f"stdout cannot be written ({error}): log lines are dropped from here on, the run goes on")


def _replace_by_nothing(descriptor: int) -> None:
    """Let all that is written there vanish, also what Python still holds and writes at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def open_streams() -> None:
    """Make stdout and stderr fit for `say` and `tell`: open, and without letters that they cannot encode."""
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by who started us: the next file to be opened would take its place
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
        elif descriptor and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def reported(
    rank: int = 0, run_dir: str | None = None, flight: Flight | None = None, *, launcher_tells: bool = False
) -> Iterator[None]:
    """Around a program's main: a MegaparError becomes one line on stderr, error.json in `run_dir`, and its exit code.

    Errors that all ranks raise are told by rank 0 alone; of ranks on one host that raise the same words, one tells.
    `launcher_tells`: this rank leaves its error in `flight`, and the launcher, which knows those of all ranks, tells
    one. An interruption is one line, and exits with 128 plus the signal's number. Everything else is a bug: its
    traceback is printed here, and the code is 70.
    """
    flight = flight or Flight()
    try:
        yield
    except MegaparError as error:
        facts = {"everywhere": error.everywhere, "told": error.told} | error_facts(error, rank, flight)
        flight.post_error(facts)
        if not launcher_tells:
            time.sleep(error.patience_seconds if not facts.get("ranks") else 0)
            if rank == 0 or not error.everywhere:
                report_error(facts, run_dir, ours=flight.has_flag("owns"))
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        text = interrupted_at(flight.step, flight.last_checkpoint, number)
        flight.post_error(_facts("Interrupted", text, 128 + number, rank, flight))
        if not launcher_tells and rank == 0:
            tell(text)
        sys.exit(128 + number)
    except Exception as error:
        with suppress(OSError, ValueError):
            traceback.print_exc()
        facts = error_facts(error, rank, flight)
        flight.post_error(facts | {"told": True})
        if not launcher_tells:
            record_error(facts, run_dir, ours=flight.has_flag("owns"))
        sys.exit(MegaparError.exit_code)


def interrupted_at(step: int, checkpoint: int, number: int) -> str:
    """Such as "interrupted at step 12, last checkpoint step 10 (SIGINT)"; -1 for no checkpoint."""
    where = f"at step {step}" if step else "before the first step"
    saved = f"last checkpoint step {checkpoint}" if checkpoint >= 0 else "no checkpoint"
    return f"interrupted {where}, {saved} ({signal.Signals(number).name})"


def error_facts(error: Exception, rank: int, flight: Flight) -> dict[str, Any]:
    """What error.json says, as JSON types: the error, and where this rank stood."""
    code = error.exit_code if isinstance(error, MegaparError) else MegaparError.exit_code
    facts = _facts(type(error).__name__, str(error), code, rank, flight)
    if isinstance(error, CommunicationError) and error.ranks:
        facts |= {**error.culprit, "ranks": list(error.ranks)}
        facts |= {"everywhere": bool(error.culprit), "told": error.told}  # the message names the rank
    return facts


def _facts(name: str, message: str, code: int, rank: int, flight: Flight) -> dict[str, Any]:
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


def report_error(facts: Mapping[str, Any], run_dir: str | None, *, ours: bool) -> None:
    """Print an error's line, if it was not printed where it arose, and record it if it is a failure. See
    `record_error`."""
    where = f"rank {facts['rank']}: " if facts["rank"] and not facts.get("everywhere") else ""
    if facts["class"] == Interrupted.__name__:
        tell(facts["message"])
    elif not facts.get("told"):
        tell(f"{facts['class']}: {where}{facts['message']}")
    if facts["class"] not in (Preempted.__name__, Interrupted.__name__):
        record_error(facts, run_dir, ours=ours)


def record_error(facts: Mapping[str, Any], run_dir: str | None, *, ours: bool) -> None:
    """Write error.json, if there is a run folder that is `ours` or no running job's. Never raises."""
    shown = {key: value for key, value in facts.items() if key not in ("everywhere", "told")}
    if run_dir is None or not os.path.isdir(run_dir) or not (ours or _is_free(run_dir)):
        return
    path = Path(run_dir) / "error.json"
    draft = path.with_name(".error.json.tmp")
    try:
        draft.write_text(json.dumps(shown))
        draft.replace(path)
    except OSError as error:
        tell(f"{path} not written: {error.strerror or error}")
        with suppress(OSError):
            draft.unlink()


def _is_free(run_dir: str) -> bool:
    """Whether no running job holds the lock of the folder (megapar.checkpoint.folder)."""
    try:
        with open(os.path.join(run_dir, ".lock")) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no lock yet, or a file system without locks
        return True
    return True
