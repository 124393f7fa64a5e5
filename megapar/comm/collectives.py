"""Every collective and point-to-point transfer of the project.

At axis size 1 each function does nothing. Otherwise it counts the call and its bytes, and waits for each work once.
Each operation is logged in the axis's flight log (megapar.comm.flight) when it starts, when its wait begins and when it
has ended. So a rank that waits too long can tell which rank is missing.

Bytes are what this rank sends with ring algorithms, for n ranks and a full tensor of B bytes: all-reduce 2 B (n-1)/n,
all-gather and reduce-scatter B (n-1)/n, point-to-point B.

Ranks on the CPUs of one host exchange through shared memory (megapar.comm.local_collectives). Gloo serves axes over
several hosts. There this module does not use gloo's own algorithms, which take up to eight times as long.
The ranks send each other their slices directly, and each rank adds what arrives in rank order. A sum then rounds the
same way wherever an element lies in its tensor. A small all-reduce sends the whole tensor to each rank. A large one
uses gloo's all-reduce.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.comm import local_collectives
from megapar.comm.flight import AxisLog
from megapar.comm.shared_memory import Operation, Steps
from megapar.comm.store import StoreUser, part_of
from megapar.context import Axis
from megapar.errors import CommunicationError
from megapar.system import limits

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_PIECE = 4 << 20  # bytes of one value in the store; TCPStore closes the connection above 8 MiB
_SMALL = 1 << 20  # bytes that a rank may receive in an all-reduce by direct exchange
_FIRST_RUN = 1 << 14  # elements, see `_round_in_place`
# torch 2.13 renames the two and warns on the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def _as_communication_errors(log: AxisLog | None = None) -> Iterator[None]:
    """Raise CommunicationError in place of RuntimeError, by which backends report a peer that is gone or too late.

    `log` is the flight log of the operation's axis. Raises OutOfMemoryError if no more sockets can be opened.
    """
    try:
        with limits.named():
            yield
    except RuntimeError as error:
        words = str(error).splitlines()[0]
        reason = f"another rank ended, or a transfer took longer than launch.timeout_seconds ({words})"
        # The log may know the rank that is missing.
        message = reason if log is None else log.fail(reason)
        raise CommunicationError(message) from error


class Work(Protocol):
    """An operation in flight: a work of torch.distributed, or an Operation of megapar.comm.shared_memory."""

    def wait(self) -> object: ...


class Pending:
    """Operations in flight and the tensors that they use.

    A second wait on a gloo point-to-point work never returns. A tensor that is freed in flight is a use-after-free, and
    a work that is dropped in flight loses its message. So this object holds works and tensors until the first `wait`,
    and later calls of `wait` do nothing. `wait` raises CommunicationError if a peer is gone or too late.
    """

    def __init__(self, works: Sequence[Work | None] = (), tensors: Sequence[Tensor] = ()):
        self._works = [work for work in works if work is not None]
        self._tensors = list(tensors)
        self._then: Callable[[], None] | None = None
        self._logged: tuple[AxisLog, int, int] | None = None  # first and last position of the operations in the log

    def wait(self) -> None:
        """Wait for the works, then call the function given to `followed_by`. Only the first call does anything."""
        # Cleared first: should a work fail, another `wait` must not wait for it again.
        works = self._works
        self._works = []
        if works and self._logged is not None:
            log, first, last = self._logged
            log.wait(first, last)
            with _as_communication_errors(log):
                for work in works:
                    work.wait()
            log.end(first, last)
        else:
            with _as_communication_errors():
                for work in works:
                    work.wait()
        then = self._then
        self._then = None
        if then is not None:
            then()
        self._tensors = []

    def followed_by(self, then: Callable[[], None]) -> "Pending":
        """Call `then` once, after the works have ended. Returns this object."""
        self._then = then
        return self

    def logged(self, axis: Axis, first: int, last: int) -> "Pending":
        """Tell that the works are the operations `first` to `last` of the axis's log. Returns this object."""
        self._logged = None if axis.log is None else (axis.log, first, last)
        return self


def _is_gloo(axis: Axis) -> bool:
    return dist.get_backend(axis.group) == "gloo"


def _bytes(x: Tensor) -> int:
    return x.nbytes


def _begin(axis: Axis, operation: str, x: Tensor, sent_bytes: int) -> int:
    """Count and log a collective that is about to start. Returns its position in the log, -1 without a log."""
    axis.traffic.record(operation, sent_bytes)
    if axis.log is None:
        return -1
    # The call site is 4 frames up at least: `site`, `begin`, this function and a collective lie between.
    return axis.log.begin(operation, x.nbytes, x.dtype, module=__file__, depth=4)


