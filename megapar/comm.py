"""Every collective and transfer of the project. No-op at size 1; counts calls and bytes; waits for each work once.

Each operation is written into the axis's flight log when it starts, when it is waited for and when it has ended
(megapar.flight), so that a rank that waits too long can tell for whom.

Bytes are what this rank sends with ring algorithms, for n ranks and a full tensor of B bytes: all-reduce 2 B (n-1)/n,
all-gather and reduce-scatter B (n-1)/n, point-to-point B.

Over gloo, whose own algorithms take up to eight times as long, ranks send each other their slices directly and add up
what arrives in the order of ranks: a sum then rounds alike wherever its element lies. So do all-reduces of little data,
each rank with all of it; large ones are gloo's.
"""

import json
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.context import Axis
from megapar.errors import CommunicationError
from megapar.flight import AxisLog

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_FOLDS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_PIECE = 4 << 20  # bytes of a value in the store; TCPStore takes 8 MiB at most
_SMALL = 1 << 20  # bytes that an all-reduce by direct exchange may receive
# torch 2.13 renames the two and warns on the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def _as_communication_errors(log: AxisLog | None = None) -> Iterator[None]:
    """Backends report a peer that is gone or too late as RuntimeError. `log` is that of the operation's axis."""
    try:
        yield
    except RuntimeError as error:
        reason = (
            f"another rank ended, or a transfer took longer than launch.timeout_seconds ({str(error).splitlines()[0]})"
        )
        raise CommunicationError(reason if log is None else log.fail(reason)) from error


class Pending:
    """Operations in flight and the tensors that they use; `wait` may be called again and then does nothing.

    A second wait on a gloo point-to-point work never returns, and a tensor freed or a work dropped in flight is a
    use-after-free or a lost message: so both are held here until the first `wait`, which raises CommunicationError if
    a peer is gone or too late.
    """

    def __init__(self, works: Sequence[dist.Work | None] = (), tensors: Sequence[Tensor] = ()):
        self._works = [work for work in works if work is not None]
        self._tensors = list(tensors)
        self._then: Callable[[], None] | None = None
        self._logged: tuple[AxisLog, int, int] | None = None  # first and last position of the operations in the log

    def wait(self) -> None:
        """Wait for the works, then run `then`, once."""
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
        """Itself, with `then` to run after the works, once."""
        self._then = then
        return self

    def logged(self, axis: Axis, first: int, last: int) -> "Pending":
        """Itself, as the operations from position `first` to `last` in the axis's log."""
        self._logged = None if axis.log is None else (axis.log, first, last)
        return self


def _is_gloo(axis: Axis) -> bool:
    return dist.get_backend(axis.group) == "gloo"


def _bytes(x: Tensor) -> int:
    return x.nbytes


def _begin(axis: Axis, operation: str, x: Tensor, sent_bytes: int) -> int:
    """Count and log a collective that is about to start; its position in the log."""
    axis.traffic.record(operation, sent_bytes)
    return -1 if axis.log is None else axis.log.begin(operation, x.nbytes, x.dtype, module=__file__, depth=4)


def _check(x: Tensor) -> None:
    """A raw collective has no gradient: inside a forward pass it must be wrapped (tensor_parallel.regions)."""
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a collective on a tensor that needs a gradient would lose it: use tensor_parallel.regions")


def _transfer(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis) -> Pending:
    """Start point-to-point transfers between positions on `axis`, uncounted."""
    operations = [dist.P2POp(dist.isend, x, axis.ranks[peer], axis.group) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, axis.ranks[peer], axis.group) for x, peer in receives]
    with _as_communication_errors(axis.log):
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

    def fold() -> None:
        parts = [arriving.get(position, result) for position in range(axis.size)]
        # The order of ranks begins with 0 and 1, and a + b equals b + a bit by bit: so ranks 0 and 1 may accumulate in
        # their own tensor, which saves a copy. The others accumulate in what rank 0 has sent.
        total = result if axis.rank < 2 else parts[0]
        for part in parts:
            if part is not total:
                _FOLDS[op](total, part, out=total)
        if total is not result:
            result.copy_(total)

    return _transfer(sends, receives, axis).followed_by(fold)


