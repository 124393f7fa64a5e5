"""Runs one rank's process from start to end: answers signals, meets the other ranks, and reports the exit code.

megapar.launch.local, torchrun or Slurm starts the ranks. If a rank is lost under torchrun, torchrun's agent ends the
other ranks. The agent's own exit code is always 1; error.json has ours. The agent passes SIGTERM on and kills its ranks
30 seconds later, so a save must be done by then. Slurm's --signal=USR1@120 leaves as many seconds as it names.
"""

import faulthandler
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megapar.base.errors import CommunicationError, ConfigError, MegaparError, Preempted, storing
from megapar.base.grid import Grid
from megapar.comm import collectives, rendezvous
from megapar.comm.flight import Board, Flight
from megapar.comm.flight_file import FlightFile
from megapar.comm.process_groups import nccl_options, world_is_of_gradients
from megapar.comm.rendezvous import RankInfo, Store
from megapar.comm.store import JobStore, StoreUser, answered, connect, part_of, quiet_log
from megapar.comm.transport_symmetric import offered_by_torch
from megapar.config import plugins
from megapar.config.options import Config, flatten
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.launch import preflight
from megapar.launch.grid import grid_of
from megapar.launch.monitor import Monitor
from megapar.launch.reporting import exits_refused, reported
from megapar.launch.signals import Signals
from megapar.optimizer.table import find as find_optimizer
from megapar.pipeline import schedule_files
from megapar.pipeline.actions import show
from megapar.system import device, environment, numa
from megapar.system.atomic_files import write_json
from megapar.system.environment import Environment

_WATCHDOG_MARGIN_SECONDS = 2.0  # the monitor speaks this long before NCCL's watchdog ends the process
_MEETING_MARGIN_SECONDS = 30.0  # what a meeting may take beyond its own time-outs before the store is given up
_TELLING_SECONDS = 0.5  # a rank waits this long at its end while another one tells the error of both
_SERVING_SECONDS = 2.0  # a rank with the store in it stays so long: others still post their logs
_MOST_THREADS_PER_CORE = 4
_MOST_RANKS_PER_CORE = 64  # for trying out a layout on a laptop
_PACKAGES = {"log.wandb": ("wandb", "wandb"), "log.mlflow": ("mlflow", "mlflow-skinny")}  # module and distribution
STARTED = time.monotonic()  # when this program started; forked ranks inherit it


@dataclass
class RankProcess:
    """This process as one rank of a job."""

    rank: int
    flight: Flight
    signals: Signals
    monitor: Monitor
    file: FlightFile | None  # under torchrun and Slurm: the flight log for others on this host
    has_launcher: bool  # the local launcher, which tells how the run has ended
    deadline: float  # on time.monotonic's clock; 0 for none
    members: list[RankInfo] = field(default_factory=list)
    preflight_store: Store | None = None  # of launch.preflight, if there are several ranks
    preflight: dict[str, Any] | None = None  # what it has measured
    stopped: str = ""  # what has stopped the run after a save, such as a signal; "" if it has done all its steps

    def asked_to_stop(self) -> str:
        """What asks the run to stop at the end of this step: a signal, "launch.time_limit", or "" for nothing."""
        if self.signals.request:
            return self.signals.request
        if self.deadline and time.monotonic() > self.deadline:
            return "launch.time_limit"
        return ""

    def arm(self) -> None:
        """Note that training begins: from now on the end of a step follows requests to stop."""
        self.signals.armed = True
        self.flight.raise_flag("armed")

    def claim_run_dir(self, run_dir: Path) -> None:
        """The run folder is locked by this job: remove an old error.json, and write ranks.json."""
        # Without this flag an error must not be written to the folder: it may belong to another job.
        self.flight.raise_flag("owns")
        if self.rank == 0:
            with storing(run_dir / "error.json"):
                (run_dir / "error.json").unlink(missing_ok=True)
            write_json(run_dir / "ranks.json", {"ranks": [asdict(member) for member in self.members]})
            if self.preflight is not None:
                write_json(run_dir / "preflight.json", self.preflight)


