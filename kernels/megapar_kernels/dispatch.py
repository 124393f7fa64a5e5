"""What all kernels share: Triton if it is installed, and the decision whether a kernel is worth its launch."""

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # there is no triton for macOS and Windows, where torch's own ops are used
    HAS_TRITON = False

    # Lets the modules with kernels be imported. Their kernels are plain functions then, which nothing calls.
    class _NoTriton:
        def constexpr(self, value: Any) -> Any:
            return value

        def jit(self, function: Any = None, **_: Any) -> Any:
            return function or (lambda decorated: decorated)

    triton = tl = _NoTriton()

__all__ = [
    "HAS_TRITON",
    "LOG2_E",
    "GradientQueue",
    "Implementation",
    "MainGrad",
    "apply_function",
    "chunks_of",
    "exp",
    "fused",
    "given",
    "interpreting",
    "launches",
    "main_grad_of",
    "next_power_of_2",
    "on_gpu",
    "programs_at_once",
    "tl",
    "triton",
]

Implementation = Literal["torch", "triton", "apex", "inductor", "fla"]

# For fewer elements a launch from Python costs more than the memory traffic that fusion saves. On an H100 Liger's fused
# norm of 1024 columns takes four times as long as torch's.
SMALL = 1 << 20

# What a plan sees of kernels: ops that do nothing. Without the object torch would forget them.
_LIBRARY = torch.library.Library("megapar", "DEF")
_LIBRARY.define("kernel(Tensor[] tensors) -> ()")  # of `launches`
_LIBRARY.impl("kernel", lambda tensors: None, "Meta")
_LIBRARY.define("tiled_attention(Tensor[] tensors, int pairs, bool backward) -> ()")
_LIBRARY.impl("tiled_attention", lambda *_: None, "Meta")
_LIBRARY.define("linear_attention(Tensor like, int flops, int width, bool backward) -> ()")
_LIBRARY.impl("linear_attention", lambda *_: None, "Meta")
_LIBRARY.define("repeated(Tensor like, int times) -> ()")  # of `chunks_of`
_LIBRARY.impl("repeated", lambda *_: None, "Meta")
_LIBRARY.define("grouped_weight_gradients(Tensor totals_goi, Tensor grad_2d, Tensor x_2d) -> ()")
_LIBRARY.impl("grouped_weight_gradients", lambda *tensors: None, "Meta")
# Products of FP8 codes, with the bytes of their exponents in the tensors or beside them: out [..., n] from a [..., k]
# and b [n, k], or b [groups, n, k] of experts; and total [n, k] of a [n, positions] and b [k, positions], which are
# read and written.
_LIBRARY.define("scaled_product(Tensor a, Tensor b, Tensor out) -> ()")
_LIBRARY.impl("scaled_product", lambda *tensors: None, "Meta")
_LIBRARY.define("scaled_weight_gradient(Tensor a, Tensor b, Tensor total) -> ()")
_LIBRARY.impl("scaled_weight_gradient", lambda *tensors: None, "Meta")

