"""Records what one micro-batch does in a part of a model: its products, attention, memory traffic and communication.

A part is a pipeline stage, such as the embedding, one layer, or norm with head. Its own forward and backward run on the
meta device, so nothing here knows a family of models. A dispatch mode sees the operations of torch and the kernels of
`megapar_kernels` (`dispatch.launches`). The axes of a context made by `recording` note all
communication, and when the program waits for it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.base.precision import PRECISIONS
from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.comm.transport import Meta, Transfers
from megapar.declare.context import ParallelContext
from megapar.declare.sharding import model_dtype

META = torch.device("meta")


class Product(NamedTuple):
    """`number` products of matrices [m, k] x [k, n], one after the other. `moved_bytes` are those of all of them.

    `grouped` are those of several experts. Their sizes may differ; m, n and k then are means. `launches` is how many
    kernels compute them. `adds` are weight gradients in FP8, which add to fp32 sums.
    """

    m: float
    n: float
    k: float
    number: int
    precision: str
    moved_bytes: int
    grouped: bool = False
    launches: int = 1
    adds: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.number


class AttentionWork(NamedTuple):
    """Fused attention. `flops` are those of one forward pass, without masked scores.

    `tiled` is that of our kernels (`megapar_kernels.tiled_attention`).
    """

    flops: float
    width: int
    backward: bool
    precision: str
    moved_bytes: int
    tiled: bool = False


class Kernel(NamedTuple):
    """Any other operation. It takes the time of the bytes read and written."""

    moved_bytes: int


class Started(NamedTuple):
    """A communication starts. `nbytes` are those of the whole tensor, as `megapar.comm.collectives` counts them.

    For an all-to-all they are all rows of a rank, its own among them; for an exchange the bytes sent.
    """

    number: int
    axis: str
    operation: str
    nbytes: int


class Waited(NamedTuple):
    """What comes next needs the result of the communication `number`."""

    number: int


Operation = Product | AttentionWork | Kernel | Started | Waited
Operations = tuple[Operation, ...]


@dataclass
class Tape:
    """Collects operations while `recording_to` is open; otherwise it forgets them."""

    operations: list[Operation] | None = None
    started: int = 0

    def start(self, axis: str, operation: str, nbytes: int) -> Pending:
        if self.operations is None:
            return Pending()
        self.started += 1
        self.operations.append(Started(self.started, axis, operation, nbytes))
        return Pending([_Communication(self, self.started)])

    @contextmanager
    def collecting(self) -> Iterator[list[Operation]]:
        """Yield the list of what happens in the context."""
        found: list[Operation] = []
        self.operations = found
        try:
            yield found
        finally:
            self.operations = None

    @contextmanager
    def collecting_apart(self, found: list[Operation]) -> Iterator[None]:
        """Collect what happens in the context in `found`, if it would be collected."""
        outside = self.operations
        self.operations = None if outside is None else found
        try:
            yield
        finally:
            self.operations = outside


@dataclass
class _Communication:
    """A communication on a tape. Waiting for it is noted."""

    tape: Tape
    number: int

    def wait(self) -> None:
        if self.tape.operations is not None:
            self.tape.operations.append(Waited(self.number))

    def is_completed(self) -> bool:
        return False


class _Recorder(Meta):
    """The transport of an axis of a planned rank, with a note on a tape."""

    name: ClassVar[str] = "recorder"

    def __init__(self, axis: Axis, tape: Tape):
        super().__init__(sorts_groups=axis.transport.sorts_groups)
        self._axis = axis.name
        self._tape = tape

    def all_reduce(self, x: Tensor, op: str) -> Pending:
        return self._tape.start(self._axis, "all_reduce", x.nbytes)

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        return self._tape.start(self._axis, "all_gather", out.nbytes)

    def all_gather_slices(self, x: Tensor, slices: Sequence[Tensor]) -> Pending:
        return self._tape.start(self._axis, "all_gather", x.nbytes * len(slices))

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        return self._tape.start(self._axis, "reduce_scatter", x.nbytes)

    def all_to_all(self, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        return self._tape.start(self._axis, "all_to_all", max(x.nbytes, out.nbytes))

    def exchange(self, sends: Transfers, receives: Transfers) -> Pending:
        sent = sum(x.nbytes for x, _ in sends)
        received = sum(x.nbytes for x, _ in receives)
        return self._tape.start(self._axis, "exchange", max(sent, received))


def recording(ctx: ParallelContext) -> tuple[ParallelContext, Tape]:
    """`ctx`, a planned context, with axes noting their communication, and the tape with the notes."""
    tape = Tape()

    def noting(axis: Axis) -> Axis:
        if axis.size == 1:
            return axis
        inner = axis.inner and noting(axis.inner)
        outer = axis.outer and noting(axis.outer)
        return replace(axis, transport=_Recorder(axis, tape), inner=inner, outer=outer)

    axes = {f.name: getattr(ctx, f.name) for f in fields(ctx)}
    noted: dict[str, Any] = {name: noting(axis) for name, axis in axes.items() if isinstance(axis, Axis)}
    return replace(ctx, **noted), tape


_PRECISIONS: dict[torch.dtype, str] = {model_dtype(precision): precision for precision in PRECISIONS}
_PRECISIONS |= {torch.float64: "fp64", torch.float8_e4m3fn: "fp8"}
# Operations that take no time on a device: memory of a result, and views that their schema does not declare.
_FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view", "alias")
# Operations that read only the rows that their indices name, and those that write only such rows.
_READ_BY_INDEX = ("embedding", "index_select", "gather", "index")
_WRITE_BY_INDEX = ("index_add_", "index_put_", "index_copy_", "scatter_add_", "scatter_")
_FILLS = ("zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "new_zeros", "arange")
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm")
_WEIGHT_GRADIENTS = "grouped_weight_gradients"  # of experts, by our kernel
# Of FP8 codes: by torch, and as `megapar_kernels.dispatch` declares them for plans.
_SCALED = ("_scaled_mm", "_scaled_mm_v2", "scaled_product", "scaled_weight_gradient")


class _Watch(TorchDispatchMode):
    """Notes each operation of torch on a tape."""

    def __init__(self, tape: Tape):
        super().__init__()
        self._tape = tape
        self._written: tuple[int, int] | None = None  # the memory that the product before has written, and where in it
        self._repeated: tuple[int, int] = 0, 1  # the number of the first operation of a loop, and how often it runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _written_by(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        operations = self._tape.operations
        if operations is not None and func.overloadpacket.__name__ == "repeated":
            self._repeat(operations, args[1])
            return result
        # On other devices there are small tensors of the host, such as numbers of rows.
        if operations is not None and not func.is_view:
            found = _operation(func, args, kwargs, result)
            if found is not None:
                self._append(operations, found, result)
        return result

    def _repeat(self, operations: list[Operation], times: int) -> None:
        """Begin a loop that runs so many `times`, of which one is recorded, or end it: 0 (`dispatch.chunks_of`)."""
        self._written = None
        if times:
            self._repeated = len(operations), times
            return
        first, times = self._repeated
        operations += operations[first:] * (times - 1)

    def _append(self, operations: list[Operation], found: Operation, result: Any) -> None:
        """Append `found`. A product joins the one before if both are those of experts.

        A loop over experts writes the parts of one tensor, by products of one size but for the number of rows.
        """
        last = operations[-1] if operations else None
        written = self._written
        self._written = None
        if isinstance(found, Product) and isinstance(result, Tensor):
            memory, place = result.untyped_storage()._cdata, int(result.storage_offset())
            self._written = memory, place
            beside = written is not None and written[0] == memory and written[1] != place
            if beside and isinstance(last, Product) and _are_alike(last, found):
                operations[-1] = _joined(last, found)
                return
        operations.append(found)


def _written_by(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor of the meta device that a product writes into, so that it need not run. None for other operations."""
    name = func.overloadpacket.__name__
    if name not in _PRODUCTS:
        return None
    written = args[0] if name.endswith("_") else kwargs.get("out")
    if isinstance(written, Tensor) and written.is_meta:
        return written
    return None


