"""A run without memory or threads left ends in one line: what the rank needs, and what would help."""

import errno
import json
import os
import re
import resource
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import StageBuilder
from megapar_models.registry import validate
from megapar_tools.plan import verdict
from megapar_tools.plan.memory import report_rank, reports

from megapar.base.errors import OutOfMemoryError
from megapar.base.grid import Grid
from megapar.declare import context
from megapar.system import device
from megapar.train import trainer
from megapar.train.doors import LazyPlanner
from megapar.train.out_of_memory import Explanation
from tests.support import program
from tests.support.options import load
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

GPU_WORDS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has 138.00 GiB memory in use."
)


def test_a_model_that_the_host_cannot_hold(tmp_path: Path) -> None:
    """Fault out-of-memory. Building it: an allocation refused by the system."""

    def limit_memory() -> None:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 2**31, resource.RLIM_INFINITY))

    ended = program.run("--model.hidden_size", "600000", cwd=tmp_path, plant=limit_memory)
    assert ended.code == 8
    (line,) = ended.err.splitlines()
    assert re.match(
        r"OutOfMemoryError: out of memory: this rank needs [\d.]+ GiB by plan \(weights [\d.]+, gradients [\d.]+, "
        r"optimizer [\d.]+, activations [\d.]+\) and workspace \(the host refused [\d.]+ GiB more; at most [\d.]+ "
        r"GiB were in use\); ",
        line,
    )


@pytest.mark.parametrize("stage", slow_but([1], ["import", "end"]))
def test_a_plan_that_cannot_be_made_hides_nothing(stage: str, tmp_path: Path) -> None:
    """Fault plan-hides-cause: memory has run out in a rank, and the process that plans fails in any way."""

    def plant() -> None:
        def empty(*_: Any, **__: Any) -> Any:
            raise MemoryError

        trainer.queue_step = empty

        def fail(*_: Any) -> Any:
            raise SystemError

        verdict.report_rank = fail if stage == "import" else lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    ended = program.run("--launch.nproc", "2", "--launch.max_restarts", "2", cwd=tmp_path, plant=plant)
    assert ended.code == 8
    first, last = ended.err.splitlines()
    assert re.search(
        r"^OutOfMemoryError: (rank 1: )?out of memory \(the host refused more memory; at most .*; try ", first
    )
    assert last == "not started again: this error would come again"
    facts = json.loads((tmp_path / "run/error.json").read_text())
    assert (facts["class"], facts["exit_code"], "unplanned" in facts) == ("OutOfMemoryError", 8, False)


def test_a_launcher_adds_the_plan_of_a_rank_without_memory(tmp_path: Path) -> None:
    """Fault out-of-memory: no rank plans, and none waits for the plan."""

    def plant() -> None:
        def empty(state: Any, *_: Any, **__: Any) -> Any:
            if state.ctx.pp.last:
                raise MemoryError
            time.sleep(60)

        trainer.queue_step = empty

    layout = ("--launch.nproc", "2", "--parallel.pp", "2", "--train.micro_batch_size", "1", *program.FOUR_LAYERS)
    ended = program.run(*layout, cwd=tmp_path, plant=plant)
    assert ended.code == 8
    (line,) = ended.err.splitlines()
    needs = report_rank(validate(load([*program.TINY, *layout]).config, 2), PARTS, 1)
    assert f"rank 1: out of memory: this rank needs {needs.total / 2**30:,.3f} GiB by plan (" in line
    assert "by plan this would do with less: " in line


def test_a_gpu_that_is_full_on_one_rank_of_a_pipeline(tmp_path: Path) -> None:
    """Fault out-of-memory. In a step: the line tells the figures of this rank's stage, and the remaining knobs of this
    run."""

    def fill() -> None:
        step = trainer.queue_step

        def full(state: Any, *rest: Any, **named: Any) -> Any:
            if state.ctx.pp.last:
                raise torch.OutOfMemoryError(GPU_WORDS)
            return step(state, *rest, **named)

        trainer.queue_step = full

    layout = ("--launch.nproc", "2", "--parallel.pp", "2", "--train.micro_batch_size", "1", "--train.memory_report")
    flags = (*layout, "--train.recompute", "selective", "--kernels.loss_chunk", "8", *program.FOUR_LAYERS)
    ended = program.run(*flags, cwd=tmp_path, plant=fill)
    assert ended.code == 8
    (line,) = (line for line in ended.err.splitlines() if line.startswith("OutOfMemoryError"))
    config = validate(load([*program.TINY, *flags]).config, 2)
    needs = report_rank(config, PARTS, 1)
    assert f"rank 1: out of memory: this rank needs {needs.total / 2**30:,.3f} GiB by plan" in line
    assert f"activations {needs.activations / 2**30:,.3f})" in line
    # train.memory_report has asked for the parts.
    table = ended.err.partition("memory of rank 1")[2]
    assert re.search(r"MiB +┃ planned +┃ in use ", table)
    for name, size in needs.rows.items():
        assert re.search(rf"{name} +│ {size / 2**20:,.2f} ", table), name
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity" in line
    assert re.search(
        r"at most [\d.]+ GiB were in use\); by plan this would do with less: train\.recompute full \(", line
    )
    changed = replace(config, train=replace(config.train, recompute="full"))
    assert report_rank(changed, PARTS, 1).total <= 0.9 * needs.total
    facts = json.loads((tmp_path / "run/error.json").read_text())
    assert (facts["class"], facts["exit_code"], facts["rank"]) == ("OutOfMemoryError", 8, 1)


def test_no_thread_can_be_started(tmp_path: Path) -> None:
    """Fault out-of-memory."""

    def refuse() -> None:
        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        threading.Thread.start = start  # type: ignore[method-assign]

    ended = program.run(cwd=tmp_path, plant=refuse)
    assert ended.code == 8
    (line,) = ended.err.splitlines()
    assert "can't start another thread: the limit of processes (ulimit -u)" in line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(GPU_WORDS), "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "),
        (
            RuntimeError("x DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes."),
            "1.000 ",
        ),
        (MemoryError(), "the host refused more memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (OSError(errno.ENOENT, "No such file"), ""),
        (RuntimeError("shapes differ"), ""),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception, said: str) -> None:
    assert said in device.out_of_memory(error)
    assert bool(device.out_of_memory(error)) == bool(said)
    given = load(list(program.TINY)).config
    explanation = Explanation(
        validate(given, 1), given, partial(validate, world_size=1), LazyPlanner(StageBuilder()), 0
    )
    with pytest.raises(OutOfMemoryError if said else type(error)), explanation.around():
        raise error


def test_planned_ranks_stand_where_created_ones_do() -> None:
    """Without process groups; see test_context for ranks with them."""
    for rank in range(12):
        ctx = context.planned(Grid(tp=2, dp=2, pp=3, order="dp-tp-cp-pp"), rank, device=torch.device("meta"))
        assert (ctx.dp.rank, ctx.tp.rank, ctx.pp.rank) == (rank % 2, rank // 2 % 2, rank // 4)
        assert (ctx.tied.size, ctx.tied.rank) == {0: (2, 0), 1: (1, 0), 2: (2, 1)}[ctx.pp.rank]
        assert (ctx.world.size, ctx.world.rank, ctx.grad.size) == (12, rank, 2)
    assert len(reports(validate(load(list(program.TINY)).config, 1), PARTS)) == 1
