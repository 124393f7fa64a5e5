"""The number of chunks that parallel.tp_overlap_chunks 0 and ep_overlap_chunks 0 take."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from megapar_models.registry import presets, validate
from megapar_tools.plan import hardware
from megapar_tools.plan.choose import Option, check_chunks, possible, with_chunks
from megapar_tools.plan.estimate import Estimator
from megapar_tools.plan.space import layout_of
from megapar_tools.plan.step_time import step_time
from megapar_tools.plan.work import Started

from megapar.base.errors import ConfigError
from megapar.config.options import Config, ParallelConfig
from tests.support.options import load
from tests.support.plans import PARTS

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import plan

H100 = hardware.load("h100-80g")
TP: Option = "tp_overlap_chunks"
EP: Option = "ep_overlap_chunks"


def _config(length: int, *flags: str) -> Config:
    fixed = ["--config", "llama3.2-1b", "--kernels.backend", "triton", "--train.precision", "bf16", "--gpu", "h100-80g"]
    sizes = ["--train.seq_length", str(length), "--train.global_batch_size", "8", "--parallel.tp", "2"]
    return validate(load([*fixed, *sizes, "--parallel.tp_overlap_chunks", "0", *flags], presets()).config, 2)


@pytest.mark.parametrize(("length", "several"), [(128, False), (16384, True)])
def test_the_number_is_that_of_the_shortest_predicted_step(
    length: int, several: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few tokens it is 1, because each chunk pays the latency of a collective."""
    config = _config(length, "--parallel.sequence_parallel")
    seconds = {n: step_time(with_chunks(config, TP, n), PARTS, H100).seconds for n in possible(config, TP)}
    assert list(seconds) == list(range(1, 9))
    chosen = check_chunks(config, PARTS)
    number = chosen.parallel.tp_overlap_chunks
    assert seconds[number] == min(seconds.values())
    assert (number > 1) == several
    assert chosen == with_chunks(config, TP, number)
    assert f"parallel.tp_overlap_chunks=0: {number}," in capsys.readouterr().out
    # The search for layouts plans with the same number.
    assert plan.ModelPlanner(H100).time(config).seconds == seconds[number]


def _mixture(tp: int, *flags: str) -> Config:
    """16 experts of Qwen3-30B-A3B's size on each of 8 ranks, in two layers."""
    fixed = ["--config", "qwen3-30b-a3b", "--model.num_hidden_layers", "2", "--kernels.backend", "triton"]
    sizes = ["--train.precision", "bf16", "--train.seq_length", "4096", "--train.global_batch_size", "8"]
    layout = ["--parallel.tp", str(tp), "--parallel.etp", "1", "--parallel.ep", "8", "--gpu", "h100-80g"]
    return validate(load([*fixed, *sizes, *layout, "--parallel.ep_overlap_chunks", "0", *flags], presets()).config, 8)


def test_the_number_for_experts_is_that_of_the_shortest_predicted_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Waiting for all-to-alls becomes less with every chunk. Each costs launches and latency."""
    config = _mixture(1)
    times = {n: step_time(with_chunks(config, EP, n), PARTS, H100) for n in possible(config, EP)}
    assert list(times) == [*range(1, 9), 16]
    waited = [time.exposed["ep"] for time in times.values()]
    assert waited[1] < 0.8 * waited[0]
    chosen = check_chunks(config, PARTS)
    number = chosen.parallel.ep_overlap_chunks
    assert number > 1
    assert times[number].seconds == min(time.seconds for time in times.values())
    assert f"parallel.ep_overlap_chunks=0: {number}," in capsys.readouterr().out


def test_an_estimate_counts_what_chunks_hide() -> None:
    """Also with 0, and without a prediction for each number: a search looks at millions of layouts."""
    config = _mixture(1)
    sizes, _, _ = plan.sizes_of(config)
    planner = plan.ModelPlanner(H100)
    sent = {}
    for chunks in (1, 4, 0):
        estimator = Estimator(with_chunks(config, EP, chunks), sizes, H100, planner.kept_by_a_layer)
        operations, _ = estimator.layers.communication(layout_of(config), 4096)
        sent[chunks] = sum(operation.nbytes for operation in operations if isinstance(operation, Started))
    assert sent[1] == pytest.approx(4 * sent[4], rel=1e-3)
    assert sent[1] == pytest.approx(16 * sent[0], rel=1e-3)
    assert planner.kept_by_a_layer(config) == planner.kept_by_a_layer(with_chunks(config, EP, 1))


def test_both_numbers_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    config = _mixture(2, "--parallel.sequence_parallel", "--parallel.tp_overlap_chunks", "0")
    chosen = check_chunks(config, PARTS)
    lines = capsys.readouterr().out
    for option in (TP, EP):
        number = getattr(chosen.parallel, option)
        assert number in possible(config, option)
        assert f"parallel.{option}=0: {number}," in lines


def test_a_number_that_is_given_stays() -> None:
    given = with_chunks(_config(16384), TP, 3)
    assert check_chunks(given, PARTS) is given
    alone = validate(with_chunks(replace(given, parallel=ParallelConfig()), TP, 0), 1)
    assert alone.parallel.tp_overlap_chunks == 1
    assert validate(with_chunks(alone, EP, 0), 1).parallel.ep_overlap_chunks == 1


def test_without_a_machine_or_a_schedule_it_is_refused() -> None:
    config = _config(128)
    with pytest.raises(ConfigError, match=r"^parallel.tp_overlap_chunks=0, gpu=auto: .* needs --gpu"):
        check_chunks(replace(config, gpu="auto"), PARTS)
    measured = replace(config, parallel=replace(config.parallel, schedule="auto"))
    with pytest.raises(ConfigError, match=r"^parallel.tp_overlap_chunks=0, parallel.schedule=auto: "):
        check_chunks(measured, PARTS)