def _operation(func: Any, args: Any, kwargs: Any, result: Any) -> Operation | None:
    """What an operation of torch costs. None if it costs nothing on the device."""
    name = func.overloadpacket.__name__
    if name in _FREE:
        return None
    inputs = _tensors((args, [value for key, value in kwargs.items() if key != "out"]))
    outputs = _tensors(result)
    if not any(x.is_meta for x in (*inputs, *outputs)):
        return None
    if name in _PRODUCTS:
        return _product(name, args, inputs, outputs)
    if name in _SCALED:
        return _scaled_product(name, args, inputs, outputs)
    if name == "tiled_attention":
        tensors, pairs, backward = args
        q, _, v = tensors[backward:][:3]
        flops = 2.0 * q.shape[0] * q.shape[1] * pairs * (q.shape[3] + v.shape[3])
        return AttentionWork(flops, q.shape[3], backward, _PRECISIONS[q.dtype], sum(map(_nbytes, tensors)), tiled=True)
    if name == "linear_attention":
        like, flops, width, backward = args
        # As kernels of attention, whose backward is counted as 2.5 forwards. No GPU has timed ours.
        return AttentionWork(flops / (2.5 if backward else 1.0), width, backward, _PRECISIONS[like.dtype], 0)
    if name == _WEIGHT_GRADIENTS:
        totals, grad, x = args
        groups, outputs_of, inputs_of = totals.shape
        moved = 2 * _nbytes(totals) + _nbytes(grad) + _nbytes(x)  # totals are read and written
        return Product(outputs_of, inputs_of, len(x) / groups, groups, _PRECISIONS[x.dtype], moved, grouped=True)
    if name.startswith("_scaled_dot_product") or name.startswith("_flash_attention"):
        return _attention(name, args, inputs, outputs)
    written = sum(map(_nbytes, outputs))
    if name in _READ_BY_INDEX:
        return Kernel(2 * written)
    if name in _WRITE_BY_INDEX:
        # The rows are read, changed and written; what is added to them is the last tensor.
        return Kernel(3 * _nbytes(inputs[-1]))
    if name in _FILLS:
        return Kernel(written)
    if name == "copy_":
        return Kernel(_nbytes(args[1]) + written)
    return Kernel(sum(map(_nbytes, inputs)) + written)


