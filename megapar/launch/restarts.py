"""Starts the ranks of this machine again after a fault.

All ranks are new processes, so what a fault has damaged in memory or on a device is gone. They go on from the newest
checkpoint: a snapshot in host memory, which this launcher owns, or one on a disk.

A rank lost twice without progress may be one that cannot run. With launch.min_dp the ranks then go on as one replica
fewer, and come back when a checkpoint has been made.
"""

import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from megapar.base.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    MegaparError,
    Preempted,
    Rewind,
    storing,
)
from megapar.config.messages import counted
from megapar.config.options import Config
from megapar.launch.local import End, JobStart, Main, preload, run_ranks
from megapar.launch.rank_process import refuse_start
from megapar.launch.reporting import Interrupted, report_error
from megapar.launch.signals import Signals
from megapar.system import device, environment, events
from megapar.system.alert_command import call_now, failure
from megapar.system.environment import Environment
from megapar.system.own_folder import OwnFolder, sweep
from megapar.system.say import tell

_LOST = CommunicationError.exit_code
# A lost rank, a bug that may depend on the moment, and a checkpoint that the failed start has removed as damaged. Other
# errors would come again: of options, data, numbers, a full disk, or too little memory.
# A rewind is no failure: it wants the next start.
_MAY_PASS = (_LOST, MegaparError.exit_code, CheckpointError.exit_code, Rewind.exit_code)
_MOST_WITHOUT_PROGRESS = 3
_MEMORY = Path("/dev/shm")
_PREFIX = "megapar-snapshots-"


class Fault(NamedTuple):
    """How a start ended. `step` is the newest step that a rank began, 0 before the first."""

    code: int
    kind: str
    rank: int
    step: int
    world: int


@dataclass(frozen=True)
class RestartDecision:
    """What follows a fault: a start with `world` ranks after a pause, or the end for the reason `ends`."""

    world: int = 0
    pause_seconds: float = 0.0
    ends: str = ""


def judge(faults: Sequence[Fault], smaller: Callable[[int], int], max_restarts: int) -> RestartDecision:
    """What follows the last of `faults`, all of this job.

    `smaller` gives the next smaller number of ranks that can run, 0 if there is none. `max_restarts` is
    launch.max_restarts.
    """
    last = faults[-1]
    if last.code not in _MAY_PASS:
        return RestartDecision(ends="this error would come again")
    if len(faults) > max_restarts:
        return RestartDecision(ends=f"launch.max_restarts={max_restarts} are used up")
    # Those since the newest step that any start has begun, with the fault in that step.
    furthest = max(fault.step for fault in faults)
    first = next(i for i, fault in enumerate(faults) if fault.step == furthest)
    stuck = faults[first:]
    again = len(stuck) > 1 and stuck[-2][:2] == last[:2] and stuck[-2].rank == last.rank
    if again and last.code == _LOST:
        world = smaller(last.world)
        if world:
            return RestartDecision(world)
    if again and stuck[-2].step == last.step:
        return RestartDecision(ends=f"it came twice at step {last.step}")
    if len(stuck) >= _MOST_WITHOUT_PROGRESS:
        return RestartDecision(ends=f"{len(stuck)} starts came no further than step {furthest}")
    return RestartDecision(last.world, pause_seconds=float(len(stuck) - 1))


Record = Mapping[str, Any]
"""The fields of error.json."""


class WorldPlan(Protocol):
    """What a run becomes on a number of ranks."""

    @property
    def config(self) -> Config:
        """The options that the run reads."""

    def for_ranks(self, world_size: int) -> Self:
        """Return the plan for another number of ranks. Raises ConfigError if they cannot run."""

    def advise(self, record: Record) -> Record:
        """Add to an error what its rank could not say."""


P = TypeVar("P", bound=WorldPlan)


def read_job(given: Config) -> tuple[Environment, int]:
    """Return what a launcher says to this process, and the job's number of ranks: without one, of those to start here.

    Raises ConfigError if this machine should not start what the options ask for.
    """
    env = environment.read()
    refuse_start(given)
    return env, env.world_size if env.launched else max(given.launch.nproc, 1)


def run_job(main: Callable[..., None], plan: P, env: Environment) -> int:
    """Run `main(plan, env)` on this rank of a launcher's job, or on ranks that start here; returns the exit code.

    Ranks that start here are started again after faults (`keep_running`). They get the launcher's board as well.
    """
    launch = plan.config.launch
    if env.launched or (launch.nproc <= 1 and not launch.max_restarts):
        main(plan, env)
        return 0
    return keep_running(
        partial(main, plan), lambda world: partial(main, plan.for_ranks(world)), plan.config, plan.advise
    )


