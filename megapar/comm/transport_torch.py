"""The collectives of torch.distributed itself. Between GPUs NCCL serves them."""

from collections.abc import Sequence
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from megapar.comm.flight import AxisLog
from megapar.comm.pending import Pending, as_communication_errors
from megapar.comm.transport import Transfers

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renames the two and warns on the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchDistributed:
    """A `Transport` over a process group. `ranks` are its global ranks, and this one is at position `rank`."""

    name: ClassVar[str] = "torch.distributed"
    sends: ClassVar[bool] = True
    sorts_groups: bool = False

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...], log: AxisLog | None):
        self.group = group
        self.rank = rank
        self.ranks = ranks
        self.log = log

    def all_reduce(self, x: Tensor, op: str) -> Pending:
        return Pending([dist.all_reduce(x, _OPS[op], group=self.group, async_op=True)], [x])

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        x = x.contiguous()
        return Pending([_all_gather_single(out, x, group=self.group, async_op=True)], [out, x])

    def all_gather_slices(self, x: Tensor, slices: Sequence[Tensor]) -> Pending:
        x = x.contiguous()
        return Pending([dist.all_gather(list(slices), x, group=self.group, async_op=True)], [*slices, x])

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        x = x.contiguous()
        return Pending([_reduce_scatter_single(out, x, group=self.group, async_op=True)], [out, x])

    def all_to_all(self, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        x = x.contiguous()
        work = dist.all_to_all_single(out, x, list(received_rows), list(sent_rows), group=self.group, async_op=True)
        return Pending([work], [out, x])

    def exchange(self, sends: Transfers, receives: Transfers) -> Pending:
        operations = [dist.P2POp(dist.isend, x, self.ranks[peer], self.group) for x, peer in sends]
        operations += [dist.P2POp(dist.irecv, x, self.ranks[peer], self.group) for x, peer in receives]
        with as_communication_errors(self.log):
            # One batch: NCCL may deadlock if two ranks post single sends and receives in different orders.
            works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, [x for x, _ in [*sends, *receives]])

    def barrier(self) -> Pending:
        return Pending([dist.barrier(group=self.group, async_op=True)])
