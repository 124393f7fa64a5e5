"""Everything about the machine: device, backend, threads, determinism, memory.

No other module of megapar uses torch.cuda, and only environment.py beside it reads os.environ.
"""

import ctypes
import errno
import os
import re
import resource
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from megapar_kernels import delta_fused, grouped, tiled_attention
from megapar_kernels.backend import Backend, Kernels, LinearAttention, select

from megapar.base.errors import ConfigError
from megapar.base.precision import Precision
from megapar.system.environment import of_this_process


class PeakTflops(NamedTuple):
    """Peaks of one device in TFLOP/s, dense (without sparsity).

    `half` is for bf16 and fp16, `tf32` for TF32 on tensor cores, `fp32` for fp32 without tensor cores.
    """

    half: float
    tf32: float
    fp32: float


# From NVIDIA's data sheets, by a part of the device's name. The first match is used, so "GB200" must come before
# "B200", which it contains.
PEAK_TFLOPS = {
    "GB300": PeakTflops(2500.0, 1250.0, 80.0),
    "B300": PeakTflops(2250.0, 1125.0, 75.0),
    "GB200": PeakTflops(2500.0, 1250.0, 80.0),
    "B200": PeakTflops(2250.0, 1125.0, 75.0),
    "H100 PCIe": PeakTflops(756.0, 378.0, 51.2),
    "H100 NVL": PeakTflops(835.0, 417.5, 60.0),
    "H100": PeakTflops(989.0, 494.5, 66.9),
    "H200": PeakTflops(989.0, 494.5, 66.9),
    "A100": PeakTflops(312.0, 156.0, 19.5),
    "L40S": PeakTflops(362.0, 183.0, 91.6),
}


# glibc's malloc, by mallopt(3): memory free at the end of the heap beyond the first is given back to the system, and
# larger blocks than the second are taken from it one by one. Both in bytes, the second the largest that it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_FREE, _LARGEST_KEPT = 64 * 2**20, 32 * 2**20

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

# Of a run beside those of OpenMP: autograd, exchange, monitor, data, metrics, saves, watch, view, and two of each sink.
_OTHER_THREADS = 15


def cuda_devices() -> int:
    """Number of GPUs within torch's sight. Does not start CUDA: this process could not fork afterwards."""
    return torch.cuda.device_count()


def unseen_gpu(variables: Mapping[str, str] | None = None, nodes: Path = Path("/dev")) -> str:
    """A sentence on why torch sees none of this machine's NVIDIA GPUs.

    Returns "" if torch sees a GPU, or if there is none to see. A machine has a GPU if its driver has made /dev/nvidia0
    and so on. CUDA_VISIBLE_DEVICES="" hides them on purpose.
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
    """The device of this rank. `name` is `cpu`, `cuda`, or `auto`: cuda if torch sees a GPU, else cpu.

    `own_gpus`: the launcher may show each task its own GPU alone, as Slurm's --gpus-per-task does. A task with one
    visible GPU then uses it. If tasks share that GPU after all, `megapar.comm.rendezvous` refuses the run.

    Raises ConfigError if there are fewer GPUs than local ranks, or no GPU for `cuda`. A run meant for GPUs must
    not run on CPUs unnoticed.
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
    """The backend of collectives: nccl between GPUs, gloo between CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


CUDNN_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""GPUs of Hopper and Blackwell, by compute capability. There cuDNN's attention is faster than FlashAttention 2."""


