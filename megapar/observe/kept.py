"""Counts the bytes kept by forward passes for their backward passes, by pipeline stage and kind.

Plans use it with models on the meta device, and the report of a real step (train.memory_report) uses it too.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megapar.linear.converted_weight import converted_nbytes
from megapar.pipeline.actions import Action

Key = tuple[int, str]
"""The global number of a stage, and the kind of what is kept: the name of a layer's part, or one of the following."""

BETWEEN = "norms, layer inputs"
"""What the norms of layers keep, and layers outside their parts: with full recomputation the input of each layer."""
ENDS = "logits, loss"
"""What a stage keeps after its layers."""

DEFERRED = "deferred weight gradients"
"""What an I keeps for its W: inputs and output gradients of matrix products (`megapar.linear.main_grad`)."""


class KeptBytes:
    """The bytes autograd keeps for backward passes of `stages`, until they are freed.

    `live` has the bytes now, `peak` is the largest sum so far, and `at_peak` has the bytes at that time. Bytes are
    counted by stage and kind. The kind is the name of a part of the layer ("attention", "mlp"), BETWEEN, or ENDS.
    Parameters and buffers are not counted. `most_converted` is the most kept of weights in another number format
    (`megapar.linear.converted_weight`) after an action; it is in no other figure. A storage shared by several tensors
    is counted once, under the key of the first.

    `deferred_nbytes()` returns, by stage, what deferred weight gradients keep. It counts in the peak as DEFERRED. It is
    called when a forward keeps something, and after actions: peaks at other times go unseen.
    """

    def __init__(self, stages: Mapping[int, nn.Module], deferred_nbytes: Callable[[], Mapping[int, int]] = dict):
        self.live: Counter[Key] = Counter()
        self.at_peak: Counter[Key] = Counter()
        self.peak = 0
        self.most_converted = 0
        self._stages = stages
        self._deferred_nbytes = deferred_nbytes
        # Storages are identified by the address of torch's object (`_cdata`).
        self._not_counted: set[int] = set()
        for stage in stages.values():
            for x in (*stage.parameters(), *stage.buffers()):
                self._not_counted.add(x.untyped_storage()._cdata)
        self._uses: Counter[int] = Counter()  # by storage: how many kept tensors share it
        self.counted: dict[int, tuple[Key, int]] = {}
        """By storage (`_cdata`), while it is kept: the key under which it is counted, and its bytes."""
        self._current: list[Key] = []  # the keys of the modules whose forward passes are running, the innermost last
        self._hooks: dict[int, ExitStack] = {}  # the saved-tensor hooks of each stage whose forward pass is running

    @contextmanager
    def counting(self) -> Iterator["KeptBytes"]:
        """A context around forward passes of the stages, to count what they keep.

        After the end of the context it is counted until it is freed.
        """
        with ExitStack() as handles:
            for number, stage in self._stages.items():
                for handle in self._watch(number, stage):
                    handles.callback(handle.remove)
            yield self

    def _watch(self, number: int, stage: nn.Module) -> Iterator[RemovableHandle]:
        """Register the hooks of one stage. Yields their handles."""
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
        # Only the embedding runs before the first layer. It keeps next to nothing, so it has no kind of its own.
        has_layers = bool(getattr(stage, "layers", {}))
        self._current.append((number, BETWEEN if has_layers else ENDS))

    def _leave_stage(self, number: int, *_: object) -> None:
        self._current.pop()
        self._hooks.pop(number).close()

    def _enter(self, key: Key, *_: object) -> None:
        self._current.append(key)

    def _leave(self, *_: object) -> None:
        self._current.pop()

    def _leave_layers(self, number: int, *_: object) -> None:
        # `_current` is empty when a backward pass recomputes the layer: the forward pass of the stage is not running.
        if self._current:
            self._current[-1] = number, ENDS

    def _keep(self, x: Tensor) -> "_Kept":
        """Count a tensor saved by autograd. Returns what autograd holds in its place."""
        kept = _Kept(x)
        storage = x.untyped_storage()
        identity = storage._cdata
        if identity in self._not_counted:
            return kept
        if self._uses[identity] == 0:
            key = self._current[-1]
            self.counted[identity] = key, storage.nbytes()
            self.live[key] += storage.nbytes()
            self._update_peak()
        self._uses[identity] += 1
        weakref.finalize(kept, self._free, identity)
        return kept

    def note_action(self, action: Action) -> None:
        """Look for a peak after an action (`PipelineRuntime.after_action`): an I may keep more than any forward."""
        self._update_peak()
        params = [param for stage in self._stages.values() for param in stage.parameters()]
        self.most_converted = max(self.most_converted, converted_nbytes(params))

    def _update_peak(self) -> None:
        deferred = Counter({(stage, DEFERRED): nbytes for stage, nbytes in self._deferred_nbytes().items()})
        total = self.live.total() + deferred.total()
        if total > self.peak:
            self.peak = total
            self.at_peak = self.live + deferred

    def _free(self, identity: int) -> None:
        """Count a tensor of a storage as freed."""
        self._uses[identity] -= 1
        if self._uses[identity] == 0:
            key, nbytes = self.counted.pop(identity)
            self.live[key] -= nbytes


class _Kept:
    """What autograd holds in place of a saved tensor. It is freed when the backward pass no longer needs the tensor."""

    def __init__(self, x: Tensor):
        self.x = x


def kind_of(name: str) -> str | None:
    """The kind of what the module `name` of a stage keeps. None if it has the kind of the module around it.

    Layers, such as "layers.3", and their direct children, such as "layers.3.mlp", have kinds.
    """
    parts = name.split(".")
    is_layer = len(parts) == 2
    is_part_of_layer = len(parts) == 3
    if parts[0] != "layers" or not (is_layer or is_part_of_layer):
        return None
    if is_layer or parts[2].endswith("norm"):
        return BETWEEN
    return parts[2]
