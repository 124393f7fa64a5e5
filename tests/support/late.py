"""Transports with CUDA's semantics, on CPUs: what is received is NaN until somebody waits, and what is sent must not
change before. A collective of NCCL returns at once, and its results may come as late as the wait lets them."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megapar.comm.pending import Pending
from megapar.comm.transport import Transfers, Transport
from megapar.comm.transports import Transports
from megapar.system import device


def poison(x: Tensor) -> None:
    x.data.fill_(math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)


def same_bytes(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))


class LateWork:
    """An operation whose results are put in their places by the wait for it, unless the wait `is_missing`.

    `untouched` must neither be written nor released before. `arrived` has the result of each place.
    """

    def __init__(self, real: Pending, untouched: Sequence[Tensor], arrived: Sequence[tuple[Tensor, Tensor]]):
        self._real = real
        self._untouched = [(x.detach(), x.detach().clone()) for x in untouched]
        self._arrived = arrived
        self.is_missing = False

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._real.wait()
        for x, before in self._untouched:
            assert x.untyped_storage().nbytes() or not x.nbytes, "memory is released while it travels"
            assert same_bytes(x, before), "memory is written while it travels"
        if not self.is_missing:
            for place, result in self._arrived:
                place.data.copy_(result)


def _late(real: Pending, untouched: Sequence[Tensor], arrived: Sequence[tuple[Tensor, Tensor]]) -> Pending:
    return Pending([LateWork(real, untouched, arrived)], [*untouched, *(place for place, _ in arrived)])


class LateTransport:
    """Does what the transport `real` does, by copies. So its order of operations stays as it is."""

    sends = True
    sorts_groups = False  # as over NCCL

    def __init__(self, real: Transport):
        self.real = real
        self.name = real.name

    def all_reduce(self, x: Tensor, op: str) -> Pending:
        result = x.detach().clone()
        real = self.real.all_reduce(result, op)
        poison(x)
        return _late(real, [x], [(x, result)])

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        sent, result = x.detach().clone(), torch.empty_like(out)
        real = self.real.all_gather(sent, result)
        poison(out)
        x.data.copy_(sent)  # it may be a slice of `out`
        return _late(real, [x], [(out, result)])

    def all_gather_slices(self, x: Tensor, slices: Sequence[Tensor]) -> Pending:
        sent, results = x.detach().clone(), [torch.empty_like(part) for part in slices]
        real = self.real.all_gather_slices(sent, results)
        for part in slices:
            poison(part)
        x.data.copy_(sent)
        return _late(real, [x], list(zip(slices, results, strict=True)))

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        sent, result = x.detach().clone(), torch.empty_like(out)
        real = self.real.reduce_scatter(sent, result)
        if x.untyped_storage()._cdata == out.untyped_storage()._cdata:
            poison(x)  # it becomes undefined
        poison(out)
        return _late(real, [x], [(out, result)])

    def all_to_all(self, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        result = torch.empty_like(out)
        real = self.real.all_to_all(x.detach().clone(), result, sent_rows, received_rows)
        poison(out)
        return _late(real, [x], [(out, result)])

    def exchange(self, sends: Transfers, receives: Transfers) -> Pending:
        results = [torch.empty_like(x) for x, _ in receives]
        arriving = [(result, peer) for result, (_, peer) in zip(results, receives, strict=True)]
        real = self.real.exchange([(x.detach().clone(), peer) for x, peer in sends], arriving)
        for x, _ in receives:
            poison(x)
        places = [x for x, _ in receives]
        return _late(real, [x for x, _ in sends], list(zip(places, results, strict=True)))

    def barrier(self) -> Pending:
        return self.real.barrier()


class LateCopy(device.HostCopy):
    """A copy for the host with absurd numbers, until somebody waits for it."""

    def __init__(self, tensor: Tensor):
        super().__init__(tensor.clone())
        self._numbers = self._copy.clone()
        poison(self._copy)

    def wait(self) -> Tensor:
        self._copy.copy_(self._numbers)
        return super().wait()


def arrive_late(patch: pytest.MonkeyPatch) -> None:
    """Contexts made from now on have late transports, and copies for the host are late."""
    of = Transports.of

    def late(self: Transports, *args: Any) -> Transport:
        return LateTransport(of(self, *args))

    patch.setattr(Transports, "of", late)
    patch.setattr(device, "HostCopy", LateCopy)


def without_the_wait(function: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A plant: the waits within `function` (its qualified name) are missing, and what follows reads too early."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        wait = Pending.wait

        def forgetful(self: Pending) -> None:
            if sys._getframe(1).f_code.co_qualname == function:
                for work in self._works:
                    if isinstance(work, LateWork):
                        work.is_missing = True
            wait(self)

        patch.setattr(Pending, "wait", forgetful)

    plant.__name__ = function
    return plant
