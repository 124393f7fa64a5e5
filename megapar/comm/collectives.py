"""Every collective and point-to-point transfer of the project.

The axis's transport (megapar.comm.transport) moves the tensors. This module does what is the same for all of them. It
checks a call, and counts it and its bytes. It logs each operation in the axis's flight log (megapar.comm.flight) when
it starts, when its wait begins and when it has ended. So after too long a wait, a rank can tell which rank is missing.
On an axis of one rank nothing is sent, counted or logged.

Bytes are what this rank sends with ring algorithms, for n ranks and a full tensor of B bytes: all-reduce 2 B (n-1)/n,
all-gather and reduce-scatter B (n-1)/n, point-to-point B.
"""

import json
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.comm.axis import Axis
from megapar.comm.pending import Pending, as_communication_errors
from megapar.comm.store import StoreUser, part_of
from megapar.comm.transport import ExchangedRows, SortsGroups, Transfers

_PIECE = 4 << 20  # bytes of one value in the store; TCPStore closes the connection above 8 MiB
_FIRST_RUN = 1 << 14  # elements, see `_round_in_place`


def _begin(axis: Axis, operation: str, x: Tensor, sent_bytes: int) -> int:
    """Check, count and log a collective before it starts. Returns its position in the log, -1 without a log.

    Raises RuntimeError if `x` needs a gradient, because a raw collective would lose it. Inside a forward pass use the
    autograd functions of tensor_parallel.regions.
    """
    if axis.size > 1 and x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a collective on a tensor that needs a gradient would lose it: use tensor_parallel.regions")
    if not axis.transport.sends:
        return -1
    axis.traffic.record(operation, sent_bytes)
    if axis.log is None:
        return -1
    # The call site is 4 frames up at least: `site`, `begin`, this function and a collective lie between.
    return axis.log.begin(operation, x.nbytes, x.dtype, module=__file__, depth=4)


def _result(x: Tensor, rows: int, axis: Axis) -> Tensor:
    """Memory for a result of `rows` rows like those of `x`. On one rank the result is `x` itself."""
    if axis.size == 1:
        return x
    return x.new_empty((rows, *x.shape[1:]))


def initialize(
    backend: str,
    rank: int,
    world_size: int,
    *,
    store: dist.Store,
    timeout_seconds: float = 300.0,
    device: torch.device | None = None,
    options: Any = None,
) -> None:
    """Create the process group of all ranks, which exchange addresses through `store`.

    `options` are NCCL's (`process_groups.nccl_options`). If `device` is a GPU, NCCL connects the ranks here rather than
    in the first collective. NCCL then makes later groups by splitting this one. Raises CommunicationError if ranks do
    not reach each other.
    """
    gpu = device if device is not None and device.type == "cuda" else None
    with as_communication_errors():
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=gpu,
            pg_options=options,
        )


