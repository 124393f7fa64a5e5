"""What a run says of itself: metrics.jsonl (always), TensorBoard (by option) and one log line, written by rank 0.

MFU is model FLOPs / (step seconds * devices * peak FLOP/s of one device). Model FLOPs are those of forward and backward
without recomputation, causal attention counted half (arXiv 2205.05198, section 6; the models say how they count).
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from megapar import device
from megapar.batch import MicroBatch
from megapar.config import LogConfig
from megapar.context import ParallelContext
from megapar.errors import storing
from megapar.train.step import StepResult


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
        self._sent, self._start = self.ctx.traffic(), time.perf_counter()

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
    """One step for people; nan and inf stand there as such. The first step has no `eta_seconds`: it is slower."""
    mfu = f" | mfu {line['mfu']:.1%}" if line["mfu"] is not None else ""
    minutes, seconds = divmod(int(eta_seconds or 0), 60)
    eta = "" if eta_seconds is None else f" | eta {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    return (
        f"step {line['step']:>{len(str(steps))}}/{steps} | loss {line['loss']:.4f} | "
        f"grad norm {line['grad_norm']:.3f} | lr {line['lr']:.2e} | {line['tokens_per_second']:,.0f} tokens/s{mfu} | "
        f"{line['peak_memory_bytes'] / 2**20:,.0f} MiB{eta}"
    )


class Reporter:
    """Writes metrics of a run. Only rank 0 has one that speaks; on the others every method does nothing."""

    def __init__(self, run_dir: Path, options: LogConfig, steps: int, first_step: int, *, speaks: bool):
        self._options, self._steps, self._speaks = options, steps, speaks
        self._first_step, self._second = first_step, 0.0  # when the second step began
        self._tensorboard = None
        self._progress: Progress | None = None
        if not speaks:
            return
        self.console = Console(soft_wrap=True, highlight=False)
        self._path = run_dir / "metrics.jsonl"
        with storing(self._path):
            self._file = _open_truncated(self._path, first_step)
        if options.tensorboard:
            with storing(run_dir / "tensorboard"):
                self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        if self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task("training", total=steps, completed=first_step)
            self._progress.start()

    def say(self, text: str) -> None:
        """A line of its own, above the progress bar."""
        if self._speaks:
            self.console.print(text, markup=False)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl and its numbers to TensorBoard."""
        if not self._speaks:
            return
        with storing(self._path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._tensorboard:
            for key, value in line.items():
                if isinstance(value, int | float) and key != "step":
                    self._tensorboard.add_scalar(key, value, line["step"])

    def step(self, line: dict[str, Any]) -> None:
        """Record a training step; log it on the first, the last, every `log.every`-th and every non-finite one."""
        self.write(line)
        if not self._speaks:
            return
        done, step = line["step"] - self._first_step, line["step"]
        eta = (time.monotonic() - self._second) / (done - 1) * (self._steps - step) if done > 1 else None
        if done == 1:
            self._second = time.monotonic()
        if self._progress:
            self._progress.update(self._task, completed=step)
        finite = abs(line["loss"]) + abs(line["grad_norm"]) < float("inf")
        if done == 1 or step == self._steps or step % self._options.every == 0 or not finite:
            self.say(log_line(line, self._steps, eta))

    def close(self) -> None:
        if not self._speaks:
            return
        if self._progress:
            self._progress.stop()
        if self._tensorboard:
            self._tensorboard.close()
        self._file.close()


def _open_truncated(path: Path, last_step: int) -> Any:
    """Open metrics.jsonl for appending, without the lines of steps beyond `last_step`, so that a resumed curve is
    one. The last line may be cut short: a full disk or a machine that went down leaves it so."""
    kept = []
    for text in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if text.endswith("\n") and json.loads(text)["step"] <= last_step:
            kept.append(text)
    draft = path.with_name(path.name + ".tmp")
    draft.write_text("".join(kept))
    draft.replace(path)
    return path.open("a")
