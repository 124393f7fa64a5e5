"""Stochastic rounding to bf16 with the bits of logical elements, main weights in two halves, and AdamW on both."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from megapar_kernels.adamw import Decayed, adamw_step
from megapar_kernels.rounding import TILE, RandomBits, Rows, join, round_randomly, split
from torch import Tensor

from tests.support.adamw import HYPER, RUNS, gradients, numbers
from tests.support.kernel_checks import DEVICE, Guarded, needs_triton, poisoned
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

KINDS = [(moments, halves) for moments in (False, True) for halves in (False, True)][1:]


# Zeros and subnormal numbers, the smallest, those about 1, the largest, infinities; all of them in the slow lane.
EXPONENTS = [
    pytest.param((0, 1, 2, 126, 127, 128, 253, 254, 255), id="few exponents"),
    pytest.param(range(256), id="all exponents", marks=pytest.mark.slow),
]


def special(exponents: Iterable[int]) -> Tensor:
    """Of these exponents and both signs: every lower half beside upper halves with an even and an odd end."""
    low = torch.arange(1 << 16, dtype=torch.int64)
    uppers = [sign << 15 | exponent << 7 | last for sign in (0, 1) for exponent in exponents for last in (0, 1, 127)]
    bits = torch.tensor(uppers)[:, None] * 65536 + low
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("exponents", EXPONENTS)
def test_halves_make_up_every_number_bit_by_bit(exponents: Iterable[int]) -> None:
    """Zeros, subnormal numbers, infinities, halfway between two bf16 numbers, and carries into the exponent."""
    for x in special(exponents).split(64):
        high, remainder = split(x)
        again = join(high, remainder)
        numbers = ~x.isnan()
        assert torch.equal(again.view(torch.int32)[numbers], x.view(torch.int32)[numbers])
        assert again[~numbers].isnan().all()
        assert high[~numbers].isnan().all()
        halfway = (x.view(torch.int32) & 0xFFFF) == 0x8000
        nearest = x.to(torch.bfloat16)
        assert torch.equal(high.view(torch.int16)[numbers & ~halfway], nearest.view(torch.int16)[numbers & ~halfway])
        away = (x.view(torch.int32) >> 16) + 1
        assert torch.equal(high.view(torch.int16)[numbers & halfway], away.to(torch.int16)[numbers & halfway])


@pytest.mark.parametrize("exponents", EXPONENTS)
def test_random_rounding_takes_a_neighbor_and_leaves_bf16_numbers(exponents: Iterable[int]) -> None:
    for seed, x in enumerate(special(exponents).split(64)):
        bits = torch.randint(0, 1 << 32, x.shape, generator=torch.Generator().manual_seed(seed))
        rounded = round_randomly(x, bits)
        assert torch.equal(rounded.isnan(), x.isnan())
        exact = x.view(torch.int32)
        steps = rounded.view(torch.int16).int() - (exact >> 16).to(torch.int16)
        numbers = ~x.isnan()
        assert ((steps == 0) | (steps == 1))[numbers].all()
        assert (steps[numbers & (exact & 0xFFFF == 0)] == 0).all()
        assert (rounded.signbit() == x.signbit())[numbers].all()


def flat_rows(elements: int, **changed: int) -> list[Rows]:
    return [
        Rows(**{"start": 0, "stop": elements, "first": 0, "width": elements, "pitch": elements, "key": 7, **changed})
    ]


@pytest.mark.parametrize("of", ["elements", "updates", "tensors"])
def test_the_mean_of_many_roundings_is_the_number(of: str) -> None:
    draws = 1 << 16
    if of == "elements":
        bits = RandomBits.of(flat_rows(draws), draws, DEVICE).draw(0, draws, 3)
    elif of == "updates":
        table = RandomBits.of(flat_rows(1), 1, DEVICE)
        bits = torch.cat([table.draw(0, 1, update) for update in range(4096)])
    else:
        bits = torch.cat([RandomBits.of(flat_rows(1, key=k * 977), 1, DEVICE).draw(0, 1, 1) for k in range(4096)])
    for shift, share in itertools.product((0, 16), (0.0, 0.001, 0.3, 0.5, 0.97)):
        x = torch.full((len(bits),), 1 + share * 2**-7, device=DEVICE)
        up = (round_randomly(x, bits >> shift).float() - 1).mean() * 2**7
        deviation = math.sqrt(share * (1 - share) / len(bits))
        assert abs(up - share) <= 4 * deviation + 2**-16, (shift, share)


def test_bits_of_updates_elements_and_moments_are_independent() -> None:
    """Correlations of numbers from 0 to 1; so many draws have deviations of 0.004."""
    count = 1 << 16
    table = RandomBits.of(flat_rows(count + 1), count + 1, DEVICE)
    first, second = table.draw(0, count + 1, 1), table.draw(0, count + 1, 2)
    other = RandomBits.of(flat_rows(count + 1, key=8), count + 1, DEVICE).draw(0, count + 1, 1)
    lower, upper = (first & 0xFFFF).double(), (first >> 16).double()
    pairs = {
        "moments": (lower, upper),
        "updates": (lower, (second & 0xFFFF).double()),
        "tensors": (upper, (other >> 16).double()),
        "neighbors": (lower[1:], lower[:-1]),
    }
    for name, pair in pairs.items():
        assert abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 0.02, name
    assert len(set(first.tolist())) == count + 1


class Narrow:
    """A shard with 16-bit state between guards. Rows of several widths are among its elements, and padding."""

    def __init__(self, elements: int, moments: bool, halves: bool, rows: list[Rows] | None = None):
        weights = numbers(elements, 1).float().to(DEVICE)
        dtype = torch.bfloat16 if moments else torch.float32
        self.guards = [Guarded(torch.zeros(elements, dtype=dtype, device=DEVICE)) for _ in range(2)]
        self.exp_avg, self.exp_avg_sq = (guard.tensor for guard in self.guards)
        self.remainder = self.params = None
        if halves:
            high, remainder = split(weights)
            self.guards.append(Guarded(high))
            self.main = self.guards[-1].tensor
            self.remainder = remainder
        else:
            self.guards += [Guarded(weights), Guarded(weights.bfloat16())]
            self.main, self.params = (guard.tensor for guard in self.guards[2:])
        self.bits = RandomBits.of(rows or rows_of(elements), elements, DEVICE) if moments else None

    def step(self, grad: Tensor, number: int, impl: Any, **changed: Any) -> None:
        with poisoned():
            adamw_step(
                *(self.main, grad.to(DEVICE), self.exp_avg, self.exp_avg_sq, self.params),
                **{"step": number, "impl": impl, "remainder": self.remainder, "bits": self.bits, **HYPER, **changed},
            )
        for guard in self.guards:
            guard.check()

    @property
    def weights(self) -> Tensor:
        return self.main if self.remainder is None else join(self.main, self.remainder)

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.main, self.remainder, self.exp_avg, self.exp_avg_sq, self.params) if x is not None]


def rows_of(elements: int) -> list[Rows]:
    """One tensor begins before the shard, short and long rows, rows as wide as they are apart, some padding."""
    wanted = [
        Rows(-5, 40, 2**33 + 1, 7, 31, 1),
        Rows(40, 41, 0, 1, 1, 2**32 - 1),
        Rows(64, 1500, 17, 129, 1000, 3),
        Rows(1500, 2900, 5, 1400, 1400, 4),
        Rows(2944, 4097, 2**40, TILE, TILE + 1, 5),
    ]
    return [row._replace(stop=min(row.stop, elements)) for row in wanted if row.start < elements]


def drawn_one_by_one(rows: list[Rows], elements: int, update: int) -> Tensor:
    """The bits of each element by itself, as rows of one element."""
    bits = torch.zeros(elements, dtype=torch.int64)
    for row in rows:
        for i in range(max(row.start, 0), row.stop):
            line, column = divmod(i - row.start, row.width)
            alone = Rows(0, 1, row.first + line * row.pitch + column, 1, 1, row.key)
            bits[i] = RandomBits.of([alone], 1, torch.device("cpu")).draw(0, 1, update)[0]
    return bits


def test_an_elements_bits_follow_from_its_place_in_the_logical_tensor() -> None:
    elements = 1600
    table = RandomBits.of(rows_of(elements), elements, DEVICE)
    expected = drawn_one_by_one(rows_of(elements), elements, 9)
    assert torch.equal(table.draw(0, elements, 9).cpu(), expected)
    assert torch.equal(table.draw(33, 1511, 9).cpu(), expected[33:1511])


@pytest.mark.parametrize("elements", slow_but([0, 3, 5, 6], [1, 7, 64, 129, 1024, 1025, 4097]))
@pytest.mark.parametrize(("moments", "halves"), KINDS)
def test_the_kernel_makes_the_bits_of_torchs_ops(elements: int, moments: bool, halves: bool) -> None:
    """Random bits are equal. Sums differ in the last place, and a rounding may then go another way: of few elements."""
    ours, theirs = Narrow(elements, moments, halves), Narrow(elements, moments, halves)
    for number, grad in enumerate(gradients(elements, 3), 1):
        ours.step(grad.clone(), number, "triton")
        theirs.step(grad.clone(), number, "torch")
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=3e-6, atol=3e-7 if not moments else 3e-5)
    for mine, other in ((ours.exp_avg, theirs.exp_avg), (ours.exp_avg_sq, theirs.exp_avg_sq)):
        if not moments:
            torch.testing.assert_close(mine, other, rtol=2e-6, atol=0)
            continue
        far = mine.view(torch.int16).int() - other.view(torch.int16).int()
        assert far.abs().max() <= 1
        assert (far != 0).float().mean() < 0.01
    if halves:
        assert torch.equal(ours.main, split(ours.weights)[0])


def test_the_kernel_rounds_with_the_drawn_bits() -> None:
    """Moments that one update sets exactly: (1 - beta) grad in both. An update shows one bit of each draw."""
    elements = 4097
    grad = numbers(elements, 3).float()
    betas = (0.5, 0.5)
    for update in (*range(1, 9), 2**20):
        shard = Narrow(elements, True, False)
        shard.step(grad.clone(), update, "triton", betas=betas)
        bits = RandomBits.of(rows_of(elements), elements, DEVICE).draw(0, elements, update)
        assert torch.equal(shard.exp_avg, round_randomly(0.5 * grad.to(DEVICE), bits))
        assert torch.equal(shard.exp_avg_sq, round_randomly((0.5 * grad * grad).to(DEVICE), bits >> 16))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_an_update_by_nothing_changes_no_bit(impl: Any) -> None:
    """Of finite weights of all exponents, halfway between two bf16 numbers and beside that."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = torch.arange(-(1 << 15), 1 << 15, 61)[:, None] * 65536 + low
    weights = bits.to(torch.int32).view(torch.float32).flatten()
    weights = weights[(weights.abs() < 1e38) & (weights != 0)].to(DEVICE)
    shard = Narrow(len(weights), False, True)
    high, remainder = split(weights)
    shard.main.copy_(high)
    shard.remainder.copy_(remainder)
    shard.step(torch.zeros(len(weights)), 1, impl, lr=0.0, weight_decay=0.0)
    assert torch.equal(shard.main.view(torch.int16), high.view(torch.int16))
    assert torch.equal(shard.remainder, remainder)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_main_weights_in_halves_are_those_in_fp32(impl: Any) -> None:
    """Bit by bit over five updates, with weight decay of some runs."""
    decayed = Decayed.of(RUNS, 4097, DEVICE)
    halves, whole = Narrow(4097, False, True), Narrow(4097, False, False)
    for number, grad in enumerate(gradients(4097, 5), 1):
        halves.step(grad.clone(), number, impl, decayed=decayed)
        whole.step(grad.clone(), number, impl, decayed=decayed)
        assert torch.equal(halves.weights, whole.main)
        assert torch.equal(halves.exp_avg_sq, whole.exp_avg_sq)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("moments", "halves"), KINDS)
def test_a_found_infinity_forbids_the_update_and_nan_is_seen(moments: bool, halves: bool, impl: Any) -> None:
    shard = Narrow(129, moments, halves, flat_rows(129))
    shard.step(gradients(129, 1)[0], 1, impl)
    before = [x.clone() for x in shard.tensors()]
    shard.step(torch.full((129,), math.inf), 2, impl, found_inf=torch.tensor(1.0, device=DEVICE))
    assert all(torch.equal(x, y) for x, y in zip(shard.tensors(), before, strict=True))
    shard.step(torch.full((129,), math.nan), 2, impl)
    assert all(x.isnan().all() for x in (shard.main, shard.weights, shard.exp_avg, shard.exp_avg_sq))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_padding_stays_zero_and_second_moments_never_fall_below(impl: Any) -> None:
    shard = Narrow(129, True, True, flat_rows(100))
    for x in (shard.main, shard.remainder):
        x[100:] = 0
    for number in range(1, 30):
        grad = numbers(129, number).float() * 1e-20
        grad[100:] = 0
        shard.step(grad, number, impl)
    assert all(not x[100:].view(torch.int16).any() for x in shard.tensors())
    assert (shard.exp_avg_sq >= 0).all()


def test_updates_too_small_for_bf16_are_not_lost() -> None:
    """beta2 0.999 moves a second moment by a thousandth of what is missing: less than bf16's half step of 2^-9."""
    elements = 1 << 14
    shard = Narrow(elements, True, False, flat_rows(elements))
    shard.exp_avg_sq.fill_(1.0)
    exact = 1.0
    for number in range(1, 101):
        shard.step(torch.zeros(elements), number, "torch", betas=(0.9, 0.999), lr=0.0)
        exact *= 0.999
    assert shard.exp_avg_sq.double().mean().item() == pytest.approx(exact, rel=1e-3)
    assert torch.tensor(1.0).bfloat16() * 0.999 == 1.0, "rounded to nearest it would never fall"