@contextmanager
def rank_process(config: Config, env: Environment, board: Board | None = None) -> Iterator[RankProcess]:
    """A context around a rank's whole work. It answers signals, and reports how the rank ended.

    `board` is the local launcher's, None under torchrun and Slurm.
    """
    # A crash in native code (SIGSEGV, SIGBUS, NCCL's SIGABRT) then prints where Python stood.
    faulthandler.enable(all_threads=False)
    file = FlightFile() if env.launched and env.world_size > 1 else None
    if board is not None:
        flight = Flight(board[env.rank])
    elif file is not None:
        flight = Flight(file.memory)
    else:
        flight = Flight()
    signals = Signals()
    monitor = Monitor(flight, env.rank, signals, board)
    limit = config.launch.time_limit
    # Counted from the start of the program: imports and the meeting of the ranks take part of the time as well.
    deadline = STARTED + 60 * limit if limit else 0.0
    process = RankProcess(env.rank, flight, signals, monitor, file, board is not None, deadline)
    ended_alike = False
    try:
        with reported(env.rank, config.run_dir, flight, launcher_tells=board is not None), exits_refused():
            try:
                yield process
            except CommunicationError as error:
                if not error.ranks:
                    error.ranks = monitor.table
                    error.culprit = monitor.culprit()
                    error.told_by_another = not monitor.speaks()
                elif board is not None:
                    error.told_by_another = False  # the launcher takes the error of any rank
                elif env.serves_store:
                    time.sleep(_SERVING_SECONDS)
                raise
            except MegaparError as error:
                ended_alike = error.everywhere
                if not error.everywhere and not monitor.tells(f"{type(error).__name__}: {error}"):
                    error.told_by_another = True
                    # torchrun ends all ranks when one ends: the rank that tells the error must be the first to end.
                    error.patience_seconds = _TELLING_SECONDS
                raise
    finally:
        monitor.close()
        # After a failure other ranks may read the log, and the next start on this host removes it. Nobody will read it
        # where all ranks have ended alike, by success or by the same refusal, or where this rank has met no other.
        has_met = len(process.members) > 1
        if file is not None and (ended_alike or not has_met or flight.phase == "end"):
            file.remove()


def refuse_start(config: Config) -> None:
    """Raise ConfigError if this machine should not start what the options ask for, or lacks a package for it."""
    if not config.launch.nproc:
        environment.refuse_slurm_shell()
    cores = environment.usable_cores()
    # OpenMP crashes at some thousands of threads. Thousands of processes take the whole machine's memory.
    limits = {
        "launch.threads": _MOST_THREADS_PER_CORE * cores,
        "data.workers": _MOST_THREADS_PER_CORE * cores,
        "launch.nproc": _MOST_RANKS_PER_CORE * cores,
    }
    values = flatten(config)
    problems = []
    for option, limit in limits.items():
        if values[option] > limit:
            problems.append(f"{option}={values[option]}: {cores} cores can be used here; use at most {limit}, or 0")
    for option, (module, package) in _PACKAGES.items():
        if values[option] != "none" and find_spec(module) is None:
            problems.append(f"{option}={values[option]}: {module} is not installed; pip install {package}")
    if problems:
        raise ConfigError("\n".join(problems))


