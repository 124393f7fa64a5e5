"""Tests every group of the rank grid before the first step, and measures axes and ranks (launch.preflight).

A small all-reduce in each group comes first, under a short limit of time. Its sum must be right. Ranks say in the job's
store how it went. So a group that does not work is told from a rank that is stopped.

Then each axis moves a larger tensor, in all its groups at once, as a step does. Each rank multiplies matrices beside
all the others.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from megapar.base.errors import CommunicationError
from megapar.base.grid import Grid, Groups
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.comm.rendezvous import RankInfo, Store, name_hosts
from megapar.comm.store import answered
from megapar.declare.context import ParallelContext
from megapar.launch import reach
from megapar.system import device
from megapar.system.say import say

LIMIT_SECONDS = 30.0  # for one group, and for a host; launch.timeout_seconds if that is shorter
SLOW = 0.9  # a rank below this share of the median is marked
_SMALL = 1024  # elements of the first all-reduce
_LOOK_SECONDS = 0.2
_MOST_GROUPS = 3  # named in a message
_REPEATS = 7
_MOST_SHOWN = 16  # ranks in the printed table, if none of them is slow


class PreflightSizes(NamedTuple):
    """What is measured on a kind of device: bytes of the all-reduce, size of square matrices, and their dtype."""

    nbytes: int
    size: int
    dtype: torch.dtype


# Large enough for the full bandwidth and speed, and done in a second.
WORKS = {"cuda": PreflightSizes(64 << 20, 8192, torch.bfloat16), "cpu": PreflightSizes(1 << 20, 512, torch.float32)}

Product = Callable[[torch.Tensor, torch.Tensor], object]


def check_hosts(
    store: Store, members: Sequence[RankInfo], rank: int, meeting: str, interface: str, timeout_seconds: float
) -> None:
    """Do as `reach.check_hosts`, within the limit of this module. Also raises if the store does not answer."""
    limit = min(LIMIT_SECONDS, timeout_seconds)
    with _store_answers(rank, members):
        answered(lambda: reach.check_hosts(store, members, rank, meeting, interface, limit), 6 * limit)


def run(
    ctx: ParallelContext, grid: Grid, members: Sequence[RankInfo], store: Store | None, timeout_seconds: float
) -> dict[str, Any]:
    """Test all groups, measure, and print the table on rank 0. Returns what `measure` returns.

    `store` is for the tests' own keys; one rank alone has none.
    """
    if store is not None:
        check_groups(ctx, grid.groups(), members, store, min(LIMIT_SECONDS, timeout_seconds))
    result = measure(ctx, members)
    if ctx.world.first:
        for line in table(result, members):
            say(line)
    return result


@contextmanager
def _store_answers(rank: int, members: Sequence[RankInfo]) -> Iterator[None]:
    """Raise CommunicationError in place of TimeoutError: the store's process is stopped."""
    try:
        yield
    except TimeoutError:
        raise CommunicationError(
            f"preflight: the job's store does not answer rank {rank}: the process that keeps it, rank 0 on "
            f"{members[0].host} or torchrun's agent, is stopped or its host is lost"
        ) from None


def check_groups(
    ctx: ParallelContext, groups: Mapping[str, Groups], members: Sequence[RankInfo], store: Store, limit_seconds: float
) -> None:
    """Let each group of each axis sum a few numbers. A collective over all ranks, which end it together.

    `groups` are those of the grid. Raises CommunicationError on every rank that still runs. It names the axis, the
    ranks and the hosts: those that are stopped or lost, or the group that does not work.
    """
    for axis in ctx.axes:
        if max(map(len, groups.get(axis.name, [])), default=1) > 1:
            test = _AxisTest(ctx, axis, groups[axis.name], members, store, limit_seconds)
            with _store_answers(ctx.world.rank, members):
                answered(test.run, 7 * limit_seconds)