def test_what_a_slice_becomes_does_not_depend_on_where_the_buffer_is_cut() -> None:
    elements = 4097
    (grad,) = gradients(elements, 1)
    for impl in ("torch", "triton"):
        whole, cut = Narrow(elements, True, True), Narrow(elements, True, True)
        whole.step(grad.clone(), 1, impl)
        for start, stop in ((0, 192), (192, 2048), (2048, 4097)):
            rows = [
                row._replace(start=row.start - start, stop=min(row.stop, stop) - start) for row in rows_of(elements)
            ]
            bits = RandomBits.of(
                [row for row in rows if row.start < stop - start and row.stop > 0], stop - start, DEVICE
            )
            main, remainder, exp_avg, exp_avg_sq = (x[start:stop] for x in cut.tensors())
            adamw_step(
                *(main, grad[start:stop].to(DEVICE), exp_avg, exp_avg_sq, None),
                **HYPER, step=1, remainder=remainder, bits=bits, impl=impl,
            )  # fmt: skip
        assert all(torch.equal(x, y) for x, y in zip(whole.tensors(), cut.tensors(), strict=True))


def test_apex_and_other_dtypes_are_refused() -> None:
    shard = Narrow(64, True, False, flat_rows(64))
    with pytest.raises(ValueError, match="apex's AdamW has no 16-bit moments"):
        shard.step(torch.zeros(64), 1, "apex")
    with pytest.raises(ValueError, match="need contiguous fp32 of one shape"):
        shard.step(torch.zeros(64), 1, "torch", bits=None)
    with pytest.raises(ValueError, match=r"need contiguous .*bfloat16"):
        Narrow(64, False, False).step(torch.zeros(64), 1, "torch", bits=shard.bits)
