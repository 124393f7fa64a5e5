"""Tensor parallelism as one writes it by hand in PyTorch, with an all-reduce through shared memory.

The cut is Megatron's (arXiv 1909.08053): column and row parallel matrices, embedding, head and cross entropy parallel
over the vocabulary. The all-reduce does the least to add two tensors on one host: each rank copies its tensor into a
slot, waits for the others, and adds all slots. Other cores must see a core's stores in their order: true of x86, not of
every processor.
"""

import tempfile
import time
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import Plain, Weights, build

_CACHE_LINE = 64  # bytes
_SPINS = 2000  # looks at the other rank's number before the core is offered to others


class SharedMemory:
    """All-reduce of fp32 tensors of up to `elements` elements among all ranks of one host."""

    def __init__(self, elements: int):
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.calls = 0
        slot = -(-4 * elements // _CACHE_LINE) * _CACHE_LINE
        size = self.world * (_CACHE_LINE + 2 * slot)
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            path = [file.name]
            dist.broadcast_object_list(path)
            memory = torch.from_file(path[0], shared=True, size=size, dtype=torch.uint8)
            dist.barrier()  # all have mapped it, so that it may lose its name
        numbers, slots = memory.split([self.world * _CACHE_LINE, self.world * 2 * slot])
        # How many tensors each rank has written, each number in a cache line of its own. New files are all zeros.
        self.written = numbers.view(torch.int64).view(self.world, -1)[:, 0].numpy()
        self.slots = slots.view(torch.float32).view(self.world, 2, -1)

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        """The sum over ranks, or the largest of each element, in place of `x`."""
        self.calls += 1
        # Two slots in turns. Nobody writes a slot again before all have read it: to write the call after the next, a
        # rank must have seen that the others have written the next one, and so have read this one.
        slots = [slot[self.calls % 2][: x.numel()].view(x.shape) for slot in self.slots]
        slots[self.rank].copy_(x)
        self.written[self.rank] = self.calls
        spins = 0
        while self.written.min() < self.calls:
            spins += 1
            if spins > _SPINS:
                time.sleep(0)
        combine = torch.maximum if largest else torch.add
        combine(slots[0], slots[1], out=x)
        for slot in slots[2:]:
            combine(x, slot, out=x)
        return x


class ReduceGradient(torch.autograd.Function):
    """Megatron's f: nothing in the forward pass, an all-reduce in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: SharedMemory) -> Tensor:
        ctx.memory = memory
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.memory.all_reduce(grads[0].contiguous()), None


class ReduceOutput(torch.autograd.Function):
    """Megatron's g: an all-reduce in the forward pass, nothing in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: SharedMemory) -> Tensor:
        ctx.mark_dirty(x)
        return memory.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def cut(linear: nn.Linear, dim: int) -> None:
    """Leave this rank's outputs (dim 0) or inputs (dim 1) of a matrix. With inputs cut, outputs of all ranks add up."""
    part = linear.weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    linear.weight = nn.Parameter(part.clone(memory_format=torch.contiguous_format))


def reduce_around(module: nn.Module, memory: SharedMemory, *, output: bool = True) -> None:
    """Make the input's gradient of a module with cut matrices whole, and its output unless it stays cut."""
    module.register_forward_pre_hook(lambda _, inputs: (ReduceGradient.apply(inputs[0], memory), *inputs[1:]))
    if output:
        module.register_forward_hook(lambda module, inputs, y: ReduceOutput.apply(y, memory))


class ParallelEmbedding(nn.Module):
    """The rows of some token ids. Other ids give zeros; the all-reduce adds another rank's row."""

    def __init__(self, whole: nn.Embedding, memory: SharedMemory):
        super().__init__()
        self.memory = memory
        self.weight = nn.Parameter(whole.weight.detach().chunk(memory.world)[memory.rank].clone())

    def forward(self, tokens_bs: Tensor) -> Tensor:
        rows_bs, elsewhere_bs = local_rows(tokens_bs, self.weight.shape[0], self.memory.rank)
        partial_bsh = F.embedding(rows_bs, self.weight).masked_fill(elsewhere_bs[..., None], 0.0)
        return cast(Tensor, ReduceOutput.apply(partial_bsh, self.memory))


def local_rows(ids: Tensor, count: int, rank: int) -> tuple[Tensor, Tensor]:
    """(rows, elsewhere): the places of the token ids among the `count` of this rank, and a mask of another rank's.

    Another rank's ids have row 0.
    """
    rows = ids - rank * count
    elsewhere = (rows < 0) | (rows >= count)
    return rows.masked_fill(elsewhere, 0), elsewhere


class ParallelCrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies of this rank's logits [n, v] and targets [n], any token ids."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, targets_n: Tensor, memory: SharedMemory) -> Tensor:
        exp_nv = logits_nv - memory.all_reduce(logits_nv.amax(1), largest=True)[:, None]
        rows_n, elsewhere_n = local_rows(targets_n, logits_nv.shape[1], memory.rank)
        target_n = exp_nv.gather(1, rows_n[:, None])[:, 0].masked_fill(elsewhere_n, 0.0)
        exp_nv.exp_()
        # One message for both sums.
        target_n, sum_n = memory.all_reduce(torch.stack([target_n, exp_nv.sum(1)]))
        ctx.save_for_backward(exp_nv.div_(sum_n[:, None]), rows_n, elsewhere_n)
        return (sum_n.log() - target_n).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        softmax_nv, rows_n, elsewhere_n = ctx.saved_tensors
        # The softmax, minus 1 at the target; it is saved for this alone, so it may become the gradient.
        softmax_nv.scatter_add_(1, rows_n[:, None], elsewhere_n[:, None].to(softmax_nv.dtype) - 1.0)
        return softmax_nv.mul_(grads[0]), None, None


class SharedMemoryTensorParallel(Plain):
    """Tensor parallelism by hand. The gradient norm alone, one number in a step, goes over gloo."""

    name = "shared memory TP"

    def is_split(self, name: str, param: Tensor) -> bool:
        """Only norms are whole on every rank."""
        return param.ndim > 1

    def build(self, weights: Weights) -> nn.Module:
        """This rank's part of the model."""
        train = self.config.train
        # Hidden states are the largest message; the cross entropy sends two numbers for each token.
        self.memory = SharedMemory(train.micro_batch_size * train.seq_length * max(self.config.model.hidden_size, 2))
        model: Any = build(self.config, weights, self.device)
        model.embedding = ParallelEmbedding(model.embedding, self.memory)
        for layer in model.layers.values():
            for matrix in (layer.attention.q, layer.attention.k, layer.attention.v, layer.mlp.gate, layer.mlp.up):
                cut(matrix, 0)
            for matrix in (layer.attention.o, layer.mlp.down):
                cut(matrix, 1)
            reduce_around(layer.attention, self.memory)
            reduce_around(layer.mlp, self.memory)
        cut(model.head, 0)
        reduce_around(model.head, self.memory, output=False)  # the cross entropy takes this rank's logits
        return cast(nn.Module, model)

    def loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        logits_bsv = self.model(tokens_bs)
        return cast(Tensor, ParallelCrossEntropy.apply(logits_bsv.flatten(0, 1), targets_bs.flatten(), self.memory))
