"""The position of this process in its job, from the variables of torchrun or Slurm, and the cores it may use."""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megapar.base.errors import ConfigError


@dataclass(frozen=True)
class Environment:
    """The position of this process among the ranks of the job, and how the ranks find each other.

    Ranks find each other through the store at `meeting`: "tcp://host:port" or "file://path", "" for one process. With
    `agent_serves_store` torchrun's agent has opened the TCP store, and keeps it when it starts the ranks again. With
    `serves_store` this process must open it: rank 0, unless the agent has. `launcher` started this process. `cores` is
    the number of CPU cores for this rank.

    A launcher may start the ranks of a `job` several times. `restart` is the number of starts before this one.
    `snapshots` is the local launcher's folder for checkpoints in host memory, "" without one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    meeting: str = ""
    serves_store: bool = False
    agent_serves_store: bool = False
    launcher: Literal["none", "local", "torchrun", "slurm"] = "none"
    cores: int = 1
    job: str = ""
    restart: int = 0
    snapshots: str = ""

    @property
    def launched(self) -> bool:
        """Whether torchrun or Slurm started this process."""
        return self.launcher in ("torchrun", "slurm")


# Variables that differ between processes. An error in one of them is an error of that process alone. The other
# variables are the same on all ranks.
_OWN_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
# A number of a launcher beyond this is a mistake: no machine has so many ranks, and lists of ranks would fill memory.
_MOST = 1_000_000


def read(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the rank of this process from torchrun's variables (RANK, WORLD_SIZE ...) or from those of a Slurm step.

    Without either, this is the only process. Raises ConfigError with the variables' names if some are missing, are no
    numbers, or contradict each other.
    """
    env = os.environ if variables is None else variables
    # torchrun first: started inside a Slurm step, it sets its own variables beside those of Slurm.
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun_environment(env)
    if in_slurm_step(env):
        return _slurm_environment(env)
    return Environment(cores=usable_cores())


def first_to_speak() -> bool:
    """Whether this process prints errors from before the meeting of the ranks.

    That is the first rank of each host, since files and devices of hosts may differ. A process with wrong
    variables of its own speaks as well, because no other process knows about that error.
    """
    try:
        return read().local_rank == 0
    except ConfigError as error:
        if not error.everywhere:
            return True
        # All ranks have this error. The rank is compared as text, because it may be what is wrong.
        rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
        return rank == "0"


def in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process.

    The shell of a batch script or of salloc has SLURM_NTASKS and SLURM_PROCID too, but it is no task. Its step has no
    number, or a reserved one, from 0xfffffffa on (interactive, batch, external).
    """
    step = env.get("SLURM_STEP_ID", "")
    # Up to ten digits: Python refuses to read thousands of them.
    return "SLURM_PROCID" in env and re.fullmatch("[0-9]{1,10}", step) is not None and int(step) < 0xFFFFFFFA


def refuse_slurm_shell(variables: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError in the shell of a Slurm allocation of several tasks: training would use one of them."""
    env = os.environ if variables is None else variables
    if _number(env, "SLURM_NTASKS", 1) > 1 and not in_slurm_step(env) and "RANK" not in env:
        raise ConfigError(
            f"this shell belongs to a Slurm allocation of {env['SLURM_NTASKS']} tasks, but srun did not start this "
            "process: start it by srun, or with --launch.nproc N on this node alone"
        )


def _number(env: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0) -> int:
    """The whole number in variable `name`, or `default`.

    Raises ConfigError for other text, without a value, or for a number below `least` or beyond any launcher's.
    """
    fallback = "" if default is None else str(default)
    text = env.get(name, fallback)
    if not re.fullmatch("[0-9]+", text):
        shown = f"{name}={_cut(text)!r}" if name in env else f"{name} is not set"
        problem = f"{shown}: a launcher sets it to a whole number; use torchrun, srun or --launch.nproc"
    # The length comes first: Python refuses to read thousands of digits.
    elif len(text) > len(str(_MOST)) or not least <= int(text) <= _MOST:
        problem = f"{name}={_cut(text)}: a launcher sets it to a number from {least} to {_MOST:,}"
    else:
        return int(text)
    error = ConfigError(problem)
    error.everywhere = name not in _OWN_VARIABLES
    raise error


def _cut(text: str) -> str:
    """`text`, or its beginning if it is too long for a line."""
    if len(text) <= 40:
        return text
    return f"{text[:40]}..."


def of_this_process(text: str) -> ConfigError:
    """An error in this process's own variables. Other ranks do not raise it, so this process prints it."""
    error = ConfigError(text)
    error.everywhere = False
    return error


