"""What a run says of itself: metrics.jsonl (always), TensorBoard (by option) and one log line, written by rank 0.

MFU is model FLOPs / (step seconds * devices * peak FLOP/s of one device). Model FLOPs are those of forward and backward
without recomputation, causal attention counted half (arXiv 2205.05198, section 6; the models say how they count).
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from megapar import device
from megapar.batch import MicroBatch
from megapar.config import LogConfig
from megapar.context import ParallelContext
from megapar.errors import say, storing, tell
from megapar.files import replace_file
from megapar.train.step import StepResult

_PATIENCE_SECONDS = 10.0  # for the last lines of a run that failed


@dataclass
class Meter:
    """Measures one step: wall time, and bytes sent by axis since the last step."""

    ctx: ParallelContext
    flops_per_token: int
    peak_tflops: float
    _sent: dict[str, int] = field(default_factory=dict)
    _start: float = 0.0
    _data_seconds: float = 0.0

    def start(self) -> None:
        self._sent = self.ctx.traffic()
        self._start = time.perf_counter()

    def waited(self, next_step: Callable[[], list[MicroBatch]]) -> list[MicroBatch]:
        """What `next_step` returns; the step waited for its data that long."""
        start = time.perf_counter()
        batches = next_step()
        self._data_seconds = time.perf_counter() - start
        return batches

    def stop(self, result: StepResult, step: int, consumed_samples: int) -> dict[str, Any]:
        """The step's line of metrics.jsonl. Bytes are those that this rank sent (ring algorithms)."""
        device.synchronize(self.ctx.device)
        seconds = time.perf_counter() - self._start
        sent = {axis: n - self._sent.get(axis, 0) for axis, n in self.ctx.traffic().items()}
        tflops = self.flops_per_token * result.tokens / seconds / self.ctx.world.size / 1e12
        return {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": int(result.tokens),
            "consumed_samples": consumed_samples,
            "step_seconds": seconds,
            "data_seconds": self._data_seconds,
            "tokens_per_second": result.tokens / seconds,
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "peak_memory_bytes": device.peak_memory_bytes(self.ctx.device),
            "comm_bytes": sent,
            **({"loss_scale": result.loss_scale.scale} if result.loss_scale.dynamic else {}),
        }


def log_line(line: dict[str, Any], steps: int, eta_seconds: float | None) -> str:
    """Format one step for the console; values that are not finite are printed as nan or inf.

    `eta_seconds` is None at the first step, which is slower than the others.
    """
    mfu = f" | mfu {line['mfu']:.1%}" if line["mfu"] is not None else ""
    minutes, seconds = divmod(int(eta_seconds or 0), 60)
    eta = "" if eta_seconds is None else f" | eta {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    return (
        f"step {line['step']:>{len(str(steps))}}/{steps} | loss {line['loss']:.4f} | "
        f"grad norm {line['grad_norm']:.3f} | lr {line['lr']:.2e} | {line['tokens_per_second']:,.0f} tokens/s{mfu} | "
        f"{line['peak_memory_bytes'] / 2**20:,.0f} MiB{eta}"
    )


class Lines:
    """Lines for a file, written in their order by a thread: a disk that stalls must not stall training.

    What a full disk does not take is lost, and told once: a run need not end for it. (A checkpoint that cannot be saved
    does end it.)
    """

    def __init__(self, path: Path):
        """Raises OSError if the file cannot be opened."""
        self.path = path
        self._file = path.open("ab", buffering=0)  # unbuffered: what fails is not tried again when the file is closed
        self._whole = path.stat().st_size  # bytes of whole lines
        self._lost = False  # whether the loss of a line was told
        self._waiting: SimpleQueue[tuple[int, str] | Event | None] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, step: int, text: str) -> None:
        """Have the line of a step written soon."""
        self._waiting.put((step, text + "\n"))

    def flush(self) -> None:
        """Wait until all that was given is with the system, or lost."""
        written = Event()
        self._waiting.put(written)
        written.wait()

    def close(self, patience_seconds: float | None = None) -> None:
        """Write what is left, and end the thread."""
        self._waiting.put(None)
        self._thread.join(patience_seconds)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            if isinstance(item, Event):
                item.set()
                continue
            step, text = item
            try:
                self._append(text.encode())
            except OSError as error:
                if not self._lost:
                    tell(f"{self.path}: step {step} not written ({error.strerror}); the run goes on")
                self._lost = True
        with suppress(OSError):
            self._file.close()

    def _append(self, line: bytes) -> None:
        os.ftruncate(self._file.fileno(), self._whole)  # an earlier line may have been cut short by a full disk
        left = line
        while left:  # a full disk takes a part, and refuses the rest
            left = left[os.write(self._file.fileno(), left) :]
        self._whole += len(line)


