"""Three lanes of the suite, told apart by the -m option.

- CPU (any other -m, or none): GPUs are hidden, Triton's kernels are interpreted, ranks talk over gloo. Runs anywhere.
- `-m gpu`: kernels run natively in this process, on the first GPU.
- `-m gpus`: ranks are forked and have a GPU each, over NCCL.

They need processes of their own: CUDA cannot be used in a fork of a process that has used it, and Triton's interpreter
and compiler cannot share a process. What decides must be set before torch and triton are imported.
"""

import os

import pytest

# The longest first, in CPU time: a process that begins with one of them last works alone at the end.
LONGEST = (
    *("test_training", "test_docs", "test_grid", "test_kernel_benchmarks", "test_program", "test_faults_local"),
    *("test_benchmark_data", "test_checkpoint_program", "test_benchmark", "test_faults_kills", "test_kernels_compiled"),
    *("test_kernels_norms", "test_gpu_check", "test_checkpoint_reshard", "test_data_parallel", "test_house"),
    *("test_kernels_cross_entropy", "test_tensor_parallel", "test_dry_run", "test_pipeline_runtime", "test_families"),
)


def pytest_configure(config: pytest.Config) -> None:
    lane = config.option.markexpr
    # torch.cuda.is_available() then asks the driver's library, not CUDA, so that this process can still fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if lane not in ("gpu", "gpus"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ["MEGAPAR_TEST_LANE"] = lane if lane in ("gpu", "gpus") else "cpu"
    import torch

    if lane in ("gpu", "gpus") and not torch.cuda.is_available():
        raise pytest.UsageError(f"-m {lane} needs a GPU, and torch {torch.__version__} sees none here")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws the same numbers whatever ran before it, so that a failure can be repeated."""
    import torch

    torch.manual_seed(1234)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file of kernel tests is marked gpu as a whole; those of its tests that fork ranks belong to `-m gpus` alone.
    Long files come first."""
    if config.option.markexpr == "gpu":
        items[:] = [item for item in items if item.get_closest_marker("gpus") is None]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))  # the order within a file stays
