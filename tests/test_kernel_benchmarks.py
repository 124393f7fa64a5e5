"""The GPU benchmarks in their dry modes, at a size of seconds: every op, direction and contender runs, nothing is
claimed without a measurement, nothing measured is lost, and a wrong kernel is found out."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from megapar_kernels.backend import Kernels
from megapar_kernels.dispatch import HAS_TRITON, triton

from megapar.base.errors import ConfigError, StorageError
from megapar.system.atomic_files import write_json

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from benchmarks import gpu, gpu_contenders, harness, ranks
from benchmarks.contenders import Megapar
from benchmarks.kernels import attention, measuring, ops, peers, run
from benchmarks.profiling import Kernel, gather

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
BOTH_WAYS = {
    *("cross entropy", "RMSNorm", "add + RMSNorm", "LayerNorm", "add + LayerNorm", "SwiGLU", "GeGLU", "ReLU²"),
    *("bias + GELU", "RoPE", "dropout + add", "attention"),
    *("delta rule", "delta rule of channels", "short convolution"),
    *("copies for experts", "sums of experts' rows"),
    *(attention.SINKS, attention.CAP, attention.WINDOW, attention.DOCUMENTS, attention.DROPOUT, attention.WIDTHS),
}
ONE_WAY = {
    **dict.fromkeys(("AdamW", "square sum", "weight gradient", "weight gradients of experts"), "forward"),
    "linear cross entropy": "both",
}


def door(folder: Path, *words: str, **environment: str) -> Any:
    """What `tools/benchmark.py` writes."""
    command = [sys.executable, str(ROOT / "tools/benchmark.py"), *words, "--json", str(folder / "out.json")]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


@pytest.fixture
def bench() -> measuring.Stopwatch:
    return measuring.Stopwatch(CPU, dry_run=True)


def tiny_case(op: str, backend: Kernels | None = None) -> ops.Case:
    return next(case for case in ops.cases(ops.TINY, backend or Kernels()) if case.op == op)


@pytest.mark.slow
def test_a_dry_run_has_every_op_in_every_direction_and_no_figure(tmp_path: Path) -> None:
    """The kernels are interpreted if triton is installed: each is compared with torch in fp32."""
    if HAS_TRITON and triton.__version__ < "3.7":
        pytest.skip(f"the interpreter of triton {triton.__version__} does not understand numpy {np.__version__}")
    results = door(tmp_path, "kernels", "--dry_run", TRITON_INTERPRET="1")
    assert results["kernels"]["norm"] == ("triton" if HAS_TRITON else "torch")
    expected = {(op, way) for op in BOTH_WAYS for way in ("forward", "backward", "both")} | set(ONE_WAY.items())
    assert {(row["op"], row["direction"]) for row in results["rows"]} == expected
    assert results["not_run"] == results["wrong"] == []
    for row in results["rows"]:
        contenders = row["contenders"]
        assert "Liger-Kernel" in contenders
        assert [contenders[name]["status"] for name in ("megapar", "torch")] == ["ok"] * 2, row
        status = contenders["torch.compile"]["status"]
        if "attention with" in row["op"]:
            # Whether FlexAttention has a backward pass on CPUs depends on the processor.
            assert status == "ok" or "FlexAttention does not support backward on CPU" in status
        else:
            assert status == "ok", row
        assert 0 <= contenders["megapar"]["error"] < 1e-5
        assert [row[name] for name in ("ms", "bytes", "gb_per_second", "tflops", "share")] == [None] * 5


def test_figures_follow_from_times(bench: measuring.Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up times: backward is both without forward, rates are over the fewest bytes, ratios are to our time."""
    times = iter((1.0, 2.5))
    monkeypatch.setattr(bench, "median_ms", lambda run: next(times))
    ours = measuring.Contender()
    case = tiny_case("RoPE")
    measuring.measure(bench, case, case.ours, ours)
    assert ours.ms == {"forward": 1.0, "both": 2.5, "backward": 1.5}
    liger = measuring.Contender(ms={"forward": 3.0, "backward": 3.0, "both": 6.0})
    case = next(case for case in ops.cases(ops.LLAMA_8B, Kernels()) if case.shape == "8192x128256")
    forward, backward, both = run.rows(case, {"megapar": ours, "Liger-Kernel": liger}, copy=3000.0)
    assert forward["gb_per_second"] == pytest.approx(2 * 8192 * 128256 / 1e6)
    assert backward["gb_per_second"] == pytest.approx(4 * 8192 * 128256 / 1.5e6)
    assert both["share"] == pytest.approx(6 * 8192 * 128256 / 2.5e6 / 3000)
    assert both["over"] == {"Liger-Kernel": 2.4, "torch": None, "torch.compile": None, "fla": None}


