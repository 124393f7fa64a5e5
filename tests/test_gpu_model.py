"""The time of one GPU that is predicted from recorded work equals that of formulas for the Llama family; and the
documented plan of memory equals today's."""

import sys
from pathlib import Path
from typing import Any

import pytest
from megapar_kernels import backend, dispatch
from megapar_models.registry import presets, validate
from megapar_tools.plan.durations import BACKWARD_ATTENTION, FORWARD_ATTENTION, PRODUCTS
from megapar_tools.plan.durations import KERNELS as OTHER_KERNELS
from megapar_tools.plan.hardware import load as load_machine
from megapar_tools.plan.memory import reports
from megapar_tools.plan.step_time import OPTIMIZER, step_time

from megapar.config.options import Config, KernelsConfig, ParallelConfig, TrainConfig
from tests.support.kernel_checks import needs_triton  # which also repairs Triton's interpreter
from tests.support.options import load
from tests.support.plans import PARTS

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from benchmarks import gpu

ROOT = Path(__file__).parents[1]
GIB = 2**30

# By formulas for the Llama family, with the least bytes of its kernels. One H200, 8 micro-batches a step: preset,
# layers, samples, tokens of one, recompute; milliseconds of a micro-batch in all, then of matrix products, attention
# forward, attention backward, norms and residual, activation, rope, cross entropy, optimizer; MFU; tokens/s. None
# where the table has no number.
ROWS: list[tuple[str, int, int, int, str, float, list[float | None], float, float | None]] = [
    ("llama3.2-1b", 16, 2, 4096, "none", 122, [87, 5.2, 18.3, 2.5, 4.3, 0.8, 1.6, 1.34], 0.56, 67_000),
    ("llama3.2-3b", 28, 1, 4096, "none", 150, [113, 5.6, 17.3, 3.4, 3.8, 1.17, 0.8, 3.4], 0.595, 27_300),
    ("llama3-8b", 32, 1, 8192, "none", 708, [527, 33.4, 105, 10.2, 15, 3.2, 1.6, 8.5], 0.605, 11_600),
    ("llama3-8b", 16, 1, 8192, "none", 373, [282, 16.7, 52.5, 5.1, 7.5, 1.6, 1.6, 4.83], 0.605, None),
    ("llama3-8b", 32, 1, 8192, "selective", 743, [None, 66.8, 105, None, None, None, None, None], 0.575, 11_000),
    ("llama3-8b", 32, 1, 8192, "full", 915, [None, 66.8, 105, None, None, None, 1.6, 8.5], 0.465, 8_950),
]


@needs_triton
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[4]}")
def test_recorded_work_takes_the_time_of_formulas(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals, MFU and tokens/s within 3 %, and so products, attention and the optimizer. The bytes of other kernels are
    those of their formulas, and what small operations move beside them."""
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    name, layers, samples, tokens, recompute, total, parts, mfu, rate = row
    model = gpu.model_of(gpu.Workload(name, tokens, samples, layers=layers), dry_run=False)
    train = TrainConfig(
        global_batch_size=8 * samples, micro_batch_size=samples, seq_length=tokens, recompute=recompute,
        precision="bf16",
    )  # fmt: skip
    kernels = KernelsConfig(backend="triton")
    found = step_time(
        validate(Config(model=model, parallel=ParallelConfig(dp=1), train=train, kernels=kernels), 1),
        PARTS, load_machine("h200-141g"),
    )  # fmt: skip
    kernels_ms = sum(found.busy.values()) * 1e3 / 8
    assert kernels_ms == pytest.approx(total, rel=0.03)
    # MFU is rounded in the table.
    assert found.mfu * found.seconds == pytest.approx(mfu * 8e-3 * total, rel=0.015)
    assert found.tokens_per_second_per_gpu * found.seconds == pytest.approx(8 * samples * tokens)
    assert rate is None or rate * total / 1e3 == pytest.approx(samples * tokens, rel=0.01)
    products, forward, backward, *others, optimizer = parts
    for kind, expected in {
        PRODUCTS: products, FORWARD_ATTENTION: forward, BACKWARD_ATTENTION: backward, OPTIMIZER: optimizer,
    }.items():  # fmt: skip
        assert expected is None or found.busy[kind] * 1e3 / 8 == pytest.approx(expected, rel=0.03, abs=0.06)
    if None not in others:
        moved = found.busy[OTHER_KERNELS] * 1e3 / 8
        assert sum(others) <= moved < 1.3 * sum(others)


@needs_triton
def test_the_documented_plan_is_that_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of docs/strategies.md."""
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    flags = ["--config", str(ROOT / "pretrain_scripts/configs/llama_7b.toml"), "--launch.device", "cuda"]
    flags += ["--parallel.dp", "2", "--parallel.tp", "2", "--parallel.pp", "2", "--parallel.sequence_parallel"]
    lines = (ROOT / "docs/strategies.md").read_text().splitlines()
    for kind in reports(validate(load(flags, presets()).config, 8), PARTS):
        sizes = (kind.weights, kind.gradients, kind.optimizer, kind.activations, kind.total)
        row = [f"{kind.parameters:,}", *(f"{size / GIB:.3f}" for size in sizes)]
        assert any(line.split()[-len(row) :] == row for line in lines), row
