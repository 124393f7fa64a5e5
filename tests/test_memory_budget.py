"""A budget in place of knobs: train.memory_gb chooses recomputation and offload by the model of time."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megapar_models.registry import presets, validate
from megapar_tools.plan import choose, hardware
from megapar_tools.plan.choose import check_memory, choices, in_ranges, with_choices_of
from megapar_tools.plan.memory import fullest_rank
from megapar_tools.plan.step_time import step_time
from megapar_tools.plan.target import with_planned_kernels
from megapar_tools.plan.verdict import Capacity, for_uneven_experts, judge

from megapar.base.errors import ConfigError
from megapar.config.derive import recomputed_layers
from megapar.config.options import Config
from tests.support import program
from tests.support.options import load
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

H100 = hardware.load("h100-80g")
GIB = 2**30


def planned(preset: str, world: int, *flags: str) -> Config:
    """A preset in bf16 on GPUs."""
    fixed = ["--config", preset, "--train.precision", "bf16", "--launch.device", "cuda", "--kernels.backend", "triton"]
    return validate(load([*fixed, *flags], presets()).config, world)


def budgeted(config: Config, gib: float) -> Config:
    return replace(config, train=replace(config.train, memory_gb=gib), gpu="h100-80g")


def needed(config: Config) -> float:
    report = fullest_rank(config, PARTS)
    return (report.total + for_uneven_experts(config, report)) / GIB


def seconds(config: Config) -> float:
    return step_time(with_planned_kernels(config), PARTS, H100).seconds


LLAMA = ("--parallel.dp", "8", "--optimizer.zero_stage", "2", "--train.seq_length", "8192")
MIXTRAL = ("--parallel.dp", "8", "--parallel.ep", "8", "--optimizer.zero_stage", "3")


@pytest.mark.parametrize(
    ("preset", "flags", "budgets"),
    slow_but([0], [("llama3-8b", LLAMA, (76.0, 60.0, 40.0, 30.0)), ("mixtral-8x7b", MIXTRAL, (70.0, 40.0))]),
)
def test_the_fastest_that_fits_is_taken(preset: str, flags: tuple[str, ...], budgets: tuple[float, ...]) -> None:
    """Of all choices, each planned and timed by itself."""
    config = planned(preset, 8, *flags)
    tried = {choice: (seconds(choice.of(config)), needed(choice.of(config))) for choice in choices(config)}
    assert len(tried) > 20
    before = 0.0
    for budget in budgets:
        chosen = check_memory(budgeted(config, budget), PARTS)
        assert needed(chosen) <= budget
        best = min(time for time, gib in tried.values() if gib <= budget)
        assert seconds(chosen) <= best * (1 + 1e-6), "fewer layers than every n-th may do"
        assert seconds(chosen) >= before, "less memory is never faster"
        before = seconds(chosen)
        assert with_choices_of(chosen, config).train.recompute == chosen.train.recompute


def test_each_pipeline_rank_recomputes_as_few_layers_as_it_must() -> None:
    """The first ranks keep activations of more micro-batches. One layer fewer on any rank would not fit."""
    flags = ("--parallel.dp", "2", "--parallel.pp", "4", "--train.seq_length", "8192", "--optimizer.offload", "0")
    config = planned("llama3-8b", 8, *flags, "--train.global_batch_size", "32")
    budget = 42.0
    chosen = check_memory(budgeted(config, budget), PARTS)
    layers = recomputed_layers(chosen.train)
    counts = [sum(number // 8 == rank for number in layers) for rank in range(4)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[3] == 0
    assert needed(chosen) <= budget
    alike = [choice.of(config) for choice in choices(config)]
    assert seconds(chosen) < min(seconds(one) for one in alike if needed(one) <= budget)
    for rank, count in enumerate(counts):
        if count:
            left_out = max(number for number in layers if number // 8 == rank)
            fewer = in_ranges(number for number in layers if number != left_out)
            assert needed(replace(chosen, train=replace(chosen.train, recompute_layers=fewer))) > budget
    assert with_choices_of(chosen, config).train.recompute_layers == chosen.train.recompute_layers


def test_layers_in_words() -> None:
    assert in_ranges([7, 0, 1, 2, 4, 6]) == ("0-2", "4", "6-7")
    assert in_ranges([]) == ()


def test_what_is_set_stays() -> None:
    config = planned("llama3-8b", 8, *LLAMA, "--train.recompute", "full", "--train.recompute_every", "2")
    chosen = check_memory(budgeted(config, 45.0), PARTS)
    assert (chosen.train.recompute, chosen.train.recompute_layers) == ("full", ("::2",))
    assert max(chosen.optimizer.offload, chosen.train.offload) > 0
    config = planned("llama3-8b", 8, *LLAMA, "--optimizer.offload", "1")
    chosen = check_memory(budgeted(config, 50.0), PARTS)
    assert (chosen.optimizer.offload, chosen.train.recompute) == (1, "light")
    assert check_memory(config, PARTS) is config


def test_a_budget_moves_inputs_of_layers_before_it_moves_state() -> None:
    """Copies of inputs are hidden, and updates on the host are not. What is set stays here too."""
    config = planned("llama3-8b", 8, *LLAMA, "--train.global_batch_size", "64")
    moved = replace(config, train=replace(config.train, recompute="all_but_attention", offload=1.0))
    budget = needed(moved) + 0.1
    chosen = check_memory(budgeted(config, budget), PARTS)
    assert (chosen.train.recompute, chosen.train.offload, chosen.optimizer.offload) == ("all_but_attention", 1, 0)
    without = replace(chosen, train=replace(chosen.train, offload=0.0))
    assert seconds(chosen) == pytest.approx(seconds(without), rel=1e-9)
    assert needed(chosen) <= budget < needed(without)
    assert with_choices_of(chosen, config).train.offload == 1
    config = replace(config, train=replace(config.train, recompute="full", offload=0.25))
    assert check_memory(budgeted(config, 30.0), PARTS).train.offload == 0.25


def test_a_link_slower_than_layers_is_waited_for() -> None:
    """A layer of width h: 24 h^2 FLOPs a token of its forward pass, 2 h bytes of its input in bf16."""
    config = planned("llama3-8b", 8, *LLAMA, "--train.recompute", "full", "--train.offload", "1")
    slow = replace(H100, host=replace(H100.host, link_gb_per_second=2.0))
    for simulated in (False, True):
        times = [
            step_time(with_planned_kernels(config), PARTS, machine, simulated=simulated) for machine in (H100, slow)
        ]
        assert "host" not in times[0].exposed
        assert times[1].seconds > times[0].seconds
    # 32 layers of 8192 tokens: the copy of an input, beside a forward pass that is shorter.
    one = 2 * 8192 * 4096 / 2e9
    micro_batches = config.train.global_batch_size / 8
    found = step_time(with_planned_kernels(config), PARTS, slow)
    assert 0 < found.exposed["host"] < micro_batches * 2 * 32 * one


def test_a_machine_whose_host_is_too_small_does_not_fit() -> None:
    config = planned("llama3-8b", 8, *LLAMA, "--train.recompute", "full", "--train.offload", "1")
    on_host = fullest_rank(config, PARTS).inputs_on_host
    for host_bytes, fits in ((on_host, True), (on_host - 1, False)):
        capacity = Capacity("small", 80 * GIB, GIB, host_bytes)
        verdict = judge(config, lambda config: config, PARTS, capacity)
        assert verdict.fits == fits, verdict.text
    assert "does not fit on a host of small: a rank puts 2.00 GiB" in verdict.text
    assert "lower train.offload" in verdict.text


def test_a_schedule_keeps_what_is_left() -> None:
    flags = ("--parallel.pp", "4", "--parallel.schedule", "zb-h1", "--train.seq_length", "8192")
    config = planned("llama3-8b", 4, *flags, "--train.global_batch_size", "32", "--train.recompute", "light")
    budget = needed(config) + 24
    chosen = check_memory(budgeted(config, budget), PARTS)
    assert chosen.parallel.schedule_memory_gb > 10
    assert needed(config) + 10 < needed(chosen) <= budget
    assert seconds(chosen) < seconds(config), "it idles less"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"gpu": "auto"},
            "train.memory_gb=40.0, gpu=auto: what fits is chosen by its predicted time, which needs --gpu",
        ),
        (
            {"gib": 5.0},
            r"=5.0: the least is [\d.]+ GiB, with train.recompute full, train.offload 1, optimizer.offload 1;",
        ),
        ({"schedule": "auto"}, "the schedule is not known before it is measured; name one, or leave memory_gb at 0"),
    ],
)
def test_what_cannot_be_chosen_is_refused(change: dict[str, object], words: str) -> None:
    config = budgeted(planned("llama3-8b", 8, *LLAMA), float(str(change.get("gib", 40.0))))
    config = replace(config, gpu=str(change.get("gpu", config.gpu)))
    schedule = str(change.get("schedule", "1f1b"))
    config = replace(config, parallel=replace(config.parallel, schedule=schedule))
    with pytest.raises(ConfigError, match=words) as caught:
        check_memory(config, PARTS)
    assert "\n" not in str(caught.value)


def test_a_run_tells_the_choice_and_starts_again_with_it(tmp_path: Path) -> None:
    flags = ("--train.memory_gb", "0.0035", "--gpu", "h100-80g", "--train.steps", "2", "--train.micro_batch_size", "2")
    flags += program.FOUR_LAYERS
    first = program.run(*flags, cwd=tmp_path)
    assert first.code == 0, first.err
    line = next(
        line for line in (first.out + first.err).splitlines() if "train.memory_gb=0.0035: train.recompute " in line
    )
    text = (tmp_path / "run/config.toml").read_text()
    # The file keeps what was given, because it serves other world sizes too. A comment has what was chosen here.
    chosen = check_memory(validate(load(["--config", str(tmp_path / "run/config.toml")]).config, 1), PARTS)
    assert chosen.train.recompute != "none"
    assert f'recompute = "none"  # default, here "{chosen.train.recompute}"' in text
    assert f"train.recompute {chosen.train.recompute}" in line


def end_this_process(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_it_plans() -> None:
    choose.check_memory = end_this_process  # type: ignore[assignment]


def test_a_plan_that_is_killed_ends_the_start_in_a_line(tmp_path: Path) -> None:
    flags = ("--launch.nproc", "2", "--train.memory_gb", "1", "--gpu", "h100-80g")
    ended = program.run(*flags, cwd=tmp_path, plant=killed_while_it_plans)
    assert ended.code == 8
    (line,) = ended.err.splitlines()
    assert line.startswith("OutOfMemoryError: a forked process was ended by a signal: if nobody did it")
    assert not (tmp_path / "run").exists()


def no_backward_here() -> None:
    """In this process, which forks the ranks."""
    run_backward, launcher = torch.autograd._engine_run_backward, os.getpid()  # type: ignore[attr-defined]

    def refuse_here(*args: object, **options: object) -> object:
        assert os.getpid() != launcher, "the launcher's backward starts CUDA, and its ranks cannot use a GPU"
        return run_backward(*args, **options)

    torch.autograd._engine_run_backward = refuse_here  # type: ignore[attr-defined]


def test_the_launcher_chooses_without_a_backward_of_its_own(tmp_path: Path) -> None:
    """On a GPU its ranks would not start: autograd's threads start CUDA at the first backward of a process."""
    flags = ("--launch.nproc", "2", "--parallel.tp", "2", "--parallel.sequence_parallel", "--train.steps", "2")
    flags += ("--gpu", "h100-80g", "--train.memory_gb", "1", "--parallel.tp_overlap_chunks", "0")
    ended = program.run(*flags, "--checkpoint.no_save_last", cwd=tmp_path, plant=no_backward_here)
    assert ended.code == 0, ended.err
    assert "train.memory_gb=1: train.recompute none" in ended.out
