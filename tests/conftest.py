"""The lanes of the suite, told apart by the -m option.

- CPU (any other -m, or none): GPUs are hidden, Triton's kernels are interpreted, ranks talk over gloo. Runs anywhere.
  `-m "project and not slow"` is what PROJECT lists, `-m "not project and not slow"` is the proof (tests/run.sh).
- `-m gpu`: kernels run natively in this process, on the first GPU.
- `-m gpus`: ranks are forked and have a GPU each, over NCCL.

They need processes of their own: CUDA cannot be used in a fork of a process that has used it, and Triton's interpreter
and compiler cannot share a process. The deciding variables must be set before torch and triton are imported.
"""

import atexit
import gc
import os
from pathlib import Path

import pytest

from tests.support import garbage, huge_pages

# Files that prove nothing about training: documents, benchmarks, rules of the code, tools, the tests' own support.
PROJECT = (
    *(
        "test_benchmark",
        "test_benchmark_checkpoint",
        "test_benchmark_data",
        "test_come_over",
        "test_command",
        "test_dashboard",
        "test_docs",
    ),
    *("test_gpu_check", "test_house", "test_kernel_benchmarks", "test_lanes", "test_other_frameworks"),
    *(
        "test_plot_schedule",
        "test_status",
        "test_strategy_tables",
        "test_support_distributed",
        "test_support_program",
        "test_terminal",
    ),
)

# The longest of both lanes first: a process that begins with one of them last works alone at the end. By the seconds
# that their tests take with `-n 2 --durations=0 -vv` on two cores; those of hung ranks wait for most of them.
LONGEST = (
    *("test_restarts", "test_docs", "test_kernels_tiled_attention", "test_faults_local", "test_model_types"),
    *("test_grid", "test_adapters", "test_faults_hosts", "test_stragglers", "test_training", "test_zero"),
    *("test_narrow_state", "test_optimizers_further", "test_compile", "test_preflight", "test_dry_run"),
    *("test_gpu_waits", "test_expert_meanwhile", "test_benchmark", "test_kernels_norms", "test_plan_search"),
    *("test_objectives", "test_memory_budget", "test_pipeline_halves", "test_data_preprocess", "test_data_text"),
    *("test_rendezvous", "test_command", "test_checkpoint_program", "test_house", "test_lanes", "test_faults_links"),
)


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
    import torch
    from megapar_kernels import dispatch

    dispatch.SMALL = 0  # tensors of tests are small, and kernels are what they test
    if lane in ("gpu", "gpus") and not torch.cuda.is_available():
        raise pytest.UsageError(f"-m {lane} needs a GPU, and torch {torch.__version__} sees none here")


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
    lane = config.option.markexpr
    of_project = collection_path.stem in PROJECT
    if collection_path.suffix != ".py":
        return None
    if lane.startswith("project ") and not of_project:
        return True
    return True if lane.startswith("not project ") and of_project else None


@pytest.hookimpl(optionalhook=True)  # a machine without xdist runs the tests too (tools/gpu_check.sh)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: two processes more than cores, because tests of hung and silent ranks wait for most of their time."""
    return len(os.sched_getaffinity(0)) + 2 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 2


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of PROJECT are marked. A file of kernel tests is marked gpu as a whole; its tests with forked ranks belong
    to `-m gpus` alone. Long files come first.

    In the lane `-m gpus`, whose time may end before its tests do, those marked slow come last. Another test of each
    mechanism has then run.
    """
    for item in items:
        if item.path.stem in PROJECT:
            item.add_marker(pytest.mark.project)
    if config.option.markexpr == "gpu":
        items[:] = [item for item in items if item.get_closest_marker("gpus") is None]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))  # the order within a file stays
    if config.option.markexpr == "gpus":
        items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