def choose_kernels(
    backend: Backend, device: torch.device, *, compiled: bool = False, linear_attention: LinearAttention = "auto"
) -> Kernels:
    """Choose the implementation of each op on this device, as kernels.backend, compile and linear_attention say.

    Attention uses cuDNN on Hopper and Blackwell, unless deterministic kernels were asked for. Raises ConfigError if the
    backend does not work here.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    modern = capability in CUDNN_CAPABILITIES and not torch.are_deterministic_algorithms_enabled()
    try:
        kernels = select(
            backend, device, "cudnn" if modern else "torch", compiled=compiled, linear_attention=linear_attention
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if device.type == "cuda" and capability not in grouped.CAPABILITIES:
        kernels = replace(kernels, grouped_products="torch")
    if device.type == "cuda" and kernels.linear_attention == "triton" and capability not in delta_fused.CAPABILITIES:
        if linear_attention == "triton":
            text = f"has no tiles for a GPU of compute capability {capability[0]}.{capability[1]}; choose auto or torch"
            raise ConfigError(f"kernels.linear_attention=triton: {text}")
        kernels = replace(kernels, linear_attention="torch")
    served = device.type != "cuda" or capability in tiled_attention.CAPABILITIES
    return kernels if served else replace(kernels, masked_attention="torch")


class KernelOptions(Protocol):
    """The options of `kernels` that choose who computes an op."""

    @property
    def backend(self) -> Backend: ...

    @property
    def compile(self) -> bool: ...

    @property
    def linear_attention(self) -> LinearAttention: ...


def kernels_of(options: KernelOptions, device: torch.device, precision: Precision) -> Kernels:
    """Choose the implementation of each op on this device (`choose_kernels`), as the options of a run say.

    Raises ConfigError also for kernels.linear_attention triton or fla on a GPU in a run of fp32.
    """
    linear_attention = options.linear_attention
    if device.type == "cuda" and precision == "fp32" and linear_attention in ("triton", "fla"):
        raise ConfigError(
            f"kernels.linear_attention={linear_attention}, train.precision=fp32: on a GPU these kernels compute delta "
            "rules in 16 bits alone; choose train.precision bf16 or fp16, or kernels.linear_attention auto or torch"
        )
    return choose_kernels(options.backend, device, compiled=options.compile, linear_attention=linear_attention)


def prepare(device: torch.device, *, threads: int, cores: int = 1, deterministic: bool) -> None:
    """Set threads, current GPU, deterministic kernels, malloc and library settings of this process, before CUDA starts.

    `threads` 0 leaves the number of threads to OMP_NUM_THREADS, or to `cores` if that is not set. Raises ConfigError if
    CUDA does not start.
    """
    # Triton 3.10 turns fusion off by default. Results must not depend on the version.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or cores)
    if deterministic:
        # cuBLAS gives the same bits each time only with a fixed workspace, and torch then insists on this setting.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # By default torch also fills each empty buffer in this mode. Our kernels write their buffers whole.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cpu":
        _keep_freed_memory()
    if device.type == "cuda":
        _set_up_allocator()
        try:
            torch.cuda.set_device(device)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise of_this_process(
                f"launch.device: {device} does not start ({reason}); --launch.device cpu runs over gloo"
            ) from error


def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB that a micro-batch frees for the next one, unless the user has chosen.

    It raises its limits to these by itself as large blocks are freed. With blocks of 8 MiB it stops at 16 MiB: a step
    gave 40,000 pages back and took them again, filled with zeros.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_FREE)
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)


def _set_up_allocator() -> None:
    """Let segments of the allocator grow, unless the user has chosen: then no holes are left between tensors."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():  # the newer name and the older one
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # for processes that this one starts
        # torch has read a part of the variable when it was imported.
        torch._C._accelerator_setAllocatorSettings(os.environ["PYTORCH_ALLOC_CONF"])


def require_threads() -> None:
    """Raise RuntimeError unless this process may start the threads of a run.

    libgomp and torch's C++ code end the process with a word or a hundred lines of their own if the system refuses one.
    """
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(torch.get_num_threads() + _OTHER_THREADS)]
    try:
        for thread in threads:
            thread.start()
    finally:
        ended.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def gpu_id(device: torch.device) -> str:
    """The UUID of a GPU, "" for a CPU. Ranks compare it to find out whether they share a GPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def pci_address(device: torch.device) -> str:
    """The place of a GPU on the host's PCI bus, such as 0000:1b:00.0; "" for a CPU."""
    if device.type != "cuda":
        return ""
    at = torch.cuda.get_device_properties(device)
    return f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"  # type: ignore[attr-defined]


def set_connections(device: torch.device, number: int | None) -> None:
    """Set the number of a GPU's hardware queues, before CUDA starts; None leaves it to CUDA, which takes 8.

    A user's own CUDA_DEVICE_MAX_CONNECTIONS stays.
    """
    if device.type == "cuda" and number is not None:
        os.environ.setdefault(CONNECTIONS, str(number))


def connections() -> str:
    """The number of hardware queues that this process asks of its GPU, "" for CUDA's own."""
    return os.environ.get(CONNECTIONS, "")


