"""parallel.schedule auto: the schedule for given times, what is measured, what a resumed run keeps."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megapar_models.build import StageBuilder
from megapar_models.registry import validate
from megapar_tools.plan import measure
from megapar_tools.plan.choose_schedule import FAMILY, ScheduleChoice, StageTimes, choose, with_chosen_schedule
from megapar_tools.plan.memory import memory_limit
from torch.utils.flop_counter import FlopCounterMode

from megapar.base.errors import ConfigError
from megapar.base.grid import Grid
from megapar.config.files import RunConfig
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, ParallelConfig, TrainConfig
from megapar.declare import context
from megapar.pipeline.schedules import SCHEDULES
from megapar.pipeline.zero_bubble import ScheduleMemory
from tests.support import program
from tests.support.distributed import run_ranks
from tests.support.plans import PARTS


def chosen(pp: int, m: int, *times: float, vpps: tuple[int, ...] = (1, 2), limit: float = 0) -> ScheduleChoice:
    """The choice if F, I and W of each rank take `times`. A stage keeps 1 / vpp until its I, and 0.8 / vpp until W."""

    def memory_of(vpp: int) -> ScheduleMemory | None:
        return ScheduleMemory(limit, [1 / vpp] * pp * vpp, [0.8 / vpp] * pp * vpp) if limit else None

    def times_of(vpp: int) -> list[StageTimes]:
        return [StageTimes(*(time / vpp for time in times))] * pp * vpp

    return choose(ParallelConfig(pp=pp, schedule="auto"), vpps, m, times_of, memory_of)


def test_every_schedule_of_the_family_exists() -> None:
    assert set(FAMILY) < set(SCHEDULES)


def test_the_choice_follows_from_the_times() -> None:
    assert chosen(4, 16, 1, 1, 1).schedule == "zb-v"
    assert chosen(4, 16, 1, 1, 1, vpps=(1,)).schedule == "zb-h1"
    # If weights take no time, nothing can be deferred.
    assert chosen(4, 16, 1, 2, 0, vpps=(1,)).schedule == "1f1b"
    assert chosen(1, 4, 1, 1, 1).schedule == "1f1b"
    assert chosen(4, 16, 1, 1, 1, vpps=(2,)).vpp == 2
    found = chosen(4, 16, 2, 3, 1)
    assert found.costs == (1.0, 1.5, 0.5)
    assert found == chosen(4, 16, 2, 3, 1)


def test_the_choice_keeps_to_the_memory() -> None:
    """Without a limit, to the memory of 1F1B. dualpipe-v and zb-2p need more."""
    for m in (4, 8, 16):
        assert chosen(4, m, 1, 1.3, 0.7).schedule not in ("dualpipe-v", "zb-2p", "interleaved")
    assert chosen(4, 16, 1, 1.3, 0.7, limit=8).idle < chosen(4, 16, 1, 1.3, 0.7).idle
    assert chosen(4, 16, 1, 1.3, 0.7, limit=1.5).schedule == "zb-v"
    with pytest.raises(ConfigError, match=r"parallel.schedule=auto, .*: no schedule keeps so little"):
        chosen(4, 16, 1, 1, 1, limit=0.5)


def test_what_is_timed_is_each_half_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is replaced by a counter of FLOPs. An I has the gradients of inputs, a W those of weights."""

    def flops_of(run: Callable[[], None], where: torch.device) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    monkeypatch.setattr(measure, "_seconds", flops_of)
    model = ModelConfig(
        hidden_size=64, num_hidden_layers=5, intermediate_size=96, num_attention_heads=4, vocab_size=384
    )
    train = TrainConfig(seq_length=2, micro_batch_size=3, global_batch_size=12)
    config = validate(Config(model=model, train=train, parallel=ParallelConfig(pp=2, partition=(3, 2))), 2)
    stages = measure.times_of_stages(StageBuilder(), config, torch.device("cpu"))(config)
    tokens = 6
    layer = 2 * tokens * (4 * 64 * 64 + 3 * 64 * 96)
    head = 2 * tokens * 64 * 384
    for found, products in zip(stages, (3 * layer, 2 * layer + head), strict=True):
        forward, inputs, weights = found
        assert weights == products
        assert forward == pytest.approx(products, rel=0.02)  # attention's scores are few
        assert inputs == pytest.approx(products, rel=0.04)


def plant(times: tuple[float, float, float]) -> Callable[[], None]:
    """Plants measured times of each stage of a rank with one stage."""

    def planted() -> None:
        measure.times_of_stages = lambda builder, config, where: (
            lambda candidate: [tuple(t / candidate.parallel.vpp for t in times)] * 2 * candidate.parallel.vpp
        )

    return planted


def parallel_of(folder: Path) -> dict[str, object]:
    return tomllib.loads((folder / "run/config.toml").read_text())["parallel"]


