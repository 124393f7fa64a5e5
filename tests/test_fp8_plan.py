"""What plans know of FP8 (train.fp8): products, conversions, bytes kept and sent, and that no search turns it on."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megapar_kernels import backend, dispatch
from megapar_kernels.quantize import packed_width
from megapar_models.build import StageBuilder, build_stages
from megapar_models.registry import presets, validate
from megapar_tools.plan import hardware
from megapar_tools.plan.durations import FP8_PRODUCTS, KERNELS, PRODUCTS, duration, kernel_seconds
from megapar_tools.plan.estimate import Estimator
from megapar_tools.plan.memory import fullest_rank
from megapar_tools.plan.network import Network
from megapar_tools.plan.parts import LayerPart, Parts, meta_batch
from megapar_tools.plan.plan_report import fp8_in_words, table
from megapar_tools.plan.recorded import Recording
from megapar_tools.plan.search import Found, Row
from megapar_tools.plan.simulate import simulate
from megapar_tools.plan.space import layout_of
from megapar_tools.plan.step_time import StepTime, step_time
from megapar_tools.plan.work import META, Kernel, Operations, Product, Started, collect
from megapar_tools.plan.work import recording as recording_of
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.config.options import Config
from megapar.declare import context
from megapar.launch.grid import grid_of
from megapar.linear.fp8_products import Fp8Products
from megapar.train.levers import LEVERS, changes_of_options
from tests.support.kernel_checks import needs_triton
from tests.support.options import load
from tests.support.plans import PARTS

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import plan

H100, A100 = hardware.load("h100-80g"), hardware.load("a100-80g")
BUILDER = StageBuilder()
LENGTH = 2048
KINDS = ("none", "blocks")
SP = ("--parallel.tp", "2", "--parallel.sequence_parallel")


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "interpreting", lambda: False)


def config(world: int, *flags: str, fp8: str = "blocks", preset: str = "llama3.2-1b") -> Config:
    """A preset in bf16 with the kernels of a GPU."""
    fixed = ["--config", preset, "--kernels.backend", "triton", "--train.precision", "bf16", "--train.fp8", fp8]
    sizes = ["--train.seq_length", str(LENGTH), "--launch.device", "cuda"]
    batch = [] if "--train.global_batch_size" in flags else ["--train.global_batch_size", "64"]
    return validate(load([*fixed, *sizes, *batch, *flags], presets()).config, world)


def layer_work(of: Config) -> Recording:
    ctx, tape = recording_of(context.planned(grid_of(of), 0, device=META))
    stage = BUILDER.maker(of, ctx)(range(1, 2), first=False, last=False)
    return Recording(stage, meta_batch(of.train.micro_batch_size, LENGTH, of.parallel.cp, 1), tape)


def flops_by_precision(operations: Operations) -> Counter[str]:
    found: Counter[str] = Counter()
    for operation in operations:
        if isinstance(operation, Product):
            found[operation.precision] += int(operation.flops)
    return found


def sent(operations: Operations) -> int:
    return sum(operation.nbytes for operation in operations if isinstance(operation, Started))


# Recorded work


@needs_triton
@pytest.mark.parametrize("flags", [(), SP], ids=["alone", "sp"])
def test_outputs_and_input_gradients_are_products_of_codes(flags: tuple[str, ...]) -> None:
    """As many FLOPs as in bf16. Weight gradients are of restored numbers, in bf16."""
    tp = 2 if flags else 1
    plain, work = (layer_work(config(tp, *flags, fp8=fp8)) for fp8 in KINDS)
    one = flops_by_precision(plain.forward)["bf16"]
    assert flops_by_precision(work.forward) == {"fp8": one}
    assert flops_by_precision(work.backward) == {"fp8": one, "bf16": one}
    assert not any(operation.adds for operation in work.backward if isinstance(operation, Product))


@needs_triton
def test_weights_are_converted_in_no_pass() -> None:
    work = layer_work(config(1))
    # q|k|v, o, gate|up, down of 2,048 to 2,048 + 2 x 512, and to 8,192
    weights = 2048 * (3072 + 2048 + 3 * 8192)
    codes = weights + weights // 128**2
    converted = work.kept.converted
    assert (converted.trained, converted.quantized, converted.frozen) == (0, codes, 0)
    assert sum(one.moved_bytes for one in converted.operations if isinstance(one, Kernel)) == 2 * weights + codes
    assert len(converted.operations) == 4
    left = [operation for operation in work.forward if isinstance(operation, Kernel)]
    # Of the input of o two bytes of each number are read, and its codes written. Norms and SwiGLU write other codes.
    converting = Kernel((2 * 2048 + packed_width(2048)) * LENGTH)
    assert left.count(converting) == 1


@needs_triton
def test_an_input_gradient_reads_a_transposed_copy() -> None:
    """Hopper sums over neighbours in memory. A byte of each weight is read and written, in each backward pass."""
    work = layer_work(config(1))
    moved = [operation.moved_bytes for operation in work.backward if isinstance(operation, Kernel)]
    for outputs, inputs in ((3072, 2048), (2048, 2048), (2 * 8192, 2048), (2048, 8192)):
        moved.remove(2 * outputs * inputs)


def test_layers_with_other_matrices_in_fp8_are_other_parts() -> None:
    """Whatever was planned before with the same parts."""
    numbers = []
    for flags in ((), ("--train.fp8_skip", "0", "-1"), ()):
        of = config(1, *flags)
        numbers.append([part.number for part in PARTS.layer_parts(of, PARTS.context(of, 0))])
    assert numbers == [[0] * 16, [0, *[1] * 14, 0], [0] * 16]


@needs_triton
def test_ranks_send_codes() -> None:
    """What tp gathers has 1 + 1/128 bytes a number; sums of outputs are in bf16."""
    plain, work = (layer_work(config(2, *SP, fp8=fp8)) for fp8 in KINDS)
    numbers = LENGTH * 2048
    assert sent(plain.forward) == 2 * 2 * 2 * numbers
    assert sent(work.forward) == 2 * (packed_width(2048) + 2 * 2048) * LENGTH


@needs_triton
def test_codes_are_kept_for_backward() -> None:
    """Of the inputs of products 1 + 1/128 bytes a number are kept, in place of 2."""
    kept = []
    for fp8 in KINDS:
        of = config(1, fp8=fp8)
        recording = PARTS.recording(of, PARTS.context(of, 0), LayerPart(1, recomputed=False))
        kept.append(sum(storage.nbytes for storage in recording.kept.storages))
    # Attention keeps its output, so that of o alone is kept beside. Norms keep their inputs anyway.
    inputs = (2048, 2048, 8192)
    saved = sum(2 * width - packed_width(width) for width in inputs) * LENGTH - packed_width(2048) * LENGTH
    assert kept[0] - kept[1] == saved


@needs_triton
def test_weight_gradients_in_fp8_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(self: Fp8Products, total: Tensor, grad_y: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
        torch.ops.megapar.scaled_weight_gradient(grad_y, x, total)

    assert not time_of(H100).adds_fp8
    monkeypatch.setattr(Fp8Products, "add_weight_gradient", noted)
    found = step_time(config(8), Parts(BUILDER), H100)
    assert found.adds_fp8
    assert found.fp8 > 1.4 * time_of(H100).fp8


def test_torch_s_products_of_codes_are_seen_too() -> None:
    """Weight gradients that a GPU adds to fp32 sums are marked, so that plans call them unproven."""
    a, b = (torch.empty(size, device=META, dtype=torch.float8_e4m3fn) for size in ((256, 512), (384, 512)))
    total = torch.empty(256, 384, device=META)
    one = torch.ones((), device=META)
    ctx, tape = recording_of(context.planned(grid_of(config(1)), 0, device=META))
    del ctx
    _, (scaled, adds) = collect(
        tape,
        lambda: (
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16),
            torch.ops.megapar.scaled_weight_gradient(a, b, total),
        ),
    )
    assert isinstance(scaled, Product)
    assert isinstance(adds, Product)
    assert scaled.flops == adds.flops == 2 * 256 * 384 * 512
    assert (scaled.precision, adds.precision) == ("fp8", "fp8")
    assert (scaled.adds, adds.adds) == (False, True)
    # The sums are read and written.
    assert adds.moved_bytes == a.nbytes + b.nbytes + 2 * total.nbytes


# Machines


def test_products_of_codes_have_a_rate_of_their_own() -> None:
    of_codes = Product(8192, 8192, 8192, 1, "fp8", 0)
    kind, seconds = kernel_seconds(of_codes, replace(H100, kernel_us=0.0))
    assert kind == FP8_PRODUCTS
    assert of_codes.flops / seconds == pytest.approx(1100e12, rel=0.04)  # large, but not endless


def test_a_machine_without_products_of_codes_restores_numbers() -> None:
    assert not A100.multiplies_fp8
    of_codes = Product(8192, 4096, 2048, 1, "fp8", 0)
    kind, seconds = kernel_seconds(of_codes, A100)
    restored = A100.memory_seconds(3 * (8192 + 4096) * 2048)
    assert kind == PRODUCTS
    assert seconds == kernel_seconds(of_codes._replace(precision="bf16"), A100)[1] + restored


def test_an_older_file_of_a_machine_has_no_products_of_codes(tmp_path: Path) -> None:
    text = (hardware.FOLDER / "h100-80g.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("fp8_share")]
    (tmp_path / "old.toml").write_text("\n".join(lines))
    assert not hardware.load(str(tmp_path / "old.toml")).multiplies_fp8
    lines = [line for line in text.splitlines() if not line.startswith("fp8 =")]
    (tmp_path / "wrong.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"fp8_share needs a peak; add peak_tflops\.fp8"):
        hardware.load(str(tmp_path / "wrong.toml"))


# Steps


def time_of(machine: hardware.Hardware, *flags: str, fp8: str = "blocks") -> StepTime:
    return step_time(config(8, *flags, fp8=fp8), PARTS, machine)


@needs_triton
def test_a_step_is_faster_where_products_are() -> None:
    """MFU is of the peak of bf16 in both."""
    plain, found = time_of(H100, fp8="none"), time_of(H100)
    assert found.seconds < plain.seconds
    assert found.mfu / plain.mfu == pytest.approx(plain.seconds / found.seconds)
    # Of three products of a layer two; the head, a third of this model's FLOPs in products, is in bf16.
    assert 0.4 < found.fp8 < 0.6
    assert plain.fp8 == 0
    on_a100 = time_of(A100)
    assert on_a100.seconds > time_of(A100, fp8="none").seconds
    assert on_a100.fp8 == 0
    assert FP8_PRODUCTS not in on_a100.busy


@needs_triton
def test_weights_are_converted_once_a_step_and_with_zero_3_by_the_ranks_that_own_them() -> None:
    once, each = (time_of(H100, "--optimizer.zero_stage", stage) for stage in ("2", "3"))
    of = config(8)
    recording = PARTS.recording(of, PARTS.context(of, 0), LayerPart(0, recomputed=False))
    converted = 16 * duration(recording.kept.converted.operations, H100, Network(grid_of(of), H100)).seconds
    assert each.busy[KERNELS] - once.busy[KERNELS] == pytest.approx((1 / 8 - 1) * converted)


@needs_triton
@pytest.mark.parametrize("flags", [(), SP], ids=["alone", "sp"])
def test_the_estimate_of_a_search_is_as_near_as_in_bf16(flags: tuple[str, ...]) -> None:
    tp = 2 if flags else 1
    errors = []
    for fp8 in KINDS:
        of = config(tp, *flags, fp8=fp8)
        work, network = layer_work(of), Network(grid_of(of), H100)
        exact = duration(work.forward, H100, network).seconds + duration(work.backward, H100, network).seconds
        estimator = Estimator(of, plan.sizes_of(of)[0], H100, plan.ModelPlanner(H100).kept_by_a_layer)
        layer = estimator.layers.like(layout_of(of))
        errors.append((layer.forward + layer.backward) / exact - 1)
        assert sent(estimator.layers.communication(layout_of(of), LENGTH)[0]) == pytest.approx(
            sent(work.forward), rel=0.01
        )
    assert errors[1] == pytest.approx(errors[0], abs=0.1)


@needs_triton
def test_a_simulation_counts_flops_in_fp8() -> None:
    of = [config(1, "--train.global_batch_size", "1", "--model.num_hidden_layers", "2", fp8=fp8) for fp8 in KINDS]
    plain, found = (simulate(one, build_stages, PARTS, 0, 8) for one in of)
    assert found.flops == plain.flops


# Searches and reports


def test_nothing_turns_fp8_on() -> None:
    """FP8 rounds, so it is the user's: no lever, no choice and no layout of a search has it."""
    of = config(8, fp8="none")
    assert not any("fp8" in option for option, _ in changes_of_options(of))
    assert not any("fp8" in lever.option for lever in LEVERS)
    assert not any("fp8" in path for path in layout_of(of).options())


@needs_triton
def test_a_plan_says_what_is_in_fp8() -> None:
    def row(machine: hardware.Hardware, time: StepTime | None = None, fp8: str = "blocks") -> Row:
        of = config(8, fp8=fp8)
        time = time or time_of(machine, fp8=fp8)
        return Row(layout_of(of), of, of, fullest_rank(of, PARTS), time, fits=True)

    first = row(H100)
    assert first.time is not None
    (column,) = [column for column in table([first], Found([first])).columns if column.header == "FP8"]
    assert list(column.cells) == [f"{first.time.fp8:.0%}"]
    (line,) = fp8_in_words([first], H100)
    assert "at an assumed rate of 1,100 TFLOP/s; MFU is of the peak without FP8" in line
    other = row(H100, replace(first.time, fp8=0.1, adds_fp8=True))
    _, differing, adds = fp8_in_words([first, other], H100)
    assert "train.fp8_skip" in differing
    assert "unproven" in adds
    (line,) = fp8_in_words([row(A100)], A100)
    assert line.startswith("a100-80g has no products of FP8 blocks")
    plain = row(H100, fp8="none")
    assert not list(fp8_in_words([plain], H100))
    assert all(column.header != "FP8" for column in table([plain], Found([plain])).columns)
