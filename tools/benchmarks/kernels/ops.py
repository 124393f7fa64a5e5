"""What is measured: every op at the shapes of a model, and its least bytes or FLOPs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megapar_kernels import activations, attention, norms
from megapar_kernels.adamw import adamw_step, square_sum
from megapar_kernels.backend import Kernels
from megapar_kernels.delta_rule import delta_rule
from megapar_kernels.dispatch import Implementation
from megapar_kernels.dropout import dropout_add
from megapar_kernels.rope import rotate_qk
from megapar_kernels.short_conv import short_conv
from torch import Tensor

from benchmarks.kernels import peers
from benchmarks.kernels.peers import EPS, Op
from megapar.data_parallel.accumulate import MainGradView
from megapar.declare import context
from megapar.declare.random import row_keys
from megapar.linear.torch_products import TorchProducts
from megapar.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapar.tensor_parallel.linear_cross_entropy import linear_cross_entropy

Direction = Literal["forward", "backward", "both"]
BOTH: tuple[Direction, ...] = ("forward", "backward", "both")


class Model(NamedTuple):
    """Sizes for an op's shape; `tokens` of one micro-batch."""

    name: str
    tokens: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    flat: tuple[int, ...]  # elements of an optimizer's shard


LLAMA_8B = Model("8B", 8192, 4096, 14336, 32, 8, 128, 128256, (10**8, 10**9))
LLAMA_70B = Model("70B", 8192, 8192, 28672, 64, 8, 128, 128256, ())
TINY = Model("tiny", 8, 32, 48, 4, 2, 16, 96, (384,))


class Maker:
    """Inputs of one call: equal for equal seeds."""

    def __init__(self, target: torch.device, dtype: torch.dtype, seed: int):
        self.target = target
        self.dtype = dtype
        self.generator = torch.Generator(target).manual_seed(seed)

    def floats(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = True, mean: float = 0.0) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.target, dtype=dtype or self.dtype)
        return (x + mean if mean else x).requires_grad_(grad)

    def ids(self, *shape: int, below: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator, device=self.target)


@dataclass(frozen=True)
class Case:
    """One op at one shape. All contenders are functions of the same inputs; torch's in fp32 is what is right.

    `least` is what forward and backward must move (bytes) or compute (FLOPs). Ops without a gradient have forward
    alone.
    """

    op: str
    model: str
    shape: str
    make: Callable[[Maker], tuple[Any, ...]]
    ours: Op
    torch: Op
    least: tuple[float, float]
    unit: Literal["bytes", "flops"] = "bytes"
    directions: tuple[Direction, ...] = BOTH
    exact: Op | None = None  # where torch's own draws other numbers
    to_compile: Op | None = None  # where what eager mode does best is nothing to compile
    same: bool = True  # False where others cannot compute the same numbers
    tolerance: float | None = None  # relative norm; None: 4e-3 of bf16 results, 1e-5 of fp32 ones


def cases(model: Model, kernels: Kernels) -> Iterator[Case]:
    """All ops, beginning with the farthest from what others reach."""
    yield _cross_entropy_case(model, kernels.cross_entropy)
    for elements in model.flat:
        yield from _optimizer_cases(model, elements, kernels.adamw)
    yield from _row_cases(model, kernels)
    yield _rope_case(model, kernels.rope)
    yield _dropout_case(model, kernels.dropout)
    yield _attention_case(model, kernels.attention)
    for decays in (1, model.head_dim):
        yield _delta_rule_case(model, decays, kernels.linear_attention)
    yield _short_conv_case(model, kernels.linear_attention)
    yield _weight_gradient_case(model)
    yield _linear_cross_entropy_case(model, kernels.cross_entropy)


def _cross_entropy_case(model: Model, impl: Implementation) -> Case:
    vocab = model.vocab
    tp = context.single().tp

    def make(m: Maker) -> tuple[Any, ...]:
        return m.floats(model.tokens, 1, vocab), m.ids(model.tokens, 1, below=vocab)

    def ours(logits_sbv: Tensor, targets_sb: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits_sbv, targets_sb, vocab, 0, tp, impl=impl, inplace=True)

    logits = model.tokens * vocab
    return Case(
        "cross entropy", model.name, f"{model.tokens}x{vocab}", make, ours, peers.cross_entropy,
        (2 * logits, 4 * logits),
    )  # fmt: skip


