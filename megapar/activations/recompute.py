"""Activation checkpointing (Chen et al., arXiv 1604.06174): activations are dropped and computed again in backward.

Dropout masks derive from counters. So there is no random state to save, and a second forward gives the same bits.
"""

import bisect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megapar_kernels.packed import form_of, rows_of
from torch import Tensor, UntypedStorage
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from megapar.activations import host_inputs
from megapar.config.derive import every_nth, recomputed_layers
from megapar.config.options import BY_LAYER, TrainConfig

Mode = Literal["none", "selective", "light", "all_but_attention", "full"]


@dataclass(frozen=True)
class Recompute:
    """The part of the model to recompute.

    `selective` recomputes core attention (arXiv 2205.05198, section 5). `light` recomputes what costs neither products
    nor communication: norms, activations of MLPs, and copies of rows for experts. `full` recomputes `layers`, or every
    n-th layer if there are none, and `all_but_attention` what is around core attention in them. Of these layers the
    share `offload` has its inputs in host memory.
    """

    mode: Mode = "none"
    every: int = 1
    offload: float = 0.0
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, train: TrainConfig) -> "Recompute":
        """Return the recomputation that the options of a run ask for."""
        every = max(every_nth(train.recompute_layers), 1)
        return cls(train.recompute, every, train.offload, recomputed_layers(train))

    def attention(self) -> bool:
        return self.mode == "selective"

    def layer(self, number: int) -> bool:
        """Whether the layer with this global number is recomputed."""
        if self.mode not in BY_LAYER:
            return False
        return number in self.layers if self.layers else number % self.every == 0

    def offloads(self, number: int) -> bool:
        """Whether the layer with this global number is recomputed, and its input is in host memory meanwhile.

        These layers are spread evenly, so that each copy has the time of all layers up to the next one. The first layer
        is among them, because its input lives longest. So a share above 0 is always one layer or more.
        """
        index = bisect.bisect_left(self.layers, number) if self.layers else number // self.every
        before, behind = (math.ceil(round(count * self.offload, 6)) for count in (index, index + 1))
        return self.layer(number) and behind > before

    @property
    def keeps_attention(self) -> bool:
        """Whether a recomputed layer keeps what core attention computed."""
        return self.mode == "all_but_attention"


def run(
    recomputes: bool,
    function: Callable[..., Any],
    *args: Any,
    keeps_attention: bool = False,
    offloads: bool = False,
    stay: Sequence[Tensor] = (),
) -> Any:
    """Return function(*args, *stay). `recomputes` says whether its activations are recomputed rather than kept.

    With `keeps_attention` calls of `kept` within are not repeated. With `offloads` the tensors among `args` are in host
    memory until backward (`megapar.activations.host_inputs`), and those in `stay` on the device. Without a backward
    pass, as through frozen layers behind the tokens, the function is just called.
    """
    if not recomputes or not _needs_gradient(function, *args, *stay):
        return function(*args, *stay)
    calls = _KeptCalls() if keeps_attention else None
    part = _Part(function, args, stay, calls, offloads=offloads)
    return part.forward(*args, *stay)


def _needs_gradient(function: Callable[..., Any], *args: Any) -> bool:
    """Whether a tensor among the arguments, or a parameter of the function if it has some, needs a gradient."""
    given = [x for x in args if isinstance(x, Tensor)]
    given += getattr(function, "parameters", list)()
    return any(x.requires_grad for x in given)


def is_again() -> bool:
    """Whether a forward pass that runs now is a second one: within a backward pass there are no others."""
    return bool(torch._C._current_graph_task_id() != -1)


class _AllMadeError(Exception):
    """Ends the second computation of a part once it has made all that was dropped: its last operations need not run."""


class _Dropped:
    """Stands for a tensor that autograd would save. `x` is there from the second computation to its use in backward."""

    def __init__(self, part: "_Part"):
        self._part: _Part | None = part
        self.x: Tensor | None = None

    def give(self) -> Tensor:
        """Return the tensor, once."""
        if self._part is None:
            raise RuntimeError("a tensor of a recomputed part was taken twice; a backward pass takes each one once")
        if self.x is None:
            self._part.compute_again()
        x, self.x, self._part = self.x, None, None
        if x is None:
            raise RuntimeError("a recomputed part saved fewer tensors than the first time: it must do the same twice")
        return x


