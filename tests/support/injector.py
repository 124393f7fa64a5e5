"""Plants faults of many kinds in a run: on one rank, in one step, at one point, a given number of times.

A fault leaves a file when it strikes, so that the processes of a later start know how often it did.
"""

import errno
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.checkpoint import by_host, save
from megapar.comm.flight import AxisLog
from megapar.data.delivery import Delivery
from megapar.data_parallel.reduce import Gradients
from megapar.launch import rank_process
from megapar.optimizer.optimizers import Optimizers
from megapar.train import trainer

KINDS = ("kill", "exc", "exit0", "hang", "stop", "slow", "nan", "enospc", "flip", "delay")
SLOW_SECONDS = 0.3


class InjectedError(Exception):
    """An exception that no code of the run expects."""


@dataclass(frozen=True)
class Fault:
    """`kind` strikes `times` times: on `rank`, in `step` (from 1), at `point`.

    Points: data, forward, reduce (the first collective of the step), gradients (all are added), optimizer, write (a
    rank's part of the checkpoint of this step), written, start (before the first step of a start).
    """

    kind: str
    rank: int
    step: int
    point: str = "forward"
    times: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-rank{self.rank}-step{self.step}-{self.point}"


def plant(*faults: Fault, marks: Path) -> Callable[[], None]:
    """A function that plants `faults` in this process and its forks. `marks` is a folder for their files."""

    def install() -> None:
        here: dict[str, Any] = {"rank": -1, "flight": None}

        def joined(config: Any, env: Any, process: Any) -> None:
            here.update(rank=env.rank, flight=process.flight)

        _before(rank_process, "join", joined)
        for number, fault in enumerate(faults):
            _plant(fault, here, marks / f"fault-{number}")

    return install


def struck(marks: Path) -> int:
    """How many times faults have struck."""
    return len(list(marks.glob("fault-*")))


def _plant(fault: Fault, here: dict[str, Any], mark: Path) -> None:
    def strike(*args: Any) -> None:
        flight = here["flight"]
        if here["rank"] != fault.rank or flight is None or (fault.point != "start" and flight.step != fault.step):
            return
        if fault.point in ("write", "written") and f"step_{fault.step:08d}" not in str(args[0]):
            return
        for number in range(fault.times):
            try:
                os.close(os.open(f"{mark}-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            _act(fault.kind, args)
            return

    points: dict[str, Callable[[], Any]] = {
        "start": lambda: _before(trainer, "start", strike),
        "data": lambda: _before(Delivery, "next_step", strike),
        "forward": lambda: _before(trainer, "queue_step", strike),
        "reduce": lambda: _before(AxisLog, "begin", strike),
        "gradients": lambda: _before(Gradients, "finish", strike),
        "optimizer": lambda: _before(Optimizers, "step", strike),
        "write": lambda: [_before(room, "write_part", strike) for room in (save, by_host)],
        "written": lambda: [_after(room, "write_part", strike) for room in (save, by_host)],
    }
    points[fault.point]()


def _act(kind: str, args: tuple[Any, ...]) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exc":
        raise InjectedError("planted")
    elif kind == "exit0":
        os._exit(0)
    elif kind == "hang":
        while True:  # holds the GIL for long stretches
            sum(range(1 << 20))
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # another thread may take the signal: this one would go on meanwhile
    elif kind == "slow":
        end = time.monotonic() + SLOW_SECONDS
        while time.monotonic() < end:
            sum(range(1 << 14))
    elif kind == "delay":
        time.sleep(SLOW_SECONDS)
    elif kind == "nan":
        grads = args[0]
        grads.part(*grads.layout.shards()[0])[0] = math.nan
    elif kind == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
    elif kind == "flip":
        for path in Path(args[0]).glob("rank_*"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    else:
        raise ValueError(kind)


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        act(*args)
        return real(*args, **named)

    setattr(owner, name, call)


def _after(owner: Any, name: str, act: Callable[..., None]) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        value = real(*args, **named)
        act(*args)
        return value

    setattr(owner, name, call)
