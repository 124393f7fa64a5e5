"""tools/benchmark.py fp8_descent and fp8_probe at a size of seconds: products, planted faults, judgments, shapes."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_kernels import quantize
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from benchmarks import fp8_descent, fp8_probe, gpu, gpu_contenders, harness
from benchmarks.contenders import Megapar
from benchmarks.layouts import make_batches
from benchmarks.ranks import BenchmarkError

from megapar.linear.fp8_products import Fp8Products

CPU = torch.device("cpu")
WARMUP = ("optimizer.warmup_steps=2",)  # that of the quickstart is longer than these runs


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# The descent


@pytest.mark.parametrize("model", fp8_descent.MODELS)
def test_all_matrices_of_the_models_are_in_fp8(model: str) -> None:
    words = fp8_descent.in_words(fp8_descent.Options(), model)
    assert words == "14 of 14 matrices of layers in FP8"


def test_a_stale_cache_serves_the_first_codes_for_twenty_steps() -> None:
    products = fp8_descent.StaleWeights()
    weight = torch.randn(128, 256)
    for step in range(1, 23):
        weight.normal_(generator=torch.Generator().manual_seed(step))
        right = Fp8Products().convert_weight(weight).codes.float()
        found = products.convert_weight(weight).codes.float()
        assert torch.equal(found, right) == (step == 1 or step > 20), step


def test_a_wrong_exponent_is_that_of_the_group_beside_it() -> None:
    grad = torch.cat([torch.ones(3, 128), torch.full((3, 128), 4.0)], -1)
    products = fp8_descent.WrongExponent(torch.float32)
    found = products.restore(products.convert_gradient(grad))
    assert torch.equal(found, grad.flip(-1))


def write_run(folder: Path, name: str, losses: list[float]) -> None:
    (folder / name).mkdir()
    (folder / name / "losses.json").write_text(json.dumps({"seed": 1, "losses": losses, "held_out": losses[-1]}))


@pytest.mark.parametrize(
    ("from_codes", "fault", "words"),
    [
        (4.02, 4.4, None),
        (4.02, 4.0012, "llama, stale_weights: +0.03 % from bf16, within 1.0 %: the fault is not seen"),
        (4.08, 4.4, "llama, from_codes: +2.00 % from bf16, more than 1.0 %"),
        (float("nan"), 4.4, "llama, from_codes: +nan % from bf16, more than 1.0 %"),
    ],
)
def test_the_mean_of_the_descent_is_judged(from_codes: float, fault: float, words: str | None, tmp_path: Path) -> None:
    """The first step does not count. Runs that have ended are read."""
    losses = {"bf16": 4.0, "blocks": 4.01, "from_codes": from_codes, "stale_weights": fault, "wrong_exponent": 5.0}
    for case, loss in losses.items():
        write_run(tmp_path, f"llama-{case}-3-1", [9.0 if case == "bf16" else 1.0, loss, loss])
    files: dict[str, Any] = {"json": tmp_path / "out.json", "picture": None if words else tmp_path / "out.png"}
    options = fp8_descent.Options(models=("llama",), seeds=(1,), steps=3, first=2, flags=WARMUP, runs=tmp_path, **files)
    if words is None:
        harness.run(fp8_descent.measure, options)
    else:
        with pytest.raises(BenchmarkError) as raised:
            harness.run(fp8_descent.measure, options)
        assert str(raised.value) == words
    rows = {row["case"]: row for row in json.loads(files["json"].read_text())["rows"]}
    assert rows["blocks"]["percent_from_bf16"] == pytest.approx(0.25)
    assert rows["wrong_exponent"]["percent_by_seed"] == [pytest.approx(25.0)]
    assert words or files["picture"].stat().st_size > 10_000


@pytest.mark.slow
def test_runs_of_all_cases_descend(tmp_path: Path) -> None:
    """Real runs of a few steps: with a wrong exponent the loss is another one."""
    pytest.importorskip("sentencepiece")
    if not Path("data/quickstart/validation.idx").exists():
        pytest.skip("data/quickstart is missing; pretrain_scripts/quickstart_data.sh makes it")
    options = fp8_descent.Options(models=("llama",), seeds=(1,), steps=4, first=2, flags=WARMUP, runs=tmp_path)
    rows = {row["case"]: row for row in fp8_descent.measure(options).numbers["rows"]}
    assert abs(rows["blocks"]["percent_from_bf16"]) < 1 < rows["wrong_exponent"]["percent_from_bf16"]


# The probe


@pytest.mark.parametrize("models", ["8b", pytest.param("all", marks=pytest.mark.slow)])
def test_a_dry_run_of_the_probe_has_every_product_of_every_shape(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device torch checks shapes, strides and padding of what it would multiply."""
    shapes = [
        shape for shape in fp8_probe.all_shapes() if models == "all" or shape.of in (fp8_probe.GATE_OF, "few inputs")
    ]
    monkeypatch.setattr(fp8_probe, "all_shapes", lambda: shapes)
    file = tmp_path / "out.json"
    harness.run(fp8_probe.measure, fp8_probe.Options(dry_run=True, json=file))
    found = json.loads(file.read_text())
    names = {(row["of"], row["matrix"], row["product"]) for row in found["rows"]}
    whole = {(s.of, s.matrix, name + fp8_probe.WHOLE) for s in shapes[:4] for name in fp8_probe.GATE}
    assert names == {(s.of, s.matrix, name) for s in shapes for name in fp8_probe.PARTNERS} | whole
    assert {row["inputs"] for row in found["rows"]} >= {768, 1408, 4096, 14336}
    assert {row["outputs"] for row in found["rows"]} >= {6144, 28672}, "of 8B: q, k and v, and gate and up"
    assert all(row["status"] == "ok" and row["tflops"] is None for row in found["rows"])
    assert found["kernels"]
    assert all(row["ms"] is None for row in found["kernels"])
    assert found["not_run"] == found["wrong"] == []
    assert "no verdict: y and dx and dW of Llama 3 8B not measured" in capsys.readouterr().out