class Reporter:
    """Writes metrics of a run. Only rank 0 has one that speaks; on the others every method does nothing.

    A context: leaving it writes what is left. `start` names the start of the run, for the file that lines of an
    abandoned branch go to.
    """

    def __init__(
        self, run_dir: Path, options: LogConfig, steps: int, first_step: int, *, speaks: bool, start: str = "start"
    ):
        self._options = options
        self._steps = steps
        self._speaks = speaks
        self._first_step = first_step
        self._second = 0.0  # when the second step began
        self._tensorboard = None
        self._progress: Progress | None = None
        if not speaks:
            return
        self.console = Console(soft_wrap=True, highlight=False)
        path = run_dir / "metrics.jsonl"
        with storing(path):
            cut_back(path, first_step, run_dir / f"metrics.abandoned-{start}.jsonl")
            self._lines = Lines(path)
        if options.tensorboard:
            with storing(run_dir / "tensorboard"):
                self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
            threading.excepthook = _without_tensorboards_trace
        if self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task("training", total=steps, completed=first_step)
            self._progress.start()

    def say(self, text: str) -> None:
        """A line of its own, above the progress bar."""
        if self._progress:
            self.console.print(text, markup=False)
        elif self._speaks:
            say(text)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl and its numbers to TensorBoard. What a full disk does not take is lost."""
        if not self._speaks:
            return
        self._lines.write(line["step"], json.dumps(line))
        if self._tensorboard:
            with suppress(OSError):  # its own thread failed: the loss of the same step's line is told
                for key, value in line.items():
                    if isinstance(value, int | float) and key != "step":
                        self._tensorboard.add_scalar(key, value, line["step"])

    def step(self, line: dict[str, Any]) -> None:
        """Record a training step; log it on the first, the last, every `log.every`-th and every non-finite one."""
        self.write(line)
        if not self._speaks:
            return
        done = line["step"] - self._first_step
        step = line["step"]
        eta = (time.monotonic() - self._second) / (done - 1) * (self._steps - step) if done > 1 else None
        if done == 1:
            self._second = time.monotonic()
        if self._progress:
            self._progress.update(self._task, completed=step)
        finite = abs(line["loss"]) + abs(line["grad_norm"]) < float("inf")
        if done == 1 or step == self._steps or step % self._options.every == 0 or not finite:
            self.say(log_line(line, self._steps, eta))

    def flush(self) -> None:
        """Wait until metrics.jsonl holds every line that the disk takes."""
        if self._speaks:
            self._lines.flush()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._speaks:
            return
        if self._progress:
            self._progress.stop()
        self._lines.close(None if error is None else _PATIENCE_SECONDS)
        if self._tensorboard:
            with suppress(OSError):  # a full disk: told when the line was lost
                self._tensorboard.close()


def _without_tensorboards_trace(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread raises what its next caller is told as well: only other threads' traces are printed."""
    if failure.thread is None or type(failure.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failure)


def cut_back(path: Path, last_step: int, abandoned: Path) -> None:
    """Take the lines of steps beyond `last_step` out of metrics.jsonl, so that a resumed curve is one curve.

    They move to the file `abandoned`, and so do lines without a step, with a warning. The last line may be cut short,
    as a full disk or a machine that went down leaves it.
    """
    kept: list[bytes] = []
    moved: list[bytes] = []
    foreign = 0
    for text in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        whole = text.endswith(b"\n")
        step = _step(text)
        foreign += whole and step is None
        stays = whole and step is not None and step <= last_step
        (kept if stays else moved).append(text)
    if foreign:
        message = "%s: %d lines that are no metrics of a step are kept out of it, in %s"
        logging.getLogger(__name__).warning(message, path, foreign, abandoned)
    if moved:
        # Written whole before the lines leave their file: a kill in between leaves them in both.
        replace_file(abandoned, b"".join(moved))
        replace_file(path, b"".join(kept))


def _step(text: bytes) -> int | None:
    """The step of a line of metrics.jsonl; None if it has none."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    step = line.get("step") if isinstance(line, dict) else None
    return step if type(step) is int else None
