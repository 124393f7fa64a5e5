"""Training in FP8 (train.fp8): which matrices, every layout beside one process, and what else a run does with it."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megapar_kernels import quantize
from megapar_kernels.backend import TORCH
from megapar_kernels.packed import Packed
from megapar_kernels.quantize import Quantized
from megapar_models.build import fp8_matrices
from megapar_models.factory import Factory
from megapar_models.fp8_matrices import Fp8Matrices
from megapar_models.layer import Layer
from megapar_models.layer_kind import LayerKind, MixerRule
from megapar_models.norms import NormRule
from megapar_tools.verify import logical
from torch import Tensor, nn

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import folder_name
from megapar.config.model_options import MoEConfig
from megapar.config.options import AdapterConfig, Config
from megapar.declare.context import single
from megapar.declare.params import Init, spec_of
from megapar.declare.sharding import Sharding
from megapar.linear.fp8_products import Fp8Products
from megapar.step.evaluation import evaluate
from megapar.step.step import train_step
from megapar.tensor_parallel.layers import Columns
from tests.support import grid, program, tiny_models
from tests.support.distributed import apart, run_ranks
from tests.support.grid import Layout, alone, make_state, micro_batches, reference, train_two_steps
from tests.support.kernel_checks import needs_triton
from tests.support.runs import Bits, assert_bitwise, bits, stored
from tests.support.sweeps import slow_but

DENSE = tiny_models.small("llama", 256, 2, 256, num_key_value_heads=4, head_dim=64, initializer_range=0.05)
MIXTURE = tiny_models.small(
    "mixtral",
    128,
    2,
    128,
    num_key_value_heads=4,
    head_dim=32,
    initializer_range=0.05,
    moe=MoEConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, shared_expert_intermediate_size=128),
)
OF_A_LAYER = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down")
ADAPTER = AdapterConfig(rank=4, targets=("*",))
BLOCKS = {"fp8": "blocks"}


def of(model: Any = DENSE, **sizes: Any) -> Layout:
    return Layout(model, **BLOCKS, **sizes)


# Which matrices


def kept_back(layout: Layout) -> dict[str, str]:
    """Why matrices of the layout are not in FP8, without those that are."""
    return {name: reason for name, reason in fp8_matrices(layout.config()).kept_back.items() if reason}


def test_every_matrix_of_layers_that_fits_is_in_fp8() -> None:
    matrices = fp8_matrices(of(MIXTURE).config())
    names = (*OF_A_LAYER[:4], *(f"mlp.experts.{m}" for m in ("gate", "up", "down")))
    shared = ("mlp.shared.gate", "mlp.shared.up", "mlp.shared.down")
    assert set(matrices.kept_back) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in (*names, *shared)}
    assert not any(matrices.kept_back.values())
    assert matrices.in_words() == "20 of 20 matrices of layers in FP8"


NOT_FITTING = {
    "a width of 1,376 on a rank": (
        replace(DENSE, intermediate_size=11008),
        {"tp": 8},
        "mlp.down",
        "inputs cut by 1,376",
    ),
    "a hidden size of 2,880": (replace(DENSE, hidden_size=2880), {}, "attention.o", "outputs cut by 2,880"),
    # q alone would fit, but the three are one product.
    "heads of k of 64": (replace(DENSE, num_attention_heads=8), {"tp": 4}, "attention.q", "outputs of k cut by 64"),
    "experts over etp": (MIXTURE, {"dp": 4, "etp": 4}, "mlp.experts.down", "width cut by 64"),
}


@pytest.mark.parametrize("name", NOT_FITTING)
def test_what_is_cut_elsewhere_stays_in_the_dtype_of_activations(name: str) -> None:
    """Fault fp8-cut-inside-block."""
    model, sizes, matrix, reason = NOT_FITTING[name]
    model = replace(model, num_attention_heads=8, num_key_value_heads=8) if sizes.get("tp") == 8 else model
    assert kept_back(of(model, **sizes))[f"layers.1.{matrix}"] == f"{reason}, no multiple of 128"


def test_what_ranks_of_tp_share_stays_in_the_dtype_of_activations() -> None:
    """Fault fp8-codes-of-parts: each rank has a part of the gradient of a key's head that several ranks read."""
    model = replace(DENSE, num_attention_heads=4, num_key_value_heads=1, head_dim=128)
    reason = "ranks of tp share outputs of k"
    assert kept_back(of(model, tp=2)) == {
        f"layers.{layer}.attention.{name}": reason for layer in (0, 1) for name in ("q", "k", "v")
    }


