"""Activation checkpointing (Chen et al., arXiv 1604.06174): activations are dropped and computed again in backward.

Dropout masks derive from counters. So there is no random state to save, and a second forward gives the same bits.
"""

import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.checkpoint import checkpoint

Mode = Literal["none", "selective", "light", "full"]


@dataclass(frozen=True)
class Recompute:
    """The part of the model to recompute.

    `selective` recomputes core attention (arXiv 2205.05198, section 5). `light` recomputes what costs neither products
    nor communication: norms, activations of MLPs, and copies of rows for experts. `full` recomputes every n-th layer.
    """

    mode: Mode = "none"
    every: int = 1

    def attention(self) -> bool:
        return self.mode == "selective"

    def layer(self, number: int) -> bool:
        """Whether the layer with this global number is recomputed."""
        return self.mode == "full" and number % self.every == 0


def preload(mode: str) -> None:
    """Import what torch's checkpoint imports at its first call, if `mode` uses it. It takes seconds.

    A launcher calls this before it forks its ranks, so not every rank spends that time. Light uses no checkpoint.
    """
    if mode in ("selective", "full"):
        importlib.import_module("torch._dynamo")


def run(recomputes: bool, function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return function(*args). `recomputes` says whether its activations are recomputed in backward rather than kept.

    Without a backward pass, as through frozen layers behind the tokens, it is just called.
    """
    if not recomputes or not _needs_gradient(function, *args):
        return function(*args)
    # No random state is preserved: dropout, the one user of randomness, draws from counters.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _needs_gradient(function: Callable[..., Tensor], *args: Any) -> bool:
    """Whether a tensor among the arguments, or a parameter of the function if it is a module, needs a gradient."""
    given = [x for x in args if isinstance(x, Tensor)]
    if isinstance(function, nn.Module):
        given += function.parameters()
    return any(x.requires_grad for x in given)


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

    Autograd gives detached tensors and views to `keep`, so tensors are known by their storages.
    """

    def __init__(self) -> None:
        self._recipes: weakref.WeakKeyDictionary[UntypedStorage, _Recipe | None] = weakref.WeakKeyDictionary()
        # Hooks that are there already count what is kept (`megapar.train.kept`). torch asks the innermost alone.
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

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
        if self._outer is None:
            return lambda: x
        pack, unpack = self._outer
        return partial(unpack, pack(x))

    def _costs_nothing(self, recipe: _Recipe) -> bool:
        """Whether the recipe's inputs are kept anyway. The output of ReLU is kept by itself, and its input is not."""
        return all(self._is_kept(x.untyped_storage()) for x in recipe.inputs if x.is_floating_point())

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
    storage = y.untyped_storage()
    # A function that gives back its input, such as no norm, makes nothing.
    if keeper is not None and y.requires_grad and all(x.untyped_storage() is not storage for x in inputs):
        keeper.note(y, _Recipe(function, inputs, y.dtype))
    return y