def _row_cases(model: Model, kernels: Kernels) -> Iterator[Case]:
    """Norms and activations: functions of rows, and of vectors as wide as a row."""
    norm: dict[str, Any] = {"eps": EPS, "impl": kernels.norm}
    act: dict[str, Any] = {"impl": kernels.activation}

    def inputs(width: int, rows: int, vectors: int, m: Maker) -> tuple[Any, ...]:
        xs = [m.floats(model.tokens, width) for _ in range(rows)]
        return (*xs, *(m.floats(width, mean=1.0 - i) for i in range(vectors)))

    # Op, its width, how many tensors of rows and vectors it takes, the bytes an element forward and backward.
    ops: list[tuple[str, int, int, int, float, float, Op, Op]] = [
        ("RMSNorm", model.hidden, 1, 1, 4, 6, partial(norms.rms_norm, **norm), peers.rms_norm),
        ("add + RMSNorm", model.hidden, 2, 1, 8, 8, partial(norms.add_rms_norm, **norm), peers.add_rms_norm),
        ("LayerNorm", model.hidden, 1, 2, 4, 6, partial(norms.layer_norm, **norm), peers.layer_norm),
        ("add + LayerNorm", model.hidden, 2, 2, 8, 8, partial(norms.add_layer_norm, **norm), peers.add_layer_norm),
        ("SwiGLU", 2 * model.mlp, 1, 0, 3, 5, partial(activations.swiglu, **act), peers.swiglu),
        ("GeGLU", 2 * model.mlp, 1, 0, 3, 5, partial(activations.geglu, **act), peers.geglu),
        ("ReLU²", model.mlp, 1, 0, 4, 6, partial(activations.relu_squared, **act), peers.relu_squared),
        ("bias + GELU", model.mlp, 1, 1, 4, 6, partial(activations.bias_gelu, **act), peers.bias_gelu),
    ]
    for op, width, rows, vectors, forward, backward, ours, theirs in ops:
        size = model.tokens * width
        make = partial(inputs, width, rows, vectors)
        least = (forward * size, backward * size)
        yield Case(op, model.name, f"{model.tokens}x{width}", make, ours, theirs, least)


def _rope_case(model: Model, impl: Implementation) -> Case:
    tokens = model.tokens
    d = model.head_dim
    elements = model.tokens * model.head_dim * (model.heads + model.kv_heads)

    def make(m: Maker) -> tuple[Any, ...]:
        angle = m.floats(tokens, d // 2, dtype=torch.float32, grad=False).repeat(1, 2)
        return m.floats(tokens, 1, model.heads, d), m.floats(tokens, 1, model.kv_heads, d), angle.cos(), angle.sin()

    return Case(
        "RoPE", model.name, f"{tokens}x({model.heads}+{model.kv_heads})x{d}", make, partial(rotate_qk, impl=impl),
        peers.rotate_qk, (4 * elements, 4 * elements),
    )  # fmt: skip


def _dropout_case(model: Model, impl: Implementation) -> Case:
    tokens = model.tokens
    hidden = model.hidden
    p = 0.1

    def make(m: Maker) -> tuple[Any, ...]:
        keys = row_keys(1, 2, torch.arange(tokens, device=m.target))
        return m.floats(tokens, hidden), m.floats(tokens, hidden), keys, p

    return Case(
        "dropout + add", model.name, f"{tokens}x{hidden}", make, partial(dropout_add, impl=impl), peers.dropout_add,
        (6 * tokens * hidden, 4 * tokens * hidden), exact=dropout_add, same=False,
    )  # fmt: skip


def _optimizer_cases(model: Model, elements: int, impl: Implementation) -> Iterator[Case]:
    def make(m: Maker) -> tuple[Any, ...]:
        grad, main, exp_avg = (m.floats(elements, dtype=torch.float32, grad=False) for _ in range(3))
        param = main.to(m.dtype)
        clip, step = (torch.full((), x, device=m.target) for x in (0.9, 0.0))
        return grad, main, exp_avg, m.floats(elements, dtype=torch.float32, grad=False).square_(), param, clip, step

    def ours(
        grad: Tensor, main: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, param: Tensor, clip: Tensor, _: Tensor
    ) -> tuple[Tensor, ...]:
        adamw_step(main, grad, exp_avg, exp_avg_sq, param, **peers.ADAMW, step=1, clip_coefficient=clip, impl=impl)
        return main, exp_avg, exp_avg_sq, param

    yield Case(
        "AdamW", model.name, f"{elements:,}", make, ours, peers.adamw, (30 * elements, 0), directions=("forward",),
        to_compile=peers.adamw_formula,
    )  # fmt: skip
    yield Case(
        "square sum", model.name, f"{elements:,}", lambda m: (m.floats(elements, dtype=torch.float32, grad=False),),
        partial(square_sum, impl=impl), peers.square_sum, (4 * elements, 0), directions=("forward",),
        exact=lambda x: torch.linalg.vector_norm(x, dtype=torch.float64).square(),
    )  # fmt: skip


def _attention_case(model: Model, impl: Literal["torch", "cudnn"]) -> Case:
    tokens = model.tokens
    d = model.head_dim
    run = model.heads // model.kv_heads

    def heads(x_sbnd: Tensor) -> Tensor:
        return x_sbnd.permute(1, 2, 0, 3)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True, enable_gqa=run > 1)
        return y.permute(2, 0, 1, 3).flatten(2)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # all heads alike: torch need not hold the scores
        k, v = (heads(x).repeat_interleave(run, 1) for x in (k, v))
        y = F.scaled_dot_product_attention(heads(q), k, v, is_causal=True)
        return y.permute(2, 0, 1, 3).flatten(2)

    forward = 4 * tokens**2 * model.heads * d / 2
    return Case(
        "attention", model.name, f"{tokens}x{model.heads}/{model.kv_heads}x{d}",
        lambda m: tuple(m.floats(tokens, 1, n, d) for n in (model.heads, model.kv_heads, model.kv_heads)),
        partial(attention.causal_attention, impl=impl), plain, (forward, 2.5 * forward), "flops",
        exact=exact, tolerance=1e-2,
    )  # fmt: skip


