"""The GPU benchmarks in their dry modes, at a size of seconds: every op, direction and contender runs, nothing is
claimed that was not measured, and a wrong kernel is found out."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from megapar_kernels.backend import Kernels
from megapar_kernels.launch import HAS_TRITON, triton

from megapar.errors import ConfigError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "kernels/benchmarks"
BOTH_WAYS = {
    *("cross entropy", "RMSNorm", "add + RMSNorm", "LayerNorm", "add + LayerNorm", "SwiGLU", "GeGLU", "ReLU²"),
    *("bias + GELU", "RoPE", "dropout + add", "causal softmax", "attention"),
}
ONE_WAY = {"AdamW": "forward", "square sum": "forward", "weight gradient": "forward", "linear cross entropy": "both"}


def run(program: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / program), *flags]
    settings = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run(command, **settings)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """kernels/benchmarks/run.py as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("run", "ops", "peers", "timing", "report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import run  # type: ignore[import-not-found]

    return run


def test_a_dry_run_has_every_op_in_every_direction_and_no_figure(tmp_path: Path) -> None:
    """The kernels are interpreted where triton is installed: each is compared with torch in fp32."""
    if HAS_TRITON and triton.__version__ < "3.7":
        pytest.skip(f"the interpreter of triton {triton.__version__} does not understand numpy {np.__version__}")
    file = tmp_path / "out.json"
    done = run("kernels/benchmarks/run.py", "--dry_run", "--json", str(file), TRITON_INTERPRET="1")
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
    import ops  # type: ignore[import-not-found]

    monkeypatch.setattr(ops.norms, "rms_norm", lambda x, weight, eps, how: x)
    with pytest.raises(program.KernelError, match=r"^RMSNorm tiny 8x32: ") as raised:
        program.main(program.Options(dry_run=True, only=("RMSNorm",)))
    assert raised.value.exit_code == 70
    printed = capsys.readouterr().out
    assert "WRONG: RMSNorm tiny 8x32" in printed
    assert "add + RMSNorm" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_only_dry_runs_are_possible(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import benchmark_gpu  # type: ignore[import-not-found]

    for module in (program, benchmark_gpu):
        with pytest.raises(ConfigError, match="--dry_run"):
            module.main(module.Options())


def test_dry_training_on_one_gpu_computes_the_same_everywhere(tmp_path: Path) -> None:
    """megapar in bf16 and plain PyTorch with fp32 main weights, eager and compiled, have the same losses and norms."""
    file = tmp_path / "out.json"
    flags = ("--models", "llama3.2-1b", "--micro_batch_size", "2", "--global_batch_size", "4", "--steps", "1")
    done = run("tools/benchmark_gpu.py", "--dry_run", *flags, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(file.read_text())["runs"]
    ours, *others = found["contenders"]
    assert [c["name"] for c in found["contenders"]] == ["megapar", "PyTorch", "PyTorch, compiled"]
    assert len(ours["results"]) == 3
    for other in others:
        assert other["results"] == [pytest.approx(result, rel=5e-3) for result in ours["results"]]
        assert other["seconds"] is other["peak_bytes"] is other["mfu"] is None
