"""How kernels are compared: against fp64 by relative norm, on poisoned outputs and guarded inputs; natively on a GPU,
interpreted on a CPU (by Triton's interpreter as tests/support/triton_interpreter.py repairs it)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megapar_kernels.dispatch import HAS_TRITON
from torch import Tensor

from tests.support import triton_interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float64: 0.0}
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

if HAS_TRITON and DEVICE.type == "cpu":
    triton_interpreter.repair()


def relative_error(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact| in fp64; NaN if a NaN is in either, for it is below no limit."""
    x, exact = x.detach().double(), exact.detach().double()
    return float((x - exact).norm() / exact.norm().clamp(min=1e-30))


@contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialized memory from torch holds NaN (integers: their largest number), so elements forgotten by a kernel are
    seen."""

    def poison(x: Tensor) -> Tensor:
        if x.dtype == torch.bool:
            return x.fill_(True)
        return x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)

    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty
    with (
        patch.object(torch, "empty", lambda *a, **k: poison(empty(*a, **k))),
        patch.object(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k))),
        patch.object(Tensor, "new_empty", lambda x, *a, **k: poison(new_empty(x, *a, **k))),
    ):
        yield


class Guarded:
    """A contiguous tensor between bands of NaN: `check` fails if a kernel wrote to them; what reads them shows NaN."""

    BAND = 256

    def __init__(self, x: Tensor):
        memory = x.new_full((x.numel() + 2 * self.BAND,), float("nan"))
        self.bands = memory[: self.BAND], memory[memory.numel() - self.BAND :]
        self.tensor = memory[self.BAND : self.BAND + x.numel()].view(x.shape).copy_(x)

    def check(self) -> None:
        assert all(torch.isnan(band).all() for band in self.bands), "a kernel wrote outside its tensor"


def strided(x: Tensor) -> Tensor:
    """The same values at every other address of a wider row, as a slice of a fused projection has them."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"))
    view = wide[..., 1 : 1 + x.shape[-1]]
    return view.copy_(x)


Op = Callable[..., Any]


def _run(op: Op, inputs: Sequence[Any], impl: str, grads: Sequence[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the inputs requiring one for the upstream gradients `grads`."""
    with poisoned():
        y = op(*inputs, impl=impl)
        outputs = [y] if isinstance(y, Tensor) else list(y)
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        if grads is None or not wanted:
            return outputs, []
        return outputs, list(
            torch.autograd.grad(outputs, wanted, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
        )


def compare(
    op: Op, inputs: Sequence[Any], dtype: torch.dtype, *, wide: Sequence[int] = (), layout: str = "guarded"
) -> dict[str, float]:
    """Check `op(*inputs, how="triton")` and its derivatives against how="torch" in fp64, and against torch's own error.

    `inputs` are fp64 tensors (float ones are rounded to `dtype`, those numbered in `wide` to fp32), some requiring a
    gradient, and anything else. `layout` is how float inputs lie in memory: guarded or strided. Returns the errors.
    """
    guards: list[Guarded] = []

    def prepare(i: int, x: Any, exact: bool) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        low = x.detach().to(torch.float32 if i in wide else dtype).to(DEVICE)
        if exact:
            return low.double().requires_grad_(x.requires_grad)
        if layout == "guarded":
            guards.append(Guarded(low))
            low = guards[-1].tensor
        return (strided(low) if layout == "strided" else low).requires_grad_(x.requires_grad)

    exact_inputs = [prepare(i, x, True) for i, x in enumerate(inputs)]
    with torch.no_grad():
        shapes = op(*exact_inputs, impl="torch")
    generator = torch.Generator().manual_seed(7)
    grads = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype).double().to(DEVICE)
        for y in ([shapes] if isinstance(shapes, Tensor) else shapes)
    ]
    exact = _run(op, exact_inputs, "torch", grads)
    ours = _run(op, [prepare(i, x, False) for i, x in enumerate(inputs)], "triton", grads)
    theirs = _run(op, [prepare(i, x, False) for i, x in enumerate(inputs)], "torch", grads)
    errors = {}
    for kind, mine, torchs, reference in zip(("output", "gradient"), ours, theirs, exact, strict=True):
        for number, (x, t, r) in enumerate(zip(mine, torchs, reference, strict=True)):
            assert (x.dtype, x.shape) == (t.dtype, t.shape), (kind, number, x.dtype, t.dtype)
            error, limit = relative_error(x, r), TOLERANCE[x.dtype]
            errors[f"{kind} {number}"] = error
            assert error <= limit, f"{kind} {number}: error {error:.2e}, limit {limit:.0e}"
            assert error <= 2 * relative_error(t, r) + limit / 10, (
                f"{kind} {number}: {error:.2e}, torch's own {relative_error(t, r):.2e}"
            )
    for guard in guards:
        guard.check()
    return errors
