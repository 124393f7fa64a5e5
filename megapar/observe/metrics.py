"""Measures training steps and reports them: to metrics.jsonl, to the console and, by option, to sinks.

Rank 0 writes. MFU is model FLOPs / (step seconds * devices * peak FLOP/s of one device). Model FLOPs are those of
forward and backward without recomputation. Causal attention counts half (arXiv 2205.05198, section 6), and a frozen
weight no gradient of its own. The models document how they count.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any

from rich.console import Console
from torch import Tensor

from megapar.base.errors import reason_of, storing
from megapar.config.messages import counted
from megapar.config.options import LogConfig
from megapar.context_parallel.deal import attended_pairs
from megapar.declare.batch import MicroBatch
from megapar.declare.context import ParallelContext
from megapar.observe import fp8_growth
from megapar.observe.sinks.base import CLOSING_SECONDS, RunInfo, Sender
from megapar.observe.sinks.chosen import chosen, tracks
from megapar.observe.sinks.curve import curve_of
from megapar.observe.terminal import View
from megapar.step.state import StepResult
from megapar.system import device
from megapar.system.atomic_files import as_json, replace_file
from megapar.system.regular_files import open_regular, read_regular
from megapar.system.say import say, tell

PATIENCE_SECONDS = 10.0  # how long a run that failed waits until its last lines are written


@dataclass(frozen=True)
class Measured:
    """What is known of a queued step: its `start` in seconds of time.perf_counter, and its `end` on the device."""

    start: float
    end: device.Moment
    data_seconds: float
    comm_bytes: dict[str, int]
    attention_load: float | None


@dataclass
class Meter:
    """Measures steps: their wall time, their wait for data, and the bytes they sent by axis.

    For each step call `start`, `waited` and `queued`, and `line` when its result is known. The next step may be queued
    before.
    """

    ctx: ParallelContext
    flops_per_token: int
    peak_tflops: float
    _sent: dict[str, int] = field(default_factory=dict)
    _start: float = 0.0
    _data_seconds: float = 0.0
    _attention_load: float | None = None
    _end: float = 0.0  # of the step before, on the device

    def __post_init__(self) -> None:
        self._clock = device.DeviceClock(self.ctx.device)

    def start(self) -> None:
        """Begin to measure the time and the traffic of the next step."""
        self._sent = self.ctx.traffic()
        self._start = time.perf_counter()

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Leave the time and the traffic of a block out of the step's."""
        start, sent = time.perf_counter(), self.ctx.traffic()
        yield
        self._start += time.perf_counter() - start
        self._sent = {axis: self._sent.get(axis, 0) + n - sent.get(axis, 0) for axis, n in self.ctx.traffic().items()}

    def waited(self, next_step: Callable[[], list[MicroBatch]]) -> list[MicroBatch]:
        """Call `next_step` and return its result. Its time is the step's `data_seconds`."""
        start = time.perf_counter()
        batches = next_step()
        self._data_seconds = time.perf_counter() - start
        if self.ctx.world.first:  # which writes the lines
            self._attention_load = attention_load(batches, self.ctx.cp.size)
        return batches

    def queued(self) -> Measured:
        """Call it when the step is queued. `comm_bytes` are the bytes sent by this rank, with ring algorithms."""
        sent = {axis: n - self._sent.get(axis, 0) for axis, n in self.ctx.traffic().items()}
        return Measured(self._start, self._clock.moment(), self._data_seconds, sent, self._attention_load)

    def line(self, result: StepResult, measured: Measured) -> dict[str, Any]:
        """The step's line of metrics.jsonl. Call it when the result is known."""
        # Not the time when the host learns of the end: it may ask late, and of two steps at once.
        (end,) = self._clock.read([measured.end])
        # A step that was queued while the step before was computed begins when that one ends.
        seconds = end - max(measured.start, self._end)
        self._end = end
        tflops = self.flops_per_token * result.positions / seconds / self.ctx.world.size / 1e12
        line: dict[str, Any] = {
            "step": result.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": round(result.tokens),
            "consumed_samples": result.consumed_samples,
            "step_seconds": seconds,
            "data_seconds": measured.data_seconds,
            "tokens_per_second": result.positions / seconds,
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "peak_memory_bytes": device.peak_memory_bytes(self.ctx.device),
            "comm_bytes": measured.comm_bytes,
        }
        if result.loss_scale.dynamic:
            line["loss_scale"] = result.loss_scale.scale
        if measured.attention_load is not None:
            line["attention_load_max"] = measured.attention_load
        if result.largest_logit is not None:
            line["attention_logit_max"] = result.largest_logit
        if result.fp8:
            line |= fp8_growth.line_of(result.fp8)
        if result.losses:
            line["losses"] = dict(result.losses)
        for name, counts in result.tallies.items():
            line |= tally_load(name, counts)
        return line