def test_the_probe_emulates_products() -> None:
    """Emulated products are near those of the numbers that were quantized."""
    shape = fp8_probe.Shape("tiny", "tiny", outputs=384, inputs=256, tokens=128)
    operands = fp8_probe.Operands(shape, CPU)
    works = operands.works()
    exact = {
        "y": operands.x.float() @ operands.weight.float().t(),
        "dx": operands.dy.float() @ operands.weight.float(),
        "dW": operands.dy.float().t() @ operands.x.float(),
        "tensorwise": operands.x.float() @ operands.weight.float().t(),
    }
    for name, y in exact.items():
        expected = works[name].expected
        assert expected is not None
        assert relative(expected(), y) < 0.06, name


def test_a_kernel_with_other_bits_is_found_out() -> None:
    codes = torch.arange(8.0)
    assert not fp8_probe.problem_of_kernel(lambda impl: codes, "triton")
    wrong = fp8_probe.problem_of_kernel(lambda impl: -codes if impl == "triton" else codes, "triton")
    assert wrong == "bits differ from those of torch's ops"


def test_a_wrong_product_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with the exponents of other rows, and one that the machine does not have. The others go on."""
    shape = fp8_probe.Shape("8b-16-layers", "tiny", outputs=256, inputs=384, tokens=128)
    operands = fp8_probe.Operands(shape, CPU)
    x = quantize.view_packed(operands.x_packed)
    x.exponents.add_(torch.arange(3, dtype=torch.uint8))  # so that they differ
    right = fp8_probe.Work(lambda: operands.x, lambda: operands.x.float())
    shifted = quantize.Quantized(x.codes, x.exponents.roll(1, -1), x.group)
    weight = operands.weight_codes
    wrong = fp8_probe.Work(partial(fp8_probe.emulated, shifted, weight), partial(fp8_probe.emulated, x, weight))

    def none() -> Tensor:
        raise NotImplementedError("no FP8 here")

    works = {"y": wrong, "dx": right._replace(run=none), "dW": right, "bf16 y": right, "bf16 dW": right}
    monkeypatch.setattr(operands, "works", lambda: works)
    monkeypatch.setattr(operands, "whole_works", lambda works, impl: {})
    probe = fp8_probe.Probe(fp8_probe.Options(seconds=0.01, json=tmp_path / "out.json"), {}, target=CPU)
    probe.take(shape, operands)
    rows = {row["product"]: row for row in probe.rows}
    assert "differs from restored numbers by" in rows["y"]["status"]
    assert rows["dx"]["status"] == "NotImplementedError: no FP8 here"
    assert rows["y"]["tflops"] is rows["dx"]["tflops"] is None
    assert len(rows["dW"]["tflops"]) == len(rows["dW"]["over_bf16"]) == fp8_probe.ROUNDS
    assert [line.partition(":")[0] for line in probe.wrong] == ["8b-16-layers, tiny, y", "8b-16-layers, tiny, dx"]


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (1010.0, "the weight gradient in FP8 may be turned on: TFLOP/s sustained, Llama 3 8B: y 1,100 (needs 1,050)"),
        (990.0, "the weight gradient in FP8 stays in bf16: TFLOP/s sustained, Llama 3 8B: y 1,100 (needs 1,050)"),
    ],
)
def test_the_verdict_needs_all_three_products(rate: float, words: str) -> None:
    """A matrix counts by its time."""
    rows = []
    for shape in fp8_probe.shapes_of(fp8_probe.GATE_OF):
        for name, tflops in {"y": 1100.0, "dx": 1100.0, "dW": rate}.items():
            rows.append({**shape._asdict(), "product": name, "tflops": [tflops] * 5})
    assert fp8_probe.verdict(rows).startswith(words)
    assert fp8_probe.verdict(rows).endswith(f"dW {rate:,.0f} (needs 1,000)")
    assert fp8_probe.verdict(rows[:-1]) == "no verdict: dW of Llama 3 8B not measured"
    rows[0]["tflops"] = [550.0] * 5
    assert "stays in bf16" in fp8_probe.verdict(rows)


def test_the_gpu_benchmark_trains_in_fp8_beside_bf16() -> None:
    config = gpu.make_config(gpu.Options(dry_run=True, micro_batches=1), "8b-16-layers")
    batch = make_batches(config, 1)[0]
    weights = gpu.RandomWeights(config.model, CPU)
    bf16, fp8 = (kind(config, weights, CPU).step(*batch) for kind in (Megapar, gpu_contenders.MegaparInFp8))
    assert fp8.loss == pytest.approx(bf16.loss, rel=gpu.TOLERANCES["loss"])
    assert fp8.grad_norm == pytest.approx(bf16.grad_norm, rel=gpu.TOLERANCES["grad_norm"])
    assert fp8 != bf16
