"""Inputs of recomputed layers in host memory, from the forward pass of a micro-batch to its backward pass.

    computed      F layer 0    F layer 1    F layer 2   ...   B layer 2    B layer 1    B layer 0
    to the host   input 0      input 1
    back                                                      input 1      input 0

A recomputed layer keeps its input alone (`megapar.activations.recompute`), and train.offload moves a share of these
inputs. The schedule says which backward pass comes next, so an input is on its way back while the layer after it is
computed. After PipeOffload (Wan et al., arXiv 2503.01328).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from megapar.system import device
from megapar.system.side_stream import Reached, SideStream

Pass = tuple[int, int]
"""The stage and the micro-batch of a forward pass, and of its backward pass."""


class Keeper(Protocol):
    """Keeps inputs of layers for the backward pass."""

    def keep(self, x: Tensor) -> Any:
        """Keep `x`. Returns what `give` takes."""

    def give(self, kept: Any) -> Tensor:
        """The tensor again, once."""


_keeper: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@contextmanager
def kept_by(keeper: Keeper) -> Iterator[None]:
    """A context around forward passes, in which `keeper` keeps the inputs that `kept_in_it` is for."""
    token = _keeper.set(keeper)
    try:
        yield
    finally:
        _keeper.reset(token)


def kept_in_it(offloads: bool) -> AbstractContextManager[Any]:
    """A context around what saves a recomputed layer's inputs. If `offloads`, the forward pass's keeper keeps them.

    Without a keeper they stay on the device: only a run of a schedule knows when they are needed again.
    """
    keeper = _keeper.get()
    if not offloads or keeper is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(keeper.keep, keeper.give)


class NotedInputs:
    """A keeper for plans. It notes the bytes of each input."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def keep(self, x: Tensor) -> Tensor:
        self.sizes.append(x.nbytes)
        return x

    def give(self, kept: Tensor) -> Tensor:
        return kept


class _Input:
    """An input between its forward and its backward pass. `x` is None while it is in its slot alone."""

    def __init__(self, x: Tensor, slot: Tensor, inputs: "list[_Input]"):
        self.x: Tensor | None = x
        self.slot: Tensor | None = slot
        self.inputs = inputs  # of its pass
        self.shape = x.shape
        self.stride = x.stride()
        self.dtype = x.dtype
        self.nbytes = x.nbytes
        self.left = Reached()
        self.arrived = Reached()

    def to_slot(self, x: Tensor) -> Callable[[], None]:
        """The copy of `x` to the slot."""
        in_slot = self.in_slot()

        def copy() -> None:
            in_slot.copy_(x, non_blocking=True)

        return copy

    def from_slot(self, x: Tensor) -> Callable[[], None]:
        """The copy of the slot to `x`."""
        in_slot = self.in_slot()

        def copy() -> None:
            x.copy_(in_slot, non_blocking=True)

        return copy

    def in_slot(self) -> Tensor:
        """The slot as a tensor of its shape."""
        assert self.slot is not None
        return self.slot.view(self.dtype).view(self.shape)


