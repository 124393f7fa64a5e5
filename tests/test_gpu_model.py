"""tools/benchmarks/gpu_model.py: its milliseconds and shares are those of the table that it was made from, its counts
those of the presets, and the bytes that it says autograd keeps are those that autograd keeps."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megapar_kernels import backend, dispatch
from megapar_models.build import build_stages
from megapar_models.counts import WholeModel
from megapar_models.registry import presets, validate

from megapar.batch import MicroBatch
from megapar.config.files import load
from megapar.config.options import Config, KernelsConfig, LaunchConfig, ModelConfig, ParallelConfig, TrainConfig
from megapar.plan.dry_run import report
from tests.support.kept_bytes import kept_for_backward
from tests.support.kernel_checks import needs_triton  # which also repairs Triton's interpreter

ROOT = Path(__file__).parents[1]
GIB = 2**30


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks import gpu_model

    return gpu_model


def preset(name: str) -> ModelConfig:
    fields = tomllib.loads(presets()[name].read_text())["model"]
    return ModelConfig(**{key: value for key, value in fields.items() if key != "rope_scaling"})


# One H200, 8 micro-batches a step: model, layers, samples, tokens of one, recompute; milliseconds of a micro-batch in
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
def test_milliseconds_and_mfu_are_those_of_the_table(tools: ModuleType, row: Any) -> None:
    """Totals, MFU and tokens/s within 3 %; parts within 3 % or the table's last digit."""
    name, layers, samples, tokens, recompute, total, parts, mfu, rate = row
    model = replace(preset(name), num_hidden_layers=layers)
    found = tools.predict(tools.Job(model, samples, tokens, recompute=recompute))
    ms = found.ms
    columns = [
        *(ms["matrix products"], ms["attention forward"], ms["attention backward"], ms["norms"] + ms["residual"]),
        *(ms["activation"], ms["rope"], ms["cross entropy"]),
        ms["optimizer and norm"],
    ]
    assert found.total_ms == pytest.approx(total, rel=0.03)
    assert found.mfu == pytest.approx(mfu, rel=0.03)
    assert rate is None or found.tokens_per_second == pytest.approx(rate, rel=0.03)
    for column, expected in zip(columns, parts, strict=True):
        assert expected is None or column == pytest.approx(expected, rel=0.03, abs=0.06)
    assert sum(found.by_category().values()) == pytest.approx(found.total_ms)


def test_counts_are_those_of_the_presets_and_of_the_models(tools: ModuleType) -> None:
    """Parameters as the presets' first lines state them; FLOPs as MFU counts them."""
    files = [path for name, path in presets().items() if name.startswith("llama")]
    assert len(files) > 6
    for file in files:
        stated = re.search(r": ([\d,]+) parameters", file.read_text())
        assert stated is not None
        job = tools.Job(preset(file.stem), 2, 4096)
        assert job.parameters == int(stated[1].replace(",", ""))
    for name in ("llama3.2-1b", "llama3-8b"):
        model = validate(Config(model=preset(name), parallel=ParallelConfig(dp=1)), 1).model
        job = tools.Job(model, 2, 4096)
        assert job.parameters == WholeModel(model).parameters()
        assert job.flops == 2 * 4096 * WholeModel(model).flops_per_token(4096)


def test_other_models_are_refused(tools: ModuleType) -> None:
    for name in ("gpt2-124m", "qwen2.5-7b", "qwen3-8b"):
        with pytest.raises(ValueError, match="Llama without biases"):
            tools.Job(preset(name), 1, 1024)


def test_memory_of_8b(tools: ModuleType) -> None:
    """18 bytes a parameter and the table of weight decay are 134.7 GiB. Activations of 69.6 K elements a token and
    layer do not fit beside them. With full recompute all fits into the 140.4 GiB of an H200, a GiB kept back."""
    model = preset("llama3-8b")
    whole = tools.Job(model, 1, 8192)
    assert tools.kept_layer_bytes(whole) / 8192 / 2 == pytest.approx(69.6e3, rel=3e-3)
    found = tools.predict(whole)
    assert found.bytes["weights, gradients, optimizer"] / GIB == pytest.approx(134.7, abs=0.05)
    assert found.spare_bytes < -30 * GIB
    recomputed = tools.predict(replace(whole, recompute="full"))
    chunked = tools.predict(replace(whole, recompute="full", loss_chunk=4096))
    assert 0.4 * GIB < recomputed.spare_bytes < chunked.spare_bytes < 1.2 * GIB
    assert recomputed.peak_bytes == sum(recomputed.bytes.values())


