"""The machine: environment, device, backend, threads, determinism. The only reader of os.environ, the only place that
knows "cuda"."""

import os
import resource
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from megapar_kernels.backend import Backend, Kernels, select

from megapar.errors import ConfigError

# bf16 dense peak of one device in TFLOP/s, NVIDIA's data sheets (without sparsity), by a part of the device's name.
PEAK_TFLOPS = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}


@dataclass(frozen=True)
class Environment:
    """This process among its peers, and how they find each other (`init_method` of torch.distributed)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str = "env://"

    @property
    def launched(self) -> bool:
        """Whether torchrun or Slurm started this process."""
        return self.world_size > 1 or self.init_method != "none"


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Ranks from torchrun's variables, else Slurm's, else one process.

    Raises ConfigError if Slurm's are there without MASTER_ADDR and MASTER_PORT.
    """
    env = os.environ if variables is None else variables
    if "RANK" in env and "WORLD_SIZE" in env:
        local = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        return Environment(int(env["RANK"]), int(env["WORLD_SIZE"]), *local)
    if int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set under Slurm: ranks cannot find each other; export the first node's "
                "name and a free port, as pretrain_scripts/llama_70b_slurm.sh does"
            )
        per_node = int(env["SLURM_NTASKS_PER_NODE"]) if "SLURM_NTASKS_PER_NODE" in env else 1
        return Environment(
            int(env["SLURM_PROCID"]),
            int(env["SLURM_NTASKS"]),
            int(env["SLURM_LOCALID"]),
            per_node,
            f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
        )
    return Environment(init_method="none")


def cuda_devices() -> int:
    """GPUs of this machine, without starting CUDA in this process (so that it can still fork)."""
    return torch.cuda.device_count()


def choose(name: str, local_rank: int, local_world_size: int) -> torch.device:
    """The device of this rank: `cpu`, `cuda`, or `auto`, which is cuda when each local rank has a GPU."""
    if name == "cpu" or (name == "auto" and cuda_devices() < max(local_world_size, 1)):
        return torch.device("cpu")
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


def prepare(device: torch.device, *, threads: int, local_world_size: int, deterministic: bool) -> None:
    """Threads, current GPU and kernel choice of this process; `threads` 0 shares the cores among the local ranks."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.10 turns it off: results would move
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // local_world_size))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def set_current(device: torch.device) -> None:
    """Make `device` this thread's GPU. A new thread begins with GPU 0, whatever the thread that started it uses."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next measures finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_buffer(numel: int, device: torch.device) -> torch.Tensor:
    """Uninitialised fp32 host memory that the device copies to at full speed: pinned for a GPU.

    Memory of its own is pinned, as torch's allocator of pinned memory rounds sizes up to a power of two: up to twice.
    """
    buffer = torch.empty(numel, dtype=torch.float32)
    if device.type == "cuda" and numel:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    return buffer


def peak_memory_bytes(device: torch.device) -> int:
    """Most device memory allocated so far; on a CPU the process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_tflops(device: torch.device) -> float:
    """The device's dense bf16 peak in TFLOP/s, 0 if it is not in the table."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), 0.0)


def describe(device: torch.device) -> str:
    """The hardware in words, for logs and benchmark files."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