class _AxisTest:
    """The test of one axis on this rank."""

    def __init__(
        self,
        ctx: ParallelContext,
        axis: Axis,
        groups: Groups,
        members: Sequence[RankInfo],
        store: Store,
        limit_seconds: float,
    ):
        self._axis = axis
        self._device = ctx.device
        self._rank = ctx.world.rank
        self._groups = [ranks for ranks in groups if len(ranks) > 1]
        self._members = members
        self._store = store
        self._limit_seconds = limit_seconds

    def run(self) -> None:
        """Test this rank's group, and wait for the verdict on all groups."""
        judged = False
        try:
            reason = self._failure()
            if reason:
                self._store.set(f"{self._axis.name}/failed/{self._rank}", "")
                judged = self._judges(reason)
            else:
                self._store.set(f"{self._axis.name}/done/{self._rank}", "")
                if self._store.add(f"{self._axis.name}/finished", 1) == len(self._members):
                    self._store.set(f"{self._axis.name}/verdict", "")
                elif not self._has_verdict_within(2.5 * self._limit_seconds):
                    # A rank was lost after its sum: no group has failed, and not all ranks have finished.
                    judged = self._judges("no answer")
            if not self._has_verdict_within(2.5 * self._limit_seconds):
                text = f"preflight: axis {self._axis.name}: the rank that judged the groups is stopped or lost"
                raise CommunicationError(text)
            verdict = self._store.get(f"{self._axis.name}/verdict").decode()
        except RuntimeError as failure:
            reason = str(failure).partition("\n")[0]
            text = (
                f"preflight: axis {self._axis.name}: rank {self._rank} got no verdict from the job's store ({reason})"
            )
            raise CommunicationError(text) from failure
        if verdict:
            raise self._error(verdict, judged=judged)

    def _judges(self, reason: str) -> bool:
        """Set the verdict, unless another rank does; returns whether this one does."""
        judges = self._store.add(f"{self._axis.name}/judges", 1) == 1
        if judges:
            self._store.set(f"{self._axis.name}/verdict", self._judge(reason))
        return judges

    def _has_verdict_within(self, seconds: float) -> bool:
        key = f"{self._axis.name}/verdict"
        with suppress(RuntimeError):  # the time is over; a store that is lost raises again at its next use
            self._store.wait([key], timedelta(seconds=seconds))
        return self._store.check([key])

    def _failure(self) -> str:
        """Why the small all-reduce failed on this rank, "" if it did not."""
        if self._axis.size == 1:
            return ""
        try:
            total = answered(self._sum, self._limit_seconds)
        except TimeoutError:
            return f"no answer within {self._limit_seconds:g} s"
        except CommunicationError as error:
            return str(error)
        expected = self._axis.size * (self._axis.size + 1) // 2
        return "" if total == [expected] * 2 else f"the sum was {total[0]:g} to {total[1]:g}, not {expected}"

    def _sum(self) -> list[float]:
        """The least and the largest element of an all-reduce of this rank's position, counted from 1."""
        device.set_current(self._device)
        x = torch.full((_SMALL,), float(self._axis.rank + 1), device=self._device)
        collectives.all_reduce(x, self._axis)
        return [float(x.min()), float(x.max())]

    def _judge(self, reason: str) -> str:
        """The verdict after a failure, from what the ranks have said: a line, and the rank that is named first."""
        # Others of these groups run into the limit a little later, unless they are the cause.
        end = time.monotonic() + self._limit_seconds
        while (silent := self._silent()) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        if silent:
            culprits: Sequence[int] = silent
            text = f"{name_hosts(silent, self._members)} gave no sign within {self._limit_seconds:g} s: stopped or lost"
        else:
            groups = [ranks for ranks in self._groups if any(self._has_said("failed", rank) for rank in ranks)]
            if not groups:
                return ""  # the last rank was late, and has finished
            culprits = groups[0]
            named = "; ".join(name_hosts(ranks, self._members) for ranks in groups[:_MOST_GROUPS])
            text = f"the group of {named} does not work, and all its ranks are there ({reason})"
        return f"{culprits[0]} preflight: axis {self._axis.name}: {text}"

    def _silent(self) -> list[int]:
        """Ranks that have neither finished the test of this axis nor failed in it."""
        ranks = [rank for group in self._groups for rank in group]
        return [rank for rank in ranks if not (self._has_said("done", rank) or self._has_said("failed", rank))]

    def _has_said(self, word: str, rank: int) -> bool:
        return self._store.check([f"{self._axis.name}/{word}/{rank}"])

    def _error(self, verdict: str, *, judged: bool) -> CommunicationError:
        """The error of this rank. The rank that has judged tells it for all."""
        first, _, text = verdict.partition(" ")
        error = CommunicationError(text)
        member = self._members[int(first)]
        error.culprit = {"rank": member.rank, "host": member.host, "pid": member.pid}
        error.ranks = [{"rank": member.rank, "host": member.host, "pid": member.pid} for member in self._members]
        error.told_by_another = not judged
        return error


def measure(ctx: ParallelContext, members: Sequence[RankInfo], product: Product = torch.matmul) -> dict[str, Any]:
    """Measure the bandwidth of each axis and the speed of matrix products. A collective; all ranks get the result.

    The result has JSON types: what `run_dir/preflight.json` holds. Bandwidth is that of the bus, as nccl-tests has it:
    2 (n-1)/n bytes of an all-reduce over n ranks, by its time.
    """
    work = WORKS[ctx.device.type]
    mine: dict[str, Any] = {"tflops": _products_tflops(ctx, work, product), "axes": {}}
    for axis in ctx.axes:
        if axis.size > 1:
            mine["axes"][axis.name] = [list(axis.ranks), _gb_per_second(ctx, axis, work)]
    every = collectives.gather_json(mine, ctx.world, ctx.device)
    for axis in ctx.axes:
        # The counts of the run are those of its steps.
        axis.traffic.calls.clear()
        axis.traffic.sent.clear()
    return report(every, [member.host for member in members], work)


