"""Kernels of NVIDIA's apex (github.com/NVIDIA/apex), used only on request: norms, AdamW, weight gradients in fp32.

apex is never a requirement, because the package called apex on PyPI is an unrelated web toolkit. `unusable` looks for
NVIDIA's without importing it. The functions that use it import it.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUILD = (
    "build it from a checkout of github.com/NVIDIA/apex with "
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation ."
)
EXTENSIONS = ("amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda")
_CHUNK = 2048 * 32  # elements that one block of apex's multi-tensor kernels takes


def unusable() -> str:
    """Why apex cannot be used, or "" if it can. Imports nothing of it."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "apex is not installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers/fused_adam.py").is_file() for folder in folders):
        location = f" ({folders[0]})" if folders else ""
        return f"the apex that is installed{location} is not NVIDIA's: pip uninstall apex"
    missing = [name for name in EXTENSIONS if importlib.util.find_spec(name) is None]
    if missing:
        return f"apex is installed without {', '.join(missing)}"
    return ""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, differentiable, in x's dtype."""
    from apex.normalization.fused_layer_norm import mixed_dtype_fused_rms_norm_affine

    return mixed_dtype_fused_rms_norm_affine(x, weight, weight.shape, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension, differentiable, in x's dtype."""
    from apex.normalization.fused_layer_norm import mixed_dtype_fused_layer_norm_affine

    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, weight.shape, eps).to(x.dtype)


def adamw(runs: Sequence[list[Tensor]], step: int, options: dict[str, Any]) -> None:
    """Make one AdamW update of fp32 tensors, in place.

    `runs` has four lists of tensors: main weights, gradients, first and second moments. `options` has lr, betas, eps
    and weight_decay.
    """
    import amp_C

    mains, grads, *moments = runs
    never = torch.zeros(1, dtype=torch.int32, device=mains[0].device)
    amp_C.multi_tensor_adam(
        *(_CHUNK, never, [grads, mains, *moments]),
        *(options["lr"], *options["betas"], options["eps"], step),
        *(1, True, options["weight_decay"]),  # decoupled decay, bias correction
    )


def add_weight_gradient(main_grad: Tensor, grad_2d: Tensor, x_2d: Tensor) -> None:
    """main_grad += grad_2d^T x_2d, of main_grad [out, in] in fp32, grad_2d [tokens, out] and x_2d [tokens, in]."""
    import fused_weight_gradient_mlp_cuda

    fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x_2d.contiguous(), grad_2d.contiguous(), main_grad)
