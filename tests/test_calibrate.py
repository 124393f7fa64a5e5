"""tools/calibrate.py: the fits recover known machines, and a small measurement makes a file for the planner."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import calibrate
from benchmarks.ranks import run_ranks
from megapar_tools.plan.hardware import Hardware, Link, load, write

from megapar.base.errors import ConfigError


def test_a_fit_of_products_recovers_the_rate_and_the_half_sizes() -> None:
    products = []
    for m, n, k in calibrate.CPU_PRODUCTS:
        products.append((m, n, k, 2 * (m + 64) * (n + 64) * (k + 16) / 5e10))
    rate, half, half_depth = calibrate.fitted_rates(products)
    assert (half, half_depth) == (64, 16)
    assert rate == pytest.approx(5e10)


def test_a_fit_of_gathers_recovers_latency_and_bandwidth() -> None:
    world = 4
    gathers = [(nbytes, (world - 1) * (20e-6 + nbytes / 2e9)) for nbytes in (1 << 10, 1 << 16, 1 << 22)]
    assert calibrate.fitted_link(gathers, world) == Link(gb_per_second=2.0, latency_us=20.0)


def test_a_link_without_a_latency_by_the_fit_takes_that_of_the_smallest_message() -> None:
    gathers = [(1000, 2e-6), (2000, 6e-6), (4000, 14e-6)]  # the line through them cuts the axis at -2 us
    assert calibrate.fitted_link(gathers, 2).latency_us == pytest.approx(2.0)


def test_a_bandwidth_that_the_fit_does_not_find_is_that_of_the_largest_message() -> None:
    gathers = [(1000, 8e-6), (2000, 7e-6), (4000, 4e-6)]  # on a busy machine
    assert calibrate.fitted_link(gathers, 2).gb_per_second == pytest.approx(1.0)


def test_medians_are_taken_number_by_number() -> None:
    ranks = [{"a": [1.0, [5.0]], "b": 1}, {"a": [3.0, [1.0]], "b": 2}, {"a": [2.0, [9.0]], "b": 9}]
    assert calibrate.medians(ranks) == {"a": [2.0, [5.0]], "b": 2}


def _measured(name: str, like: Hardware | None = None) -> Hardware:
    task = calibrate.Task(2, "fp32", [(8, 8, 8), (64, 64, 64), (128, 64, 64)], 1 << 12, 32, [64, 1 << 12])
    found = calibrate.medians(run_ranks(2, "cpu", partial(calibrate.measure, task), seconds=100))
    return calibrate.hardware_of(found, 2, "fp32", name, like)


def test_two_ranks_measure_a_file_that_the_planner_loads(tmp_path: Path) -> None:
    h100 = load("h100-80g")
    made = _measured("small", like=h100)
    write(made, tmp_path / "small.toml")
    assert load(str(tmp_path / "small.toml")) == made
    # From the other file: what two processes cannot measure.
    assert (made.network, made.watts, made.gpus_per_node) == (h100.network, h100.watts, 8)
    assert made.node != h100.node
    assert 0 < made.peak("fp32") < 1e13
    assert 0 < made.all_to_all_share <= 1


def test_an_output_that_is_no_toml_file_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no TOML file"):
        calibrate.main(calibrate.Arguments(output=tmp_path / "machine.json"))
