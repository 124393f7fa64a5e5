"""Between a layout's local parameters and their logical tensors.

Ranks call `held`, `held_weights` or `held_gradients` and return the list. Another process calls `assemble` on the lists
of all ranks. `fill` is the inverse. The comparison of a layout with one process stands on this: what ranks hold is cut
in many ways, what they should hold is not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megapar.comm import collectives
from megapar.data_parallel.units import UnitGradients, UnitWeights
from megapar.declare.context import ParallelContext
from megapar.declare.params import Piece, spec_of
from megapar.step.state import TrainState


@dataclass(frozen=True)
class Held:
    """One rank's part of a logical tensor. `partial`: the tensor is the sum of the ranks' parts of it, else these are
    equal. Ranks of an axis of replicas (`ParamSpec.grad_axis`) are `replica`s of each other. `routed`: a router sends
    some of the tokens there (`ParamSpec.token_share`)."""

    piece: Piece
    values: Tensor
    partial: bool
    replica: int
    routed: bool = False


def weights(param: nn.Parameter) -> Tensor:
    return param.detach()


def gradients(param: nn.Parameter) -> Tensor:
    """What autograd left in .grad."""
    assert param.grad is not None
    return param.grad


def main_gradients(param: nn.Parameter) -> Tensor | None:
    """What lies in the gradient buffer; nothing of a frozen parameter."""
    return param.main_grad.tensor if param.requires_grad else None  # type: ignore[attr-defined]


def unique_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list({id(param): param for module in modules for param in module.parameters()}.values())


def held(
    modules: Iterable[nn.Module],
    ctx: ParallelContext,
    values: Callable[[nn.Parameter], Tensor | None] = weights,
    *,
    unsummed: bool = False,
) -> list[Held]:
    """This rank's part of every logical tensor, for `assemble`; `values` picks weights or gradients, or None of it.

    `unsummed`: the values are gradients before the sums over tp and over tied ends in their specs. Raises
    AssertionError if a padding row is not zero.
    """
    parts = []
    for param in unique_parameters(modules):
        if not param.numel():  # this rank holds none of the experts
            continue
        found = values(param)
        if found is None:
            continue
        spec = spec_of(param)
        flat = found.reshape(-1)
        last = 0
        for piece, first, last in spec.segments():
            partial = unsummed and any(axis.size > 1 for axis in piece.partial)
            local = flat[first:last].view(piece.local_shape).clone()
            parts.append(Held(_without_axes(piece), local, partial, spec.grad_axis.rank, spec.token_share < 1))
        assert not flat[last:].any(), f"{spec.name}: padding is not zero"
    return parts


def _without_axes(piece: Piece) -> Piece:
    """To be sent to another process: process groups stay behind."""
    return replace(piece, same_on=(), partial=())


@dataclass(frozen=True)
class Assembled:
    """Logical tensors by name. `problems` says by name in what the parts of a tensor contradict each other. `routed`
    are the names of tensors of experts."""

    tensors: Mapping[str, Tensor]
    problems: Mapping[str, str]
    routed: frozenset[str] = frozenset()


def assembled(ranks: Sequence[Sequence[Held]]) -> Assembled:
    """Logical tensors, out of what every rank returned from `held`.

    It is a problem of a tensor unless, in every replica, owned ranges are disjoint and cover the tensor, copies are
    bitwise equal, and all replicas agree bitwise. Its first copy then stands for it.
    """
    parts: dict[tuple[str, int], list[Held]] = {}
    for part in (part for rank in ranks for part in rank):
        parts.setdefault((part.piece.name, part.replica), []).append(part)
    tensors: dict[str, Tensor] = {}
    problems: dict[str, str] = {}
    for (name, replica), found in parts.items():
        tensor, text = _assembled_one(found)
        if not torch.equal(tensors.setdefault(name, tensor), tensor):
            text = text or f"replica {replica} differs from the first"
        if text:
            problems.setdefault(name, text)
    routed = {name for (name, _), found in parts.items() if found[0].routed}
    return Assembled(tensors, problems, frozenset(routed))


def assemble(ranks: Sequence[Sequence[Held]]) -> dict[str, Tensor]:
    """The tensors of `assembled`. Raises AssertionError with its problems, if there are any."""
    whole = assembled(ranks)
    if whole.problems:
        raise AssertionError("\n".join(f"{name}: {text}" for name, text in whole.problems.items()))
    return dict(whole.tensors)


def _assembled_one(found: Sequence[Held]) -> tuple[Tensor, str]:
    """A logical tensor of one replica, and its problem: "" for none."""
    shape = found[0].piece.shape
    partial = found[0].partial
    tensor = found[0].values.new_zeros(shape)
    owners = torch.zeros(shape, dtype=torch.int)
    written = torch.zeros(shape, dtype=torch.bool)
    problem = ""
    for part in found:
        piece = part.piece
        if (piece.shape, part.partial) != (shape, partial):
            return tensor, "ranks disagree on its spec"
        box = tensor[piece.held.slices]
        seen = written[piece.held.slices]
        if partial:
            box += part.values
        elif not seen.any():  # most parts
            box.copy_(part.values)
        else:
            if not torch.equal(box[seen], part.values[seen]):
                problem = "copies differ"
            box[~seen] = part.values[~seen]
        seen.fill_(True)
        if piece.owned is not None:
            owners[piece.owned.slices] += 1
    if not written.all():
        problem = "some elements are held by no rank"
    elif not (owners == 1).all():
        problem = "owned ranges overlap or leave gaps"
    return tensor, problem


@torch.no_grad()
def fill(modules: Iterable[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Set every local parameter to its part of the logical `tensors`, padding rows to zero."""
    for param in unique_parameters(modules):
        param.zero_()
        for piece, first, last in spec_of(param).segments():
            param.view(-1)[first:last].copy_(tensors[piece.name][piece.held.slices].reshape(-1))


