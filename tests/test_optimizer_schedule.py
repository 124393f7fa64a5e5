"""Learning rates: golden values worked out by hand, and what holds for every schedule."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megapar_models.registry import validate

from megapar.base.errors import ConfigError
from megapar.config.files import to_toml
from megapar.config.lengths import lengths_in_steps
from megapar.config.options import Config, Length, OptimizerConfig, TrainConfig
from megapar.optimizer.schedule import change_of_rate
from megapar.optimizer.schedule import learning_rate as rate_of_run
from tests.support import program
from tests.support.options import load

BASE = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4)


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The rate of a run of `total_steps` whose lengths are in steps: its samples do not count."""
    return rate_of_run(step, 10**9, config, TrainConfig(steps=total_steps))


def run_of(config: OptimizerConfig, steps: int) -> Config:
    return Config(optimizer=config, train=TrainConfig(steps=steps))


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
    line = change_of_rate(12, 0, run_of(BASE, 12), run_of(BASE, 16))
    assert line.startswith("the learning rate goes on at 0.232: step 12 had 0.1, and 0.1 would have come next; ")
    assert line.endswith("--optimizer.decay_steps 8 keeps the schedule of 12 steps")
    advised = replace(BASE, decay_steps=8)
    assert change_of_rate(12, 0, run_of(BASE, 12), run_of(advised, 16)) == ""
    lower = change_of_rate(6, 0, run_of(BASE, 12), run_of(replace(BASE, lr=0.5), 12))
    assert lower == "the learning rate goes on at 0.377: step 6 had 0.868, and 0.722 would have come next"


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_schedules_that_do_not_know_the_end_go_on_without_a_word(schedule: str) -> None:
    config = replace(BASE, schedule=schedule)  # type: ignore[arg-type]
    assert change_of_rate(12, 0, run_of(config, 12), run_of(config, 16)) == ""


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
        schedule=schedule,
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


# Lengths in samples and tokens


def at_step(number: int, config: OptimizerConfig, train: TrainConfig) -> float:
    """The rate of step `number` in an undisturbed run."""
    return rate_of_run(number, samples_before(number, train), config, train)


def samples_before(number: int, train: TrainConfig) -> int:
    consumed = 0
    for _ in range(number):
        consumed += train.batch_size(consumed)
    return consumed


RAMP = TrainConfig(steps=332, global_batch_size=64, batch_ramp=(8, 8, 4000), seq_length=32)
IN_SAMPLES = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps="2000 samples", decay_steps="10000 samples")


def megatrons(samples: int) -> float:
    """NVIDIA Megatron-LM's rate of the step before which so many samples were consumed, written from its source."""
    if samples <= 2000:
        return 1e-3 * samples / 2000
    if samples > 12_000:
        return 1e-4
    return 1e-4 + 9e-4 * 0.5 * (math.cos(math.pi * (samples - 2000) / 10_000) + 1)


def test_lengths_in_samples_follow_the_samples_of_a_growing_batch() -> None:
    """The first steps of a ramp are small, so they warm up less than by number. Fault rates-of-a-growing-batch."""
    assert samples_before(72, RAMP) == 576
    for number in range(RAMP.steps):
        rate = at_step(number, IN_SAMPLES, RAMP)
        assert rate == pytest.approx(megatrons(samples_before(number, RAMP)), rel=1e-12), number
    assert 2.84e-4 <= at_step(71, IN_SAMPLES, RAMP) <= at_step(72, IN_SAMPLES, RAMP) <= 2.881e-4
    in_tokens = replace(IN_SAMPLES, warmup_steps="6.4e4 tokens", decay_steps="320_000tokens")
    assert [at_step(n, in_tokens, RAMP) for n in (0, 9, 72, 300)] == [
        at_step(n, IN_SAMPLES, RAMP) for n in (0, 9, 72, 300)
    ]


def test_without_an_own_length_the_decay_in_samples_ends_with_the_run() -> None:
    for schedule, length in (("cosine", 0), ("linear", 0), ("wsd", "640 samples"), ("wsd", 0)):
        config = replace(IN_SAMPLES, schedule=schedule, decay_steps=length)  # type: ignore[arg-type]
        end = samples_before(RAMP.steps, RAMP)
        assert RAMP.samples() == end
        assert rate_of_run(RAMP.steps, end, config, RAMP) == 1e-4
        assert at_step(RAMP.steps - 1, config, RAMP) > 1e-4
    held = replace(IN_SAMPLES, schedule="wsd", decay_steps="640 samples")
    assert rate_of_run(RAMP.steps - 10, end - 640, held, RAMP) == 1e-3
    assert rate_of_run(RAMP.steps - 5, end - 320, held, RAMP) == pytest.approx(5.5e-4)


