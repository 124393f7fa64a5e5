"""Writes what each rank did in the steps of log.profile to run_dir/profile. `megapar_tools.trace.profile` reads it.

Each rank has a file of lines of JSON. The first line of a start describes the rank, and how the clocks of the ranks
compare. Then comes a line for each step (`megapar.system.recorder.RecordedStep`).
"""

import time
from collections import deque
from typing import Any

from megapar.base.errors import StorageError, storing
from megapar.comm import collectives
from megapar.config.derive import profiled_steps
from megapar.declare.agreement import on_all_ranks
from megapar.observe.metrics import PATIENCE_SECONDS, LineWriter
from megapar.observe.observer import Observed, Observer
from megapar.system import device
from megapar.system.atomic_files import as_json
from megapar.system.recorder import RecordedStep, Recorder

_MEETINGS = 16  # of all ranks, to compare their clocks: the shortest one bounds the error


class Profiler(Observer):
    """Records the steps of log.profile on this rank.

    The constructor is a collective. Raises StorageError if a rank cannot write its file. A disk that is full later
    loses steps, not the run.
    """

    def __init__(self, seen: Observed):
        state = seen.state
        self._ctx = state.ctx
        self._start = state.lineage[-1][0] if state.lineage else "start"
        steps = profiled_steps(state.config.log.profile)
        self._steps = range(max(steps.start, state.step + 1), steps.stop)
        if steps and not self._steps:
            seen.say(f"log.profile={state.config.log.profile}: step {state.step} is done; nothing is profiled")
        self._clock: device.DeviceClock | None = None
        self._recorder: Recorder | None = None  # of the running step
        self._recorded: deque[RecordedStep] = deque()  # their moments may be ahead of a GPU
        self._lines: LineWriter | None = None
        if self._steps:
            folder = seen.run_dir / "profile"

            def open_file() -> LineWriter:
                with storing(folder):
                    folder.mkdir(exist_ok=True)
                    return LineWriter(folder / f"rank_{self._ctx.world.rank:05}.jsonl")

            self._lines = on_all_ranks(open_file, self._ctx, StorageError, "profile not written")

    def begin_step(self, number: int) -> None:
        """Begin to record the step, if log.profile names it. The first of these steps is a collective."""
        if number not in self._steps:
            return
        if self._clock is None:
            self._write(number, self._header())
            self._clock = device.DeviceClock(self._ctx.device)
        self._recorder = self._ctx.flight.recorder = Recorder(self._clock, number)

    def end_step(self, number: int) -> None:
        if self._recorder is None:
            return
        self._recorded.append(self._recorder.finish())
        self._recorder = self._ctx.flight.recorder = None
        # Reading the moments of a step waits for the device. While it computes one step, the step before is read.
        behind = device.is_asynchronous(self._ctx.device) and number + 1 in self._steps
        while len(self._recorded) > int(behind):
            self._write_oldest()

    def _write_oldest(self) -> None:
        assert self._clock is not None
        recorded = self._recorded.popleft()
        self._write(recorded.step, recorded.as_json(self._clock))

    def _write(self, step: int, line: dict[str, Any]) -> None:
        assert self._lines is not None
        self._lines.write(step, as_json(line))

    def close(self, error: BaseException | None) -> None:
        """Write what is left of the file."""
        if self._recorder is not None:
            self._ctx.flight.recorder = None
        if self._lines is not None:
            self._lines.close(None if error is None else PATIENCE_SECONDS)

    def _header(self) -> dict[str, Any]:
        """What the reader must know of this rank. A collective.

        All ranks meet several times, and each notes when it came and when it left. No rank leaves before the last one
        has come. So each meeting bounds the difference of two clocks from both sides.
        """
        ctx = self._ctx
        axes = {
            axis.name: {"ranks": axis.ranks, "transport": axis.transport.name} for axis in ctx.axes if axis.size > 1
        }
        meetings = []
        for _ in range(_MEETINGS):
            came = time.perf_counter()
            collectives.barrier(ctx.world)
            device.synchronize(ctx.device)
            meetings.append((came, time.perf_counter()))
        return {
            "start": self._start,
            "rank": ctx.world.rank,
            "world": ctx.world.size,
            "pipeline_rank": ctx.pp.rank,
            "device": device.describe(ctx.device),
            "boot": device.boot_id(),
            "axes": axes,
            "meetings": meetings,
        }
