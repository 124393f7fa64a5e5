"""The lanes of the suite, told apart by the -m option.

- CPU (any other -m, or none): GPUs are hidden, Triton's kernels are interpreted, ranks talk over gloo. Runs anywhere.
  `-m "project and not slow"` is what PROJECT of tests/support/lanes.py lists, `-m "not project and not slow"` is the
  proof (tests/run.sh).
- `-m gpu`: kernels run natively in this process, on the first GPU.
- `-m gpus`: ranks are forked and have a GPU each, over NCCL.

They need processes of their own: CUDA cannot be used in a fork of a process that has used it, and Triton's interpreter
and compiler cannot share a process. The deciding variables must be set before torch and triton are imported.
"""

import atexit
import gc
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import garbage, huge_pages, lanes

pytest_plugins = ("tests.support.durations",)  # pytest imports it first, to rewrite its assertions

LEFT_OUT = pytest.StashKey[list[str]]()  # groups of tests.support.lanes


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "leave out tests of documents, benchmarks and migration whose files are as in the last commit"
    parser.addoption("--leave-out", action="store_true", help=f"{told}, unless the command names files")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # while all is imported
    lane = config.option.markexpr
    # torch.cuda.is_available() then asks the driver's library, not CUDA, so that this process can still fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if lane not in ("gpu", "gpus"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
    # huggingface_hub, which reads them at its import, would ask the network for minutes where there is none.
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ["MEGAPAR_TEST_LANE"] = lane if lane in ("gpu", "gpus") else "cpu"
    os.environ["MEGAPAR_TEST_FEW_LAYERS"] = "1" if "not slow" in lane else ""  # tests/support/program.py
    import torch
    from megapar_kernels import dispatch

    dispatch.SMALL = 0  # tensors of tests are small, and kernels are what they test
    if lane in ("gpu", "gpus") and not torch.cuda.is_available():
        raise pytest.UsageError(f"-m {lane} needs a GPU, and torch {torch.__version__} sees none here")
    config.stash[LEFT_OUT] = groups_to_leave_out(config)


def groups_to_leave_out(config: pytest.Config) -> list[str]:
    """Return the names of the groups. xdist's processes get the first one's: they must all collect the same tests."""
    if hasattr(config, "workerinput"):
        return config.workerinput["left_out"]
    if not config.option.leave_out or config.args_source is pytest.Config.ArgsSource.ARGS:
        return []
    return lanes.left_out(lanes.changed_files())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["left_out"] = node.config.stash[LEFT_OUT]


def pytest_collection_finish(session: pytest.Session) -> None:
    import torch

    if session.config.option.markexpr == "gpus" and torch.cuda.is_initialized():
        raise pytest.UsageError("a test's file has started CUDA while it was imported: no forked rank could use a GPU")
    gc.enable()
    garbage.freeze()
    huge_pages.use_huge_pages()


# Else triton's modules tell of each of their objects that is left at the end of a process. It comes after pytest's own
# end, where garbage is collected five times: what is frozen is not looked at.
atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws the same numbers whatever ran before it, so a failure can be repeated."""
    import torch

    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def forks_can_use_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any lane, a test marked gpus runs no backward in this process (tests.support.distributed.apart says why)."""
    if request.node.get_closest_marker("gpus") is None:
        return
    import torch

    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    here = os.getpid()

    def refuse_here(*args: object, **options: object) -> object:
        assert os.getpid() != here, "use tests.support.distributed.apart: this process must stay without CUDA"
        return run_backward(*args, **options)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", refuse_here)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A lane does not import the other lane's files: this would take seconds in each process."""
    name, lane = collection_path.stem, config.option.markexpr
    if collection_path.suffix != ".py":
        return None
    if any(name in lanes.GROUPS[group].tests for group in config.stash[LEFT_OUT]):
        return True
    if lane in ("gpu", "gpus") and name in lanes.GROUPS["migration"].tests:
        return True  # a machine of tools/gpu_check.sh has no grammar of bash
    of_project = name in lanes.PROJECT
    if lane.startswith("project ") and not of_project:
        return True
    return True if lane.startswith("not project ") and of_project else None


@pytest.hookimpl(optionalhook=True)  # a machine without xdist runs the tests too (tools/gpu_check.sh)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: two processes more than cores, because tests of hung and silent ranks wait for most of their time."""
    return len(os.sched_getaffinity(0)) + 2 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 2


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of the project lane are marked. A file of kernel tests is marked gpu as a whole; its tests with forked
    ranks belong to `-m gpus` alone. Files begin in the order of tests/durations.json.

    In the lane `-m gpus`, whose time may end before its tests do, those marked slow come last. Another test of each
    mechanism has then run.
    """
    for item in items:
        if item.path.stem in lanes.PROJECT:
            item.add_marker(pytest.mark.project)
    if config.option.markexpr == "gpu":
        items[:] = [item for item in items if item.get_closest_marker("gpus") is None]
    from tests.support import durations

    # The longest file begins first: a process that begins with it last would work alone at the end. So does a file that
    # nobody knows yet. The order within a file stays.
    seconds = durations.read(config.rootpath / durations.FILE)
    items.sort(key=lambda item: -seconds.get(item.path.stem, {"wall": math.inf})["wall"])
    if config.option.markexpr == "gpus":
        items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell the results of the proof from those of the project where both have run, and say what was left out."""
    from tests.support import durations

    results = durations.lanes(terminalreporter.stats, config.stash[durations.SUMS].files, lanes.PROJECT)
    if len(results) > 1:
        terminalreporter.write_sep("=", "lanes")
        for name, line in results.items():
            terminalreporter.write_line(f"{name} lane: {line}")
    for line in lanes.told(config.stash[LEFT_OUT]):
        terminalreporter.write_line(line)
