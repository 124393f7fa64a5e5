"""The machine: environment, device, backend, threads, determinism. The only reader of os.environ, the only place that
knows "cuda"."""

import errno
import os
import re
import resource
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from megapar_kernels.backend import Backend, Kernels, select

from megapar.errors import ConfigError


class Peak(NamedTuple):
    """Dense peaks (without sparsity) of one device in TFLOP/s: bf16 and fp16, TF32 on tensor cores, fp32 without
    them."""

    half: float
    tf32: float
    fp32: float


# From NVIDIA's data sheets, by a part of the device's name. The first that fits counts: "GB200" contains "B200".
PEAK_TFLOPS = {
    "GB200": Peak(2500.0, 1250.0, 80.0),
    "B200": Peak(2250.0, 1125.0, 75.0),
    "H100 PCIe": Peak(756.0, 378.0, 51.2),
    "H100 NVL": Peak(835.0, 417.5, 60.0),
    "H100": Peak(989.0, 494.5, 66.9),
    "H200": Peak(989.0, 494.5, 66.9),
    "A100": Peak(312.0, 156.0, 19.5),
    "L40S": Peak(362.0, 183.0, 91.6),
}


@dataclass(frozen=True)
class Environment:
    """This process among its peers, and where they meet.

    `meeting` is "tcp://host:port" or "file://path" of the store at which ranks find each other, "" for one process.
    `serves_store`: rank 0 must open the TCP store itself; torchrun's agent has opened one already. `attempt` counts
    torchrun's restarts. `launcher` started this process. `cores` are those that this rank may use.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    meeting: str = ""
    serves_store: bool = False
    attempt: int = 0
    launcher: Literal["none", "local", "torchrun", "slurm"] = "none"
    cores: int = 1

    @property
    def launched(self) -> bool:
        """Whether torchrun or Slurm started this process."""
        return self.launcher in ("torchrun", "slurm")


# What a launcher tells each process apart. The other variables are the same on all ranks.
_OWN_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """This process's rank, from torchrun's variables (RANK, WORLD_SIZE ...), else from those of a Slurm step, else one
    process.

    Raises ConfigError, naming the variable, if some are missing, are no numbers, or contradict each other.
    """
    env = os.environ if variables is None else variables
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun_environment(env)
    if in_slurm_step(env):
        return _slurm_environment(env)
    return Environment(cores=usable_cores())


def first_to_speak() -> bool:
    """Whether this process tells errors before ranks know each other: rank 0, or a process whose own variables are
    wrong, because no other process can tell that."""
    try:
        return environment().rank == 0
    except ConfigError as error:
        return not error.everywhere or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process.

    The shell of a batch script or of salloc has SLURM_NTASKS and SLURM_PROCID too, but it is no task: its step has no
    number, or one of the numbers from 0xfffffffa that Slurm reserves (interactive, batch, external).
    """
    step = env.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in env and step.isdigit() and int(step) < 0xFFFFFFFA