def test_all_ranks_of_tp_have_one_answer() -> None:
    """Three query heads of 128 a rank read key heads of which rank 0 has the first two, and rank 1 the last two. So
    both have the second one, and q, k and v are not in FP8 (`test_what_ranks_of_tp_share_...`)."""
    model = tiny_models.small("llama", 128, 1, 128, num_key_value_heads=3, head_dim=128, num_attention_heads=6)
    answers = run_ranks(2, products_by_module, of(replace(model, intermediate_size=256), tp=2).config())
    assert answers[0] == answers[1]
    assert not answers[0]["layers.0.attention.qkv"]
    assert answers[0]["layers.0.attention.out"]


def products_by_module(config: Config) -> dict[str, bool]:
    """Whether each module with products has those of FP8, by its name."""
    stages = make_state(config).stages.values()
    named = ((name, getattr(module, "products", None)) for stage in stages for name, module in stage.named_modules())
    return {name: isinstance(products, Fp8Products) for name, products in named if products is not None}


SKIPPED = {
    "0": {f"layers.0.{name}" for name in OF_A_LAYER},
    "-1": {f"layers.1.{name}" for name in OF_A_LAYER},
    "*.down": {"layers.0.mlp.down", "layers.1.mlp.down"},
    "layers.1.attention.v": {"layers.1.attention.q", "layers.1.attention.k", "layers.1.attention.v"},  # one product
}


@pytest.mark.parametrize(("item", "expected"), SKIPPED.items())
def test_the_user_keeps_layers_and_matrices_out(item: str, expected: set[str]) -> None:
    layout = of(fp8_skip=(item,))
    assert set(kept_back(layout)) == expected
    modules = products_by_module(layout.config())
    fused = {"attention.q": "attention.qkv", "mlp.gate": "mlp.gate_up", "attention.o": "attention.out"}
    for name in expected:
        layer, inside = name[: len("layers.0")], name[len("layers.0.") :]
        assert not modules.get(f"{layer}.{fused.get(inside, inside)}", False), name
    assert sum(modules.values()) < 8