def kept_by_autograd(model: ModelConfig, train: TrainConfig, loss_chunk: int) -> int:
    """Bytes of all storages that a forward pass through the whole model leaves for the backward pass, without those of
    parameters and of the batch; Triton's kernels interpreted."""
    from benchmarks import gpu_contenders, layouts

    cpu = torch.device("cpu")
    kernels = KernelsConfig(backend="triton", loss_chunk=loss_chunk)
    config = validate(Config(model=model, parallel=ParallelConfig(dp=1), train=train, kernels=kernels), 1)
    contender = layouts.Megapar(config, gpu_contenders.RandomWeights(config.model, cpu), cpu)
    (stage,) = contender.state.stages.values()
    shape = train.micro_batch_size, train.seq_length
    tokens = torch.arange(train.seq_length).expand(shape).contiguous() % model.vocab_size
    batch = MicroBatch.of_samples(tokens, tokens.clone(), torch.ones(shape), torch.zeros(shape[0], dtype=torch.int64))
    known = [*stage.parameters(), batch.targets_bs, batch.weights_bs]
    return kept_for_backward(lambda: stage(None, batch), without=known)


@needs_triton
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_plan_for_a_gpu_counts_the_same_bytes(
    tools: ModuleType, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned on this machine for GPUs: kernels that are not interpreted, at the size of Llama 3 8B."""
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    model = replace(preset("llama3-8b"), num_hidden_layers=3)
    train = TrainConfig(global_batch_size=1, seq_length=8192, precision="bf16", recompute=recompute)
    config = Config(model=model, parallel=ParallelConfig(dp=1), train=train, launch=LaunchConfig(device="cuda"))
    (kind,) = report(validate(config, 1), build_stages)
    expected = dict(tools.kept_bytes(tools.Job(model, 1, 8192, recompute=recompute)))
    if recompute != "none":
        del expected["rope tables"]
    expected["targets and their weights"] = 8192 * (8 + 4)
    assert kind.activations == sum(expected.values()), expected


@needs_triton
def test_the_documented_plan_is_that_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of docs/strategies.md."""
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    flags = ["--config", str(ROOT / "pretrain_scripts/configs/llama_7b.toml"), "--launch.device", "cuda"]
    lines = (ROOT / "docs/strategies.md").read_text().splitlines()
    for kind in report(validate(load(flags, presets()).config, 8), build_stages):
        sizes = (kind.weights, kind.gradients, kind.optimizer, kind.activations, kind.total)
        row = [f"{kind.parameters:,}", *(f"{size / GIB:.3f}" for size in sizes)]
        assert any(line.split()[-len(row) :] == row for line in lines), row


@needs_triton
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("loss_chunk", [0, 8])
def test_kept_bytes_are_what_autograd_keeps(tools: ModuleType, recompute: Any, loss_chunk: int) -> None:
    """To the byte, with the fused kernels in bf16. Every width is different, so that none can stand for another."""
    model = ModelConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
        intermediate_size=80, vocab_size=200,
    )  # fmt: skip
    train = TrainConfig(global_batch_size=1, micro_batch_size=1, seq_length=16, precision="bf16", recompute=recompute)
    job = tools.Job(model, 1, 16, recompute=recompute, loss_chunk=loss_chunk)
    expected = dict(tools.kept_bytes(job))
    if recompute == "none":
        # On a CPU attention's result has each head's rows together, so that the projection behind it keeps a copy.
        expected["attention's result, a copy"] = 2 * model.num_hidden_layers * job.tokens * job.query_width
    else:  # the tables are kept inside what a recomputed function is called with, unseen by autograd
        del expected["rope tables"]
    assert kept_by_autograd(model, train, loss_chunk) == sum(expected.values()), expected