def refuse_slurm_shell(variables: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError in the shell of a Slurm allocation of several tasks: training there would use one of them."""
    env = os.environ if variables is None else variables
    if _number(env, "SLURM_NTASKS", 1) > 1 and not in_slurm_step(env) and "RANK" not in env:
        raise ConfigError(
            f"this shell belongs to a Slurm allocation of {env['SLURM_NTASKS']} tasks, but srun did not start this "
            "process: start it by srun, or with --launch.nproc N on this node alone"
        )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d+", text):
        shown = f"{name}={text!r}" if name in env else f"{name} is not set"
        error = ConfigError(f"{shown}: a launcher sets it to a whole number; use torchrun, srun or --launch.nproc")
        error.everywhere = name not in _OWN_VARIABLES
        raise error
    return int(text)


def _of_this_process(text: str) -> ConfigError:
    """An error in what a launcher told this process alone: other ranks do not raise it."""
    error = ConfigError(text)
    error.everywhere = False
    return error


def _torchrun_environment(env: Mapping[str, str]) -> Environment:
    rank = _number(env, "RANK")
    world_size = _number(env, "WORLD_SIZE")
    local_rank = _number(env, "LOCAL_RANK", 0)
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", 1)
    if rank >= world_size:
        raise _of_this_process(f"RANK={rank}, WORLD_SIZE={world_size}: ranks count from 0 to {world_size - 1}")
    if local_rank >= local_world_size:
        local_world_size = local_rank + 1  # set by hand: LOCAL_RANK alone says how many there are at least
    # torchrun's agent serves the store of its workers; without the agent rank 0 does.
    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        meeting=_tcp_meeting(env, "torchrun sets them") if world_size > 1 else "",
        serves_store=rank == 0 and not agent_serves,
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        launcher="torchrun",
        cores=max(1, usable_cores() // local_world_size),
    )


def _slurm_environment(env: Mapping[str, str]) -> Environment:
    rank = _number(env, "SLURM_PROCID")
    world_size = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    local_world_size = _tasks_on_this_node(env)
    if rank >= world_size:
        text = f"SLURM_PROCID={rank} of {world_size} tasks: this process inherited another step's variables"
        raise _of_this_process(text)
    # srun binds a task to its own cores if it was told how many: then they are not shared out again.
    cores = _number(env, "SLURM_CPUS_PER_TASK", max(1, usable_cores() // local_world_size))
    example = "export the first node's name and a free port, as pretrain_scripts/llama_70b_slurm.sh does"
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=local_world_size,
        meeting=_tcp_meeting(env, example) if world_size > 1 else "",
        serves_store=rank == 0,
        launcher="slurm",
        cores=max(1, min(cores, usable_cores())),
    )


def _tcp_meeting(env: Mapping[str, str], example: str) -> str:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not set: ranks cannot find each other; {example}")
    port = _number(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
    return f"tcp://{env['MASTER_ADDR']}:{port}"


def _tasks_on_this_node(env: Mapping[str, str]) -> int:
    """From "8(x2),3": two nodes with 8 tasks, then one with 3; this node's number is SLURM_NODEID."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return _number(env, "SLURM_NTASKS_PER_NODE", 1)
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={text!r}: expected something like 8(x2),3")
        tasks += [int(match[1])] * int(match[2] or 1)
    node = _number(env, "SLURM_NODEID", 0)
    if node >= len(tasks):
        raise _of_this_process(f"SLURM_NODEID={node}, SLURM_TASKS_PER_NODE={text!r}: this node is not in the list")
    return tasks[node]


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity mask, and the container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")  # "max 100000" or "200000 100000": microseconds of each period
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def cuda_devices() -> int:
    """GPUs that torch sees, without starting CUDA in this process (so that it can still fork)."""
    return torch.cuda.device_count()


def unseen_gpu(variables: Mapping[str, str] | None = None, nodes: Path = Path("/dev")) -> str:
    """Why torch sees none of this machine's NVIDIA GPUs, as a sentence; "" if it sees one or there is none.

    A machine has a GPU if the driver made /dev/nvidia0 and so on. CUDA_VISIBLE_DEVICES="" hides them on purpose.
    """
    env = os.environ if variables is None else variables
    gpus = [path.name for path in nodes.glob("nvidia[0-9]*")]
    if not gpus or cuda_devices() or env.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return ""
    if torch.version.cuda is None:
        return f"this machine has {len(gpus)} GPU(s), but torch {torch.__version__} was built without CUDA"
    return (
        f"this machine has {len(gpus)} GPU(s), but torch {torch.__version__} sees none: its driver may be too old for "
        f"CUDA {torch.version.cuda} (nvidia-smi shows the driver's), or CUDA_VISIBLE_DEVICES names none of them"
    )


def choose(name: str, local_rank: int, local_world_size: int, *, own_gpus: bool = False) -> torch.device:
    """The device of this rank: `cpu`, `cuda`, or `auto`, which is cuda where torch sees a GPU.

    `own_gpus`: a launcher may show each task its own GPU alone, as Slurm's --gpus-per-task does; a task that sees one
    then uses it. (Ranks that share a GPU after all are refused when they meet: megapar.rendezvous.) Raises ConfigError
    if there are GPUs, but fewer than local ranks, or none and `cuda` was asked for: training never moves to the CPU in
    silence.
    """
    visible = cuda_devices()
    if name == "cpu" or (name == "auto" and visible == 0):
        return torch.device("cpu")
    if visible == 0:
        reason = unseen_gpu() or "there is no GPU here"
        raise ConfigError(f"launch.device={name}: {reason}; --launch.device cpu runs over gloo")
    if visible == 1 and own_gpus:
        return torch.device("cuda", 0)
    if visible < local_world_size:
        raise ConfigError(
            f"launch.device={name}: {visible} GPU(s) for {local_world_size} ranks on this node; start at most "
            f"{visible} here (--launch.nproc, torchrun's --nproc-per-node), or --launch.device cpu runs over gloo"
        )
    return torch.device("cuda", local_rank)


def backend(device: torch.device) -> str:
    """nccl between GPUs, gloo between CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def choose_kernels(name: Backend, device: torch.device) -> Kernels:
    """The implementation of each op that `kernels.backend` means here. Raises ConfigError if it cannot serve.

    Attention is cuDNN's on Hopper and Blackwell, unless deterministic kernels were asked for.
    """
    modern = device.type == "cuda" and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        return select(name, device, "cudnn" if modern and not deterministic else "torch")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def prepare(device: torch.device, *, threads: int, cores: int = 1, deterministic: bool) -> None:
    """Threads, current GPU and kernel choice of this process.

    `threads` 0 leaves OMP_NUM_THREADS as it is, or takes `cores` where that is not set. Raises ConfigError if CUDA does
    not start.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.10 turns it off: results would move
    if threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or cores)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Else torch fills every buffer that it hands out, which our kernels write whole.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        # Read when CUDA starts. Segments that grow leave no holes between tensors of many sizes: at 8B parameters,
        # what a fixed segment wastes decides whether the model fits.
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same setting
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        try:
            torch.cuda.set_device(device)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"launch.device: {device} does not start ({reason}); --launch.device cpu runs over gloo"
            ) from error