def attention_load(batches: Sequence[MicroBatch], cp: int) -> float | None:
    """How many times the mean number of pairs of a query and a key the context-parallel rank with the most attends.

    The ranks wait for it in each micro-batch. None if all have the same number: without documents, or with one rank.
    """
    packed = [batch for batch in batches if batch.starts_on_host is not None]
    if cp == 1 or not packed:
        return None
    largest = 0
    total = 0
    for batch in packed:
        pairs = [attended_pairs(batch.sample_length, cp, rank, batch.starts_on_host) for rank in range(cp)]
        largest += max(pairs)
        total += sum(pairs)
    return cp * largest / total


_COUNTS = "_counts"  # the end of the keys of tables in metrics.jsonl


def tally_load(name: str, counts: Tensor) -> dict[str, Any]:
    """What a line of metrics.jsonl says of a tally, such as "expert": the tokens of each expert, int64 [layers, n].

    `expert_load` is, by the number of the layer, how many times the mean number of tokens its fullest expert got.
    `expert_load_max` is the largest of them. `expert_counts` are the numbers of tokens, by layer. Layers that counted
    nothing are left out.
    """
    by_layer = {str(layer): row for layer, row in enumerate(counts.tolist()) if any(row)}
    load = {layer: max(row) * len(row) / sum(row) for layer, row in by_layer.items()}
    largest = max(load.values(), default=1.0)
    return {f"{name}_load_max": largest, f"{name}_load": load, f"{name}{_COUNTS}": by_layer}


def log_line(line: dict[str, Any], steps: int, eta_seconds: float | None) -> str:
    """Format one step for the console; infinite values are printed as inf, others without a number as nan.

    `eta_seconds` is None at the first step, which is slower than the others.
    """
    mfu = ""
    if line["mfu"] is not None:  # None on a device whose peak is not known
        mfu = f" | mfu {line['mfu']:.1%}"
    losses = "".join(f" | {name} {value:.4f}" for name, value in line.get("losses", {}).items())
    load = ""
    for name in (key.removesuffix(_COUNTS) for key in line if key.endswith(_COUNTS)):
        load += f"fullest {name} {line[f'{name}_load_max']:.2f}x | "
    eta = ""
    if eta_seconds is not None:
        minutes, seconds = divmod(int(eta_seconds), 60)
        eta = f" | eta {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    return (
        f"step {line['step']:>{len(str(steps))}}/{steps} | loss {line['loss']:.4f}{losses} | "
        f"grad norm {line['grad_norm']:.3f} | lr {line['lr']:.2e} | {line['tokens_per_second']:,.0f} tokens/s{mfu} | "
        f"{load}{line['peak_memory_bytes'] / 2**20:,.0f} MiB{eta}"
    )


class LineWriter:
    """Writes lines to a file in their order, in a thread of its own.

    A full disk loses lines. The first loss prints a message. The run goes on without the line; only an unsaved
    last checkpoint ends it.
    """

    def __init__(self, path: Path):
        """Raises OSError if the file cannot be opened."""
        self.path = path
        # The folder is held, not its name, which may come to mean the folder of another run.
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._file = self._open()
        self._whole = os.fstat(self._file).st_size  # bytes of the lines that are complete in the file
        self._lost = False  # whether a line was lost, and the message printed
        self._waiting: SimpleQueue[tuple[int, str] | Event | None] = SimpleQueue()
        # A disk that stalls must not stall training, so a thread writes.
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        return open_regular(self.path.name, flags, folder=self._folder)

    def write(self, step: int, text: str) -> None:
        """Queue the line of a step and return at once."""
        self._waiting.put((step, text + "\n"))

    def flush(self) -> None:
        """Wait until every queued line has been written or lost."""
        written = Event()
        self._waiting.put(written)
        written.wait()

    def close(self, patience_seconds: float | None = None) -> None:
        """Write the queued lines and end the thread; None waits without limit."""
        self._waiting.put(None)
        self._thread.join(patience_seconds)

    def _run(self) -> None:
        """The thread: a tuple is a line to write, an Event is set when its turn comes, None ends the thread."""
        while (item := self._waiting.get()) is not None:
            if isinstance(item, Event):
                item.set()
                continue
            step, text = item
            try:
                if self._is_elsewhere():
                    self._open_again(step)
                self._append(text.encode())
            except (OSError, MemoryError) as error:
                if not self._lost:
                    tell(f"{self.path}: step {step} not written ({reason_of(error)}); the run goes on")
                self._lost = True
        for descriptor in (self._file, self._folder):
            with suppress(OSError):
                os.close(descriptor)

    def _is_elsewhere(self) -> bool:
        """Whether the file was removed or renamed: nobody would find what is written to it."""
        held = os.fstat(self._file)
        try:
            named = os.stat(self.path.name, dir_fd=self._folder)
        except FileNotFoundError:
            return True
        return (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino)

    def _open_again(self, step: int) -> None:
        """Go on in a new file, or in whatever file has the name by now."""
        opened = self._open()
        os.close(self._file)
        self._file = opened
        self._whole = os.fstat(opened).st_size
        tell(f"{self.path}: was removed or replaced; the lines from step {step} on are in the file of that name now")

    def _append(self, line: bytes) -> None:
        # A full disk may have taken a part of an earlier line. That part must go, or this line would continue it. If
        # somebody has shortened the file, its end is where it is now: ftruncate would fill the gap with zeros.
        self._whole = min(self._whole, os.fstat(self._file).st_size)
        os.ftruncate(self._file, self._whole)
        left = line
        while left:  # os.write may take only a part
            left = left[os.write(self._file, left) :]
        self._whole += len(line)