def _start_local(steps: Steps, axis: Axis, first: int, last: int) -> Pending:
    """Start an operation between ranks of this host. `first` and `last` are its positions in the axis's log."""
    assert axis.local is not None
    with _as_communication_errors(axis.log):
        operation = Operation(steps, axis.local.host)
    return Pending([operation]).logged(axis, first, last)


def _check(x: Tensor) -> None:
    """Raise RuntimeError if `x` needs a gradient, which a raw collective would lose.

    Inside a forward pass use the autograd functions of tensor_parallel.regions.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a collective on a tensor that needs a gradient would lose it: use tensor_parallel.regions")


def _transfer(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis) -> Pending:
    """Start point-to-point transfers of (tensor, position on `axis`) pairs. The caller counts their bytes."""
    if axis.local is not None:
        with _as_communication_errors(axis.log):
            steps = local_collectives.exchange(sends, receives, axis.local)
            return Pending([Operation(steps, axis.local.host)])
    operations = [dist.P2POp(dist.isend, x, axis.ranks[peer], axis.group) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, axis.ranks[peer], axis.group) for x, peer in receives]
    with _as_communication_errors(axis.log):
        # One batch: NCCL may deadlock if two ranks post single sends and receives in different orders.
        works = dist.batch_isend_irecv(operations) if operations else []
    return Pending(works, [x for x, _ in [*sends, *receives]])


def _peers(axis: Axis) -> list[int]:
    return [position for position in range(axis.size) if position != axis.rank]


def _exchange_and_fold(outgoing: Sequence[Tensor], axis: Axis, op: str = "sum") -> Pending:
    """Start sending `outgoing[i]` to position i.

    After `wait`, outgoing[axis.rank] holds the reduction of all ranks' tensors for this rank, in rank order.
    """
    result = outgoing[axis.rank]
    arriving = {peer: torch.empty_like(result) for peer in _peers(axis)}
    sends = [(outgoing[peer], peer) for peer in arriving]
    receives = [(x, peer) for peer, x in arriving.items()]

    def reduce() -> None:
        parts = [arriving.get(position, result) for position in range(axis.size)]
        # In rank order, so that every rank gets the same bits.
        local_collectives.fold(parts, result, op)

    return _transfer(sends, receives, axis).followed_by(reduce)


def _exchange_and_keep(slices: Sequence[Tensor], axis: Axis) -> Pending:
    """Start sending this rank's slice to all others and receiving theirs."""
    own = slices[axis.rank]
    return _transfer([(own, peer) for peer in _peers(axis)], [(slices[peer], peer) for peer in _peers(axis)], axis)


def initialize(
    backend: str,
    rank: int,
    world_size: int,
    *,
    store: dist.Store,
    timeout_seconds: float = 300.0,
    device: torch.device | None = None,
) -> None:
    """Create the process group of all ranks, which exchange addresses through `store`.

    If `device` is a GPU, NCCL connects the ranks here rather than in the first collective. NCCL then makes later groups
    by splitting this one. Raises CommunicationError if ranks do not reach each other.
    """
    gpu = device if device is not None and device.type == "cuda" else None
    with _as_communication_errors():
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=gpu,
        )


