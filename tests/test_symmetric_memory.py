"""Gathers and sums over tp by copies from the memory of other ranks (parallel.tp_symmetric_memory).

A CPU has no symmetric memory. `SharedFile` has its semantics among processes: each rank sees what the others have
written, and only barriers tell when.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.base.grid import Grid
from megapar.comm import collectives, rendezvous
from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.comm.transport_symmetric import SymmetricMemory
from megapar.declare import context
from megapar.declare.sharding import Sharding
from megapar.launch import rank_process
from megapar.launch.rank_process import _check_symmetric_memory
from tests.support.distributed import ON_GPUS, rank_device, run_ranks, shares_gpus
from tests.support.linear_layers import fractions, results, whole_numbers

POISON = 0xFF  # bytes of NaN in each dtype


@dataclass
class SharedFile:
    """`megapar.comm.transport_symmetric.PeerMemory` in files of a folder. It is poisoned until written."""

    nbytes: int
    folder: str
    generation: int
    barriers: bool = True

    def __post_init__(self) -> None:
        size = dist.get_world_size()
        self.files = [f"{self.folder}/{self.generation}_{rank}" for rank in range(size)]
        mine = torch.from_file(self.files[dist.get_rank()], shared=True, size=self.nbytes, dtype=torch.uint8)
        mine.fill_(POISON)
        dist.barrier()
        self.memory = [torch.from_file(file, shared=True, size=self.nbytes, dtype=torch.uint8) for file in self.files]

    def view(self, position: int, x: Tensor, row: int = 0) -> Tensor:
        start = row * x.shape[1:].numel() * x.itemsize
        return self.memory[position][start : start + x.nbytes].view(x.dtype).view(x.shape)

    def barrier(self) -> None:
        if self.barriers:
            dist.barrier()


class Late(SymmetricMemory):
    """Copies when somebody waits for them, as late as a stream may."""

    def _queued(self, copy: Callable[[], None], tensors: list[Tensor]) -> Pending:
        return Pending([], tensors).followed_by(copy)


def symmetric(axis: Axis, folder: str, kind: type[SymmetricMemory] = SymmetricMemory, barriers: bool = True) -> Axis:
    """`axis`, of all ranks, with symmetric memory in `folder`."""
    made: list[int] = []

    def make(nbytes: int) -> SharedFile:
        made.append(nbytes)
        return SharedFile(nbytes, folder, len(made), barriers)

    assert dist.group.WORLD is not None
    return replace(axis, transport=kind(dist.group.WORLD, axis.rank, axis.ranks, None, make))


def sharding_of(tp: Axis, dtype: torch.dtype, chunks: int) -> Sharding:
    return Sharding(tp, Axis("grad"), True, dtype, torch.device("cpu"), overlap_chunks=chunks)


def differences(size: int, folder: str, kind: type[SymmetricMemory]) -> list[str]:
    """Cases in which layers differ from those over gloo, or send another number of bytes."""
    tp = context.create(Grid(tp=size), use_shared_memory=False).tp
    wrong = []
    for chunks in (1, 2, 3):
        for rows, batch, draw, dtype in ((1, 1, whole_numbers, torch.float64), (7, 3, whole_numbers, torch.float64)):
            plain, copying = (sharding_of(axis, dtype, chunks) for axis in (tp, symmetric(tp, f"{folder}", kind)))
            before = dict(tp.traffic.sent)
            expected = results(plain, rows, batch, draw)
            between = dict(tp.traffic.sent)
            found = results(copying, rows, batch, draw)
            sent = {
                name: [between[name] - before.get(name, 0), n - between[name]] for name, n in tp.traffic.sent.items()
            }
            same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            if not same or any(a != b for a, b in sent.values()):
                wrong.append(f"{chunks=} {rows=} {batch=} {sent}")
    return wrong


@pytest.mark.parametrize("kind", [SymmetricMemory, Late], ids=["at once", "late"])
@pytest.mark.parametrize("size", [2, 3])
def test_layers_are_those_of_collectives(size: int, kind: type[SymmetricMemory], tmp_path: Path) -> None:
    """Outputs, gradients of inputs, weights and biases, exactly, and the bytes that are counted. Sizes grow."""
    for wrong in run_ranks(size, differences, size, str(tmp_path), kind):
        assert not wrong, "\n".join(wrong)


def differences_on_gpus(size: int) -> list[str]:
    """Cases in which layers on GPUs differ from those over NCCL."""
    device = rank_device(dist.get_rank())
    wrong = []
    for chunks in (1, 2, 3):
        found = []
        for symmetric_tp in (False, True):
            tp = context.create(Grid(tp=size), device=device, symmetric_tp=symmetric_tp).tp
            sharding = replace(sharding_of(tp, torch.float64, chunks), device=device)
            found.append([results(sharding, rows, 3, whole_numbers) for rows in (1, 64, 7)])
        pairs = [pair for plain, copied in zip(*found, strict=True) for pair in zip(plain, copied, strict=True)]
        if not all(torch.equal(a, b) for a, b in pairs):
            wrong.append(f"{chunks=}")
    return wrong


@pytest.mark.gpus
@pytest.mark.skipif(not ON_GPUS or shares_gpus(2), reason="needs two GPUs that read each other's memory")
def test_gpus_copy_what_nccl_sends() -> None:
    for wrong in run_ranks(2, differences_on_gpus, 2):
        assert not wrong, "\n".join(wrong)


def sums(size: int, folder: str) -> list[tuple[Tensor, Tensor]]:
    """Sums in bf16 with the fp64 sum of what was added, this rank's slices, twice in the same memory."""
    tp = symmetric(context.create(Grid(tp=size), use_shared_memory=False).tp, folder)
    found = []
    for seed in (1, 2):
        parts = [fractions(4 * size, 5, seed=10 * seed + rank).bfloat16() for rank in range(size)]
        out, pending = collectives.reduce_scatter_async(parts[tp.rank], tp)
        pending.wait()
        exact = torch.stack([part.double() for part in parts]).sum(dim=0).chunk(size)[tp.rank]
        found.append((out, exact))
    return found


