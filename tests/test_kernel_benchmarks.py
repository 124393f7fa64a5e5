"""The GPU benchmarks in their dry modes, at a size of seconds: every op, direction and contender runs, nothing is
claimed that was not measured, and a wrong kernel is found out."""

import ast
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megapar_kernels.backend import Kernels
from megapar_kernels.dispatch import HAS_TRITON, triton

from megapar.errors import ConfigError, StorageError
from megapar.system.atomic_files import write_json
from tests.support.kernel_checks import needs_triton  # which also repairs Triton's interpreter

ROOT = Path(__file__).parents[1]
BOTH_WAYS = {
    *("cross entropy", "RMSNorm", "add + RMSNorm", "LayerNorm", "add + LayerNorm", "SwiGLU", "GeGLU", "ReLU²"),
    *("bias + GELU", "RoPE", "dropout + add", "causal softmax", "attention"),
}
ONE_WAY = {"AdamW": "forward", "square sum": "forward", "weight gradient": "forward", "linear cross entropy": "both"}


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/benchmark.py"), *words]
    settings = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run(command, **settings)


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of tools/benchmarks, imported anew."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    for module in [module for module in sys.modules if module.startswith("benchmarks")]:
        monkeypatch.delitem(sys.modules, module)
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/benchmarks/kernels/run.py"""
    return benchmark("kernels.run", monkeypatch)


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/benchmarks/kernels/tune.py"""
    return benchmark("kernels.tune", monkeypatch)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/benchmarks/gpu.py"""
    return benchmark("gpu", monkeypatch)


def in_a_fork(body: Callable[[], object]) -> int:
    """Exit code of a forked process that does `body`; minus the number of the signal that killed it."""
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def kill_myself(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_dry_run_has_every_op_in_every_direction_and_no_figure(tmp_path: Path) -> None:
    """The kernels are interpreted where triton is installed: each is compared with torch in fp32."""
    if HAS_TRITON and triton.__version__ < "3.7":
        pytest.skip(f"the interpreter of triton {triton.__version__} does not understand numpy {np.__version__}")
    file = tmp_path / "out.json"
    done = run("kernels", "--dry_run", "--json", str(file), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())
    assert results["kernels"]["norm"] == ("triton" if HAS_TRITON else "torch")
    expected = {(op, way) for op in BOTH_WAYS for way in ("forward", "backward", "both")} | set(ONE_WAY.items())
    assert {(row["op"], row["direction"]) for row in results["rows"]} == expected
    assert results["not_run"] == results["wrong"] == []
    for row in results["rows"]:
        contenders = row["contenders"]
        assert {"megapar", "torch", "torch.compile", "Liger-Kernel"} <= set(contenders)
        assert [contenders[name]["status"] for name in ("megapar", "torch", "torch.compile")] == ["ok"] * 3, row
        assert 0 <= contenders["megapar"]["error"] < 1e-5
        assert [row[name] for name in ("ms", "bytes", "gb_per_second", "tflops", "share")] == [None] * 5
        assert all(contender["ms"] is None for contender in contenders.values())
        assert all(target["reached"] is None for target in row["targets"])
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_targets_are_judged_by_what_was_measured(program: ModuleType) -> None:
    """With times made up: rates over the fewest bytes, ratios, and targets reached and missed."""
    case = next(case for case in program.cases(program.LLAMA_8B, Kernels()) if case.shape == "8192x131072")
    ours = program.Contender(bytes=10, ms={"forward": 1.0, "backward": 1.4, "both": 2.4})
    liger = program.Contender(ms={"forward": 3.0, "backward": 3.0, "both": 6.0})
    missing = {name: program.Contender("not installed") for name in ("torch", "torch.compile")}
    found = {"megapar": ours, "Liger-Kernel": liger, **missing}
    forward, backward, both = program.rows(case, found, copy=3000.0)
    assert forward["gb_per_second"] == pytest.approx(2 * 8192 * 131072 / 1e6)
    assert backward["gb_per_second"] == pytest.approx(4 * 8192 * 131072 / 1.4e6)
    assert both["share"] == pytest.approx(6 * 8192 * 131072 / 2.4e6 / 3000)
    assert both["over"] == {"Liger-Kernel": 2.5, "torch": None, "torch.compile": None}
    reached = {target["figure"]: target["reached"] for target in both["targets"]}
    assert reached == {"share": True, "Liger-Kernel": False, "ms": True, "torch": None, "torch.compile": None}


def test_backward_is_both_without_forward(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    where, contender, times = torch.device("cpu"), program.Contender(), iter((1.0, 2.5))
    bench = program.Bench(where, torch.float32, program.Stopwatch(where, dry_run=True))
    monkeypatch.setattr(bench.watch, "median_ms", lambda run: next(times))
    case = next(case for case in program.cases(program.TINY, Kernels()) if case.op == "RoPE")
    program.measure(bench, case, case.ours, contender)
    assert contender.ms == {"forward": 1.0, "both": 2.5, "backward": 1.5}


def test_a_wrong_kernel_fails_and_is_not_timed(program: ModuleType) -> None:
    where = torch.device("cpu")
    bench = program.Bench(where, torch.float32, program.Stopwatch(where, dry_run=True))
    case = next(case for case in program.cases(program.TINY, Kernels()) if case.op == "SwiGLU")

    def wrong(x: torch.Tensor) -> Any:
        return case.torch(x) * (1 + 1e-4)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (1 - 1e-4)

    for op in (wrong, lambda x: Backward.apply(case.torch(x))):
        found, problem = program.compete(bench, replace(case, ours=op))
        assert "differs from torch in fp32" in problem
        assert found["megapar"].ms == {}
        assert found["torch"].status == "ok"


def test_a_wrong_kernel_ends_the_program_after_all_others(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.kernels import ops

    monkeypatch.setattr(ops.norms, "rms_norm", lambda x, weight, eps, impl: x)
    with pytest.raises(program.KernelError, match=r"^RMSNorm tiny 8x32: ") as raised:
        program.main(program.Options(dry_run=True, only=("RMSNorm",)))
    assert raised.value.exit_code == 70
    printed = capsys.readouterr().out
    assert "WRONG: RMSNorm tiny 8x32" in printed
    assert "add + RMSNorm" in printed


# Nothing measured is ever lost


def test_a_kill_leaves_what_was_measured(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Killed in its second op, tools/benchmark.py kernels has written the first."""
    file = tmp_path / "out.json"
    compete, calls = program.compete, []

    def once(bench: Any, case: Any) -> Any:
        calls.append(case)
        return compete(bench, case) if len(calls) == 1 else kill_myself()

    monkeypatch.setattr(program, "compete", once)
    assert in_a_fork(lambda: program.main(program.Options(dry_run=True, json=file))) == -signal.SIGKILL
    found = json.loads(file.read_text())
    assert {(row["op"], row["direction"]) for row in found["rows"]} == {
        ("cross entropy", direction) for direction in ("forward", "backward", "both")
    }
    assert found["rows"][0]["contenders"]["megapar"]["status"] == "ok"
    assert found["rows"][0]["contenders"]["torch.compile"]["status"] == "not run"