def _torchrun_environment(env: Mapping[str, str]) -> Environment:
    rank = _number(env, "RANK")
    world_size = _number(env, "WORLD_SIZE", least=1)
    local_rank = _number(env, "LOCAL_RANK", 0)
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", 1, least=1)
    if rank >= world_size:
        raise of_this_process(f"RANK={rank}, WORLD_SIZE={world_size}: ranks count from 0 to {world_size - 1}")
    if local_rank >= world_size:
        raise of_this_process(f"LOCAL_RANK={local_rank}, WORLD_SIZE={world_size}: a host has no more ranks than a job")
    if local_world_size > world_size:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local_world_size}, WORLD_SIZE={world_size}: a host has no more ranks than a job"
        )
    if local_rank >= local_world_size:
        # Somebody has set LOCAL_RANK without LOCAL_WORLD_SIZE: there are at least this many.
        local_world_size = local_rank + 1
    # One process has nobody to meet, and may lack MASTER_ADDR and MASTER_PORT.
    meeting = _tcp_meeting(env, "torchrun sets them") if world_size > 1 else ""
    # torchrun's agent opens the store for its workers. Without an agent rank 0 must open it.
    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        meeting=meeting,
        serves_store=rank == 0 and not agent_serves,
        agent_serves_store=agent_serves,
        launcher="torchrun",
        cores=max(1, usable_cores() // local_world_size),
        job=f"torchrun {env.get('TORCHELASTIC_RUN_ID', '')}",
        restart=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _slurm_environment(env: Mapping[str, str]) -> Environment:
    rank = _number(env, "SLURM_PROCID")
    # A step may have fewer tasks than the allocation, so the step's number comes first.
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    world_size = _number(env, size_name, least=1)
    local_world_size = _tasks_on_this_node(env)
    if rank >= world_size:
        text = f"SLURM_PROCID={rank} of {world_size} tasks: this process inherited another step's variables"
        raise of_this_process(text)
    # With --cpus-per-task srun binds each task to its own cores. They must not be divided by the tasks a second time.
    cores = _number(env, "SLURM_CPUS_PER_TASK", max(1, usable_cores() // local_world_size), least=1)
    example = "export the first node's name and a free port, as pretrain_scripts/llama_70b_slurm.sh does"
    local_rank = _number(env, "SLURM_LOCALID")
    meeting = _tcp_meeting(env, example) if world_size > 1 else ""
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        meeting=meeting,
        serves_store=rank == 0,
        launcher="slurm",
        cores=max(1, min(cores, usable_cores())),
        job=f"slurm {env.get('SLURM_JOB_ID', '')}",
        restart=_number(env, "SLURM_RESTART_COUNT", 0),  # of a job that was requeued
    )


def _tcp_meeting(env: Mapping[str, str], example: str) -> str:
    """The address of the TCP store. Raises ConfigError if MASTER_ADDR or MASTER_PORT is missing or wrong."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not set: ranks cannot find each other; {example}")
    port = _number(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
    return f"tcp://{_host_in_url(env['MASTER_ADDR'])}:{port}"


def _host_in_url(text: str) -> str:
    """MASTER_ADDR as it stands in a URL: an IPv6 address is in brackets.

    Raises ConfigError if it is neither a name nor an address.
    """
    bare = text.removeprefix("[").removesuffix("]")
    try:
        is_version_6 = ipaddress.ip_address(bare).version == 6
    except ValueError:
        is_version_6 = False
    if is_version_6:
        return f"[{bare}]"
    # Letters of any language: the resolver knows such names.
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)*\.?", text):
        raise ConfigError(
            f"MASTER_ADDR={_cut(text)!r}: give the name or the address of rank 0's host, such as node-1 or ::1"
        )
    return text


def _tasks_on_this_node(env: Mapping[str, str]) -> int:
    """The number of tasks of this job step on this node.

    Slurm lists the tasks of all nodes: "8(x2),3" means two nodes with 8 tasks each, then one with 3. SLURM_NODEID is
    the index of this node.
    """
    # The step's list comes first, as a step may use fewer tasks than the allocation.
    name = next((name for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if env.get(name)), "")
    if not name:
        return _number(env, "SLURM_NTASKS_PER_NODE", 1, least=1)
    node = _number(env, "SLURM_NODEID", 0)
    nodes = 0
    for part in env[name].split(","):
        # At most seven digits, as many as _MOST has.
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part.strip())
        if match is None or not 0 < int(match[1]) <= _MOST:
            raise ConfigError(f"{name}={_cut(env[name])!r}: expected something like 8(x2),3")
        # The list is not written out: a wrong number of nodes would fill memory.
        nodes += int(match[2] or 1)
        if node < nodes:
            return int(match[1])
    raise of_this_process(f"SLURM_NODEID={node}, {name}={_cut(env[name])!r}: this node is not in the list")


def exchange_interface(backend: str) -> str:
    """The network interface that the user has chosen for ranks on several hosts, "" for none or for several."""
    chosen = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "").removeprefix("=")
    return chosen if re.fullmatch(r"[\w.:-]+", chosen) else ""


def usable_cores() -> int:
    """CPU cores for this process: those of its affinity mask, limited by the container's quota."""
    # macOS has no affinity masks.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")  # such as "200000 100000" or "max 100000": limit and period in us
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores
