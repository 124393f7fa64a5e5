"""Recurrences under context parallelism: a state passes over the runs of positions of a sample, whoever holds them.

A step S_t = M_t S_{t-1} + B_t is a map of the state, and so is a whole run of positions: S becomes M S + B, with M the
product of its M_t and B the state at its end if it begins with nothing. Each rank computes the maps of its own runs
(its two chunks, `deal.chunks`), all ranks gather the maps, and each folds the maps in front of its own runs.

A document begins with nothing: where `begins_sb` is true, M_t is 0. So the map of a run with a start has M = 0, and no
state crosses the start, wherever ranks' chunks are cut.
"""

from collections.abc import Callable
from typing import Any

import torch
from megapar_kernels.delta_rule import NOTHING
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.context_parallel.deal import holders
from megapar.declare.batch import MicroBatch


def begins_sb(batch: MicroBatch) -> Tensor:
    """Return where a document or a sample begins among this rank's positions: bool [s, b]."""
    if batch.starts is None:
        return (batch.positions_s == 0)[:, None].expand(-1, batch.size)
    return batch.document_positions_bs().t() == 0


def decays_in_documents(g: Tensor, batch: MicroBatch) -> Tensor:
    """Return the logarithms of decays [s, b, ...] with `NOTHING` at the first token of each document."""
    if batch.starts is None:
        return g
    begins = begins_sb(batch)
    return g.masked_fill(begins.view(*begins.shape, *(1 for _ in g.shape[2:])), NOTHING)


def runs_of(x_s: Tensor, cp: Axis) -> tuple[Tensor, ...]:
    """Cut [s, ...] into this rank's runs of positions: its two chunks, or the whole sample on a single rank."""
    return (x_s,) if cp.size == 1 else x_s.chunk(2)


def incoming_states(
    maps: Tensor,
    states: Tensor,
    cp: Axis,
    apply: Callable[[Tensor, Tensor], Tensor] = torch.mul,
    *,
    backwards: bool = False,
) -> Tensor:
    """Return the state in front of each of this rank's runs: [runs, ...], the shape of `states`.

    With `backwards` runs follow each other from the last to the first, as gradients of states do.

    `maps` [runs, ...] and `states` [runs, ...] are M and B of the runs in the order of positions. `apply(M, S)` is M S:
    an elementwise product, or a matrix product such as torch.matmul. A collective over `cp`, in forward and in
    backward, of as many bytes as maps and states have. Every rank folds in the order of positions, so the sums of a
    rank do not depend on the number of ranks but for where the runs are cut.
    """
    flat = torch.cat([maps.flatten(1), states.flatten(1)], dim=1)
    everyones = _Gathered.apply(flat, cp) if cp.size > 1 else flat
    width = maps[0].numel()
    # By rank and run; `holders` says which of them is the first in the sample, the second, ...
    order = [2 * rank + half for rank, half in holders(cp.size)] if cp.size > 1 else [0]
    state = torch.zeros_like(states[0])
    incoming: dict[int, Tensor] = {}
    for place in reversed(order) if backwards else order:
        incoming[place] = state
        run_map = everyones[place, :width].view_as(maps[0])
        state = apply(run_map, state) + everyones[place, width:].view_as(states[0])
    runs = len(states)
    return torch.stack([incoming[runs * cp.rank + run] for run in range(runs)])


def rows_before(x_sbc: Tensor, count: int, cp: Axis) -> Tensor:
    """Return the `count` positions in front of each of this rank's runs: [runs, count, b, c]. Zeros precede a sample.

    A collective over `cp`, in forward and in backward. Runs may be shorter than `count`: rows of several runs in front
    of a run are then among them.
    """
    runs = runs_of(x_sbc, cp)
    if cp.size == 1:
        return x_sbc.new_zeros(1, count, *x_sbc.shape[1:])
    kept = min(count, len(runs[0]))
    ends = torch.stack([run[len(run) - kept :] for run in runs])
    everyones = _Gathered.apply(ends, cp)
    in_order = everyones[[2 * rank + half for rank, half in holders(cp.size)]].flatten(0, 1)
    padded = torch.cat([in_order.new_zeros(count, *in_order.shape[1:]), in_order])
    places = (cp.rank, 2 * cp.size - 1 - cp.rank)  # of this rank's runs in the sample
    return torch.stack([padded[place * kept : place * kept + count] for place in places])


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, rank after rank. Backward sums each rank's gradient of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        return collectives.all_gather(rows.contiguous(), cp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.reduce_scatter(grad.contiguous(), ctx.cp), None
