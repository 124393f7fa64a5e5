"""Compares what several ranks hold as copies: bit for bit, by hashes (guard.check_replicas_every).

Replicas hold the same parameters, tensor ranks the same norms and routers, two stages the same tied embedding, and
without ZeRO all replicas the same moments. A faulty GPU, or a gradient that was summed over some of the ranks only,
lets such copies drift apart without a change of the loss that anybody would see.

A copy is known by the name of its logical tensor and the box that a rank holds. Only its 64-bit hash is sent.
"""

import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import torch
from torch import Tensor

from megapar.base.errors import NumericError
from megapar.checkpoint.boxes import logical_boxes
from megapar.checkpoint.fixed import fixed_slices
from megapar.comm import collectives
from megapar.comm.rendezvous import in_runs
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import spec_of
from megapar.observe.observer import Observed, Observer
from megapar.step.state import TrainState

_CHUNK = 1 << 20  # words of 8 bytes that are hashed at a time: each takes 16 bytes more meanwhile
_MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's, odd as it must be


class Replicas(Observer):
    """Compares the copies after every step that guard.check_replicas_every divides."""

    def __init__(self, seen: Observed):
        self._state = seen.state

    def end_step(self, number: int) -> None:
        if number % self._state.config.guard.check_replicas_every == 0:
            check_replicas(self._state)


def check_replicas(state: TrainState) -> None:
    """Raise NumericError on every rank if two ranks hold unlike copies. A collective.

    The message names the first such tensor, its ranks and their hosts.
    """
    state.weights.wait()
    held = dict(_held(state))
    names = {_key(name): name for name in held}
    hashes = _hashes(held)
    mine = torch.tensor([[key, hashes[name]] for key, name in sorted(names.items())], dtype=torch.int64).view(-1, 2)
    unlike = _unlike(_gathered(mine, state.ctx))
    if not unlike:
        return
    # Now the names are worth sending.
    found = {names[key]: hashes[names[key]] for key in unlike if key in names}
    everywhere = collectives.gather_json([socket.gethostname(), found], state.ctx.world, state.ctx.device)
    raise NumericError(_message(state.step, everywhere))


def hash_of(x: Tensor) -> Tensor:
    """A hash of the bits of a 1-D tensor, 0-d int64 on its device. Tensors unlike in one element have unlike hashes."""
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    factors = _factors(min(_CHUNK, -(-x.nbytes // 8)), x.device)
    step = _CHUNK * 8 // x.element_size()
    for first in range(0, len(x), step):
        words = _words(x[first : first + step])
        # High bits are folded into low ones, because a product keeps little of a factor behind a high bit.
        words = words ^ ((words >> 32) & 0xFFFFFFFF)
        total = total * _MULTIPLIER + (words * factors[: len(words)]).sum()
    return total


def _words(x: Tensor) -> Tensor:
    """The bytes of a 1-D tensor as int64, with zeros behind them to fill the last one."""
    whole = x.nbytes // 8 * 8 // x.element_size()
    if whole == len(x) and x.data_ptr() % 8 == 0:
        return x.view(torch.int64)
    # The boxes of two ranks begin at other addresses, and must be cut into the same words.
    filled = torch.zeros(-(-x.nbytes // 8) * 8 // x.element_size(), dtype=x.dtype, device=x.device)
    filled[: len(x)] = x
    return filled.view(torch.int64)


def _factors(count: int, device: torch.device) -> Tensor:
    """An odd factor for each word: a difference in one word alone never vanishes modulo 2^64."""
    factors = torch.arange(count, device=device).mul_(2).add_(1).mul_(_MULTIPLIER)
    return factors.bitwise_xor_((factors >> 32) & ~1)


def _held(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield the flat boxes that this rank holds, by a name that is equal on all ranks with the same box."""
    seen: set[int] = set()
    # ZeRO-3 has no parameters between steps. Its shards are among the optimizer's slices.
    for stage in state.stages.values() if state.config.optimizer.zero_stage < 3 else ():
        for param in stage.parameters():
            if id(param) not in seen:
                seen.add(id(param))
                slices = StateSlice(param, spec_of(param), 0, param.numel(), {"weight": param.detach().view(-1)})
                yield from _boxes([slices])
    yield from _boxes(state.optimizer.slices())
    yield from _boxes(fixed_slices(state.stages.values(), parameters=False))


def _boxes(slices: Iterable[StateSlice]) -> Iterator[tuple[str, Tensor]]:
    for item in slices:
        for piece, box in logical_boxes(item.spec, item.start, item.stop):
            begin = box.position - item.start
            numel = torch.Size(box.size).numel()
            for state in item.tensors:
                values = item.values(state, begin, begin + numel)
                yield f"{state}.{piece.name} {list(box.offset)} {list(box.size)}", values


def _hashes(held: dict[str, Tensor]) -> dict[str, int]:
    if not held:
        return {}
    # One copy to the host for all of them.
    values = torch.stack([hash_of(x) for x in held.values()]).tolist()
    return dict(zip(held, values, strict=True))


def _key(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _gathered(local: Tensor, ctx: ParallelContext) -> Tensor:
    """All ranks' rows, int64 [rows, 2]. Ranks may have different numbers of them."""
    counts = collectives.gather_json(len(local), ctx.world, ctx.device)
    padded = torch.zeros(max(counts), 2, dtype=torch.int64)
    padded[: len(local)] = local
    gathered = collectives.all_gather(padded.to(ctx.device), ctx.world)
    rows = collectives.to_host(gathered, ctx.world).view(len(counts), -1, 2)
    return torch.cat([rows[rank, :count] for rank, count in enumerate(counts)])


def _unlike(rows: Tensor) -> list[int]:
    """The keys with two different hashes."""
    pairs = torch.unique(rows, dim=0)
    keys, counts = torch.unique(pairs[:, 0], return_counts=True)
    return [int(key) for key in keys[counts > 1]]


def _message(step: int, everywhere: list[tuple[str, dict[str, int]]]) -> str:
    name = min(name for _, found in everywhere for name in found)
    ranks = defaultdict(list)
    for rank, (_, found) in enumerate(everywhere):
        if name in found:
            ranks[found[name]].append(rank)
    most = max(ranks.values(), key=len)
    others = sorted(rank for same in ranks.values() if same is not most for rank in same)
    hosts = ", ".join(sorted({everywhere[rank][0] for rank in others}))
    number = Counter(name for _, found in everywhere for name in found)
    tensor, _, box = name.partition(" ")
    further = f" ({len(number) - 1} further boxes differ too)" if len(number) > 1 else ""
    return (
        f"step {step}: copies of {tensor} {box} are unlike{further}: {in_runs(others)} ({hosts}) against "
        f"{in_runs(most)}; a faulty device, or a sum over some of the ranks alone. Nothing is saved: go on from a "
        "checkpoint before the last check that passed"
    )