def _products_tflops(ctx: ParallelContext, work: PreflightSizes, product: Product) -> float:
    """The speed of square products in TFLOP/s, on all ranks at once."""
    own = torch.Generator(ctx.device).manual_seed(0)  # the run's random numbers must not depend on this
    shape = work.size, work.size
    a = torch.randn(shape, generator=own, device=ctx.device, dtype=work.dtype)
    b = torch.randn(shape, generator=own, device=ctx.device, dtype=work.dtype)
    seconds = _least_seconds(ctx.device, lambda: product(a, b), lambda: collectives.barrier(ctx.world))
    return 2 * work.size**3 / seconds / 1e12


def _gb_per_second(ctx: ParallelContext, axis: Axis, work: PreflightSizes) -> float:
    """The bandwidth of an all-reduce over `axis` in GB/s."""
    x = torch.zeros(work.nbytes, dtype=torch.uint8, device=ctx.device).view(torch.float32)
    seconds = _least_seconds(ctx.device, lambda: collectives.all_reduce(x, axis), lambda: collectives.barrier(axis))
    return 2 * work.nbytes * (axis.size - 1) / axis.size / seconds / 1e9


def _least_seconds(on: torch.device, call: Callable[[], object], together: Callable[[], None]) -> float:
    """The least time of `call` on the device, after one call that is not counted. `together` waits for the ranks.

    The least, because what disturbs one call alone says nothing about the rank.
    """
    call()
    clock = device.DeviceClock(on)
    seconds = []
    for _ in range(_REPEATS):
        together()
        start = clock.moment()
        call()
        begun, ended = clock.read([start, clock.moment()])
        seconds.append(ended - begun)
    return min(seconds)


def report(every: Sequence[Mapping[str, Any]], hosts: Sequence[str], work: PreflightSizes) -> dict[str, Any]:
    """What `measure` returns, out of what each rank has measured and the host of each rank."""
    middle = statistics.median(found["tflops"] for found in every)
    ranks = []
    for rank, found in enumerate(every):
        share = found["tflops"] / middle
        ranks.append(
            {"rank": rank, "host": hosts[rank], "tflops": found["tflops"], "of_median": share, "slow": share < SLOW}
        )
    measured: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for found in every:
        for name, (group, speed) in found["axes"].items():
            measured.setdefault(name, {}).setdefault(tuple(group), []).append(speed)
    axes = {}
    for name, groups in measured.items():
        # The slowest rank of a group has waited for nobody.
        speeds = {group: min(speeds) for group, speeds in groups.items()}
        typical = statistics.median(speeds.values())
        rows = [
            {"ranks": list(group), "gb_per_second": speed, "of_median": speed / typical, "slow": speed < SLOW * typical}
            for group, speed in speeds.items()
        ]
        axes[name] = {"ranks": len(next(iter(groups))), "median_gb_per_second": typical, "groups": rows}
    return {
        "all_reduce_bytes": work.nbytes,
        "product": {"size": work.size, "dtype": str(work.dtype).removeprefix("torch.")},
        "median_tflops": middle,
        "slow_ranks": [row["rank"] for row in ranks if row["slow"]],
        "axes": axes,
        "ranks": ranks,
    }


def table(result: Mapping[str, Any], members: Sequence[RankInfo]) -> list[str]:
    """The lines of a result for people. Of many ranks the slow ones are shown."""
    hosts = len({member.host for member in members})
    lines = [f"preflight: every group answers ({len(members)} ranks, {hosts} host{'s' if hosts > 1 else ''})"]
    for name, axis in result["axes"].items():
        worst = min(axis["groups"], key=lambda group: group["gb_per_second"])
        line = f"  {name:<18} {len(axis['groups'])} x {axis['ranks']} ranks  {axis['median_gb_per_second']:9.3f} GB/s"
        if worst["slow"]:
            line += f"  SLOW {worst['gb_per_second']:.3f} ({worst['of_median']:.2f} of the median): "
            line += name_hosts(worst["ranks"], members)
        lines.append(line)
    size, dtype = result["product"]["size"], result["product"]["dtype"]
    lines.append(f"  products of {size} x {size} in {dtype}: median {result['median_tflops']:.3f} TFLOP/s")
    rows = [row for row in result["ranks"] if row["slow"] or len(members) <= _MOST_SHOWN]
    for row in rows[:_MOST_SHOWN]:
        mark = "  SLOW" if row["slow"] else ""
        name = f"rank {row['rank']} ({row['host']})"
        lines.append(f"  {name:<28} {row['tflops']:9.3f} TFLOP/s  {row['of_median']:.2f} of the median{mark}")
    if len(rows) > _MOST_SHOWN:
        lines.append(f"  and {len(rows) - _MOST_SHOWN} more slow ranks: preflight.json in the run folder has all")
    return lines
