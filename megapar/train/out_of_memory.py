"""Explains in a run where memory went when it runs out, and what would need less.

The plan behind it takes memory, and imports modules. A process whose own memory has run out has none for that: there an
import fails in any way, or ends the process. So a fork plans: that of the local launcher, which has memory left, after
the ranks have ended; without a launcher, a fork of the rank, which may fail as it likes.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from megapar.base.errors import OutOfMemoryError
from megapar.config.options import Config
from megapar.observe import memory_report
from megapar.system import device, limits
from megapar.system.say import tell
from megapar.train import levers
from megapar.train.doors import LazyPlanner

_PATIENCE_SECONDS = 30.0  # for a fork that plans


@dataclass(frozen=True)
class Explanation:
    """Explains errors of a run on `rank`.

    `given` has the options as the user gave them. `validated` makes `config` of it, and raises ConfigError for what
    cannot run. `launcher_plans`: the launcher calls its own `advise` for an error of this rank.
    """

    config: Config
    given: Config
    validated: Callable[[Config], Config]
    planner: LazyPlanner
    rank: int = 0
    launcher_plans: bool = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """A context around a run. If memory or files run out within it, raises OutOfMemoryError.

        The error says in one line what the rank needs and which options would help, or which limit was reached.
        """
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            limit = limits.reached(error)
            if limit:
                raise OutOfMemoryError(limit) from error
            reason = device.out_of_memory(error)
            if not reason:
                raise
            raise self._explained(reason, is_device=isinstance(error, torch.OutOfMemoryError)) from error

    def _explained(self, reason: str, *, is_device: bool) -> OutOfMemoryError:
        """The error to raise. If a device's memory has run out, this process has memory to plan with."""
        in_use = device.peak_memory_bytes(_device_in_use())
        used = {"reason": reason, "in_use": in_use}
        if is_device or not self.launcher_plans:
            text, table = (self.planned if is_device else self._planned_apart)(used)
            if table:
                tell(table)
            return OutOfMemoryError(text)
        error = OutOfMemoryError(self._without_plan(used))
        error.unplanned = used
        return error

    def advise(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """The `record` of a rank's error (`reporting.error_record`), with the plan in its message if that has none.

        For the launcher, after the ranks have ended.
        """
        if "unplanned" not in record:
            return record
        text, table = replace(self, rank=int(record["rank"]))._planned_apart(record["unplanned"])
        if table:
            tell(table)
        return {**record, "message": text}

    def planned(self, used: Mapping[str, Any]) -> tuple[str, str]:
        """The error's message, and a table of the rank's memory for train.memory_report, else "".

        `used` has the `reason` and the bytes that were `in_use`.
        """
        try:
            shortage = self.planner.explain_shortage(self.config, self.given, self.validated, self.rank)
        except Exception:  # of sizes too large for torch, or anything: the run's error must be told, and not the plan's
            return self._without_plan(used), ""
        table = ""
        if self.config.train.memory_report:
            sizes = {"planned": shortage.rows, "in use": {memory_report.ALL: int(used["in_use"])}}
            table = memory_report.in_words(f"memory of rank {self.rank}", sizes)
        advice = levers.advise(self.config)
        if shortage.smaller:
            advice = f"by plan this would do with less: {'; or '.join(shortage.smaller)}"
        return f"{shortage.needs} {_used_in_words(used)}; {advice}", table

    def _without_plan(self, used: Mapping[str, Any]) -> str:
        return f"out of memory {_used_in_words(used)}; {levers.advise(self.config)}"

    def _planned_apart(self, used: Mapping[str, Any]) -> tuple[str, str]:
        """Do as `planned`, in a fork of this process. Whatever fails there or on the way costs the plan alone."""
        fork = multiprocessing.get_context("fork")
        seconds = min(_PATIENCE_SECONDS, self.config.launch.timeout_seconds / 3)  # other ranks may wait for this one
        try:
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=_answer, args=(self, used, sender))
            process.start()
            sender.close()
            try:
                text, table = json.loads(receiver.recv_bytes()) if receiver.poll(seconds) else ("", "")
            finally:
                process.kill()
                process.join()
        except Exception:
            text, table = "", ""
        return text or self._without_plan(used), table


def _answer(explanation: Explanation, used: Mapping[str, Any], sender: Connection) -> None:
    """Send what is `planned`, as JSON: the main function of a fork."""
    # What ends the fork, such as bad_alloc in native code, says so here. The error itself is told elsewhere.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sender.send_bytes(json.dumps(explanation.planned(used)).encode())


def _device_in_use() -> torch.device:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind or torch.device("cpu")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.3f} GiB"


def _used_in_words(used: Mapping[str, Any]) -> str:
    return f"({used['reason']}; at most {_gib(used['in_use'])} were in use)"