def held_weights(state: TrainState) -> list[Held]:
    """This rank's part of every weight. With ZeRO-3 a rank holds only its shards of them, so they are gathered."""
    weights = state.weights
    if not isinstance(weights, UnitWeights):
        return held(state.stages.values(), state.ctx)
    weights.hold(slot.param for slot in weights.layout.slots)
    parts = held(state.stages.values(), state.ctx)
    weights.hold(())
    return parts


def held_gradients(state: TrainState) -> list[Held]:
    """Reduced gradients; with ZeRO every rank holds only its shards of them, so they are gathered first.

    The state stays as it was: also what a reduction has left beside a shard, with which the next step must cope.
    """
    if isinstance(state.grads, UnitGradients):
        whole = _whole_gradients(state)
        return held(state.stages.values(), state.ctx, lambda param: whole[param] if param.requires_grad else None)
    if not state.grads.layout.sharded:
        return held(state.pipeline.stages.values(), state.ctx, main_gradients)
    left = state.grads.flat.clone()
    for bucket in state.grads.layout.buckets:
        axis = state.grads.layout.axis(bucket)
        collectives.all_gather_shard_async(state.grads.flat[bucket.start : bucket.stop], axis).wait()
    parts = held(state.pipeline.stages.values(), state.ctx, main_gradients)
    state.grads.flat.copy_(left)
    return parts


def held_state(state: TrainState) -> list[Held]:
    """This rank's part of what else training changes: buffers with a spec, and averages of weights (optimizer.ema).

    Buffers are those of routers, and they count choices of experts, so they are `routed`. A collective if there are
    averages.
    """
    parts = []
    for buffer in (buffer for stage in state.stages.values() for buffer in stage.buffers() if hasattr(buffer, "spec")):
        spec = spec_of(buffer)
        for piece, first, last in spec.segments():
            local = buffer.detach().reshape(-1)[first:last].view(piece.local_shape).clone()
            parts.append(Held(_without_axes(piece), local, False, spec.grad_axis.rank, True))
    if state.optimizer.average is not None:
        with state.optimizer.average.as_weights():
            averages = held_weights(state)
        parts += [replace(part, piece=replace(part.piece, name=f"average of {part.piece.name}")) for part in averages]
    return parts


def _whole_gradients(state: TrainState) -> dict[nn.Parameter, Tensor]:
    """The gradients of whole parameters, out of this rank's shards in `state.grads`."""
    found = {}
    grads = state.grads
    layout = state.grads.layout
    for bucket in layout.buckets:
        axis = layout.axis(bucket)
        start, stop = layout.shard(bucket)
        whole = torch.zeros(bucket.stop - bucket.start, device=grads.flat.device)
        whole[start - bucket.start : stop - bucket.start] = grads.part(start, stop)
        collectives.all_gather_shard_async(whole, axis).wait()
        for slot in layout.slots[bucket.first_param : bucket.end_param]:
            found[slot.param] = whole[slot.start - bucket.start : slot.stop - bucket.start].view(slot.param.shape)
    return found