class _Inputs(torch.autograd.Function):
    """Saves the tensors among the inputs of a part, so that hooks on saved tensors around the part see them."""

    @staticmethod
    def forward(ctx: Any, needs_gradient: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return needs_gradient.detach()


class _Part:
    """One call whose activations are dropped, and all computed again when backward asks for the first of them.

    torch.utils.checkpoint can do more, and each of its calls leaves a cycle of seven objects (of `tree_flatten`). In a
    step with hundreds of recomputed layers these would start Python's garbage collection again and again.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        stay: Sequence[Tensor],
        calls: "_KeptCalls | None",
        *,
        offloads: bool,
    ):
        self._function = function
        self._calls = calls
        tensors = [x for x in args if isinstance(x, Tensor)]
        with host_inputs.kept_in_it(offloads):
            self._saved: Any = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn
        self._stay: Any = _Inputs.apply(torch.empty(0, requires_grad=True), *stay).grad_fn if stay else None
        args = (*args, *stay)
        self._needs_gradient = [x.requires_grad for x in (*tensors, *stay)]
        self._others = [None if isinstance(x, Tensor) else x for x in args]
        self._is_tensor = [isinstance(x, Tensor) for x in args]
        # Weak: what autograd no longer needs is not held until the whole part has run backward.
        self._dropped: list[weakref.ref[_Dropped]] = []

    def forward(self, *args: Any) -> Any:
        """Call the function for the first time. Autograd gets a stand-in for each tensor that it would save."""

        def drop(x: Tensor) -> _Dropped:
            dropped = _Dropped(self)
            self._dropped.append(weakref.ref(dropped))
            return dropped

        with torch.autograd.graph.saved_tensors_hooks(drop, _Dropped.give), self._first_calls():
            return self._function(*args)

    def compute_again(self) -> None:
        """Call the function for the second time, up to the last tensor that was dropped."""
        kept = (*self._saved.saved_tensors, *(self._stay.saved_tensors if self._stay else ()))
        saved = zip(kept, self._needs_gradient, strict=True)
        tensors = iter([x.detach().requires_grad_(needs_gradient) for x, needs_gradient in saved])
        args = [next(tensors) if is_tensor else x for x, is_tensor in zip(self._others, self._is_tensor, strict=True)]
        stand_ins = iter(self._dropped)
        left = len(self._dropped)

        def fill(x: Tensor) -> Tensor:
            nonlocal left
            x = x.detach()
            dropped = next(stand_ins)()
            if dropped is not None:
                dropped.x = x
            left -= 1
            if left == 0:
                raise _AllMadeError
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(fill, lambda x: x)
        with suppress(_AllMadeError), torch.enable_grad(), hooks, self._second_calls():
            self._function(*args)

    def _first_calls(self) -> AbstractContextManager[None]:
        return nullcontext() if self._calls is None else self._calls.within(None)

    def _second_calls(self) -> AbstractContextManager[None]:
        return nullcontext() if self._calls is None else self._calls.within(0)


# Hooks on what is kept

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def _hooks() -> _Hooks | None:
    """The hooks on saved tensors that are set now: they count what is kept (`megapar.observe.kept`).

    torch asks the innermost alone. So those within them hold tensors by `_held`.
    """
    found: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def _held(x: Tensor, outer: _Hooks | None) -> Callable[[], Tensor]:
    """Keep `x`, as the hooks `outer` do it. Returns what gives it back."""
    # An output keeps its graph, and the graph what is returned here: without a backward pass neither would be freed.
    x = x.detach()
    if outer is None:
        return lambda: x
    pack, unpack = outer
    return partial(unpack, pack(x))


# All but attention


class _Given:
    """Stands for the inputs of a call in what it keeps. `tensors` are there during its backward pass alone.

    An object of its own: a graph that kept its own holder would never be freed.
    """

    def __init__(self) -> None:
        self.tensors: Sequence[Tensor] = ()

    def view(self, index: int, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        return self.tensors[index].as_strided(size, stride, offset)


class _Source(torch.autograd.Function):
    """Where the graph of a call begins. A leaf would be held by the graph; the inputs are to be freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _needs_gradient: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


class _Call:
    """One call of a function: its result, and a graph that keeps what it computed, but not its inputs."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor], outer: _Hooks | None):
        self.given = _Given()
        index_of = {x.untyped_storage()._cdata: index for index, x in enumerate(inputs)}

        def keep(x: Tensor) -> Callable[[], Tensor]:
            index = index_of.get(x.untyped_storage()._cdata)
            if index is not None:
                return partial(given.view, index, x.shape, x.stride(), int(x.storage_offset()))
            return _held(x, outer)

        given = self.given
        sources = [
            _Source.apply(x, torch.empty(0, requires_grad=True)) if x.requires_grad else x.detach() for x in inputs
        ]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda get: get()):
            result = function(*sources)
        self.edge = get_gradient_edge(result) if result.requires_grad else None
        self.edges = [get_gradient_edge(x) if x.requires_grad else None for x in sources]
        self.result = _held(result.detach(), outer)

    def backward(self, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor | None]:
        """The gradients of the inputs, which are given once more."""
        self.given.tensors = inputs
        assert self.edge is not None
        asked = [edge for edge in self.edges if edge is not None]
        found = iter(torch.autograd.grad(self.edge, asked, grad))
        self.given.tensors = ()
        return [None if edge is None else next(found) for edge in self.edges]


class _AsFirst(torch.autograd.Function):
    """The result of a call, in the first forward pass and in the second one."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return call.result().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        call, ctx.call = ctx.call, None  # what it holds is free from here
        return None, *call.backward(ctx.saved_tensors, grad)


class _KeptCalls:
    """The calls of `kept` within one layer, in order."""

    def __init__(self) -> None:
        # Of what is around the layer. Within it the hooks of `_Part` keep nothing.
        self._outer = _hooks()
        self._calls: list[_Call] = []
        self._next: int | None = None  # None in the first forward pass

    @contextmanager
    def within(self, begin: int | None) -> Iterator[None]:
        """A context around the first forward pass, with None, or around the second one, which begins at call 0."""
        self._next = begin
        token = _kept_calls.set(self)
        try:
            yield
        finally:
            _kept_calls.reset(token)

    def call(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        if self._next is None:
            self._calls.append(_Call(function, inputs, self._outer))
            call = self._calls[-1]
        else:
            call = self._calls[self._next]
            self._next += 1
        if call.edge is None:
            return call.result()
        result: Tensor = _AsFirst.apply(call, *inputs)
        return result


_kept_calls: ContextVar[_KeptCalls | None] = ContextVar("kept_calls", default=None)


def kept(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs). A layer recomputed with `keeps_attention` keeps what it computes, and not the inputs.

    All tensors of `function` that need gradients are among the inputs.
    """
    calls = _kept_calls.get()
    return function(*inputs) if calls is None else calls.call(function, inputs)


# Light


class _Recipe:
    """How to compute a tensor again: as function(*inputs)."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype):
        self.function = function
        self.inputs = [x.detach() for x in inputs]
        self.dtype = dtype
        self.kept: list[Callable[[], Tensor]] | None = None
        self._made: Callable[[], UntypedStorage | None] = lambda: None

    def keep(self, keep: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        """Keep the inputs for backward."""
        if self.kept is None:
            self.kept = [keep(x) for x in self.inputs]
            self.inputs = []

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A view of the tensor, which is computed now unless somebody still holds it."""
        storage = self._made()
        if storage is None:
            assert self.kept is not None
            with torch.no_grad():
                storage = self.function(*(get() for get in self.kept)).untyped_storage()
            self._made = weakref.ref(storage)
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, offset, size, stride)


class _Light:
    """What autograd keeps of each tensor: the tensor, or the inputs of the recipe that makes it again.

    Autograd gives views to `keep`, so tensors are known by their storages.
    """

    def __init__(self) -> None:
        self._recipes: weakref.WeakKeyDictionary[UntypedStorage, _Recipe | None] = weakref.WeakKeyDictionary()
        self._outer = _hooks()

    def note(self, y: Tensor, recipe: _Recipe) -> None:
        """From now on keep the inputs of `recipe` in place of `y`."""
        self._recipes[y.untyped_storage()] = recipe

    def keep(self, x: Tensor) -> Callable[[], Tensor]:
        """Keep `x` for backward. Returns what gives it back."""
        storage = x.untyped_storage()
        recipe = self._recipes.get(storage)
        if recipe is not None and self._costs_nothing(recipe):
            recipe.keep(self.keep)
            return partial(recipe.view, x.shape, x.stride(), int(x.storage_offset()))
        self._recipes[storage] = None  # it is kept
        return _held(x, self._outer)

    def _costs_nothing(self, recipe: _Recipe) -> bool:
        """Whether the recipe's inputs are kept anyway. The output of ReLU is kept by itself, and its input is not."""
        # Numbers and bytes of `Packed` numbers. Indices are few.
        large = [x for x in recipe.inputs if x.is_floating_point() or x.dtype == torch.uint8]
        return all(self._is_kept(x.untyped_storage()) for x in large)

    def _is_kept(self, storage: UntypedStorage) -> bool:
        if storage not in self._recipes:
            return False
        recipe = self._recipes[storage]
        return recipe is None or self._costs_nothing(recipe)


_light: ContextVar[_Light | None] = ContextVar("light", default=None)


@contextmanager
def light(recomputes: bool) -> Iterator[None]:
    """A context around a forward pass. If `recomputes`, backward computes again what `remade` made within it."""
    if not recomputes or not torch.is_grad_enabled():
        yield
        return
    keeper = _Light()
    token = _light.set(keeper)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keeper.keep, lambda get: get()):
            yield
    finally:
        _light.reset(token)


def remade(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs). Within `light`, backward calls it again, rather than to keep its result.

    It must give the same bits each time, and should neither multiply matrices nor communicate.
    """
    return remade_as(function(*inputs), function, *inputs)


def remade_as(y: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return y, which function(*inputs) would give too. Within `light`, backward calls it, rather than to keep y."""
    keeper = _light.get()
    made, rows = rows_of(y), [rows_of(x) for x in inputs]
    storage = made.untyped_storage()
    # A function that gives back its input, such as no norm, makes nothing.
    if keeper is not None and y.requires_grad and all(x.untyped_storage() is not storage for x in rows):
        forms = [form_of(x) for x in inputs]
        keeper.note(made, _Recipe(partial(_rows_made, function, forms), rows, made.dtype))
    return y


def _rows_made(function: Callable[..., Tensor], forms: Sequence[Callable[[Tensor], Tensor]], *rows: Tensor) -> Tensor:
    """What is in memory of function(*inputs), given what is in memory of the inputs."""
    return rows_of(function(*(form(x) for form, x in zip(forms, rows, strict=True))))
