"""The dtypes of the parameters of a layout."""

from collections.abc import Sequence

import torch
from torch import nn

from megapar.declare.params import ParamSpec


def common_dtype(params: Sequence[tuple[nn.Parameter, ParamSpec]]) -> torch.dtype:
    """The dtype of all parameters but precise ones: fp32, bf16 or fp16. It is fp32 if there are no others.

    Raises TypeError, naming the parameter, if a dtype is unsupported or two dtypes are mixed.
    """
    for param, spec in params:
        if spec.precise and param.dtype != torch.float32:
            raise TypeError(f"{spec.name} is {param.dtype}: a parameter declared precise must be torch.float32")
    params = [(param, spec) for param, spec in params if not spec.precise]
    if not params:
        return torch.float32
    first, first_spec = params[0]
    if first.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"{first_spec.name} is {first.dtype}: parameters must be all torch.float32, bfloat16 or float16"
        )
    for param, spec in params:
        if param.dtype != first.dtype:
            raise TypeError(
                f"{spec.name} is {param.dtype} and {first_spec.name} is {first.dtype}: all parameters must have one "
                "dtype, or be declared precise"
            )
    return first.dtype


def gathered_itemsize(spec: ParamSpec, dtype: torch.dtype) -> int:
    """The bytes of an element that ZeRO-3 gathers of a parameter for a step: those of a weight, or of a code."""
    return torch.uint8.itemsize if spec.quantized else dtype.itemsize