def keep_running(main: Main, prepare: Callable[[int], Main], config: Config, advise: Callable[[Record], Record]) -> int:
    """Run `main` on ranks until the run is over, with restarts after faults; returns the exit code of the last start.

    `prepare` makes the program for fewer ranks. It raises ConfigError if they cannot run. Raises what `run_ranks`
    raises, and StorageError if snapshots are asked for and there is no folder in memory for them. Calls
    log.alert_command for each fault, and at the end. `advise` adds to an error what its rank could not say.
    """
    # Before the run: its working folder may be gone at its end.
    where = {"run_dir": str(Path(config.run_dir).resolve()), "from": socket.gethostname()}

    def alert(event: str, text: str, **fields: object) -> None:
        call_now(config.log.alert_command, {"event": event, "message": text, **where, **fields}, tell)

    def failed(end: End) -> None:
        assert end.error is not None
        of_rank = {key: end.error[key] for key in ("rank", "host", "step", "phase") if key in end.error}
        if end.error["class"] not in (Preempted.__name__, Interrupted.__name__):
            alert(failure(str(end.error["class"])), str(end.error["message"]), code=end.code, **of_rank)

    def run(program: Main, world: int, signals: Signals, start: JobStart) -> End:
        end = run_ranks(program, world, signals, start)
        return end if end.error is None else end._replace(error=advise(end.error))

    code, step = _keep_running(main, prepare, config, run, failed)
    alert("end", "all steps are done" if code == 0 else "the run has stopped", code=code, step=step)
    return code


def _keep_running(
    main: Main,
    prepare: Callable[[int], Main],
    config: Config,
    run: Callable[[Main, int, Signals, JobStart], End],
    failed: Callable[[End], None],
) -> tuple[int, int]:
    """Do as `keep_running` says; returns the exit code and the newest step. `failed` gets each end with an error."""
    options = config.launch
    full = world = options.nproc
    device.choose(options.device, 0, full)  # an error is raised here once, and not in every rank
    preload(config)
    signals = Signals(raises=False)
    job = uuid.uuid4().hex
    faults: list[Fault] = []
    starts = 0
    with _snapshots(config) as snapshots:
        while True:
            # A replica comes back when a checkpoint has been made since: another fault then costs little.
            stop_at = faults[-1].step + _interval(config) if world < full else 0
            program = main if world == full else prepare(world)
            end = run(program, world, signals, JobStart(job, starts, snapshots, stop_at))
            starts += 1
            if end.error is not None:
                report_error(end.error, config.run_dir, ours=False)
                failed(end)
            asked = bool(signals.request or signals.ending)
            if end.stopped_at and not asked:
                reason, pause, world = "all ranks again", 0.0, full
                tell(f"step {end.step} is saved: all {full} ranks start again")
            elif end.error is None or asked:
                return end.code, end.step
            else:
                reason = str(end.error["message"])
                faults.append(Fault(end.code, str(end.error["class"]), int(end.error["rank"]), end.step, world))
                verdict = judge(faults, lambda of: _next_smaller(prepare, of, config), options.max_restarts)
                pause, world = verdict.pause_seconds, verdict.world
                if not world:
                    if options.max_restarts:
                        tell(f"not started again: {verdict.ends}")
                    return end.code, end.step
                tell(f"restart {len(faults)} of {options.max_restarts}, with {counted(world, 'rank')}")
            if end.owned:
                events.append(Path(config.run_dir), "restart", attempt=starts, reason=reason, world=world)
            if signals.asked_within(pause):
                return end.code, end.step


def _next_smaller(prepare: Callable[[int], Main], world: int, config: Config) -> int:
    """The most ranks below `world` that make whole replicas, at least launch.min_dp, and can run; 0 without any."""
    parallel = config.parallel
    replica = parallel.tp * parallel.cp * parallel.pp
    if not config.launch.min_dp:
        return 0
    for dp in range(world // replica - 1, config.launch.min_dp - 1, -1):
        with suppress(ConfigError):  # such as a number of experts that these ranks do not divide
            prepare(dp * replica)
            return dp * replica
    return 0


def _interval(config: Config) -> int:
    """The fewest steps between two checkpoints of a tier."""
    options = config.checkpoint
    tiers = (options.memory_every, options.local_every, options.every)
    return min((every for every in tiers if every), default=config.train.steps)


@contextmanager
def _snapshots(config: Config) -> Iterator[str]:
    """Yield the path of a folder in memory for snapshots, "" if the options ask for none. It ends with the context.

    A killed launcher leaves it behind. The next one of this user removes it.
    """
    if not config.checkpoint.memory_every:
        yield ""
        return
    with storing(_MEMORY):
        sweep(_MEMORY, _PREFIX)
        folder = OwnFolder(_MEMORY, _PREFIX)
    try:
        yield str(folder.path)
    finally:
        folder.remove()
