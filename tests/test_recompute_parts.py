"""train.recompute light: backward makes norms, activations and rows of experts again, and repeats no product, no
attention and no communication. all_but_attention repeats all of a layer but core attention. Both give the bits of none.
"""

import gc
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megapar_models.norms import RMSNorm
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.activations import recompute
from megapar.config.options import AdapterConfig
from megapar.declare.batch import StepScope
from megapar.step.step import train_step
from tests.support import tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import (
    DENSE_BETWEEN,
    GPT,
    LENGTH,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    SHARED,
    SIGMOID,
    STRADDLING,
    Layout,
    make_state,
    micro_batches,
)
from tests.support.kept_bytes import kept_for_backward
from tests.support.runs import Bits, assert_bitwise, bits
from tests.support.sweeps import slow_but

GEMMA2 = tiny_models.model("gemma2", head_dim=12)
NEOX = tiny_models.model("gpt_neox")  # parallel branches with a norm each
ADAPTERS = AdapterConfig(rank=3, dropout=0.1)

NEVER_REPEATED = ("mm", "attention", "matmul", "linear", "conv", "bmm", "mv", "all_", "reduce_", "send", "recv")


class Operations(TorchDispatchMode):
    """Counts what torch computes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def of(self, *parts: str) -> dict[str, int]:
        return {name: n for name, n in self.found.items() if any(part in name for part in parts)}


@dataclass(frozen=True)
class Shown:
    """What one rank shows of two steps."""

    bits: Bits
    losses: list[float]
    sent: dict[str, int]
    operations: Operations


def trained(layout: Layout, precision: str) -> Shown:
    config = layout.config(precision)
    state = make_state(config)
    with Operations() as operations:
        losses = [train_step(state, micro_batches(config, state.ctx, step)).loss for step in range(2)]
    return Shown(bits(state), losses, state.ctx.traffic(), operations)


ATTENTION = ("attention",)


def in_three_ways(layout: Layout, precision: str) -> tuple[Shown, ...]:
    return tuple(trained(replace(layout, recompute=mode), precision) for mode in ("none", "light", "all_but_attention"))


LAYOUTS = [
    (Layout(LLAMA, micro_batch_size=3), "bf16"),
    (Layout(LLAMA, tp=2, sequence_parallel=True, tp_overlap_chunks=3, micro_batch_size=3), "fp32"),
    (Layout(GPT, pp=2, schedule="zb-h1", micro_batch_size=3), "fp32"),
    (Layout(SHARED, dp=2, ep=2, micro_batch_size=3), "fp32"),
    (Layout(GEMMA2, dp=2, zero_stage=3, micro_batch_size=3), "fp32"),
    (Layout(GPT, tp=2, sequence_parallel=True, micro_batch_size=3), "bf16"),
    (Layout(GEMMA2, tp=2, sequence_parallel=True, micro_batch_size=3), "bf16"),
    (Layout(NEOX, tp=2, micro_batch_size=3), "fp32"),
    (Layout(ONE_KV_HEAD, pp=2, vpp=2, schedule="zb-v", micro_batch_size=3), "bf16"),
    (Layout(LLAMA, pp=2, dp=2, zero_stage=3, schedule="breadth", micro_batch_size=3), "fp32"),
    (Layout(STRADDLING, cp=2, cp_attention="ring", micro_batch_size=3), "fp32"),
    (Layout(GPT, cp=2, micro_batch_size=3), "fp32"),
    (Layout(SHARED, micro_batch_size=3), "bf16"),
    (Layout(SHARED, pp=2, schedule="zb-h1", micro_batch_size=3), "fp32"),
    (Layout(SHARED, tp=2, sequence_parallel=True, etp=2, micro_batch_size=3), "fp32"),
    (Layout(SIGMOID, tp=2, dp=2, ep=2, etp=2, zero_stage=3, micro_batch_size=3), "fp32"),
    (Layout(DENSE_BETWEEN, tp=2, cp=2, ep=4, etp=1, sequence_parallel=True, micro_batch_size=6), "fp32"),
    (Layout(LLAMA, tp=2, tp_overlap_chunks=2, pp=2, schedule="zb-h1", micro_batch_size=3, adapter=ADAPTERS), "fp32"),
    (Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=3, adapter=AdapterConfig(rank=3)), "fp32"),
    (Layout(LLAMA, pp=2, trainable=("head*", "layers.3.mlp.*"), micro_batch_size=3), "fp32"),
]


def name(layout: Layout) -> str:
    axes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "dp", "ep", "etp")}
    listed = [f"{axis}{size}" for axis, size in axes.items() if size > 1] or ["alone"]
    return "-".join([layout.model.family, *listed, *(["adapters"] if layout.adapter.rank else [])])


@pytest.mark.parametrize(
    ("layout", "precision"), slow_but([1, 3], LAYOUTS), ids=lambda x: x if type(x) is str else name(x)
)
def test_no_bit_changes_and_nothing_is_repeated_but_what_the_mode_says(layout: Layout, precision: str) -> None:
    for none, light, but_attention in run_ranks(layout.world, in_three_ways, layout, precision):
        for found in (light, but_attention):
            assert_bitwise(found.bits, none.bits, "recompute")
            assert found.losses == none.losses
        assert but_attention.operations.of(*ATTENTION) == none.operations.of(*ATTENTION)
        assert light.sent == none.sent
        assert light.operations.of(*NEVER_REPEATED) == none.operations.of(*NEVER_REPEATED)
        assert sum(none.operations.of("mm").values()) > 0
        if not layout.trainable:
            assert light.operations.found.total() > none.operations.found.total()
            assert sum(but_attention.operations.of("mm").values()) > sum(none.operations.of("mm").values())


# What is kept


def kept_bytes(model: Any, mode: str, precision: str = "fp32") -> int:
    config = Layout(model, micro_batch_size=2, recompute=mode, backend="torch").config(precision)
    state = make_state(config)
    (stage,) = state.stages.values()
    batch = replace(micro_batches(config, state.ctx, 0)[0], scope=StepScope(torch.ones(())))
    return kept_for_backward(lambda: stage(None, batch), [*stage.parameters(), *stage.buffers()])


def test_a_layer_keeps_two_norms_and_an_activation_less() -> None:
    """2 h + f elements of each token and layer. Those of experts are as wide, and their rows are copies of norms."""
    tokens = 2 * LENGTH
    for model in (LLAMA, GPT):
        saved = tokens * model.num_hidden_layers * (2 * model.hidden_size + model.intermediate_size) * 4
        assert kept_bytes(model, "none") - kept_bytes(model, "light") == saved, model.family
    moe = MIXTRAL.moe
    of_experts = moe.num_experts_per_tok * (MIXTRAL.hidden_size + moe.moe_intermediate_size)
    saved = tokens * MIXTRAL.num_hidden_layers * (2 * MIXTRAL.hidden_size + of_experts) * 4
    assert kept_bytes(MIXTRAL, "none") - kept_bytes(MIXTRAL, "light") == saved


@pytest.mark.parametrize(
    ("mode", "every", "fused"), [("none", 1, 5), ("light", 1, 5), ("all_but_attention", 1, 3), ("full", 3, 4)]
)
def test_a_norm_adds_what_the_layer_before_has_left(
    mode: str, every: int, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 3 layers, 3 norms of MLPs and those of attention. A recomputed layer keeps one input, so it is given a sum."""
    calls = 0
    add_and_norm = RMSNorm.add_and_norm

    def counted(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return add_and_norm(*args, **kwargs)

    monkeypatch.setattr(RMSNorm, "add_and_norm", counted)
    model = replace(LLAMA, num_hidden_layers=3)
    state = make_state(Layout(model, recompute=mode, every=every).config())
    batch = micro_batches(state.config, state.ctx, 0)[0]
    state.stages[0](None, batch)
    assert calls == fused


@pytest.mark.parametrize(
    "model",
    [
        *(tiny_models.model(family) for family in ("opt", "nemotron", "apertus", "olmo", "cohere")),
        *(replace(LLAMA, hidden_act=activation) for activation in ("gelu_pytorch_tanh", "relu2")),
    ],
    ids=lambda model: f"{model.family}-{model.hidden_act}",
)
def test_light_never_keeps_more(model: Any) -> None:
    """ReLU's backward needs its output and not its input, which would have to be kept to make the output again."""
    for precision in ("fp32", "bf16"):
        assert kept_bytes(model, "light", precision) <= kept_bytes(model, "none", precision), precision


def test_a_layer_keeps_its_input_and_what_attention_leaves() -> None:
    """The output of attention, and for each token and head the log-sum-exp of its scores.

    On a CPU the output is there twice, because SDPA's has another order. Behind norms of q and k it copies these too.
    """
    model = replace(LLAMA, qk_norm=False)
    heads = model.num_attention_heads
    more = 2 * LENGTH * model.num_hidden_layers * (2 * heads * model.head_dim + heads) * 4
    assert kept_bytes(model, "all_but_attention") - kept_bytes(model, "full") == more


# The functions


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_users_of_one_tensor_get_views_of_it_and_share_it_while_it_lives() -> None:
    calls = []

    def root(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return x.exp().contiguous()

    x = torch.arange(6.0).view(2, 3).requires_grad_()
    twice = Square.apply(x)  # it keeps x
    with recompute.light(True):
        kept_x = Square.apply(x)
        y = recompute.remade(root, x)
        first, second = Square.apply(y[:, 1:]), Square.apply(y.t())
    assert len(calls) == 1
    (first.sum() + second.sum() + twice.sum() + kept_x.sum()).backward()
    assert len(calls) in (2, 3)
    z = x.detach().exp()
    expected = 2 * z * z + 4 * x.detach()
    expected[:, 1:] += 2 * (z * z)[:, 1:]
    torch.testing.assert_close(x.grad, expected)


def test_outside_of_light_nothing_is_made_again() -> None:
    calls = []

    def identity(x: Tensor) -> Tensor:
        calls.append(x)
        return x + 0

    x = torch.ones(3, requires_grad=True)
    with recompute.light(False):
        Square.apply(recompute.remade(identity, x)).sum().backward()
    assert len(calls) == 1
    with recompute.light(True):
        nothing = recompute.remade(nn.Identity(), x)
        y = Square.apply(nothing)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 4.0))