def test_a_kill_leaves_what_was_trained(training: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Killed while its second contender runs, tools/benchmark.py gpu has written the first."""
    file = tmp_path / "out.json"
    take, calls = training.Session.take, []

    def once(self: Any, kind: str, name: str) -> Any:
        calls.append(kind)
        return take(self, kind, name) if len(calls) == 1 else kill_myself()

    monkeypatch.setattr(training, "measure", lambda *_: {"seconds": [1.0], "results": [[1.0, 1.0]], "peak_bytes": 1})
    monkeypatch.setattr(training.Session, "take", once)
    options = training.Options(dry_run=True, workloads=("1b",), profile="none", json=file)
    assert in_a_fork(lambda: training.main(options)) == -signal.SIGKILL
    (found,) = json.loads(file.read_text())["runs"]
    assert [(row["contender"], row["status"]) for row in found["contenders"]] == [("megapar", "ok")]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    write_json(file, {"first": 0})
    before = file.stat().st_ino
    write_json(file, {"first": 1})
    assert file.stat().st_ino != before, "written in place"
    assert list(tmp_path.iterdir()) == [file]

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        write_json(file, {"second": 2})
    assert json.loads(file.read_text()) == {"first": 1}
    assert list(tmp_path.iterdir()) == [file], "a draft is left behind"


# What is measured first, and what when time is up


def test_ours_and_torch_come_first_and_compiled_ones_last(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows are completed round by round: after each measurement the file has what is known."""
    file, seen = tmp_path / "out.json", []

    def compete(bench: Any, case: Any) -> Any:
        seen.append(("first", case.op))
        return {"megapar": program.Contender(), "torch": program.Contender()}, ""

    def later(bench: Any, case: Any, name: str) -> Any:
        seen.append((name, case.op))
        if name == "torch.compile" and case.op == "RMSNorm":
            statuses = [row["contenders"][name]["status"] for row in json.loads(file.read_text())["rows"]]
            assert set(statuses) == {"not run"}
        return program.Contender()

    monkeypatch.setattr(program, "compete", compete)
    monkeypatch.setattr(program, "challenge_later", later)
    monkeypatch.setattr(program.peers, "liger", dict)
    program.main(program.Options(dry_run=True, only=("RMSNorm",), json=file))
    ops = ["RMSNorm", "add + RMSNorm"]
    assert seen == [(name, op) for name in ("first", "Liger-Kernel", "torch.compile") for op in ops]
    found = json.loads(file.read_text())
    assert found["not_run"] == []
    assert all(c["status"] == "ok" for row in found["rows"] for c in row["contenders"].values())


def test_without_liger_kernel_its_column_says_so_once(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ImportError("No module named 'liger_kernel'")

    monkeypatch.setattr(program.peers, "liger", missing)
    program.main(program.Options(dry_run=True, only=("RMSNorm",), json=tmp_path / "out.json"))
    assert capsys.readouterr().err.count("no Liger-Kernel") == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["contenders"]["Liger-Kernel"]["status"] for row in found["rows"]} == {"not installed"}
    assert {row["contenders"]["torch.compile"]["status"] for row in found["rows"]} == {"ok"}


def test_no_op_is_begun_when_the_time_is_up(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each op takes a minute of a clock that is made up: in two and a half, three are begun."""
    clock, file = [0.0], tmp_path / "out.json"

    def compete(bench: Any, case: Any) -> Any:
        clock[0] += 60
        return {"megapar": program.Contender()}, ""

    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(program, "compete", compete)
    monkeypatch.setattr(program.peers, "liger", dict)
    program.main(program.Options(dry_run=True, only=("Norm",), minutes=2.5, json=file))
    found = json.loads(file.read_text())
    assert {row["op"] for row in found["rows"]} == {"RMSNorm", "add + RMSNorm", "LayerNorm"}
    first, *later = found["not_run"]
    assert first == "add + LayerNorm tiny 8x32: megapar and torch"
    assert len(later) == 8
    assert later[-1] == "add + LayerNorm tiny 8x32: torch.compile"


def test_the_order_of_training(training: ModuleType) -> None:
    """megapar on everything, its profile, plain torch, compiled torch; what a user asks for in another order too."""
    names = training.default_workloads(large=True)
    assert names == ["1b", "3b", "8b-16-layers", "8b"]
    assert training.default_workloads(large=False) == ["1b", "3b"]
    options = training.Options(contenders=("compiled", "torch", "megapar"))
    items = training.plan(options, names)
    assert [kind for kind, _ in items] == ["megapar"] * 4 + ["profile"] + ["torch"] * 4 + ["compiled"] * 4
    assert items[4] == ("profile", "1b")
    assert [name for _, name in items if _ == "torch"] == names
    assert training.plan(replace(options, contenders=("torch",)), ["3b"]) == [("torch", "3b")]
    named = replace(options, contenders=("megapar",), profile="8b")
    assert training.plan(named, ["3b"]) == [("megapar", "3b"), ("profile", "8b")]


@pytest.fixture
def made_up(training: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Contenders with made-up results, and a clock of which each takes a minute. By micro-batch: 1b and 3b train, 8b
    has no memory."""
    clock = [0.0]

    def measure(config: Any, kind: type, steps: int, where: torch.device) -> Any:
        if config.train.micro_batch_size == 1 and config.train.recompute == "full":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return {"seconds": [1.0], "results": [[1.0, 1.0]], "peak_bytes": 1}

    take = training.Session.take

    def timed(self: Any, kind: str, name: str) -> Any:
        clock[0] += 60
        return take(self, kind, name)

    monkeypatch.setattr(training, "measure", measure)
    monkeypatch.setattr(training.Session, "take", timed)
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


@pytest.mark.usefixtures("made_up")
def test_no_contender_is_begun_when_the_time_is_up(training: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = training.Options(dry_run=True, workloads=("1b", "3b"), profile="none", minutes=2.5, json=file)
    training.main(options)
    found = json.loads(file.read_text())
    measured = [(row["contender"], run["workload"]) for run in found["runs"] for row in run["contenders"]]
    assert measured == [("megapar", "1b"), ("torch", "1b"), ("megapar", "3b")]
    assert found["not_run"] == ["3b, torch", "1b, compiled", "3b, compiled"]


@pytest.mark.usefixtures("made_up")
def test_too_little_memory_is_a_result(
    training: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is written down beside what the model of memory says, a smaller workload takes the place, others go on, and
    the program ends well."""
    file = tmp_path / "out.json"
    options = training.Options(dry_run=True, workloads=("8b", "1b"), contenders=("megapar", "torch"), json=file)
    training.main(replace(options, profile="none"))
    runs = {run["workload"]: run for run in json.loads(file.read_text())["runs"]}
    assert list(runs) == ["8b", "8b-4096", "1b"]
    for name in ("8b", "8b-4096"):
        assert [row["status"] for row in runs[name]["contenders"]] == ["out of memory"] * 2
        assert all("Tried to allocate" in row["detail"] for row in runs[name]["contenders"])
        assert all(row["predicted"]["peak_bytes"] > 0 for row in runs[name]["contenders"])
    assert [row["status"] for row in runs["1b"]["contenders"]] == ["ok"] * 2
    assert "8b, megapar: out of memory; by the model of memory it needs" in capsys.readouterr().out


def test_a_crash_ends_no_other_contender_and_fails_the_program(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"

    def measure(config: Any, kind: type, steps: int, where: torch.device) -> Any:
        if kind is training.layouts.Megapar:
            kill_myself()
        return {"seconds": [1.0], "results": [[1.0, 1.0]], "peak_bytes": 1}

    monkeypatch.setattr(training, "measure", measure)
    options = training.Options(dry_run=True, workloads=("1b",), profile="none", json=file)
    with pytest.raises(training.TrainingError, match="1b, megapar: a rank ended without a result, exit code -9"):
        training.main(options)
    (found,) = json.loads(file.read_text())["runs"]
    assert [row["status"] for row in found["contenders"][1:]] == ["ok", "ok"]


def test_a_process_that_hangs_is_ended(training: ModuleType) -> None:
    with pytest.raises(training.layouts.BenchmarkError, match=r"not done after 0\.5 seconds"):
        training.layouts.run_ranks(1, "cpu", lambda where: time.sleep(600), seconds=0.5)


def test_lack_of_memory_is_told_from_other_failures(training: ModuleType) -> None:
    for line in (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.81 GiB",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: Triton Error [CUDA]: out of memory",
    ):
        assert training.out_of_memory(RuntimeError(f"Traceback\n{line}"))
    assert not training.out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


# Weights and predictions


def test_contenders_start_equal_and_hold_no_second_model(training: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights do not depend on the order in which they are asked for, and while a contender is built at most two of
    them are there: the one that is copied and the one before it."""
    options, where = training.Options(dry_run=True), torch.device("cpu")
    for name in ("1b", "8b-16-layers"):  # tied and untied
        config = training.make_config(options, name, large=True)
        weights = training.RandomWeights(config.model, where)
        forward = {key: weights[key] for key in weights}
        again = training.RandomWeights(config.model, where)
        backward = {key: again[key] for key in reversed(list(again))}
        assert all(torch.equal(forward[key], backward[key]) for key in weights)
        assert ("head.weight" in list(weights)) == (name != "1b")
        assert forward["layers.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
        assert forward["norm.weight"].mean().item() == pytest.approx(1.0, abs=0.01)

        alive: set[int] = set()
        most = [0]

        class Watched(training.RandomWeights):  # type: ignore[name-defined,misc]
            def __getitem__(self, key: str, alive: set[int] = alive, most: list[int] = most) -> torch.Tensor:
                drawn = super().__getitem__(key)
                alive.add(id(drawn))
                most[0] = max(most[0], len(alive))
                weakref.finalize(drawn, alive.discard, id(drawn))
                return drawn

        for kind in ("megapar", "torch"):
            contender = training.contender_class(kind, dry_run=True)(config, Watched(config.model, where), where)
            assert contender is not None
            assert 0 < most[0] <= 2, kind


def test_figures_stand_beside_predictions(training: ModuleType, tmp_path: Path) -> None:
    """With a time made up: ratios of all four figures, and a mark on those that are off by more than 15 %."""
    options = training.Options(json=tmp_path / "out.json")
    facts = {"memory_bytes": 150 * 10**9, "peak_tflops": 989.0}
    session = training.Session(options, facts, 0.0)
    config = training.make_config(options, "1b", large=True)
    run = session.run_of("1b", config)
    prediction = session.predict(config)
    seconds = 8 * prediction.total_ms / 1e3 * 1.25
    found = {"status": "ok", "seconds": [seconds], "results": [[1.0, 1.0]], "peak_bytes": prediction.peak_bytes}
    row = {"name": "megapar", "contender": "megapar"} | found | session.figures("megapar", found, run, config)
    assert row["ratios"] == pytest.approx({"ms": 1.25, "tokens_per_second": 0.8, "mfu": 0.8, "peak_bytes": 1.0})
    run["contenders"].append(row)
    marks = list(training.prediction_table([run]).columns[-1].cells)
    assert marks == ["<-- off", "<-- off", "<-- off", ""]


def test_kernels_are_told_apart_by_their_names(training: ModuleType) -> None:
    """Names as the profiler prints them, of cuBLAS, cuDNN, CUTLASS, FlashAttention, torch and Triton."""
    names = {
        "matrix products": (
            "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN",
            "nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_TNN",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
            "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, true, false>(Params)",
            "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4>()",
        ),
        "attention": (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31_64x64x128_1x2x1_cga1x1x1_kernel0_0",
            "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, float, 128, 64>(Params)",
            "void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, float, 128, 64>(Params)",
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, false, false,"
            " cutlass::bfloat16_t>, false, true>(pytorch_flash::Flash_fwd_params)",
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>(Params)",
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>::Params)",
        ),
        "norms": (
            "_norm_forward_kernel",
            "_norm_backward_wide_kernel",
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>()",
        ),
        "activation": ("_activation_backward_kernel",),
        "rope": ("_rotate_kernel",),
        "cross entropy": (
            "_statistics_kernel",
            "_gradient_kernel",
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(float*)",
        ),
        "optimizer and norm": (
            "_adamw_kernel",
            "_square_sum_kernel",
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4>>()",
        ),
        "copies and other": (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>()",
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>()",
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<2u>, unsigned int, 3>()",
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::sum_functor<float>>>()",
            "void at::native::(anonymous namespace)::indexFuncLargeIndex<float, long, unsigned int, 2, 2, -2, true>()",
            "Memcpy DtoH (Device -> Pinned)",
            "Memset (Device)",
        ),
    }
    assert list(names) == list(training.gpu_profile.CATEGORIES)
    wrong = {name: found for c, group in names.items() for name in group if (found := categorize(training, name)) != c}
    assert not wrong


def categorize(training: ModuleType, name: str) -> str:
    return training.gpu_profile.categorize(name)


def test_every_kernel_of_ours_has_its_category(training: ModuleType) -> None:
    """Renamed or new ones too: the names are read from the sources."""
    expected = {
        "norms": "norms", "activations": "activation", "rope": "rope", "cross_entropy": "cross entropy",
        "adamw": "optimizer and norm", "softmax": "attention", "dropout": "copies and other",
    }  # fmt: skip
    found = 0
    for file in sorted((ROOT / "kernels/megapar_kernels").glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found += 1
                assert categorize(training, node.name) == expected[file.stem], node.name
    assert found > 10


def test_a_profile_is_summed_by_kernel_and_category(training: ModuleType) -> None:
    launches = [("nvjet_a", 3000.0), ("_rotate_kernel", 500.0), ("nvjet_a", 1000.0), ("Memset (Device)", 250.0)]
    kernels = training.gpu_profile.gather(launches)
    assert [tuple(kernel) for kernel in kernels] == [
        ("nvjet_a", 2, 4.0), ("_rotate_kernel", 1, 0.5), ("Memset (Device)", 1, 0.25)
    ]  # fmt: skip
    predicted = dict.fromkeys(training.gpu_profile.CATEGORIES, 1.0)
    rows = {row["category"]: row for row in training.gpu_profile.by_category(kernels, predicted, 4)}
    assert rows["matrix products"] == {"category": "matrix products", "ms": 4.0, "calls": 2, "predicted_ms": 4.0}
    assert rows["norms"]["ms"] == 0.0
    found = {"workload": "1b", "step_ms": 5.0, "kernels": kernels, "categories": list(rows.values())}
    text = training.gpu_profile.categories_as_text(found)
    assert "matrix products           4.00       4.00   1.00         2\n" in text
    assert "copies and other          0.25       4.00   0.06         1  <-- off" in text
    kernels_text = training.gpu_profile.kernels_as_text(found, most=2)
    assert "4.000   84.2%         2  matrix products     nvjet_a" in kernels_text
    assert "Memset" not in kernels_text


# Launch configurations


def test_every_candidate_is_tried_and_wrong_ones_are_told(tune: ModuleType, tmp_path: Path) -> None:
    """Interpreted at tiny shapes: all candidates compute what torch does, today's configuration is among them, and one
    that covers half a row is listed as wrong, which shows that candidates reach the kernels."""
    file = tmp_path / "tune.json"
    tune.main(tune.Options(dry_run=True, json=file))
    results = json.loads(file.read_text())["results"]
    assert {(r["op"], r["what"]) for r in results} == {
        *(("RMSNorm", "forward"), ("RMSNorm", "backward"), ("add + RMSNorm", "forward")),
        *(("add + RMSNorm", "backward"), ("cross entropy", "statistics"), ("cross entropy", "gradient")),
        *(("AdamW", "update"), ("RoPE", "forward"), ("RoPE", "backward")),
    }
    for result in results:
        assert len(result["candidates"]) > 2
        assert sum(row["today"] for row in result["candidates"]) == tune.interpreting()
        assert all(row["status"] == "ok" and row["ms"] is None for row in result["candidates"]), result


@needs_triton
def test_candidates_reach_the_kernels(tune: ModuleType, tmp_path: Path) -> None:
    """Tiles of half a row, in the norms as they are and in their copy with a staged loop, compute something else."""
    where = torch.device("cpu")
    bench = tune.Bench(where, torch.float32, tune.Stopwatch(where, dry_run=True))
    kernels = tune.device.choose_kernels("triton", where)
    case = next(case for case in tune.cases(tune.TINY, kernels) if case.op == "RMSNorm")
    staged = tune.with_stages(2, tmp_path)
    for module in (tune.norms, staged):
        for function in ("forward_config", "backward_config"):
            half = tune.replacement(module, function, (1, 16, 1))
            candidate = tune.Candidate("half a row", False, (half, (tune.ops, "norms", module)))
            (row,) = tune.try_grid(bench, tune.Grid(case, "forward", "forward", (candidate,)))
            assert "differs from torch in fp32" in row["status"]
    assert tune.ops.norms is tune.norms


def test_what_fails_is_told_after_all_others(tune: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that does not run at all, and a candidate that computes something else."""
    file = tmp_path / "tune.json"
    wrong = {"config": "units 3", "today": False, "ms": None, "status": "KernelError: differs"}

    def try_grid(bench: Any, grid: Any) -> Any:
        if grid.case.op == "AdamW":
            raise RuntimeError("no kernel image")
        return [dict(wrong)]

    monkeypatch.setattr(tune, "try_grid", try_grid)
    with pytest.raises(tune.KernelError, match=r"AdamW 384: RuntimeError: no kernel image; RoPE .* units 3"):
        tune.main(tune.Options(dry_run=True, only=("AdamW", "RoPE"), json=file))
    found = json.loads(file.read_text())
    assert [result["op"] for result in found["results"]] == ["RoPE", "RoPE"]
    assert len(found["failed"]) == 3


def test_the_fastest_candidate_comes_first_and_todays_is_marked(
    tune: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = torch.device("cpu")
    bench = tune.Bench(where, torch.float32, tune.Stopwatch(where, dry_run=True))
    case = next(case for case in tune.cases(tune.TINY, Kernels()) if case.op == "AdamW")
    monkeypatch.setattr(tune, "launched", lambda *_: (16, 8))
    (grid,) = tune.adamw_grids(bench, case)
    times = iter(range(len(grid.candidates), 0, -1))
    monkeypatch.setattr(bench.watch, "median_ms", lambda run: float(next(times)))
    result = tune.describe(grid, tune.try_grid(bench, grid), copy=1.0)
    assert [row["ms"] for row in result["candidates"]] == sorted(row["ms"] for row in result["candidates"])
    assert result["candidates"][-1]["today"]
    assert result["candidates"][0]["share"] == pytest.approx(30 * 384 / 1e6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_only_dry_runs_are_possible(program: ModuleType, tune: ModuleType, training: ModuleType) -> None:
    for module in (program, tune, training):
        with pytest.raises(ConfigError, match="--dry_run"):
            module.main(module.Options())


@pytest.mark.slow
def test_dry_training_on_one_gpu_computes_the_same_everywhere(tmp_path: Path) -> None:
    """megapar in bf16 and plain PyTorch with fp32 main weights, eager and compiled, have the same losses and norms:
    with tied embeddings, and with full recompute and a chunked loss."""
    file = tmp_path / "out.json"
    flags = ("--workloads", "1b", "8b", "--micro_batch_size", "2", "--micro_batches", "2", "--steps", "1")
    done = run("gpu", "--dry_run", *flags, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())
    assert [found["workload"] for found in results["runs"]] == ["1b", "8b"]
    assert [found["recompute"] for found in results["runs"]] == ["none", "full"]
    for found in results["runs"]:
        ours, *others = found["contenders"]
        assert [c["name"] for c in found["contenders"]] == ["megapar", "PyTorch", "PyTorch, compiled"]
        assert len(ours["results"]) == 3
        for other in others:
            assert other["results"] == [pytest.approx(result, rel=5e-3) for result in ours["results"]]
        for contender in found["contenders"]:
            figures = ("seconds", "ms", "tokens_per_second", "mfu", "peak_bytes")
            assert [contender[name] for name in figures] == [None] * 5
            assert contender["ratios"] == {}
    assert results["not_run"] == []
    assert results["profile"]["workload"] == "1b"
    assert all(row["ms"] is None for row in results["profile"]["categories"])
    assert (tmp_path / "out-kernels.txt").read_text().startswith("One step of 1b")
