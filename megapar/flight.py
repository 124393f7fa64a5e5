"""The flight log: where each rank stands and what it last sent, in memory that outlives its process.

A rank writes its step, its phase and its newest operations on each axis into a memory map: no lock, no system call, no
wait for the device. Whoever shares the map reads it at any time, also after the rank was stopped, killed or aborted:
the local launcher, which made the maps of its ranks before it started them, or ranks on the same host, by a file in
/dev/shm.

Collectives of an axis are numbered alike on all its ranks; messages are numbered by link, so that the k-th to a peer is
the peer's k-th from here. So two logs tell which rank has not arrived, and where two ranks do different things.
"""

import contextlib
import fcntl
import json
import mmap
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, Literal

Phase = Literal["start", "data", "forward", "backward", "reduce", "optimizer", "save", "evaluate", "end"]
PHASES: tuple[Phase, ...] = ("start", "data", "forward", "backward", "reduce", "optimizer", "save", "evaluate", "end")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send", "receive", "barrier", "all_to_all")
# In words for people; a dtype that is not here is logged as "other".
DTYPES = ("other", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")
_CODES = {name: code for code, name in enumerate(OPERATIONS)}
RING = 1024  # operations of each axis that are kept
AXES = 7

# One struct for each group of fields that is written at once. "=" has no padding; all fields are 8 bytes wide.
_INTEGER = struct.Struct("=q")
_BEAT = struct.Struct("=qqd")  # step, phase, when it began
_WAIT = struct.Struct("=qqqd")  # axis + 1 (0: waits for nothing), first and last position in its ring, since
_AXIS = struct.Struct("=16sqqq")  # name, lowest rank, size, this rank's position
_COUNTS = struct.Struct("=qq")  # collectives so far, records so far: one write, as it costs part of each operation
_RECORD = struct.Struct("=qqqqdd")  # number, operation and dtype and site and peer, bytes, step, started, ended
_ENDED = struct.Struct("=d")
_AT_BEAT = 0
_AT_WAIT = 24
_AT_PID = 56
_AT_CHECKPOINT = 64
_AT_FLAGS = 72
_AT_ERROR = 128
_FLAGS = ("armed", "owns", "done", "failed")  # see `Flight.raise_flag`
_ERROR_BYTES = 1 << 16
_SITES = 256
_SITE_BYTES = 96
_AT_SITES = _AT_ERROR + 8 + _ERROR_BYTES
_AT_AXES = _AT_SITES + 8 + _SITES * _SITE_BYTES
_AT_COUNTS = 48  # behind _AXIS
_AXIS_BYTES = 64 + RING * _RECORD.size  # 64: both of them
BYTES = -(-(_AT_AXES + AXES * _AXIS_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE  # of address space; untouched pages cost 0

_PREFIX = "megapar-flight-"


Memory = mmap.mmap | memoryview


class AxisLog:
    """The operations of one rank on one axis. Only the thread that starts operations may call its methods."""

    def __init__(self, flight: "Flight", index: int):
        self._flight = flight
        self._index = index
        self._at = _AT_AXES + index * _AXIS_BYTES
        self._count = self._collectives = 0
        self._sent: dict[tuple[int, int], int] = {}  # messages so far, by operation and peer

    def begin(
        self, operation: str, sent: int, dtype: object, peer: int = -1, *, module: str = "", depth: int = 2
    ) -> int:
        """Log an operation that is about to start; returns its position. `peer` is a message's other end on the axis.

        The call site is the first caller outside the file `module`, `depth` calls up at least, 2 being who calls this.
        """
        flight = self._flight
        code = _CODES[operation]
        if peer < 0:
            self._collectives = number = self._collectives + 1
        else:
            number = self._sent.get((code, peer), 0) + 1
            self._sent[code, peer] = number
        dtype_code = flight.dtypes.get(dtype)
        if dtype_code is None:
            dtype_code = flight.dtypes[dtype] = _dtype_code(dtype)
        what = code | dtype_code << 8 | flight.site(module, depth) << 16 | (peer + 1) << 32
        position = self._count
        record = self._at + 64 + position % RING * _RECORD.size
        _RECORD.pack_into(flight.memory, record, number, what, sent, flight.step, time.time(), 0.0)
        # The counts come last: who reads them finds the record whole.
        self._count = position + 1
        _COUNTS.pack_into(flight.memory, self._at + _AT_COUNTS, self._collectives, self._count)
        return position

    def wait(self, first: int, last: int) -> None:
        """From now on the process waits for the operations from `first` to `last`."""
        _WAIT.pack_into(self._flight.memory, _AT_WAIT, self._index + 1, first, last, time.time())

    def end(self, first: int, last: int) -> None:
        """They have ended."""
        memory = self._flight.memory
        now = time.time()
        for position in range(first, last + 1):
            if position >= self._count - RING:  # else its place holds a newer operation
                _ENDED.pack_into(memory, self._at + 64 + position % RING * _RECORD.size + 40, now)

    def fail(self, reason: str) -> str:
        """An operation failed; returns `reason`, with the cause where a monitor knows it."""
        return self._flight.explain(reason)


class Flight:
    """One rank's flight log. `memory` holds BYTES bytes and is zero; without one the log is private to this process."""

    def __init__(self, memory: Memory | None = None):
        self.memory: Memory = mmap.mmap(-1, BYTES) if memory is None else memory
        self.step = 0  # the step under way, counted from 1; 0 before the first
        self.last_checkpoint = -1  # the step of the newest complete one
        # Set by who can compare the logs of several ranks: what a failed operation says, out of what its backend said.
        self.explain: Callable[[str], str] = lambda reason: reason
        self.phase: Phase = "start"
        self._axes = 0
        self.dtypes: dict[object, int] = {}
        # Keyed by the code object's id, as its hash takes microseconds; the code itself is kept so that it lives on.
        self._sites: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._code = {name: code for code, name in enumerate(PHASES)}
        _INTEGER.pack_into(self.memory, _AT_PID, os.getpid())
        _INTEGER.pack_into(self.memory, _AT_CHECKPOINT, -1)
        self.enter("start")

    def enter(self, phase: Phase) -> None:
        """The rank begins `phase` of the current step."""
        self.phase = phase
        _BEAT.pack_into(self.memory, _AT_BEAT, self.step, self._code[phase], time.time())

    def checkpoint(self, step: int) -> None:
        """The newest checkpoint that is complete is that of `step`."""
        self.last_checkpoint = step
        _INTEGER.pack_into(self.memory, _AT_CHECKPOINT, step)

    def raise_flag(self, name: Literal["armed", "owns", "done", "failed"]) -> None:
        """armed: a request to stop is followed at a step's end. owns: this job holds the run folder. done: this rank's
        part of the run is complete. failed: an operation has failed; nothing that is written later counts."""
        self.memory[_AT_FLAGS + _FLAGS.index(name)] = 1

    def has_flag(self, name: Literal["armed", "owns", "done", "failed"]) -> bool:
        """Whether it was raised."""
        return has_flag(self.memory, name)

    def post_error(self, facts: dict[str, Any]) -> None:
        """Leave the error that ends this rank, as JSON types, for the launcher; the first one stays."""
        text = json.dumps(facts).encode()
        if len(text) > _ERROR_BYTES:  # a table of differences, say
            text = json.dumps(facts | {"message": facts["message"][: _ERROR_BYTES // 8]}).encode()
        if not _INTEGER.unpack_from(self.memory, _AT_ERROR)[0]:
            self.memory[_AT_ERROR + 8 : _AT_ERROR + 8 + len(text)] = text
            _INTEGER.pack_into(self.memory, _AT_ERROR, len(text))

    def axis(self, name: str, first: int, size: int, position: int) -> AxisLog:
        """The log of an axis: its lowest rank, its size, and this rank's position on it."""
        log = AxisLog(self, self._axes)
        _AXIS.pack_into(self.memory, _AT_AXES + self._axes * _AXIS_BYTES, name.encode(), first, size, position)
        self._axes += 1
        return log

    def site(self, module: str, depth: int) -> int:
        """The number of the line that called into `module`, a file; it is `depth` calls up at least."""
        # Each frame that Python hands out costs microseconds, so the walk starts where it nearly always ends.
        frame = sys._getframe(depth)
        while frame.f_code.co_filename == module and frame.f_back is not None:
            frame = frame.f_back
        code = frame.f_code
        known = self._sites.get((id(code), frame.f_lasti))
        if known is not None:
            return known[0]
        number = min(len(self._sites) + 1, _SITES - 1)
        self._sites[id(code), frame.f_lasti] = number, code
        text = f"{'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno}".encode()[-_SITE_BYTES:]
        at = _AT_SITES + 8 + number * _SITE_BYTES
        self.memory[at : at + _SITE_BYTES] = text.ljust(_SITE_BYTES, b"\0")
        return number


def _dtype_code(dtype: object) -> int:
    """The number of torch's `dtype` in DTYPES."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES.index(name) if name in DTYPES else 0


def read(memory: Memory, last: int) -> dict[str, Any]:
    """A flight log as JSON types, with the newest `last` operations of each axis.

    Its process may be writing meanwhile: one record may then be of an older operation than its neighbors.
    """
    step, phase, since = _BEAT.unpack_from(memory, _AT_BEAT)
    length = _integer(memory, _AT_ERROR)
    waits = list(_WAIT.unpack_from(memory, _AT_WAIT))
    axes = [_read_axis(memory, index, last) for index in range(AXES)]
    waiting: dict[str, Any] | None = None
    if waits[0]:
        at = _AT_AXES + (waits[0] - 1) * _AXIS_BYTES
        records = [_read_record(memory, at, position) for position in range(waits[1], waits[2] + 1)]
        records = [record for record in records if not record["ended"]]
        if records:  # else it has gone on
            waiting = {"axis": _text(memory[at : at + 16]), "records": records, "since": waits[3]}
    return {
        "pid": _integer(memory, _AT_PID),
        "step": step,
        "phase": PHASES[phase],
        "since": since,
        "checkpoint": _integer(memory, _AT_CHECKPOINT),
        "flags": [name for i, name in enumerate(_FLAGS) if bytes(memory[_AT_FLAGS + i : _AT_FLAGS + i + 1]) == b"\1"],
        "error": json.loads(bytes(memory[_AT_ERROR + 8 : _AT_ERROR + 8 + length])) if length else None,
        "waiting": waiting,
        "axes": [axis for axis in axes if axis["size"] > 1],
    }


def has_flag(memory: Memory, name: str) -> bool:
    """Whether a log's process has raised this flag."""
    at = _AT_FLAGS + _FLAGS.index(name)
    return bytes(memory[at : at + 1]) == b"\1"


def _integer(memory: Memory, at: int) -> int:
    return int(_INTEGER.unpack_from(memory, at)[0])


def _text(raw: bytes | memoryview) -> str:
    return bytes(raw).rstrip(b"\0").decode(errors="replace")


def _read_axis(memory: Memory, index: int, last: int) -> dict[str, Any]:
    at = _AT_AXES + index * _AXIS_BYTES
    name, first, size, position = _AXIS.unpack_from(memory, at)
    collectives, count = _COUNTS.unpack_from(memory, at + _AT_COUNTS)
    records = [_read_record(memory, at, place) for place in range(max(0, count - min(last, RING)), count)]
    facts = {"name": _text(name), "first": first, "size": size, "position": position}
    return {**facts, "collectives": collectives, "records": records}


def _read_record(memory: Memory, at: int, position: int) -> dict[str, Any]:
    place = at + 64 + position % RING * _RECORD.size
    number, what, sent, step, started, ended = _RECORD.unpack_from(memory, place)
    site = _AT_SITES + 8 + (what >> 16 & 0xFFFF) * _SITE_BYTES
    return {
        "position": position,
        "number": number,
        "operation": OPERATIONS[what & 0xFF],
        "dtype": DTYPES[what >> 8 & 0xFF],
        "site": _text(memory[site : site + _SITE_BYTES]),
        "peer": (what >> 32) - 1,
        "bytes": sent,
        "step": step,
        "started": started,
        "ended": ended,
    }


class Board:
    """The flight logs of all ranks that a launcher starts: memory without a name, which is gone with its last user."""

    def __init__(self, ranks: int):
        self._memory = memoryview(mmap.mmap(-1, ranks * BYTES))
        self.ranks = ranks

    def __getitem__(self, rank: int) -> memoryview:
        return self._memory[rank * BYTES : (rank + 1) * BYTES]


class FlightFile:
    """A rank's flight log as a file that others on this host can read by its process number, also after its end.

    The kernel gives its lock up with the process. So a later start can tell the files of dead processes, and removes
    them.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder or _shared_folder()
        self._path = self._folder / f"{_PREFIX}{os.getpid()}"
        self.sweep()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.ftruncate(self._descriptor, BYTES)
        self.memory = mmap.mmap(self._descriptor, BYTES)

    def sweep(self) -> None:
        """Remove the files of processes that have ended."""
        for path in self._folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # in use, of another user, or removed by somebody else meanwhile
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    def peer(self, pid: int) -> mmap.mmap | None:
        """The log of another process of this host; None if there is none."""
        try:
            with (self._folder / f"{_PREFIX}{pid}").open("rb") as file:
                return mmap.mmap(file.fileno(), BYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # another container's process, or its log is being made
            return None

    def claim(self, pid: int, what: str = "") -> bool:
        """Whether this is the first call for `what`, some letters, on this host by a rank of the job whose lowest rank
        here is process `pid`."""
        try:
            os.close(os.open(self._folder / f"{_PREFIX}{pid}{what}.told", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def remove(self) -> None:
        """Remove this process's file: nobody needs the log of a rank that has succeeded."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _shared_folder() -> Path:
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
