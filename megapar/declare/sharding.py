"""What a layer needs to know to make its slice of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import nn

from megapar.base.expert_load import EVEN, ExpertLoad
from megapar.base.precision import Precision
from megapar.comm.axis import Axis
from megapar.declare.context import ParallelContext
from megapar.declare.params import Init, ParamSpec, Piece, parameter
from megapar.linear.meanwhile import Meanwhile


def model_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of weights, activations and pipeline transfers, and of optimizer.grad_reduce_dtype."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


@dataclass(frozen=True)
class Sharding:
    """The axes over which weights and activations are cut.

    Weights are cut over `tp`. Gradients are summed, and optimizer state is sharded, over `grad_axis`. The positions of
    a sample are cut over `cp`. Experts are dealt over `ep`, and each is cut over `etp`. Their replicas are
    `expert_grad_axis` (see ParallelContext).

    `optimizer` names that of the parameters, if it is not the run's (`ParamSpec.optimizer`). `expert_load` is that of a
    plan, and `expert_gradients` are those that wait (`ParallelContext`).

    With `overlap_chunks` above 1, a linear layer communicates its input or output in that many chunks, while it
    computes its product. With `expert_chunks` above 1, the rows of experts travel in that many chunks, while the
    experts work on others. Without `allocate`, parameters get their memory later: with ZeRO-3 a rank never holds all of
    them.
    """

    tp: Axis
    grad_axis: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    overlap_chunks: int = 1
    expert_chunks: int = 1
    cp: Axis = field(default_factory=partial(Axis, "cp"))
    ep: Axis = field(default_factory=partial(Axis, "ep"))
    etp: Axis = field(default_factory=partial(Axis, "etp"))
    expert_grad_axis: Axis = field(default_factory=partial(Axis, "expert_grad"))
    allocate: bool = True
    optimizer: str = ""
    expert_load: ExpertLoad = EVEN
    expert_gradients: Meanwhile = field(default_factory=Meanwhile, compare=False)

    @classmethod
    def of(
        cls,
        ctx: ParallelContext,
        dtype: torch.dtype,
        *,
        sequence_parallel: bool = False,
        overlap_chunks: int = 1,
        expert_chunks: int = 1,
        allocate: bool = True,
    ) -> "Sharding":
        """The sharding of a rank: its axes and its device."""
        return cls(
            tp=ctx.tp,
            grad_axis=ctx.grad,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=ctx.device,
            overlap_chunks=overlap_chunks,
            expert_chunks=expert_chunks,
            cp=ctx.cp,
            ep=ctx.ep,
            etp=ctx.etp,
            expert_grad_axis=ctx.expert_grad,
            expert_load=ctx.expert_load,
            expert_gradients=ctx.expert_gradients,
            allocate=allocate,
        )

    @property
    def splits_sequence(self) -> bool:
        return self.sequence_parallel and self.tp.size > 1

    def parameter(
        self,
        pieces: tuple[Piece, ...],
        shape: Sequence[int],
        init: Init,
        *,
        decay: bool,
        update: Literal["element", "matrix"] = "element",
        quantized: bool = False,
        precise: bool = False,
    ) -> nn.Parameter:
        """Make an uninitialized parameter of the local `shape`: `pieces`, one after the other, then padding rows."""
        spec = ParamSpec(
            pieces,
            init,
            decay=decay,
            grad_axis=self.grad_axis,
            update=update,
            optimizer=self.optimizer,
            quantized=quantized,
            precise=precise,
        )
        return self.parameter_of(spec, shape)

    def parameter_of(self, spec: ParamSpec, shape: Sequence[int]) -> nn.Parameter:
        """Make an uninitialized parameter of the local `shape`. Without `allocate` its storage is empty."""
        param = parameter(spec, shape, dtype=self.dtype, device=self.device)
        if not self.allocate:
            param.untyped_storage().resize_(0)
        return param
