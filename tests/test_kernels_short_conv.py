"""The short causal convolution by our kernels, interpreted, beside fp64."""

from typing import Any

import pytest
import torch
from megapar_kernels.short_conv import short_conv
from megapar_kernels.short_conv_kernels import BACKWARD_ROWS, COLUMNS, RUN
from torch import Tensor

from tests.support.kernel_checks import compare, needs_triton
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def places(length: int, *samples: list[int]) -> Tensor:
    """How many positions of its document are in front of each, [s, b], where documents start at these positions.

    The first document of a sample goes on from a run before, and has 2 positions there.
    """
    found = torch.empty(len(samples), length, dtype=torch.long)
    for row, starts in zip(found, samples, strict=True):
        ends = [*starts, length]
        row[: ends[0]] = torch.arange(2, 2 + ends[0])
        for start, end in zip(starts, ends[1:], strict=True):
            row[start:end] = torch.arange(end - start)
    return found.t()  # not contiguous, as a layer has it


def conv(*inputs: Any, impl: Any) -> Tensor:
    x, weight, bias, before, place, silu = inputs
    return short_conv(x, weight, bias, before, place, silu=silu, impl=impl)


# Length, samples, channels, width, and what else there is.
CASES: dict[str, dict[str, Any]] = {
    "all": {"shape": (21, 2, 10), "before": True, "bias": True, "place": places(21, [3, 4, 11], [])},
    "several runs": {
        "shape": (RUN + BACKWARD_ROWS + 3, 1, COLUMNS + 5),
        "place": places(RUN + BACKWARD_ROWS + 3, [RUN - 1, RUN + 17]),
    },
    "one position": {"shape": (1, 1, 1), "before": True},
    "shorter than the width": {"shape": (2, 2, 7), "before": True, "bias": True, "width": 7, "silu": False},
    "width 1": {"shape": (9, 1, 3), "width": 1},
    "width 3 without SiLU": {"shape": (40, 2, 33), "width": 3, "silu": False, "bias": True},
    "documents alone": {"shape": (40, 1, 33), "place": places(40, [0, 1, 2, 17])},
}
SWEEP = [(name, dtype, layout) for name in CASES for dtype in (torch.float32, torch.bfloat16, torch.float16)
         for layout in ("guarded", "strided")]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "layout"), slow_but([0, 3, 14, 19], SWEEP))
def test_it_is_the_convolution_in_fp64(name: str, dtype: torch.dtype, layout: str) -> None:
    case = CASES[name]
    length, samples, channels = case["shape"]
    width = case.get("width", 4)
    bias = random(channels) if case.get("bias") else None
    before = random(width - 1, samples, channels) if case.get("before") else None
    inputs = random(length, samples, channels), random(channels, 1, width), bias, before, case.get("place")
    compare(conv, (*inputs, case.get("silu", True)), dtype, wide=(1, 2), layout=layout)


def test_documents_and_what_is_in_front_of_a_sample_are_read_as_one_sum() -> None:
    """Position by position, in fp64: what the torch form computes, from the formula."""
    x, weight, before = (y.detach() for y in (random(11, 2, 3), random(3, 1, 4), random(3, 2, 3)))
    place = places(11, [4], [1, 2])
    wide = torch.cat([before, x])
    expected = torch.zeros_like(x)
    for t in range(11):
        for b in range(2):
            for back in range(min(3, int(place[t, b])) + 1):
                expected[t, b] += weight[:, 0, 3 - back] * wide[3 + t - back, b]
    for impl, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        found = conv(x.to(dtype), weight.to(dtype), None, before.to(dtype), place, False, impl=impl)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
