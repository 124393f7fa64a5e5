"""What all kernels share: Triton where it is installed, and when a kernel is worth its launch."""

from typing import Any, Literal

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # there is none for macOS and Windows: torch's own ops serve there
    HAS_TRITON = False

    class _NoTriton:
        constexpr = None

        def jit(self, function: Any) -> Any:
            return function

    triton = tl = _NoTriton()

__all__ = [
    "HAS_TRITON",
    "Implementation",
    "fused",
    "interpreting",
    "launches",
    "multiprocessors",
    "next_power_of_2",
    "tl",
    "triton",
]

Implementation = Literal["torch", "triton", "apex"]

# Elements below which a launch from Python costs more than the memory traffic that fusion saves: Liger's fused norm of
# 1024 columns takes four times as long as torch's on an H100.
SMALL = 1 << 20


def fused(how: Implementation, x: Tensor) -> bool:
    """Whether a Triton kernel serves `x`: asked for, and large enough if on a GPU. (On a CPU it is interpreted.)

    A meta tensor stands for one on a GPU, or on a CPU where kernels are interpreted.
    """
    if how != "triton":
        return False
    on_gpu = x.is_cuda or (x.is_meta and not interpreting())
    return not on_gpu or x.numel() >= SMALL


def launches(x: Tensor) -> bool:
    """Whether there is anything to launch a kernel for: `x` has elements, and memory that holds them (not meta)."""
    return x.numel() > 0 and not x.is_meta


def interpreting() -> bool:
    """Whether kernels are interpreted on the CPU (TRITON_INTERPRET=1 before triton is imported), for tests."""
    return HAS_TRITON and bool(triton.knobs.runtime.interpret)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
