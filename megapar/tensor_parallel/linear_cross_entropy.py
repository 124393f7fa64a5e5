"""Output layer and cross entropy together, over chunks of tokens. Neither pass holds all logits at once.

Forward keeps statistics of each token. Backward computes the logits of each chunk again and turns them into their
gradient in place. This takes 8 T h v operations for T tokens instead of 6. Shapes: s sequence, b micro-batch, h hidden,
v this rank's rows of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megapar_kernels.dispatch import Implementation, main_grad_of
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.linear.converted_weight import ConvertedWeight
from megapar.linear.function import InputRegion
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.tensor_parallel.cross_entropy import PLAIN_LOGITS, CrossEntropy, LogitRule
from megapar.tensor_parallel.regions import input_region


def _chunks(ctx: Any, x_2d: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield (range of rows, their logits in the weight's dtype). The next range's overwrite those of the last.

    There is at least one range, so callers can concatenate results. It is empty if there are no rows.
    """
    rows = x_2d.shape[0]
    converted = ctx.converted.get(weight, ctx.products)
    memory = weight.new_empty(min(rows, ctx.chunk_rows), weight.shape[0])
    for first in range(0, max(rows, 1), ctx.chunk_rows):
        chunk = slice(first, min(first + ctx.chunk_rows, rows))
        logits = ctx.products.forward_into(memory[: chunk.stop - first], x_2d[chunk], converted)
        if bias is not None:
            logits += bias
        yield chunk, ctx.rule.apply_(logits)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        entropy: CrossEntropy,
        rule: LogitRule,
        region: InputRegion,
        products: MatrixProducts,
        chunk_rows: int,
    ) -> Tensor:
        ctx.entropy = entropy
        ctx.rule = rule
        ctx.region = region
        ctx.products = products
        ctx.chunk_rows = chunk_rows
        # Read here, not in backward: under activation checkpointing the tensor that backward unpacks has no attributes.
        ctx.converted = ConvertedWeight.of(weight)
        ctx.main_grad = main_grad_of(weight)
        x = products.convert_input(x)
        full = region.enter(x)
        chunks = _chunks(ctx, full.reshape(-1, full.shape[-1]), weight, bias)
        statistics = [entropy.statistics(logits, target[rows]) for rows, logits in chunks]
        loss, highest, exp_sum = entropy.losses(torch.cat(statistics, dim=1))
        ctx.save_for_backward(x, weight, bias, target, highest, exp_sum)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target, highest, exp_sum = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x = ctx.region.enter(x)
        x_2d = x.reshape(-1, x.shape[-1])
        leaving = Pending()
        grad_x = weight.new_empty(*x.shape[:-1], weight.shape[1]) if needs_x else None
        # The gradients of chunks are summed in fp32. A 16-bit sum would round once for each chunk.
        # They are added here also if the backward pass defers weight gradients to W. W would need the gradients of
        # all logits: either they would all stay in memory until then, or W would compute the logits a third time.
        overwrite = True  # the first chunk writes
        if ctx.main_grad:
            total = ctx.main_grad.tensor
            overwrite = ctx.main_grad.is_stale
        elif needs_weight:
            total = torch.empty_like(weight, dtype=torch.float32)
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        rowwise = (target, highest, ctx.entropy.scale(highest, exp_sum, grad_loss), grad_loss)
        converted = ctx.converted.get(weight, ctx.products)
        for rows, logits in _chunks(ctx, x_2d, weight, bias):
            slope = ctx.rule.slope(logits) if ctx.rule.changes else None
            grad = ctx.entropy.gradient(logits, *(values[rows] for values in rowwise), inplace=True)
            if slope is not None:
                grad *= slope
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            if grad_x is not None:
                ctx.products.input_gradient_into(grad_x.view(-1, weight.shape[1])[rows], grad, converted)
                if rows.stop == x_2d.shape[0]:
                    # This communication runs during the weight gradient of the last chunk.
                    grad_x, leaving = ctx.region.leave_async(grad_x)
            if needs_weight:
                ctx.products.add_weight_gradient(total, grad, x_2d[rows], overwrite=overwrite)
                overwrite = False
        grad_weight = None
        if needs_weight and ctx.main_grad:
            ctx.main_grad.note_added()
        elif needs_weight:
            grad_weight = total.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        leaving.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None


def linear_cross_entropy(
    x_sbh: Tensor,
    weight: Tensor,
    targets_sb: Tensor,
    vocab_size: int,
    start: int,
    tp: Axis,
    *,
    sequence_parallel: bool = False,
    chunk_rows: int = 1024,
    z_loss: float = 0.0,
    impl: Implementation = "torch",
    products: MatrixProducts = TORCH_PRODUCTS,
    bias: Tensor | None = None,
    rule: LogitRule = PLAIN_LOGITS,
    hits_sb: Tensor | None = None,
) -> Tensor:
    """Loss of each token, fp32 [s, b]: `vocab_parallel_cross_entropy` of the logits x W^T + bias, by `rule`.

    The logits of at most `chunk_rows` tokens are held at a time. `x_sbh` is [s, b, h], the same on every rank, or with
    `sequence_parallel` this rank's [s/tp, b, h]. `weight` is this rank's [v, h], and `bias` its [v]. The first row is
    token id `start`. The other arguments mean what they mean there. Communicates one max and one sum of [s, b]
    statistics, and what a column-parallel layer communicates. The weight's gradient is summed in fp32: in its main
    gradient, as one addition, or else in a buffer of its own. Raises ValueError if `chunk_rows` is below 1.
    """
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}: it must be at least 1")
    region = input_region(tp, sequence_parallel)
    entropy = CrossEntropy.of(weight.shape[0], vocab_size, start, tp, z_loss, impl, hits_sb)
    target = targets_sb.reshape(-1)
    losses = _LinearCrossEntropy.apply(x_sbh, weight, bias, target, entropy, rule, region, products, chunk_rows)
    return losses.view(targets_sb.shape)