def test_a_sum_in_bf16_is_rounded_once(tmp_path: Path) -> None:
    for rank in run_ranks(3, sums, 3, str(tmp_path)):
        for found, exact in rank:
            assert torch.equal(found, exact.float().bfloat16())


def gathered_without_barriers(size: int, folder: str) -> bool:
    tp = symmetric(context.create(Grid(tp=size), use_shared_memory=False).tp, folder, Late, barriers=False)
    x = torch.full((3, 2), float(tp.rank))
    out, pending = collectives.all_gather_async(x, tp)
    if tp.rank == 0:  # its copies run before the other rank has written
        pending.wait()
        dist.barrier()
    else:
        dist.barrier()
        pending.wait()
    return bool(out.isfinite().all())


def test_a_missing_barrier_is_seen(tmp_path: Path) -> None:
    """The poison of memory that a peer has not written yet arrives."""
    assert run_ranks(2, gathered_without_barriers, 2, str(tmp_path)) == [False, True]


def member(rank: int, host: str) -> rendezvous.RankInfo:
    return rendezvous.RankInfo(rank, host, "cuda:0")


@pytest.mark.parametrize(
    ("device", "hosts", "words"),
    [
        ("cpu", ["a", "a", "a", "a"], "this run is on CPUs; leave it at false"),
        ("cuda", ["a", "a", "a", "b"], "ranks 2, 3 of a tp group are on a, b"),
        ("cuda", ["a", "a", "b", "b"], ""),
    ],
)
def test_what_it_needs_is_checked_on_every_rank(device: str, hosts: list[str], words: str) -> None:
    members = [member(rank, host) for rank, host in enumerate(hosts)]
    found = ""
    try:
        _check_symmetric_memory(Grid(tp=2, dp=2), torch.device(device), members)
    except ConfigError as error:
        found = str(error)
    assert words in found
    assert bool(words) == bool(found)


def test_a_torch_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "offered_by_torch", lambda: False)
    with pytest.raises(ConfigError, match=r"torch \S+ has no symmetric memory here; leave it at false"):
        _check_symmetric_memory(Grid(tp=2), torch.device("cuda"), [member(0, "a"), member(1, "a")])
