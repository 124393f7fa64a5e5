"""Which implementation serves each op, chosen once for a run and on every rank alike."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from megapar_kernels import apex
from megapar_kernels.dispatch import HAS_TRITON, Implementation, interpreting

Backend = Literal["auto", "triton", "torch", "apex"]


@dataclass(frozen=True)
class Kernels:
    """The implementation of each op; the default, torch's own ops, serves anywhere."""

    norm: Implementation = "torch"
    activation: Implementation = "torch"
    rope: Implementation = "torch"
    dropout: Implementation = "torch"
    softmax: Implementation = "torch"
    cross_entropy: Implementation = "torch"
    adamw: Implementation = "torch"
    weight_gradient: Implementation = "torch"
    attention: Literal["torch", "cudnn"] = "torch"
    """Which of torch's SDPA backends is tried first."""

    def __str__(self) -> str:
        """The implementations with their ops, or the one of all."""
        ops: dict[str, list[str]] = {}
        for op, impl in asdict(self).items():
            ops.setdefault(impl, []).append(op)
        if len(ops) == 1:
            return next(iter(ops))
        return "; ".join(f"{impl}: {', '.join(names)}" for impl, names in ops.items())


FUSED = Kernels(
    norm="triton",
    activation="triton",
    rope="triton",
    dropout="triton",
    softmax="triton",
    cross_entropy="triton",
    adamw="triton",
    weight_gradient="torch",
)
APEX = replace(FUSED, norm="apex", adamw="apex", weight_gradient="apex")


def select(backend: Backend, device: torch.device, attention: Literal["torch", "cudnn"] = "torch") -> Kernels:
    """What `kernels.backend` stands for on `device`: auto is triton on a GPU where it is installed, else torch.

    Weight gradients are torch's mixed-precision GEMM. apex has norms, AdamW and weight gradients; triton does the rest.
    On the meta device nothing is computed, so nothing needs to be installed: auto is torch, and apex, whose norms keep
    what ours keep for the backward pass, is triton. Raises ValueError, in one line, for a backend that was asked for
    and cannot serve.
    """
    if device.type == "meta":
        return Kernels() if backend in ("auto", "torch") else FUSED
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
        if reason := apex.unusable():
            raise ValueError(f"kernels.backend=apex: {reason}; {apex.BUILD}, or choose auto")
        return replace(APEX, attention=attention)
    return replace(FUSED, attention=attention)