def test_a_kept_call_is_made_once_and_frees_its_inputs() -> None:
    calls: list[Tensor] = []
    freed: list[weakref.ref[Tensor]] = []

    def product(a: Tensor, b: Tensor, constant: Tensor) -> Tensor:
        calls.append(a.detach())
        return Square.apply(a[1:]) * b * constant

    def around(x: Tensor) -> Tensor:
        first, second = x.exp(), x.sin()
        freed.extend([weakref.ref(first), weakref.ref(second)])
        y = recompute.kept(product, first, second[1:], torch.full((1,), 3.0))
        # Of tensors without gradients nothing is asked, but nothing is computed twice either.
        return y + recompute.kept(product, first.detach(), second.detach()[1:], torch.ones(1))

    x = torch.arange(6.0).view(3, 2).requires_grad_()
    y = recompute.run(True, around, x, keeps_attention=True)
    gc.collect()
    calls.clear()
    assert len(freed) == 2
    assert not any(ref() is not None for ref in freed)
    y.sum().backward()
    assert not calls
    expected = x.detach().clone().requires_grad_()
    (3 * expected.exp()[1:] ** 2 * expected.sin()[1:]).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_a_graph_of_kept_calls_is_freed_with_its_result() -> None:
    x = torch.ones(3, requires_grad=True)
    kept = []

    def noted(a: Tensor) -> Tensor:
        y = a.exp()
        kept.append(weakref.ref(y.untyped_storage()))
        return y

    y = recompute.run(True, lambda x: recompute.kept(noted, x * 2), x, keeps_attention=True)
    assert kept[0]() is not None
    del y
    gc.collect()  # checkpoint's own objects refer to each other
    assert kept[0]() is None


def test_a_recomputed_part_leaves_no_cycle_of_objects() -> None:
    """Cycles by the hundred in a step start Python's garbage collection, on each rank at another time."""
    linear = nn.Linear(4, 4)

    def step(keeps_attention: bool) -> None:
        x = torch.randn(3, 4, requires_grad=True)
        y = recompute.run(True, lambda x: recompute.kept(torch.tanh, linear(x)), x, keeps_attention=keeps_attention)
        y.sum().backward()

    for keeps_attention in (False, True):
        step(keeps_attention)  # what is imported or kept at a first call
        gc.collect()
        gc.disable()
        try:
            step(keeps_attention)
            assert gc.collect() == 0
        finally:
            gc.enable()


def test_a_part_that_does_another_thing_the_second_time_is_refused() -> None:
    times = iter((2, 1))

    def tanh(x: Tensor) -> Tensor:
        for _ in range(next(times)):
            x = torch.tanh(x)
        return x

    with pytest.raises(RuntimeError, match="saved fewer tensors than the first time"):
        recompute.run(True, tanh, torch.ones(2, requires_grad=True)).sum().backward()
