"""The choice of an implementation: by device, refused with a reason, and apex called as it documents itself.

NVIDIA's apex is not installed on the machines of these tests; modules of its names and signatures, computing by torch,
take its place, so our calls must fit its signatures.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from megapar_kernels import apex, backend, dispatch
from megapar_kernels.adamw import Decayed, adamw_step
from megapar_kernels.backend import FUSED, Kernels, select
from megapar_kernels.norms import add_rms_norm, layer_norm, rms_norm
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.linear.torch_products import TorchProducts
from megapar.system.device import choose_kernels
from tests.support.kernel_checks import needs_triton, relative_error

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_is_torch_on_a_cpu_and_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select("auto", CPU) == Kernels() == select("torch", GPU)
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    assert select("auto", GPU, "cudnn") == Kernels(*["triton"] * 9, "torch", "cudnn", "triton", "triton")
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    assert select("auto", GPU) == Kernels()
    with pytest.raises(ValueError, match="triton is not installed; pip install triton, or choose torch"):
        select("triton", GPU)


def test_a_backend_that_cannot_serve_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "interpreting", lambda: False)
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    with pytest.raises(ConfigError, match=r"^kernels.backend=triton: needs a GPU, .* choose auto or torch"):
        choose_kernels("triton", CPU)
    with pytest.raises(ValueError, match=r"^kernels.backend=apex: apex is not installed; build it .*pip install"):
        select("apex", GPU)


@pytest.mark.parametrize(
    ("capability", "attention", "masked", "experts"),
    [
        ((8, 0), "torch", "triton", "torch"),
        ((8, 9), "torch", "torch", "torch"),
        ((9, 0), "cudnn", "triton", "triton"),
        ((10, 0), "cudnn", "triton", "torch"),
        ((10, 3), "cudnn", "triton", "torch"),
        ((12, 0), "torch", "torch", "torch"),
    ],
)
def test_a_gpu_gets_the_kernels_of_its_generation(
    capability: tuple[int, int], attention: str, masked: str, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernels = choose_kernels("auto", GPU)
    assert (kernels.attention, kernels.masked_attention, kernels.grouped_products) == (attention, masked, experts)
    assert kernels.norm == "triton"


def test_kernels_are_told_op_by_op() -> None:
    assert str(Kernels()) == "torch"
    assert str(FUSED) == (
        "triton: norm, activation, rope, dropout, cross_entropy, token_rows, grouped_products, "
        "quantize, adamw, masked_attention, linear_attention; "
        "torch: weight_gradient, attention"
    )


def test_the_package_that_pypi_calls_apex_is_recognized_unimported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "apex"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert apex.unusable().endswith("is not NVIDIA's: pip uninstall apex")
    (folder / "optimizers").mkdir()
    (folder / "optimizers/fused_adam.py").touch()
    assert apex.unusable() == f"apex is installed without {', '.join(apex.EXTENSIONS)}"
    for name in apex.EXTENSIONS:
        (tmp_path / f"{name}.py").touch()
    assert apex.unusable() == ""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with apex's names, signatures and meanings."""

    def module(name: str, **functions: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, made)

    def multi_tensor_adam(
        chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float,
        step: int, mode: int, bias_correction: bool, weight_decay: float,
    ) -> None:  # fmt: skip
        assert (chunk, noop.dtype, noop.numel(), mode, bias_correction) == (65536, torch.int32, 1, 1, True)
        for grad, main, exp_avg, exp_avg_sq in zip(*lists, strict=True):
            exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = (exp_avg_sq / (1 - beta2**step)).sqrt() + eps
            main.sub_(lr * (exp_avg / (1 - beta1**step) / root + weight_decay * main))

    def wgrad_gemm_accum_fp32(inputs: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(d_output.float().t() @ inputs.float())

    def norm(x: Tensor, weight: Tensor, shape: Any, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, shape, weight, eps)

    def layer(x: Tensor, weight: Tensor, bias: Tensor, shape: Any, eps: float) -> Tensor:
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    module("amp_C", multi_tensor_adam=multi_tensor_adam)
    module("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
    module("apex")
    module("apex.normalization")
    functions = {"mixed_dtype_fused_rms_norm_affine": norm, "mixed_dtype_fused_layer_norm_affine": layer}
    module("apex.normalization.fused_layer_norm", **functions)


@pytest.mark.usefixtures("stand_in")
def test_apex_norms_and_weight_gradients() -> None:
    x, residual, weight, bias = torch.randn(5, 12), torch.randn(5, 12), torch.randn(12), torch.randn(12)
    assert torch.equal(rms_norm(x, weight, 1e-5, "apex"), F.rms_norm(x, weight.shape, weight, 1e-5))
    assert torch.equal(layer_norm(x, weight, bias, 1e-5, "apex"), layer_norm(x, weight, bias, 1e-5))
    normed, total = add_rms_norm(x, residual, weight, 1e-5, "apex")
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, F.rms_norm(total, weight.shape, weight, 1e-5))
    grad, inputs, main = torch.randn(7, 3).bfloat16(), torch.randn(7, 4).bfloat16(), torch.ones(3, 4)
    TorchProducts("apex").add_weight_gradient(main, grad, inputs)
    assert torch.equal(main, 1 + grad.float().t() @ inputs.float())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("impl", ["torch", "apex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stale_weight_gradient_is_overwritten(impl: Literal["torch", "apex"], dtype: torch.dtype) -> None:
    """Even if it is NaN, and with the bits of an addition to zeros."""
    grad, inputs = torch.randn(7, 3).to(dtype), torch.randn(7, 4).to(dtype)
    stale, zeros = torch.full((3, 4), float("nan")), torch.zeros(3, 4)
    TorchProducts(impl).add_weight_gradient(stale, grad, inputs, overwrite=True)
    TorchProducts(impl).add_weight_gradient(zeros, grad, inputs)
    assert torch.equal(stale, zeros)


@pytest.mark.usefixtures("stand_in")
def test_apex_adamw_decays_and_clips_as_torchs() -> None:
    start, grad = torch.randn(256), torch.randn(256)
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.5}
    found = []
    for impl in ("torch", "apex"):
        main, exp_avg, exp_avg_sq = start.clone(), torch.zeros(256), torch.zeros(256)
        decayed = Decayed.of([(64, 192)], 256, CPU)
        for step in (1, 2, 3):
            clip = torch.tensor(0.5)
            flat = main, grad.clone(), exp_avg, exp_avg_sq, None
            adamw_step(*flat, **options, step=step, decayed=decayed, clip_coefficient=clip, impl=impl)
        found.append(main)
    assert relative_error(found[1], found[0]) < 1e-6


@needs_triton
def test_small_tensors_on_a_gpu_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SMALL", 100)

    class Sized:
        is_cuda = True

        def __init__(self, elements: int):
            self.numel = lambda: elements

    assert [dispatch.fused("triton", Sized(n)) for n in (99, 100)] == [False, True]  # type: ignore[arg-type]
    assert not dispatch.fused("torch", Sized(100))  # type: ignore[arg-type]
