"""Chooses the implementation of each op. The choice is made once for a run, and is the same on every rank."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from megapar_kernels import apex, fla
from megapar_kernels.dispatch import HAS_TRITON, Implementation, interpreting

Backend = Literal["auto", "triton", "torch", "apex"]
LinearAttention = Literal["auto", "torch", "triton", "fla"]
FusedAttention = Literal["torch", "cudnn"]
"""Which of torch's fused operations for GPUs comes first: FlashAttention 2 ("torch"), or cuDNN's."""


@dataclass(frozen=True)
class Kernels:
    """The implementation of each op. The default, torch's own ops, works on every device."""

    norm: Implementation = "torch"
    activation: Implementation = "torch"
    rope: Implementation = "torch"
    dropout: Implementation = "torch"
    cross_entropy: Implementation = "torch"
    token_rows: Implementation = "torch"
    grouped_products: Implementation = "torch"
    """Who multiplies for all experts of a layer: torch for one after the other, triton for all at once."""
    quantize: Implementation = "torch"
    """FP8 codes of activations and weights."""
    adamw: Implementation = "torch"
    weight_gradient: Implementation = "torch"
    attention: FusedAttention = "torch"
    """The backend torch's SDPA tries first; "torch" leaves the choice to torch."""
    masked_attention: Implementation = "torch"
    """Attention with windows, caps of scores, sinks or dropout, for which torch has no fused operation."""
    linear_attention: Implementation = "torch"
    """Delta rules and the short convolutions in front of them."""

    @property
    def activation_of_experts(self) -> Implementation:
        """Return the implementation for rows of experts. torch.compile would compile for each number of rows."""
        return "torch" if self.activation == "inductor" else self.activation

    def __str__(self) -> str:
        """Each implementation with its ops, or one name if all ops have the same implementation."""
        ops: dict[str, list[str]] = {}
        for op, impl in asdict(self).items():
            ops.setdefault(impl, []).append(op)
        if len(ops) == 1:
            return next(iter(ops))
        return "; ".join(f"{impl}: {', '.join(names)}" for impl, names in ops.items())


TORCH = Kernels()
# torch's mixed-precision GEMM computes weight gradients, but for those of experts.
FUSED = Kernels(
    norm="triton",
    activation="triton",
    rope="triton",
    dropout="triton",
    cross_entropy="triton",
    token_rows="triton",
    grouped_products="triton",
    quantize="triton",
    adamw="triton",
    weight_gradient="torch",
    masked_attention="triton",
    linear_attention="triton",
)
# apex has no kernels for the other ops.
APEX = replace(FUSED, norm="apex", adamw="apex", weight_gradient="apex")
# The ops that torch.compile makes one pass of. Dropout, cross entropy and AdamW stay torch's.
COMPILED = Kernels(norm="inductor", activation="inductor", rope="inductor")


def select(
    backend: Backend,
    device: torch.device,
    attention: FusedAttention = "torch",
    *,
    compiled: bool = False,
    linear_attention: LinearAttention = "auto",
) -> Kernels:
    """The implementations meant by `kernels.backend`, `kernels.compile` and `kernels.linear_attention` on `device`.

    Raises ValueError with one line if an implementation was asked for and cannot be used.
    """
    kernels = _of_backend(backend, device, attention, compiled)
    if linear_attention == "auto":
        return kernels
    reason = ""
    if device.type == "meta" or linear_attention == "torch":
        pass
    elif linear_attention == "fla":
        reason = fla.unusable(device)
    elif not HAS_TRITON:
        reason = "triton is not installed; pip install triton"
    elif device.type != "cuda" and not interpreting():
        reason = f"needs a GPU, and this rank runs on {device.type}"
    if reason:
        raise ValueError(f"kernels.linear_attention={linear_attention}: {reason}, or choose auto or torch")
    return replace(kernels, linear_attention=linear_attention)


def _of_backend(backend: Backend, device: torch.device, attention: FusedAttention, compiled: bool) -> Kernels:
    """The implementations meant by `kernels.backend` and `kernels.compile` on `device`.

    auto means triton on a GPU if triton is installed, else torch. With apex, norms, AdamW and weight gradients are
    apex's, and the rest is triton. Raises ValueError with one line if a backend was asked for and cannot be used.
    """
    if compiled:  # with a backend of auto or torch (`validate`)
        return replace(COMPILED, attention="torch" if device.type == "meta" else attention)
    # On the meta device nothing is computed, so nothing needs to be installed. auto means torch there. The norms of
    # apex and triton keep the same for the backward pass, so triton stands for apex.
    if device.type == "meta":
        if backend in ("auto", "torch"):
            return Kernels()
        # These kernels are planned for a GPU, unless a CPU interprets them. On a GPU attention keeps the same with
        # cuDNN as with torch's other kernels.
        return FUSED if interpreting() else replace(FUSED, attention="cudnn")
    if backend == "torch" or (backend == "auto" and (device.type != "cuda" or not HAS_TRITON)):
        return Kernels(attention=attention)
    if not HAS_TRITON:
        raise ValueError(f"kernels.backend={backend}: triton is not installed; pip install triton, or choose torch")
    if device.type != "cuda" and not (backend == "triton" and interpreting()):
        raise ValueError(
            f"kernels.backend={backend}: needs a GPU, and this rank runs on {device.type}; choose auto or torch "
            "(for tests, TRITON_INTERPRET=1 interprets triton's kernels, slowly)"
        )
    if backend == "apex":
        reason = apex.unusable()
        if reason:
            raise ValueError(f"kernels.backend=apex: {reason}; {apex.BUILD}, or choose auto")
        return replace(APEX, attention=attention)
    return replace(FUSED, attention=attention)
