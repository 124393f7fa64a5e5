"""tools/benchmarks/gpu_model.py: its milliseconds and shares equal those of the table behind it; and the documented
plan of memory equals today's."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megapar_kernels import backend, dispatch
from megapar_models.registry import presets, validate

from megapar.config.files import load
from megapar.config.options import Config, ParallelConfig, TrainConfig
from megapar.plan.memory import reports
from tests.support.kernel_checks import needs_triton  # which also repairs Triton's interpreter
from tests.support.plans import PARTS

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from benchmarks import gpu
from benchmarks.gpu_model import predict

ROOT = Path(__file__).parents[1]
GIB = 2**30

# One H200, 8 micro-batches a step: preset, layers, samples, tokens of one, recompute; milliseconds of a micro-batch in
# all, then of matrix products, attention forward, attention backward, norms and residual, activation, rope,
# cross entropy, optimizer; MFU; tokens/s. None where the table has no number.
ROWS: list[tuple[str, int, int, int, str, float, list[float | None], float, float | None]] = [
    ("llama3.2-1b", 16, 2, 4096, "none", 122, [87, 5.2, 18.3, 2.5, 4.3, 0.8, 1.6, 1.34], 0.56, 67_000),
    ("llama3.2-3b", 28, 1, 4096, "none", 149, [113, 5.2, 16.8, 3.4, 3.8, 1.17, 0.8, 3.4], 0.60, 27_600),
    ("llama3-8b", 32, 1, 8192, "none", 702, [527, 31, 102, 10.2, 15, 3.2, 1.6, 8.5], 0.61, 11_700),
    ("llama3-8b", 16, 1, 8192, "none", 371, [282, 16, 51, 5.1, 7.5, 1.6, 1.6, 4.83], 0.61, None),
    ("llama3-8b", 32, 1, 8192, "selective", 735, [None, 62, 102, None, None, None, None, None], 0.58, 11_200),
    ("llama3-8b", 32, 1, 8192, "full", 907, [None, 62, 102, None, None, None, 1.6, 8.5], 0.47, 9_000),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[4]}")
def test_milliseconds_and_mfu_are_those_of_the_table(row: Any) -> None:
    """Totals, MFU and tokens/s within 3 %; parts within 3 % or the table's last digit."""
    name, layers, samples, tokens, recompute, total, parts, mfu, rate = row
    model = gpu.model_of(gpu.Workload(name, tokens, samples, layers=layers), dry_run=False)
    train = TrainConfig(global_batch_size=8 * samples, micro_batch_size=samples, seq_length=tokens, recompute=recompute)
    found = predict(validate(Config(model=model, parallel=ParallelConfig(dp=1), train=train), 1))
    columns = dict(found.ms)
    columns["norms"] += columns.pop("residual")
    assert found.total_ms == pytest.approx(total, rel=0.03)
    assert found.mfu == pytest.approx(mfu, rel=0.03)
    assert rate is None or found.tokens_per_second == pytest.approx(rate, rel=0.03)
    for column, expected in zip(columns.values(), parts, strict=True):
        assert expected is None or column == pytest.approx(expected, rel=0.03, abs=0.06)
    assert sum(found.by_category().values()) == pytest.approx(found.total_ms)


def test_logits_in_chunks_take_a_third_more_products_of_the_head() -> None:
    config = gpu.make_config(gpu.Options(), "8b")
    whole = replace(config, kernels=replace(config.kernels, loss_chunk=0))
    more = predict(config).ms["matrix products"] - predict(whole).ms["matrix products"]
    assert more == pytest.approx(2 * 8192 * 4096 * 128256 / 700e9)


@needs_triton
def test_the_documented_plan_is_that_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of docs/strategies.md."""
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    flags = ["--config", str(ROOT / "pretrain_scripts/configs/llama_7b.toml"), "--launch.device", "cuda"]
    lines = (ROOT / "docs/strategies.md").read_text().splitlines()
    for kind in reports(validate(load(flags, presets()).config, 8), PARTS):
        sizes = (kind.weights, kind.gradients, kind.optimizer, kind.activations, kind.total)
        row = [f"{kind.parameters:,}", *(f"{size / GIB:.3f}" for size in sizes)]
        assert any(line.split()[-len(row) :] == row for line in lines), row