def join(config: Config, env: Environment, process: RankProcess) -> ParallelContext:
    """Prepare this process, meet the other ranks, and make the rank grid. A collective over all ranks of `env`.

    Raises ConfigError on every rank, before any collective, if ranks disagree on options, code, torch's version or the
    type of device, or if two ranks share a GPU. Raises CommunicationError if some ranks do not come.
    """
    with _told_by_each_host(env):
        chosen = device.choose(config.launch.device, env.local_rank, env.local_world_size, own_gpus=env.launched)
        device.set_connections(chosen, hardware_queues(config))  # the next call starts CUDA
        # Called here, so that it raises before the first collective.
        device.kernels_of(config.kernels, chosen, config.train.precision)
    device.prepare(chosen, threads=config.launch.threads, cores=env.cores, deterministic=config.train.deterministic)
    device.require_threads()
    if config.launch.numa == "auto" and chosen.type == "cuda":
        numa.bind(device.pci_address(chosen))
    timeout = config.launch.timeout_seconds
    member = rendezvous.this_member(env.rank, str(chosen), device.gpu_id(chosen))
    process.members = [member]
    if env.world_size > 1:
        process.members = _meet(config, env, member, chosen, process)
    grid = grid_of(config)
    if config.parallel.tp_symmetric_memory:
        _check_symmetric_memory(grid, chosen, process.members)
    ctx = context.create(
        grid,
        device=chosen,
        timeout_seconds=timeout,
        flight=process.flight,
        use_shared_memory=config.launch.cpu_exchange == "shared_memory",
        symmetric_tp=config.parallel.tp_symmetric_memory,
        gradient_ctas=config.launch.gradient_ctas,
        cores=config.launch.threads or env.cores,
    )
    if config.launch.preflight:
        process.preflight = preflight.run(ctx, grid, process.members, process.preflight_store, timeout)
    return ctx


def hardware_queues(config: Config) -> int | None:
    """Return the number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) that suits a layout, None for CUDA's own 8.

    Before Blackwell one queue lets a collective of tp or cp, which was started first, run before the product beside it.
    With ZeRO-2 and 3, ep and symmetric memory several streams send at once: in one queue a gather that waits for the
    gather before it would hold up the products behind it. Megatron-LM asks for the same of FSDP and of ep.
    """
    parallel = config.parallel
    in_order = parallel.tp > 1 or parallel.cp > 1
    several = config.optimizer.zero_stage > 1 or parallel.ep > 1 or parallel.tp_symmetric_memory
    return 1 if in_order and not several else None


def _check_symmetric_memory(grid: Grid, chosen: torch.device, members: Sequence[RankInfo]) -> None:
    """Raise ConfigError unless the ranks of each tp group are GPUs of one host, and torch has symmetric memory."""
    name = "parallel.tp_symmetric_memory"
    if chosen.type == "cpu":
        raise ConfigError(f"{name}: GPUs read each other's memory, and this run is on CPUs; leave it at false")
    if not offered_by_torch():
        raise ConfigError(f"{name}: torch {torch.__version__} has no symmetric memory here; leave it at false")
    for ranks in grid.groups()["tp"]:
        hosts = sorted({members[rank].host for rank in ranks})
        if len(hosts) > 1:
            text = f"ranks {', '.join(map(str, ranks))} of a tp group are on {', '.join(hosts)}"
            raise ConfigError(
                f"{name}: {text}; GPUs read the memory of one host: lower parallel.tp, or leave it at false"
            )


@contextmanager
def _told_by_each_host(env: Environment) -> Iterator[None]:
    """Let the first rank of each host report a ConfigError of the block. Ranks have not met: others may not have it."""
    try:
        yield
    except ConfigError as error:
        error.everywhere = False
        # The local launcher sees all errors, and reports one.
        error.told_by_another = env.launched and env.local_rank > 0
        raise


def _meet(
    config: Config, env: Environment, member: RankInfo, chosen: torch.device, process: RankProcess
) -> list[RankInfo]:
    """Meet the other ranks, compare what must be equal, and make the world's process group; returns all members."""
    timeout = config.launch.timeout_seconds
    backend = device.backend(chosen)
    job = _connect(env, timeout, serves_store=env.serves_store)
    number, members = _compare(job, config, env, member, chosen)
    if config.launch.preflight:
        # A connection of its own: a group that hangs may hold the first one.
        process.preflight_store = part_of(_connect(env, timeout, serves_store=False), StoreUser.PREFLIGHT, number)
        interface = environment.exchange_interface(backend)
        preflight.check_hosts(process.preflight_store, members, env.rank, env.meeting, interface, timeout)
    store = part_of(job, StoreUser.GROUPS, number)
    options = None
    if backend == "nccl":
        of_gradients = world_is_of_gradients(grid_of(config).groups(), env.world_size)
        options = nccl_options(of_gradients, config.launch.gradient_ctas)
    with quiet_log():
        collectives.initialize(
            backend,
            env.rank,
            env.world_size,
            store=store,
            timeout_seconds=timeout,
            device=chosen,
            options=options,
        )
    if process.file is None:
        process.monitor.watch(members)
        return members
    # The monitor gets its own connection: while the main thread waits on the first one, it answers no other thread.
    monitor_store = part_of(_connect(env, timeout, serves_store=False), StoreUser.MONITOR, number)
    process.monitor.watch(members, monitor_store, process.file)
    if backend == "nccl":
        process.monitor.warn_after = max(1.0, timeout - _WATCHDOG_MARGIN_SECONDS)
    return members