def _exchange_and_keep(slices: Sequence[Tensor], axis: Axis) -> Pending:
    """Start sending this rank's slice to all others and receiving theirs."""
    own = slices[axis.rank]
    return _transfer([(own, peer) for peer in _peers(axis)], [(slices[peer], peer) for peer in _peers(axis)], axis)


def connect(
    meeting: str, rank: int, world_size: int, *, serves_store: bool, attempt: int, timeout_seconds: float
) -> dist.Store:
    """The store at which the ranks of a job meet: `meeting` is "tcp://host:port" or "file://path".

    `serves_store`: this process opens the TCP store. Keys of another `attempt` (torchrun's restarts) are not seen.
    Raises CommunicationError that names address and rank.
    """
    address = urlsplit(meeting)
    timeout = timedelta(seconds=timeout_seconds)
    store: dist.Store
    try:
        if address.scheme == "file":
            store = dist.FileStore(address.path, world_size)
        else:
            assert address.hostname is not None
            assert address.port is not None
            socket.getaddrinfo(address.hostname, address.port)  # an unknown name fails here at once, not at the timeout
            store = dist.TCPStore(
                address.hostname,
                address.port,
                world_size,
                is_master=serves_store,
                timeout=timeout,
                wait_for_workers=False,  # `meet` waits, and can name who is missing
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise CommunicationError(_no_store(meeting, rank, serves_store, timeout_seconds, error)) from error
    store.set_timeout(timeout)
    return dist.PrefixStore(f"megapar/attempt_{attempt}", store)


def _no_store(meeting: str, rank: int, serves_store: bool, timeout_seconds: float, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if serves_store and "EADDRINUSE" in str(error):
        return (
            f"rank {rank} cannot open {meeting}: the port is in use, by another job or a second rank 0; "
            "choose another MASTER_PORT"
        )
    if serves_store:
        return f"rank {rank} cannot open {meeting} ({reason}): MASTER_ADDR must be this node's own name or address"
    return (
        f"rank {rank} did not reach rank 0 at {meeting} within {timeout_seconds:g} s ({reason}): check MASTER_ADDR and "
        "MASTER_PORT, that rank 0 was started, and that no firewall stands between"
    )


def initialize(
    backend: str,
    rank: int,
    world_size: int,
    *,
    store: dist.Store,
    timeout_seconds: float = 300.0,
    device: torch.device | None = None,
) -> None:
    """Join the world over `store`.

    With a GPU as `device`, NCCL connects the ranks here rather than in the first collective, and makes later groups by
    splitting this one. Raises CommunicationError if ranks do not reach each other.
    """
    gpu = device if device is not None and device.type == "cuda" else None
    with _as_communication_errors():
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("world", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=gpu,
        )


def initialize_fake(rank: int, world_size: int) -> None:
    """Pretend to be `rank` of any world: collectives do nothing. For dry runs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def shutdown() -> None:
    """Leave the world and free its groups, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce_async(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Start reducing contiguous `x` in place over `axis`."""
    if axis.size == 1:
        return Pending()
    _check(x)
    if not x.is_contiguous():
        raise ValueError("all_reduce_async needs a contiguous tensor: the result is written in place")
    if x.is_meta:
        return Pending()  # a plan: shapes are all there is
    place = _begin(axis, "all_reduce", x, 2 * _bytes(x) * (axis.size - 1) // axis.size)
    if _is_gloo(axis) and _bytes(x) * (axis.size - 1) <= _SMALL:
        return _exchange_and_fold([x] * axis.size, axis, op).logged(axis, place, place)
    work = dist.all_reduce(x, _OPS[op], group=axis.group, async_op=True)
    return Pending([work], [x]).logged(axis, place, place)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce `x` in place over `axis` and return it; `op` is sum, max or min. Strided tensors are reduced through a
    copy."""
    if axis.size == 1:
        return x
    _check(x)
    if not x.is_contiguous():
        return x.copy_(all_reduce(x.contiguous(), axis, op))
    all_reduce_async(x, axis, op).wait()
    return x


def all_gather_async(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Start concatenating every rank's `x` (equal shapes) along dimension 0; read the result after `wait`."""
    if axis.size == 1:
        return x, Pending()
    _check(x)
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    if x.is_meta:
        return out, Pending()
    place = _begin(axis, "all_gather", x, _bytes(x) * (axis.size - 1))
    if _is_gloo(axis):
        slices = out.chunk(axis.size)
        slices[axis.rank].copy_(x)
        return out, _exchange_and_keep(slices, axis).logged(axis, place, place)
    work = _all_gather_single(out, x, group=axis.group, async_op=True)
    return out, Pending([work], [out, x]).logged(axis, place, place)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate every rank's `x` (equal shapes) along dimension 0."""
    out, pending = all_gather_async(x, axis)
    pending.wait()
    return out


def all_to_all_async(
    x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis
) -> tuple[Tensor, Pending]:
    """Start sending the first `sent_rows[0]` rows of `x` to position 0 of `axis`, the next to position 1,
    and so on; the result holds the rows from position 0, then those from position 1, ..., to be read after `wait`.

    `received_rows[i]` is what position i sends here. Raises ValueError unless there is a count for each position and
    `x` has as many rows as it sends.
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
    place = _begin(axis, "all_to_all", x, _bytes(x) - _bytes(outgoing[axis.rank]))
    if not _is_gloo(axis):
        work = dist.all_to_all_single(out, x, list(received_rows), list(sent_rows), group=axis.group, async_op=True)
        return out, Pending([work], [out, x]).logged(axis, place, place)
    arriving = out.split(list(received_rows))
    arriving[axis.rank].copy_(outgoing[axis.rank])
    sends = [(outgoing[peer], peer) for peer in _peers(axis) if sent_rows[peer]]
    receives = [(arriving[peer], peer) for peer in _peers(axis) if received_rows[peer]]
    return out, _transfer(sends, receives, axis).logged(axis, place, place)


def all_to_all(x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis) -> Tensor:
    """`all_to_all_async`, waited for."""
    out, pending = all_to_all_async(x, sent_rows, received_rows, axis)
    pending.wait()
    return out


def reduce_scatter_async(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Start summing `x` over `axis`; this rank's slice of dimension 0 is the result, to be read after `wait`.

    Raises ValueError if dimension 0 does not divide by the axis.
    """
    if axis.size == 1:
        return x, Pending()
    _check(x)
    if x.shape[0] % axis.size:
        raise ValueError(
            f"reduce-scatter: dimension 0 of {tuple(x.shape)} does not divide by {axis.name} size {axis.size}"
        )
    x = x.contiguous()
    if x.is_meta:
        return x.new_empty((x.shape[0] // axis.size, *x.shape[1:])), Pending()
    place = _begin(axis, "reduce_scatter", x, _bytes(x) * (axis.size - 1) // axis.size)
    if _is_gloo(axis):
        slices = list(x.chunk(axis.size))
        slices[axis.rank] = slices[axis.rank].clone()
        return slices[axis.rank], _exchange_and_fold(slices, axis).logged(axis, place, place)
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    work = _reduce_scatter_single(out, x, group=axis.group, async_op=True)
    return out, Pending([work], [out, x]).logged(axis, place, place)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum `x` over `axis` and return this rank's slice of dimension 0."""
    out, pending = reduce_scatter_async(x, axis)
    pending.wait()
    return out


def reduce_scatter_shard_async(flat: Tensor, axis: Axis) -> Pending:
    """Start summing the 1-D buffer `flat` over `axis` in place: after `wait` this rank's equal slice holds the sum,
    the rest of the buffer is undefined."""
    if axis.size == 1:
        return Pending()
    place = _begin(axis, "reduce_scatter", flat, _bytes(flat) * (axis.size - 1) // axis.size)
    if _is_gloo(axis):
        return _exchange_and_fold(flat.chunk(axis.size), axis).logged(axis, place, place)
    shard = flat.chunk(axis.size)[axis.rank]
    work = _reduce_scatter_single(shard, flat, group=axis.group, async_op=True)
    return Pending([work], [flat]).logged(axis, place, place)


def all_gather_shard_async(flat: Tensor, axis: Axis) -> Pending:
    """Start filling the 1-D buffer `flat` with every rank's equal slice of it, in place."""
    if axis.size == 1:
        return Pending()
    shard = flat.chunk(axis.size)[axis.rank]
    place = _begin(axis, "all_gather", shard, _bytes(shard) * (axis.size - 1))
    if _is_gloo(axis):
        return _exchange_and_keep(flat.chunk(axis.size), axis).logged(axis, place, place)
    work = _all_gather_single(flat, shard, group=axis.group, async_op=True)
    return Pending([work], [flat]).logged(axis, place, place)


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis) -> Pending:
    """Start point-to-point transfers: (tensor, position on `axis`) pairs to send and to receive into.

    The two ends of a link must name its transfers in the same order. Tensors are contiguous and held until `wait`.
    """
    if not all(x.is_contiguous() for x, _ in [*sends, *receives]):
        raise ValueError("exchange needs contiguous tensors: they are sent and received in place")
    for x, _ in sends:
        axis.traffic.record("send", _bytes(x))
    if axis.log is None:
        return _transfer(sends, receives, axis)
    messages = [("send", x, peer) for x, peer in sends] + [("receive", x, peer) for x, peer in receives]
    places = []
    for operation, x, peer in messages:
        places.append(axis.log.begin(operation, x.nbytes, x.dtype, peer, module=__file__, depth=3))
    pending = _transfer(sends, receives, axis)
    return pending.logged(axis, places[0], places[-1]) if places else pending


def barrier(axis: Axis) -> None:
    """Wait until all ranks of `axis` have come here."""
    if axis.size > 1:
        place = -1 if axis.log is None else axis.log.begin("barrier", 0, None, module=__file__, depth=3)
        Pending([dist.barrier(group=axis.group, async_op=True)]).logged(axis, place, place).wait()


def post(key: str, value: Any) -> None:
    """Leave `value` (JSON types) in the world's store for another rank. No collective: any thread may call it.

    It travels compressed and in pieces: TCPStore closes the connection at a value above 8 MiB.
    """
    packed = zlib.compress(json.dumps(value).encode(), 1)
    pieces = [packed[first : first + _PIECE] for first in range(0, len(packed), _PIECE)]
    with _as_communication_errors():
        store = dist.distributed_c10d._get_default_store()
        for number, piece in enumerate(pieces):
            store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # bytes are as good
        store.set(key, str(len(pieces)))  # last: whoever finds it finds all pieces


def collect(key: str) -> Any | None:
    """Pop the value that a rank has posted under `key`; None if nothing has been posted yet. Any thread may call it."""
    with _as_communication_errors():
        store = dist.distributed_c10d._get_default_store()
        if not store.check([key]):
            return None
        keys = [f"{key}/{number}" for number in range(int(store.get(key)))]
        packed = b"".join(store.get(piece) for piece in keys)
        for done in (key, *keys):
            store.delete_key(done)
    return json.loads(zlib.decompress(packed))


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Every rank's `value` (JSON types), in rank order, on every rank. Nothing is pickled."""
    if axis.size == 1:
        return [value]
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = all_gather(torch.tensor([payload.numel()], device=device), axis).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    # One copy to the host for all ranks: a read of each row would wait for the device as often.
    rows = all_gather(padded.to(device), axis).cpu().view(axis.size, -1).numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