def set_current(device: torch.device) -> None:
    """Make `device` the current GPU of this thread. A new thread starts with GPU 0, whatever its parent thread uses."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work. A clock read next includes that work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_asynchronous(device: torch.device) -> bool:
    """Whether the device computes while the host goes on. Then the host waits when it reads a value.

    A GPU does. A CPU has computed a value when the call returns, so reading it costs nothing.
    """
    return device.type != "cpu"


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device. The host does not wait for queued work."""
    if device.type == "cuda" and not x.is_cuda:
        # CUDA copies from pageable memory through a buffer of its own, and may first wait for all queued work.
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor in host memory. The device writes it in its own time. `wait` returns the copy.

    The tensor must not change afterwards: on a CPU the copy is the tensor itself.
    """

    def __init__(self, tensor: torch.Tensor):
        # From a GPU with non_blocking: torch allocates pinned memory for the copy and returns before it is written.
        self._copy = tensor.to("cpu", non_blocking=True)
        self._written: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Wait until the device has written the copy. What is queued behind the copy is not waited for."""
        if self._written is not None:
            self._written.synchronize()
        return self._copy


Moment = float | torch.cuda.Event
"""A moment in the work of a device: seconds of time.perf_counter, or an event that a GPU has yet to reach."""


class DeviceClock:
    """Tells when a device reached moments in its work, in seconds of time.perf_counter.

    A GPU reaches a moment when its current stream has computed what was queued before. Marking one does not wait.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._origin: Moment = time.perf_counter()
        if self._on_gpu:
            synchronize(device)
            self._origin = self.moment()
            synchronize(device)
        self._origin_seconds = time.perf_counter()

    def moment(self) -> Moment:
        """The moment now."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, moments: Sequence[Moment]) -> list[float]:
        """The seconds of `moments`. The last one is the newest. Waits until the device has reached it."""
        newest = moments[-1]
        if isinstance(newest, float):
            return [moment for moment in moments if isinstance(moment, float)]
        newest.synchronize()
        seconds = [self._origin_seconds + self._origin.elapsed_time(moment) / 1000 for moment in moments]  # type: ignore[union-attr, arg-type]
        # CUDA counts in fp32: far from its origin a microsecond would be lost.
        self._origin = newest
        self._origin_seconds = seconds[-1]
        return seconds


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate uninitialized host memory, 1-D uint8, for copies from the device at full speed.

    For a GPU the memory is pinned. For the meta device there is none.
    """
    if device.type == "meta":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # Not torch's pin_memory: its allocator rounds sizes up to a power of two, which may take twice the memory.
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    if device.type == "cuda" and nbytes:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    return buffer


def out_of_memory(error: BaseException) -> str:
    """One line on the memory that ran out, or on the threads refused. "" if `error` means something else."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        # Of a GPU. The first three sentences give the sizes: tried, total and free.
        return ". ".join(text.split(". ")[:3])
    if "can't start new thread" in text:
        return "can't start another thread: the limit of processes (ulimit -u) or memory (ulimit -v) is reached"
    if "DefaultCPUAllocator" in text:
        tried = re.search(r"you tried to allocate (\d+) bytes", text)
        if tried is None:
            return "the host refused more memory"
        return f"the host refused {int(tried[1]) / 2**30:,.3f} GiB more"
    if "Storage size calculation overflowed" in text:
        return text
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return text or "the host refused more memory"
    return ""


def peak_memory_bytes(device: torch.device) -> int:
    """The most device memory allocated so far, in bytes. On a CPU the peak resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():
        peak_kib = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE)
        if peak_kib:
            return int(peak_kib[1]) * 1024
    # Not Linux. ru_maxrss is kept across exec, so it may be the peak of the program that started this one.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_tflops(device: torch.device, precision: Precision = "bf16") -> float:
    """The dense peak of the device in TFLOP/s for matrix products in `precision`, 0 if the table does not have it.

    fp32 products run on tensor cores as TF32 only if torch was told to (torch.set_float32_matmul_precision).
    """
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), PeakTflops(0.0, 0.0, 0.0))
    if precision != "fp32":
        return peak.half
    uses_tf32 = torch.get_float32_matmul_precision() != "highest"
    if uses_tf32:
        return peak.tf32
    return peak.fp32


def boot_id() -> str:
    """A random id that the kernel made when it started, or "". Processes with one id share their clock."""
    path = Path("/proc/sys/kernel/random/boot_id")
    if path.is_file():
        return path.read_text().strip()
    return ""


def memory_bytes(device: torch.device, ranks_of_host: int = 1) -> int:
    """The memory of the device in bytes. The memory of a host is shared evenly among its `ranks_of_host` ranks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_of_host


def describe(device: torch.device) -> str:
    """The hardware in words, for logs and benchmark files."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores"