def test_a_dry_run_says_at_which_steps_lengths_in_samples_end() -> None:
    assert lengths_in_steps(BASE, RAMP) == ""
    said = lengths_in_steps(IN_SAMPLES, RAMP)
    warm, decayed = (int(word) for word in re.findall(r"step (\d+)", said))
    assert samples_before(warm - 1, RAMP) < 2000 <= samples_before(warm, RAMP)
    assert samples_before(decayed - 1, RAMP) < 12_000 <= samples_before(decayed, RAMP)
    held = lengths_in_steps(replace(IN_SAMPLES, schedule="wsd", decay_steps="640 samples"), RAMP)
    assert held.endswith(f"decays after step {RAMP.steps - 10}")


def test_a_run_resumed_in_another_batch_goes_on_at_the_rate_of_its_samples() -> None:
    config = replace(IN_SAMPLES, decay_steps=0)
    before = TrainConfig(steps=100, global_batch_size=64)
    after = replace(before, global_batch_size=128, steps=80)  # after step 60, 20 steps of 128 in place of 40 of 64
    assert rate_of_run(60, 3840, config, after) == rate_of_run(60, 3840, config, before)
    assert rate_of_run(70, 3840 + 10 * 128, config, after) == rate_of_run(80, 80 * 64, config, before)
    assert change_of_rate(60, 3840, Config(optimizer=config, train=before), Config(optimizer=config, train=after)) == ""
    longer = replace(before, steps=120)
    line = change_of_rate(60, 3840, Config(optimizer=config, train=before), Config(optimizer=config, train=longer))
    assert line.endswith("would have come next; --optimizer.decay_steps '4400 samples' keeps the schedule of 100 steps")
    kept = Config(optimizer=replace(config, decay_steps="4400 samples"), train=longer)
    assert change_of_rate(60, 3840, Config(optimizer=config, train=before), kept) == ""


@pytest.mark.parametrize(
    ("warmup", "decay", "said"),
    [
        ("2000 sample", 0, "optimizer.warmup_steps=2000 sample: expected a number of steps, or a text such as "),
        (0, "1e999 tokens", "optimizer.decay_steps=1e999 tokens: expected a number of steps, or a text such as "),
        (5, "9 samples", "optimizer.warmup_steps=5, optimizer.decay_steps=9 samples: one counts steps and the other "),
        ("9e4 samples", 0, "optimizer.warmup_steps=9e4 samples, train.steps=100: the warm-up would not end within "
         "the run; use at most '800 samples'"),
    ],
)  # fmt: skip
def test_a_length_that_cannot_be_read_or_does_not_fit_is_refused(warmup: Length, decay: Length, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(Config(optimizer=OptimizerConfig(warmup_steps=warmup, decay_steps=decay)), 1)
    assert str(refused.value).startswith(said)


def test_a_length_in_samples_is_written_and_read_again(tmp_path: Path) -> None:
    resolved = load(["--optimizer.warmup_steps", "2000 samples", "--optimizer.decay_steps", "3e9 tokens"])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(resolved))
    assert load(["--config", str(file)]).config == resolved.config
    assert 'warmup_steps = "2000 samples"' in file.read_text()


# A schedule outside of the tree


def test_a_schedule_of_ones_own_decides_the_rate_of_a_run_and_of_its_resumption(tmp_path: Path) -> None:
    own = ("--optimizer.schedule", "tests.toy_rates:WARM_RESTARTS", "--optimizer.warmup_steps", "2")
    own = (*own, "--optimizer.lr", "0.01", "--optimizer.min_lr", "0.001", "--train.steps", "12")
    for steps in ("5", "12"):
        ended = program.run(*own[:-1], steps, cwd=tmp_path)
        assert ended.code == 0, ended.err
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    rates = [row["lr"] for row in rows if "lr" in row]
    cosine = [0.001 + 0.009 * (1 + math.cos(math.pi * share / 4)) / 2 for share in (0, 1, 2, 3)]
    assert rates == pytest.approx([0.005, 0.01, *cosine, *cosine, *cosine[:2]])


def test_a_schedule_of_ones_own_refuses_the_lengths_that_it_does_not_read() -> None:
    optimizer = OptimizerConfig(schedule="tests.toy_rates:WARM_RESTARTS", decay_steps=5)
    with pytest.raises(ConfigError, match=r"has no decay; set optimizer\.schedule cosine or linear or wsd, or leave"):
        validate(Config(optimizer=optimizer), 1)


def test_a_rate_that_is_no_number_ends_before_an_update() -> None:
    broken = OptimizerConfig(schedule="tests.toy_rates:BROKEN")
    with pytest.raises(ConfigError, match=r"tests\.toy_rates:BROKEN: gives the rate nan for step 3; a rate is finite"):
        learning_rate(2, broken, 10)
