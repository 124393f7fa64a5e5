"""fp32 matrix products on a CPU by oneDNN, where it is faster than MKL.

torch gives fp32 products to MKL and those of 16 bits to oneDNN. On AMD's CPUs with AVX-512 oneDNN is the faster one for
fp32 too: `tools/benchmark.py products` measures both.
"""

import torch
from torch import Tensor

# oneDNN compiles code for each new number of rows, and keeps it: a millisecond, and 1 to 2 MiB. So it gets the rows of
# whole micro-batches and of their equal chunks. Rows of experts and of prompts have any number.
MULTIPLE_OF_ROWS = 64
LEAST_MATRIX = 1 << 16  # elements; for a smaller matrix a call costs more than it saves


def _vendor() -> str:
    """The maker of this host's CPU, such as AuthenticAMD, or "" if Linux does not say."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""


# Intel's CPUs are left to MKL: there the two were not compared.
IS_FASTER = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _vendor() == "AuthenticAMD"
)


def takes(x: Tensor, matrix: Tensor) -> bool:
    """Whether `linear` is faster than torch for x [..., in] and a matrix [out, in], and autograd does not record it."""
    return (
        IS_FASTER
        and x.is_cpu
        and x.dtype == matrix.dtype == torch.float32
        and matrix.numel() >= LEAST_MATRIX
        and x.numel() % (MULTIPLE_OF_ROWS * x.shape[-1]) == 0
        and not (torch.is_grad_enabled() and (x.requires_grad or matrix.requires_grad))
    )


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [..., out], from fp32 x [..., in], matrix [out, in] and bias [out], of any strides.

    From 16 rows on, a row's result has the same bits whatever the number of rows.
    """
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x.flatten(0, -2), matrix, bias, "none", [], "")
    # Not `unflatten`: autograd would take y for a view, and refuse to add to it in place.
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], len(matrix)])
