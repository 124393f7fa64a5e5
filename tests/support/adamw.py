"""Numbers for updates of AdamW's kernels."""

import torch
from torch import Tensor

HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Runs that start and end in one program, span several, and are one UNIT; the last ends where the shard does.
RUNS = [(0, 64), (128, 1024 + 192), (1280, 3072 + 64), (3200, 4097)]


def numbers(elements: int, seed: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(elements: int, steps: int) -> list[Tensor]:
    """Of sizes 1e-12 to 10, some zero, exact in fp32. An element's have one sign: moments would cancel to less than a
    rounding else."""
    sizes = 10.0 ** torch.linspace(-12, 1, elements, dtype=torch.float64) * numbers(elements, 2).sign()
    return [(numbers(elements, 10 + i).abs() * sizes).float() * (torch.arange(elements) % 5 != i) for i in range(steps)]
