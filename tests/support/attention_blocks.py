"""What tests of attention in blocks share: documents, one rank's attention, and the operations that ran."""

from typing import Any

import torch
from hypothesis import strategies as st
from megapar_kernels.backend import Kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.comm.axis import Axis
from megapar.context_parallel import deal
from megapar.context_parallel.attention import CoreAttention
from megapar.declare.batch import MicroBatch

LENGTH, SAMPLES, WIDTH = 24, 2, 6
PACKED = (0, 1, 4, 11, 24, 29, 47, 48)  # starts of documents of two samples


@st.composite
def packed(draw: st.DrawFn, samples: int = 2) -> tuple[int, int, tuple[int, ...]]:
    """cp, the length of a sample, and `MicroBatch.starts` of samples of it."""
    cp = draw(st.integers(1, 5))
    length = 2 * cp * draw(st.integers(1, 4))
    starts: set[int] = set()
    for sample in range(samples):
        inner = draw(st.sets(st.integers(1, length - 1), max_size=5))
        starts |= {sample * length} | {sample * length + position for position in inner}
    return cp, length, (*sorted(starts), samples * length)


def brute_mask(length: int, starts: tuple[int, ...], queries: list[int], keys: list[int]) -> Tensor:
    """[samples, queries, keys]: whether a query attends a key."""
    samples = starts[-1] // length
    document = torch.searchsorted(torch.tensor(starts), torch.arange(samples * length), right=True).view(-1, length)
    causal = torch.tensor(queries)[:, None] >= torch.tensor(keys)[None, :]
    return causal & (document[:, queries, None] == document[:, None, keys])


class Calls(TorchDispatchMode):
    """The names of the operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def of(self, part: str) -> list[str]:
        return [name for name in self.names if part in name]


def tensors(heads: int, kv_heads: int, v_width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads + kv_heads)
    shapes = [(heads, WIDTH), (kv_heads, WIDTH), (kv_heads, v_width), (heads, v_width)]
    return [torch.randn(LENGTH, SAMPLES, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attend(
    cp: Axis, form: Any, heads: int, kv_heads: int, v_width: int, starts: tuple[int, ...] | None, kernels: Kernels
) -> tuple[list[Tensor], list[str]]:
    """This rank's output and gradients, and the operations of attention that ran."""
    held = torch.tensor(deal.positions(LENGTH, cp.size, cp.rank))
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    bounds = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    batch = MicroBatch.of_samples(tokens, tokens, torch.ones(SAMPLES, LENGTH), torch.arange(SAMPLES), bounds)
    kv_of = [head * kv_heads // heads for head in range(heads)]
    core = CoreAttention(cp, form, kv_of, kernels, torch.device("cpu"), WIDTH, v_width)
    *qkv, grad = (x[held] for x in tensors(heads, kv_heads, v_width))
    leaves = [x.requires_grad_() for x in qkv]
    with Calls() as calls:
        y = core(*leaves, batch.columns(held), None)
        gradients = torch.autograd.grad(y, leaves, grad.flatten(2))
    return [y.detach(), *gradients], calls.of("_attention")