def _product(name: str, args: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Product:
    a, b = [x for x in args if isinstance(x, Tensor)][-2:]
    if name == "_grouped_mm":
        a, b = args[0], args[1]
    moved = sum(map(_nbytes, inputs)) + sum(map(_nbytes, outputs))
    precision = _PRECISIONS.get(a.dtype, "fp32")
    if name == "_grouped_mm" and b.dim() == 3:
        groups = b.shape[0]
        return Product(a.shape[0] / groups, b.shape[2], b.shape[1], groups, precision, moved, grouped=True)
    if name == "_grouped_mm":
        groups = outputs[0].shape[0]
        return Product(a.shape[0], b.shape[1], a.shape[1] / groups, groups, precision, moved, grouped=True)
    if a.dim() == 3:
        # A matrix for all slices is one product of all their rows.
        if b.stride(0) == 0:
            return Product(a.shape[0] * a.shape[1], b.shape[2], a.shape[2], 1, precision, moved)
        return Product(a.shape[1], b.shape[2], a.shape[2], a.shape[0], precision, moved, grouped=True)
    return Product(a.shape[0], b.shape[1], a.shape[1], 1, precision, moved)


def _scaled_product(name: str, args: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Product:
    """A product of FP8 codes. Two more kernels write the scales of both operands as the product reads them."""
    moved = sum(map(_nbytes, inputs)) + sum(map(_nbytes, outputs))
    a, b = args[:2]
    if name.startswith("_scaled_mm"):
        return Product(a.shape[0], b.shape[1], a.shape[1], 1, "fp8", moved)
    out = args[2]
    if name == "scaled_weight_gradient":
        rows, columns = out.shape
        positions = b.numel() // columns
        return Product(rows, columns, positions, 1, "fp8", moved + _nbytes(out), launches=3, adds=True)
    groups = b.shape[0] if b.dim() == 3 else 1
    rows = out.numel() // out.shape[-1] / groups
    return Product(rows, out.shape[-1], b.shape[-1], groups, "fp8", moved, b.dim() == 3, launches=3)


def _attention(name: str, args: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> AttentionWork:
    backward = "backward" in name
    # The backward has the gradient of the output before them.
    q, k, v = args[int(backward) : int(backward) + 3]
    causal = any(value is True for value in args)
    samples, heads, queries, width = q.shape
    flops = 2.0 * samples * heads * queries * k.shape[2] * (width + v.shape[3])
    if causal:
        flops /= 2
    moved = sum(map(_nbytes, inputs)) + sum(map(_nbytes, outputs))
    return AttentionWork(flops, width, backward, _PRECISIONS[q.dtype], moved)


def _are_alike(one: Product, other: Product) -> bool:
    sizes = ((one.m, other.m), (one.n, other.n), (one.k, other.k))
    equal = sum(a == b for a, b in sizes)
    return equal >= 2 and all(abs(a - b) <= 1 for a, b in sizes)


def _joined(one: Product, other: Product) -> Product:
    number = one.number + other.number
    share = other.number / number
    return Product(
        one.m + (other.m - one.m) * share,
        one.n + (other.n - one.n) * share,
        one.k + (other.k - one.k) * share,
        number,
        one.precision,
        one.moved_bytes + other.moved_bytes,
        grouped=True,
        launches=one.launches + other.launches,
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        found = []
        for part in value:
            found += _tensors(part)
        return found
    return []


def _nbytes(x: Tensor) -> int:
    """Bytes of the elements in memory: an expanded dimension counts once."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0]
    return math.prod(sizes) * x.element_size()


class FusedAttention(TorchFunctionMode):
    """Lets attention with a mask be one operation, as on a GPU. The meta device would compute it by explicit scores.

    A mask saves no time: the fused kernels compute all scores. Under a causal mask they skip blocks.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and kwargs.get("attn_mask") is not None and args[0].is_meta:
            # The kernels of CPUs and GPUs take scores to add, so a mask of bools becomes one, and this is what is kept.
            mask = kwargs["attn_mask"].to(args[0].dtype)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, attn_mask=mask)[0]
        return func(*args, **kwargs)


def collect(tape: Tape, function: Callable[[], Any]) -> tuple[Any, Operations]:
    """What `function` returns, and what it does on the meta device. `tape` is that of its context."""
    with tape.collecting() as operations, _Watch(tape), FusedAttention():
        result = function()
    return result, tuple(operations)
