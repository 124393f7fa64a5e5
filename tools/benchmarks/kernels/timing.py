"""Times by the device's own events, on a busy device, over buffers too large for its cache.

Traps avoided here: a GPU waiting for Python (GEMMs are queued before a burst, long enough for Python to queue the burst
behind them); inputs left in L2 by the last repetition (buffers rotate); kernels overwriting the inputs of backward
(forward is run again before each backward, and its own time is subtracted).
"""

import gc
import statistics
import time
from collections.abc import Callable

import torch

from megapar.system import device

ROTATED_BYTES = 1 << 29  # ten times an H100's L2, four times a B200's
BURST_MS, FEWEST, MOST = 80.0, 5, 50  # how long repetitions go on, and how many there are


class Stopwatch:
    """Median milliseconds of work on the device. A dry run does everything once, and its times are None."""

    def __init__(self, target: torch.device, *, dry_run: bool):
        self.target = target
        self.dry_run = dry_run
        self.dtype = torch.float32 if dry_run else torch.bfloat16  # of what is measured
        self.side = 64 if dry_run else 8192
        self._matrices = [torch.randn(self.side, self.side, device=target, dtype=torch.bfloat16) for _ in range(3)]
        self.gemm_ms = self.median_ms(self._gemm)

    def _gemm(self, _: int = 0) -> None:
        a, b, c = self._matrices
        torch.mm(a, b, out=c)

    def copy_gb_per_second(self) -> float | None:
        """Bytes read and written by torch's copy of a large buffer: the limit of all kernels bound by bytes."""
        numel = 1 << (10 if self.dry_run else 29)
        source, target = (torch.zeros(numel, device=self.target, dtype=torch.bfloat16) for _ in range(2))
        ms = self.median_ms(lambda _: target.copy_(source))
        if ms is None:
            return None
        return 2 * source.nbytes / ms / 1e6

    def gemm_tflops(self) -> float | None:
        """Of a square bf16 GEMM with an fp32 sum."""
        if self.gemm_ms is None:
            return None
        return 2 * self.side**3 / self.gemm_ms / 1e9

    def median_ms(self, run: Callable[[int], object]) -> float | None:
        """`run(i)` queues repetition i with the i-th of the rotating buffers."""
        if self.dry_run:
            run(0)
            return None
        for i in range(3):
            run(i)
        device.synchronize(self.target)
        start = time.perf_counter()
        run(0)
        queued = time.perf_counter()
        device.synchronize(self.target)
        one = (time.perf_counter() - start) * 1e3
        repetitions = max(FEWEST, min(MOST, int(BURST_MS / one)))
        events = [[torch.Event(self.target, enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
        python_ms = (queued - start) * 1e3 * repetitions
        for _ in range(2 + min(200, int(1.5 * python_ms))):  # a GEMM takes a millisecond or more
            self._gemm()
        for i, (before, after) in enumerate(events):
            before.record()
            run(i)
            after.record()
        device.synchronize(self.target)
        return statistics.median(before.elapsed_time(after) for before, after in events)

    def peak_bytes(self, run: Callable[[int], object]) -> int | None:
        """Device memory taken by `run(0)` beyond the memory in use before, its results included."""
        if self.dry_run:
            run(0)
            return None
        device.synchronize(self.target)
        before = torch.accelerator.memory_allocated(self.target)
        torch.accelerator.reset_peak_memory_stats(self.target)
        run(0)
        device.synchronize(self.target)
        return torch.accelerator.max_memory_allocated(self.target) - before

    def release(self) -> None:
        """Give memory back before the next op."""
        if not self.dry_run:
            gc.collect()
            torch.accelerator.empty_cache()
