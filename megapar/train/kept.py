"""Counts the bytes that forward passes keep for their backward passes, by pipeline stage and kind, while they live.

It serves plans, with models on the meta device, and the report of a real step (train.memory_report) alike.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Key = tuple[int, str]
"""A stage's global number, and the kind of what is kept."""

BETWEEN = "norms, layer inputs"
"""What a stage keeps for its layers outside their parts. With full recomputation that is the input of each layer."""
ENDS = "logits, loss"
"""What a stage keeps after its layers."""

PUT_OFF = "weight gradients put off"
"""What an I leaves to its W: inputs and output gradients of matrix products (`megapar.main_grad`)."""


class KeptBytes:
    """The bytes that autograd keeps for backward passes of `stages`, while they live.

    The kind is the name of the layer's part that kept them ("attention", "mlp"), BETWEEN, or ENDS.
    Parameters and buffers are not counted. A storage that several tensors share is counted once, for the first that
    was kept. `live` has the bytes now, `peak` the largest sum of them so far, and `at_peak` what it consisted of.
    `put_off_nbytes()` tells, by stage, what weight gradients that are put off keep. It counts in the peak as PUT_OFF,
    and is looked at when a forward keeps something.
    """

    def __init__(self, stages: Mapping[int, nn.Module], put_off_nbytes: Callable[[], Mapping[int, int]] = dict):
        self.live: Counter[Key] = Counter()
        self.at_peak: Counter[Key] = Counter()
        self.peak = 0
        self._stages = stages
        self._put_off_nbytes = put_off_nbytes
        self._known = {
            x.untyped_storage()._cdata for stage in stages.values() for x in (*stage.parameters(), *stage.buffers())
        }
        self._uses: Counter[int] = Counter()  # how many kept tensors share a storage, by the storage
        self._keys: dict[int, Key] = {}  # the key under which a storage is counted
        self._current: list[Key] = []  # the innermost part whose forward pass is running comes last
        self._hooks: dict[int, ExitStack] = {}  # of each stage whose forward pass is running

    @contextmanager
    def counting(self) -> Iterator["KeptBytes"]:
        """A context in which the forward passes of the stages are counted. What they keep is counted until it is freed,
        also after the context."""
        with ExitStack() as handles:
            for number, stage in self._stages.items():
                for handle in self._watch(number, stage):
                    handles.callback(handle.remove)
            yield self

    def _watch(self, number: int, stage: nn.Module) -> Iterator[RemovableHandle]:
        yield stage.register_forward_pre_hook(partial(self._enter_stage, number), with_kwargs=True)
        yield stage.register_forward_hook(partial(self._leave_stage, number), always_call=True)
        for name, module in stage.named_modules():
            kind = kind_of(name)
            if kind is not None:
                yield module.register_forward_pre_hook(partial(self._enter, (number, kind)))
                yield module.register_forward_hook(self._leave, always_call=True)
        layers = list(getattr(stage, "layers", {}).values())
        if layers:
            yield layers[-1].register_forward_hook(partial(self._leave_layers, number))

    def _enter_stage(self, number: int, stage: nn.Module, args: object, kwargs: object) -> None:
        hooks = ExitStack()
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.x))
        self._hooks[number] = hooks
        # Before the first layer there is nothing but the embedding, which keeps next to nothing.
        self._current.append((number, BETWEEN if getattr(stage, "layers", {}) else ENDS))

    def _leave_stage(self, number: int, *_: object) -> None:
        self._current.pop()
        self._hooks.pop(number).close()

    def _enter(self, key: Key, *_: object) -> None:
        self._current.append(key)

    def _leave(self, *_: object) -> None:
        self._current.pop()

    def _leave_layers(self, number: int, *_: object) -> None:
        if self._current:  # it is empty when a backward pass recomputes the layer
            self._current[-1] = number, ENDS

    def _keep(self, x: Tensor) -> "_Kept":
        storage = x.untyped_storage()
        number = storage._cdata
        kept = _Kept(x)
        if number in self._known:
            return kept
        if self._uses[number] == 0:
            self._keys[number] = self._current[-1]
            self.live[self._current[-1]] += storage.nbytes()
            put_off = {(stage, PUT_OFF): nbytes for stage, nbytes in self._put_off_nbytes().items()}
            total = self.live.total() + sum(put_off.values())
            if total > self.peak:
                self.peak = total
                self.at_peak = self.live + Counter(put_off)
        self._uses[number] += 1
        weakref.finalize(kept, self._free, number, storage.nbytes())
        return kept

    def _free(self, number: int, nbytes: int) -> None:
        self._uses[number] -= 1
        if self._uses[number] == 0:
            self.live[self._keys.pop(number)] -= nbytes


class _Kept:
    """What autograd holds in place of a tensor. autograd drops it when the backward pass no longer needs the tensor."""

    def __init__(self, x: Tensor):
        self.x = x


def kind_of(name: str) -> str | None:
    """The kind of what a stage's module called `name` keeps; None if it is that of the module around it."""
    parts = name.split(".")
    if parts[0] != "layers" or len(parts) > 3 or len(parts) == 1:
        return None
    if len(parts) == 2:
        return BETWEEN
    return BETWEEN if parts[2].endswith("norm") else parts[2]
