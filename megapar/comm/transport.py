"""What moves tensors between the ranks of an axis: one class for each way, behind one protocol.

    OneRank           here                            one rank: its result is what it gives
    Meta              here                            ranks of a plan: shapes alone, nothing is sent
    Simulated         transport_simulated.py          the same, but counted as if it were sent
    SharedMemory      transport_shared_memory.py      CPU ranks of one host
    Gloo              transport_gloo.py               CPU ranks of several hosts
    TorchDistributed  transport_torch.py              GPUs, over NCCL
    SymmetricMemory   transport_symmetric.py          GPUs of one node, from memory to memory

`megapar.declare.context` gives each axis its transport. `megapar.comm.collectives` checks, counts and logs, the same
for all.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from megapar.comm.pending import Pending

Transfers = Sequence[tuple[Tensor, int]]
"""Tensors, each with its destination or source: a position on the axis."""
GroupCounts = Sequence[Sequence[int]]
"""For each position of an axis the number of rows in each group. A group may be the rows of one expert."""
_FOLDS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class ExchangedRows(NamedTuple):
    """For each position of an axis the number of rows sent there, and the number of rows received from there.

    If the axis's transport `sorts_groups`, the rows that are sent may lie in groups: first those of group 0 for all
    positions, then those of group 1, and so on. `sent_groups` has their numbers. So may the rows that are received, by
    `received_groups`.
    """

    sent: Sequence[int]
    received: Sequence[int]
    sent_groups: GroupCounts | None = None
    received_groups: GroupCounts | None = None

    @property
    def back(self) -> "ExchangedRows":
        """The counts of an all-to-all that sends the received rows back."""
        return ExchangedRows(self.received, self.sent, self.received_groups, self.sent_groups)


class Transport(Protocol):
    """Starts operations between the ranks of one axis. Read a result after `Pending.wait`.

    `out` and slices are contiguous. `x` may be strided, except in `all_reduce`. It stays as it is, except for memory
    shared with `out`.
    """

    name: ClassVar[str]
    sends: ClassVar[bool]
    """Whether anything leaves this rank. Only then is an operation counted and logged."""
    sorts_groups: bool
    """Whether it also has `all_to_all_by_group`."""

    def all_reduce(self, x: Tensor, op: str) -> Pending:
        """Reduce `x` in place; `op` is sum, max or min."""
        ...

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        """Copy the `x` of position i into slice i of `out`. `x` may be this rank's slice of `out`."""
        ...

    def all_gather_slices(self, x: Tensor, slices: Sequence[Tensor]) -> Pending:
        """Copy the `x` of position i into slices[i], which may lie apart."""
        ...

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        """Sum this rank's slice of dimension 0 into `out`. If `out` lies in `x`, the rest of `x` becomes undefined."""
        ...

    def all_to_all(self, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        """Send `sent_rows[i]` rows of `x` to position i, and receive `received_rows[i]` rows from there into `out`."""
        ...

    def exchange(self, sends: Transfers, receives: Transfers) -> Pending:
        """Send and receive contiguous tensors. Both ends of a link name its transfers in the same order."""
        ...

    def barrier(self) -> Pending:
        """Wait until all ranks of the axis have called this."""
        ...


def put(x: Tensor, out: Tensor) -> Tensor:
    """Copy `x` into `out`, unless it lies there already. Returns `out`."""
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)
    return out


def fold(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    """Reduce at least two `parts` in their order into `out`. `out` may be one of them."""
    # `out` is written before the third part is read.
    later = [part.clone() if part.data_ptr() == out.data_ptr() else part for part in parts[2:]]
    _FOLDS[op](parts[0], parts[1], out=out)
    for part in later:
        _FOLDS[op](out, part, out=out)


def parts_of_positions(x: Tensor, counts: GroupCounts) -> list[Sequence[Tensor]]:
    """For each position of an axis its rows of `x`: a part for each group.

    `x` has the rows of group 0 first, those of position 0 before those of position 1. Then it has those of group 1.
    """
    sizes = [count for of_positions in zip(*counts, strict=True) for count in of_positions]
    parts = x.split(sizes)
    return [parts[position :: len(counts)] for position in range(len(counts))]


def rows_by_exchange(
    transport: Transport, rank: int, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]
) -> Pending:
    """`Transport.all_to_all`, as messages between each two ranks. `rank` is this rank's position."""
    outgoing = x.contiguous().split(list(sent_rows))
    arriving = out.split(list(received_rows))
    arriving[rank].copy_(outgoing[rank])
    # No empty messages: both ends of a link know the count, so both leave it out.
    peers = [position for position in range(len(outgoing)) if position != rank]
    sends = [(outgoing[peer], peer) for peer in peers if sent_rows[peer]]
    receives = [(arriving[peer], peer) for peer in peers if received_rows[peer]]
    return transport.exchange(sends, receives)


class SortsGroups(Transport, Protocol):
    """A transport that sorts rows while it copies them."""

    def all_to_all_by_group(self, x: Tensor, out: Tensor, sent: GroupCounts, received: GroupCounts) -> Pending:
        """`all_to_all` of rows in groups: first those of group 0 for each position, then those of group 1, and so on.

        One of `sent` and `received` has a single group: the rows of a position lie together there.
        """
        ...


class OneRank:
    """The transport of an axis of size 1. Everything received comes from this rank itself."""

    name: ClassVar[str] = "one rank"
    sends: ClassVar[bool] = False
    sorts_groups: bool = False

    def all_reduce(self, x: Tensor, op: str) -> Pending:
        return Pending()

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        put(x, out)
        return Pending()

    def all_gather_slices(self, x: Tensor, slices: Sequence[Tensor]) -> Pending:
        put(x, slices[0])
        return Pending()

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        put(x, out)
        return Pending()

    def all_to_all(self, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        put(x, out)
        return Pending()

    def exchange(self, sends: Transfers, receives: Transfers) -> Pending:
        raise RuntimeError("a rank that is alone on its axis has nobody to exchange tensors with")

    def barrier(self) -> Pending:
        return Pending()


ALONE = OneRank()


class Meta:
    """The transport of ranks existing only in a plan. Results have their shapes and no values.

    Each method raises RuntimeError on a tensor that is not on the meta device: its values would be wrong.
    `sorts_groups` says whether the transport of the run will.
    """

    name: ClassVar[str] = "meta"
    sends: ClassVar[bool] = False

    def __init__(self, *, sorts_groups: bool = False):
        self.sorts_groups = sorts_groups

    def all_reduce(self, x: Tensor, op: str) -> Pending:
        return _nothing(x)

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        return _nothing(x)

    def all_gather_slices(self, x: Tensor, slices: Sequence[Tensor]) -> Pending:
        return _nothing(x)

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        return _nothing(x)

    def all_to_all(self, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        return _nothing(x)

    def all_to_all_by_group(self, x: Tensor, out: Tensor, sent: GroupCounts, received: GroupCounts) -> Pending:
        return self.all_to_all(x, out, [sum(groups) for groups in sent], [sum(groups) for groups in received])

    def exchange(self, sends: Transfers, receives: Transfers) -> Pending:
        return _nothing(*(x for x, _ in [*sends, *receives]))

    def barrier(self) -> Pending:
        return Pending()


def _nothing(*tensors: Tensor) -> Pending:
    if not all(x.is_meta for x in tensors):
        raise RuntimeError("the ranks of a planned context are not connected: its tensors must be on the meta device")
    return Pending()


PLANNED = Meta()
PLANNED_ON_ONE_HOST = Meta(sorts_groups=True)
"""The transport of planned ranks on the CPUs of one host."""