class HostInputs:
    """A keeper that copies inputs to slots in host memory, and back when the schedule needs them.

    Of the inputs two at most are on the device: the last one on its way to the host, while its layer is computed, and
    the next one on its way back. A slot is pinned memory of one input. It is made when no slot is free, and kept. A
    schedule repeats from step to step, so all slots are made in the first step of a size.
    """

    def __init__(self, on: torch.device):
        self.nbytes = 0
        """Bytes of all slots."""
        self.most_on_device = 0
        """The most bytes of inputs that were on the device on their way at one time of this step."""
        self.stream = SideStream(on)
        self._on = on
        self._free: dict[int, list[Tensor]] = {}  # by bytes
        self._backwards: deque[Pass] = deque()
        self._kept: dict[Pass, list[_Input]] = {}  # of each pass, in the order of its layers
        self._running: list[_Input] = []  # those of the running forward pass
        self._leaving: _Input | None = None
        self._next: _Input | None = None

    # The schedule

    def begin(self, backwards: Iterable[Pass]) -> None:
        """Begin a step whose backward passes come in this order. Slots that a failed step has left in use are free."""
        for passed in list(self._kept):
            self._forget(passed)
        self._leaving = self._next = None
        self._backwards = deque(backwards)
        self.most_on_device = 0

    @contextmanager
    def forward(self, passed: Pass) -> Iterator[None]:
        """A context around a forward pass."""
        self._running = self._kept[passed] = []
        with kept_by(self):
            yield

    def end_backward(self, passed: Pass) -> None:
        """Call this after each backward pass. What it did not take is forgotten."""
        assert self._backwards[0] == passed, f"{passed} ran before {self._backwards[0]}"
        self._backwards.popleft()
        self._forget(passed)

    def fetch_next(self) -> None:
        """Start to copy the input that a backward pass takes next, if its forward pass has run."""
        if self._next is not None:
            return
        for passed in self._backwards:
            inputs = self._kept.get(passed)
            if inputs is None:
                return
            if inputs:
                self._next = inputs[-1]
                if self._next.x is None:
                    self._fetch(self._next)
                self._note_device()
                return

    # The layers

    def keep(self, x: Tensor) -> "_Input | Tensor":
        """Start to copy `x` to a slot, behind what has been queued on the device. Waits for the copy before it."""
        if x.numel() == 0 or _overlaps(x):
            return x  # it has next to no memory of its own
        self._let_leave()
        x = x.detach()
        kept = _Input(x, self._take_slot(x.nbytes), self._running)
        kept.left = self.stream.queue(kept.to_slot(x))
        self._running.append(kept)
        self._leaving = kept
        self._note_device()
        return kept

    def give(self, kept: "_Input | Tensor") -> Tensor:
        """The input again, with its strides. The next one is then on its way."""
        if isinstance(kept, Tensor):
            return kept
        if kept.slot is None:
            raise RuntimeError("the input of a layer was taken twice, or after its step; a backward pass takes it once")
        if kept.x is None:
            self._fetch(kept)
        # The one that has not left yet is given as it is. Its memory must not change before its copy has been made.
        kept.left.wait()
        kept.arrived.wait()
        x = kept.x
        assert x is not None
        kept.inputs.remove(kept)
        self._free_slot(kept)
        self.fetch_next()
        return x

    def _let_leave(self) -> None:
        """Free the memory of the input on its way to the host, once its copy has been made."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.left.wait()
            if leaving is not self._next:
                self._release(leaving)

    def _release(self, kept: _Input) -> None:
        kept.x = None

    def _fetch(self, kept: _Input) -> None:
        x = torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device=self._on)
        kept.x = x
        kept.arrived = self.stream.queue(kept.from_slot(x))

    def _note_device(self) -> None:
        on_device = {id(kept): kept.nbytes for kept in (self._leaving, self._next) if kept is not None}
        self.most_on_device = max(self.most_on_device, sum(on_device.values()))

    # Slots

    def _take_slot(self, nbytes: int) -> Tensor:
        free = self._free.setdefault(nbytes, [])
        if free:
            return free.pop()
        self.nbytes += nbytes
        return device.host_buffer(nbytes, self._on)

    def _free_slot(self, kept: _Input) -> None:
        """Give the slot of an input back. Copies to and from it are made in order, so it can be written at once."""
        assert kept.slot is not None
        self._free[kept.nbytes].append(kept.slot)
        kept.slot = kept.x = None
        if self._leaving is kept:
            self._leaving = None
        if self._next is kept:
            self._next = None

    def _forget(self, passed: Pass) -> None:
        for kept in self._kept.pop(passed, []):
            kept.left.wait()
            kept.arrived.wait()
            self._free_slot(kept)


def _overlaps(x: Tensor) -> bool:
    """Whether elements of `x` share memory, as those of an expanded tensor do."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def planned_nbytes(order: Iterable[tuple[str, int, int]], sizes: Mapping[int, Sequence[int]]) -> tuple[int, int]:
    """`HostInputs.nbytes` and `most_on_device` of a rank that runs `order`: kinds of actions, stages, micro-batches.

    `sizes` has the bytes of the inputs that a forward pass of each stage keeps in host memory.
    """
    if not any(sizes.values()):
        return 0, 0
    meta = torch.device("meta")
    inputs = HostInputs(meta)
    x_of = {size: torch.empty(size, dtype=torch.uint8, device=meta) for found in sizes.values() for size in found}
    actions = list(order)
    inputs.begin((stage, microbatch) for kind, stage, microbatch in actions if kind in ("B", "I"))
    kept: dict[Pass, list[Any]] = {}
    for kind, stage, microbatch in actions:
        passed = stage, microbatch
        inputs.fetch_next()
        if kind == "F":
            with inputs.forward(passed):
                kept[passed] = [inputs.keep(x_of[size]) for size in sizes[stage]]
        elif kind in ("B", "I"):
            for x in reversed(kept.pop(passed)):
                inputs.give(x)
            inputs.end_backward(passed)
    return inputs.nbytes, inputs.most_on_device