def initialize_fake(rank: int, world_size: int) -> None:
    """Create a process group of `world_size` ranks in one process, for dry runs. Its collectives do nothing."""
    # Imported here because it is a private module of torch, which only dry runs need.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def shutdown() -> None:
    """Destroy all process groups, if this process has made any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce_async(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Start reducing `x` in place over `axis`. Raises ValueError if `x` is not contiguous."""
    if axis.size == 1:
        return Pending()
    _check(x)
    if not x.is_contiguous():
        raise ValueError("all_reduce_async needs a contiguous tensor: the result is written in place")
    if x.is_meta:
        return Pending()  # a dry run computes shapes alone
    position = _begin(axis, "all_reduce", x, 2 * _bytes(x) * (axis.size - 1) // axis.size)
    if axis.local is not None:
        return _start_local(local_collectives.all_reduce(x, axis.local, op), axis, position, position)
    if _is_gloo(axis) and _bytes(x) * (axis.size - 1) <= _SMALL:
        return _exchange_and_fold([x] * axis.size, axis, op).logged(axis, position, position)
    work = dist.all_reduce(x, _OPS[op], group=axis.group, async_op=True)
    return Pending([work], [x]).logged(axis, position, position)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce `x` in place over `axis` and return it; `op` is sum, max or min.

    A strided tensor is reduced through a contiguous copy.
    """
    if axis.size == 1:
        return x
    _check(x)
    if not x.is_contiguous():
        # Some backends drop the result of a collective on a strided tensor.
        return x.copy_(all_reduce(x.contiguous(), axis, op))
    all_reduce_async(x, axis, op).wait()
    return x


def all_gather_async(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Start concatenating every rank's `x` (equal shapes) along dimension 0. Read the result after `wait`."""
    if axis.size == 1:
        return x, Pending()
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    if axis.local is not None or x.is_meta or _is_gloo(axis):
        return out, all_gather_slices_async(x, out.chunk(axis.size), axis)
    _check(x)
    x = x.contiguous()
    position = _begin(axis, "all_gather", x, _bytes(x) * (axis.size - 1))
    work = _all_gather_single(out, x, group=axis.group, async_op=True)
    return out, Pending([work], [out, x]).logged(axis, position, position)


def all_gather_slices_async(x: Tensor, slices: Sequence[Tensor], axis: Axis) -> Pending:
    """Start copying the `x` of position i into slices[i], on every rank. Read the slices after `wait`.

    `x` and the slices have equal shapes. Each slice is contiguous, but slices may lie apart in memory. For slices that
    follow each other `all_gather_async` is faster: NCCL gathers into memory of its own, and then copies to the slices.
    """
    if axis.size == 1:
        slices[0].copy_(x)
        return Pending()
    _check(x)
    x = x.contiguous()
    if x.is_meta:
        return Pending()
    position = _begin(axis, "all_gather", x, _bytes(x) * (axis.size - 1))
    if axis.local is not None:
        slices[axis.rank].copy_(x)
        return _start_local(local_collectives.all_gather(slices, axis.local), axis, position, position)
    if _is_gloo(axis):
        slices[axis.rank].copy_(x)
        return _exchange_and_keep(slices, axis).logged(axis, position, position)
    work = dist.all_gather(list(slices), x, group=axis.group, async_op=True)
    return Pending([work], [*slices, x]).logged(axis, position, position)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate every rank's `x` (equal shapes) along dimension 0."""
    out, pending = all_gather_async(x, axis)
    pending.wait()
    return out


def all_to_all_async(
    x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis
) -> tuple[Tensor, Pending]:
    """Start sending rows of `x` to every position of `axis`. Read the result after `wait`.

    The first `sent_rows[0]` rows go to position 0, the next `sent_rows[1]` to position 1, and so on. `received_rows[i]`
    rows arrive from position i. The result holds the rows from position 0, then those from position 1, and so on.
    Raises ValueError unless both have a count for each position and `x` has as many rows as are sent.
    """
    if len(sent_rows) != axis.size or len(received_rows) != axis.size or sum(sent_rows) != x.shape[0]:
        raise ValueError(
            f"all_to_all of {x.shape[0]} rows over {axis.size} ranks was given counts {list(sent_rows)} and "
            f"{list(received_rows)}: one for each rank, and as many rows sent as there are"
        )
    if axis.size == 1:
        return x, Pending()
    _check(x)
    x = x.contiguous()
    out = x.new_empty((sum(received_rows), *x.shape[1:]))
    if x.is_meta:
        return out, Pending()
    outgoing = x.split(list(sent_rows))
    position = _begin(axis, "all_to_all", x, _bytes(x) - _bytes(outgoing[axis.rank]))
    if axis.local is None and not _is_gloo(axis):
        work = dist.all_to_all_single(out, x, list(received_rows), list(sent_rows), group=axis.group, async_op=True)
        return out, Pending([work], [out, x]).logged(axis, position, position)
    arriving = out.split(list(received_rows))
    arriving[axis.rank].copy_(outgoing[axis.rank])
    # No empty messages: both ends of a link know the count, so both leave it out.
    sends = [(outgoing[peer], peer) for peer in _peers(axis) if sent_rows[peer]]
    receives = [(arriving[peer], peer) for peer in _peers(axis) if received_rows[peer]]
    return out, _transfer(sends, receives, axis).logged(axis, position, position)


def all_to_all(x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis) -> Tensor:
    """`all_to_all_async`, and wait for it. Returns the rows that arrived."""
    out, pending = all_to_all_async(x, sent_rows, received_rows, axis)
    pending.wait()
    return out


def reduce_scatter_async(x: Tensor, axis: Axis, out: Tensor | None = None) -> tuple[Tensor, Pending]:
    """Start summing `x` over `axis`. The result is this rank's slice of dimension 0. Read it after `wait`.

    It is written into `out`, which must be contiguous, or into new memory. Raises ValueError if dimension 0 does not
    divide by the axis.
    """
    if axis.size == 1:
        return (x if out is None else out.copy_(x)), Pending()
    _check(x)
    if x.shape[0] % axis.size:
        raise ValueError(
            f"reduce-scatter: dimension 0 of {tuple(x.shape)} does not divide by {axis.name} size {axis.size}"
        )
    x = x.contiguous()
    if out is None:
        out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    if x.is_meta:
        return out, Pending()
    position = _begin(axis, "reduce_scatter", x, _bytes(x) * (axis.size - 1) // axis.size)
    if axis.local is not None:
        steps = local_collectives.reduce_scatter(x.chunk(axis.size), out, axis.local)
        return out, _start_local(steps, axis, position, position)
    if _is_gloo(axis):
        slices = list(x.chunk(axis.size))
        # The fold writes its result into this rank's slice, and `x` must stay as it is.
        slices[axis.rank] = out.copy_(slices[axis.rank])
        return out, _exchange_and_fold(slices, axis).logged(axis, position, position)
    work = _reduce_scatter_single(out, x, group=axis.group, async_op=True)
    return out, Pending([work], [out, x]).logged(axis, position, position)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum `x` over `axis` and return this rank's slice of dimension 0."""
    out, pending = reduce_scatter_async(x, axis)
    pending.wait()
    return out


def reduce_scatter_shard_async(flat: Tensor, axis: Axis) -> Pending:
    """Start summing the 1-D buffer `flat` over `axis` in place.

    After `wait` this rank's equal slice holds the sum. The rest of the buffer is undefined.
    """
    if axis.size == 1:
        return Pending()
    position = _begin(axis, "reduce_scatter", flat, _bytes(flat) * (axis.size - 1) // axis.size)
    slices = flat.chunk(axis.size)
    shard = slices[axis.rank]
    if axis.local is not None:
        return _start_local(local_collectives.reduce_scatter(slices, shard, axis.local), axis, position, position)
    if _is_gloo(axis):
        return _exchange_and_fold(slices, axis).logged(axis, position, position)
    work = _reduce_scatter_single(shard, flat, group=axis.group, async_op=True)
    return Pending([work], [flat]).logged(axis, position, position)


def reduce_scatter_shard_in_bf16_async(flat: Tensor, axis: Axis) -> Pending:
    """Do as `reduce_scatter_shard_async` with an fp32 buffer, but let ranks send each other bf16: half the bytes.

    Each rank rounds its whole part to bf16. The parts are summed in fp32, in rank order. So the sum does not depend on
    which rank computes it. What is sent lies in the first half of the memory of `flat`, what arrives in the second.
    """
    if axis.size == 1:
        return Pending()
    position = _begin(axis, "reduce_scatter", flat, _bytes(flat) // 2 * (axis.size - 1) // axis.size)
    outgoing, arriving = _round_in_place(flat)
    sent, received = outgoing.chunk(axis.size), arriving.chunk(axis.size)

    slices = flat.chunk(axis.size)

    def add_up() -> None:
        total = slices[0]  # in the half that has been sent, so that it overwrites nothing that has arrived
        total.copy_(received[0])
        for part in received[1:]:
            total += part
        slices[axis.rank].copy_(total)

    if axis.local is None and not _is_gloo(axis):
        # Not NCCL's reduce-scatter, which would round every partial sum to bf16.
        work = dist.all_to_all_single(arriving, outgoing, group=axis.group, async_op=True)
        pending = Pending([work], [flat])
    else:
        received[axis.rank].copy_(sent[axis.rank])
        peers = _peers(axis)
        pending = _transfer([(sent[peer], peer) for peer in peers], [(received[peer], peer) for peer in peers], axis)
    return pending.followed_by(add_up).logged(axis, position, position)


def _round_in_place(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Round the 1-D fp32 buffer `flat` to bf16 in the first half of its memory. Returns both halves as bf16."""
    first, second = flat.view(torch.bfloat16).chunk(2)
    # The first elements are written over themselves, so they are copied. Then each run of elements is written over
    # runs before it, which have been rounded already.
    start, stop = 0, min(_FIRST_RUN, flat.numel())
    first[:stop] = flat[:stop].clone()
    while stop < flat.numel():
        start, stop = stop, min(2 * stop, flat.numel())
        first[start:stop] = flat[start:stop]
    return first, second


def all_gather_shard_async(flat: Tensor, axis: Axis) -> Pending:
    """Start gathering every rank's equal slice of the 1-D buffer `flat` into `flat` itself, on every rank."""
    if axis.size == 1:
        return Pending()
    slices = flat.chunk(axis.size)
    shard = slices[axis.rank]
    position = _begin(axis, "all_gather", shard, _bytes(shard) * (axis.size - 1))
    if axis.local is not None:
        return _start_local(local_collectives.all_gather(slices, axis.local), axis, position, position)
    if _is_gloo(axis):
        return _exchange_and_keep(slices, axis).logged(axis, position, position)
    work = _all_gather_single(flat, shard, group=axis.group, async_op=True)
    return Pending([work], [flat]).logged(axis, position, position)


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis) -> Pending:
    """Start point-to-point transfers of (tensor, position on `axis`) pairs: `sends` out, `receives` into their tensors.

    Both ends of a link must name its transfers in the same order. Tensors must be contiguous, else ValueError is
    raised. They are kept alive until `wait`.
    """
    if not all(x.is_contiguous() for x, _ in [*sends, *receives]):
        raise ValueError("exchange needs contiguous tensors: they are sent and received in place")
    if any(x.is_meta for x, _ in [*sends, *receives]):
        return Pending()
    for x, _ in sends:
        axis.traffic.record("send", _bytes(x))
    messages = [("send", x, peer) for x, peer in sends] + [("receive", x, peer) for x, peer in receives]
    if not messages:
        return Pending()
    first = -1  # without a log
    last = -1
    if axis.log is not None:
        positions = []
        for operation, x, peer in messages:
            positions.append(axis.log.begin(operation, x.nbytes, x.dtype, peer, module=__file__, depth=3))
        first = positions[0]
        last = positions[-1]
    return _transfer(sends, receives, axis).logged(axis, first, last)


def barrier(axis: Axis) -> None:
    """Wait until all ranks of `axis` have called this."""
    if axis.size == 1:
        return
    position = -1
    if axis.log is not None:
        position = axis.log.begin("barrier", 0, None, module=__file__, depth=3)
    if axis.local is not None:
        _start_local(local_collectives.barrier(axis.local), axis, position, position).wait()
        # Another rank may still wait for a packet that is queued here, and this process may end next.
        with _as_communication_errors(axis.log):
            axis.local.host.flush()
        return
    work = dist.barrier(group=axis.group, async_op=True)
    Pending([work]).logged(axis, position, position).wait()


def _posted() -> dist.Store:
    return part_of(dist.distributed_c10d._get_default_store(), StoreUser.POSTED)


def post(key: str, value: Any) -> None:
    """Store `value` (JSON types) under `key` in the world's store, where another rank finds it by `collect`.

    This is no collective: any thread may call it. The value is compressed and cut into pieces, because TCPStore closes
    the connection at a value above 8 MiB.
    """
    packed = zlib.compress(json.dumps(value).encode(), 1)
    pieces = [packed[first : first + _PIECE] for first in range(0, len(packed), _PIECE)]
    with _as_communication_errors():
        store = _posted()
        for number, piece in enumerate(pieces):
            store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # bytes are as good
        # Set last: a rank that finds this key finds all pieces.
        store.set(key, str(len(pieces)))


def collect(key: str) -> Any | None:
    """Remove and return the value posted under `key`, None if there is none yet. Any thread may call it."""
    with _as_communication_errors():
        store = _posted()
        if not store.check([key]):
            return None
        keys = [f"{key}/{number}" for number in range(int(store.get(key)))]
        packed = b"".join(store.get(piece) for piece in keys)
        for done in (key, *keys):
            store.delete_key(done)
    return json.loads(zlib.decompress(packed))


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Return every rank's `value` (JSON types) on every rank, in rank order. Nothing is pickled."""
    if axis.size == 1:
        return [value]
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    # all_gather needs equal shapes, so rows are padded to the longest one.
    lengths = all_gather(torch.tensor([payload.numel()], device=device), axis).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    # One copy to the host for all rows: reading each row by itself would wait for the device once a row.
    rows = all_gather(padded.to(device), axis).cpu().view(axis.size, -1).numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