def test_a_run_keeps_the_schedule_that_it_has_chosen(tmp_path: Path) -> None:
    """With --parallel.vpp 1, and times for 1f1b alone, because nothing can be deferred."""
    flags = ["--launch.nproc", "2", "--parallel.pp", "2", "--parallel.schedule", "auto", "--checkpoint.every", "1"]
    flags += ["--optimizer.warmup_steps", "0", "--parallel.vpp", "1"]
    ended = program.run(*flags, "--train.steps", "1", cwd=tmp_path, plant=plant((1.0, 2.0, 0.0)))
    assert ended.code == 0, ended.err
    first = parallel_of(tmp_path)
    assert (first["schedule"], first["vpp"], first["schedule_costs"]) == ("1f1b", 1, [1.0, 2.0, 0.0])
    assert "schedule 1f1b with 1 stage on a rank is the shortest" in ended.out
    assert "# measured at the first start" in (tmp_path / "run/config.toml").read_text()

    # Had it measured again, the costs would be others.
    ended = program.run(*flags, "--train.steps", "2", cwd=tmp_path, plant=plant((1.0, 3.0, 0.0)))
    assert ended.code == 0, ended.err
    assert parallel_of(tmp_path) == first
    assert "schedule 1f1b with 1 stage on a rank, as chosen at the first start" in ended.out


@pytest.mark.parametrize("before", ["given", "damaged"])
def test_what_was_not_chosen_at_an_earlier_start_is_not_kept(before: str, tmp_path: Path) -> None:
    """A schedule given then says nothing about the best one, and an unreadable config.toml neither."""
    flags = ["--launch.nproc", "2", "--parallel.pp", "2", "--parallel.vpp", "1", "--optimizer.warmup_steps", "0"]
    if before == "given":
        ended = program.run(*flags, "--parallel.schedule", "gpipe", "--train.steps", "1", cwd=tmp_path)
        assert ended.code == 0, ended.err
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/config.toml").write_text("[parallel]\nschedule_of_another_version = 1\n")
    auto = ("--parallel.schedule", "auto", "--train.steps", "2")
    ended = program.run(*flags, *auto, cwd=tmp_path, plant=plant((1.0, 2.0, 0.0)))
    assert ended.code == 0, ended.err
    assert "schedule 1f1b with 1 stage on a rank is the shortest" in ended.out


def test_a_chosen_v_trains_as_the_named_one(tmp_path: Path) -> None:
    """Its embedding and head are one matrix on the first rank, although ranks met before the choice was made."""
    flags = ["--launch.nproc", "2", "--parallel.pp", "2", "--parallel.vpp", "2", "--model.tie_word_embeddings"]
    flags += ["--optimizer.warmup_steps", "0", "--train.steps", "2"]
    losses = []
    for schedule in ("auto", "zb-v", "interleaved"):
        folder = tmp_path / schedule
        folder.mkdir()
        ended = program.run(*flags, "--parallel.schedule", schedule, cwd=folder, plant=plant((1.0, 1.0, 1.0)))
        assert ended.code == 0, ended.err
        losses.append([json.loads(line)["loss"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()])
    assert parallel_of(tmp_path / "auto")["schedule"] == "zb-v"
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-6)


def refusal_on_a_rank(config: Config) -> str:
    options = RunConfig(config, config, {})
    ctx = context.create(Grid(pp=2))
    with pytest.raises(ConfigError) as error:
        with_chosen_schedule(options, ctx, lambda *_: lambda candidate: [(1, 1, 1)] * 2, PARTS)
    return str(error.value)


def test_every_rank_is_told_that_no_schedule_fits() -> None:
    """Only the first one has looked for one."""
    model = ModelConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=128)
    parallel = ParallelConfig(pp=2, vpp=1, schedule="auto", schedule_memory_gb=1e-6)
    told = run_ranks(2, refusal_on_a_rank, validate(Config(model=model, parallel=parallel), 2))
    assert told[0] == told[1]
    assert "no schedule keeps so little" in told[0]


def test_a_dry_run_says_what_it_plans_with(tmp_path: Path) -> None:
    ended = program.run("--parallel.pp", "2", "--parallel.schedule", "auto", "--dry_run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "parallel.schedule=auto: planned with zb-" in ended.out
    assert "a run measures them when it first starts" in ended.out


def test_the_memory_of_the_option_is_that_of_the_stages() -> None:
    """Stages with as many layers keep as much; the limit is in GiB."""
    model = ModelConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=128)
    parallel = ParallelConfig(pp=2, partition=(1, 1, 1, 1), schedule="zb-v", schedule_memory_gb=0.5)
    config = validate(Config(model=model, parallel=parallel), 2)
    memory = memory_limit(config, PARTS)
    assert memory is not None
    assert memory.limit == 2**29
    assert memory.forward[1] == memory.forward[2] > 0
    # Inputs and output gradients of q, k, v in one product, of o, of gate and up in one product, and of down, in fp32.
    products = config.train.seq_length * (8 * 64 + 3 * config.model.intermediate_size)
    norms = 2 * 64  # their gradients
    assert memory.inputs[1] == memory.inputs[2] == 4 * (products + norms)
    assert len(memory.forward) == len(memory.inputs) == 4
    without = ParallelConfig(pp=2, schedule="zb-v")
    assert memory_limit(validate(Config(model=model, parallel=without), 2), PARTS) is None