def gpu_id(device: torch.device) -> str:
    """The serial number of a GPU (UUID), by which ranks notice that they share one; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def set_current(device: torch.device) -> None:
    """Make `device` this thread's GPU. A new thread begins with GPU 0, whatever the thread that started it uses."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next measures finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialized host memory, 1-D uint8, that the device copies to at full speed: pinned for a GPU.

    Memory of its own is pinned, as torch's allocator of pinned memory rounds sizes up to a power of two: up to twice.
    """
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    if device.type == "cuda" and nbytes:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    return buffer


def out_of_memory(error: BaseException) -> str:
    """Why `error` means that memory or threads ran out, in a line; "" if it means something else."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):  # a GPU's: tried, total and free sizes stand in two sentences
        return ". ".join(text.split(". ")[:3])
    if "can't start new thread" in text:
        return "can't start another thread: the limit of processes (ulimit -u) or memory (ulimit -v) is reached"
    if "DefaultCPUAllocator" in text:
        tried = re.search(r"you tried to allocate (\d+) bytes", text)
        return f"the host refused {int(tried[1]) / 2**30:,.3f} GiB more" if tried else "the host refused more memory"
    if "Storage size calculation overflowed" in text:
        return text
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return text or "the host refused more memory"
    return ""


def peak_memory_bytes(device: torch.device) -> int:
    """Most device memory allocated so far; on a CPU this process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE) if status.is_file() else None
    if found:
        return int(found[1]) * 1024
    # Elsewhere than on Linux. ru_maxrss outlives exec: it may be the peak of the program that started this one.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_tflops(device: torch.device, precision: Literal["fp32", "bf16", "fp16"] = "bf16") -> float:
    """The device's dense peak in TFLOP/s for matrix products of `precision`, 0 if it is not in the table.

    fp32 products run on tensor cores as TF32 only if torch was told to (torch.set_float32_matmul_precision).
    """
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), Peak(0.0, 0.0, 0.0))
    if precision != "fp32":
        return peak.half
    return peak.fp32 if torch.get_float32_matmul_precision() == "highest" else peak.tf32


def describe(device: torch.device) -> str:
    """The hardware in words, for logs and benchmark files."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