def _compare(
    job: JobStore, config: Config, env: Environment, member: RankInfo, chosen: torch.device
) -> rendezvous.Meeting:
    """Meet the other ranks in the job's store, and compare what must be equal."""
    timeout = config.launch.timeout_seconds
    store = part_of(job, StoreUser.MEETING)
    shared = what_ranks_share(config, chosen.type)

    def meet() -> rendezvous.Meeting:
        return rendezvous.meet(store, member, env.world_size, shared, timeout, outlives_ranks=env.agent_serves_store)

    limit_seconds = 2 * timeout + _MEETING_MARGIN_SECONDS
    try:
        return answered(meet, limit_seconds)
    except TimeoutError:
        raise CommunicationError(
            f"the job's store at {env.meeting} did not answer rank {env.rank} for {limit_seconds:g} s while ranks met: "
            "the process that keeps it, rank 0 or torchrun's agent, is stopped or its host is lost"
        ) from None


def _connect(env: Environment, timeout_seconds: float, *, serves_store: bool) -> JobStore:
    """A connection to the job's store; `serves_store`: this process runs the server too."""
    return connect(env.meeting, env.rank, env.world_size, serves_store=serves_store, timeout_seconds=timeout_seconds)


def what_ranks_share(config: Config, device_type: str) -> dict[str, Any]:
    """What every rank must agree on, as JSON types: options, code, versions and the type of device."""
    # These may differ between nodes: how many ranks a node has, their threads, and the name of the device.
    local = ("launch.nproc", "launch.device", "launch.threads")
    options = {path: value for path, value in flatten(config).items() if path not in local}
    versions = {"torch's version": torch.__version__}
    # The modules that these options name were imported when the options were checked, but for the optimizer's. A module
    # that they import from their own package counts as well: it may hold the layers of a family.
    find_optimizer(config.optimizer.name)
    outside = {plugins.package_of(name) for _, name in plugins.named_outside(config)}
    files = {}
    if schedule_files.is_file(config.parallel.schedule):
        # Nodes may have files of their own. Ranks that run unlike schedules would wait for each other for ever.
        orders = schedule_files.read(config.parallel.schedule).orders
        files["the file of parallel.schedule"] = blake2b(show(orders).encode(), digest_size=6).hexdigest()
    return {**options, **versions, **rendezvous.hashes_of_files(outside), **files, "the device": device_type}


@contextmanager
def job(
    config: Config,
    env: Environment,
    board: Board | None = None,
    explained: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[tuple[ParallelContext, RankProcess]]:
    """A context around a rank's whole work: the ranks meet before the block, and leave together after it.

    Yields this rank's context and process. `board` is that of `rank_process`; `join` says what is raised. Raises
    Preempted at the end if `RankProcess.stopped` says why the run has stopped. After a failure the process ends, and
    its launcher ends the others. `explained` makes contexts that turn errors into others that say more.
    """
    # Twice on purpose: the outer one also explains what the threads of `rank_process` run out of.
    with explained(), rank_process(config, env, board) as process, explained():
        ctx = join(config, env, process)
        yield ctx, process
        leave(ctx)
        if process.stopped:
            raise Preempted(process.stopped)


def leave(ctx: ParallelContext) -> None:
    """End a run after success or a save: wait for all ranks, then free the process groups.

    After a failure nobody calls this: the process ends, and its launcher ends the others.
    """
    # Without the barrier, rank 0 could take the store away while other ranks still use it.
    collectives.barrier(ctx.world)
    collectives.shutdown()
    ctx.flight.enter("end")
