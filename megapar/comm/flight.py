"""The flight log: the current work of each rank and the operations it has started, in memory that outlives its process.

A rank writes its step, its phase and its newest operations on each axis into a memory map. That takes no lock, no
system call and no wait for the device. Other processes sharing the map can read it at any time, also after the rank was
stopped, killed or aborted. One of these is the local launcher: it made the maps before it started its ranks. Other
ranks on the same host open a file (megapar.comm.flight_file).

Collectives of an axis have the same number on all its ranks. Messages are numbered for each link and direction: the
k-th message sent to a peer is the k-th it receives from here. So a comparison of two logs shows the missing rank, or
the first operation in which two ranks differ.
"""

import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from megapar.system.recorder import Recorder

Phase = Literal["start", "data", "forward", "backward", "reduce", "optimizer", "save", "evaluate", "end", "device"]
PHASES: tuple[Phase, ...] = (
    "start",
    "data",
    "forward",
    "backward",
    "reduce",
    "optimizer",
    "save",
    "evaluate",
    "end",
    "device",
)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send", "receive", "barrier", "all_to_all")
# Names for people. A dtype that is not in the list is logged as "other".
DTYPES = ("other", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")
_CODES = {name: code for code, name in enumerate(OPERATIONS)}
RING = 1024  # number of operations of each axis that are kept
AXES = 14  # as many as a ParallelContext has at most

# One struct for each group of fields that is written at once. "=" means no padding. All numbers are 8 bytes wide.
_INTEGER = struct.Struct("=q")
_BEAT = struct.Struct("=qqd")  # step, phase, time at which the phase began
_WAIT = struct.Struct("=qqqd")  # axis + 1 (0: no wait so far), first and last position in its ring, begin
_AXIS = struct.Struct("=16sqqq")  # name, lowest rank, size, this rank's position
_COUNTS = struct.Struct("=qq")  # collectives so far, records so far: in one write, as each operation pays for it
_RECORD = struct.Struct("=qqqqdd")  # number, bit field (see `begin`), bytes, step, started, ended
_ENDED = struct.Struct("=d")
# Byte offsets of the fields in the memory.
_AT_BEAT = 0
_AT_WAIT = 24
_AT_PID = 56
_AT_CHECKPOINT = 64
_AT_FLAGS = 72
_AT_ERROR = 128
_FLAGS = ("armed", "owns", "done", "failed")  # see `Flight.raise_flag`
_ERROR_BYTES = 1 << 16  # for the JSON text of the error that ends the rank
_SITES = 256  # entries for call sites; all that come after share the last entry
_SITE_BYTES = 96  # for the text of one call site
_AT_SITES = _AT_ERROR + 8 + _ERROR_BYTES
_AT_AXES = _AT_SITES + 8 + _SITES * _SITE_BYTES
_AT_COUNTS = 48  # after _AXIS
_AXIS_BYTES = 64 + RING * _RECORD.size  # 64: _AXIS and _COUNTS
# Address space of one log, in whole pages. Pages that are never written take no memory.
BYTES = -(-(_AT_AXES + AXES * _AXIS_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

Memory = mmap.mmap | memoryview
_UNRECORDED: AbstractContextManager[None] = nullcontext()  # has no state, so all may share it


class AxisLog:
    """The operations of one rank on one axis. Only the thread starting operations may call its methods."""

    def __init__(self, flight: "Flight", index: int, name: str):
        self._flight = flight
        self._name = name
        self._index = index
        self._at = _AT_AXES + index * _AXIS_BYTES
        self._count = self._collectives = 0
        self._sent: dict[tuple[int, int], int] = {}  # number of messages so far, by operation and peer

    def begin(
        self, operation: str, sent: int, dtype: object, peer: int = -1, *, module: str = "", depth: int = 2
    ) -> int:
        """Log an operation before it starts. Returns its position in the log.

        `sent` are its bytes. `peer` is the other end of a message on the axis, -1 for a collective. The logged call
        site is the first caller outside of the file `module`. The search starts `depth` frames above `Flight.site`: 2
        is the caller of this method.
        """
        flight = self._flight
        code = _CODES[operation]
        if peer < 0:
            self._collectives = number = self._collectives + 1
        else:
            number = self._sent.get((code, peer), 0) + 1
            self._sent[code, peer] = number
        # Codes are remembered: making the text of a dtype takes longer than a look-up.
        dtype_code = flight.dtypes.get(dtype)
        if dtype_code is None:
            dtype_code = flight.dtypes[dtype] = _dtype_code(dtype)
        # Four small numbers in one integer, so that a record has fewer fields to pack. `_read_record` unpacks them.
        what = code | dtype_code << 8 | flight.site(module, depth) << 16 | (peer + 1) << 32
        position = self._count
        record = self._at + 64 + position % RING * _RECORD.size
        _RECORD.pack_into(flight.memory, record, number, what, sent, flight.step, time.time(), 0.0)
        # The counts are written last, so that a reader finds each record that they count complete.
        self._count = position + 1
        _COUNTS.pack_into(flight.memory, self._at + _AT_COUNTS, self._collectives, self._count)
        if flight.recorder is not None:
            flight.recorder.begin(self._name, position, operation, number, peer, sent)
        return position

    def started(self, first: int, last: int) -> None:
        """Note that the newest operations, `first` to `last`, have been handed to their transport."""
        if self._flight.recorder is not None:
            self._flight.recorder.started(self._name, first, last)

    def wait(self, first: int, last: int) -> None:
        """Log the start of the wait for the operations `first` to `last`."""
        _WAIT.pack_into(self._flight.memory, _AT_WAIT, self._index + 1, first, last, time.time())
        if self._flight.recorder is not None:
            self._flight.recorder.wait(self._name, first, last)

    def end(self, first: int, last: int) -> None:
        """Log the end of the operations `first` to `last`."""
        if self._flight.recorder is not None:
            self._flight.recorder.end()
        memory = self._flight.memory
        now = time.time()
        for position in range(first, last + 1):
            if position >= self._count - RING:  # else a newer operation has overwritten the record
                _ENDED.pack_into(memory, self._end_of(position), now)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Log, within the block, that the host waits for its device to finish the newest operation.

        Under NCCL the wait for the operation itself has returned at once, and the device waits.
        """
        newest = self._count - 1
        if newest < 0:
            yield
            return
        memory = self._flight.memory
        _ENDED.pack_into(memory, self._end_of(newest), 0.0)
        _WAIT.pack_into(memory, _AT_WAIT, self._index + 1, newest, newest, time.time())
        yield  # after an error the log goes on to say what was waited for
        _ENDED.pack_into(memory, self._end_of(newest), time.time())

    def _end_of(self, position: int) -> int:
        """The place of the time at which an operation ended."""
        return self._at + 64 + position % RING * _RECORD.size + 40

    def fail(self, reason: str) -> str:
        """The message of a failed operation: `reason`, with the cause if a monitor knows it."""
        return self._flight.explain(reason)


class Flight:
    """The flight log of one rank.

    `memory` has BYTES bytes, all zero. Without it the log is in private memory of this process.
    """

    def __init__(self, memory: Memory | None = None):
        self.memory: Memory = mmap.mmap(-1, BYTES) if memory is None else memory
        self.step = 0  # the step under way, counted from 1; 0 before the first
        self.last_checkpoint = -1  # step of the newest complete checkpoint, -1 for none
        # Turns the message of a backend into that of a failed operation. A monitor that can compare the logs of several
        # ranks replaces it.
        self.explain: Callable[[str], str] = lambda reason: reason
        self.phase: Phase = "start"
        self.recorder: Recorder | None = None  # while a step is recorded for log.profile
        self._axes = 0
        self.dtypes: dict[object, int] = {}
        # Keyed by the id of the code object, whose hash takes microseconds. The value holds the code object, because an
        # id is unique only while its object lives.
        self._sites: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._code = {name: code for code, name in enumerate(PHASES)}
        _INTEGER.pack_into(self.memory, _AT_PID, os.getpid())
        _INTEGER.pack_into(self.memory, _AT_CHECKPOINT, -1)
        self.enter("start")

    def enter(self, phase: Phase) -> None:
        """Log the start of `phase` in the current step."""
        self.phase = phase
        _BEAT.pack_into(self.memory, _AT_BEAT, self.step, self._code[phase], time.time())

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which the host waits for all that its device has to compute. Its phase is "device"."""
        phase = self.phase
        self.enter("device")
        yield
        self.enter(phase)

    def span(self, name: str, stage: int = -1, microbatch: int = -1) -> AbstractContextManager[None]:
        """A context whose time is recorded, if there is a recorder (`megapar.system.recorder.Span`)."""
        if self.recorder is None:
            return _UNRECORDED
        return self.recorder.span(name, (stage, microbatch))

    def checkpoint(self, step: int) -> None:
        """Log the checkpoint of `step` as complete."""
        self.last_checkpoint = step
        _INTEGER.pack_into(self.memory, _AT_CHECKPOINT, step)

    def raise_flag(self, name: Literal["armed", "owns", "done", "failed"]) -> None:
        """Set a flag of this rank.

        armed: the rank follows a request to stop at the end of a step. owns: this job holds the run folder. done: this
        rank's part of the run is complete. failed: an operation has failed, and what is logged later does not count.
        """
        self.memory[_AT_FLAGS + _FLAGS.index(name)] = 1

    def has_flag(self, name: Literal["armed", "owns", "done", "failed"]) -> bool:
        """Whether `raise_flag` was called with this name."""
        return has_flag(self.memory, name)

    def post_error(self, record: dict[str, Any]) -> None:
        """Store this rank's final error, as JSON types, for the launcher. Only the first call stores one."""
        text = json.dumps(record).encode()
        if len(text) > _ERROR_BYTES:
            # Such as a table of all ranks, which the launcher can make anew from their logs, or a very long message. A
            # character outside of Unicode's first plane takes 12 bytes in JSON, and the other facts are short.
            text = json.dumps(record | {"ranks": [], "message": record["message"][: _ERROR_BYTES // 16]}).encode()
        if not _INTEGER.unpack_from(self.memory, _AT_ERROR)[0]:
            # The length is written last: a reader that finds it finds the whole text.
            self.memory[_AT_ERROR + 8 : _AT_ERROR + 8 + len(text)] = text
            _INTEGER.pack_into(self.memory, _AT_ERROR, len(text))

    def axis(self, name: str, first: int, size: int, position: int) -> AxisLog:
        """Make the log of an axis. `first` is its lowest rank, `position` is this rank's position on it."""
        log = AxisLog(self, self._axes, name)
        _AXIS.pack_into(self.memory, _AT_AXES + self._axes * _AXIS_BYTES, name.encode(), first, size, position)
        self._axes += 1
        return log

    def site(self, module: str, depth: int) -> int:
        """The number of the source line with the call into the file `module`. The search starts `depth` frames up."""
        # Each frame object costs microseconds, so the search starts where it nearly always ends.
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
    """The index of torch's `dtype` in DTYPES, 0 if it is not there."""
    name = str(dtype).removeprefix("torch.")
    if name in DTYPES:
        return DTYPES.index(name)
    return 0


def read(memory: Memory, last: int) -> dict[str, Any]:
    """Read a flight log into JSON types, with the newest `last` operations of each axis.

    Its process may be writing at the same time. A record may then belong to an older operation than its neighbors.
    """
    step, phase, since = _BEAT.unpack_from(memory, _AT_BEAT)
    error = None
    length = _integer(memory, _AT_ERROR)
    if length:
        error = json.loads(bytes(memory[_AT_ERROR + 8 : _AT_ERROR + 8 + length]))
    waits = list(_WAIT.unpack_from(memory, _AT_WAIT))
    axes = [_read_axis(memory, index, last) for index in range(AXES)]
    waiting: dict[str, Any] | None = None
    if waits[0]:
        at = _AT_AXES + (waits[0] - 1) * _AXIS_BYTES
        records = [_read_record(memory, at, position) for position in range(waits[1], waits[2] + 1)]
        records = [record for record in records if not record["ended"]]
        if records:  # else the wait is over
            waiting = {"axis": _text(memory[at : at + 16]), "records": records, "since": waits[3]}
    return {
        "pid": _integer(memory, _AT_PID),
        "step": step,
        "phase": PHASES[phase],
        "since": since,
        "checkpoint": _integer(memory, _AT_CHECKPOINT),
        "flags": [name for name in _FLAGS if has_flag(memory, name)],
        "error": error,
        "waiting": waiting,
        "axes": [axis for axis in axes if axis["size"] > 1],
    }


def has_flag(memory: Memory, name: str) -> bool:
    """Whether the process of a log has raised this flag."""
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
    oldest = max(0, count - min(last, RING))
    return {
        "name": _text(name),
        "first": first,
        "size": size,
        "position": position,
        "collectives": collectives,
        "records": [_read_record(memory, at, number) for number in range(oldest, count)],
    }


def _read_record(memory: Memory, at: int, position: int) -> dict[str, Any]:
    record = at + 64 + position % RING * _RECORD.size
    number, what, sent, step, started, ended = _RECORD.unpack_from(memory, record)
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
    """The flight logs of all ranks of a launcher, by rank.

    The memory has no name in the file system, so the kernel frees it when the last process using it ends.
    """

    def __init__(self, ranks: int):
        self._memory = memoryview(mmap.mmap(-1, ranks * BYTES))
        self.ranks = ranks

    def __getitem__(self, rank: int) -> memoryview:
        return self._memory[rank * BYTES : (rank + 1) * BYTES]