def test_a_wrong_kernel_is_not_timed(bench: measuring.Stopwatch) -> None:
    """Neither one of ours, its error seen to rounding, nor another's with other results."""
    case = tiny_case("SwiGLU")

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (1 - 1e-4)

    for wrong in (lambda x: case.torch(x) * (1 + 1e-4), lambda x: Backward.apply(case.torch(x))):
        found = run.compete(
            bench, case, {"megapar": wrong, "torch": lambda x: 1.1 * case.torch(x), "other": case.torch}
        )
        assert "differs from torch in fp32" in found["megapar"].status
        assert [found[name].status for name in ("torch", "other")] == ["another result", "ok"]
        assert found["megapar"].ms == found["torch"].ms == {}


def test_flex_attention_computes_the_same(
    bench: measuring.Stopwatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the harness compiles it, with block masks of several inputs and without a second compilation. A CPU's refusal
    of the backward pass is taken out, because it is for lack of a kernel. FLOPs are of the pairs in the mask."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *qkv: None)
    documents = attention.Model(attention.DOCUMENTS, "small", 150, 4, 2, 16, window=40, documents=(90, 1, 59))
    sinks = attention.Model(attention.SINKS, "small", 150, 4, 2, 16, window=40, sinks=True)
    # FlexAttention is no peer of dropout, nor of unlike widths.
    models = (documents, sinks, *(model for model in attention.TINY if not model.p and not model.v_dim))
    todo = list(attention.cases(models, "torch"))
    session = run.KernelSession(run.Options(json=tmp_path / "out.json"), bench, {}, todo)
    for case in todo:
        exact = measuring.evaluate(bench, case, case.exact, wide=True)
        op = session.compiled(case)["torch.compile"]
        assert max(measuring.errors(measuring.evaluate(bench, case, op), exact)) < 1e-6
        assert max(measuring.errors(measuring.evaluate(bench, case, case.ours), exact)) < 1e-6
        inputs = measuring.inputs_of(bench, case, 1)
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(op(*inputs), case.torch(*inputs))
        pairs = int(inputs[-1].seen.sum())
        assert case.least == (4 * pairs * 4 * 16, 10 * pairs * 4 * 16)


def test_rounds_of_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and torch come first and compiled ones last, each is in the file before the next begins, and a wrong kernel
    fails the program after all others."""
    file = tmp_path / "out.json"
    seen: list[tuple[str, ...]] = []

    def compete(bench: Any, case: Any, contenders: dict[str, Any]) -> dict[str, Any]:
        rows = json.loads(file.read_text())["rows"] if seen else []
        known = {(row["op"], name) for row in rows for name, c in row["contenders"].items() if c["status"] != "not run"}
        assert known >= {(op, name) for op, *names in seen for name in names}
        seen.append((case.op, *contenders))
        wrong = case.op == "RMSNorm" and "megapar" in contenders
        return {name: measuring.Contender("ok" if not wrong else "it differs") for name in contenders}

    monkeypatch.setattr(run, "compete", compete)
    monkeypatch.setattr(peers, "liger", dict)
    with pytest.raises(ranks.BenchmarkError, match=r"^RMSNorm tiny 8x32: it differs$") as raised:
        harness.run(run.measure, run.Options(dry_run=True, only=("RMSNorm",), json=file))
    assert raised.value.exit_code == 70
    assert "WRONG: RMSNorm tiny 8x32" in capsys.readouterr().out
    rounds = (("megapar", "torch"), ("Liger-Kernel",), ("torch.compile",))
    assert seen == [(op, *names) for names in rounds for op in ("RMSNorm", "add + RMSNorm")]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before a kill is there: the file is never half written."""
    file = tmp_path / "out.json"
    write_json(file, {"first": 0})
    before = file.stat().st_ino
    write_json(file, {"first": 1})
    assert file.stat().st_ino != before, "written in place"
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match="No space left"):
        write_json(file, {"second": 2})
    assert json.loads(file.read_text()) == {"first": 1}
    assert list(tmp_path.iterdir()) == [file], "a draft is left behind"


# Training