class Reporter:
    """Writes the metrics of a run. On rank 0 `speaks` is True; on the other ranks every method does nothing.

    It is a context manager: leaving it writes the queued lines. `run` says which run it is, with its first step, and
    `lineage` which start of the run. Raises StorageError if a file cannot be opened.
    """

    def __init__(self, options: LogConfig, run: RunInfo, lineage: Sequence[tuple[str, int]] = (), *, speaks: bool):
        self._options = options
        self._steps = run.steps
        self._speaks = speaks
        self._first_step = run.first_step
        self._second = 0.0  # when the second step began, on time.monotonic's clock
        self._view: View | None = None
        if not speaks:
            return
        self.console = Console(soft_wrap=True, highlight=False)
        path = run.run_dir / "metrics.jsonl"
        start = lineage[-1][0] if lineage else "start"
        with storing(path):
            cut = cut_back(path, run.first_step, run.run_dir / f"metrics.abandoned-{start}.jsonl")
            self._lines = LineWriter(path)
        if tracks(options):
            curve, replays = curve_of(run.run_dir, lineage, cut=cut)
            run = replace(run, curve=curve, replays=replays)
        self._senders = [Sender(sink) for sink in chosen(options, run)]
        if self.console.is_terminal and options.view == "live":
            self._view = View(self.console, run.steps, run.first_step)
            self._view.start()

    def say(self, text: str) -> None:
        """Print a line, above the view if there is one."""
        if self._view:
            self.console.print(text, markup=False)
        elif self._speaks:
            say(text)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, and hand it to the sinks. A full disk loses the line, not the run."""
        if not self._speaks:
            return
        self._lines.write(line["step"], as_json(line))
        for sender in self._senders:
            sender.put(line)

    def step(self, line: dict[str, Any]) -> None:
        """Record a training step. Log it if it is the first or last, a multiple of `log.every`, or not finite.

        Tables of counts are recorded for logged steps alone: a large mixture has thousands of experts.
        """
        done = line["step"] - self._first_step
        step = line["step"]
        finite = abs(line["loss"]) + abs(line["grad_norm"]) < float("inf")
        is_logged = done == 1 or step == self._steps or step % self._options.every == 0 or not finite
        if not is_logged:
            line = {key: value for key, value in line.items() if not key.endswith(_COUNTS)}
        self.write(line)
        if not self._speaks:
            return
        eta = None
        # The first step compiles and allocates, so the rate is taken from the second step on.
        if done > 1:
            eta = (time.monotonic() - self._second) / (done - 1) * (self._steps - step)
        if done == 1:
            self._second = time.monotonic()
        if self._view:
            self._view.step(line, eta)
        if is_logged:
            self.say(log_line(line, self._steps, eta))

    def flush(self) -> None:
        """Wait until every line is in metrics.jsonl, or lost to a full disk."""
        if self._speaks:
            self._lines.flush()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._speaks:
            return
        if self._view:
            self._view.stop()
        for sender in self._senders:
            sender.close()
        self._lines.close(None if error is None else PATIENCE_SECONDS)
        end = time.monotonic() + CLOSING_SECONDS
        for sender in self._senders:
            sender.wait(max(0.0, end - time.monotonic()))


def cut_back(path: Path, last_step: int, abandoned: Path) -> bool:
    """Move the lines of steps beyond `last_step` from metrics.jsonl to the file `abandoned`. Returns whether any were.

    A resumed run then has one curve. Lines without a step are moved too, with a warning. A full disk or a
    crash may have cut the last line short. It is moved without a warning.
    """
    kept: list[bytes] = []
    moved: list[bytes] = []
    foreign = 0
    lines: list[bytes] = []
    if os.path.lexists(path):
        lines = read_regular(path, None, os.O_RDONLY | os.O_NOFOLLOW).splitlines(keepends=True)
    for line in lines:
        whole = line.endswith(b"\n")
        step = _step(line)
        foreign += whole and step is None
        if whole and step is not None and step <= last_step:
            kept.append(line)
        else:
            moved.append(line)
    if foreign:
        text = counted(foreign, "line that is no metrics of a step is", "lines that are no metrics of a step are")
        logging.getLogger(__name__).warning("%s: %s kept out of it, in %s", path, text, abandoned)
    if moved:
        # In this order a kill between the two writes leaves the lines in both files, and loses none.
        replace_file(abandoned, b"".join(moved))
        replace_file(path, b"".join(kept))
    return bool(moved)


def _step(text: bytes) -> int | None:
    """The step in a line of metrics.jsonl; None if the line has none."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    step = line.get("step")
    return step if type(step) is int else None  # True and False are instances of int, but no steps
