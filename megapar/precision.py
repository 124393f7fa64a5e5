"""Number formats: what weights and activations are stored in. Gradients, main weights, moments and losses are fp32
in all."""

from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]


def model_dtype(precision: Precision) -> torch.dtype:
    """dtype of weights, activations and pipeline transfers."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