def test_no_failure_ends_another_contender(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What matters most comes first. 8b has no memory, and this is a result. On 1b megapar crashes, and so the
    program fails. All others go on until the time is up, by a clock with a minute for each; each is in the file before
    the next begins."""
    clock = [0.0]
    file = tmp_path / "out.json"

    def measure(config: Any, kind: type, steps: int, target: torch.device) -> Any:
        if config.kernels.loss_chunk:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if kind is Megapar:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"seconds": [1.0], "results": [[1.0, 1.0]], "peak_bytes": 1}

    def contenders() -> list[tuple[str, str, str]]:
        found = json.loads(file.read_text())["runs"]
        return sorted((run["workload"], c["contender"], c["status"]) for run in found for c in run["contenders"])

    take = gpu.Training.take
    counts = []

    def timed(self: Any, kind: Any, name: Any) -> None:
        counts.append(len(contenders()))
        clock[0] += 60
        take(self, kind, name)

    monkeypatch.setattr(gpu, "measure_steps", measure)
    monkeypatch.setattr(gpu.Training, "take", timed)
    for module in (gpu, harness):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    options = gpu.Options(dry_run=True, workloads=("8b", "1b"), profile=False, minutes=3.5, json=file)
    with pytest.raises(ranks.BenchmarkError, match=r"^1b, megapar: a rank ended without a result, exit code -9$"):
        harness.run(gpu.measure, options)
    crash = "a rank ended without a result, exit code -9"
    lacking = [("8b", kind, "out of memory") for kind in ("megapar", "torch")]
    assert contenders() == sorted([*lacking, ("1b", "megapar", crash), ("1b", "torch", "ok")])
    assert counts == list(range(4))
    assert json.loads(file.read_text())["not_run"] == ["8b, compiled", "1b, compiled"]
    assert "8b, megapar: out of memory" in capsys.readouterr().out


def test_a_process_that_hangs_is_ended() -> None:
    with pytest.raises(ranks.BenchmarkError, match=r"not done after 0\.5 seconds"):
        ranks.run_ranks(1, "cpu", lambda target: time.sleep(600), seconds=0.5)


def test_lack_of_memory_is_told_from_other_failures() -> None:
    for line in (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.81 GiB",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: Triton Error [CUDA]: out of memory",
    ):
        assert gpu.out_of_memory(RuntimeError(f"Traceback\n{line}"))
    assert not gpu.out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


class Watched(gpu_contenders.RandomWeights):
    """Weights remembering how many of them were there at once."""

    alive: weakref.WeakSet[torch.Tensor]
    most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        drawn = super().__getitem__(name)
        self.alive.add(drawn)
        self.most = max(self.most, len(self.alive))
        return drawn


@pytest.mark.parametrize("name", ["1b", "8b-16-layers"], ids=["tied", "untied"])
def test_contenders_start_equal_and_hold_no_second_model(name: Any) -> None:
    """Weights do not depend on the order of requests for them. While a contender is built at most two of them are
    there: the one being copied and the one before it."""
    config = gpu.make_config(gpu.Options(dry_run=True), name)
    weights = gpu.RandomWeights(config.model, CPU)
    backward = {key: weights[key] for key in reversed(list(weights))}
    assert all(torch.equal(weights[key], backward[key]) for key in weights)
    assert backward["layers.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert backward["norm.weight"].mean().item() == pytest.approx(1.0, abs=0.01)
    for kind in (Megapar, gpu_contenders.MixedPrecision):
        watched = Watched(config.model, CPU)
        watched.alive = weakref.WeakSet()
        assert kind(config, watched, CPU)
        assert 0 < watched.most <= 2, kind


def test_figures_stand_beside_predictions(tmp_path: Path) -> None:
    """With a time made up: ratios of time and memory, and a mark on the one off by more than 15 %."""
    options = gpu.Options(json=tmp_path / "out.json")
    session = gpu.Training(options, {"peak_tflops": 989.0, "hardware": "NVIDIA H200"})
    config = gpu.make_config(options, "1b")
    run = session.run_of("1b", config)
    prediction = gpu.predict(config, session.machine)
    planned = sum(run["predicted"]["bytes"].values())
    assert planned > 18 * run["parameters"]
    seconds = prediction.seconds * 1.25
    found = {"status": "ok", "seconds": [seconds], "results": [[1.0, 1.0]], "peak_bytes": planned}
    row = {"name": "megapar", "contender": "megapar"} | found | session.figures(found, run)
    assert row["mfu"] == pytest.approx(prediction.mfu / 1.25)
    run["contenders"].append(row)
    columns = {column.header: list(column.cells) for column in gpu.speed_table(options, [run]).columns}
    assert columns["time/predicted"] == ["1.25 <-- off"]
    assert columns["peak/planned"] == ["1.00"]
    assert columns["tokens/s"] == [f"{prediction.tokens_per_second_per_gpu / 1.25:,.0f}"]


# As the profiler prints them, of cuBLAS, cuDNN, CUTLASS, FlashAttention, torch and Triton, some of them cut.
NAMES = """
matrix products: nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN
matrix products: sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off
matrix products: void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)
matrix products: void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, true, false>(Params)
matrix products: void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4>()
attention: cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0
attention: void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, float, 128, 64>(Params)
attention: void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, float, 128, 64>(Params)
attention: void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>()
products of experts: _ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_17GroupProblemShapeIN4cu
attention: fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>::Params)
other kernels: void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>()
other kernels: void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(float*)
optimizer and norm: multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>()
other kernels: void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>()
other kernels: void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<2u>, unsigned int, 3>()
other kernels: Memset (Device)
"""
FILES = {  # of the other files: other kernels
    **{"adamw": "optimizer and norm", "grouped": "products of experts"},
    **dict.fromkeys(("attention_tiles", "delta_kernels", "delta_backward_kernels"), "attention"),
}
OF_TILES = {"scaled_grouped_kernel": "products of experts", "scaled_gradient_kernel": "matrix products"}


def test_kernels_are_told_apart_by_their_names() -> None:
    """Ours are read from the sources, so renamed and new ones count too."""
    named = [tuple(line.split(": ", 1)) for line in NAMES.strip().splitlines()]
    for file in (ROOT / "kernels/megapar_kernels").glob("*.py"):
        names = re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
        named += [(OF_TILES.get(name) or FILES.get(file.stem, gpu.OTHERS), name) for name in names]
    assert len(named) > 26
    for category, name in named:
        assert gpu.categorize(name) == category, name


def test_a_profile_is_summed_by_kernel_and_category() -> None:
    launches = [("nvjet_a", 3000.0), ("_rotate_kernel", 500.0), ("nvjet_a", 1000.0), ("Memset (Device)", 250.0)]
    kernels = gather(launches)
    assert kernels == [Kernel("nvjet_a", 2, 4.0), Kernel("_rotate_kernel", 1, 0.5), Kernel("Memset (Device)", 1, 0.25)]
    config = gpu.make_config(gpu.Options(), "1b")
    prediction = gpu.predict(config, gpu.machine_of({"peak_tflops": 0.0}))
    prediction = replace(prediction, busy=dict.fromkeys(prediction.busy, 4e-3))
    rows = {row["category"]: row for row in gpu.by_category(kernels, config, gpu.predicted_ms(config, prediction))}
    assert rows["matrix products"] == pytest.approx(
        {"category": "matrix products", "ms": 4.0, "calls": 2, "predicted_ms": 4.0}
    )
    assert rows["attention"] == pytest.approx({"category": "attention", "ms": 0, "calls": 0, "predicted_ms": 8.0})
    assert rows["other kernels"]["ms"] == 0.75
    table = gpu.profile_table({"workload": "1b", "step_ms": 5.0, "categories": list(rows.values())})
    assert list(table.columns[4].cells) == ["1.00", "0.00 <-- off", "0.19 <-- off", "0.00 <-- off"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("program", [run, gpu])
def test_without_a_gpu_only_dry_runs_are_possible(program: Any) -> None:
    with pytest.raises(ConfigError, match="--dry_run"):
        harness.run(program.measure, program.Options())


@pytest.mark.slow
def test_dry_training_on_one_gpu_computes_the_same_everywhere(tmp_path: Path) -> None:
    """megapar in bf16 and plain PyTorch with fp32 main weights, eager and compiled, have the same losses and norms:
    with tied embeddings, and with full recompute and a chunked loss."""
    flags = ("--workloads", "1b", "8b", "--micro_batch_size", "2", "--micro_batches", "2", "--steps", "1")
    results = door(tmp_path, "gpu", "--dry_run", *flags)
    assert [(found["workload"], found["config"]["train"]["recompute"]) for found in results["runs"]] == [
        ("1b", "none"),
        ("8b", "full"),
    ]
    for found in results["runs"]:
        ours, *others = found["contenders"]
        assert [c["name"] for c in found["contenders"]] == ["megapar", "PyTorch", "PyTorch, compiled"]
        assert len(ours["results"]) == 3
        for other in others:
            assert other["results"] == [pytest.approx(result, rel=5e-3) for result in ours["results"]]
        for contender in found["contenders"]:
            figures = ("seconds", "ms", "tokens_per_second", "mfu", "peak_bytes")
            assert [contender[name] for name in figures] == [None] * 5
    assert results["not_run"] == []
    assert results["profile"]["workload"] == "1b"
    assert all(row["ms"] is None for row in results["profile"]["categories"])


@pytest.mark.slow
def test_dry_training_of_mixtures_is_that_of_hugging_face(tmp_path: Path) -> None:
    """With Mixtral's names of experts and Qwen3's. In bf16 few tokens go to other experts, because a router's logits
    are rounded there."""
    pytest.importorskip("transformers")
    flags = ("--micro_batch_size", "2", "--micro_batches", "2", "--steps", "1")
    results = door(tmp_path, "gpu", "--dry_run", "--workloads", "qwen3-4-layers", "mixtral-2-layers", *flags)
    for found in results["runs"]:
        ours, *others = found["contenders"]
        assert [other["name"] for other in others] == ["Hugging Face", "Hugging Face, compiled"]
        for other in others:
            assert other["results"] == [pytest.approx(result, rel=1e-2) for result in ours["results"]]
    assert "products of experts" in {row["category"] for row in results["profile"]["categories"]}