def shutdown() -> None:
    """Destroy all process groups, if this process has made any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce_async(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Start reducing `x` in place over `axis`. Raises ValueError if `x` is not contiguous."""
    if axis.size > 1 and not x.is_contiguous():
        raise ValueError("all_reduce_async needs a contiguous tensor: the result is written in place")
    position = _begin(axis, "all_reduce", x, 2 * x.nbytes * (axis.size - 1) // axis.size)
    return axis.transport.all_reduce(x, op).logged(axis.log, position, position)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce `x` in place over `axis` and return it; `op` is sum, max or min.

    A strided tensor is reduced through a contiguous copy.
    """
    if axis.size > 1 and not x.is_contiguous():
        # Some backends drop the result of a collective on a strided tensor.
        return x.copy_(all_reduce(x.contiguous(), axis, op))
    all_reduce_async(x, axis, op).wait()
    return x


def all_gather_async(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Start concatenating every rank's `x` (equal shapes) along dimension 0. Read the result after `wait`."""
    position = _begin(axis, "all_gather", x, x.nbytes * (axis.size - 1))
    out = _result(x, x.shape[0] * axis.size, axis)
    return out, axis.transport.all_gather(x, out).logged(axis.log, position, position)


def all_gather_slices_async(x: Tensor, slices: Sequence[Tensor], axis: Axis) -> Pending:
    """Start copying the `x` of position i into slices[i], on every rank. Read the slices after `wait`.

    `x` and the slices have equal shapes. Each slice is contiguous, but slices may lie apart in memory. For adjacent
    slices `all_gather_async` is faster: NCCL gathers into memory of its own, and then copies to the slices.
    """
    position = _begin(axis, "all_gather", x, x.nbytes * (axis.size - 1))
    return axis.transport.all_gather_slices(x, slices).logged(axis.log, position, position)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate every rank's `x` (equal shapes) along dimension 0."""
    out, pending = all_gather_async(x, axis)
    pending.wait()
    return out


def all_to_all_async(x: Tensor, counts: ExchangedRows, axis: Axis, out: Tensor | None = None) -> tuple[Tensor, Pending]:
    """Start sending rows of `x` to every position of `axis`. Read the result, in `out` if given, after `wait`.

    The first rows go to position 0, the next to position 1, and so on. The result holds the rows from position 0, then
    those from position 1, and so on. `counts` may have another order, by groups. Raises ValueError unless `counts` has
    numbers for each position, `x` as many rows as are sent, and this rank receives from itself what it sends there.
    """
    sent_rows, received_rows, sent_groups, received_groups = counts
    numbers = len(sent_rows), len(received_rows), sum(sent_rows)
    if numbers != (axis.size, axis.size, x.shape[0]) or sent_rows[axis.rank] != received_rows[axis.rank]:
        raise ValueError(
            f"all_to_all of {x.shape[0]} rows over {axis.size} ranks was given counts {list(sent_rows)} and "
            f"{list(received_rows)}: one for each rank, as many rows sent as there are, and rank {axis.rank} of the "
            "axis receives from itself what it sends there"
        )
    for rows, groups in ((sent_rows, sent_groups), (received_rows, received_groups)):
        if groups is not None and list(map(sum, groups)) != list(rows):
            raise ValueError(f"all_to_all of {list(rows)} rows was given groups of {[list(each) for each in groups]}")
    kept_bytes = sent_rows[axis.rank] * x[:1].nbytes  # of the rows that stay on this rank
    position = _begin(axis, "all_to_all", x, x.nbytes - kept_bytes)
    if out is None:
        out = _result(x, sum(received_rows), axis)
    if sent_groups is None and received_groups is None:
        pending = axis.transport.all_to_all(x, out, sent_rows, received_rows)
    else:
        sent = [[rows] for rows in sent_rows] if sent_groups is None else sent_groups
        received = [[rows] for rows in received_rows] if received_groups is None else received_groups
        pending = cast(SortsGroups, axis.transport).all_to_all_by_group(x, out, sent, received)
    return out, pending.logged(axis.log, position, position)


def all_to_all(x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis) -> Tensor:
    """Do `all_to_all_async`, and wait for it. Returns the rows from all positions."""
    out, pending = all_to_all_async(x, ExchangedRows(sent_rows, received_rows), axis)
    pending.wait()
    return out


def reduce_scatter_async(x: Tensor, axis: Axis, out: Tensor | None = None) -> tuple[Tensor, Pending]:
    """Start summing `x` over `axis`. The result is this rank's slice of dimension 0. Read it after `wait`.

    It is written into the contiguous `out`, or into new memory. Raises ValueError if dimension 0 does not divide by the
    axis.
    """
    if x.shape[0] % axis.size:
        raise ValueError(
            f"reduce-scatter: dimension 0 of {tuple(x.shape)} does not divide by {axis.name} size {axis.size}"
        )
    position = _begin(axis, "reduce_scatter", x, x.nbytes * (axis.size - 1) // axis.size)
    if out is None:
        out = _result(x, x.shape[0] // axis.size, axis)
    return out, axis.transport.reduce_scatter(x, out).logged(axis.log, position, position)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum `x` over `axis` and return this rank's slice of dimension 0."""
    out, pending = reduce_scatter_async(x, axis)
    pending.wait()
    return out


def reduce_scatter_shard_async(flat: Tensor, axis: Axis) -> Pending:
    """Start summing the 1-D buffer `flat` over `axis` in place.

    After `wait` this rank's equal slice holds the sum. The rest of the buffer is undefined.
    """
    shard = flat.chunk(axis.size)[axis.rank]
    position = _begin(axis, "reduce_scatter", flat, flat.nbytes * (axis.size - 1) // axis.size)
    return axis.transport.reduce_scatter(flat, shard).logged(axis.log, position, position)


def reduce_scatter_shard_in_bf16_async(flat: Tensor, axis: Axis) -> Pending:
    """Do as `reduce_scatter_shard_async` with an fp32 buffer, but let ranks send each other bf16: half the bytes.

    Each rank rounds its whole part to bf16. The parts are summed in fp32, in rank order. So every rank would compute
    the same sum. The first half of the memory of `flat` holds the elements to send, the second half those received.
    """
    if axis.size == 1:
        return Pending()  # nothing is sent, so nothing is rounded
    position = _begin(axis, "reduce_scatter", flat, flat.nbytes // 2 * (axis.size - 1) // axis.size)
    outgoing, arriving = _round_in_place(flat)
    received = arriving.chunk(axis.size)
    slices = flat.chunk(axis.size)

    def add_up() -> None:
        total = slices[0]  # in the half that has been sent, so that it overwrites nothing that has arrived
        total.copy_(received[0])
        for part in received[1:]:
            total += part
        slices[axis.rank].copy_(total)

    # No transport's reduce-scatter: NCCL's would round every partial sum to bf16.
    rows = [len(part) for part in received]
    pending = axis.transport.all_to_all(outgoing, arriving, rows, rows)
    return pending.followed_by(add_up).logged(axis.log, position, position)


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
    shard = flat.chunk(axis.size)[axis.rank]
    position = _begin(axis, "all_gather", shard, shard.nbytes * (axis.size - 1))
    return axis.transport.all_gather(shard, flat).logged(axis.log, position, position)


def exchange(sends: Transfers, receives: Transfers, axis: Axis) -> Pending:
    """Start point-to-point transfers of (tensor, position on `axis`) pairs: `sends` out, `receives` into their tensors.

    Both ends of a link must name its transfers in the same order. Tensors must be contiguous, else ValueError is
    raised. They are kept alive until `wait`.
    """
    if not all(x.is_contiguous() for x, _ in [*sends, *receives]):
        raise ValueError("exchange needs contiguous tensors: they are sent and received in place")
    messages = [("send", x, peer) for x, peer in sends] + [("receive", x, peer) for x, peer in receives]
    if not messages:
        return Pending()
    if axis.transport.sends:
        for x, _ in sends:
            axis.traffic.record("send", x.nbytes)
    first = -1  # without a log
    last = -1
    if axis.log is not None:
        positions = []
        for operation, x, peer in messages:
            positions.append(axis.log.begin(operation, x.nbytes, x.dtype, peer, module=__file__, depth=3))
        first = positions[0]
        last = positions[-1]
    return axis.transport.exchange(sends, receives).logged(axis.log, first, last)


def held(axis: Axis) -> AbstractContextManager[None]:
    """A context in which the host waits for what its device computes from the newest operation of `axis`.

    The log notes it. Under NCCL only such waits tell which rank is missing: those for operations return at once.
    """
    return nullcontext() if axis.log is None else axis.log.held()


def to_host(x: Tensor, axis: Axis) -> Tensor:
    """`x`, the result of the newest operation of `axis`, in host memory."""
    with held(axis):
        return x.cpu()


def barrier(axis: Axis) -> None:
    """Wait until all ranks of `axis` have called this."""
    position = -1
    if axis.log is not None:
        position = axis.log.begin("barrier", 0, None, module=__file__, depth=3)
    axis.transport.barrier().logged(axis.log, position, position).wait()


def _posted() -> dist.Store:
    return part_of(dist.distributed_c10d._get_default_store(), StoreUser.POSTED)


def post(key: str, value: Any) -> None:
    """Store `value` (JSON types) under `key` in the world's store. Another rank finds it there by `collect`.

    This is no collective: any thread may call it. The value is compressed and cut into pieces, because TCPStore closes
    the connection at a value above 8 MiB.
    """
    packed = zlib.compress(json.dumps(value).encode(), 1)
    pieces = [packed[first : first + _PIECE] for first in range(0, len(packed), _PIECE)]
    with as_communication_errors():
        store = _posted()
        for number, piece in enumerate(pieces):
            store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # bytes are as good
        # Set last: a rank that finds this key finds all pieces.
        store.set(key, str(len(pieces)))


def collect(key: str) -> Any | None:
    """Remove and return the value posted under `key`, None if there is none yet. Any thread may call it."""
    with as_communication_errors():
        store = _posted()
        if not store.check([key]):
            return None
        keys = [f"{key}/{number}" for number in range(int(store.get(key)))]
        packed = b"".join(store.get(piece) for piece in keys)
        for done in (key, *keys):
            store.delete_key(done)
    return json.loads(zlib.decompress(packed))


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Every rank's `value` (JSON types) on every rank, in rank order. Nothing is pickled."""
    if axis.size == 1:
        return [value]
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    # all_gather needs equal shapes, so rows are padded to the longest one.
    lengths = to_host(all_gather(torch.tensor([payload.numel()], device=device), axis), axis).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    # One copy to the host for all rows: reading each row by itself would wait for the device once a row.
    rows = to_host(all_gather(padded.to(device), axis), axis).view(axis.size, -1).numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
