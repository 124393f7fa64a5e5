"""Learning rates: golden values worked out by hand, and what holds for every schedule."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapar.config.options import OptimizerConfig
from megapar.optimizer.schedule import change_of_rate, learning_rate

BASE = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
QUARTER = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2  # a cosine a quarter of its way


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", {4: 1 - 0.45 * (1 - math.cos(math.pi / 8)), 5: QUARTER, 7: 0.55, 11: 0.1, 99: 0.1}),
        ("linear", {5: 0.775, 7: 0.55, 11: 0.1, 99: 0.1}),
        ("constant", {5: 1.0, 11: 1.0, 99: 1.0}),
        ("inverse_sqrt", {4: math.sqrt(4 / 5), 15: 0.5, 63: 0.25, 999: 0.1}),
        ("wsd", {4: 1.0, 10: 1.0, 11: 0.1, 99: 0.1}),
    ],
)
def test_golden_values(schedule: str, rates: dict[int, float]) -> None:
    """12 steps, 4 of them warm-up: steps 0 to 3 rise by a quarter each."""
    config = replace(BASE, schedule=schedule)  # type: ignore[arg-type]
    for step, rate in {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, **rates}.items():
        assert learning_rate(step, config, total_steps=12) == pytest.approx(rate, rel=1e-12), step


def test_wsd_decays_over_the_last_steps() -> None:
    config = replace(BASE, schedule="wsd", warmup_steps=2, decay_steps=4)
    rates = [learning_rate(step, config, 20) for step in (0, 1, 2, 15, 16, 17, 18, 19)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1])


def test_wsd_decays_over_a_tenth_of_the_run_by_default() -> None:
    config = replace(BASE, schedule="wsd")
    assert [learning_rate(step, config, 30) for step in (26, 27, 28, 29)] == pytest.approx([1.0, 0.7, 0.4, 0.1])


def test_wsd_decays_after_a_long_warm_up_only() -> None:
    """A tenth would be the last 4 steps, two of them warm-up."""
    config = replace(BASE, schedule="wsd", warmup_steps=38)
    assert [learning_rate(step, config, 40) for step in (37, 38, 39)] == pytest.approx([1.0, 0.55, 0.1])


def test_without_warm_up_inverse_sqrt_starts_at_the_peak() -> None:
    config = replace(BASE, schedule="inverse_sqrt", warmup_steps=0)
    assert learning_rate(0, config, 10) == 1.0
    assert learning_rate(3, config, 10) == 0.5


def test_the_length_of_the_decay_may_be_another_than_that_of_the_run() -> None:
    """A run of any length then has the rates of the planned one, and stays at min_lr after it."""
    for schedule in ("cosine", "linear"):
        config = replace(BASE, schedule=schedule)  # type: ignore[arg-type]
        planned = [learning_rate(step, config, 20) for step in range(30)]
        fixed = replace(config, decay_steps=16)
        for total in (6, 20, 30):
            assert [learning_rate(step, fixed, total) for step in range(30)] == planned
        assert planned[19:] == pytest.approx([0.1] * 11)


def test_a_longer_run_is_told_the_rate_that_it_had_and_the_one_that_it_goes_on_with() -> None:
    line = change_of_rate(12, BASE, BASE, 12, 16)
    assert line.startswith("the learning rate goes on at 0.232: step 12 had 0.1, and 0.1 would have come next; ")
    assert line.endswith("--optimizer.decay_steps 8 keeps the schedule of 12 steps")
    advised = replace(BASE, decay_steps=8)
    assert change_of_rate(12, BASE, advised, 12, 16) == ""
    lower = change_of_rate(6, BASE, replace(BASE, lr=0.5), 12, 12)
    assert lower == "the learning rate goes on at 0.377: step 6 had 0.868, and 0.722 would have come next"


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_schedules_that_do_not_know_the_end_go_on_without_a_word(schedule: str) -> None:
    config = replace(BASE, schedule=schedule)  # type: ignore[arg-type]
    assert change_of_rate(12, config, config, 12, 16) == ""


def test_a_run_may_be_all_warm_up() -> None:
    for schedule in ("cosine", "linear", "constant", "inverse_sqrt", "wsd"):
        config = replace(BASE, schedule=schedule)  # type: ignore[arg-type]
        assert learning_rate(3, config, 4) == 1.0


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "inverse_sqrt", "wsd"]),
    warmup=st.integers(0, 40),
    length=st.integers(1, 60),
    decay=st.integers(0, 60),
    low=st.floats(0.0, 1.0),
)
def test_rates_rise_in_the_warm_up_and_never_after_it(
    schedule: str, warmup: int, length: int, decay: int, low: float
) -> None:
    """And stay between min_lr and lr, and end at min_lr if the schedule says so."""
    total = warmup + length
    config = OptimizerConfig(
        lr=2.0,
        min_lr=2.0 * low,
        schedule=schedule,  # type: ignore[arg-type]
        warmup_steps=warmup,
        decay_steps=min(decay, length),
    )
    rates = [learning_rate(step, config, total) for step in range(total + 5)]
    rising, falling = rates[:warmup], rates[max(0, warmup - 1) :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 < rate <= 2.0 * (1 + 1e-12) for rate in rising)
    assert all(config.min_lr * (1 - 1e-12) <= rate <= 2.0 * (1 + 1e-12) for rate in falling)
    if warmup:
        assert rates[warmup - 1] == 2.0
    if schedule == "wsd" or (schedule in ("cosine", "linear") and not config.decay_steps):
        assert rates[total - 1] == pytest.approx(config.min_lr, abs=1e-12)
