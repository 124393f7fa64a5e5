"""What layers hand on beside the hidden states: named tensors, from the layer that writes one to those that read it.

A layer declares what it writes and reads (`LayerKind.writes`, `LayerKind.reads`), and the two ends of a model do so too
(`Ends`). So every rank knows which tensors cross the cut between two layers, wherever a pipeline is cut. A layer finds
the tensors that it reads in `ForwardContext.handed` by their names, and puts there what it writes.

Shapes: s positions of a context-parallel rank (s/tp under sequence parallelism), b micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megapar.declare.batch import MicroBatch, TensorSpec
from megapar.declare.sharding import Sharding
from megapar_models.forward import ForwardContext
from megapar_models.heads import deal_heads


@dataclass(frozen=True, kw_only=True)
class Handed:
    """A tensor that is handed on: [s, b, *shape], or [*shape] if not `by_token`.

    A tensor of integers has no gradient. Once a later layer writes the same name, readers behind it get the new tensor.
    """

    name: str
    shape: tuple[int, ...]
    """The shape of one token's part in one process, before tp divides it; the whole shape if not `by_token`."""
    by_token: bool = True
    """Whether each token has a part of its own, [s, b, *shape]. If not, all tokens share one tensor, such as a weight
    of the first stage that later stages use; the gradients of all micro-batches are summed in it."""
    dtype: torch.dtype | None = None
    """None: that of the hidden states."""
    gradient: bool = True
    """Whether a floating-point tensor has a gradient. If not, it is detached where it is written."""
    query_heads: int = 0
    """If not 0, the first dimension of `shape` are key/value heads, and tp ranks have those that their query heads read
    (`deal_heads`). 0: every tp rank has the whole shape."""
    splits_sequence: bool = False
    """Whether sequence parallelism divides the tokens as it divides those of the hidden states. Otherwise a tp rank has
    all positions of its context-parallel rank."""

    def spec(self, batch: MicroBatch, sharding: Sharding) -> TensorSpec:
        """Return shape and dtype on a rank."""
        shape = self.shape
        if self.query_heads:
            heads = deal_heads(self.query_heads, shape[0], sharding.tp)
            shape = (heads.kv_stop - heads.kv_start, *shape[1:])
        if self.by_token:
            length = batch.seq_length
            if self.splits_sequence and sharding.splits_sequence:
                length //= sharding.tp.size
            shape = (length, batch.size, *shape)
        dtype = self.dtype or sharding.dtype
        return TensorSpec(shape, dtype, self.gradient)


@dataclass(frozen=True)
class Bundle:
    """All tensors that a model's layers hand on: by layer the names that it reads, and what it writes.

    `begins` is written by the embedding, and `ends` are the names that are read behind the last layer. Raises
    ValueError for a name that is read and that nothing before the reader writes.
    """

    reads: Sequence[Sequence[str]] = ()
    writes: Sequence[Sequence[Handed]] = ()
    begins: Sequence[Handed] = ()
    ends: Sequence[str] = ()
    _cuts: dict[int, tuple[Handed, ...]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        known = {handed.name for handed in self.begins}
        for number, (names, written) in enumerate(zip(self.reads, self.writes, strict=True)):
            self._check(f"layer {number}", names, known)
            known |= {handed.name for handed in written}
        self._check("the end of the model", self.ends, known)

    def _check(self, reader: str, names: Sequence[str], known: set[str]) -> None:
        if missing := [name for name in names if name not in known]:
            text = "declare it in LayerKind.writes of an earlier layer or in Ends.writes, or correct the name in reads"
            raise ValueError(f"{reader} reads {', '.join(missing)}, which no layer before it writes: {text}")

    def at(self, number: int) -> tuple[Handed, ...]:
        """Return what crosses the cut in front of the layer `number`: what was written before it, and is read later.

        The order is that of writing, the same on every rank.
        """
        if number not in self._cuts:
            last = {handed.name: handed for handed in self.begins}
            for written in self.writes[:number]:
                for handed in written:
                    last.pop(handed.name, None)
                    last[handed.name] = handed
            self._cuts[number] = tuple(handed for name, handed in last.items() if self._is_read(name, number))
        return self._cuts[number]

    def _is_read(self, name: str, number: int) -> bool:
        """Whether what has this name in front of the layer `number` is read before it is written again."""
        for reads, writes in zip(self.reads[number:], self.writes[number:], strict=True):
            if name in reads:
                return True
            if any(handed.name == name for handed in writes):
                return False
        return name in self.ends


@dataclass(frozen=True)
class HandingLayer:
    """A layer as a function of the hidden states, the context and the tensors that it reads.

    It returns the hidden states and what it writes. Recomputation so has all tensors as inputs and outputs.
    """

    name: str
    layer: nn.Module
    reads: Sequence[str]
    writes: Sequence[Handed]
    sharding: Sharding

    def __call__(self, x_sbh: Tensor, context: ForwardContext, *given: Tensor) -> Any:
        handed = dict(zip(self.reads, given, strict=True))
        y_sbh = self.layer(x_sbh, replace(context, handed=handed))
        written = taken(self.name, self.writes, handed, context.batch, self.sharding)
        # What recomputation keeps refers to the context: with tensors in it, they and their graphs would be a circle.
        handed.clear()
        return (y_sbh, *written)

    def parameters(self) -> Any:
        return self.layer.parameters()


def taken(
    writer: str, writes: Sequence[Handed], handed: dict[str, Tensor], batch: MicroBatch, sharding: Sharding
) -> tuple[Tensor, ...]:
    """Return the tensors that `writer` has put into `handed`, in the order of `writes`.

    Raises ValueError if one is missing or unlike its declaration: the next stage would wait for other bytes.
    """
    found = []
    for one in writes:
        if one.name not in handed:
            text = f"set context.handed[{one.name!r}] in its forward"
            raise ValueError(f"{writer} declares that it writes {one.name}, and does not: {text}")
        x, spec = handed[one.name], one.spec(batch, sharding)
        if tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
            made, wanted = (f"{list(shape)} {dtype}" for shape, dtype in ((x.shape, x.dtype), spec[:2]))
            raise ValueError(f"{writer} writes {one.name} as {made}, and declares {wanted}: change its Handed")
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
            x = x.clone()  # with ZeRO-3 the memory of a weight is free behind the stage that has it
        # A view: the gradients of all readers are summed by themselves, as where a stage hands the tensor on.
        found.append(x.view_as(x) if spec.has_gradient else x.detach())
    return tuple(found)