REFUSED = {
    "rowwise": ({"fp8": "rowwise"}, "train.fp8=rowwise: the scale of a row is a maximum over all ranks of tp"),
    "delayed": ({"fp8": "delayed"}, "train.fp8=delayed: scales of earlier steps are state"),
    "tensorwise": ({"fp8": "tensorwise"}, "train.fp8=tensorwise: one scale of a whole tensor depends on"),
    "mx": ({"fp8": "mx"}, "train.fp8=mx: groups of 32 are not built"),
    "nvfp4": ({"fp8": "nvfp4"}, "train.fp8=nvfp4: numbers of 4 bits are not built"),
    "a word": ({"fp8": "yes"}, "train.fp8=yes: unknown; use blocks or none"),
    "nothing to skip": ({"fp8_skip": ("0",)}, "nothing is in FP8; set fp8 blocks, or leave it empty"),
    "another format": (BLOCKS | {"products": grid.DERIVED_PRODUCTS}, "both say in which number format"),
    "a chunk of cp": (BLOCKS | {"cp": 2, "length": 520}, "must be a multiple of 128; use 512 or 1024"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_with_the_reason(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        Layout(DENSE, **options).config()


def test_fp16_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.fp8=blocks, train\.precision=fp16: .* do not fit fp16; use bf16"):
        of().config("fp16")


@pytest.mark.parametrize("item", ["2", "-3", "*.router", "layers.9.*"])
def test_what_means_no_matrix_is_refused(item: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"train.fp8_skip {item}: means no matrix of the model; layers are 0 to 1")
    ):
        make_state(of(fp8_skip=(item,)).config())


def test_a_model_without_a_matrix_in_fp8_is_refused() -> None:
    """(gpt-oss is one: 128 does not divide its hidden size of 2,880.)"""
    with pytest.raises(
        ConfigError, match=r"train\.fp8=blocks: 0 of 14 .*inputs cut by 160, no multiple of 128\).*; use fp8 none"
    ):
        make_state(of(replace(DENSE, hidden_size=160)).config())


def test_router_head_embedding_norms_and_adapters_never_see_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault fp8-router: only matrices of layers are quantized, and their parameters alone."""
    quantized: list[tuple[int, ...]] = []
    original = quantize.quantize_blocks

    def noting(weight: Tensor, *args: Any) -> Quantized:
        quantized.append(tuple(weight.shape))
        return original(weight, *args)

    monkeypatch.setattr(quantize, "quantize_blocks", noting)
    config = of(MIXTURE, adapter=replace(ADAPTER, rank=128), micro_batch_size=6).config()
    state = make_state(config)
    train_step(state, micro_batches(config, state.ctx, 0))
    assert set(quantized) == {(384, 128), (128, 128), (256, 128), (128, 128), (4, 512, 128), (4, 128, 256)}
    modules = products_by_module(config)
    assert not any(modules[name] for name in modules if "router" in name or not name.startswith("layers."))


# Every layout beside one process

Gradients = Mapping[str, Tensor]


def gradients(ranks: Sequence[Mapping[str, Any]], step: int) -> Gradients:
    return logical.assemble([rank["steps"][step][2] for rank in ranks])


def distance(a: Gradients, b: Gradients) -> float:
    """The norm of the difference of all gradients, over the norm of those of b."""
    assert set(a) == set(b)
    return math.hypot(*((a[name] - b[name]).norm().item() for name in b)) / math.hypot(
        *(x.norm().item() for x in b.values())
    )


LAYOUTS = {
    "sp": of(tp=2, sequence_parallel=True, micro_batch_size=3),
    "experts": of(MIXTURE, dp=2, ep=2, micro_batch_size=3),
    "chunks": of(tp=2, sequence_parallel=True, tp_overlap_chunks=2, micro_batch_size=3),
    "deferred": of(pp=2, schedule="zb-h1", recompute="light", micro_batch_size=3),
    "zero3": of(dp=2, zero_stage=3, recompute="full", micro_batch_size=3),
    "experts with zero3": of(MIXTURE, dp=4, ep=2, zero_stage=3, ep_overlap_chunks=2, micro_batch_size=3),
    "offloaded": of(recompute="full", offload=1.0, micro_batch_size=3),
    "experts in chunks": of(MIXTURE, dp=2, ep=2, ep_overlap_chunks=2, recompute="light", micro_batch_size=3),
    "experts cut": of(MIXTURE, tp=2, etp=2, micro_batch_size=3, fp8_skip=("*.mlp.shared.*", "*.attention.*")),
    "adapters": of(tp=2, sequence_parallel=True, adapter=ADAPTER, micro_batch_size=3),
    "dropped": of(tp=2, tp_overlap_chunks=2, adapter=replace(ADAPTER, dropout=0.1), micro_batch_size=3),
    "adapters of experts": of(MIXTURE, dp=2, ep=2, adapter=ADAPTER, micro_batch_size=3),
    "context": of(cp=2, length=512, micro_batch_size=6),
    "muon": of(dp=2, optimizer="muon", micro_batch_size=3),
    "packed": of(dp=2, packed=True, micro_batch_size=3),
}


@pytest.mark.parametrize("name", slow_but([0, 1], LAYOUTS))
def test_a_layout_is_nearer_to_one_process_than_fp8_to_none(name: str) -> None:
    """In fp32 few codes flip between layouts: one that does moves a number by 6 to 12 %, and what follows from it.

    Without a flip gradients agree to 1e-6.
    """
    layout = LAYOUTS[name]
    ranks = run_ranks(layout.world, train_two_steps, layout.config(), layout.packed)
    one = [reference(alone(layout))]
    none = [reference(alone(replace(layout, fp8="none", fp8_skip=())))]
    of_fp8 = distance(gradients(one, 0), gradients(none, 0))
    assert 0.01 < of_fp8 < 0.3
    assert distance(gradients(ranks, 0), gradients(one, 0)) < of_fp8 / 3
    assert ranks[0]["steps"][0][0] == pytest.approx(one[0]["steps"][0][0], rel=1e-4)


def in_all_ways(layouts: Sequence[Layout], precision: str) -> list[tuple[Bits, list[float]]]:
    found = []
    for layout in layouts:
        config = layout.config(precision)
        state = make_state(config)
        losses = [train_step(state, micro_batches(config, state.ctx, step)).loss for step in range(2)]
        found.append((bits(state), losses))
    return found


@pytest.mark.parametrize("precision", slow_but([0], ["fp32", "bf16"]))
@pytest.mark.parametrize("name", slow_but([0], ["dense", "mixture"]))
def test_recomputation_and_schedules_change_no_bit(name: str, precision: str) -> None:
    """Fault fp8-recompute-differs."""
    plain = of(replace({"dense": DENSE, "mixture": MIXTURE}[name], num_hidden_layers=1), micro_batch_size=6)
    modes = [replace(plain, recompute=mode) for mode in ("light", "selective", "full", "all_but_attention")]
    (expected, losses), *others = apart(in_all_ways, [plain, *modes], precision)
    for layout, (found, found_losses) in zip(modes, others, strict=True):
        assert found_losses == losses
        assert_bitwise(found, expected, layout.recompute)


def normed_mlp(takes_packed: bool, seen: list[Tensor]) -> list[Tensor]:
    """The output of an MLP of a normed input, and all gradients, computed by Triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Products, "takes_packed", takes_packed)
        in_fp8 = Fp8Matrices(Fp8Products(torch.float32, impl="triton"), (), 1)
        init, sharding = Init("normal", 0.1), Sharding.of(single(), torch.float32)
        factory = Factory(sharding, init, init, replace(TORCH, norm="triton", activation="triton"), fp8=in_fp8)
        kind = LayerKind(mixer=Noting(seen), norm=NormRule(eps=1e-5))
        layer = Layer(0, kind, replace(DENSE, hidden_size=128, intermediate_size=128), factory)
    draw = torch.Generator().manual_seed(1)
    for param in layer.parameters():
        param.data.normal_(generator=draw)
    x = torch.randn(3, 1, 128, generator=draw).requires_grad_()
    y = layer(x, SimpleNamespace(tokens=None))
    y.backward(torch.randn(y.shape, generator=draw))
    return [y.detach(), x.grad, *(param.grad for param in layer.parameters())]


@dataclass(frozen=True)
class Noting(MixerRule):
    """A mixer that notes its input, and returns a product of it."""

    seen: list[Tensor]

    def make(self, number: int, kind: LayerKind, model: Any, factory: Factory) -> nn.Module:
        sharding = factory.sharding
        made = ReadByOne()
        made.reader = factory.column_parallel(128, [Columns.even("layers.0.attention.q", 128, sharding.tp)])
        made.register_forward_pre_hook(lambda _, given: self.seen.append(given[0]))
        return made


class ReadByOne(nn.Module):
    READER = "reader"

    reader: nn.Module

    def forward(self, x_sbh: Tensor, context: object) -> Any:
        return self.reader(x_sbh)


@needs_triton
def test_norms_and_activations_write_codes_with_the_bits_of_their_numbers() -> None:
    """A norm whose result products alone read, and SwiGLU, write codes where Triton computes them."""
    packed: list[Tensor] = []
    plain: list[Tensor] = []
    found, expected = normed_mlp(True, packed), normed_mlp(False, plain)
    assert isinstance(packed[0], Packed)
    assert not isinstance(plain[0], Packed)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


# Weights in codes


def codes_are_current(config: Config, act: Callable[[Any, Any], None]) -> list[bool]:
    """Run `act(state, batches)`; returns whether each product had the codes that its weight's values have then."""
    state = make_state(config)
    params = [param for stage in state.stages.values() for param in stage.parameters()]
    used: list[bool] = []
    original = Fp8Products.forward

    def checking(products: Fp8Products, x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
        converted = ((param, getattr(param, "converted", None)) for param in params)
        (owner,) = (param for param, found in converted if found and any(v is weight for v in found._values.values()))
        expected = quantize.quantize_blocks(owner.detach())
        used.append(torch.equal(expected.codes.view(torch.uint8), weight.codes.view(torch.uint8)))
        return original(products, x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Products, "forward", checking)
        act(state, micro_batches(config, state.ctx, 0))
    return used


def update_and_evaluate(state: Any, batches: Any) -> None:
    """Steps without and with a change of weights, evaluations between, and weights loaded from elsewhere."""
    train_step(state, batches)
    evaluate(state, batches)
    train_step(state, batches)
    with torch.no_grad():
        for item in state.optimizer.slices():
            item.tensors["main"].mul_(1.5)
    state.optimizer.refresh_params_from_main()
    evaluate(state, batches)
    train_step(state, batches)


def test_codes_of_weights_follow_updates_and_loads() -> None:
    """Fault fp8-stale-codes. Those of ZeRO-3 have tests of their own (test_zero_codes.py)."""
    config = of(replace(DENSE, num_hidden_layers=1), micro_batch_size=12).config()
    assert codes_are_current(config, update_and_evaluate) == [True] * 5 * 4


def test_parameters_are_those_of_main_weights_not_of_codes() -> None:
    """Fault fp8-export-of-codes: exports and evaluations read what the optimizer has, rounded once to bf16."""
    config = of(micro_batch_size=12).config("bf16")
    state = make_state(config)
    train_step(state, micro_batches(config, state.ctx, 0))
    for item in state.optimizer.slices():
        expected = item.tensors["main"].view(-1).bfloat16()
        held = next(p for s in state.stages.values() for p in s.parameters() if spec_of(p) is item.spec)
        assert torch.equal(held.detach().view(-1)[item.start : item.stop], expected)


# A run of the program

SIZES = (
    *("--model.hidden_size", "128", "--model.num_attention_heads", "4", "--model.num_key_value_heads", "4"),
    *("--model.head_dim", "32", "--model.intermediate_size", "128", "--train.steps", "4", "--checkpoint.every", "2"),
)


def test_a_run_says_what_is_in_fp8_resumes_bitwise_and_may_end_without_it(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    flags = (*SIZES, "--train.fp8", "blocks", "--train.fp8_skip", "0")
    whole = program.run(*flags, cwd=tmp_path)
    assert whole.code == 0, whole.err
    assert "train.fp8 blocks: 7 of 14 matrices of layers in FP8; not attention.q, attention.k" in whole.out
    assert "this device has no products of FP8" in whole.out
    environment = (tmp_path / "run/environment.json").read_text()
    assert '"layers.0.attention.q": "train.fp8_skip"' in environment
    saved = tmp_path / "run/checkpoints" / folder_name(2)
    again = program.run(*flags, "--checkpoint.resume", str(saved), cwd=tmp_path / "other")
    assert again.code == 0, again.err
    last = Path("run/checkpoints") / folder_name(4)
    assert_bitwise(stored(tmp_path / "other" / last), stored(tmp_path / last), "resumed")
    without = program.run(*SIZES, "--checkpoint.resume", str(saved), "--run_dir", "without", cwd=tmp_path)
    assert without.code == 0, without.err
    assert "changed since: train.fp8: blocks -> none" in without.out