LOG2_E = tl.constexpr(1.4426950408889634)  # log2(e)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """e^x of an fp32 tensor, in two instructions on a GPU. Results below the least normal number are 0.

    If x is a difference, subtract first and call this on the result: then e^0 is exactly 1.
    """
    # tl.exp takes five instructions, because it also returns subnormal numbers. They make cross entropy slower than the
    # memory. For a difference, one multiply-add a * log2(e) - b * log2(e) would save an instruction, but its error
    # grows with |a|.
    return tl.exp2(x * LOG2_E)


def on_gpu(x: Tensor, impl: Implementation) -> bool:
    """Whether `x` is on a GPU. A meta tensor stands for one on a GPU if `impl` is triton, unless it is interpreted."""
    return x.is_cuda or (x.is_meta and impl == "triton" and not interpreting())


def fused(impl: Implementation, x: Tensor) -> bool:
    """Whether a Triton kernel computes an op on `x`: if `impl` asks for it and, on a GPU, if `x` is large enough.

    On a CPU kernels are interpreted, whatever the size.
    """
    if impl != "triton":
        return False
    return not on_gpu(x, impl) or x.numel() >= SMALL


def launches(x: Tensor, *others: Tensor | None) -> bool:
    """Whether there is anything to launch a kernel for: `x` has elements and is not on the meta device.

    `others` are the other tensors that the kernel reads or writes. On the meta device the op `megapar::kernel` is
    called with all of them. It does nothing, but a dispatch mode sees it, and so a plan counts the bytes.
    """
    if x.is_meta:
        torch.ops.megapar.kernel([x, *(other for other in others if other is not None)])
    return x.numel() > 0 and not x.is_meta


def chunks_of(like: Tensor, count: int, *, backwards: bool = False) -> Iterator[int]:
    """Yield the numbers of `count` chunks for a loop that does the same for each of them.

    If `like` is on the meta device, yield the first of these numbers alone, and tell a plan how often the loop runs.
    """
    numbers = range(count - 1, -1, -1) if backwards else range(count)
    if not like.is_meta or not count:
        yield from numbers
        return
    torch.ops.megapar.repeated(like, count)
    yield numbers[0]
    torch.ops.megapar.repeated(like, 0)


def interpreting() -> bool:
    """Whether kernels are interpreted on the CPU (TRITON_INTERPRET=1 before triton is imported), for tests."""
    return HAS_TRITON and bool(triton.knobs.runtime.interpret)


class GradientQueue(Protocol):
    """Takes gradients, to add them later."""

    def append(self, entry: Any) -> None: ...


class MainGrad(Protocol):
    """The fp32 sum of a parameter's gradients over the micro-batches. It is the parameter's attribute `main_grad`.

    Megatron's attribute of the same name is the tensor itself.

    Whoever computes a parameter's gradient adds it here, and returns None for it to autograd. So the gradient is
    neither rounded to the parameter's dtype nor added a second time. A parameter used several times gets several
    additions. A kernel calls `add`. A layer may also add a matrix product straight to `tensor`, of the parameter's
    shape. It then calls `note_added` after each addition.

    While `is_stale` is True, `tensor` holds values of an earlier step. They count as zero, so the first addition of a
    step overwrites them. `note_added` sets `is_stale` to False.

    While `queue` is not None, gradients are appended to it instead: their addition is deferred.

    Read the attribute `main_grad` in the forward pass. Under activation checkpointing, backward unpacks another tensor,
    without attributes.
    """

    tensor: Tensor
    is_stale: bool
    queue: GradientQueue | None

    def note_added(self) -> None:
        """Say that a gradient has been added to `tensor`, or has overwritten it if it was stale."""

    def add(self, grad: Tensor) -> None:
        """Add `grad`, of the parameter's shape and any dtype, now or later."""


def main_grad_of(param: Tensor | None) -> MainGrad | None:
    """The `main_grad` of `param`. None for None, and if it has none: autograd then adds its gradient to `.grad`."""
    return getattr(param, "main_grad", None)


def given(main_grad: MainGrad | None, grad: Tensor | None, param: Tensor | None) -> Tensor | None:
    """Add the gradient to the parameter's main gradient. If there is none, return the gradient for autograd."""
    if grad is None or param is None:
        return None
    if main_grad is None:
        return grad.to(param.dtype)
    main_grad.add(grad)
    return None


class _NoGradient:
    """The `ctx` of a forward pass without a backward pass. It keeps no tensor."""

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply an autograd function. If no gradients are recorded, call its forward alone.

    `apply` takes 10 us on the host, and to generate a token each layer has 8 such functions.
    """
    if torch.is_grad_enabled():
        return function.apply(*args)
    return function.forward(_NoGradient(), *args)


def next_power_of_2(n: int) -> int:
    """The least power of two >= max(n, 1). Triton's tiles need powers of two."""
    return 1 << max(n - 1, 0).bit_length()


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of the GPU, or Hopper's where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def programs_at_once(device: torch.device, each: int) -> int:
    """How many programs run at a time if a multiprocessor of the GPU runs `each`.

    2 where kernels are interpreted, for tests: each program then has several tiles, as on a GPU.
    """
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * each
