"""The number of chunks that parallel.tp_overlap_chunks 0 takes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from megapar_models.registry import presets, validate

from megapar.config.options import Config, ParallelConfig
from megapar.errors import ConfigError
from megapar.plan import hardware
from megapar.plan.choose_chunks import check_chunks, possible, with_chunks
from megapar.plan.step_time import step_time
from tests.support.options import load
from tests.support.plans import PARTS

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import plan

H100 = hardware.load("h100-80g")


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
    seconds = {n: step_time(with_chunks(config, n), PARTS, H100).seconds for n in possible(config)}
    assert list(seconds) == list(range(1, 9))
    chosen = check_chunks(config, PARTS)
    number = chosen.parallel.tp_overlap_chunks
    assert seconds[number] == min(seconds.values())
    assert (number > 1) == several
    assert chosen == with_chunks(config, number)
    assert f"parallel.tp_overlap_chunks=0: {number}," in capsys.readouterr().out
    # The search for layouts plans with the same number.
    assert plan.ModelPlanner(H100).time(config).seconds == seconds[number]


def test_a_number_that_is_given_stays() -> None:
    given = with_chunks(_config(16384), 3)
    assert check_chunks(given, PARTS) is given
    alone = validate(with_chunks(replace(given, parallel=ParallelConfig()), 0), 1)
    assert alone.parallel.tp_overlap_chunks == 1


def test_without_a_machine_or_a_schedule_it_is_refused() -> None:
    config = _config(128)
    with pytest.raises(ConfigError, match=r"^parallel.tp_overlap_chunks=0, gpu=auto: .* needs --gpu"):
        check_chunks(replace(config, gpu="auto"), PARTS)
    measured = replace(config, parallel=replace(config.parallel, schedule="auto"))
    with pytest.raises(ConfigError, match=r"^parallel.tp_overlap_chunks=0, parallel.schedule=auto: "):
        check_chunks(measured, PARTS)