def _delta_rule_case(model: Model, decays: int, impl: Implementation) -> Case:
    """Return the case of the gated delta rule with as many decays of a head: 1, or one for each channel."""
    tokens = model.tokens
    heads = model.heads
    d = model.head_dim

    def make(m: Maker) -> tuple[Any, ...]:
        q, k = ((m.floats(tokens, 1, heads, d, grad=False) * d**-0.5).requires_grad_() for _ in range(2))
        g = -m.floats(tokens, 1, heads, decays, dtype=torch.float32, grad=False).abs() / 8
        beta = m.floats(tokens, 1, heads, dtype=torch.float32, grad=False).sigmoid()
        return q, k, m.floats(tokens, 1, heads, d), g.requires_grad_(), beta.requires_grad_()

    # Of a token: pairs in its chunk of 64, twice the scores and twice what they weigh, and three products with a state.
    flops = 2 * tokens * heads * (4 * d * 65 / 2 + 3 * d * d)
    return Case(
        "delta rule" if decays == 1 else "delta rule of channels", model.name, f"{tokens}x{heads}x{d}", make,
        partial(delta_rule, impl=impl), delta_rule, (flops, 2 * flops), "flops", tolerance=1.5e-2,
    )  # fmt: skip


def _short_conv_case(model: Model, impl: Implementation) -> Case:
    """Return the case of the short convolution of width 4 over as many channels as queries, keys and values have."""
    tokens = model.tokens
    channels = 3 * model.heads * model.head_dim

    def make(m: Maker) -> tuple[Any, ...]:
        return m.floats(tokens, 1, channels), m.floats(channels, 1, 4)

    return Case(
        "short convolution", model.name, f"{tokens}x{channels}", make, partial(short_conv, impl=impl),
        peers.short_conv, (4 * tokens * channels, 6 * tokens * channels), exact=short_conv,
    )  # fmt: skip


def _weight_gradient_case(model: Model) -> Case:
    """Return the case of the weight gradient of the MLP's down projection, added to an fp32 buffer."""
    tokens = model.tokens
    rows = model.hidden
    columns = model.mlp

    def make(m: Maker) -> tuple[Any, ...]:
        main_grad = m.floats(rows, columns, dtype=torch.float32, grad=False)
        return main_grad, m.floats(tokens, rows, grad=False), m.floats(tokens, columns, grad=False)

    def ours(main_grad: Tensor, grad: Tensor, x: Tensor) -> Tensor:
        TorchProducts().add_weight_gradient(main_grad, grad, x)
        return main_grad

    return Case(
        "weight gradient", model.name, f"{rows}x{tokens}x{columns}", make, ours,
        lambda main_grad, grad, x: main_grad.add_(grad.t() @ x), (2 * tokens * rows * columns, 0), "flops",
        directions=("forward",),
        tolerance=1e-3,  # tensor cores do not add quite in fp32
    )  # fmt: skip


def _linear_cross_entropy_case(model: Model, impl: Implementation) -> Case:
    """Gradients may be computed in either direction, so only both together compare."""
    tokens = model.tokens
    hidden = model.hidden
    vocab = model.vocab
    tp = context.single().tp

    def make(m: Maker) -> tuple[Any, ...]:
        weight = (m.floats(vocab, hidden, grad=False) * hidden**-0.5).requires_grad_()
        weight.main_grad = MainGradView(torch.zeros_like(weight, dtype=torch.float32), lambda: None)  # as in training
        return m.floats(tokens, hidden), weight, m.ids(tokens, below=vocab)

    def ours(x_2d: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x_2d[:, None], weight, targets[:, None], vocab, 0, tp, impl=impl).sum()

    flops = 2 * tokens * hidden * vocab
    return Case(
        "linear cross entropy", model.name, f"{tokens}x{hidden}x{vocab}", make, ours, peers.linear_cross_entropy,
        (flops, 2 * flops), "flops", ("both",), tolerance=1e-2,
    )  # fmt: skip
